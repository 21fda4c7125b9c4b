"""``python -m fsdp_zpp bench``: strategies measured on the user's own machines and model, and a recommendation.

    results ── contenders ── run

The command has the planner's presets and its tolerance for ties. ``benchmarks/step`` measures with these modules, too,
so its figures compare with this command's.
"""
