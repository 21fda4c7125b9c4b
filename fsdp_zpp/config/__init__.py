"""Configuration by users: a strategy, the layout of the ranks, and the strategy as resolved on a layout."""
