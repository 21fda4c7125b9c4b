"""Everything that can be measured, by name: torch's strategies, ours and peers, behind one interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from models import Task
from torch.distributed.fsdp import ShardingStrategy

from fsdp_zpp import NF4, Int4, Int4Delta, Int8, LocalSteps, LoCo, Strategy
from fsdp_zpp.codecs.base import Codec
from fsdp_zpp.config.strategy import LEGAL_LEVELS

INT_RESHARD = "int_reshard"
ADAPTERS_ONLY = ("NNN", "NNG", "III", "IIG", "IGG", "GGG")
STRATEGIES: dict[str, Any] = {
    "full_shard": ShardingStrategy.FULL_SHARD,
    "hybrid_shard": ShardingStrategy.HYBRID_SHARD,
    **{levels: Strategy(levels) for levels in LEGAL_LEVELS},
    **{f"zeropp-{levels}": Strategy.zeropp(levels=levels) for levels in LEGAL_LEVELS},
    "qwZ": Strategy("GGG", weights=Int8(256)),
    "qgZ": Strategy("GGG", gradients=Int4(128)),
    "zeropp": Strategy.zeropp(),
    "zeropp-delta": Strategy.zeropp(weights=Int4Delta()),
    "zeropp-delta-IIG": Strategy.zeropp(levels="IIG", weights=Int4Delta()),
    "loco": Strategy.loco(),
    "loco-delta": Strategy.loco(weights=Int4Delta()),
    "loco-int8": Strategy.loco(error_feedback=LoCo(dtype=Int8(256))),
    "loco-both": Strategy.loco(error_feedback=LoCo(hops="both", dtype=Int8(256))),
    **{f"diloco-{every}": Strategy.diloco(every) for every in (8, 64)},
    **{
        f"diloco-{every}-overlap": Strategy.diloco(local_steps=LocalSteps(every, overlap=1, mix=0.5))
        for every in (8, 64)
    },
    "zeropp-full-inside": Strategy.zeropp(intra_gradients=None),
    "zeropp-int4-inside": Strategy.zeropp(intra_gradients=Int4(128)),
    "mixzpp": Strategy.mixzpp(),
    "mixzpp-int4": Strategy.mixzpp(frozen=Int4(128)),
    **{f"{base}-{levels}": Strategy(levels) for base in ("frozen", "once") for levels in ADAPTERS_ONLY},
    **{f"once-zeropp{base}": Strategy.zeropp() for base in ("", "-int4", "-nf4")},
}
"""For FullyShardedDataParallel, and with ``fsdp2:`` before the name for fully_shard.

``frozen-...``: the base in int8, sharded inside nodes; adapters by these letters, in full precision. ``once-...``: the
same, with the model wrapped once, not layer by layer, so that all adapters are one unit; ``-int4`` and ``-nf4`` have
the base in 4 bits.
"""


def base_codec(name: str) -> Codec | None:
    """What the frozen base of a contender is quantized with before it is wrapped, if it is."""
    if not name.removeprefix("fsdp2:").startswith(("frozen-", "once-")):
        return None
    kind = name.rpartition("-")[2]
    if kind == "nf4":
        return NF4(64)  # made only if asked for: it needs bitsandbytes
    return Int4(128) if kind == "int4" else Int8(256)


FSDP2_ONLY = (f"fsdp2:{INT_RESHARD}",)
PEERS = ("deepspeed-zero3", "deepspeed-zeropp", "deepspeed-mixzpp", "megatron-hfsdp")


class Contender(ABC):
    """One way to train a task's model, ready for its first step once constructed."""

    @abstractmethod
    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """One optimizer step over tokens [micro-batches, sequences, length]; returns the last micro-batch's loss."""

    def sent(self) -> dict[str, int] | None:
        """Bytes that this rank has sent so far, by kind and hop; None where nobody counts."""
        return None

    def generate(self, prompt: torch.Tensor, tokens: int) -> torch.Tensor | None:
        """``prompt`` [1, length] continued greedily by so many tokens; None if this can't."""
        return None

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Give up what is held outside of the object. It can't train any more."""


def is_known(name: str) -> bool:
    """Whether there is a contender of this name."""
    return name.removeprefix("fsdp2:") in STRATEGIES or name in FSDP2_ONLY or name in PEERS


def names() -> str:
    """All names, for help and errors."""
    return ", ".join([*STRATEGIES, *FSDP2_ONLY, *PEERS])


def contend(task: Task, name: str) -> Contender:
    """Build the model of ``task`` under the strategy of this name. Collective.

    Raises:
        ModuleNotFoundError: For a peer that is not installed.
    """
    if task.compile:
        # What the contenders before have compiled would count toward the number of graphs that a function may have.
        torch._dynamo.reset()
    if name in PEERS:
        from peers import peer

        return peer(task, name)
    from torch_fsdp import TorchFSDP

    return TorchFSDP(task, name)
