"""Refusals of the strategies for Lightning, each by a call on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness import models
from harness.messages import Refusal
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from lightning_runs import Batches, Module, Outcome, Run, shard_net
from lightning_ways import ACCELERATOR, TRAINER_FSDP2, environment, ranks

from fsdp_zpp import CodecState, Strategy
from fsdp_zpp.integrations.lightning import fabric as our_fabric, pytorch as our_trainer


def _set_up(kind: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
    with environment():
        fabric = Fabric(accelerator=ACCELERATOR, **ranks(), strategy=kind(*arguments, **keywords))
        fabric.launch()
        fabric.setup_module(models.make_net())


def _class_for_instance() -> None:
    our_trainer.FSDPStrategy(sharding_strategy=Strategy)


def _hybrid_shard() -> None:
    our_fabric.FSDPStrategy(sharding_strategy=Strategy.zeropp(), device_mesh=(2, 2))


def _strategy_of_the_other() -> None:
    Fabric(accelerator=ACCELERATOR, strategy=our_trainer.FSDPStrategy(sharding_strategy=Strategy.zeropp()))


def _cpu_offload() -> None:
    strategy = Strategy.zeropp(gpus_per_node=2)
    _set_up(our_fabric.FSDPStrategy, sharding_strategy=strategy, cpu_offload=True)


def _full_state_dict() -> None:
    strategy = Strategy.zeropp(gpus_per_node=2)
    _set_up(our_fabric.FSDPStrategy, sharding_strategy=strategy, state_dict_type="full")


def _data_for_some_ranks() -> None:
    strategy = Strategy.zeropp(gpus_per_node=2)
    _set_up(our_fabric.ModelParallelStrategy, lambda net, mesh: shard_net(net, strategy, None))


def _data_for_some_ranks_of_a_trainer() -> None:
    run = Run(TRAINER_FSDP2, Strategy.zeropp(gpus_per_node=2))
    strategy = our_trainer.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2)
    with environment():
        trainer = Trainer(accelerator=ACCELERATOR, **ranks(), strategy=strategy, logger=False, barebones=True)
        module = Module(run, Outcome())
        shard_net(module.net, run.strategy, None)
        trainer.fit(module, Batches(1))


def _two_dimensional_mesh() -> None:
    strategy = Strategy.zeropp(gpus_per_node=2)
    _set_up(
        our_fabric.ModelParallelStrategy,
        lambda net, mesh: shard_net(net, strategy, mesh),
        data_parallel_size=2,
        tensor_parallel_size=2,
    )


def _codec_state_in_state() -> None:
    net = shard_net(models.make_net(), Strategy.zeropp(gpus_per_node=2), None)
    our_fabric.FSDPStrategy().save_checkpoint("", {"model": net, "codecs": CodecState(net)})


REFUSED: dict[str, Refusal] = {
    "the class Strategy": (_class_for_instance, TypeError, "did you mean Strategy()?"),
    "HYBRID_SHARD's mesh": (_hybrid_shard, ValueError, 'Strategy("III", gpus_per_node=...)'),
    "a Trainer's strategy in Fabric": (_strategy_of_the_other, ValueError, "for the Trainer of lightning.pytorch"),
    "offloading on a CPU": (_cpu_offload, ValueError, "needs an accelerator to offload from"),
    "full state dicts on a CPU": (_full_state_dict, ValueError, 'pass state_dict_type="sharded"'),
    "data for some ranks": (_data_for_some_ranks, ValueError, "pass data_parallel_size=4, tensor_parallel_size=1"),
    "data for some ranks of a Trainer": (_data_for_some_ranks_of_a_trainer, ValueError, 'mesh=device_mesh["data_par'),
    "both dimensions of the mesh": (_two_dimensional_mesh, ValueError, 'mesh=device_mesh["data_par'),
    "codec state in Fabric's state": (_codec_state_in_state, TypeError, "leave it out"),
}
"""Calls that are refused."""
