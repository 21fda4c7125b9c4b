"""Two-hop collectives, what they keep from step to step, and what ranks must agree on; without modules or FSDP."""
