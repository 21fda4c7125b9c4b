"""Planner: the memory, traffic and time of each strategy, and which one to choose.

    cluster ── model_size ── memory ── step_time ── choice ── report ── plan ── cli

The formulas count what this package sends and keeps. Docstrings say which of them are PaRO's (arXiv 2310.06003).
Only the measurements in ``cluster`` communicate. The time to make a plan does not grow with the number of ranks.
"""
