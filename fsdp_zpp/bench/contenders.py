"""Contenders by name: torch's own strategies and those of fsdp_zpp, and the code that makes each."""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard as torch_fully_shard,
)
from torch.utils.checkpoint import checkpoint

from fsdp_zpp.codecs import Codec, Int2Delta, Int3, Int4Delta
from fsdp_zpp.frozen.quantize import quantize_frozen_params
from fsdp_zpp.fsdp2.fully_shard import fully_shard
from fsdp_zpp.names import did_you_mean, how_to_install
from fsdp_zpp.planner.choice import TOLERANCE, Candidate, Estimate, line_of, of_torch, ties, with_codecs
from fsdp_zpp.planner.cluster import (
    SLOWEST_NVLINK,
    Bandwidth,
    Cluster,
    MemoryBudget,
    Precision,
    StepConfig,
    measure_bandwidth,
    world,
)
from fsdp_zpp.planner.model_size import Case, ModelSize, layers, module_size, pretrained_size
from fsdp_zpp.planner.plan import estimate_of
from fsdp_zpp.runtime.api import traffic
from fsdp_zpp.runtime.links import find_links
from fsdp_zpp.strategy.configuration import codec_from_name
from fsdp_zpp.strategy.strategy import LEGAL_LEVELS, Strategy

from .results import Row, Task

# ---- training


