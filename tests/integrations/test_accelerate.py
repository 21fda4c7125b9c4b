"""accelerate with a strategy: as accelerate's own FSDP, also beside its other parallelisms, and with checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, skip_first_batches
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin, TorchDynamoPlugin
from harness import llama, models
from harness.covering import over_each
from harness.offload import without_pinning
from harness.pool import Pools, device_type
from harness.wiretap import sent_in
from hugging_face import SMALL_EXAMPLE, STEPS, TOKENS, choose_own_fsdp, fsdp2_plugin, new_job, offloads, run_example
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.torch_version import TorchVersion
from torch.utils.data import DataLoader, TensorDataset

from fsdp_zpp import Int4, Int4Delta, LocalSteps, LoCo, Strategy
from fsdp_zpp.integrations.accelerate import use_strategy
from fsdp_zpp.runtime.full_tensors import reshard

MICRO_BATCHES = 2
PLAIN = Strategy("IIG", gpus_per_node=2)
ZEROPP = Strategy.zeropp(gpus_per_node=2)
STATEFUL = Strategy("IIG", weights=Int4Delta(64), gradients=Int4(64), error_feedback=LoCo(), gpus_per_node=2)
LOCAL = Strategy("III", local_steps=LocalSteps(3, codec=Int4(64)), gpus_per_node=2)
"""STATEFUL and LOCAL have all that codecs keep from step to step."""
INSTALLED = TorchVersion(version("accelerate"))


@dataclass
class Training:
    """A prepared training, and the losses of its micro-batches over all ranks."""

    accelerator: Accelerator
    model: Any
    optimizer: Any
    loader: Any
    scheduler: Any
    losses: list[float] = field(default_factory=list)

    def train(self, first: int = 0, last: int = STEPS) -> list[float]:
        batches = iter(skip_first_batches(self.loader, first * MICRO_BATCHES))
        for _ in range((last - first) * MICRO_BATCHES):
            self.micro_batch(*next(batches))
        return self.losses

    def micro_batch(self, tokens: Tensor) -> None:
        self.train_on(input_ids=tokens, labels=tokens)

    def train_on(self, **batch: Tensor) -> None:
        with self.accelerator.accumulate(self.model):
            loss = self.model(**batch).loss
            self.accelerator.backward(loss)
            if self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.losses.append(float(self.accelerator.reduce(loss.detach(), "mean")))


@contextmanager
def accelerators(**options: Any) -> Iterator[Accelerator]:
    """Return a context with an accelerator; accelerate keeps no state beyond it."""
    with new_job():
        accelerator = Accelerator(cpu=device_type() == "cpu", gradient_accumulation_steps=MICRO_BATCHES, **options)
        torch.backends.cuda.matmul.allow_tf32 = False  # accelerate allows it when it compiles: losses would differ
        yield accelerator


def prepared(accelerator: Accelerator, model: nn.Module | None = None) -> Training:
    model = llama.make_base() if model is None else model
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, STEPS)
    rows = STEPS * MICRO_BATCHES * dist.get_world_size() * 2
    tokens = torch.randint(0, 40, (rows, 16), generator=torch.Generator().manual_seed(3))
    loader = DataLoader(TensorDataset(tokens), batch_size=2)
    return Training(accelerator, *accelerator.prepare(model, optimizer, loader, scheduler))


def for_fsdp(accelerator: Accelerator, strategy: Strategy | None, own: FullyShardedDataParallelPlugin) -> Accelerator:
    """Return an accelerator that shards by a strategy, or by accelerate's own FSDP."""
    if strategy is not None:
        return use_strategy(accelerator, strategy, plugin=own)
    choose_own_fsdp(accelerator, own)
    return accelerator


def trained(strategy: Strategy | None, precision: str = "no") -> tuple[list[float], list[tuple[int, int, int]]]:
    """In a worker: losses, and by micro-batch bytes between nodes: of gathers, of reductions, and all seen."""
    with accelerators(mixed_precision=precision) as accelerator:
        training = prepared(for_fsdp(accelerator, strategy, fsdp2_plugin()))
        if strategy is None:
            return training.train(), []
        sent = []
        for (tokens,) in training.loader:
            tap, counted = sent_in(partial(training.micro_batch, tokens), training.model, gpus_per_node=2)
            sent.append((counted["gather"]["inter"], counted["reduce"]["inter"], tap.total("inter")))
        return training.losses, sent


