"""``python -m fsdp_zpp bench``: strategies measured on the user's own machines and model, and a recommendation.

    results ── contenders ── run

The planner says which contenders there are, and which are as fast as another; ``benchmarks/step`` measures with the
same modules, so its figures and those of this command mean the same.
"""