class Training(ABC):
    """One way to train a task's model, ready for its first step once constructed."""

    @abstractmethod
    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Make an optimizer step over tokens [micro-batches, sequences, length]; return the last micro-batch's loss."""

    def sent(self) -> dict[str, int] | None:
        """Return the bytes that this rank has sent so far, by kind and hop; None if they are not counted."""
        return None

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Release what this training keeps outside of this object; no step can follow."""


# ---- models

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def load_config(name: str) -> Any:
    """Return the configuration of a causal language model; takes and raises what ``pretrained_size`` does."""
    pretrained_size(name)  # raises if the model can't be built
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(name)


def network(task: Task, one_dtype: bool = False) -> nn.Module:
    """Build the model on the meta device: in fp32, or, with ``task.lora``, as a PEFT model on a frozen base in bf16.

    Adapters are in fp32, or in bf16 if ``one_dtype``.
    """
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(task.config)
    config.get_text_config().use_cache = False  # a cache would keep the keys and values of every layer
    with torch.device("meta"):
        base: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model = adapted(base.to(torch.bfloat16), task.lora) if task.lora else base
        if task.lora and one_dtype:
            model.to(torch.bfloat16)
    return model


def adapted(base: nn.Module, rank: int) -> nn.Module:
    """Freeze ``base``; add adapters of ``rank`` to its attention projections; if it has none, to all linear layers."""
    try:
        from peft import LoraConfig, get_peft_model
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"adapters need peft: {how_to_install('bench')}") from error
    names = {name.rpartition(".")[2] for name, _ in base.named_modules()}
    targets: list[str] | str = [name for name in _PROJECTIONS if name in names] or "all-linear"
    model: nn.Module = get_peft_model(base, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets))
    return model


def base_of(model: nn.Module) -> Any:
    """Return the transformers model in ``model``, which may be a PEFT model."""
    base: Any = getattr(model, "get_base_model", lambda: model)
    return base()


def layer_places(model: nn.Module) -> Iterator[tuple[nn.ModuleList, int]]:
    """Yield the place of each layer of ``model``: its list, and its index in the list."""
    own = {id(layer) for layer in layers(model)}
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    for places in lists:
        yield from ((places, index) for index, layer in enumerate(places) if id(layer) in own)


def prepare(task: Task, layer: nn.Module) -> None:
    """Make a layer recompute its activations, and compile it, if the task says so; call before sharding the layer."""
    if task.checkpointing:
        # Only the layer's forward is replaced, so FSDP gathers the layer outside of the recomputed part.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    if task.compile:
        layer.compile()


def materialize(module: nn.Module, base: Any, device: torch.device) -> nn.Module:
    """Allocate and initialize the parameters and buffers that are on the meta device; return the module."""
    made: dict[nn.Parameter, nn.Parameter] = {}  # tied parameters stay tied
    for inner in module.modules():
        if any(buffer is not None and buffer.is_meta for buffer in inner._buffers.values()):
            _make_buffers(inner, base, device)
        for name, parameter in list(inner._parameters.items()):
            if parameter is None or not parameter.is_meta:
                continue
            if parameter not in made:
                values = torch.empty_like(parameter, device=device)
                nn.init.ones_(values) if parameter.ndim == 1 else nn.init.normal_(values, std=0.02)
                made[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
            inner._parameters[name] = made[parameter]
    return module


def _make_buffers(module: Any, base: Any, device: torch.device) -> None:
    if "inv_freq" in module._buffers:
        module.__init__(module.config)
        module.to(device)
        return
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = torch.zeros_like(buffer, device=device)
    with torch.no_grad():
        base._init_weights(module)


# ---- fsdp
#
# [Note: Equal terms]
# All contenders compute and communicate in bf16, have fp32 master weights in full training, and step with fused AdamW.
# Each decoder layer is a unit, and the rest of the model is one more; under ``once-...`` the whole model is one unit.
# With LoRA the base is in bf16 and the adapters are in fp32. Under torch's FSDP1 the adapters are in bf16, too, since
# it flattens only one dtype. Layers are made and sharded one by one, so that no rank ever holds the whole model.


class TorchFSDP(Training):
    """Trains with AdamW a model that ``fully_shard`` or ``FullyShardedDataParallel`` shards as a contender says."""

    def __init__(self, task: Task, contender: Contender):
        torch.manual_seed(0)
        if task.compile:
            # Graphs of earlier contenders would count toward torch.compile's limit of recompilations.
            torch._dynamo.reset()
        self._task, self._contender, self._strategy = task, contender, contender.strategy
        self._mesh = self._make_mesh()
        self.model = self._build()
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trainable, lr=1e-4, fused=task.device == "cuda")

    def _make_mesh(self) -> DeviceMesh | None:
        task = self._task
        if self._strategy is TORCHS[HSDP]:
            shape = (task.nodes, task.gpus_per_node)
            return init_device_mesh(task.device, shape, mesh_dim_names=("replicate", "shard"))
        return init_device_mesh(task.device, (dist.get_world_size(),)) if self._contender.fsdp2 else None

    def _build(self) -> nn.Module:
        contender = self._contender
        model = network(self._task, one_dtype=contender.is_torchs and not contender.fsdp2)
        base = base_of(model)
        for stack, index in list(layer_places(model)):
            self._materialize(stack[index], base)
            prepare(self._task, stack[index])
            if contender.base is None:
                stack[index] = self._shard(stack[index])
        self._materialize(model, base)
        return self._shard(model)

    def _materialize(self, module: nn.Module, base: Any) -> None:
        materialize(module, base, self._task.place)
        if self._contender.base is not None:
            quantize_frozen_params(module, self._contender.base, gpus_per_node=self._contender.gpus_per_node)

    def _shard(self, module: nn.Module) -> nn.Module:
        half = torch.bfloat16
        if not self._contender.fsdp2:
            return FullyShardedDataParallel(
                module,
                sharding_strategy=self._strategy,
                mixed_precision=MixedPrecision(half, half, half),
                device_id=self._task.place,
                device_mesh=self._mesh,
                use_orig_params=True,
            )
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half)
        if self._contender.is_torchs:
            torch_fully_shard(module, mesh=self._mesh, mp_policy=policy)
        else:
            fully_shard(module, strategy=self._strategy, mesh=self._mesh, mp_policy=policy)
        return module

    def accumulating(self, accumulates: bool) -> AbstractContextManager[Any]:
        """Return a context that keeps gradients local, if ``accumulates``."""
        if isinstance(self.model, FullyShardedDataParallel):
            return self.model.no_sync() if accumulates else nullcontext()
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(not accumulates)
        return nullcontext()

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        for index, micro_batch in enumerate(tokens):
            with self.accumulating(index < len(tokens) - 1):
                loss: torch.Tensor = self.model(input_ids=micro_batch, labels=micro_batch).loss
                loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def sent(self) -> dict[str, int] | None:
        if self._contender.is_torchs:
            return None
        return {f"{kind} {hop}": sent for kind, hops in traffic(self.model).items() for hop, sent in hops.items()}


# ---- utilization

PEAK_FLOPS = {
    "NVIDIA H200": 989e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
}
"""Dense bf16 FLOP/s by the name that torch gives a GPU, from the vendor's data sheets."""