def test_losses_are_those_of_accelerates_own_fsdp(pool: Pools) -> None:
    own, plain, zeropp = (pool(4).once(trained, strategy)[0][0] for strategy in (None, PLAIN, ZEROPP))
    assert own[-1] < own[0] - 0.1
    assert plain == pytest.approx(own, rel=1e-6)
    assert zeropp == pytest.approx(own, rel=0.01)
    assert zeropp != pytest.approx(own, rel=1e-6)


def test_only_the_last_micro_batch_sends_gradients_between_nodes(pool: Pools) -> None:
    first, last, *again = pool(4).once(trained, PLAIN)[0][1]
    assert first[0] > 0 == first[1]
    assert last[1] > 0 == last[0]
    assert again == [first, last] * (STEPS - 1)
    assert all(total == gathered + reduced for gathered, reduced, total in (first, last))


def test_mixed_precision_is_accelerates(pool: Pools) -> None:
    own, plain = (pool(4).run(trained, strategy, "bf16")[0][0] for strategy in (None, PLAIN))
    # Losses are bf16, in which neighbours are up to 2**-7 apart, and gradients are summed in another order.
    assert plain == pytest.approx(own, rel=2**-7)
    assert plain != pytest.approx(pool(4).once(trained, PLAIN)[0][0], rel=1e-5)


def recomputing() -> list[float]:
    """In a worker: the losses of a training that recomputes layers inside of their units."""
    with accelerators() as accelerator:
        training = prepared(use_strategy(accelerator, PLAIN, plugin=fsdp2_plugin(activation_checkpointing=True)))
        calls = []
        for layer in training.model.model.layers:
            layer.register_forward_hook(lambda *_: calls.append("layer"))
            layer.input_layernorm.register_forward_hook(lambda *_: calls.append("norm"))
        assert len(units_in(training.model)) == 3
        losses = training.train()
        assert calls.count("norm") == 2 * calls.count("layer") > 0, "in the forward and in the backward"
        return losses


def adapters_of_recomputed() -> set[str]:
    """In a worker: the names by which PEFT finds adapters to save and to load, where layers are recomputed."""
    with accelerators() as accelerator:
        use_strategy(accelerator, PLAIN, plugin=fsdp2_plugin(activation_checkpointing=True))
        model = get_peft_model(llama.make_base(), LoraConfig(r=2, target_modules="all-linear"))
        model, _ = accelerator.prepare(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1))
        return set(get_peft_model_state_dict(model))


def test_peft_finds_the_adapters_of_layers_that_are_recomputed(pool: Pools) -> None:
    plain = get_peft_model(llama.make_base(), LoraConfig(r=2, target_modules="all-linear"))
    assert pool(4).run(adapters_of_recomputed) == [set(get_peft_model_state_dict(plain))] * 4


def units_in(module: nn.Module) -> list[str]:
    return [type(each).__name__ for each in module.modules() if isinstance(each, FSDPModule)]


def compiled() -> list[float]:
    with accelerators(dynamo_plugin=TorchDynamoPlugin(backend="eager", use_regional_compilation=True)) as accelerator:
        training = prepared(use_strategy(accelerator, PLAIN))
        assert all(layer._compiled_call_impl for layer in training.model.model.layers)
        return training.train(last=2)


@pytest.mark.parametrize(
    "train", [recomputing, pytest.param(compiled, marks=pytest.mark.skipif(INSTALLED < "1.14", reason="refused"))]
)
def test_layers_may_be_recomputed_or_compiled(pool: Pools, train: Callable[[], list[float]]) -> None:
    losses = pool(4).run(train)[0]
    assert losses == pytest.approx(pool(4).once(trained, PLAIN)[0][0][: len(losses)], rel=1e-6)


Sizes = dict[str, int]
HSDP: Sizes = {"dp_replicate_size": 2, "dp_shard_size": 2}
TENSOR: Sizes = {"dp_shard_size": 2, "tp_size": 2}
CONTEXT: Sizes = {"dp_shard_size": 2, "cp_size": 2}
beside_tensor_parallelism = pytest.mark.skipif(
    INSTALLED < "1.15", reason="accelerate can't clip gradients there, so it is refused"
)
COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")
"""Modules of a layer that tensor parallelism splits."""


