"""The study of Muon beside AdamW: on four processes as two nodes of two, the bytes that it counts, and its table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness.benchmarks import load, tiny_study
from harness.launch import launch

muon_table = load("loss", "muon_table")
dtensor_collectives = load("loss", "dtensor_collectives")
EXACT = ("full_shard", "IGG", "III")
HIDDEN, INTERMEDIATE = 32, 64
MATRICES = HIDDEN * 3 * HIDDEN + HIDDEN * HIDDEN + 2 * HIDDEN * INTERMEDIATE
"""Values in the matrices of the one layer of a tiny study's model."""


def test_bytes_and_losses_of_muon_on_two_nodes_of_two(tmp_path: Path) -> None:
    command = ("muon", "--worker", *tiny_study(), "--tokens", "2e3", "--output", tmp_path)
    done = launch(4, "benchmarks/loss/run.py", *command, on_cpu=True)
    assert done.returncode == 0, done.stdout + done.stderr
    results = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    rows = {row["name"]: row for result in results for row in result["rows"]}
    assert rows.keys() == set(muon_table.NAMES)
    for optimizer in muon_table.OPTIMIZERS:
        unsharded = rows[f"{optimizer}:unsharded"]
        assert unsharded["validation"][-1][1] < unsharded["validation"][0][1]
        for sharding in EXACT:  # Newton-Schulz iterates in bf16
            assert losses_of(rows[f"{optimizer}:{sharding}"]) == pytest.approx(losses_of(unsharded), rel=1e-3)
    assert losses_of(rows["muon:unsharded"]) != pytest.approx(losses_of(rows["adamw:unsharded"]), rel=1e-3)
    gathered = 4 * MATRICES
    for sharding in muon_table.SHARDINGS:
        assert rows[f"adamw:{sharding}"]["sent_by_optimizer"] == {"inter": 0, "intra": 0}
        expected = {"inter": gathered / 4, "intra": gathered / 2}  # a quarter of the matrices to the other node
        if sharding in ("III", "zeropp-III"):
            expected = {"inter": 0, "intra": gathered / 2}
        if sharding == "unsharded":
            expected = {"inter": 0, "intra": 0}
        assert rows[f"muon:{sharding}"]["sent_by_optimizer"] == expected
        # The optimizer has no part in what the model sends.
        assert rows[f"muon:{sharding}"]["sent_by_model"] == rows[f"adamw:{sharding}"]["sent_by_model"]
    sent = {sharding: rows[f"muon:{sharding}"]["sent_by_model"] for sharding in muon_table.SHARDINGS[1:]}
    assert sent["zeropp"]["inter"] < sent["IGG"]["inter"] < sent["full_shard"]["inter"]
    assert sent["zeropp-III"]["inter"] < sent["III"]["inter"]


def losses_of(row: dict[str, Any]) -> list[float]:
    """The validation losses of a run."""
    return [loss for _, loss in row["validation"]]


def test_an_unknown_configuration_is_refused() -> None:
    refused = launch(1, "benchmarks/loss/run.py", "muon", "--configs", "muon:IGG,lion:IGG", on_cpu=True)
    assert refused.returncode == 2
    assert "unknown configurations ['lion:IGG']" in refused.stderr


@pytest.mark.parametrize(
    ("name", "inter", "intra"),
    [
        # 8 bytes of a rank go to 3 others, two of which are on the other node: once there, then on.
        ("all_gather_into_tensor", 8, 16),
        ("reduce_scatter_tensor", 2, 4),
        ("all_reduce", 4, 8),
    ],
)
def test_bytes_of_collectives(name: str, inter: float, intra: float) -> None:
    assert dtensor_collectives.Collective(name, 8, 2, 4).sent == {"inter": inter, "intra": intra}


def test_collectives_of_unknown_bytes_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="the bytes of broadcast are unknown"):
        _ = dtensor_collectives.Collective("broadcast", 8, 2, 4).sent


def record(name: str, seed: int, loss: float, inter: float, model: dict[str, int] | None) -> dict[str, Any]:
    """What a run leaves, as far as the table goes."""
    row = {"name": name, "seed": seed, "validation": [[0, 5.0], [1000, loss]], "sent_by_model": model}
    return {"rows": [row | {"sent_by_optimizer": {"inter": inter, "intra": 2e6}}]}


def test_gaps_are_to_the_same_optimizer_without_sharding() -> None:
    model = {"inter": 3_000_000, "intra": 1}
    records = [
        record("adamw:unsharded", 0, 2.0, 0, None),
        record("muon:unsharded", 0, 1.0, 0, None),
        record("muon:III", 0, 1.1, 0, model),
        record("muon:IGG", 0, 1.2, 1.5e6, model),
    ]
    assert muon_table.table(records).splitlines()[2:] == [
        "| AdamW | unsharded | 1 | 2.0000 |  |  | 0 | 2.00 MB |",
        "| Muon | unsharded | 1 | 1.0000 |  |  | 0 | 2.00 MB |",
        "| Muon | IGG | 1 | 1.2000 | +20.00 | 3.00 MB | 1.50 MB | 2.00 MB |",
        "| Muon | III | 1 | 1.1000 | +10.00 | 3.00 MB | 0 | 2.00 MB |",
    ]