def flops_a_token(task: Task) -> float:
    """Return the FLOPs that one token needs in forward and backward, whatever the program spends on it.

    A parameter takes 6 FLOPs, or 4 if it is frozen. Attention takes 12 * layers * hidden * sequence, as in
    PaLM (arXiv 2204.02311, appendix B), which does not halve it for causal attention. An expert counts only for the
    tokens routed to it. Recomputation does not count. The input embedding counts only if it is tied to the output's.
    """
    model, config = network(task), task.config.get_text_config()
    base, size = base_of(model), module_size(model)
    flops: float = 6 * size.active_trainable + 4 * size.active_frozen
    embedding, head = base.get_input_embeddings().weight, base.get_output_embeddings()
    if head is None or head.weight is not embedding:
        flops -= embedding.numel() * (6 if embedding.requires_grad else 4)
    flops += 12 * config.num_hidden_layers * config.hidden_size * task.sequence
    return flops


def utilization(task: Task, tokens_per_s: float, gpu: str) -> float | None:
    """Return the share of the GPUs' total peak that ``tokens_per_s`` of all ranks takes; None for an unknown GPU."""
    peak = PEAK_FLOPS.get(gpu)
    return tokens_per_s * flops_a_token(task) / (peak * dist.get_world_size()) if peak else None


# ---- contenders

FULL_SHARD, HSDP = "full_shard", "hybrid_shard"
TORCHS = {FULL_SHARD: ShardingStrategy.FULL_SHARD, HSDP: ShardingStrategy.HYBRID_SHARD}
_TORCHS_LABELS = {ShardingStrategy.FULL_SHARD: "FULL_SHARD", ShardingStrategy.HYBRID_SHARD: "HSDP"}


@dataclass(frozen=True)
class Contender:
    """A way to shard a model.

    Args:
        name: Its name in a result.
        strategy: A ``Strategy``, or torch's ``ShardingStrategy``.
        fsdp2: True for ``fully_shard``, False for ``FullyShardedDataParallel``.
        base: Codec of a frozen base that is quantized before the model is wrapped as one unit; None wraps each layer.
    """

    name: str
    strategy: Any
    fsdp2: bool = True
    base: Codec | None = None

    @property
    def is_torchs(self) -> bool:
        return isinstance(self.strategy, ShardingStrategy)

    @property
    def gpus_per_node(self) -> int | None:
        """Return the strategy's node size; None leaves it to the launcher, as torch's own strategies always do."""
        return self.strategy.gpus_per_node if isinstance(self.strategy, Strategy) else None

    @property
    def code(self) -> str:
        """Return Python code that makes the strategy, or the label of one of torch's own."""
        if self.base is None:
            return self._made
        codec = repr(self.base).replace("block=", "")
        nodes = "" if self.gpus_per_node is None else f", gpus_per_node={self.gpus_per_node}"
        return f"quantize_frozen_params(model, {codec}{nodes}), then wrap the whole model once by {self._made}"

    @property
    def _made(self) -> str:
        if self.is_torchs:
            return _TORCHS_LABELS[self.strategy]
        return line_of(self.strategy, self.strategy.gpus_per_node).partition("strategy = ")[2]

    @property
    def label(self) -> str:
        own = self._made.removeprefix("Strategy.") + (f" once, {self.base} base" if self.base is not None else "")
        return own if self.fsdp2 else f"{own}, FSDP1"

    def on_nodes_of(self, gpus_per_node: int) -> Contender:
        """Return the contender with this many GPUs counted as a node; torch's own have no such argument."""
        if self.is_torchs:
            return self
        return dataclasses.replace(self, strategy=dataclasses.replace(self.strategy, gpus_per_node=gpus_per_node))