@contextmanager
def parallel(sizes: Sizes, **options: Any) -> Iterator[Accelerator]:
    """Return a context with an accelerator whose ``parallelism_config`` has these sizes, if there are any."""
    # Schedulers that step with the optimizer take a step for each process, also for those that share a batch.
    with accelerators(step_scheduler_with_optimizer=not sizes, **options) as accelerator:
        if sizes:  # as an accelerator's constructor does, which takes none on CPUs
            config = accelerator.state.parallelism_config = ParallelismConfig(**sizes)
            accelerator.state.device_mesh = config.get_device_mesh(accelerator.device.type)
        yield accelerator


def split(model: nn.Module, accelerator: Accelerator) -> None:
    """Split a Llama over the ranks of the accelerator's tensor parallelism, if there is any."""
    if accelerator.parallelism_config and accelerator.parallelism_config.tp_enabled:
        for layer in llama.layers_of(model):
            plan = dict.fromkeys(COLUMNS, ColwiseParallel()) | dict.fromkeys(ROWS, RowwiseParallel())
            parallelize_module(layer, accelerator.torch_device_mesh["tp"], plan)


class ContextParallelTraining(Training):
    """A training whose sequences are split over ranks, as accelerate's documentation has it."""

    def micro_batch(self, tokens: Tensor) -> None:
        labels = nn.functional.pad(tokens, (0, 1), value=-100)[:, 1:].contiguous()
        positions = torch.arange(tokens.shape[1], device=tokens.device).repeat(tokens.shape[0], 1)
        split = [tokens, labels, positions]
        with self.accelerator.maybe_context_parallel(
            buffers=split, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(split)
        ):
            self.train_on(input_ids=tokens, labels=labels, shift_labels=labels, position_ids=positions)


def training_on(
    accelerator: Accelerator, strategy: Strategy | None, own: FullyShardedDataParallelPlugin | None = None
) -> Training:
    """Return a training that is prepared for the accelerator's parallelisms, as users prepare it."""
    model = llama.make_base()
    split(model, accelerator)
    has_context = accelerator.parallelism_config and accelerator.parallelism_config.cp_enabled
    if has_context:  # ranks attend to their own part alone: torch's ring attention has no kernels for CPUs
        model.config._attn_implementation = "eager"
    training = prepared(for_fsdp(accelerator, strategy, own or fsdp2_plugin()), model)
    return ContextParallelTraining(**vars(training)) if has_context else training


def trained_on(sizes: Sizes, strategy: Strategy | None, last: int = 2) -> list[float]:
    """In a worker: the losses of some steps; a strategy's full weights are all there before."""
    with parallel(sizes) as accelerator:
        training = training_on(accelerator, strategy)
        if strategy is not None:
            full = accelerator.get_state_dict(training.model)
            if accelerator.is_main_process:
                expected = llama.make_base().cpu().state_dict()
                assert full.keys() == expected.keys()
                assert all(torch.equal(full[name], expected[name]) for name in full)
        return training.train(last=last)


def with_a_break(folder: str, strategy: Strategy, sizes: Sizes, state_dict: str, offload: bool = False) -> list[float]:
    """In a worker: losses of a training that goes on in other objects after half of its steps."""
    losses = []
    for first, last in ((0, 2), (2, STEPS)):
        with parallel(sizes) as accelerator, without_pinning():
            own = fsdp2_plugin(state_dict_type=state_dict, cpu_offload=offload)
            training = training_on(accelerator, strategy, own)
            assert offloads(training.model) == offload
            if first:
                accelerator.load_state(folder)
            losses += training.train(first, last)
            if not first:
                accelerator.save_state(folder)
    return losses


@over_each(
    rest=False,
    strategy={"local steps": LOCAL, "stateful": STATEFUL},
    state_dict=["SHARDED_STATE_DICT", "FULL_STATE_DICT"],
    offload={"on GPUs": False, "offloaded": True},
)
def test_a_training_goes_on_bit_for_bit(
    pool: Pools, tmp_path: Path, strategy: Strategy, state_dict: str, offload: bool
) -> None:
    losses = pool(4).run(with_a_break, str(tmp_path), strategy, {}, state_dict, offload)[0]
    whole = pool(4).once(trained, strategy)[0][0]
    # CPUs round optimizers otherwise than GPUs.
    assert losses == (pytest.approx(whole, rel=1e-3) if offload and device_type() == "cuda" else whole)


