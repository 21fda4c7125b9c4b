"""``python -m fsdp_zpp bench``: strategies measured on the user's own machines and model, and a recommendation.

    task ── models, materialize ── torch_fsdp ── timing, overlap ── measuring ──┐
    contenders ── candidates, fitting ── links ─────────────────────────────────┴── run ── cli, arguments
    columns, chart, recommendation, manifest, result_file, progress ────────────┘

``benchmarks/step`` measures with the same modules, so its figures and those of this command mean the same.
"""
