"""accelerate's ``ParallelismConfig`` beside a strategy: HSDP, tensor and context parallelism."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate_training import MICRO_BATCHES, STATEFUL, STEPS, Training, accelerators, for_fsdp, plugin, prepared
from harness import llama
from harness.pool import Pool
from hugging_face import choose_own_fsdp, new_job
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.torch_version import TorchVersion
from trainer_training import logged, make_trainer
from transformers import AttentionInterface

from fsdp_zpp import Strategy
from fsdp_zpp.integrations.accelerate import use_strategy
from fsdp_zpp.integrations.transformers import use_strategy as use_strategy_with_trainer

Sizes = dict[str, int]
HSDP: Sizes = {"dp_replicate_size": 2, "dp_shard_size": 2}
TENSOR: Sizes = {"dp_shard_size": 2, "tp_size": 2}
CONTEXT: Sizes = {"dp_shard_size": 2, "cp_size": 2}
beside_tensor_parallelism = pytest.mark.skipif(
    TorchVersion(version("accelerate")) < "1.15", reason="accelerate can't clip gradients there, so it is refused"
)
COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")
"""What tensor parallelism splits in a layer."""


@contextmanager
def parallel(sizes: Sizes) -> Iterator[Accelerator]:
    """Return a context with an accelerator whose ``parallelism_config`` has these sizes."""
    # Schedulers that step with the optimizer take a step for each process, also for those that share a batch.
    with accelerators(step_scheduler_with_optimizer=False) as accelerator:
        config = ParallelismConfig(**sizes)
        # As an accelerator's constructor does, which takes none on CPUs.
        accelerator.state.parallelism_config = config
        accelerator.state.device_mesh = config.get_device_mesh(accelerator.device.type)
        yield accelerator


def made_for(accelerator: Accelerator) -> nn.Module:
    """Return a Llama as a user prepares it for the accelerator's parallelisms."""
    model = llama.make_base()
    split(model, accelerator)
    if accelerator.parallelism_config.cp_enabled:
        AttentionInterface.register("gathered", Gathered(accelerator.torch_device_mesh["cp"].get_group()))
        model.config._attn_implementation = "gathered"
    return model


def split(model: nn.Module, accelerator: Accelerator) -> None:
    """Split a Llama over the ranks of the accelerator's tensor parallelism, if there is any."""
    if accelerator.parallelism_config.tp_enabled:
        for layer in llama.layers_of(model):
            plan = dict.fromkeys(COLUMNS, ColwiseParallel()) | dict.fromkeys(ROWS, RowwiseParallel())
            parallelize_module(layer, accelerator.torch_device_mesh["tp"], plan)


class Gathered:
    """Attention to keys and values of all ranks of context parallelism; torch's own has no kernels for CPUs."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, *, scaling: float, **others: Any
    ) -> tuple[Tensor, None]:
        positions = others["position_ids"]
        later = gathered(positions, 1, self.group)[:, None, None, :] > positions[:, None, :, None]
        scores = query @ AllGather.apply(key, 2, self.group).transpose(2, 3) * scaling
        output = scores.masked_fill(later, -torch.inf).softmax(-1) @ AllGather.apply(value, 2, self.group)
        return output.transpose(1, 2).contiguous(), None


class AllGather(torch.autograd.Function):
    """Concatenates what ranks have, and sums the gradients of that."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return gathered(part, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        total = gradients[0].contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(dist.get_world_size(ctx.group), ctx.dim)[dist.get_rank(ctx.group)], None, None


def gathered(part: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim)


class ContextParallelTraining(Training):
    """A training whose sequences are split over ranks, as accelerate's documentation has it."""

    def micro_batch(self, tokens: Tensor) -> float:
        labels = nn.functional.pad(tokens, (0, 1), value=-100)[:, 1:].contiguous()
        positions = torch.arange(tokens.shape[1], device=tokens.device).repeat(tokens.shape[0], 1)
        split = [tokens, labels, positions]
        with self.accelerator.maybe_context_parallel(
            buffers=split, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(split)
        ):
            return self.train_on(input_ids=tokens, labels=labels, shift_labels=labels, position_ids=positions)


def training_on(accelerator: Accelerator, strategy: Strategy | None) -> Training:
    """Return a training that is prepared for the accelerator's parallelisms."""
    training = prepared(for_fsdp(accelerator, strategy, plugin()), made_for(accelerator))
    return ContextParallelTraining(**vars(training)) if accelerator.parallelism_config.cp_enabled else training


def trained(sizes: Sizes, strategy: Strategy | None) -> list[float]:
    """In a worker: the losses of a training."""
    with parallel(sizes) as accelerator:
        return training_on(accelerator, strategy).train()