def beside_a_teacher() -> list[float]:
    """In a worker: the losses of a model beside others that are evaluated, one of them with layers of its own."""
    with accelerators() as accelerator:
        use_strategy(accelerator, PLAIN)
        teacher, other = accelerator.prepare(llama.make_base(), models.make_net(blocks=2))
        assert units_in(other) == ["FSDPNet", "FSDPBlock", "FSDPBlock"]
        model = accelerator.prepare(llama.make_base())
        tokens = TOKENS.to(accelerator.device)
        with torch.no_grad():
            loss = teacher(input_ids=tokens, labels=tokens).loss.item()
            model(input_ids=tokens)
        full = accelerator.get_state_dict(teacher)
        assert accelerator.unwrap_model(teacher) is teacher
        if accelerator.is_main_process:
            plain = llama.make_base()
            plain.load_state_dict(full)
            assert plain(input_ids=tokens, labels=tokens).loss.item() == pytest.approx(loss, rel=1e-6)
        reshard(model)  # the optimizer is made after a forward
        return prepared(accelerator, model).train()


def test_other_models_are_evaluated_beside(pool: Pools) -> None:
    assert pool(4).run(beside_a_teacher)[0] == pool(4).once(trained, PLAIN)[0][0]


def two_trained(folder: str) -> list[list[float]]:
    """In a worker: losses of two models, one with two optimizers: all, and those before and after a checkpoint."""
    losses: list[list[float]] = []
    for steps in (range(2), range(1), range(1, 2)):
        with new_job():
            accelerator = use_strategy(Accelerator(cpu=device_type() == "cpu"), STATEFUL, plugin=fsdp2_plugin())
            accelerator.prepare(models.make_net())  # which is evaluated
            first, second = llama.make_base(), llama.make_base(tied=True)
            halves = [list(second.model.layers.parameters()), list(second.model.embed_tokens.parameters())]
            first, optimizer = accelerator.prepare(first, torch.optim.AdamW(first.parameters(), lr=2e-3))
            others = [torch.optim.AdamW(halves[0], lr=2e-3), torch.optim.SGD(halves[1], lr=0.1, momentum=0.9)]
            second, *others = accelerator.prepare(second, *others)
            if steps.start:
                accelerator.load_state(folder)
            run = []
            for step in steps:
                for model in (first, second):
                    loss = llama.loss_of(model, llama.tokens(step))
                    accelerator.backward(loss)
                    run.append(float(loss))
                for each in (optimizer, *others):
                    each.step()
                    each.zero_grad()
            losses.append(run)
            if not steps.start:
                accelerator.save_state(folder)
    return losses


def test_several_models_and_optimizers_go_on_bit_for_bit(pool: Pools, tmp_path: Path) -> None:
    for whole, first, second in pool(4).run(two_trained, str(tmp_path)):
        assert first + second == whole


@pytest.mark.parametrize(("sizes", "levels"), [(HSDP, "IIG"), (CONTEXT, "III")], ids=["hsdp", "cp"])
def test_losses_beside_other_parallelisms_are_those_of_accelerates_own_fsdp(
    pool: Pools, sizes: Sizes, levels: str
) -> None:
    own, plain = (pool(4).run(trained_on, sizes, each)[0] for each in (None, Strategy(levels, gpus_per_node=2)))
    assert plain == pytest.approx(own, rel=1e-6)


@beside_tensor_parallelism
def test_losses_beside_tensor_parallelism_are_those_without(pool: Pools) -> None:
    # accelerate's own FSDP2 can't: it needs a class that transformers 5.24 no longer has.
    alone = pool(2).run(trained_on, {"dp_shard_size": 2}, None)[0]
    plain = pool(4).run(trained_on, TENSOR, Strategy("III", gpus_per_node=1))[0]
    # Sums over columns that are split are rounded otherwise, which AdamW amplifies.
    assert plain == pytest.approx(alone, rel=1e-5)


@beside_tensor_parallelism
def test_a_training_beside_tensor_parallelism_goes_on_bit_for_bit(pool: Pools, tmp_path: Path) -> None:
    strategy = replace(STATEFUL, gpus_per_node=1)
    losses = pool(4).run(with_a_break, str(tmp_path), strategy, TENSOR, "SHARDED_STATE_DICT")[0]
    assert losses == pool(4).run(trained_on, TENSOR, strategy, STEPS)[0]


