"""Axolotl: a plugin that makes its trainer shard the model by a strategy.

    plugins:
      - fsdp_zpp.integrations.axolotl.StrategyPlugin
    fsdp_zpp: {preset: zeropp, frozen: nf4}         # what Strategy.from_dict reads, or the name of a preset alone
    adapter: lora

Neither ``fsdp_config`` nor a configuration of accelerate is needed. Settings for FSDP2 in axolotl's ``fsdp_config``
(what to wrap, activation checkpointing, the kind of state dict in checkpoints) apply, if they are given.
integrations/transformers.py shards the model, with its adapters, when the training or the first evaluation begins.
Until then each rank holds the whole model in CPU memory. Without GPUs, set ``ACCELERATE_USE_CPU=true``.

If importing a plugin's module raises ImportError, axolotl only prints the error, and trains without the plugin. So this
module checks versions and imports integrations/transformers.py only when axolotl registers the plugin.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch

from ._common import NO_DEEPSPEED, quantizes, refuse, refuse_set, require, strategy_of

require("axolotl", "0")

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, Field, field_validator, model_validator

if TYPE_CHECKING:
    from axolotl.utils.dict import DictDefault
    from transformers import Trainer

Configuration = Mapping[str, Any]
"""Keys of axolotl's configuration."""

_LORA_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")
_TENSOR = "the accelerate that axolotl pins can't clip gradients of several meshes together: leave it out"
_CONTEXT = "axolotl's own ring attention has not been tried with a strategy: leave it out"
_FROZEN = "leave it out, or have the strategy take over what bitsandbytes packs: fsdp_zpp: {frozen: as stored}"

_ALTERNATIVES = {
    "deepspeed": NO_DEEPSPEED,
    "fsdp": "axolotl has deprecated it, and the strategy decides what is sharded: leave it out",
    "dp_shard_size": "leave it out, and set levels and gpus_per_node in fsdp_zpp",
    "gptq": "its codes are buffers, which no FSDP shards: start from the base that was quantized, with frozen: nf4",
    "fp32_norms": "axolotl shards norms itself for it, and a strategy shards the whole model: leave it out",
    "fp8_enable_fsdp_float8_all_gather": "a strategy gathers the weights: leave it out, and write weights: int8:256",
    "torch_compile": "torch.compile of a whole model does not see where a strategy gathers: leave it out",
    "layer_offloading": "frozen weights are sharded, or quantized with frozen: nf4, so leave it out",
}
"""Keys of axolotl that a strategy can't honour, and what to do instead."""

_PACKED = ("load_in_4bit", "load_in_8bit")
"""Keys that make bitsandbytes pack layers; only a strategy with ``frozen=`` can take such layers over."""

_SIZES = {
    "dp_replicate_size": "leave it out; fsdp_zpp: {levels: III, gpus_per_node: the size of a replica} is HSDP",
    "tensor_parallel_size": _TENSOR,
    "context_parallel_size": _CONTEXT,
    "sequence_parallel_degree": _CONTEXT,
    "expert_parallel_size": "axolotl shards experts itself for it, by torch's own FSDP: leave it out",
}
"""Keys that a strategy can honour only if they are 1, and what to do instead."""

_FSDP_ALTERNATIVES = {
    "offload_params": "leave it out; frozen: nf4 and levels: GGG are what saves memory on GPUs",
    "cpu_ram_efficient_loading": "it loads the weights on one rank, and a strategy shards those of each: leave it out",
}
"""Keys of ``fsdp_config`` that a strategy can't honour, and what to do instead."""

_OPTIMIZERS_WITH_A_MESH = ("muon", "dion", "sinkgd")
"""Optimizers that communicate over axolotl's own mesh, not over the strategy's."""


class StrategyArgs(BaseModel):
    """A pydantic model of the keys that the plugin adds to axolotl's configuration.

    Attributes:
        fsdp_zpp: The strategy: a preset's name, or a mapping as ``Strategy.from_dict`` reads it.
    """

    fsdp_zpp: str | dict[str, Any] | None = Field(
        default=None,
        json_schema_extra={"description": "Sharding strategy of fsdp_zpp: a preset such as zeropp, or a mapping"},
    )

    @field_validator("fsdp_zpp", mode="before")
    @classmethod
    def _check_strategy(cls, value: object) -> object:
        if value is not None:
            strategy_of(value)
        return value

    @model_validator(mode="after")
    def _check_configuration(self) -> StrategyArgs:
        check_configuration(self.model_dump(warnings=False))
        return self


