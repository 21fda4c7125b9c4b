"""DeepSpeed's configuration keys that decide no strategy, and how each is treated.

A key that only tunes DeepSpeed's own machinery is *without effect* and is logged. A key for which every training script
has a line of its own is *the script's* and is logged with that line. A key that changes the result, whose absence
nobody would notice until the loss differs, is *refused* unless it is switched off.

The names are those of DeepSpeed 0.19, including aliases, which DeepSpeed accepts, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Refused:
    """A key that raises.

    Args:
        reason: Why it raises, and what to do instead.
        neutral: Values that change nothing, besides the common ways to switch a feature off.
    """

    reason: str
    neutral: tuple[object, ...] = ()

    def is_off(self, value: object) -> bool:
        """Return whether ``value`` changes nothing."""
        if isinstance(value, Mapping):
            return not value or value.get("enabled") is False or value in self.neutral
        # Equality alone would take true for 1.
        return value is None or value is False or (not isinstance(value, bool) and value in self.neutral)


_STAGE_3_ALIASES = """
    prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters max_reuse_distance
    module_granularity_threshold use_all_reduce_for_fetch_params allgather_sequential partition_stream_chunk_size
""".split()

ZERO_WITHOUT_EFFECT = frozenset(
    """
    allgather_bucket_size allgather_partitions contiguous_gradients cpu_offload_use_pin_memory elastic_checkpoint
    enable_sanity_checks ignore_unused_parameters legacy_stage1 load_from_fp32_weights log_trace_cache_warnings
    memory_efficient_linear mics_hierarchical_params_gather overlap_comm override_module_apply
    pipeline_loading_checkpoint reduce_bucket_size reduce_scatter round_robin_gradients
    save_muon_momentum_buffer_in_memory sub_group_size use_multi_rank_bucket_allreduce
    """.split()
    + _STAGE_3_ALIASES
    + [f"stage3_{name}" for name in _STAGE_3_ALIASES]
)

OFFLOAD_KEYS = frozenset(
    """
    buffer_count buffer_size convert_grad_on_cpu cpuadam_cores_perc device fast_init max_in_cpu nvme_path pin_memory
    pipeline_read pipeline_write ratio super_offload
    """.split()
)

ZERO_SCRIPT = {
    "gather_16bit_weights_on_model_save": "a full state dict",
    "stage3_gather_16bit_weights_on_model_save": "a full state dict",
    "stage3_gather_fp16_weights_on_model_save": "a full state dict",
    "leaf_module": "auto_wrap_policy",
}

ZERO_REFUSED = {
    "zenflow": Refused("it asks for another optimizer step, which FSDP does not have; remove it"),
}

TOP_WITHOUT_EFFECT = frozenset(
    """
    aio allgather_size autotuning comet comms_logger csv_monitor datastates disable_allgather dump_state flops_profiler
    gradient_predivide_factor graph_harvesting log_level memory_breakdown nebula prescale_gradients
    seq_parallel_comm_data_type steps_per_print tensorboard timers
    use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    """.split()
)

TOP_SCRIPT = {
    "activation_checkpointing": "apply_activation_checkpointing",
    "amp": "MixedPrecision",
    "bf16": "MixedPrecision",
    "bfloat16": "MixedPrecision",
    "checkpoint": "torch.distributed.checkpoint",
    "compile": "torch.compile",
    "data_types": "MixedPrecision",
    "dataloader_drop_last": "DataLoader",
    "fp16": "MixedPrecision and a gradient scaler",
    "gradient_accumulation_steps": "no_sync",
    "gradient_clipping": "clip_grad_norm_",
    "hybrid_engine": "summon_full_params around generate",
    "managed_gradient_accumulation": "no_sync",
    "optimizer": "torch.optim",
    "scheduler": "torch.optim.lr_scheduler",
    "torch_autocast": "torch.autocast",
    "train_batch_size": "DataLoader",
    "train_micro_batch_size_per_gpu": "DataLoader",
}

_MESH = (
    "a strategy shards over data-parallel ranks only; build that mesh yourself, pass FSDP the data-parallel group, "
    "and remove it"
)
_DATA = "it changes the training data; change the data in your data loader, and remove it"
_MODEL = "it changes the model itself; change the model in your script, and remove it"

TOP_REFUSED = {
    "communication_data_type": Refused(
        "FSDP takes it as MixedPrecision(reduce_dtype=...), whose default differs; set it there, and remove it"
    ),
    "compression_training": Refused(_MODEL),
    "curriculum_learning": Refused(_DATA),
    "data_efficiency": Refused(_DATA),
    "eigenvalue": Refused(_MODEL),
    "elasticity": Refused("it decides the batch sizes; set them in your script, and remove it"),
    "expert_parallel": Refused(_MESH),
    "gradient_allreduce_op": Refused(
        "a strategy reduces to the mean over all ranks; multiply the loss by the world size, and remove it", ("mean",)
    ),
    "pipeline": Refused(_MESH),
    "progressive_layer_drop": Refused(_MODEL),
    "quantize_training": Refused(_MODEL),
    "sequence_parallel_size": Refused(_MESH, (1,)),
    "sparse_attention": Refused(_MODEL),
    "sparse_gradients": Refused("FSDP reduces dense gradients; use Embedding(sparse=False), and remove it"),
    "tensor_parallel": Refused(_MESH, ({"autotp_size": 0}, {"autotp_size": 1})),
    "weight_quantization": Refused(_MODEL),
}
