"""accelerate with a strategy: as accelerate's own FSDP, with fewer bytes, and checkpoints from which it goes on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from accelerate.utils import TorchDynamoPlugin
from accelerate_training import (
    LOCAL,
    MICRO_BATCHES,
    PLAIN,
    STATEFUL,
    STEPS,
    TOKENS,
    ZEROPP,
    accelerators,
    for_fsdp,
    plugin,
    prepared,
)
from harness import llama, models
from harness.covering import over_pairs
from harness.offload import without_pinning
from harness.pool import Pool, device_type
from harness.wiretap import sent_in
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FSDPModule
from torch.torch_version import TorchVersion

from fsdp_zpp import Int4, Int8, Strategy, save_adapter
from fsdp_zpp.integrations.accelerate import reshard, use_strategy


def trained(strategy: Strategy | None, precision: str) -> list[float]:
    """In a worker: the losses of a training."""
    with accelerators(mixed_precision=precision) as accelerator:
        return prepared(for_fsdp(accelerator, strategy, plugin())).train()


def test_losses_are_those_of_accelerates_own_fsdp(pool: Callable[[int], Pool]) -> None:
    own, plain, zeropp = (pool(4).once(trained, strategy, "no")[0] for strategy in (None, PLAIN, ZEROPP))
    assert own[-1] < own[0] - 0.1
    assert plain == pytest.approx(own, rel=1e-6)
    assert zeropp == pytest.approx(own, rel=0.01)
    assert zeropp != pytest.approx(own, rel=1e-6)


def trained_offloaded(strategy: Strategy) -> tuple[list[float], str]:
    """In a worker: the losses of a training whose parameters are on the CPU, and where optimizer state is."""
    with accelerators() as accelerator, without_pinning():
        training = prepared(for_fsdp(accelerator, strategy, plugin(cpu_offload=True)))
        losses = training.train()
        states = training.optimizer.optimizer.state.values()
        (device,) = {value.device.type for state in states for value in state.values()}
        return losses, device


@pytest.mark.parametrize("strategy", [ZEROPP, STATEFUL, LOCAL], ids=["zeropp", "stateful", "local steps"])
def test_offloaded_parameters_train_as_others(pool: Callable[[int], Pool], strategy: Strategy) -> None:
    losses, device = pool(4).run(trained_offloaded, strategy)[0]
    kept = pool(4).once(trained, strategy, "no")[0]
    assert losses == pytest.approx(kept, rel=0 if device_type() == "cpu" else 1e-3)  # CPUs round optimizers otherwise
    assert device == "cpu"


def test_mixed_precision_is_accelerates(pool: Callable[[int], Pool]) -> None:
    own, plain = (pool(4).run(trained, strategy, "bf16")[0] for strategy in (None, PLAIN))
    # Losses are bf16, in which neighbours are up to 2**-7 apart, and gradients are summed in another order.
    assert plain == pytest.approx(own, rel=2**-7)
    assert plain != pytest.approx(pool(4).once(trained, PLAIN, "no")[0], rel=1e-5)


def checkpointed() -> tuple[list[float], int, list[int]]:
    """In a worker: the losses of a training that recomputes, its units, and those inside of each recomputed module."""
    with accelerators() as accelerator:
        training = prepared(use_strategy(accelerator, PLAIN, plugin=plugin(activation_checkpointing=True)))
        recomputed = [module for module in training.model.modules() if isinstance(module, CheckpointWrapper)]
        inside = [units_in(module._checkpoint_wrapped_module) for module in recomputed]
        return training.train(), units_in(training.model), inside


def units_in(module: nn.Module) -> int:
    """Count the units in ``module``, itself included."""
    return sum(isinstance(each, FSDPModule) for each in module.modules())


def test_activations_are_recomputed_inside_of_units(pool: Callable[[int], Pool]) -> None:
    losses, units, inside = pool(4).run(checkpointed)[0]
    assert losses == pytest.approx(pool(4).once(trained, PLAIN, "no")[0], rel=1e-6)
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
    assert pool(4).run(compiled)[0] == pytest.approx(pool(4).once(trained, PLAIN, "no")[0], rel=1e-6)


def bytes_by_micro_batch(strategy: Strategy) -> list[tuple[int, int, int]]:
    """In a worker: what each sends between nodes: gathers and reductions as traffic says, and all that was seen."""
    with accelerators() as accelerator:
        training = prepared(use_strategy(accelerator, strategy))
        sent = []
        for (tokens,), _ in zip(training.loader, range(2 * MICRO_BATCHES), strict=False):
            tap, counted = sent_in(partial(training.micro_batch, tokens), training.model, gpus_per_node=2)
            sent.append((counted["gather"]["inter"], counted["reduce"]["inter"], tap.total("inter")))
    return sent


def test_only_the_last_micro_batch_sends_gradients_between_nodes(pool: Callable[[int], Pool]) -> None:
    strategy = Strategy("IIG", weights=Int8(64), gpus_per_node=2)
    first, last, *again = pool(4).run(bytes_by_micro_batch, strategy)[0]
    assert first[0] > 0 == first[1]
    assert last[1] > 0 == last[0]
    assert again == [first, last]
    assert all(total == gathered + reduced for gathered, reduced, total in (first, last))


def trained_with_a_break(
    folder: str, strategy: Strategy, state_dict: str, offload: bool
) -> tuple[list[float], list[float], list[float]]:
    """In a worker: the losses of a whole training, of its first half, and of its second in other objects."""
    losses = []
    for first, last in ((0, STEPS), (0, STEPS // 2), (STEPS // 2, STEPS)):
        with accelerators() as accelerator, without_pinning():
            own = plugin(state_dict_type=state_dict, cpu_offload=offload)
            training = prepared(use_strategy(accelerator, strategy, plugin=own))
            if first:
                accelerator.load_state(folder)
            losses.append(training.train(first, last))
            accelerator.save_state(folder)
    return losses[0], losses[1], losses[2]


@over_pairs(
    rest=False,
    strategy={"stateful": STATEFUL, "local steps": LOCAL},
    state_dict=["SHARDED_STATE_DICT", "FULL_STATE_DICT"],
    offload={"on GPUs": False, "offloaded": True},
)
def test_a_training_goes_on_bit_for_bit(
    pool: Callable[[int], Pool], tmp_path: Path, strategy: Strategy, state_dict: str, offload: bool
) -> None:
    whole, first, second = pool(4).run(trained_with_a_break, str(tmp_path), strategy, state_dict, offload)[0]
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
    assert losses == pool(4).once(trained, ZEROPP, "no")[0]
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