_STRATEGIES: dict[str, Strategy | ShardingStrategy] = {
    **TORCHS,
    **{levels: Strategy(levels) for levels in LEGAL_LEVELS},
    **{f"zeropp-{levels}": Strategy.zeropp(levels=levels) for levels in LEGAL_LEVELS},
    "zeropp": Strategy.zeropp(),
    "zeropp-delta": Strategy.zeropp(weights=Int4Delta()),
    "zeropp-delta-IIG": Strategy.zeropp(levels="IIG", weights=Int4Delta()),
    "zeropp-delta2": Strategy.zeropp(weights=Int2Delta()),
    "zeropp-delta2-int3": Strategy.zeropp(weights=Int2Delta(), gradients=Int3()),
    "zeropp-delta2-IIG": Strategy.zeropp(levels="IIG", weights=Int2Delta()),
    "loco": Strategy.loco(),
    "mixzpp": Strategy.mixzpp(),
}
_ONCE = "once-zeropp"
NAMES_ON_NODES = (*_STRATEGIES, _ONCE, *(f"{name}-{base}" for name in (_ONCE, "mixzpp") for base in ("int4", "nf4")))
ALONE = "-alone"
NAMES = (*NAMES_ON_NODES, *(f"{name}{ALONE}" for name in NAMES_ON_NODES if name not in TORCHS))
"""All names. ``once-zeropp`` quantizes the base to int8, then wraps the model as one unit; ``-int4`` and ``-nf4`` name
a base in 4 bits instead. ``mixzpp`` wraps each layer. With ``-alone``, each GPU counts as a node.
"""


def contender(name: str, fsdp2: bool = True, called: str | None = None) -> Contender:
    """Return the contender of one of :data:`NAMES`; ``called`` replaces the name in results."""
    if name not in NAMES:
        hint = did_you_mean(name, NAMES, before="; ")
        raise ValueError(
            f"{name!r} is not a strategy; allowed are {', '.join(NAMES_ON_NODES)}, and those that are not torch's with "
            f"{ALONE} behind, each GPU a node{hint}"
        )
    own, base = name.removesuffix(ALONE), None
    if own in _STRATEGIES:
        strategy = _STRATEGIES[own]
    else:
        # Made only if asked for: NF4 needs bitsandbytes.
        codec = codec_from_name("int8" if own == _ONCE else own.rpartition("-")[2])
        strategy, base = (Strategy.zeropp(), codec) if own.startswith(_ONCE) else (Strategy.mixzpp(frozen=codec), None)
    found = Contender(called or name, strategy, fsdp2, base)
    return found.on_nodes_of(1) if name.endswith(ALONE) else found


# ---- links

_MIB = {"cuda": 128, "cpu": 8}


@dataclass(frozen=True)
class Links(Bandwidth):
    """Bandwidths. ``are_slow`` if NVLink does not join a node's GPUs: a strategy may then count each GPU as a node."""

    are_slow: bool = False

    def lines(self) -> list[str]:
        """Return lines for the report."""
        named = {"between nodes, a whole node": self.inter_gbps, "inside a node, a rank": self.intra_gbps}
        speeds = [f"{where}: {gbps:,.4g} Gbit/s" for where, gbps in named.items() if gbps is not None]
        return [f"{self.nodes} x {self.gpus_per_node} ranks", *speeds]


