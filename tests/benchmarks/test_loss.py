"""The studies of the loss: tiny runs of each, as nodes of a few processes, their names, their tables and figure."""

from __future__ import annotations

import json
import math
import re
import tempfile
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest
import torch
from harness.benchmarks import load, results
from harness.launch import ROOT, launch
from top_k_codec import TopK

from fsdp_zpp import Codec, Int4, LocalSteps, LoCo

configurations = load("loss", "configurations")
tables = load("loss", "tables")
TINY = "--gpus-per-node 2 --hidden 32 --layers 1 --sequence 64 --batch 4 --lr 1e-2".split()
Result = dict[str, Any]


def run(ranks: int, study: str, *options: str | Path) -> CompletedProcess[str]:
    """Run a study, which must not fail."""
    done = launch(ranks, "benchmarks/loss/run.py", study, *options, on_cpu=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def tiny_study() -> list[str]:
    """Return options with which a study trains a tiny model in a few steps on the CPU, for one seed."""
    folder = Path(tempfile.gettempdir(), "fsdp_zpp-test-text")  # read once, it stays in the temporary folder
    folder.mkdir(exist_ok=True)
    for number in range(200):  # of which a few are held out
        (folder / f"{number}.txt").write_text(f"{number} and {number} makes {2 * number}.\n" * 9)
    model = "--sequence 64 --hidden 32 --intermediate 64 --layers 1 --heads 2"
    work = "--device cpu --tokens 1e3 --batch 1 --validation-tokens 1e3 --seeds 0"
    return [*model.split(), *work.split(), "--text", str(folder)]


def results_in(folder: Path) -> dict[str, Result]:
    return {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def losses_of(row: dict[str, Any]) -> list[float]:
    return [loss for _, loss in row["validation"]]


@pytest.mark.parametrize(
    ("study", "options", "message"),
    [
        ("compare", "--strategy full_shard", "--strategy full_shard is what others are compared with"),
        ("compare", "--strategy zeropp --weights int9", "--weights: 'int9' is not a codec"),
        ("compare", "--resume anywhere", "--resume and --stop-at are for one run"),
        ("local-steps", "--configs local32:int5", "'local32:int5' is unknown"),
        ("local-steps", "--configs local32:int4:later3", "changes 'later'"),
        ("muon", "--configs muon:IGG,lion:IGG", "unknown configurations ['lion:IGG']"),
        ("diloco-scaling", "--nodes 1 --configs local30:none", "local steps are for several; got 'local30:none'"),
    ],
)
def test_unknown_options_are_refused(
    study: str, options: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")  # as run.py has it
    module = load("loss", study.replace("-", "_"))
    with pytest.raises(SystemExit) as exited:
        module.main(options.split())
    assert exited.value.code == 2
    assert message in capsys.readouterr().err


# ---- codecs of the study


def levels_of(block: np.ndarray, codec: Any) -> np.ndarray:
    """Return the values that a block decodes to, in fp64."""
    if not np.isfinite(block).all():
        return np.full_like(block, np.nan)
    levels, scale = np.arange(-codec.qmax, codec.qmax + 1), abs(block).max() / codec.qmax
    return scale * levels[abs(block[:, None] - scale * levels).argmin(axis=1)]


@pytest.mark.parametrize("codec", [configurations.Bytewise(32, qmax=qmax) for qmax in (1, 7)], ids=str)
@pytest.mark.parametrize(("rows", "cols", "numel"), [(1, 1, 1), (2, 3, 70), (3, 1, 64), (2, 2, 301)])
def test_values_go_to_the_nearest_levels_of_their_block(codec: Codec, rows: int, cols: int, numel: int) -> None:
    grid = torch.randn(2, rows, cols, numel, generator=torch.Generator().manual_seed(0)) ** 3
    grid[0, 0, 0, :32] = 0
    grid[1, -1, -1, -1] = -torch.inf
    payload = torch.stack([codec.encode(values.flatten(), rows, cols) for values in grid])
    assert payload.shape == (2, rows * cols, codec.nbytes(numel))
    chunks = grid.transpose(1, 2).reshape(-1, numel).double().numpy()
    expected = [[levels_of(block, codec) for block in np.split(c, range(32, numel, 32))] for c in chunks]
    expected = np.stack([np.concatenate(blocks) for blocks in expected]).reshape(2, -1)
    for one, values in zip(payload, expected, strict=True):
        out = torch.empty(rows * cols * numel)
        codec.decode(one, out, 1, rows * cols)
        np.testing.assert_allclose(out, values, rtol=1e-5)
    np.testing.assert_allclose(codec.sums(payload, numel, 0.5), expected.mean(axis=0), rtol=1e-5, atol=1e-6)
    # Encoded and decoded, the grid is transposed twice.
    codec.decode_sum(payload, out, cols, rows, 0.5)
    there = expected.mean(axis=0).reshape(cols, rows, numel).swapaxes(0, 1).flatten()
    np.testing.assert_allclose(out, there, rtol=1e-5, atol=1e-6)


# ---- compare, and convergence


def compare(folder: Path, *options: str) -> tuple[list[dict[str, Any]], str]:
    """The rows of a comparison on a little text, and what it prints."""
    text = folder / "text.txt"
    text.write_text("".join(f"{a} plus {b} makes {a + b}.\n" for a in range(60) for b in range(60)))
    done = run(4, "compare", "--data", text, "--output", folder, *TINY, *options)
    result = json.loads((folder / "result.json").read_text())
    assert result["manifest"]["command"].startswith("torchrun --nproc-per-node 4 benchmarks/loss/run.py compare --data")
    return result["rows"], done.stdout


def test_compares_strategies_with_full_shard(tmp_path: Path) -> None:
    rows, printed = compare(tmp_path, "--steps", "4", "--levels", "IGG", "NNG")
    assert [row["label"] for row in rows] == ["full_shard", "zeropp IGG", "zeropp NNG"]
    full_shard, *others = rows
    assert others[0]["losses"] == others[1]["losses"]  # the same arithmetic, if the optimizer's scope is the same
    for row in rows:
        assert len(row["losses"]) == 4
        assert row["losses"][-1] < 0.95 * row["losses"][0]
        assert row["label"] in printed
        assert f"{row['validation'][-1][1]:.4f}" in printed
    for row in others:
        assert row["validation"][-1][1] == pytest.approx(full_shard["validation"][-1][1], rel=0.05)
        assert 0 < row["sent_per_step"]["inter"] < full_shard["sent_per_step"]["inter"] / 2
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_full_precision_sends_what_full_shard_is_said_to_send(tmp_path: Path) -> None:
    # FULL_SHARD's no_sync keeps gradients whole on each rank, which is the scope N.
    (full_shard, ours), _ = compare(tmp_path, "--steps", "2", "--micro-batches", "2", "--strategy", "GNG", "--fsdp2")
    assert ours["sent_per_step"] == full_shard["sent_per_step"]
    assert ours["losses"] == pytest.approx(full_shard["losses"], rel=1e-4)


def test_convergence_starts_from_the_same_weights(tmp_path: Path) -> None:
    names = "full_shard,int2,w8:int3,w8:int4+loco"
    run(4, "convergence", "--worker", *tiny_study(), "--output", tmp_path, "--configs", names, "--exact-end", "0.5")
    results = results_in(tmp_path)
    assert results.keys() == {f"{name}-seed0.json" for name in ("full_shard", "int2", "w8-int3", "w8-int4+loco")}
    full_shard, *coarse = (results[f"{name}-seed0.json"]["rows"][0] for name in ("full_shard", "int2", "w8-int3"))
    assert full_shard["exact_end"] == full_shard["validation"][-1][1]  # the same steps from the same state
    assert full_shard["validation"][0] == coarse[0]["validation"][0]
    for row in coarse:
        assert full_shard["validation"][-1] != row["validation"][-1]
        assert row["exact_end"] not in (row["validation"][-1][1], full_shard["exact_end"])


def test_adapters_start_from_the_base_and_its_codes(tmp_path: Path) -> None:
    layout = ["--worker", "--simulate", "--nodes", "2", "--gpus-per-node", "1", "--job", "0", "--jobs", "1"]
    layout += [*tiny_study(), "--hidden", "128"]
    train_base = ["convergence", *layout, "--configs", "full_shard", "--output"]
    for options in ([], ["--keep-weights"]):  # the finished run is repeated for its weights
        run(1, *train_base, str(tmp_path / "base"), *options)
    run(1, *train_base, str(tmp_path / "other"), "--keep-weights", "--lr", "1e-4")
    run(1, "lora", *layout, "--base", str(tmp_path / "base"), "--output", str(tmp_path / "lora"))
    for base, message in (("other", "started from another base; use another --output"), ("none", "--keep-weights")):
        where = ["--base", str(tmp_path / base), "--output", str(tmp_path / "lora")]
        refused = launch(1, "benchmarks/loss/run.py", "lora", *layout, *where, on_cpu=True)
        assert refused.returncode == 1
        assert message in refused.stderr
    (base,) = results_in(tmp_path / "base").values()
    rows = {result["rows"][0]["name"]: result["rows"][0] for result in results_in(tmp_path / "lora").values()}
    # Adapters add nothing yet.
    assert losses_of(rows["bf16"])[0] == pytest.approx(losses_of(base["rows"][0])[-1], rel=1e-6)
    starts = [losses_of(rows[name])[0] for name in ("bf16", "int8", "nf4")]
    assert len(set(starts)) == 3
    assert starts[1:] == pytest.approx([starts[0]] * 2, rel=1e-2)
    assert all(losses_of(row)[-1] < losses_of(row)[0] for row in rows.values())


# ---- local steps

KEPT = LoCo(beta=0, decay=0.95, reset_every=0)
AVERAGED: dict[str, Any] = {"outer_lr": 1, "outer_momentum": 0}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("local32:int4+loco", LocalSteps(32, codec=Int4(128), error_feedback=LoCo(beta=0.8), outer_momentum=0.9)),
        ("local32:int4:overlap1:mix0.5", LocalSteps(32, codec=Int4(128), overlap=1, mix=0.5, outer_momentum=0.9)),
        ("local32:int4:outer0.5:momentum0.8", LocalSteps(32, codec=Int4(128), outer_lr=0.5, outer_momentum=0.8)),
        ("local8:none:start256", LocalSteps(8, codec=None, start=256, outer_momentum=0.9)),
        ("local32:topk+loco", LocalSteps(32, codec=TopK(), error_feedback=KEPT, **AVERAGED)),
        ("local32:int4:outer1:momentum0", LocalSteps(32, codec=Int4(128), **AVERAGED)),
    ],
)
def test_names_say_how_nodes_exchange(name: str, meant: LocalSteps) -> None:
    assert configurations.local_steps(name) == meant
    assert configurations.sharding(name, 1).local_steps == meant


def test_all_names_of_the_study_are_of_strategies() -> None:
    assert all(configurations.sharding(name, 1) for name in tables.LOCAL_NAMES)


def test_trains_on_two_nodes_what_is_not_there_yet(tmp_path: Path) -> None:
    options = [*tiny_study(), "--validate-every", "4", "--output", str(tmp_path), "--lr", "5e-3"]
    for names in ("full_shard@1e-2", "full_shard@1e-2,full_shard,local3:int4+loco,local3:none:at-once:overlap1"):
        done = run(2, "local-steps", "--worker", *options, "--configs", names)
    assert done.stdout.startswith("2x1-full_shard-lr0.005, seed 0: ")
    results = results_in(tmp_path)
    assert len(results) == 4
    assert results["2x1-full_shard-lr0.01-seed0.json"]["arguments"]["lr"] == 1e-2
    assert "2x1-local3-int4+loco-lr0.005-seed0.json" in results
    rows = [result["rows"][0] for result in results.values()]
    assert len({tuple(row["validation"][0]) for row in rows}) == 1  # the same weights
    for row in rows:
        losses = losses_of(row)
        assert len(losses) == 3
        assert losses[-1] < losses[0]
        # A last exchange changes what nodes agree on, and FULL_SHARD has none.
        assert (row["before_last_exchange"] is None) == (row["name"] == "full_shard")
        assert row["before_last_exchange"] != losses[-1]
    # After four of eight steps nodes agree on the exchange after the third.
    at_once = results["2x1-local3-none-at-once-overlap1-lr0.005-seed0.json"]["rows"][0]
    assert at_once["validation"][1][1] != at_once["validation"][0][1]


def record(name: str, lr: float, seed: int, loss: float, nodes: int = 2) -> Result:
    """The result of a run, as far as tables and figures go."""
    row = {"name": name, "seed": seed, "parameters": 25.7e6, "validation": [[0, 5.0], [1000, loss]]}
    return {"arguments": {"nodes": nodes, "gpus_per_node": 1, "lr": lr}, "rows": [row]}


RECORDS = [
    record("full_shard", 1e-3, 0, 1.0),
    record("full_shard", 2e-3, 0, 0.9),
    record("full_shard", 2e-3, 1, 0.8),
    record("local32:int4", 1e-3, 0, 0.99),
    record("local8:int4", 1e-3, 0, 0.909),
    record("local8:int4", 1e-3, 1, 0.816),
    record("local8:int4", 2e-3, 0, math.nan),
    record("full_shard", 2e-3, 0, 2.0, nodes=4),
    record("local32:int4+loco:overlap1", 1e-3, 0, 2.02, nodes=4),
    record("local32:int4+loco", 1e-3, 0, 2.01, nodes=4),
]


def test_gaps_are_between_the_best_learning_rates_on_as_many_nodes_and_the_same_seeds() -> None:
    assert tables.local_steps(RECORDS).splitlines()[2:] == [
        "| 2 | full_shard | 0.002 | 2 | 0.8500 ± 0.0500 |  |",
        "| 2 | local8:int4 | 0.001 | 2 | 0.8625 ± 0.0465 | +1.50 ± 0.50 |",
        "| 2 | local32:int4 | 0.001 | 1 | 0.9900 | +10.00 |",
        "| 4 | full_shard | 0.002 | 1 | 2.0000 |  |",
        "| 4 | local32:int4+loco | 0.001 | 1 | 2.0100 | +0.50 |",
        "| 4 | local32:int4+loco:overlap1 | 0.001 | 1 | 2.0200 | +1.00 |",
    ]
    assert tables.learning_rates(RECORDS).splitlines() == [
        "| nodes | configuration | seeds | lr 0.001 | lr 0.002 |",
        "|---|---|---|---|---|",
        "| 2 | full_shard | 0 | 1.0000 | **0.9000** |",
        "| 2 | local8:int4 | 0 | **0.9090** | nan |",
    ]
    # Without a common seed, the learning rate with most seeds counts.
    others = (record("full_shard", 2e-3, seed, 2.0) for seed in (1, 2))
    assert tables.TunedRuns([record("full_shard", 1e-3, 0, 1.0), *others]).rates == {"full_shard": 2e-3}
    other = record("local32:int4", 1e-3, 0, 0.9)
    other["arguments"]["text"] = "another"
    with pytest.raises(ValueError, match=r"different settings can't be compared: \[\('text', 'another'\)\]"):
        tables.local_steps([*RECORDS, other])


# ---- gaps with their standard errors


def test_gaps_are_to_the_same_seeds_of_a_reference_that_was_trained_on_the_fewest_nodes() -> None:
    results = [record("full_shard", 1e-3, seed, loss) for seed, loss in enumerate((1.0, 2.0, 3.0))]
    results += [record("d4:int4", 1e-3, seed, loss) for seed, loss in enumerate((1.01, 2.06))]
    results += [record("d4:int4", 1e-3, 0, 1.05, nodes=8)]
    size = "25.7M, 0.001M"
    assert tables.gap_rows(results, {"d4:int4": "deltas", "int2": "not trained"}) == [
        (size, "2x1", "deltas", "2", "+2.00 ± 1.00"),
        (size, "8x1", "deltas", "1", "+5.00"),
    ]
    drawn = load("loss", "figures").error_bars_svg([(results, {"d4:int4": "Deltas"})])
    texts = "".join(re.findall(r"<text[^>]*>([^<]*)</text>", drawn))
    assert "Deltas, 2 nodes:+2.00 ± 1.00" in texts
    assert texts.count("±") == 1  # one seed has no error
    assert "Deltas, 8 nodes:+5.00" in texts


def test_weights_of_shards_have_the_losses_of_decoded_ones() -> None:
    """The page gives one loss for both."""
    rows = [row for study, _, result in results() if "loss" in study.parts for row in result["rows"]]
    shards = {row["at_shards"] / row["validation"][-1][1] - 1 for row in rows if row.get("at_shards")}
    assert len(shards) > 30
    assert max(map(abs, shards)) < 0.0002


# ---- entropy of what is sent


@pytest.mark.parametrize(
    ("counts", "bits"), [([8, 4, 2, 2], 1.75), ([5, 0, 5], 1.0), ([3], 0.0), ([0.3369, 0.1631, 0.1631, 0.3369], 1.911)]
)
def test_entropy_of_known_distributions(counts: list[float], bits: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")  # as run.py has it
    assert load("loss", "entropy").entropy(torch.tensor(counts)) == pytest.approx(bits, abs=1e-3)


def test_codes_of_normal_values_have_the_entropy_of_theory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")  # as run.py has it
    study = load("loss", "encoding_errors")
    monkeypatch.setattr(study, "SAMPLES", 2**20)
    study.gaussian_codes(["--output", str(tmp_path)])
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert [row["bits_a_code"] for row in rows] == pytest.approx([row["theory"] for row in rows], abs=0.01)
    assert f"{rows[0]['theory']:.3f}" in capsys.readouterr().out


def test_payloads_are_all_that_is_sent_and_have_less_entropy_than_bits(tmp_path: Path) -> None:
    run(1, "entropy", "--worker", *tiny_study(), "--output", tmp_path)  # raises if bytes were sent that it misses
    results = results_in(tmp_path)
    sent = {name: [each["what"] for each in result["rows"][0]["payloads"]] for name, result in results.items()}
    assert sent["entropy-w8-int4-seed0.json"] == ["gradients", "weights"] * 3
    assert sent["entropy-d4-int4-seed0.json"] == sent["entropy-d2-int4-seed0.json"] == ["deltas", "gradients"] * 3
    for payload in (each for result in results.values() for each in result["rows"][0]["payloads"]):
        bits = int(payload["codec"].removeprefix("int")[0])
        assert 1 < payload["bits_a_code"] < bits
        assert payload["code_bytes"] + payload["scale_bytes"] <= payload["bytes"]
        assert payload["ideal_bytes"] < payload["bytes"]
        assert 0 < payload["error"] < {8: 0.02, 4: 0.25, 2: 0.7}[bits]
        assert abs(payload["error_growth_bf16"]) < 0.05
    assert "deltas, int4(256)" in tables.entropy(results.values())


# ---- DiLoCo's recipe


def test_gaps_are_above_the_best_synchronous_run_with_the_same_seed_and_data() -> None:
    def result(nodes: int, name: str, lr: float, loss: float, seed: int = 0, tokens: int = 700_000_000) -> Result:
        arguments = {"nodes": nodes, "lr": lr, "batch": 48 // nodes, "tokens": tokens}
        return {"arguments": arguments, "rows": [{"name": name, "seed": seed, "validation": [[0, 5.0], [9, loss]]}]}

    results = [
        result(1, "synchronous", 0.005, 0.4),
        result(1, "synchronous", 0.005, 0.6, seed=1),
        result(1, "synchronous", 0.01, 0.5),
        result(2, "local30:none", 0.005, 0.404),
        result(2, "local30:none", 0.005, 0.618, seed=1),
        result(2, "local30:none", 0.005, 0.411, seed=2),
        result(1, "synchronous", 0.005, 0.5, tokens=350_000_000),
        result(2, "local30:none", 0.005, 0.52, tokens=350_000_000),
        result(2, "local30:int8", 0.005, 0.52, seed=1, tokens=350_000_000),
    ]
    assert tables.diloco(results).splitlines()[2:] == [
        "| 1 | synchronous | 700 M | 0.0050, 48 | 2 | 0.5000 ± 0.1000 |  |  |",
        "| 1 | synchronous | 700 M | 0.0100, 48 | 1 | 0.5000 |  |  |",
        "| 2 | local30:none | 700 M | 0.0050, 48 | 3 | 0.4777 ± 0.0702 | +2.00 ± 1.00 | +0.7 |",
        "| 1 | synchronous | 350 M | 0.0050, 48 | 1 | 0.5000 |  |  |",
        "| 2 | local30:int8 | 350 M | 0.0050, 48 | 1 | 0.5200 |  |  |",
        "| 2 | local30:none | 350 M | 0.0050, 48 | 1 | 0.5200 | +4.00 |  |",
    ]


def test_diloco_trains_by_the_recipe(tmp_path: Path) -> None:
    options = ["--nodes", "2", "--configs", "local3:int4+loco:outer0.6", "--no-compiled"]
    run(2, "diloco-scaling", "--worker", *tiny_study(), "--output", tmp_path, *options)
    (result,) = results_in(tmp_path).values()
    losses = losses_of(result["rows"][0])
    assert losses[-1] < losses[0]


# ---- Muon


def test_bytes_and_losses_of_muon_on_two_nodes_of_two(tmp_path: Path) -> None:
    names = [f"{each}:{sharding}" for each in tables.OPTIMIZERS for sharding in ("unsharded", "full_shard", "III")]
    options = ("--tokens", "2e3", "--configs", ",".join(names))
    run(4, "muon", "--worker", *tiny_study(), *options, "--output", tmp_path)
    rows = {row["name"]: row for result in results_in(tmp_path).values() for row in result["rows"]}
    assert rows.keys() == set(names)
    for optimizer in tables.OPTIMIZERS:
        unsharded = rows[f"{optimizer}:unsharded"]
        assert unsharded["validation"][-1][1] < unsharded["validation"][0][1]
        for sharding in ("full_shard", "III"):  # Newton-Schulz iterates in bf16
            assert losses_of(rows[f"{optimizer}:{sharding}"]) == pytest.approx(losses_of(unsharded), rel=1e-3)
    assert losses_of(rows["muon:unsharded"]) != pytest.approx(losses_of(rows["adamw:unsharded"]), rel=1e-3)
    hidden, intermediate = 32, 64
    gathered = 4 * (4 * hidden * hidden + 2 * hidden * intermediate)
    # A quarter of the matrices goes to the other node.
    sent = {"unsharded": (0, 0), "full_shard": (gathered / 4, gathered / 2), "III": (0, gathered / 2)}
    for sharding, (inter, intra) in sent.items():
        assert rows[f"adamw:{sharding}"]["sent_by_optimizer"] == {"inter": 0, "intra": 0}
        assert rows[f"muon:{sharding}"]["sent_by_optimizer"] == {"inter": inter, "intra": intra}
        # The optimizer has no part in what the model sends.
        assert rows[f"muon:{sharding}"]["sent_by_model"] == rows[f"adamw:{sharding}"]["sent_by_model"]
    assert rows["muon:III"]["sent_by_model"]["inter"] < rows["muon:full_shard"]["sent_by_model"]["inter"]
