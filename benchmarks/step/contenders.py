"""All contenders by name: torch's strategies, those of fsdp_zpp, and peers."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from models import whole
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fsdp_zpp.bench.contenders import (
    NAMES,
    Contender,
    TorchFSDP,
    Training,
    adapted,
    base_of,
    contender,
    layer_places,
    materialize,
    network,
    prepare,
)
from fsdp_zpp.bench.results import Task
from fsdp_zpp.codecs import Int8
from fsdp_zpp.strategy.error_feedback import LoCo
from fsdp_zpp.strategy.local_steps import LocalSteps
from fsdp_zpp.strategy.strategy import Strategy

# ---- expert parallelism
#
# Mixtures of experts whose experts are spread over two ranks, between which tokens travel, under ``fully_shard``.
#
# Consecutive ranks hold different experts; those that hold the same ones shard them over a mesh of their own. The rest
# of a layer is sharded over all ranks.

EXPERT_PARALLEL = 2
"""Ranks that hold one layer's experts together."""


class DispatchedExperts(nn.Module):
    """This rank's share of a layer's experts, to which the other ranks send the tokens that are meant for them.

    Args:
        experts: All experts of a layer, without values: transformers' fused ones.
        group: The ranks that share them.
    """

    def __init__(self, experts: nn.Module, group: dist.ProcessGroup):
        super().__init__()
        self._group, ranks = group, dist.get_world_size(group)
        self._own = experts.num_experts // ranks
        for name, weight in list(experts.named_parameters()):
            setattr(experts, name, nn.Parameter(weight[: self._own].contiguous()))
        experts.num_experts = self._own
        self.experts = experts

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of experts for tokens ``hidden`` [tokens, width]; the others are [tokens, k]."""
        expert = index.flatten()
        order = expert.argsort(stable=True)
        token = order // index.size(1)
        ranks = dist.get_world_size(self._group)
        sent = torch.bincount(expert // self._own, minlength=ranks)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        out, into = sent.tolist(), received.tolist()
        theirs = expert.new_empty(sum(into))
        dist.all_to_all_single(theirs, expert[order] % self._own, into, out, group=self._group)
        tokens = all_to_all_single_autograd(hidden[token], into, out, self._group)
        one = torch.ones_like(theirs, dtype=weights.dtype)
        computed = self.experts(tokens, theirs[:, None], one[:, None])
        returned = all_to_all_single_autograd(computed, out, into, self._group)
        weighted = returned * weights.flatten()[order, None].to(returned.dtype)
        return torch.zeros_like(hidden).index_add(0, token, weighted)


class ExpertParallel(TorchFSDP):
    """``fully_shard`` with the experts of each layer spread over :data:`EXPERT_PARALLEL` ranks: ``fsdp2:ep2-...``.

    Args:
        task: Task that is trained: a mixture of experts.
        contender: Strategy of the rest, and of the experts on their own mesh.
    """

    def __init__(self, task: Task, contender: Contender):
        shape = (dist.get_world_size() // EXPERT_PARALLEL, EXPERT_PARALLEL)
        self._axes = init_device_mesh(task.device, shape, mesh_dim_names=("efsdp", "ep"))
        super().__init__(task, contender)

    def _build(self) -> nn.Module:
        model = network(self._task)
        base = base_of(model)
        for layers, index in list(layer_places(model)):
            layer = layers[index]
            layer.mlp.experts = DispatchedExperts(layer.mlp.experts, self._axes["ep"].get_group())
            self._materialize(layer, base)
            prepare(self._task, layers[index])
            self._shard_over(self._axes["efsdp"], layer.mlp.experts)
            # Its gradients are sums over the tokens of all ranks.
            layer.mlp.experts.set_gradient_divide_factor(dist.get_world_size())
            layers[index] = self._shard(layer)
        materialize(model, base, self._task.place)
        return self._shard(model)

    def _shard_over(self, mesh: DeviceMesh, module: nn.Module) -> None:
        """Shard a module over another mesh than the model's."""
        self._mesh, models = mesh, self._mesh
        self._shard(module)
        self._mesh = models


# ---- float8
#
# Linear layers that compute in float8, whose weights torchao casts to 8 bits before the gather, under ``fully_shard``.
#
# Needs ``pip install torchao`` and a GPU of compute capability 8.9 or later; on a CPU torchao emulates the products.