def refused(kind: str) -> str:
    options: dict[str, Any] = {}
    if kind in ("compiled", "layers compiled"):
        by_layer = {"use_regional_compilation": True} if kind == "layers compiled" else {}
        options = {"dynamo_plugin": TorchDynamoPlugin(backend="eager", **by_layer)}
    plugin = {
        "FSDP1": {"fsdp_version": 1},
        "rank 0": {"cpu_ram_efficient_loading": True},
        "recomputed": {"activation_checkpointing": True},
        "recomputed twice": {"activation_checkpointing": True},
    }.get(kind, {})
    sizes = {
        "sp": {"dp_shard_size": 2, "sp_size": 2},
        "replicas": {"dp_replicate_size": 4},
        "full shard": HSDP,
        "tp": TENSOR,
    }.get(kind, {})
    strategy: Any = {"type": "zeropp", "full shard": Strategy("GGG", gpus_per_node=2)}.get(kind, ZEROPP)
    is_old = patch("fsdp_zpp.integrations._common.version", lambda name: "1.13.0")
    with parallel(sizes, **options) as accelerator, is_old if kind == "layers compiled" else nullcontext():
        if kind == "twice":
            use_strategy(accelerator, ZEROPP)
        try:
            use_strategy(accelerator, strategy, plugin=fsdp2_plugin(**plugin))
            _prepare_wrongly(accelerator, kind)
        except (ImportError, TypeError, ValueError) as error:
            return str(error)
        return ""


def _prepare_wrongly(accelerator: Accelerator, kind: str) -> None:
    model: nn.Module = nn.Sequential(nn.Linear(4, 4)) if kind == "recomputed" else llama.make_base()
    if kind == "recomputed twice":
        model.gradient_checkpointing_enable()
    if kind == "sharded":
        fully_shard(model)
    if kind == "unsharded":
        model = accelerator.prepare(model)
        model(input_ids=TOKENS.to(accelerator.device))
    optimizer = torch.optim.SGD(model.parameters())
    if kind == "both":
        models = [accelerator.prepare(llama.make_base()) for _ in range(2)]
        accelerator.prepare(torch.optim.SGD([p for model in models for p in model.parameters()]))
    accelerator.prepare(model, optimizer)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("type", "strategy must be a Strategy such as Strategy.zeropp(), got 'zeropp'"),
        ("twice", "this accelerator has a strategy already"),
        ("compiled", "TorchDynamoPlugin(use_regional_compilation=True)"),
        ("layers compiled", "needs accelerate 1.14 or later to compile layer by layer, and 1.13.0 is installed"),
        ("FSDP1", "a strategy needs fsdp_version=2, and the plugin says 1"),
        ("rank 0", "cpu_ram_efficient_loading=True loads the weights on rank 0 alone"),
        ("recomputed", "it wraps none of this Sequential: name its layers"),
        ("recomputed twice", "in the plugin (fsdp_config) and on the layers: leave one out"),
        ("sharded", "was sharded by torch's fully_shard before"),
        ("unsharded", "a forward leaves the root unsharded"),
        ("both", "the optimizer has parameters of 2 models"),
        ("sp", "sp_size=2 in parallelism_config is DeepSpeed's sequence parallelism"),
        ("replicas", "no dimension to shard over"),
        ("full shard", "use Strategy('III') for HSDP"),
        pytest.param("tp", 'sharded over accelerator.torch_device_mesh["tp"]', marks=beside_tensor_parallelism),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank(pool: Pools, kind: str, message: str) -> None:
    for error in pool(4).run(refused, kind):
        assert message in error


def test_one_process_is_refused() -> None:
    with accelerators() as accelerator, pytest.raises(ValueError, match="accelerate launch or torchrun"):
        use_strategy(accelerator, ZEROPP)


def test_the_example_goes_on(tmp_path: Path) -> None:
    options = [*SMALL_EXAMPLE, "--preset", "loco", "--output", tmp_path]
    first = run_example("accelerate_train.py", *options, "--steps", "2")
    second = run_example("accelerate_train.py", *options, "--steps", "4", "--resume", tmp_path / "step-2")
    assert len(first) == len(second) == 2
    assert [float(each) for each in second] < [float(first[0])]
