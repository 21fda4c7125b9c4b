"""Checks of an accelerator for what a strategy can't honour; each error says what to do instead."""

from __future__ import annotations

import torch.distributed as dist
from accelerate import Accelerator, DistributedType
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DynamoBackend, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_zpp.integrations._requirement import require


def check_accelerator(accelerator: Accelerator) -> None:
    """Raise if ``accelerator`` has prepared a model, runs in one process, or was configured for other than FSDP.

    Raises:
        ImportError: If accelerate is too old to compile layers, or for tensor parallelism.
        ValueError: In all other cases.
    """
    if accelerator._models:
        raise ValueError(
            "this accelerator has prepared a model already: call use_strategy before accelerator.prepare. A trainer of "
            "TRL that has a reference model prepares it in its constructor: give use_strategy the trainer's class, as "
            "in use_strategy(DPOTrainer, strategy)(model, ...)"
        )
    dynamo = accelerator.state.dynamo_plugin
    if dynamo.backend != DynamoBackend.NO:
        if not dynamo.use_regional_compilation:
            raise ValueError(
                "torch.compile of a whole model does not see where a strategy gathers: compile layer by layer, with "
                "TorchDynamoPlugin(use_regional_compilation=True) or ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=true"
            )
        require("accelerate", "1.14", purpose="to compile layer by layer")
    kind = accelerator.distributed_type
    if accelerator.num_processes == 1 or not dist.is_initialized():
        raise ValueError(
            "a strategy shards over several processes, but accelerate has only one: start several with accelerate "
            "launch or torchrun, and on CPUs pass Accelerator(cpu=True)"
        )
    if not str(kind.value).startswith("MULTI") and kind != DistributedType.FSDP:
        raise ValueError(f"a strategy is for torch's FSDP, but this accelerator was configured for {kind.value}")
    if accelerator.parallelism_config is not None:
        _check_parallelism(accelerator.parallelism_config)


def _check_parallelism(config: ParallelismConfig) -> None:
    if config.sp_enabled:
        raise ValueError(
            f"sp_size={config.sp_size} in parallelism_config is DeepSpeed's sequence parallelism, which FSDP, with or "
            "without a strategy, can't take part in: use cp_size"
        )
    if not config.dp_shard_cp_dim_names:
        raise ValueError(
            "parallelism_config has no dimension to shard over, since dp_shard_size and cp_size are 1: set "
            "dp_shard_size to the number of data-parallel ranks, or to those of a node beside dp_replicate_size"
        )
    if config.tp_enabled:
        require("accelerate", "1.15", purpose="to clip gradients beside tensor parallelism")


def check_tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Raise unless ``model`` is sharded over the dimension ``tp`` of an accelerator's ``mesh``.

    Raises:
        ValueError: It says how to do that.
    """
    ranks = mesh["tp"]
    if not any(isinstance(each, DTensor) and each.device_mesh == ranks for each in model.parameters()):
        raise ValueError(
            f"parallelism_config has tp_size={ranks.size()}, but no parameter of this {type(model).__name__} is "
            'sharded over accelerator.torch_device_mesh["tp"]: call parallelize_module(model, '
            'accelerator.torch_device_mesh["tp"], plan) before prepare. from_pretrained shards over a mesh of its own: '
            "see fsdp_zpp.integrations.transformers.with_strategy"
        )


def check_plugin(plugin: FullyShardedDataParallelPlugin) -> None:
    """Raise if ``plugin`` asks for FSDP1, or for weights that rank 0 alone has loaded.

    Raises:
        ValueError: It names the option.
    """
    if plugin.cpu_ram_efficient_loading:
        raise ValueError(
            "cpu_ram_efficient_loading=True loads the weights on rank 0 alone, and a strategy shards those of each "
            "rank: leave it out"
        )
    if plugin.fsdp_version != 2:
        # accelerate 1.15 loads no state into FSDP1's optimizers from a sharded checkpoint (a fresh one has no keys to
        # load into), with or without a strategy.
        raise ValueError(
            f"a strategy needs fsdp_version=2, and the plugin says {plugin.fsdp_version}: set it in the plugin, with "
            "FSDP_VERSION=2 or with fsdp_version: 2 in accelerate's configuration"
        )
