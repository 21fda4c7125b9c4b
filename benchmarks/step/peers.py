"""Hybrid and quantized sharding of other libraries, each in its own way: DeepSpeed, Megatron-FSDP and bitsandbytes.

The first two get the model whole, in bf16 on the rank's GPU, and keep fp32 main weights beside it; adapters of LoRA are
in bf16, too. Both accumulate and reduce gradients in bf16, as all contenders reduce them. They leave state in the
process, so name them last.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from models import whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fsdp_zpp.bench.contenders import Training, adapted, base_of, layer_places, materialize, network, prepare
from fsdp_zpp.bench.results import Task

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
            prepare(task, layers, index)
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
            # What its no_sync() sets, but that leaves it unset where there is one micro-batch alone.
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
            prepare(task, layers, index)
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
