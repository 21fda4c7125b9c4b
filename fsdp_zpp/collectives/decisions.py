"""Decisions of the members of a round: whether they commit to an exchange, all of them or none.

[Note: Decisions]
A member may be lost at any moment of an exchange, after which some of the others have all of it and some have not. So
what they have received is tentative until the store says otherwise: a node that has it counts itself there, and the
last one writes that all of them commit. Who fails, or has waited for too long, writes that all of them try again,
without whoever is lost. The store takes only the first decision, and everybody obeys what it has taken. A node that was
stopped meanwhile, and wakes up, finds the decision there, and then that the others have met without it.

[Note: One round at a time]
All members of a round may be taken for lost, by nodes that have waited to join, while they only were slow. Two rounds
without a common member would then commit to exchanges side by side. So a round begins by closing those before: it
decides their next exchange, which is that they try again. What was on its way there when it began is committed to
before that, or never.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist


class Decisions:
    """Decisions of a round, as one of its members sees them.

    Args:
        store: Where nodes decide.
        run_id: Names the run in the store.
        round_number: The round's number, larger than that of any before.
        members: How many there are.
        timeout: The longest that a member waits for the others.
    """

    def __init__(self, store: dist.Store, run_id: str, round_number: int, members: int, timeout: timedelta) -> None:
        self._store = dist.PrefixStore(f"fsdp_zpp.{run_id}", store)
        self._round, self._members, self._timeout = round_number, members, timeout
        self._made = 0

    def close_earlier_rounds(self) -> None:
        """Let no earlier round commit any more; one member does this before any of them decides.

        Raises:
            RuntimeError: If the store can't be reached.
        """
        for number in range(self._store.add("closed", 0), self._round):
            at = self._store.add(f"{number}/committed", 0)  # this many at least
            while self._first_decision(number, at, "retry") == "commit":
                at += 1
        self._store.set("closed", str(self._round))  # a smaller number than another's only costs time

    def decide(self, *, failed: bool) -> bool:
        """Return whether all members commit to the next exchange; every member calls it, and all get the same answer.

        Args:
            failed: Whether this one can't commit.

        Raises:
            RuntimeError: If the store can't be reached.
        """
        at, self._made = self._made, self._made + 1
        key = f"{self._round}/{at}"
        if failed:
            self._first_decision(self._round, at, "retry")
        elif self._store.add(f"{key}/done", 1) == self._members and (
            self._first_decision(self._round, at, "commit") == "commit"
        ):
            self._store.add(f"{self._round}/committed", 1)
        with suppress(RuntimeError):  # if nobody decides in time, this one does
            self._store.wait([f"{key}/decision"], self._timeout)
        return self._first_decision(self._round, at, "retry") == "commit"

    def _first_decision(self, number: int, at: int, decision: str) -> str:
        """Decide one exchange of a round, unless that was done before; return what was decided first."""
        return self._store.compare_set(f"{number}/{at}/decision", "", decision).decode()
