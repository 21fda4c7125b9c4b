"""Sharding strategies: three levels, a codec for each hop, and what these mean on a layout of ranks."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from itertools import product
from typing import Any, Literal, NamedTuple, TypeAlias, Unpack

from fsdp_zpp.codecs import (
    NAMED,
    AsStored,
    Codec,
    Delta,
    FrozenName,
    Int4,
    Int8,
    check_codec,
    check_place,
    codec_of_plain,
)
from fsdp_zpp.names import check_keywords, did_you_mean, explains_keywords

from .configuration import PRESETS, StrategyArguments, arguments_from_mapping, mapping_from_arguments
from .deepspeed import strategy_arguments
from .error_feedback import LoCo, Topology, check_error_feedback, error_buffer_specs
from .local_steps import Elastic, LocalSteps

# ---- levels
#
# The three letters of a strategy: the scopes of parameters, gradients and optimizer state.

_SCOPES = "NIG"


# The optimizer's scope is at least as fine as the others: a coarser optimizer state costs memory and saves no
# communication (PaRO, arXiv 2310.06003, section 3). That leaves 14 combinations.
LEGAL_LEVELS: tuple[str, ...] = tuple(
    p + g + o for o, g, p in product(_SCOPES, repeat=3) if _SCOPES.index(o) >= max(map(_SCOPES.index, (g, p)))
)


def check_levels(levels: object) -> None:
    """Raise an error with the reason unless ``levels`` are three letters that are legal together."""
    if not isinstance(levels, str):
        raise TypeError(f"levels must be three letters such as 'GGG', torch's FULL_SHARD, got {levels!r}")
    if levels in LEGAL_LEVELS:
        return
    reason = "levels are three of the letters N, I, G"
    if asked := did_you_mean(levels, PRESETS, "Strategy.{}()", cutoff=0.75):
        reason += f" ({asked})"
    # Three valid letters can break only the rule about the optimizer.
    if len(levels) == 3 and set(levels) <= set(_SCOPES):
        reason = "the optimizer scope must be at least as fine (N < I < G) as the other two"
    raise ValueError(f"levels {levels!r} is not legal: {reason}; legal are {', '.join(LEGAL_LEVELS)}")


# ---- overrides
#
# The overrides of a strategy give modules of some classes, such as experts, strategies of their own.

Overrides: TypeAlias = "Mapping[str, Strategy] | tuple[tuple[str, Strategy], ...]"


def checked_overrides(given: object) -> tuple[tuple[str, Strategy], ...]:
    """Return overrides, given as a mapping or as pairs, as hashable pairs of a pattern and a strategy."""
    pairs = list(given.items()) if isinstance(given, Mapping) else given
    checked: list[tuple[str, Strategy]] = []
    for pair in pairs if isinstance(pairs, (list, tuple)) else [pairs]:
        match pair:
            case (str(pattern), Strategy() as strategy):
                checked.append((pattern, strategy))
            case _:
                raise TypeError(
                    "overrides must map patterns for names of classes to strategies, as in "
                    f'{{"*Experts": Strategy.zeropp()}}, got {pair!r}'
                )
        if strategy.overrides:
            raise ValueError(f"overrides: the strategy of {pattern!r} has overrides itself; put all in one mapping")
    return tuple(checked)


def pairs_of(overrides: Overrides) -> Iterable[tuple[str, Strategy]]:
    return overrides.items() if isinstance(overrides, Mapping) else overrides


def override_for(module_class: type, overrides: Overrides) -> Strategy | None:
    """Return the strategy of the first pattern that matches the class's name, in the same case; None if none does."""
    return next(
        (strategy for pattern, strategy in pairs_of(overrides) if fnmatchcase(module_class.__name__, pattern)), None
    )


