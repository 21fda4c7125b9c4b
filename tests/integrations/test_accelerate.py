"""accelerate with a strategy: as accelerate's own FSDP, with fewer bytes, and checkpoints from which it goes on."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
from harness.hugging_face import choose_own_fsdp, new_job
from harness.pool import Pool, device_type
from harness.wiretap import sent_in
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.torch_version import TorchVersion
from torch.utils.data import DataLoader, TensorDataset

from fsdp_zpp import Int4, Int4Delta, Int8, LocalSteps, LoCo, Strategy, save_adapter
from fsdp_zpp.integrations.accelerate import reshard, use_strategy

STEPS, MICRO_BATCHES = 4, 2
TOKENS = torch.arange(1, 13).view(1, -1)
PLAIN = Strategy("GGG", gpus_per_node=2)
ZEROPP = Strategy.zeropp(gpus_per_node=2)
STATEFUL = Strategy("IIG", weights=Int4Delta(64), gradients=Int4(64), error_feedback=LoCo(), gpus_per_node=2)
LOCAL = Strategy("III", local_steps=LocalSteps(3, codec=Int4(64)), gpus_per_node=2)
"""With all that codecs keep from step to step."""


@dataclass
class Training:
    """What a training has, prepared."""

    accelerator: Accelerator
    model: Any
    optimizer: Any
    loader: Any
    scheduler: Any

    def train(self, first: int = 0, last: int = STEPS) -> list[float]:
        """The losses of all micro-batches of some steps, over all ranks."""
        batches = iter(skip_first_batches(self.loader, first * MICRO_BATCHES))
        return [self.micro_batch(*next(batches)) for _ in range((last - first) * MICRO_BATCHES)]

    def micro_batch(self, tokens: Tensor) -> float:
        """As accelerate's documentation has it."""
        with self.accelerator.accumulate(self.model):
            loss = self.model(input_ids=tokens, labels=tokens).loss
            self.accelerator.backward(loss)
            if self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return float(self.accelerator.reduce(loss.detach(), "mean"))


@contextmanager
def accelerators(**options: Any) -> Iterator[Accelerator]:
    """A context with an accelerator; accelerate keeps no state beyond it."""
    with new_job():
        accelerator = Accelerator(cpu=device_type() == "cpu", gradient_accumulation_steps=MICRO_BATCHES, **options)
        torch.backends.cuda.matmul.allow_tf32 = False  # accelerate allows it when it compiles: losses would differ
        yield accelerator


def plugin(**options: Any) -> FullyShardedDataParallelPlugin:
    """accelerate's own description of FSDP2."""
    return FullyShardedDataParallelPlugin(
        **{"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap", "state_dict_type": "SHARDED_STATE_DICT"}
        | options
    )


def prepared(accelerator: Accelerator, model: nn.Module | None = None) -> Training:
    """A Llama and all that trains it."""
    model = llama.make_base() if model is None else model
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, STEPS)
    rows = STEPS * MICRO_BATCHES * dist.get_world_size() * 2
    tokens = torch.randint(0, 40, (rows, 16), generator=torch.Generator().manual_seed(3))
    loader = DataLoader(TensorDataset(tokens), batch_size=2)
    return Training(accelerator, *accelerator.prepare(model, optimizer, loader, scheduler))


def for_fsdp(accelerator: Accelerator, strategy: Strategy | None, own: FullyShardedDataParallelPlugin) -> Accelerator:
    """One that shards by a strategy, or by accelerate's own FSDP."""
    if strategy is not None:
        return use_strategy(accelerator, strategy, plugin=own)
    choose_own_fsdp(accelerator, own)
    return accelerator


def trained(strategy: Strategy | None, precision: str) -> list[float]:
    """In a worker: the losses of a training."""
    with accelerators(mixed_precision=precision) as accelerator:
        return prepared(for_fsdp(accelerator, strategy, plugin())).train()


