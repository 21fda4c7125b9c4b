"""Planner: the memory, traffic and time of each of the 14 strategies, and which one to choose.

    model_size ─┬─ axes, parts ── volume · memory ── exchange, estimate ── report ── plan ── cli, arguments, chart
    config ─────┘                                                                     └──── running_job, bandwidth

The formulas follow what this package sends and keeps; bytes on the wire are exact. A docstring says so where a formula
is PaRO's (arXiv 2310.06003). Only ``bandwidth`` and ``running_job`` (``choose_strategy``) communicate, and nothing
loops over ranks.
"""
