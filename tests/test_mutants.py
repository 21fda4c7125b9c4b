"""Mutants are found, and leave code that compiles; tests/mutants/run.py tells which tests notice them."""

from __future__ import annotations

from collections import Counter

import pytest
from mutants.catalog import Mutant, Sources, code_of, load_mutants

MUTANTS = load_mutants()


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources()


def test_every_mutant_is_found_on_one_line_and_compiles(sources: Sources):
    lost = []
    for mutant in MUTANTS:
        try:
            place, text = sources.mutated(mutant)
        except LookupError as error:
            lost.append(str(error))
            continue
        compile(text, place.path, "exec")
    assert not lost, "\n".join(lost)


def test_names_differ_and_lines_change():
    assert [name for name, count in Counter(each.name for each in MUTANTS).items() if count > 1] == []
    assert [each.name for each in MUTANTS if code_of(each.before) in ("", each.after)] == []
    assert {each.needs for each in MUTANTS} <= {"", "cuda"}


def test_a_line_that_is_not_unique_is_not_mutated(sources: Sources):
    mutant = Mutant("anywhere", "none", "return None", "return 1", "a test")
    with pytest.raises(LookupError, match="must be found on one line"):
        sources.find(mutant)
    with pytest.raises(LookupError, match="nowhere"):
        sources.find(Mutant("nowhere", "none", "no such line", "pass", "a test"))
