"""Strategies as users write them, and as they are resolved on a layout of ranks."""
