"""LLaMA-Factory's V1: its plug-in for FSDP2, under whose name is one that shards by a strategy.

V1's trainer asks its registry of sharding plug-ins for the name in ``dist_config``, but treats ``fsdp2`` apart from
others in several places. So the strategy's has that name while it runs, and is derived from V1's own, which chooses
the units, loads weights, and saves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from fsdp_zpp.frozen.hugging_face import dequantized_weights, save_adapter
from fsdp_zpp.strategy.strategy import Strategy

from ._common import (
    NO_PACKED_BASE,
    check_base_identity,
    in_place_of_torchs,
    load_codec_state,
    quantizes,
    refuse,
    require,
    save_base_identity,
    save_codec_state,
    sharding_by,
)

require("llamafactory", "0.9.6.dev0", purpose="for V1", install="see docs/guides/llama-factory.md")

from llamafactory.v1.plugins.trainer_plugins.distributed import fsdp2
from llamafactory.v1.plugins.trainer_plugins.distributed.interface import (
    DistributedPlugin,
    FSDP2Distributed,
    FSDP2Params,
)
from llamafactory.v1.trainers import sft_trainer
from peft import PeftModel

NAME = "fsdp2"
Arguments = dict[str, Any]


def run_sft(arguments: Arguments, strategy: Strategy) -> None:
    """Run V1's ``run_sft`` with a strategy.

    Raises:
        ValueError: If the arguments ask for what the strategy can't honour; the error names the key.
    """
    check_arguments(arguments, strategy)
    with _registered(strategy):
        sft_trainer.run_sft(arguments | {"dist_config": {"name": NAME} | (arguments.get("dist_config") or {})})


def check_arguments(arguments: Arguments, strategy: Strategy) -> None:
    """Check that arguments of V1 ask for nothing that a strategy can't honour.

    Raises:
        ValueError: If they do; the error names the key and says what to do instead.
    """
    name = (arguments.get("dist_config") or {}).get("name", NAME)
    if name != NAME:
        refuse("dist_config.name", name, "a strategy takes the place of fsdp2: leave it out, or write fsdp2")
    if (arguments.get("cp_size") or 1) > 1:
        refuse("cp_size", arguments["cp_size"], "V1's context parallelism has not been tried with it: leave it out")
    if arguments.get("quant_config") is not None:
        refuse("quant_config", arguments["quant_config"], NO_PACKED_BASE)
    init = (arguments.get("init_config") or {}).get("name")
    if quantizes(strategy) and init not in (None, "init_on_default"):
        refuse("init_config", init, "it loads weights after they are quantized: leave it out, or frozen")


@contextmanager
def _registered(strategy: Strategy) -> Iterator[None]:
    """Return a context in which V1's plug-in for FSDP2 shards by a strategy."""
    DistributedPlugin(NAME).register()(distributed_by(strategy))  # V1 warns that the name is taken
    try:
        yield
    finally:
        DistributedPlugin(NAME).register()(FSDP2Distributed)


def distributed_by(strategy: Strategy) -> type:
    """Return a plug-in of V1 that shards by a strategy, as its registry takes it."""

    class StrategyDistributed(FSDP2Distributed):
        @staticmethod
        def shard_model(model: nn.Module, dist_config: object, **options: Any) -> nn.Module:
            config = DistributedPlugin.parse_params(dist_config, FSDP2Params)
            engine = StrategyEngine(vars(config), strategy, bf16=bool(options.get("bf16")))
            return engine.shard_model(model)  # type: ignore[no-any-return]

        @staticmethod
        def save_model(model: nn.Module, output_dir: str, processor: Any) -> None:
            save_model(model, output_dir, processor)

        @staticmethod
        def save_checkpoint(model: nn.Module, optimizer: Optimizer, ckpt_dir: str, **options: Any) -> None:
            save_checkpoint(model, optimizer, ckpt_dir, **options)

        @staticmethod
        def load_checkpoint(model: nn.Module, optimizer: Optimizer, ckpt_dir: str, **options: Any) -> None:
            check_base_identity(model, Path(ckpt_dir))
            FSDP2Distributed.load_checkpoint(model, optimizer, ckpt_dir, **options)
            load_codec_state(model, [optimizer], Path(ckpt_dir))

    return StrategyDistributed


class StrategyEngine(fsdp2.FSDP2Engine):
    """Shards a model as V1 does, by a strategy.

    Args:
        dist_config: What V1 reads of ``dist_config``.
        strategy: The strategy.
        bf16: Whether to compute in bf16.
    """

    fsdp_mesh: DeviceMesh | None

    def __init__(self, dist_config: dict[str, Any], strategy: Strategy, *, bf16: bool) -> None:
        super().__init__(dist_config, bf16=bf16)
        self.strategy = strategy
        if self.fsdp_mesh is None:
            raise ValueError(
                "a strategy shards over several processes, but there is only one: start them with torchrun"
            )
        if self.fsdp_mesh.size(0) == 1:  # mp_replicate_size; of two dimensions, a strategy takes the first for nodes
            self.fsdp_mesh = self.fsdp_mesh["mp_shard"]

    def is_lora_module_wrap(self, model: nn.Module) -> bool:
        """Have adapters be part of their layer's unit: torch's own FSDP needs them apart, a strategy does not."""
        return False

    def prepare_model(self, model: nn.Module, ignored_params: set[nn.Parameter] | None = None) -> nn.Module:
        with in_place_of_torchs(sharding_by(self.strategy)):
            return super().prepare_model(model, ignored_params)  # type: ignore[no-any-return]


def save_model(model: nn.Module, output_dir: str, processor: Any) -> None:
    """Save the model as ``from_pretrained`` reads it, or adapters as PEFT reads them. Collective."""
    first = dist.get_rank() == 0
    if isinstance(model, PeftModel):
        save_adapter(model, output_dir)
    else:
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        state |= dequantized_weights(model)
        if first:
            model.save_pretrained(output_dir, state_dict=state, max_shard_size="4GB")  # type: ignore[operator]
    if first:
        processor.save_pretrained(output_dir)


def save_checkpoint(model: nn.Module, optimizer: Optimizer, ckpt_dir: str, **options: Any) -> None:
    """Save what V1 saves, the codec state, and which base was quantized. Collective."""
    FSDP2Distributed.save_checkpoint(model, optimizer, ckpt_dir, **options | {"save_ckpt_as_hf": False})
    if options.get("save_ckpt_as_hf"):
        save_model(model, f"{ckpt_dir}/hf_model", options["processor"])
    save_base_identity(model, Path(ckpt_dir))
    save_codec_state(model, [optimizer], Path(ckpt_dir))
