"""Words of figures for the names of configurations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness.benchmarks import BENCHMARKS, RAW_NAME, load

in_words = load("common", "words").in_words


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("full_shard", "FSDP FULL_SHARD"),
        ("fsdp2:zeropp-delta", "FSDP2 zeropp, Int4Delta"),
        ("int4", "4 bits"),
        ("int4x2+loco-beta0", "4 bits, Classical feedback"),
        ("w8:int4c+loco", "8-bit weights, 4 bits, LoCo"),
        ("w8:full_shard", "8-bit weights, full precision"),
        ("int4+loco:outer0.7:at-once", "4 bits, error feedback, outer rate 0.7, exchanged at once"),
        ("local32:none:momentum-auto", "full precision, momentum auto, every 32 steps"),
        ("local30:none:at-once:outer0.6", "full precision, exchanged at once, outer rate 0.6, every 30 steps"),
        ("local8-1024-32:int8", "8 bits, every 8-1024-32 steps"),
    ],
)
def test_names_become_words(name: str, words: str) -> None:
    assert in_words(name) == words


def test_an_unknown_change_is_an_error() -> None:
    with pytest.raises(ValueError, match="'later3' is no known change"):
        in_words("local32:int4:later3")


def test_all_names_of_results_become_words_and_local_steps_differ() -> None:
    paths = [path for folder in ("convergence", "local", "diloco") for path in results(folder)]
    names = {json.loads(path.read_text())["rows"][0]["name"] for path in paths}
    words = {name: in_words(name) for name in names}
    assert not [text for text in words.values() if RAW_NAME.search(text)]
    assert [name for name in names if RAW_NAME.search(name)]  # so it finds them
    local = [words[name] for name in names if name.startswith("local")]
    assert len(set(local)) == len(local) > 20


def results(folder: str) -> list[Path]:
    """Results of the studies of the loss in folders of this name."""
    return sorted((BENCHMARKS / "loss" / "results").glob(f"{folder}*/*.json"))
