"""A sharding strategy: where each model state lives, and how each hop of communication is encoded."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

from .codecs import Codec, Int4, Int8
from .deepspeed_config import strategy_arguments
from .error_feedback import LoCo
from .weight_difference import Int4Delta

if TYPE_CHECKING:
    from torch import nn

_SCOPES = "NIG"


def _legal_levels() -> tuple[str, ...]:
    """All (parameter, gradient, optimizer) letters whose optimizer letter is as fine as the other two.

    A coarser optimizer state costs memory and saves no communication (PaRO, arXiv 2310.06003, section 3).
    """
    fineness = _SCOPES.index
    return tuple(
        p + g + o for o, g, p in product(_SCOPES, repeat=3) if fineness(o) >= fineness(g) and fineness(o) >= fineness(p)
    )


LEGAL_LEVELS: tuple[str, ...] = _legal_levels()
"""The 14 legal combinations of letters."""


@dataclass(frozen=True)
class Strategy:
    """Where parameters, gradients and optimizer state live, and how each hop is encoded.

    Pass it as ``FullyShardedDataParallel(..., sharding_strategy=strategy)``. ``None`` as a codec means full
    precision: the values travel in the dtype FSDP would have sent.

    Args:
        levels: Three letters for parameters, gradients and optimizer state: ``N`` replicated on every rank,
            ``I`` sharded inside a node, ``G`` sharded over all ranks. ``GGG`` is ZeRO-3; ``IGG`` keeps a
            secondary shard of the weights inside each node (ZeRO++'s hpZ).
        weights: Codec of the weight all-gather (ZeRO++'s qwZ). Weights are quantized once, from the
            full-precision shard; both hops carry the same codes. With ``Int4Delta()``, after a step the hop between
            nodes carries only what has changed, in 4 bits. On one node alone, weights and gradients travel in full
            precision: see [Note: One node] in at_work.py.
        gradients: Codec of the gradient reduction between nodes (ZeRO++'s qgZ).
        intra_gradients: Codec of the gradient reduction inside a node, on one node alone, too. ``"auto"`` is one
            notch finer than ``gradients``: ``Int8`` with the same block if ``gradients`` is set, else full precision;
            and nothing on one node.
        error_feedback: Error feedback on the gradient codec.
        frozen: Codec of frozen parameters, which are quantized once.
        gpus_per_node: Ranks that share the fast network; rank = node * gpus_per_node + local. Default: as
            many as torchrun started on each node (``LOCAL_WORLD_SIZE``). 1 where all links are slow (PCIe).

    Raises:
        ValueError: If the letters are illegal, ``gpus_per_node`` is not positive, or error feedback has no
            gradient codec to correct.
        TypeError: If a codec is not a :class:`Codec`, or another argument has the wrong type.

    Example:
        >>> strategy = Strategy("IGG", weights=Int8(256), gradients=Int4(128), gpus_per_node=8)
    """

    levels: str = "GGG"
    _: dataclasses.KW_ONLY
    weights: Codec | None = None
    gradients: Codec | None = None
    intra_gradients: Codec | Literal["auto"] | None = "auto"
    error_feedback: LoCo | None = None
    frozen: Codec | None = None
    gpus_per_node: int | None = None

    def __post_init__(self) -> None:
        self._check_levels()
        for name in ("weights", "gradients", "frozen"):
            _check_codec(name, getattr(self, name))
        self._check_differences()
        if self.intra_gradients != "auto":
            _check_codec("intra_gradients", self.intra_gradients, also=' or "auto"')
        for name in ("weights", "gradients", "intra_gradients"):
            check_hop_codec(name, getattr(self, name))
        check_error_feedback(self.error_feedback, "gradients", *self.gradient_codecs)
        check_gpus_per_node(self.gpus_per_node)

    def _check_levels(self) -> None:
        if not isinstance(self.levels, str):
            raise TypeError(f"levels must be three letters such as 'GGG', got {self.levels!r}")
        if self.levels in LEGAL_LEVELS:
            return
        reason = "levels are three of the letters N, I, G"
        if len(self.levels) == 3 and set(self.levels) <= set(_SCOPES):
            reason = "the optimizer letter must be at least as fine (N < I < G) as the other two"
        raise ValueError(f"levels {self.levels!r} is not legal: {reason}; legal are {', '.join(LEGAL_LEVELS)}")

    def _check_differences(self) -> None:
        for name in ("gradients", "intra_gradients", "frozen"):
            if isinstance(getattr(self, name), Int4Delta):
                raise ValueError(f"{name} can't be an Int4Delta: of weights alone is known what the receivers hold")
        if isinstance(self.weights, Int4Delta) and not self.keeps_secondary:
            raise ValueError(
                f"weights={self.weights!r} sends differences against the secondary shard in each node, which "
                f"{self.levels!r} does not keep; choose letters I?G such as 'IGG', or weights={self.weights.resident!r}"
            )

    @property
    def keeps_secondary(self) -> bool:
        """Whether each node keeps a secondary shard of weights that are sharded over all ranks."""
        return (self.parameters, self.optimizer) == ("I", "G")

    @property
    def parameters(self) -> str:
        """The letter of the parameters."""
        return self.levels[0]

    @property
    def optimizer(self) -> str:
        """The letter of the optimizer state."""
        return self.levels[2]

    @property
    def gradient_codecs(self) -> tuple[Codec | None, Codec | None]:
        """Codecs of the intra-node and the inter-node hop of the gradient reduction."""
        return finer_inside(self.intra_gradients, self.gradients), self.gradients

    @property
    def is_plain(self) -> bool:
        """Whether this is FULL_SHARD itself: everything sharded over all ranks, nothing encoded."""
        encoded = (self.weights, *self.gradient_codecs, self.frozen)
        return self.levels == "GGG" and all(codec is None for codec in encoded)

    @classmethod
    def zeropp(cls, **overrides: Any) -> Strategy:
        """ZeRO++ (arXiv 2306.10209): quantized gather, secondary shard, quantized reduction."""
        preset: dict[str, Any] = {"levels": "IGG", "weights": Int8(256), "gradients": Int4(128)}
        return cls(**preset | overrides)

    @classmethod
    def mixzpp(cls, **overrides: Any) -> Strategy:
        """MixZ++: ZeRO++ with frozen weights quantized once and kept so."""
        return cls.zeropp(**{"frozen": Int8(256)} | overrides)

    @classmethod
    def loco(cls, **overrides: Any) -> Strategy:
        """ZeRO++ with LoCo's error feedback on the gradients (arXiv 2407.04480)."""
        return cls.zeropp(**{"error_feedback": LoCo()} | overrides)

    @classmethod
    def zero1(cls, **overrides: Any) -> Strategy:
        """ZeRO-1: only the optimizer state is sharded."""
        return cls(**{"levels": "NNG"} | overrides)

    @classmethod
    def zero2(cls, **overrides: Any) -> Strategy:
        """ZeRO-2: gradients and optimizer state are sharded."""
        return cls(**{"levels": "NGG"} | overrides)

    @classmethod
    def zero3(cls, **overrides: Any) -> Strategy:
        """ZeRO-3, FSDP's FULL_SHARD: everything is sharded over all ranks."""
        return cls(**{"levels": "GGG"} | overrides)

    @classmethod
    def mics(cls, **overrides: Any) -> Strategy:
        """MiCS, FSDP's HYBRID_SHARD: everything is sharded inside a node and replicated across nodes."""
        return cls(**{"levels": "III"} | overrides)

    @classmethod
    def auto(
        cls,
        model: nn.Module,
        *,
        nodes: int | None = None,
        gpus_per_node: int | None = None,
        inter_gbps: float | None = None,
        intra_gbps: float | None = None,
        gpu_memory: float | None = None,
        **options: Any,
    ) -> Strategy:
        """The fastest strategy that fits, by prediction (:func:`fsdp_zpp.plan`).

        With a process group, all ranks call it with the same arguments and get the same strategy.

        Args:
            model: Not wrapped yet; its parameters are counted, trainable and frozen, by layers.
            nodes: Number of nodes. None is the running job's, as for ``gpus_per_node``.
            gpus_per_node: GPUs of each.
            inter_gbps: Gbit/s of a whole node to the others. None measures it, as for ``intra_gbps``, with
                all-gathers over the running job.
            intra_gbps: Gbit/s of one GPU inside its node.
            gpu_memory: GiB of a GPU. None is this machine's; without GPUs there is no limit.
            **options: The other options of :func:`fsdp_zpp.plan`: codecs, ``micro_batches``, ``activations``, ...

        Raises:
            ValueError: If nothing fits, or an argument is out of range, or one is missing and no process group is
                initialized.
            TypeError: If an argument has the wrong type.
        """
        # The planner makes strategies, so it imports this module.
        from .planner.auto import choose_strategy

        return choose_strategy(
            model,
            nodes=nodes,
            gpus_per_node=gpus_per_node,
            inter_gbps=inter_gbps,
            intra_gbps=intra_gbps,
            gpu_memory=gpu_memory,
            **options,
        )

    @classmethod
    def from_deepspeed(cls, config: Mapping[str, Any] | str | os.PathLike[str]) -> Strategy:
        """The strategy that a DeepSpeed configuration asks for; logs, in one line, what it leaves to your script.

        Args:
            config: The configuration, or the path of one in JSON. "auto" is fine for what decides no strategy.

        Raises:
            ValueError: Naming a key that is unknown, can't be honoured or contradicts another, and what to do instead.
            TypeError: Naming a key whose value has the wrong type.
            OSError: If the file can't be read.
        """
        return cls(**strategy_arguments(config))


def finer_inside(intra: Codec | Literal["auto"] | None, inter: Codec | None) -> Codec | None:
    """The codec of the intra-node hop: as given, or for ``"auto"`` 8 bits at the inter-node codec's block.

    The intra-node network is fast, so its hop can afford the precision that the slow hop can't; SDP4Bit
    (arXiv 2410.15526, section 3.2) finds 8 bits inside and 4 between nodes enough to keep the loss.
    """
    if intra != "auto":
        return intra
    return None if inter is None else Int8(getattr(inter, "block", 256))


def check_error_feedback(error_feedback: object, name: str, intra: Codec | None, inter: Codec | None) -> None:
    """Raise unless ``error_feedback`` is None, or a :class:`LoCo` with a codec to correct: ``name`` between nodes."""
    if error_feedback is None:
        return
    if not isinstance(error_feedback, LoCo):
        hint = " (did you mean LoCo()?)" if error_feedback is LoCo else ""
        raise TypeError(f"error_feedback must be a LoCo or None, got {error_feedback!r}{hint}")
    if inter is None and (intra is None or error_feedback.hops == "inter"):
        raise ValueError(
            f"error_feedback corrects the error of the gradient codec, but {name}=None has no error; "
            f"give {name}=Int4(...) or Int8(...), or drop error_feedback"
        )


def check_hop_codec(name: str, value: object) -> None:
    """Raise if a codec is for frozen weights alone, which are encoded once."""
    if isinstance(value, Codec) and value.for_frozen_only:
        raise ValueError(f"{name} can't be {value!r}, which is for frozen weights alone; choose Int8(...) or Int4(...)")


def check_gpus_per_node(gpus_per_node: int | None) -> None:
    """Raise unless ``gpus_per_node`` is None or a positive int."""
    if gpus_per_node is None:
        return
    if not isinstance(gpus_per_node, int) or isinstance(gpus_per_node, bool):
        raise TypeError(f"gpus_per_node must be a positive int or None, got {gpus_per_node!r}")
    if gpus_per_node < 1:
        raise ValueError(f"gpus_per_node must be at least 1, got {gpus_per_node}")


def _check_codec(name: str, value: object, also: str = "") -> None:
    if value is not None and not isinstance(value, Codec):
        hint = f" (did you mean {value.__name__}()?)" if isinstance(value, type) else ""
        raise TypeError(f"{name} must be a codec such as Int8(256) or Int4(128), or None{also}, got {value!r}{hint}")