# ---- strategy
#
# A sharding strategy: where each model state lives, how each hop is encoded, and how often the slow hop runs.


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
            full-precision shard; both hops carry the same codes. With ``Int4Delta()`` or ``Int2Delta()``, after a
            step the inter-node hop carries only the changes, in 4 bits or 2. A single node has no slow hop, so it
            sends weights and gradients in full precision.
        gradients: Codec of the gradient reduction's inter-node hop (ZeRO++'s qgZ).
        intra_gradients: Codec of the reduction's intra-node hop; active on a single node, too. ``"auto"`` is finer
            than ``gradients``: ``Int8`` with the same block if ``gradients`` is set and there are several nodes,
            else full precision.
        error_feedback: Error feedback on the gradient codecs.
        frozen: Codec of frozen parameters, which are quantized once. ``"as stored"`` keeps the codes of layers that
            another library has quantized, and leaves other parameters as they are; ``"auto"`` keeps them, too, and
            encodes the others in ``Int8(256)``.
        local_steps: Local steps: nodes train on their own and exchange changes of weights every few steps, instead of
            gradients in every step. It has no effect on a single node. Each node needs all of the optimizer state, so
            the optimizer scope must be ``I``. Gradients are then sent between nodes only in synchronous steps, so
            ``gradients`` needs ``LocalSteps(start=...)``.
        gpus_per_node: Number of ranks that share fast links; rank = node * gpus_per_node + local. Default: as many as
            torchrun (``LOCAL_WORLD_SIZE``) or Slurm's srun started on each node. If NVLink does not join all GPUs of a
            single node and codecs make smaller nodes pay, the default is the number of GPUs that NVLink joins, often 1.
        overrides: Strategies of parts of the model, by patterns (``fnmatch``) for names of classes. A module whose
            class matches is sharded by that strategy, with all submodules that are not sharded separately. The
            innermost matching module and the first matching pattern count. An override without ``gpus_per_node`` uses
            the nodes of this strategy.

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
    overrides: Overrides = ()

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
        object.__setattr__(self, "overrides", checked_overrides(self.overrides))

    def _check_deltas(self) -> None:
        if isinstance(self.weights, Delta) and not self.keeps_secondary:
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
        if self.optimizer != "I":
            raise ValueError(
                "local_steps has each node step on its own, so its ranks have to hold one optimizer state, sharded "
                f"over them, but levels {self.levels!r} place it elsewhere; choose I for the optimizer, such as 'III', "
                "or 'NNI' in place of 'NNN'"
            )
        if self.local_steps.start:
            return
        if self.gradients is not None:
            raise ValueError(
                f"gradients={self.gradients!r} encodes gradients on the inter-node hop, which only synchronous steps "
                "make, and local_steps has none: give it a start; or encode the exchanges with LocalSteps(codec=...), "
                "and the intra-node hop with intra_gradients=..."
            )
        if isinstance(self.error_feedback, LoCo) and self.error_feedback.hops == "inter":
            raise ValueError(
                "error_feedback corrects gradients on the inter-node hop, which only synchronous steps make, and "
                "local_steps has none: give it a start; or pass LocalSteps(error_feedback=...) for the exchanges, or "
                "LoCo(hops='both') for the intra-node hop"
            )

    @property
    def keeps_secondary(self) -> bool:
        """Return whether nodes keep a secondary shard of weights whose optimizer state is sharded over all ranks."""
        return (self.parameters, self.optimizer) == ("I", "G")

    @property
    def parameters(self) -> str:
        return self.levels[0]

    @property
    def optimizer(self) -> str:
        return self.levels[2]

    @property
    def gradient_codecs(self) -> tuple[Codec | None, Codec | None]:
        """Return the codecs of the intra-node and the inter-node hop of the gradient reduction."""
        return intra_node_codec(self.intra_gradients, self.gradients), self.gradients

    @property
    def frozen_codec(self) -> Codec | None:
        return NAMED[self.frozen] if isinstance(self.frozen, str) else self.frozen

    def resolve(self, topology: Topology) -> ResolvedStrategy:
        """Return the strategy on ``topology``: its effective scopes and active codecs. See [Note: One node].

        A single rank keeps its codecs: it sends nothing, so they cost nothing.
        """
        weights, gradients, feedback = self.weights, self.gradients, self.error_feedback
        named = intra_node_codec(self.intra_gradients, None)
        if topology.nodes == 1 and topology.world > 1:
            weights = gradients = None
            if feedback is not None and (feedback.hops == "inter" or named is None):
                feedback = None
        # "auto" must follow the active gradient codec, which is None on one node.
        codecs = intra_node_codec(self.intra_gradients, gradients), gradients
        scopes = resolve_scopes(Scopes(*self.levels), topology, feedback, codecs)
        frozen = codec_of_plain(self.frozen_codec)
        return ResolvedStrategy(self.levels, topology, scopes, weights, codecs, feedback, frozen, named)

    @property
    def all_strategies(self) -> tuple[Strategy, ...]:
        return (self, *(strategy for _, strategy in pairs_of(self.overrides)))

    @property
    def is_plain(self) -> bool:
        """Return whether this is FULL_SHARD itself: all states are sharded over all ranks, and nothing is encoded."""
        encodes_intra_node = self.intra_gradients not in (None, "auto")
        encoded = (self.weights, self.gradients, self.frozen)
        # Local steps need no test here: they refuse GGG.
        return self.levels == "GGG" and encoded == (None, None, None) and not encodes_intra_node and not self.overrides

    @property
    def follows_links(self) -> bool:
        """Return whether the machine's links may determine the node size if none is given; see [Note: Links]."""
        encodes = self.weights is not None or (self.gradients is not None and not self.keeps_secondary)
        return self.optimizer == "G" and encodes and self.error_feedback is None

    @classmethod
    def zeropp(cls, **arguments: Unpack[StrategyArguments]) -> Strategy:
        """Make ZeRO++ (arXiv 2306.10209): quantized gather, secondary shard, quantized reduction."""
        return cls(**StrategyArguments(levels="IGG", weights=Int8(256), gradients=Int4(128)) | arguments)

    @classmethod
    def mixzpp(cls, **arguments: Unpack[StrategyArguments]) -> Strategy:
        """Make MixZ++: ZeRO++ with frozen weights kept quantized; those in full precision are quantized once."""
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
            **arguments: Other arguments of a strategy; ``local_steps`` takes the place of the two above.

        Raises:
            TypeError: If ``local_steps`` is given together with ``every`` or ``elastic``.
            ValueError: If ``local_steps`` is None: that is the preset ``mics``.
        """
        check_keywords("Strategy.diloco", arguments, [*StrategyArguments.__annotations__, "every", "elastic"])
        if arguments.get("local_steps", True) is None:
            raise ValueError(
                "local_steps=None (null or false in a file) makes diloco no DiLoCo but mics, which exchanges gradients "
                "in every step; leave it out for the defaults, or choose mics"
            )
        if (every is not None or elastic is not None) and "local_steps" in arguments:
            raise TypeError("every and elastic are arguments of LocalSteps, too: pass them to it alone")
        local_steps = LocalSteps(elastic=elastic) if every is None else LocalSteps(every, elastic=elastic)
        return cls(**StrategyArguments(levels="III", local_steps=local_steps) | arguments)

    @classmethod
    def from_dict(cls, mapping: Mapping[str, object] | str) -> Strategy:
        """Make the strategy of a YAML or JSON configuration such as ``{"preset": "zeropp", "gpus_per_node": 8}``.

        Args:
            mapping: The arguments of a strategy, with codecs by name (``"int8:256"``), or just the name of a preset.
                ``preset``, if given, is the name of a class method such as ``"zeropp"``; other keys override its own.

        Raises:
            ValueError: If a preset or a codec is unknown, or a value is out of range; the error names the key.
            TypeError: If a key is unknown, or a value has the wrong type; the error names the key.
        """
        preset, arguments = arguments_from_mapping(mapping, cls.from_dict)
        make = cls if preset is None else getattr(cls, preset)
        strategy: Strategy = make(**arguments)
        return strategy

    def to_dict(self) -> dict[str, Any]:
        """Return all arguments as a dict for ``from_dict``, of strings, numbers, None and dicts.

        Raises:
            TypeError: If a codec is not one of this library; the error names the key.
        """
        return mapping_from_arguments({field.name: getattr(self, field.name) for field in dataclasses.fields(self)})

    @classmethod
    def from_deepspeed(
        cls, config: Mapping[str, object] | str | os.PathLike[str], **arguments: Unpack[StrategyArguments]
    ) -> Strategy:
        """Make the strategy of a DeepSpeed configuration; log the keys for settings of your script.

        Args:
            config: The configuration, or the path of one in JSON. Keys that do not affect the strategy may be "auto".
            arguments: Arguments instead of those that the configuration asks for.

        Raises:
            ValueError: If a key is unknown, can't be honoured or contradicts another one.
            TypeError: If a value has the wrong type.
            OSError: If the file can't be read.
        """
        return cls(**strategy_arguments(config, arguments))


def check_gpus_per_node(gpus_per_node: int | None) -> None:
    if gpus_per_node is None:
        return
    if not isinstance(gpus_per_node, int) or isinstance(gpus_per_node, bool):  # Python counts bool as an int
        raise TypeError(f"gpus_per_node must be a positive int or None, got {gpus_per_node!r}")
    if gpus_per_node < 1:
        raise ValueError(f"gpus_per_node must be at least 1, got {gpus_per_node}")


# ---- resolve
#
# Resolution of a strategy on a layout of ranks: its effective scopes, and the codecs that are active.
#
# [Note: One node]
# Codecs trade computation for bytes on the slow network between nodes. A single node has no such network, and encoding
# takes longer than its fast links need for the saved bytes. So the codecs meant for the slow network are inactive
# there: those of weights and gradients, and the one that "auto" derives for the intra-node hop. Torch's own collectives
# then run, except where the scopes need others. A codec named explicitly for the intra-node hop stays active, as does
# error feedback on that hop.
#
# [Note: Links]
# The ranks of a node share fast links. On a single host whose GPUs NVLink does not join, every link is slow, and
# ``gpus_per_node=1`` makes every hop an inter-node hop; GPUs that NVLink bridges in pairs are nodes of two. If
# ``gpus_per_node`` is not given, the machine's links (runtime/links.py) determine it under these conditions:
#
# - The optimizer scope is ``G``. Under ``I`` and ``N`` smaller nodes hold more of the optimizer state, the largest of
#   all states: ``III`` would become ``NNN``.
# - Codecs make smaller nodes pay. Under parameter scope ``I`` each node keeps a copy of the weights. It must be
#   encoded: a plain copy would undo what sharding saves. Under other scopes, a codec of weights or gradients is enough.
# - There is no error feedback. Each GPU would keep fp32 errors for whole gradients: 4 bytes a parameter, not sharded.
# - There is one host. The network between hosts is slower still, so on several hosts the host stays the node, and both
#   hops are encoded.
# - NVLink joins equal sets of consecutive ranks. No node size expresses other sets.
#
# If a condition fails, the host is the node. A frozen base, encoded by ``frozen`` or made of packed values, stays
# sharded over the host in any case: under LoRA it is nearly all of the model, and often does not fit on one GPU.
# Smaller nodes cost memory: the encoded copy of the weights and, under gradient scope ``I``, gradients that accumulate
# whole on each GPU; the set-up line names the bytes.
# PCIe counts as slow even with peer-to-peer access: compared with NVLink, it lacks bandwidth.


class Scopes(NamedTuple):
    parameters: str  # each is N, I or G
    gradients: str
    optimizer: str


@dataclass(frozen=True)
class ResolvedStrategy:
    """A strategy on a layout of ranks. :meth:`Strategy.resolve` makes it once; all other code uses it.

    Codecs and error feedback are None unless they are active.

    Attributes:
        levels: The requested scopes as letters; the first letter places a frozen base.
        scopes: The effective scopes; see :func:`resolve_scopes`.
        gradient_codecs: Codecs of the intra-node and of the inter-node hop of the gradient reduction.
        frozen: Codec of frozen parameters that are in full precision.
        intra_codec: Codec of the intra-node hop of the gradient reduction, if it was named explicitly.
    """

    levels: str
    topology: Topology
    scopes: Scopes
    weights: Codec | None
    gradient_codecs: tuple[Codec | None, Codec | None]
    error_feedback: LoCo | None
    frozen: Codec | None
    intra_codec: Codec | None = None

    def within_node(self) -> ResolvedStrategy:
        """Return the strategy for a node that trains on its own.

        It is that of a job of one node, but the codec of weights stays active, as it was resolved for several nodes.
        """
        gpus, codecs = self.topology.gpus_per_node, (self.intra_codec, None)
        node = Topology(gpus, gpus)
        feedback = self.error_feedback
        if feedback is not None and (feedback.hops == "inter" or self.intra_codec is None):
            feedback = None
        # Start from the levels: error feedback between nodes, which ends here, may have changed ``self.scopes``.
        scopes = resolve_scopes(Scopes(*self.levels), self.topology)
        return dataclasses.replace(
            self,
            topology=node,
            scopes=resolve_scopes(scopes, node, feedback, codecs),
            gradient_codecs=codecs,
            error_feedback=feedback,
        )


def resolve_scopes(
    scopes: Scopes,
    topology: Topology,
    error_feedback: LoCo | None = None,
    gradient_codecs: tuple[Codec | None, Codec | None] = (None, None),
) -> Scopes:
    """Return the effective scopes on ``topology``: a network level that does not exist shards nothing.

    On one node, ``I`` is the same as ``G``. On nodes of one GPU, ``I`` is the same as ``N``, except for a secondary
    shard (parameters ``I`` with an optimizer ``G``): the shard then holds all weights, but encoded, so its scope
    stays ``I``.

    Error feedback must see the sum of all micro-batches. So gradients accumulate before the first hop that has error
    feedback: on the rank (``N``) or in the node (``I``), unless their scope is as coarse already. Arguments are the
    error feedback and the codecs that are active.
    """
    requested = "".join(scopes)
    if topology.nodes == 1:
        scopes = Scopes(*requested.replace("I", "G"))
    elif topology.gpus_per_node == 1:
        keeps_secondary = scopes.parameters == "I" and scopes.optimizer == "G"
        scopes = Scopes(*requested.replace("I", "N"))
        scopes = scopes._replace(parameters="I") if keeps_secondary else scopes
    if error_feedback is None:
        return scopes
    # Only the names of the hops matter here, not the sizes of their buffers.
    fed_back = error_buffer_specs(error_feedback, gradient_codecs, scopes.optimizer, topology, 0)
    if "intra" in fed_back or ("inter" in fed_back and topology.gpus_per_node == 1):
        return scopes._replace(gradients="N")
    return scopes._replace(gradients="I") if "inter" in fed_back and scopes.gradients == "G" else scopes


def intra_node_codec(intra: Codec | Literal["auto"] | None, inter: Codec | None) -> Codec | None:
    """Return the codec of the intra-node hop: ``intra``, or for ``"auto"`` 8 bits in the blocks of ``inter``."""
    # The intra-node network is fast, so its hop can afford the precision that the slow hop can't. SDP4Bit (arXiv
    # 2410.15526, section 3.2) finds 8 bits on the intra-node hop and 4 on the inter-node hop enough to keep the loss.
    if intra != "auto":
        return intra
    # A user's codec may have no block; 256 is the default of Int8.
    return None if inter is None else _eight_bits(getattr(inter, "block", 256))


_eight_bits = cache(Int8)
