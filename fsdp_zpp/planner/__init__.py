"""Planner: the memory, traffic and time of each of the 14 strategies, and which one to choose.

    model_size ─┐
    config ─────┴─ volume · memory ── exchange, estimate ── report ── plan ── cli, arguments, chart
                                                                        └──── running_job, bandwidth: choose_strategy

The formulas follow what this package sends and keeps; bytes on the wire are exact. A docstring says so where a formula
is PaRO's (arXiv 2310.06003). Only ``bandwidth`` and ``running_job`` communicate, and nothing loops over ranks.
"""
