"""``python -m fsdp_zpp bench``: strategies measured on the user's own machines and model, and a recommendation.

    results ── contenders ── run

The presets and the tolerance for ties are the planner's. ``benchmarks/step`` measures with these modules, so its
figures mean the same as this command's.
"""