class StrategyPlugin(BasePlugin):
    """Makes axolotl's trainer shard its model by the strategy of the key ``fsdp_zpp``."""

    def get_input_args(self) -> str:
        return f"{__name__}.{StrategyArgs.__name__}"

    def register(self, cfg: MutableMapping[str, Any]) -> None:
        """Set the keys for FSDP2 that ``cfg`` leaves out, before axolotl validates ``cfg``.

        Raises:
            ImportError: If axolotl, transformers or accelerate is too old; says what to install.
            ValueError: If ``cfg`` has an invalid strategy (the error names the key), or if several processes find no
                GPU and are not told to train on CPUs.
        """
        require("axolotl", "0.19")
        from . import transformers  # noqa: F401  (see the top of this file)

        if cfg.get("fsdp_zpp") is None:
            return
        if quantizes(strategy_of(cfg["fsdp_zpp"])) and all(cfg.get(kernel) is None for kernel in _LORA_KERNELS):
            cfg.update(dict.fromkeys(_LORA_KERNELS, False))  # axolotl would enable them; _check_training refuses that
        # Preprocessing, inference and merging run in one process, where nothing is sharded.
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return
        _choose_device()
        fsdp_config = cfg.get("fsdp_config") or {}
        if cfg.get("fsdp_version") is None and not {"version", "fsdp_version"} & set(fsdp_config):
            cfg["fsdp_version"] = 2
        cfg["fsdp_config"] = {
            "state_dict_type": "SHARDED_STATE_DICT",
            "final_state_dict_type": "FULL_STATE_DICT",
        } | dict(fsdp_config)
        if cfg.get("experimental_skip_move_to_device") is None:
            cfg["experimental_skip_move_to_device"] = True  # the whole model may not fit on a GPU
        if cfg.get("gradient_checkpointing") and cfg.get("gradient_checkpointing_kwargs") is None:
            cfg["gradient_checkpointing_kwargs"] = {"use_reentrant": False}  # axolotl's own default is True

    def get_training_args(self, cfg: DictDefault) -> dict[str, Any] | None:
        """On CPUs, tell Trainer to use them; otherwise it refuses bf16."""
        return {"use_cpu": True} if cfg.fsdp_zpp is not None and _on_cpus() else None

    def post_trainer_create(self, cfg: DictDefault, trainer: Trainer) -> None:
        """Make ``trainer`` shard its model.

        Raises:
            ValueError: If the trainer has settings that a strategy can't honour; the error says what to do instead.
        """
        if cfg.fsdp_zpp is None:  # axolotl keeps the plugins of earlier configurations
            return
        from .transformers import use_strategy

        use_strategy(trainer, strategy_of(cfg.fsdp_zpp))
        # With adapters and FSDP2, axolotl writes the final files itself, but only weights with "lora_" in their names:
        # modules in lora_modules_to_save would be lost. If fsdp_version is None, the trainer writes the final files.
        cfg.fsdp_version = None


def _on_cpus() -> bool:
    from accelerate.utils import parse_flag_from_env

    return bool(parse_flag_from_env("ACCELERATE_USE_CPU"))


def _choose_device() -> None:
    """On CPUs, keep axolotl from making a mesh of GPUs; only parallelisms that are refused would use the mesh."""
    if _on_cpus():
        from axolotl.loaders import ModelLoader

        ModelLoader.use_parallel_config = None
    elif not torch.accelerator.is_available():
        raise ValueError("torch finds no GPU: to train on CPUs, set ACCELERATE_USE_CPU=true in the environment")


def check_configuration(config: Configuration) -> None:
    """Refuse a configuration with a key that a strategy can't honour.

    Args:
        config: The keys of axolotl's configuration, with defaults.

    Raises:
        ValueError: If there is such a key; the error names it and says what to do instead.
    """
    if config.get("fsdp_zpp") is None:
        if f"{__name__}.{StrategyPlugin.__name__}" in (config.get("plugins") or []):
            raise ValueError("fsdp_zpp: give the plugin a strategy, such as fsdp_zpp: zeropp")
        return
    refuse_set(config, _ALTERNATIVES)
    for key, instead in _SIZES.items():
        if (config.get(key) or 1) > 1:
            refuse(key, config[key], instead)
    for key in _PACKED:
        if config.get(key) and not quantizes(strategy_of(config["fsdp_zpp"])):
            refuse(key, config[key], _FROZEN)
    _check_fsdp(config)
    _check_training(config)


def _check_fsdp(config: Configuration) -> None:
    version, fsdp = config.get("fsdp_version"), config.get("fsdp_config") or {}
    if version not in (None, 2):
        refuse("fsdp_version", version, "a strategy needs FSDP2: leave it out, or write fsdp_version: 2")
    refuse_set(fsdp, _FSDP_ALTERNATIVES, "fsdp_config.")
    if fsdp.get("final_state_dict_type") not in (None, "FULL_STATE_DICT"):
        refuse(
            "fsdp_config.final_state_dict_type",
            fsdp["final_state_dict_type"],
            "with a strategy the final model is one that from_pretrained reads: leave it out",
        )
    if config.get("adapter") and fsdp.get("state_dict_type") == "FULL_STATE_DICT":
        refuse(
            "fsdp_config.state_dict_type",
            fsdp["state_dict_type"],
            "with the accelerate that axolotl pins, checkpoints would hold rank 0's shards of the adapters alone: "
            "leave it out",
        )


def _check_training(config: Configuration) -> None:
    if config.get("optimizer") in _OPTIMIZERS_WITH_A_MESH:
        refuse(
            "optimizer",
            config["optimizer"],
            "it communicates over axolotl's own mesh, which is not the strategy's: choose another, such as "
            "adamw_torch_fused",
        )
    for pattern in config.get("unfrozen_parameters") or []:
        if pattern.endswith("]") and ":" in pattern:
            refuse(
                "unfrozen_parameters",
                pattern,
                "the hooks that freeze the other rows are lost when the model is sharded: name whole parameters",
            )
    kernels = [key for key in _LORA_KERNELS if config.get(key)]
    if kernels and quantizes(strategy_of(config["fsdp_zpp"])):
        refuse(
            kernels[0],
            True,
            "it keeps the dequantized base until the backward, which frozen= is there to avoid: leave it out",
        )
