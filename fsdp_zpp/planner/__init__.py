"""Planner: the memory, traffic and time of each of the 14 strategies, and which one to choose.

    cluster ── model_size ── memory ── step_time ── choice ── report ── plan ── cli

The formulas follow what this package sends and keeps; bytes on the wire are exact. A docstring says so where a formula
is PaRO's (arXiv 2310.06003). Only measurements in ``cluster`` communicate, and nothing loops over ranks.
"""