def measure_links(gpus_per_node: int | None, device: str) -> Links:
    """Measure the inter-node and the intra-node bandwidth. Collective. Raise ValueError for an impossible layout."""
    measured, found = measure_bandwidth(world(), gpus_per_node, _MIB[device]), find_links(world())
    return Links(**vars(measured), are_slow=found is not None and found.are_slow)


# ---- fitting

_ANY = 1.0
"""Gbit/s of links in plans that are made only to count bytes, which do not depend on bandwidth."""


@dataclass(frozen=True)
class Planner:
    """Plans the contenders of a run. ``free`` GiB are free on each GPU; None sets no limit."""

    size: ModelSize
    task: Task
    links: Links
    free: float | None

    def states_gib(self, contender: Contender) -> float:
        """Return the GiB that a rank needs for model states and units in flight."""
        return self._of(contender).gib

    def does_not_fit(self, contender: Contender, beside_states: float) -> str:
        """Say why a contender can't run; empty if it may.

        ``beside_states`` is the GiB, mostly activations, that another contender took beside its model states.
        """
        needed = self.states_gib(contender) + beside_states
        if self.free is None or needed <= self.free:
            return ""
        return f"left out: needs about {needed:.1f} GiB, {self.free:.1f} are free"

    def sent(self, contender: Contender) -> Row:
        """Return, as columns of a row, the MiB that a rank sends in a step under one of torch's strategies."""
        sent = self._of(contender).volume
        mib = {"inter": sent.inter / 2**20, "intra": sent.intra / 2**20}
        return {"sent_mib_a_step": mib, "sent_is_planned": True}

    def _of(self, contender: Contender) -> Estimate:
        strategy, links = contender.strategy, self.links
        gpus = links.gpus_per_node if contender.is_torchs else strategy.gpus_per_node or links.gpus_per_node
        nodes = links.nodes * links.gpus_per_node // gpus
        case = Case(
            self.size,
            Cluster(nodes, gpus, _ANY, _ANY, links.are_slow),
            StepConfig(self.task.micro_batches),
            MemoryBudget(activations=0, reserve=0),
            Precision(),
        )
        if contender.is_torchs:
            # On a single node, HYBRID_SHARD shards over all ranks, as FULL_SHARD does.
            by_name = {each.torch: each for each in of_torch(case)}
            return estimate_of(by_name.get(strategy.name, by_name["FULL_SHARD"]), case)
        base = strategy.frozen if contender.base is None else contender.base
        return estimate_of(Candidate(dataclasses.replace(strategy, gpus_per_node=None, frozen=base)), case)


# ---- candidates

_NAMES = {strategy: name for name, strategy in _STRATEGIES.items()}


def candidates(planner: Planner) -> list[str]:
    """Return the names of strategies to try, the simplest first, except those that need a package missing here."""
    torchs = [FULL_SHARD, HSDP] if planner.links.nodes > 1 else [FULL_SHARD]
    ours = _for_adapters(planner) if planner.task.lora else _for_full_training(planner)
    return list(dict.fromkeys([*torchs, *ours]))


def _for_adapters(planner: Planner) -> Iterator[str]:
    """Yield strategies that shard a quantized base inside each node; if that may pay, also ones that keep it whole."""
    names = [_ONCE, f"{_ONCE}-int4", *([f"{_ONCE}-nf4"] if find_spec("bitsandbytes") else [])]
    yield from names
    if _may_pay_alone(planner.links):
        yield from (f"{name}{ALONE}" for name in names)
    yield "mixzpp"


