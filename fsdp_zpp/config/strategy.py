"""A sharding strategy: where each model state lives, how each hop is encoded, and how often the slow hop runs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Unpack

from fsdp_zpp.codecs.as_stored import NAMED, AsStored, FrozenName, codec_of_frozen, codec_of_plain
from fsdp_zpp.codecs.base import Codec, check_codec, check_place
from fsdp_zpp.codecs.blockwise import Int4, Int8
from fsdp_zpp.codecs.delta import Int4Delta
from fsdp_zpp.suggestions import check_keywords, explains_keywords

from .deepspeed.arguments import strategy_arguments
from .elastic import Elastic
from .error_feedback import LoCo, check_error_feedback
from .levels import check_levels
from .local_steps import LocalSteps
from .mapping import arguments_from_mapping, mapping_from_arguments
from .overrides import checked_overrides, pairs_of
from .resolve import ResolvedStrategy, intra_node_codec, resolve
from .strategy_arguments import StrategyArguments
from .topology import Topology


@explains_keywords
@dataclass(frozen=True)  # hashable, too: FSDP1 looks up its sharding strategy in a dict
class Strategy:
    """Says where parameters, gradients and optimizer state live, how hops are encoded, how often the slow hop runs.

    Pass it as ``fully_shard(module, strategy=strategy)`` or
    ``FullyShardedDataParallel(..., sharding_strategy=strategy)``. ``None`` as a codec means full precision: values are
    sent in the dtype in which FSDP would have sent them.

    Args:
        levels: Three letters for parameters, gradients and optimizer state: ``N`` replicated on every rank,
            ``I`` sharded inside a node, ``G`` sharded over all ranks. ``GGG`` is ZeRO-3; ``IGG`` keeps a
            secondary shard of the weights inside each node (ZeRO++'s hpZ).
        weights: Codec of the weight all-gather (ZeRO++'s qwZ). Weights are quantized once, from the
            full-precision shard; both hops carry the same codes. With ``Int4Delta()``, after a step the inter-node
            hop carries only the changes, in 4 bits. On a single node, which has no slow hop, weights
            and gradients are sent in full precision.
        gradients: Codec of the gradient reduction's inter-node hop (ZeRO++'s qgZ).
        intra_gradients: Codec of its intra-node hop; active on a single node, too. ``"auto"`` is finer than
            ``gradients``: ``Int8`` with the same block if ``gradients`` is set and there are several nodes, else
            full precision.
        error_feedback: Error feedback on the gradient codecs.
        frozen: Codec of frozen parameters, which are quantized once. ``"as stored"`` keeps the codes of layers that
            another library has quantized, and leaves other parameters as they are; ``"auto"`` keeps them, too, and
            encodes the others in ``Int8(256)``.
        local_steps: Local steps: nodes train on their own and exchange changes of weights every few steps, instead of
            gradients in every step. It has no effect on a single node. Each node needs all of the optimizer state, so
            the optimizer scope must be ``I`` or ``N``. Gradients are then sent between nodes only in synchronous
            steps, so ``gradients`` needs ``LocalSteps(start=...)`` or ``LocalSteps(stop=...)``.
        gpus_per_node: Number of ranks that share fast links; rank = node * gpus_per_node + local. Default: as many as
            torchrun (``LOCAL_WORLD_SIZE``) or Slurm's srun started on each node; on a single node whose GPUs NVLink
            does not join, those that it joins, often 1, if codecs make that pay.
        overrides: Strategies of other parts of the model, by pattern (``fnmatch``'s) for names of classes: a module
            whose class matches is sharded by that strategy, with all in it that is not sharded by itself. Of nested
            modules the innermost that matches decides, and of patterns the first. Nodes are those of this strategy,
            unless the other has a ``gpus_per_node`` of its own.

    Raises:
        ValueError: If the letters are illegal, ``gpus_per_node`` is not positive, a codec does not suit its place,
            error feedback has no gradient codec to correct, or an argument has no effect with local steps.
        TypeError: If a codec is not a ``Codec``, or another argument has the wrong type.

    Examples:
        >>> strategy = Strategy("IGG", weights=Int8(256), gradients=Int4(128), gpus_per_node=8)
        >>> mixture = Strategy.zeropp(overrides={"*Experts": Strategy.zeropp(weights=Int4Delta())})
    """

    levels: str = "GGG"
    _: dataclasses.KW_ONLY
    weights: Codec | None = None
    gradients: Codec | None = None
    intra_gradients: Codec | Literal["auto"] | None = "auto"
    error_feedback: LoCo | None = None
    frozen: Codec | FrozenName | None = None
    local_steps: LocalSteps | None = None
    gpus_per_node: int | None = None
    overrides: Mapping[str, Strategy] | tuple[tuple[str, Strategy], ...] = ()

    def __post_init__(self) -> None:
        # Letters and types come first: the later checks rely on them.
        check_levels(self.levels)
        for name in ("weights", "gradients"):
            check_codec(name, getattr(self, name))
        if isinstance(self.frozen, AsStored):
            object.__setattr__(self, "frozen", self.frozen.name)
        elif not isinstance(self.frozen, str) or self.frozen not in NAMED:
            check_codec("frozen", self.frozen, also=f", {' or '.join(map(repr, NAMED))}")
        if self.intra_gradients != "auto":
            check_codec("intra_gradients", self.intra_gradients, also=' or "auto"')
        check_place("weights", self.weights, "weights")
        check_place("gradients", self.gradients, "gradients")
        check_place("intra_gradients", self.intra_gradients, "gradients")
        check_place("frozen", self.frozen, "frozen")
        self._check_deltas()
        self._check_local_steps()
        check_error_feedback(self.error_feedback, "gradients", *self.gradient_codecs)
        check_gpus_per_node(self.gpus_per_node)
        object.__setattr__(self, "overrides", checked_overrides(self.overrides, Strategy))

    def _check_deltas(self) -> None:
        if isinstance(self.weights, Int4Delta) and not self.keeps_secondary:
            raise ValueError(
                f"weights={self.weights!r} sends deltas against the secondary shard in each node, which levels "
                f"{self.levels!r} do not keep; choose I for parameters and G for the optimizer, such as 'IGG', or "
                f"weights={self.weights.whole!r}"
            )

    def _check_local_steps(self) -> None:
        if self.local_steps is None:
            return
        if not isinstance(self.local_steps, LocalSteps):
            raise TypeError(f"local_steps must be LocalSteps(...) or None, got {self.local_steps!r}")
        if self.optimizer == "G":
            raise ValueError(
                f"local_steps has each node step on its own, but under levels {self.levels!r} a node holds only a part "
                "of the optimizer state; choose I or N for the optimizer, such as 'III'"
            )
        if self.local_steps.has_synchronous_steps:
            return
        if self.gradients is not None:
            raise ValueError(
                f"gradients={self.gradients!r} encodes gradients on the inter-node hop, which only synchronous steps "
                "make, and local_steps has none: give it a start or a stop; or encode the exchanges with "
                "LocalSteps(codec=...), and the intra-node hop with intra_gradients=..."
            )
        if isinstance(self.error_feedback, LoCo) and self.error_feedback.hops == "inter":
            raise ValueError(
                "error_feedback corrects gradients on the inter-node hop, which only synchronous steps make, and "
                "local_steps has none: give it a start or a stop; or pass LocalSteps(error_feedback=...) for the "
                "exchanges, or LoCo(hops='both') for the intra-node hop"
            )

    @property
    def keeps_secondary(self) -> bool:
        """Return whether nodes keep a secondary shard of weights whose optimizer state is sharded over all ranks."""
        return (self.parameters, self.optimizer) == ("I", "G")

    @property
    def parameters(self) -> str:
        """Return the scope of the parameters."""
        return self.levels[0]

    @property
    def optimizer(self) -> str:
        """Return the scope of the optimizer state."""
        return self.levels[2]

    @property
    def gradient_codecs(self) -> tuple[Codec | None, Codec | None]:
        """Return the codecs of the intra-node and the inter-node hop of the gradient reduction."""
        return intra_node_codec(self.intra_gradients, self.gradients), self.gradients

    @property
    def frozen_codec(self) -> Codec | None:
        """Return the codec of frozen parameters, whether ``frozen`` is or names it."""
        return codec_of_frozen(self.frozen)

    def resolve(self, topology: Topology) -> ResolvedStrategy:
        """Return the effective strategy on ``topology``: its scopes there, and the codecs that are active."""
        return resolve(
            self.levels,
            weights=self.weights,
            gradients=self.gradients,
            intra_gradients=self.intra_gradients,
            error_feedback=self.error_feedback,
            frozen=codec_of_plain(self.frozen_codec),
            topology=topology,
        )

    @property
    def all_strategies(self) -> tuple[Strategy, ...]:
        """Return all strategies that a model may be sharded by: this one and those of the overrides."""
        return (self, *(strategy for _, strategy in pairs_of(self.overrides)))

    @property
    def is_plain(self) -> bool:
        """Return whether this is FULL_SHARD itself: everything is sharded over all ranks and nothing is encoded."""
        encodes_intra_node = self.intra_gradients not in (None, "auto")
        encoded = (self.weights, self.gradients, self.frozen)
        # Local steps refuse GGG.
        return self.levels == "GGG" and encoded == (None, None, None) and not encodes_intra_node and not self.overrides

    @property
    def follows_links(self) -> bool:
        """Return whether the machine's links decide what a node is, if it is not named; [Note: Links] in resolve.py."""
        encodes = self.weights is not None or (self.gradients is not None and not self.keeps_secondary)
        return self.optimizer == "G" and encodes and self.error_feedback is None

    @classmethod
    def zeropp(cls, **arguments: Unpack[StrategyArguments]) -> Strategy:
        """Make ZeRO++ (arXiv 2306.10209): quantized gather, secondary shard, quantized reduction."""
        preset: StrategyArguments = {"levels": "IGG", "weights": Int8(256), "gradients": Int4(128)}
        return cls(**preset | arguments)

    @classmethod
    def mixzpp(cls, **arguments: Unpack[StrategyArguments]) -> Strategy:
        """Make MixZ++: ZeRO++ whose frozen weights are quantized once, unless they are already, and stay quantized."""
        return cls.zeropp(**StrategyArguments(frozen="auto") | arguments)

    @classmethod
    def loco(cls, **arguments: Unpack[StrategyArguments]) -> Strategy:
        """Make ZeRO++ with LoCo's error feedback on the gradients (arXiv 2407.04480)."""
        return cls.zeropp(**StrategyArguments(error_feedback=LoCo()) | arguments)

    @classmethod
    def zero1(cls, **arguments: Unpack[StrategyArguments]) -> Strategy:
        """Make ZeRO-1: only the optimizer state is sharded."""
        return cls(**StrategyArguments(levels="NNG") | arguments)

    @classmethod
    def zero2(cls, **arguments: Unpack[StrategyArguments]) -> Strategy:
        """Make ZeRO-2: gradients and optimizer state are sharded."""
        return cls(**StrategyArguments(levels="NGG") | arguments)

    @classmethod
    def zero3(cls, **arguments: Unpack[StrategyArguments]) -> Strategy:
        """Make ZeRO-3, FSDP's FULL_SHARD: everything is sharded over all ranks."""
        return cls(**StrategyArguments(levels="GGG") | arguments)

    @classmethod
    def mics(cls, **arguments: Unpack[StrategyArguments]) -> Strategy:
        """Make MiCS, FSDP's HYBRID_SHARD: everything is sharded inside a node and replicated across nodes."""
        return cls(**StrategyArguments(levels="III") | arguments)

    @classmethod
    def diloco(
        cls, every: int | None = None, elastic: Elastic | None = None, **arguments: Unpack[StrategyArguments]
    ) -> Strategy:
        """Make DiLoCo (arXiv 2311.08105), streamed unit by unit (arXiv 2501.18512) in 4 bits.

        Args:
            every: Steps between two exchanges of a unit; 64 by default.
            elastic: Lets nodes be lost and join while the others train on.
            **arguments: Other arguments of a strategy, ``local_steps`` in place of the two above among them.

        Raises:
            TypeError: If ``local_steps`` is given and ``every`` or ``elastic``, too.
            ValueError: If ``local_steps`` is None, which is another preset.
        """
        check_keywords("Strategy.diloco", arguments, [*StrategyArguments.__annotations__, "every", "elastic"])
        if arguments.get("local_steps", True) is None:
            raise ValueError(
                "local_steps=None (null or false in a file) makes diloco no DiLoCo but mics, which exchanges gradients "
                "in every step; leave it out for the defaults, or choose mics"
            )
        if every is not None and "local_steps" in arguments:
            raise TypeError("every and local_steps both say how often nodes exchange weights: pass one of them")
        if elastic is not None and "local_steps" in arguments:
            raise TypeError("elastic is an argument of LocalSteps, too: pass LocalSteps(elastic=...) alone")
        local_steps = LocalSteps(elastic=elastic) if every is None else LocalSteps(every, elastic=elastic)
        preset: StrategyArguments = {"levels": "III", "local_steps": local_steps}
        return cls(**preset | arguments)

    @classmethod
    def from_dict(cls, mapping: Mapping[str, object] | str) -> Strategy:
        """Make the strategy of a YAML or JSON configuration such as ``{"preset": "zeropp", "gpus_per_node": 8}``.

        Args:
            mapping: The arguments of a strategy, with codecs by name (``"int8:256"``); ``preset``, if given, is the
                name of a class method such as ``"zeropp"``, whose arguments the others override. Or the name alone.

        Raises:
            ValueError: If a key, a preset or a codec is unknown, or a value is out of range; the error names the key.
            TypeError: If a value has the wrong type; the error names the key.
        """
        preset, arguments = arguments_from_mapping(mapping, cls.from_dict)
        make = cls if preset is None else getattr(cls, preset)
        strategy: Strategy = make(**arguments)
        return strategy

    def to_dict(self) -> dict[str, Any]:
        """Return all arguments as ``from_dict`` reads them, in strings, numbers, None and dicts.

        Raises:
            TypeError: If a codec is not one of this library; the error names the key.
        """
        return mapping_from_arguments({field.name: getattr(self, field.name) for field in dataclasses.fields(self)})

    @classmethod
    def from_deepspeed(cls, config: Mapping[str, object] | str | os.PathLike[str]) -> Strategy:
        """Make the strategy that a DeepSpeed configuration asks for; log in one line what it leaves to your script.

        Args:
            config: The configuration, or the path of one in JSON. Keys that decide no strategy may be "auto".

        Raises:
            ValueError: If keys are unknown, can't be honoured or contradict each other; the error says what to do about
                each.
            TypeError: If values have the wrong type, and nothing else is wrong.
            OSError: If the file can't be read.
        """
        return cls(**strategy_arguments(config))


def check_gpus_per_node(gpus_per_node: int | None) -> None:
    """Raise unless ``gpus_per_node`` is None or a positive int."""
    if gpus_per_node is None:
        return
    if not isinstance(gpus_per_node, int) or isinstance(gpus_per_node, bool):  # Python counts bool as an int
        raise TypeError(f"gpus_per_node must be a positive int or None, got {gpus_per_node!r}")
    if gpus_per_node < 1:
        raise ValueError(f"gpus_per_node must be at least 1, got {gpus_per_node}")