def test_losses_are_those_of_accelerates_own_fsdp(pool: Callable[[int], Pool]) -> None:
    own, plain, zeropp = (pool(4).run(trained, strategy, "no")[0] for strategy in (None, PLAIN, ZEROPP))
    assert own[-1] < own[0] - 0.1
    assert plain == pytest.approx(own, rel=1e-6)
    assert zeropp == pytest.approx(own, rel=0.01)
    assert zeropp != pytest.approx(own, rel=1e-6)


def test_mixed_precision_is_accelerates(pool: Callable[[int], Pool]) -> None:
    own, plain = (pool(4).run(trained, strategy, "bf16")[0] for strategy in (None, PLAIN))
    # Losses are bf16, in which neighbours are up to 2**-7 apart, and gradients are summed in another order.
    assert plain == pytest.approx(own, rel=2**-7)
    assert plain != pytest.approx(pool(4).run(trained, PLAIN, "no")[0], rel=1e-5)


def checkpointed() -> tuple[list[float], int, list[int]]:
    """In a worker: the losses of a training that recomputes, its units, and those inside of each recomputed module."""
    with accelerators() as accelerator:
        training = prepared(use_strategy(accelerator, PLAIN, plugin=plugin(activation_checkpointing=True)))
        recomputed = [module for module in training.model.modules() if isinstance(module, CheckpointWrapper)]
        inside = [units_in(module._checkpoint_wrapped_module) for module in recomputed]
        return training.train(), units_in(training.model), inside


def units_in(module: nn.Module) -> int:
    """How many units are in ``module``, with itself."""
    return sum(isinstance(each, FSDPModule) for each in module.modules())


def test_activations_are_recomputed_inside_of_units(pool: Callable[[int], Pool]) -> None:
    losses, units, inside = pool(4).run(checkpointed)[0]
    assert losses == pytest.approx(pool(4).run(trained, PLAIN, "no")[0], rel=1e-6)
    assert units == 3
    # accelerate recomputes two layers, or, before 1.15, the four modules of each.
    assert inside in ([0] * 2, [0] * 8)


def compiled() -> list[float]:
    """In a worker: the losses of a training whose layers are compiled."""
    with accelerators(dynamo_plugin=TorchDynamoPlugin(backend="eager", use_regional_compilation=True)) as accelerator:
        training = prepared(use_strategy(accelerator, PLAIN))
        assert all(layer._compiled_call_impl for layer in training.model.model.layers)
        return training.train()


