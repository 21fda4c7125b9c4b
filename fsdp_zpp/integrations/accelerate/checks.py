"""Checks of an accelerator for what a strategy can't honour; each error says what to do instead."""

from __future__ import annotations

import torch.distributed as dist
from accelerate import Accelerator, DistributedType
from accelerate.utils import DynamoBackend, FullyShardedDataParallelPlugin

from fsdp_zpp.integrations._requirement import require


def check_accelerator(accelerator: Accelerator) -> None:
    """Raise if ``accelerator`` has prepared a model, runs in one process, or was configured for other than FSDP.

    Raises:
        ImportError: If layers are to be compiled, and accelerate is too old for that.
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
    config = accelerator.parallelism_config
    if config is None:
        return
    if config.dp_replicate_enabled:
        raise ValueError(
            f"dp_replicate_size={config.dp_replicate_size} in parallelism_config makes an HSDP mesh, but with a "
            "strategy its scopes decide what is replicated: leave it out, and use Strategy('III') for HSDP, with "
            "gpus_per_node= the size of a replica"
        )
    if config.non_data_parallel_size > 1:
        raise ValueError(
            "a strategy can't be combined with tensor, context or sequence parallelism through accelerate: leave out "
            "parallelism_config, or call fsdp_zpp.fully_shard(mesh=mesh['dp_shard'], ...) yourself"
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