@pytest.mark.parametrize(
    ("sizes", "levels"),
    [
        ({"dp_shard_size": 4}, "III"),
        (HSDP, "III"),
        (HSDP, "IIG"),
        (CONTEXT, "GGG"),
        (CONTEXT, "III"),
        ({"cp_size": 2}, "GGG"),
    ],
    ids=lambda each: each if isinstance(each, str) else " ".join(each),
)
def test_losses_are_those_of_accelerates_own_fsdp(pool: Callable[[int], Pool], sizes: Sizes, levels: str) -> None:
    workers = pool(math.prod(sizes.values()))
    node = {"gpus_per_node": workers.world // 2}
    own, plain, zeropp = (
        workers.once(trained, sizes, each)[0] for each in (None, Strategy(levels, **node), Strategy.zeropp(**node))
    )
    assert own[-1] < own[0] - 0.1
    assert plain == pytest.approx(own, rel=1e-6)
    assert zeropp == pytest.approx(own, rel=0.02)
    assert zeropp != pytest.approx(own, rel=1e-6)


@beside_tensor_parallelism
@pytest.mark.parametrize("levels", ["GGG", "III", "IIG", "NNG"])
def test_losses_beside_tensor_parallelism_are_those_without(pool: Callable[[int], Pool], levels: str) -> None:
    # accelerate's own FSDP2 can't: it needs a class that transformers 5.24 no longer has.
    alone = pool(2).once(trained, {"dp_shard_size": 2}, None)[0]
    plain, zeropp = (
        pool(4).once(trained, TENSOR, each)[0]
        for each in (Strategy(levels, gpus_per_node=1), Strategy.zeropp(gpus_per_node=1))
    )
    # Sums over columns that are split are rounded otherwise, which AdamW amplifies.
    assert plain == pytest.approx(alone, rel=1e-5)
    assert zeropp == pytest.approx(alone, rel=0.02)


def trained_with_a_break(folder: str, sizes: Sizes) -> tuple[list[float], list[float]]:
    """In a worker: the losses of a whole training, and of one in two parts."""
    losses: list[list[float]] = []
    for first, last in ((0, STEPS), (0, STEPS // 2), (STEPS // 2, STEPS)):
        with parallel(sizes) as accelerator:
            strategy = STATEFUL if sizes == HSDP else Strategy(**vars(STATEFUL) | {"gpus_per_node": 1})
            training = training_on(accelerator, strategy)
            if first:
                accelerator.load_state(folder)
            losses.append(training.train(first, last))
            accelerator.save_state(folder)
    return losses[0], losses[1] + losses[2]


@pytest.mark.parametrize("sizes", [HSDP, pytest.param(TENSOR, marks=beside_tensor_parallelism)], ids=["hsdp", "tp"])
def test_a_training_goes_on_bit_for_bit(pool: Callable[[int], Pool], tmp_path: Path, sizes: Sizes) -> None:
    whole, parts = pool(4).run(trained_with_a_break, str(tmp_path), sizes)[0]
    assert len(whole) == STEPS * MICRO_BATCHES
    assert parts == whole


def whole_weights(sizes: Sizes, levels: str) -> dict[str, Tensor]:
    """In a worker: the full weights of a model that is prepared."""
    with parallel(sizes) as accelerator:
        return accelerator.get_state_dict(training_on(accelerator, Strategy(levels, gpus_per_node=1)).model)


@beside_tensor_parallelism
@pytest.mark.parametrize("levels", ["GGG", "III"])
def test_full_weights_are_gathered_over_all_axes(pool: Callable[[int], Pool], levels: str) -> None:
    weights = pool(4).run(whole_weights, TENSOR, levels)[0]
    expected = llama.make_base().cpu().state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())


def trained_by_trainer(folder: str, sizes: Sizes, strategy: Strategy | None) -> tuple[list[float], ...]:
    """In a worker: the losses of Trainer's training and evaluations, and the norms of gradients."""
    allowed = patch.object(ParallelismConfig, "_validate_accelerator", lambda *_: None)  # on CPUs, too
    with new_job(), allowed:
        model = llama.make_base()
        trainer = make_trainer(folder, model, parallelism_config=ParallelismConfig(**sizes))
        if strategy is None:
            choose_own_fsdp(trainer.accelerator, plugin())
            trainer.is_fsdp_enabled = True
        else:
            use_strategy_with_trainer(trainer, strategy)
        split(model, trainer.accelerator)
        trainer.train()
        return tuple(logged(trainer, what) for what in ("loss", "eval_loss", "grad_norm"))


@pytest.mark.parametrize(
    ("sizes", "own_sizes", "node_size"),
    [(HSDP, HSDP, 2), pytest.param(TENSOR, {"dp_shard_size": 2}, 1, marks=beside_tensor_parallelism)],
    ids=["hsdp", "tp"],
)
def test_trainer_passes_its_parallelism_on(
    pool: Callable[[int], Pool], tmp_path: Path, sizes: Sizes, own_sizes: Sizes, node_size: int
) -> None:
    own = pool(4 if own_sizes == HSDP else 2).run(trained_by_trainer, str(tmp_path), own_sizes, None)[0]
    plain = pool(4).run(trained_by_trainer, str(tmp_path), sizes, Strategy("III", gpus_per_node=node_size))[0]
    for which in range(3):  # losses, evaluations, norms
        assert plain[which] == pytest.approx(own[which], rel=1e-5)


def refused(sizes: Sizes) -> str:
    """In a worker: what is said to a model that nothing has split."""
    with parallel(sizes) as accelerator:
        try:
            strategy = Strategy("GGG" if sizes == HSDP else "IGG", gpus_per_node=2)
            use_strategy(accelerator, strategy, plugin=plugin())
            prepared(accelerator)
        except ValueError as error:
            return str(error)
        return ""


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dp_shard_size": 2, "sp_size": 2}, "sp_size=2 in parallelism_config is DeepSpeed's sequence parallelism"),
        ({"dp_replicate_size": 4}, "no dimension to shard over"),
        (HSDP, "use Strategy('III') for HSDP"),
        pytest.param(TENSOR, 'is sharded over accelerator.torch_device_mesh["tp"]', marks=beside_tensor_parallelism),
    ],
    ids=["sp", "replicas", "full shard", "tp"],
)
def test_what_cannot_be_is_refused_on_every_rank(pool: Callable[[int], Pool], sizes: Sizes, message: str) -> None:
    for error in pool(4).run(refused, sizes):
        assert message in error
