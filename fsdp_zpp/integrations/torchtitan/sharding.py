"""Llama 3 with a strategy: torchtitan's activation checkpointing and compilation, and fsdp_zpp's fully_shard."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import MixedPrecisionPolicy
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.fsdp import disable_fsdp_gradient_division
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.llama3.parallelize import parallelize_llama as torchtitan_parallelize_llama
from torchtitan.tools.logging import logger

from fsdp_zpp.adapters.fsdp2 import fully_shard
from fsdp_zpp.config.strategy import Strategy

from .parallelism import check_combination


def parallelize_llama(
    model: Decoder,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: CompileConfig,
    ac_config: ActivationCheckpointingConfig | None,
    dump_folder: str,
) -> Decoder:
    """Shard by ``parallelism.strategy``; the ``parallelize_fn`` of a torchtitan model without experts.

    Args:
        model: The model.
        parallel_dims: torchtitan's dimensions, with the mesh of all ranks.
        training: torchtitan's training section, with the dtypes.
        parallelism: A ``StrategyParallelism``. Without a strategy, torchtitan's own function is called.
        compile_config: As torchtitan's.
        ac_config: As torchtitan's.
        dump_folder: As torchtitan's.

    Raises:
        ValueError: If something else can't be combined with the strategy; says what to do instead.
        NotImplementedError: If the model has experts.
    """
    strategy = getattr(parallelism, "strategy", None)
    if strategy is None:
        sharded: Decoder = torchtitan_parallelize_llama(
            model,
            parallel_dims=parallel_dims,
            training=training,
            parallelism=parallelism,
            compile_config=compile_config,
            ac_config=ac_config,
            dump_folder=dump_folder,
        )
        return sharded
    check_combination(strategy, parallelism, training)
    _check_model(model, strategy)
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    if compile_config.enable and "model" in compile_config.components:
        apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)
    policy = MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        cast_forward_inputs=False,
    )
    arguments = {"mesh": parallel_dims.get_mesh("fsdp"), "mp_policy": policy}
    _shard(model, strategy, parallelism.fsdp_reshard_after_forward, arguments)
    logger.info("Applied %s to the model", strategy)
    return model


def _shard(model: Decoder, strategy: Strategy, reshard: str, arguments: dict[str, Any]) -> None:
    """Shard into the units of torchtitan's own FSDP."""
    # None is torch's default, which is torchtitan's, too, and which contradicts no parameter scope.
    after_forward = {"default": None, "always": True, "never": False}[reshard]
    last = [model.norm, model.lm_head]
    if model.enable_weight_tying:
        last.insert(0, model.tok_embeddings)
    else:
        fully_shard(model.tok_embeddings, strategy=strategy, reshard_after_forward=after_forward, **arguments)
    fully_shard(last, strategy=strategy, reshard_after_forward=reshard == "always", **arguments)
    for block in model.layers.values():
        fully_shard(block, strategy=strategy, reshard_after_forward=after_forward, **arguments)
    fully_shard(model, strategy=strategy, **arguments)
    disable_fsdp_gradient_division(model)  # torchtitan divides the loss by the tokens of all ranks


def _check_model(model: Decoder, strategy: Strategy) -> None:
    if any(getattr(block, "moe_enabled", False) for block in model.layers.values()):
        raise NotImplementedError(
            f"{type(model).__name__} has experts, whose placement parallelize_llama does not know; shard the model "
            "with fsdp_zpp.fully_shard in a parallelize_fn of your own"
        )
    for name, parameter in model.named_parameters():
        if strategy.weights is not None and hasattr(parameter, "fsdp_pre_all_gather"):
            raise ValueError(
                f"{name} is a {type(parameter).__name__}, which encodes itself for the all-gather, so weights="
                f"{strategy.weights} can't; leave out its converter, or set weights to null in --parallelism.strategy"
            )
