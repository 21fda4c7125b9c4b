"""Prints how often each feature was drawn, at the end of a run of the fuzzer."""

from __future__ import annotations

from typing import Any

from fuzz import features


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the counts of this process."""
    if lines := features.report():
        terminalreporter.section("features of random programs: times drawn")
        for line in lines:
            terminalreporter.write_line(line)
