"""Fragments read what older versions have saved."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fsdp_zpp import LocalSteps
from fsdp_zpp.runtime.fragment import Fragment, FragmentState, Progress


def test_progress_that_was_saved_before_exchanges_were_counted_is_read() -> None:
    outer: Any = SimpleNamespace(names=frozenset(), label="unit")
    fragment = Fragment(LocalSteps(), outer, None, dict, dict, list, int)
    old: FragmentState = {
        "progress": {"made": 7, "exchanged": 6, "arrives": None},
        "exchanges": None,
        "weights": {},
        "changed": [],
        "sent": [],
    }
    fragment.load_state_dict(old)
    assert fragment.progress == Progress(made=7, exchanged=6, arrives=None, sent=0, apart=True)
