"""Local steps in the planner's reports and on its command line."""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness.strategies import FOURTEEN, PARO

from fsdp_zpp import Int8, LocalSteps, LoCo, plan
from fsdp_zpp.__main__ import main
from fsdp_zpp.planner.json_report import plan_to_json

LETTERS = "NNN NNI NII INI III".split()
CLUSTER = {"nodes": 4, "gpus_per_node": 8, "inter_gbps": 100, "intra_gbps": 2400, "presets": False}
JOB = "--params 7e9 --no-presets --nodes 4 --gpus-per-node 8 --inter-gbps 100 --intra-gbps 2400".split()


def test_the_table_marks_strategies_with_local_steps() -> None:
    made = plan(7e9, **PARO, local_steps=LocalSteps(error_feedback=LoCo()))
    lines = str(made).splitlines()
    assert "*: weights exchanged between nodes every 64 steps as int4(128) with error feedback" in lines[3]
    rows = [line[3:].split("  ")[0] for line in lines if line[:3] in ("-> ", "   ") and line[3:6].strip()]
    assert sorted(rows) == sorted(estimate.name for estimate in made.estimates)
    assert len(rows) == 19
    assert {line[3:].split("  ")[0] for line in lines if "local steps *" in line} == {f"{x} every 64" for x in LETTERS}
    assert sum(line.startswith("* changes the mathematics") for line in lines) == 1
    header = next(line for line in lines if "known as" in line).split()
    assert {"outer", "errors"} <= set(header)
    assert "errors" not in str(plan(7e9, **PARO, local_steps=LocalSteps()))


def test_without_local_steps_no_report_speaks_of_them() -> None:
    made = plan(7e9, **PARO)
    table, report = str(made), json.loads(plan_to_json(made))
    assert not any(word in table for word in ("outer", "local", "*", "mathematics"))
    assert "local_steps" not in report
    assert sorted(report["strategies"]) == sorted(FOURTEEN)
    for figures in report["strategies"].values():
        assert "outer" not in figures["memory_bytes"]
        assert figures["seconds"].keys() == {"inter", "intra", "computation", "launch", "communication", "step"}


def test_options_reach_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--local-steps 32 --exchange-codec int8:128 --exchange-feedback int8:64 --exchange-overlap 4 "
    options += "--exchange-at-once --exchange-offload --exchange-moments-every 3"
    feedback = LoCo(dtype=Int8(64))
    asked = LocalSteps(
        32, codec=Int8(128), error_feedback=feedback, overlap=4, spread=False, offload=True, moments_every=3
    )
    assert main(["plan", *JOB, *options.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    made = plan(7e9, **CLUSTER, local_steps=asked)
    assert found == json.loads(plan_to_json(made))
    assert (found["local_steps"]["every"], found["local_steps"]["codec"]) == (32, "int8(128)")
    figures, estimate = found["strategies"]["III every 32"], made["III every 32"]
    assert figures["memory_bytes"]["errors"] == estimate.memory.errors > 0
    assert figures["seconds"]["wait"] == estimate.time.wait
    assert figures["seconds"]["step"] == estimate.time.total
    for arguments, expected in ([], LocalSteps(64)), (["--exchange-codec", "none"], LocalSteps(64, codec=None)):
        main(["plan", *JOB, "--local-steps", "64", *arguments])
        assert capsys.readouterr().out == f"{plan(7e9, **CLUSTER, local_steps=expected)}\n"


def test_the_chart_names_strategies_with_local_steps(tmp_path: Any) -> None:
    path = tmp_path / "plan.svg"
    job = [*JOB[:-3], "0.1", *JOB[-2:]]
    assert main(["plan", *job, "--local-steps", "64", "--plot", str(path)]) == 0
    assert "every 64" in path.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--local-steps 0", "--local-steps must be a whole number of at least 1, got 0"),
        ("--local-steps 1.5", "--local-steps must be a whole number of at least 1, got 1.5"),
        (
            "--local-steps 8 --exchange-overlap 8",
            "overlap must be an int of 0 or more optimizer steps and below every=8",
        ),
        ("--local-steps 8 --exchange-codec int4delta", "which is for weights alone: a delta needs a base"),
        ("--local-steps 8 --exchange-codec none --exchange-feedback none", "codec=None has no error"),
        ("--local-steps 8 --exchange-feedback int4", "dtype must be Int8(...) or None"),
        (
            "--exchange-overlap 1 --exchange-offload",
            "--exchange-overlap and --exchange-offload: needs --local-steps",
        ),
    ],
)
def test_wrong_options_say_why(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["plan", *JOB, *arguments.split()])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
