"""Configuration by users: a strategy, the layout of the ranks, and what the one comes to on the other."""