def _for_full_training(planner: Planner) -> Iterator[str]:
    """Yield the planner's presets for the real nodes, then, if they may pay, presets that count each GPU as a node.

    On a single real node only the second kind is yielded: without a hop between nodes, codecs are inactive.
    """
    links, accumulates = planner.links, planner.task.micro_batches > 1
    if links.nodes > 1:
        yield from (_NAMES[each.strategy] for each in with_codecs(accumulates, several_nodes=True))
    if _may_pay_alone(links):
        alone = [_NAMES[each.strategy] for each in with_codecs(accumulates, several_nodes=False)]
        yield from (f"{name}{ALONE}" for name in (alone if links.nodes == 1 else ("zeropp", "zeropp-delta")))


def _may_pay_alone(links: Links) -> bool:
    """Return whether to try each GPU as a node: on one node, always; on several, if links inside them are slow."""
    return links.intra_gbps is not None and (links.nodes == 1 or links.intra_gbps < SLOWEST_NVLINK)


# ---- recommendation


class Recommendation(NamedTuple):
    """A line of advice, and the name of the recommended strategy, or None if nothing could be measured."""

    line: str
    strategy: str | None


def recommend(rows: Sequence[Row]) -> Recommendation:
    """Return the advice that follows from a run. Among equally fast ``rows``, the first is preferred."""
    measured = [row for row in rows if "step_ms" in row]
    if not measured:
        said = "; ".join(f"{row['label']}: {row['failed']}" for row in rows)
        return Recommendation(f"nothing could be measured: {said}", None)
    by_name = {row["strategy"]: row for row in reversed(rows)}
    stock, hsdp = by_name.get(FULL_SHARD), by_name.get(HSDP)
    faster = measured
    if stock is not None and "step_ms" in stock:
        faster = [row for row in measured if is_clearly_faster(row, stock)]
        if not faster:
            return Recommendation(f"stay with FULL_SHARD: {_why_stay(measured, stock)}", stock["strategy"])
    fastest = min(faster, key=itemgetter("step_ms"))
    # The first of equals is the simplest.
    chosen = next(row for row in ties(faster, itemgetter("step_ms")) if not is_clearly_faster(fastest, row))
    return Recommendation(f"use {chosen['code']}: {_gains(chosen, stock, hsdp)}", chosen["strategy"])


def is_clearly_faster(row: Row, than: Row) -> bool:
    """Return whether a row's upper quartile is below the other's lower, and its median is less by :data:`TOLERANCE`."""
    return bool(row["quartiles_ms"][1] < than["quartiles_ms"][0] and row["step_ms"] < (1 - TOLERANCE) * than["step_ms"])


def _gains(chosen: Row, stock: Row | None, hsdp: Row | None) -> str:
    parts = []
    for name, other in (("FULL_SHARD", stock), ("HSDP", hsdp)):
        if other is None or other is chosen:
            continue
        parts.append(f"{_ratio(other, chosen)}x {name}" if "step_ms" in other else f"{name}: {other['failed']}")
    if stock is not None and stock.get("peak_gib") is not None and chosen.get("peak_gib") is not None:
        parts.append(f"{chosen['peak_gib'] - stock['peak_gib']:+.1f} GiB")
    return ", ".join(parts) or f"{chosen['step_ms']:.0f} ms a step"


def _why_stay(measured: Sequence[Row], stock: Row) -> str:
    others = [row for row in measured if row is not stock]
    if not others:
        return "nothing else could be measured"
    best = min(others, key=lambda row: row["step_ms"])
    if best["step_ms"] >= stock["step_ms"]:
        return f"the best other, {best['label']}, is {_ratio(best, stock)}x slower"
    spread = (stock["slowest_ms"] - stock["fastest_ms"]) / stock["step_ms"]
    return (
        f"the best other, {best['label']}, is {_ratio(stock, best)}x as fast, which is within the noise (FULL_SHARD's "
        f"own steps differ by {spread:.0%})"
    )


def _ratio(slower: Row, faster: Row) -> str:
    ratio = slower["step_ms"] / faster["step_ms"]
    return f"{ratio:.1f}" if ratio >= 1.5 else f"{ratio:.2f}"