class Float8(TorchFSDP):
    """``fully_shard`` with torchao's float8 training of all layers but the head: ``fsdp2:float8-...``.

    Scales of all weights are computed after the step, by one all-reduce, as torchao recommends.
    """

    def _materialize(self, module: nn.Module, base: Any) -> None:
        super()._materialize(module, base)
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=self._task.device == "cpu")
        convert_to_float8_training(module, config=config, module_filter_fn=_is_in_a_layer)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        loss = super().step(tokens)
        precompute_float8_dynamic_scale_for_fsdp(self.model)
        return loss


def _is_in_a_layer(module: nn.Module, name: str) -> bool:
    """Return whether torchao is to convert a module: not the head, nor what was converted with its layer."""
    if name.endswith("lm_head") or isinstance(module.weight, DTensor):
        return False
    return all(size % 16 == 0 for size in module.weight.shape)  # as its products need it


# ---- other units


class Ends(TorchFSDP):
    """``fully_shard`` with the embedding and the head as units of their own: ``fsdp2:ends-...``.

    A forward then starts when it has the embedding, and the head's gradient does not wait for the end of a backward.
    """

    _layers_a_unit = 1

    def _build(self) -> nn.Module:
        if self._contender.base is not None:
            raise ValueError(f"{self._contender.name}: the whole model is one unit if its base is quantized once")
        model = network(self._task)
        base, places = base_of(model), list(layer_places(model))
        for first in range(0, len(places), self._layers_a_unit):
            unit = [stack[index] for stack, index in places[first : first + self._layers_a_unit]]
            for layer in unit:
                self._materialize(layer, base)
                prepare(self._task, layer)
            self._shard(unit if len(unit) > 1 else unit[0])
        for end in (base.get_input_embeddings(), base.get_output_embeddings()):
            self._shard(materialize(end, base, self._task.place))
        self._materialize(model, base)
        return self._shard(model)


class Pairs(Ends):
    """The same with two layers a unit, which halves what the CPU does for units: ``fsdp2:pairs-...``."""

    _layers_a_unit = 2


# ---- peers
#
# Hybrid and quantized sharding of other libraries, each in its own way: DeepSpeed, Megatron-FSDP and bitsandbytes.
#
# The first two get the model whole, in bf16 on the rank's GPU, and keep fp32 main weights beside it; adapters of LoRA
# are in bf16, too. Both accumulate and reduce gradients in bf16, as all contenders reduce them. They leave state in
# the process, so name them last.

PEERS = ("deepspeed-zero3", "deepspeed-zeropp", "megatron-hfsdp", "bitsandbytes")


def peer(task: Task, name: str) -> Training:
    """Build the peer of this name. Collective.

    Raises:
        ModuleNotFoundError: If it is not installed.
    """
    if name == "bitsandbytes":
        return BitsandbytesQLoRA(task)
    return MegatronHFSDP(task) if name == "megatron-hfsdp" else DeepSpeed(task, name)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters for an optimizer."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def deepspeed_config(task: Task, name: str, unit: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration.

    Args:
        task: Task that is trained.
        name: ``deepspeed-zero3``, or ``deepspeed-zeropp`` for qwZ, hpZ over the GPUs of a node, and qgZ.
        unit: Parameters of a decoder layer, which are prefetched, and reduced, at a time.
    """
    zero: dict[str, Any] = {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        # The default of 5e8 would leave most of these models' gradients to the end of backward.
        "reduce_bucket_size": unit,
        "stage3_prefetch_bucket_size": unit,
    }
    if name == "deepspeed-zeropp":
        zero |= {"zero_quantized_weights": True, "zero_quantized_gradients": True}
        zero["zero_hpz_partition_size"] = task.gpus_per_node
    return {
        "train_micro_batch_size_per_gpu": task.micro_batch,
        "gradient_accumulation_steps": task.micro_batches,
        "bf16": {"enabled": True},
        "communication_data_type": "bf16",
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,
    }


class DeepSpeed(Training):
    """A DeepSpeed engine with torch's AdamW, in the present process group."""

    def __init__(self, task: Task, name: str):
        import deepspeed
        from deepspeed.utils import groups

        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        # ZeRO-3 puts a function of its own in this place, for all of the process and for good.
        self._linear = nn.functional.linear
        # Another engine's group for hpZ would be an error.
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
        model: Any = whole(task)
        if task.checkpointing:
            # Other kinds of checkpoints compare shapes, which ZeRO-3 changes when it frees a parameter.
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
            model.enable_input_require_grads()
        for layer in base_of(model).model.layers if task.compile else ():
            layer.compile()
        unit = sum(p.numel() for p in base_of(model).model.layers[0].parameters())
        optimizer = torch.optim.AdamW(trainable(model), lr=1e-4, fused=task.device == "cuda")
        self._engine: Any = None
        try:
            self._engine, *_ = deepspeed.initialize(
                model=model, optimizer=optimizer, config=deepspeed_config(task, name, unit)
            )
        except BaseException:
            self.close()
            raise

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        for micro_batch in tokens:
            loss = self._engine(input_ids=micro_batch, labels=micro_batch).loss
            self._engine.backward(loss)
            # Counts micro-batches itself, and does nothing until the last.
            self._engine.step()
        return loss.detach()

    def close(self) -> None:
        nn.functional.linear = self._linear
        if self._engine is not None:
            self._engine.destroy()
        self._engine = None


