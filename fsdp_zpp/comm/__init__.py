"""Two-hop collectives, their state between steps, and agreement between ranks; adapters connect them to FSDP."""