@pytest.mark.skipif(TorchVersion(version("accelerate")) < "1.14", reason="refused, see below")
def test_layers_are_compiled(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(compiled)[0] == pytest.approx(pool(4).run(trained, PLAIN, "no")[0], rel=1e-6)


def bytes_by_micro_batch(strategy: Strategy) -> list[tuple[int, int, int]]:
    """In a worker: what each sends between nodes: gathers and reductions as traffic says, and all that was seen."""
    with accelerators() as accelerator:
        training = prepared(use_strategy(accelerator, strategy))
        found = []
        for (tokens,), _ in zip(training.loader, range(2 * MICRO_BATCHES), strict=False):
            tap, said = sent_in(partial(training.micro_batch, tokens), training.model, gpus_per_node=2)
            found.append((said["gather"]["inter"], said["reduce"]["inter"], tap.total("inter")))
    return found


def test_only_the_last_micro_batch_sends_gradients_between_nodes(pool: Callable[[int], Pool]) -> None:
    strategy = Strategy("IIG", weights=Int8(64), gpus_per_node=2)
    first, last, *again = pool(4).run(bytes_by_micro_batch, strategy)[0]
    assert first[0] > 0 == first[1]
    assert last[1] > 0 == last[0]
    assert again == [first, last]
    assert all(seen == gathered + reduced for gathered, reduced, seen in (first, last))


def trained_with_a_break(
    folder: str, strategy: Strategy, state_dict: str
) -> tuple[list[float], list[float], list[float]]:
    """In a worker: the losses of a whole training, of its first half, and of its second in other objects."""
    losses = []
    for first, last in ((0, STEPS), (0, STEPS // 2), (STEPS // 2, STEPS)):
        with accelerators() as accelerator:
            training = prepared(use_strategy(accelerator, strategy, plugin=plugin(state_dict_type=state_dict)))
            if first:
                accelerator.load_state(folder)
            losses.append(training.train(first, last))
            accelerator.save_state(folder)
    return losses[0], losses[1], losses[2]


@pytest.mark.parametrize("state_dict", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@pytest.mark.parametrize("strategy", [STATEFUL, LOCAL], ids=["stateful", "local steps"])
def test_a_training_goes_on_bit_for_bit(
    pool: Callable[[int], Pool], tmp_path: Path, strategy: Strategy, state_dict: str
) -> None:
    whole, first, second = pool(4).run(trained_with_a_break, str(tmp_path), strategy, state_dict)[0]
    assert first + second == whole


def loaded_without_codec_state(folder: str) -> tuple[list[float], list[float]]:
    """In a worker: the losses after a checkpoint with codec state and after the same without."""
    losses = []
    for codecs in (True, False):
        with accelerators() as accelerator:
            training = prepared(use_strategy(accelerator, STATEFUL))
            if codecs:
                training.train(0, 2)
                accelerator.save_state(folder)
            else:
                if accelerator.is_main_process:
                    shutil.rmtree(Path(folder) / "codecs")
                accelerator.wait_for_everyone()
                accelerator.load_state(folder)
            losses.append(training.train(2, STEPS))
    return losses[0], losses[1]


def test_a_checkpoint_without_codec_state_is_loaded(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    with_codecs, without = pool(4).run(loaded_without_codec_state, str(tmp_path))[0]
    assert without == pytest.approx(with_codecs, rel=0.02)
    assert without != with_codecs


def evaluated(strategy: Strategy) -> tuple[float, float]:
    """In a worker: the loss of a model that was prepared by itself, and of an unwrapped copy of its full weights."""
    with accelerators() as accelerator:
        model = use_strategy(accelerator, strategy).prepare(llama.make_base())
        tokens = torch.arange(12, device=accelerator.device).view(1, -1)
        with torch.no_grad():
            loss = model(input_ids=tokens, labels=tokens).loss
        full = accelerator.get_state_dict(model)
        assert accelerator.unwrap_model(model) is model
        if not accelerator.is_main_process:
            return loss.item(), loss.item()
        plain = llama.make_base()
        plain.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in full.items()})
        plain.load_state_dict(full)
        return loss.item(), plain(input_ids=tokens, labels=tokens).loss.item()


def test_a_model_is_evaluated_without_an_optimizer_and_unwrapped(pool: Callable[[int], Pool]) -> None:
    sharded, unwrapped = pool(4).run(evaluated, PLAIN)[0]
    assert sharded == pytest.approx(unwrapped, rel=1e-6)


def with_a_teacher() -> tuple[list[float], list[str]]:
    """In a worker: the losses of a model beside others that are evaluated, one with layers of its own."""
    with accelerators() as accelerator:
        use_strategy(accelerator, ZEROPP)
        teacher, other = accelerator.prepare(llama.make_base(), models.make_net(blocks=2))
        model = accelerator.prepare(llama.make_base())
        with torch.no_grad():
            teacher(input_ids=TOKENS.to(accelerator.device))
            model(input_ids=TOKENS.to(accelerator.device))
        reshard(model)  # the optimizer is made after a forward
        training = prepared(accelerator, model)
        units = [type(module).__name__ for module in other.modules() if isinstance(module, FSDPModule)]
        return training.train(), units


def test_other_models_are_evaluated_beside(pool: Callable[[int], Pool]) -> None:
    losses, units = pool(4).run(with_a_teacher)[0]
    assert losses == pool(4).run(trained, ZEROPP, "no")[0]
    assert units == ["FSDPNet", "FSDPBlock", "FSDPBlock"]


def fine_tuned(folder: str) -> tuple[list[float], Tensor]:
    """In a worker: the losses of a training of adapters on a quantized base, and what the model answers after it."""
    with accelerators() as accelerator:
        model = llama.adapt(llama.make_base(llama.ADAPTED), {"default": "lora"})
        # Without a codec of weights, or the model would compute with adapters that differ from those in the file.
        strategy = Strategy("IGG", gradients=Int4(64), frozen=Int8(64), gpus_per_node=2)
        training = prepared(use_strategy(accelerator, strategy), model)
        losses = training.train()
        save_adapter(training.model, folder)
        with torch.no_grad():
            return losses, training.model(input_ids=TOKENS.to(accelerator.device)).logits.cpu()


def test_adapters_on_a_quantized_base_load_in_plain_peft(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    losses, logits = pool(4).run(fine_tuned, str(tmp_path))[0]
    assert losses[-1] < losses[0]
    loaded = PeftModel.from_pretrained(llama.rounded_base(Int8(64), llama.ADAPTED).cpu(), tmp_path)
    torch.testing.assert_close(loaded(input_ids=TOKENS).logits, logits, rtol=1e-4, atol=1e-4)


def refused(kind: str) -> str:
    """In a worker: what is said to something that can't be."""
    options: dict[str, Any] = {}
    if kind == "compiled":
        options = {"dynamo_plugin": TorchDynamoPlugin(backend="eager")}
    if kind == "layers compiled":
        options = {"dynamo_plugin": TorchDynamoPlugin(backend="eager", use_regional_compilation=True)}
    is_old = patch("fsdp_zpp.integrations._requirement.version", lambda name: "1.13.0")
    with accelerators(**options) as accelerator, is_old:
        if kind == "HSDP":  # which accelerate does not take on a CPU
            accelerator.state.parallelism_config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
        if kind == "late":
            accelerator._models.append(nn.Linear(2, 2))
        if kind == "twice":
            use_strategy(accelerator, ZEROPP)
        strategy: Any = "zeropp" if kind == "type" else ZEROPP
        plugins = {
            "FSDP1": {"fsdp_version": 1},
            "rank 0": {"cpu_ram_efficient_loading": True},
            "recomputed": {"activation_checkpointing": True},
        }
        own = plugin(**plugins[kind]) if kind in plugins else None
        try:
            use_strategy(accelerator, strategy, plugin=own)
            model = llama.make_base()
            if kind == "sharded":
                fully_shard(model)
            optimizer = torch.optim.SGD(llama.make_base().parameters() if kind == "other" else model.parameters())
            if kind == "recomputed":
                model = nn.Sequential(nn.Linear(4, 4))
            if kind == "unsharded":
                model = accelerator.prepare(model)
                model(input_ids=TOKENS.to(accelerator.device))
                optimizer = torch.optim.SGD(model.parameters())
            if kind == "both":
                models = [accelerator.prepare(llama.make_base()) for _ in range(2)]
                accelerator.prepare(torch.optim.SGD([p for model in models for p in model.parameters()]))
            if kind == "stepped":
                optimizer.state[next(iter(model.parameters()))] = {"step": 1}
            accelerator.prepare(model, optimizer)
        except (ImportError, TypeError, ValueError) as error:
            return str(error)
        return ""


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("type", "strategy must be a Strategy such as Strategy.zeropp(), got 'zeropp'"),
        ("twice", "this accelerator has a strategy already"),
        ("late", "call use_strategy before accelerator.prepare"),
        ("HSDP", "use Strategy('III') for HSDP"),
        ("compiled", "TorchDynamoPlugin(use_regional_compilation=True)"),
        ("layers compiled", "needs accelerate 1.14 or later to compile layer by layer, and 1.13.0 is installed"),
        ("FSDP1", "a strategy needs fsdp_version=2, and the plugin says 1"),
        ("rank 0", "cpu_ram_efficient_loading=True loads the weights on rank 0 alone"),
        ("recomputed", "it wraps none of this Sequential: name its layers"),
        ("sharded", "was sharded by torch's fully_shard before"),
        ("other", "a parameter that is not the model's"),
        ("unsharded", "a forward leaves the root unsharded"),
        ("stepped", "prepare both before training"),
        ("both", "the optimizer has parameters of 2 models"),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank(pool: Callable[[int], Pool], kind: str, message: str) -> None:
    for said in pool(4).run(refused, kind):
        assert message in said


def test_one_process_is_refused() -> None:
    with accelerators() as accelerator, pytest.raises(ValueError, match="accelerate launch or torchrun"):
        use_strategy(accelerator, ZEROPP)