class MegatronHFSDP(Training):
    """Megatron-FSDP: parameters and gradients sharded inside a node, optimizer state over all ranks (``IGG``)."""

    def __init__(self, task: Task):
        from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer

        # It looks for tensor parallelism in any case.
        shape, dims = (task.nodes, task.gpus_per_node, 1), ("outer", "inner", "tensor")
        mesh = init_device_mesh(task.device, shape, mesh_dim_names=dims)
        model = whole(task)
        layer = type(base_of(model).model.layers[0])
        for layers, index in list(layer_places(model)):
            prepare(task, layers[index])
        self._model = fully_shard_model(
            model,
            device_mesh=mesh,
            dp_shard_dim="inner",
            dp_outer_dim="outer",
            tp_dim="tensor",
            hybrid_fsdp_group=dist.group.WORLD,
            expt_device_mesh=mesh,  # parameters called experts have theirs, without expert parallelism, too
            hybrid_fsdp_expt_group=dist.group.WORLD,
            fsdp_unit_modules=[layer],
            zero_dp_strategy="optim_grads_params",
            outer_dp_sharding_strategy="optim",
            device=task.place,
            mixed_precision_policy=MixedPrecisionPolicy(
                main_params_dtype=torch.float32, main_grads_dtype=torch.bfloat16, grad_comm_dtype=torch.bfloat16
            ),
            # Otherwise each micro-batch would wait for its reduction, and go between nodes.
            sync_model_each_microbatch=False,
            preproc_state_dict_for_dcp_ckpt=False,
        )
        optimizer = torch.optim.AdamW(trainable(self._model), lr=1e-4, fused=task.device == "cuda")
        self._optimizer = fully_shard_optimizer(optimizer, preproc_state_dict_for_dcp_ckpt=False)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        for index, micro_batch in enumerate(tokens):
            # Megatron's no_sync() sets this, but leaves it unset where there is one micro-batch alone.
            self._model.is_last_microbatch = index == len(tokens) - 1
            loss = self._model(input_ids=micro_batch, labels=micro_batch).loss
            loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()


class BitsandbytesQLoRA(Training):
    """QLoRA as it is run today: PEFT's adapters on ``Linear4bit``, sharded layer by layer by torch's fully_shard.

    Codes are stored as bf16, which FSDP can shard; scales stay whole on every rank. The head stays in bf16, as
    transformers leaves it.
    """

    def __init__(self, task: Task):
        torch.manual_seed(0)
        base: Any = base_of(network(replace(task, lora=0))).to(torch.bfloat16)
        base.is_loaded_in_4bit = True  # by which PEFT adapts Linear4bit as such
        for layer in base.model.layers:
            _pack(layer)
        self._model: Any = adapted(base, task.lora)
        layers = base_of(self._model).model.layers
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        mesh = init_device_mesh(task.device, (dist.get_world_size(),))
        for index, layer in enumerate(layers):
            _quantize(layer, task.place)
            materialize(layer, base, task.place)
            prepare(task, layers[index])
            fully_shard(layers[index], mesh=mesh, mp_policy=policy)
        fully_shard(materialize(self._model, base, task.place), mesh=mesh, mp_policy=policy)
        self._optimizer = torch.optim.AdamW(trainable(self._model), lr=1e-4, fused=task.device == "cuda")

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        for index, micro_batch in enumerate(tokens):
            self._model.set_requires_gradient_sync(index == len(tokens) - 1)
            loss = self._model(input_ids=micro_batch, labels=micro_batch).loss
            loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()


