"""Kinds of collectives, and levels of the network that they use."""

from __future__ import annotations

from typing import Literal

Kind = Literal["gather", "reduce"]
Level = Literal["inter", "intra"]