def _pack(layer: nn.Module) -> None:
    """Replace the linear layers of ``layer``, on the meta device, by bitsandbytes' own."""
    from bitsandbytes.nn import Linear4bit

    for module in list(layer.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                options = {"compute_dtype": torch.bfloat16, "quant_type": "nf4", "compress_statistics": False}
                packed = Linear4bit(
                    child.in_features,
                    child.out_features,
                    bias=False,
                    quant_storage=torch.bfloat16,
                    device="meta",
                    **options,
                )
                setattr(module, name, packed.requires_grad_(False))


def _quantize(layer: nn.Module, device: torch.device) -> None:
    """Give the packed weights of ``layer`` the values that :func:`materialize` would, quantized."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for module in layer.modules():
        if isinstance(module, Linear4bit):
            values = torch.empty(module.out_features, module.in_features, dtype=torch.bfloat16, device=device)
            weight = Params4bit(
                nn.init.normal_(values, std=0.02),
                requires_grad=False,
                compress_statistics=False,
                quant_type="nf4",
                quant_storage=torch.bfloat16,
                module=module,
            )
            module.weight = weight.to(device)


# ---- names

EXPERTS, FLOAT8, ENDS, PAIRS = "fsdp2:ep2-", "fsdp2:float8-", "fsdp2:ends-", "fsdp2:pairs-"
_KINDS = {EXPERTS: ExpertParallel, FLOAT8: Float8, ENDS: Ends, PAIRS: Pairs}
"""Classes that build contenders, by the prefixes of their names."""
_OTHERS = {
    each.name: each
    for each in (
        Contender("loco-int8", Strategy.loco(error_feedback=LoCo(dtype=Int8(256)))),
        Contender("loco-both", Strategy.loco(error_feedback=LoCo(hops="both", dtype=Int8(256)))),
        Contender("diloco-8", Strategy.diloco(every=8)),
        Contender("diloco-64", Strategy.diloco(every=64)),
        Contender("diloco-8-overlap", Strategy.diloco(local_steps=LocalSteps(8, overlap=1, mix=0.5))),
        Contender("diloco-64-overlap", Strategy.diloco(local_steps=LocalSteps(64, overlap=1, mix=0.5))),
        Contender("once-NNN", Strategy("NNN"), base=Int8(256)),
    )
}
"""Contenders beside those of ``fsdp_zpp bench``."""


def is_known(name: str) -> bool:
    """Return whether there is a contender of this name."""
    return _own_name(name) in (*NAMES, *_OTHERS, *PEERS)


def names() -> str:
    """Return all names, for help and errors."""
    others = (
        f"{EXPERTS}... for experts spread over two ranks",
        f"{FLOAT8}... for layers in float8",
        f"{ENDS}... for an embedding and a head that are units of their own",
        f"and {PAIRS}... for two layers a unit beside these",
    )
    return ", ".join([*NAMES, *_OTHERS, *PEERS, *others])


def _prefix(name: str) -> str:
    """Return the prefix of a contender's name: that of its kind, or the one for ``fully_shard``."""
    return next((prefix for prefix in _KINDS if name.startswith(prefix)), "fsdp2:")


def _own_name(name: str) -> str:
    return name.removeprefix(_prefix(name))


def training_under(task: Task, name: str) -> Training:
    """Build the model of ``task`` under the contender of this name, with ``fsdp2:`` before it under fully_shard.

    Collective.

    Raises:
        ModuleNotFoundError: For a peer that is not installed.
    """
    if name in PEERS:
        if task.compile:
            # Graphs of earlier contenders would count toward the number that a function may have.
            torch._dynamo.reset()
        return peer(task, name)
    make = _KINDS.get(_prefix(name), TorchFSDP)
    own, fsdp2 = _own_name(name), name.startswith("fsdp2:")
    found = replace(_OTHERS[own], name=name, fsdp2=fsdp2) if own in _OTHERS else contender(own, fsdp2, called=name)
    return make(task, found)
