"""Trainer with a strategy: as with its own FSDP2, with checkpoints, the best model and adapters.

Also models that ``from_pretrained`` has loaded in few bits.
"""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fuzz.modules import ScheduleFree
from harness import llama, models
from harness.offload import without_pinning
from harness.pool import Pools
from hugging_face import (
    SMALL_EXAMPLE,
    STEPS,
    TOKENS,
    logged,
    make_trainer,
    new_job,
    offloads,
    run_example,
    shard_trainer_by_own_fsdp,
)
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.torch_version import TorchVersion
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer
from transformers.distributed import DistributedConfig

from fsdp_zpp import (
    Int4,
    Int4Delta,
    Int8,
    LocalSteps,
    LoCo,
    Strategy,
    dequantize_frozen_params,
    quantize_frozen_params,
    traffic,
)
from fsdp_zpp.frozen._torch_modules import FrozenModule
from fsdp_zpp.integrations.transformers import use_strategy

PLAIN = Strategy("GGG", gpus_per_node=2)
ZEROPP = Strategy.zeropp(gpus_per_node=2)
STATEFUL = Strategy("IIG", weights=Int4Delta(64), gradients=Int4(64), error_feedback=LoCo(), gpus_per_node=2)
LOCAL = Strategy("III", local_steps=LocalSteps(3, codec=Int4(64)), gpus_per_node=2)
"""STATEFUL and LOCAL have all that codecs keep from step to step."""
QUANTIZED = Strategy("IGG", gradients=Int4(64), frozen=Int8(64), gpus_per_node=2)
"""Strategy without a codec of weights, or the model would compute with adapters that differ from those in files."""
WHOLE = ("whole", "local steps")
"""Kinds of training that change all weights."""


def trained(folder: str, strategy: Strategy | None) -> tuple[list[float], list[float], Any]:
    """In a worker: the losses of a training and of its evaluations, and the bytes that it sent."""
    with new_job():
        trainer = make_trainer(folder, llama.make_base())
        if strategy is None:
            shard_trainer_by_own_fsdp(trainer)
        else:
            use_strategy(trainer, strategy)
        trainer.train()
        sent = None if strategy is None else traffic(trainer.model)
        return logged(trainer, "loss"), logged(trainer, "eval_loss"), sent


def test_losses_are_those_of_trainers_own_fsdp(pool: Pools, tmp_path: Path) -> None:
    own, plain, zeropp = (pool(4).run(trained, str(tmp_path), each)[0] for each in (None, PLAIN, ZEROPP))
    for which in range(2):  # training, evaluation
        assert own[which][-1] < own[which][0]
        assert plain[which] == pytest.approx(own[which], rel=1e-4)  # Trainer logs four digits
        assert zeropp[which] == pytest.approx(own[which], rel=0.01)
    for hop in ("gather", "reduce"):
        assert zeropp[2][hop]["inter"] < plain[2][hop]["inter"] / 4


OFFLOAD: dict[str, Any] = {"fsdp": True, "fsdp_config": {"cpu_offload": True, "state_dict_type": "SHARDED_STATE_DICT"}}
FULL: dict[str, Any] = {"fsdp": True, "fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}}


def make_model(kind: str, other: bool = False) -> nn.Module:
    """Return a whole Llama, or one with adapters, perhaps on another base."""
    if kind in WHOLE:
        return llama.make_base()
    base = llama.make_base(llama.ADAPTED)
    if other:
        base.model.layers[0].mlp.up_proj.weight.data.mul_(1.1)
    return llama.adapt(base, {"default": "lora"})


def resumed(folder: str, kind: str, options: dict[str, Any]) -> list[tuple[list[float], dict[str, Tensor]]]:
    """In a worker: losses and weights after a training, and after one that goes on from its middle."""
    trainings = []
    options = options | {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "no"}
    for middle in (None, f"{folder}/checkpoint-2"):
        with new_job(), without_pinning():
            trainer = make_trainer(folder, make_model(kind), **options)
            use_strategy(trainer, {"quantized": QUANTIZED, "local steps": LOCAL}.get(kind, STATEFUL))
            trainer.train(resume_from_checkpoint=middle)
            assert offloads(trainer.model) == ("cpu_offload" in options.get("fsdp_config", {}))
            trainings.append((logged(trainer, "loss"), trainer.accelerator.get_state_dict(trainer.model)))
    if kind == "quantized":
        with new_job():
            trainer = use_strategy(make_trainer(folder, make_model(kind, other=True), **options), QUANTIZED)
            with pytest.raises(ValueError, match="was saved with another base: 1 of the"):
                trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return trainings


@pytest.mark.parametrize(
    ("kind", "options"),
    [("local steps", OFFLOAD), ("lora", FULL), ("quantized", {}), pytest.param("whole", {}, marks=pytest.mark.wide)],
    ids=["local steps, offloaded", "lora, full", "quantized", "whole"],
)
def test_a_training_is_resumed_bit_for_bit(pool: Pools, tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    if options is FULL and TorchVersion(version("accelerate")) < "1.15":
        pytest.skip("accelerate saves rank 0's shards alone, so refused")
    (losses, weights), (losses_again, weights_again) = pool(4).run(resumed, str(tmp_path), kind, options)[0]
    assert len(losses) == STEPS
    assert losses_again == losses
    assert weights
    assert all(torch.equal(weights_again[name], weight) for name, weight in weights.items())
    files = {path.name for path in (tmp_path / "checkpoint-2").iterdir()}
    assert ("codecs" in files) == (kind != "quantized")  # whose strategy keeps nothing
    assert ("adapter_model.safetensors" in files) == (kind not in WHOLE)
    if kind not in WHOLE:
        sharded = [*tmp_path.glob("checkpoint-2/*_0")]  # of model and optimizer
        assert len(sharded) == (2 if kind == "quantized" else 0)
        for folder in sharded:
            names = FileSystemReader(folder).read_metadata().state_dict_metadata
            assert all("lora" in name or "param_groups" in name for name in names)  # and nothing of the base


GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}


def evaluated(folder: str, kind: str, strategy: Strategy) -> tuple[Any, ...]:
    """In a worker: a training with evaluations around it, the best model of which is saved."""
    saves = {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True}
    saves |= FULL if kind == "whole" else {}
    with new_job():
        # The greater, the better, so that the last one is not the best.
        trainer = make_trainer(folder, make_model(kind), greater_is_better=True, **saves)
        use_strategy(trainer, strategy)
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        after = trainer.evaluate()["eval_loss"]
        trainer.save_model(f"{folder}/saved")
        tokens = TOKENS.to(trainer.args.device)
        with torch.no_grad():
            logits = trainer.model(input_ids=tokens).logits.cpu()
        generated = trainer.model.generate(tokens, **GREEDY).tolist()
        return before, logged(trainer, "eval_loss"), after, logits, generated


@pytest.mark.parametrize(("kind", "strategy"), [("whole", PLAIN), ("quantized", QUANTIZED)], ids=["whole", "quantized"])
def test_the_best_model_is_evaluated_and_saved_for_plain_use(
    pool: Pools, tmp_path: Path, kind: str, strategy: Strategy
) -> None:
    before, during, after, logits, generated = pool(4).run(evaluated, str(tmp_path), kind, strategy)[0]
    assert before > during[0] > during[1]
    assert after == pytest.approx(during[0], rel=1e-6)
    if kind == "whole":
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    else:
        loaded = PeftModel.from_pretrained(llama.rounded_base(Int8(64), llama.ADAPTED).cpu(), tmp_path / "saved")
    torch.testing.assert_close(loaded(input_ids=TOKENS).logits, logits, rtol=1e-4, atol=1e-4)
    assert generated == loaded.generate(input_ids=TOKENS, **GREEDY).tolist()


class Own(Trainer):
    """Overrides what users override, as they do; trains other weights than it evaluates."""

    def create_optimizer(self) -> torch.optim.Optimizer:  # type: ignore[override]
        self.optimizer = ScheduleFree(self.model.parameters())
        return self.optimizer

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        Path(output_dir or "", f"own{self.args.process_index}").touch()


def trained_by_own(folder: str, levels: str) -> list[float]:
    """In a worker: the losses of a training and of evaluations in it, by a trainer of a user's class."""
    with new_job():
        cls = use_strategy(Own, Strategy(levels, gpus_per_node=2))
        trainer = make_trainer(folder, llama.make_base(), cls=cls)
        trainer.train()
        trainer.save_model(folder)
        assert isinstance(trainer.optimizer.optimizer, ScheduleFree)
        return logged(trainer, "loss") + logged(trainer, "eval_loss")


def test_what_users_override_is_called_and_evaluated_weights_may_be_others(pool: Pools, tmp_path: Path) -> None:
    # Weights are kept from one forward to the next, or never.
    kept, fresh = (pool(4).run(trained_by_own, str(tmp_path), levels)[0] for levels in ("IGG", "GGG"))
    assert kept == pytest.approx(fresh, rel=1e-4)
    assert len(fresh) == 6
    assert {path.name for path in tmp_path.iterdir()} >= {*(f"own{rank}" for rank in range(4)), "model.safetensors"}


def refused(folder: str, kind: str) -> str:
    options: dict[str, Any] = {
        "batch": {"auto_find_batch_size": True},
        "only": {"save_only_model": True},
        "compiled": {"torch_compile": True, "torch_compile_backend": "eager"},
        "recomputed twice": {
            "gradient_checkpointing": True,
            "fsdp": True,
            "fsdp_config": {"activation_checkpointing": True},
        },
        "adapters": FULL | {"save_strategy": "steps", "save_steps": 2},
    }.get(kind, {})
    is_old = patch("fsdp_zpp.integrations._common.version", lambda name: "1.14.0")
    with new_job(), is_old if kind == "adapters" else nullcontext():
        try:
            trainer = make_trainer(folder, make_model("lora" if kind == "adapters" else "whole"), **options)
            use_strategy(trainer, PLAIN)
            trainer.train() if kind == "recomputed twice" else use_strategy(trainer, PLAIN)
        except (ImportError, ValueError) as error:
            return str(error)
        return ""


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("twice", "this trainer has a strategy already"),
        ("batch", "choose per_device_train_batch_size"),
        ("only", "training can't resume from it"),
        ("compiled", "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=true"),
        ("recomputed twice", "activation_checkpointing"),
        ("adapters", "needs accelerate 1.15 or later for checkpoints of adapters with FULL_STATE_DICT"),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank(pool: Pools, tmp_path: Path, kind: str, message: str) -> None:
    for error in pool(4).run(refused, str(tmp_path), kind):
        assert message in error


def test_what_a_class_cannot_have_is_refused() -> None:
    sharding = use_strategy(Own, PLAIN)
    assert issubclass(sharding, Own)
    with pytest.raises(ValueError, match="StrategyOwn has a strategy already, "):
        use_strategy(sharding, PLAIN)
    with pytest.raises(TypeError, match="strategy must be a Strategy such as"):
        use_strategy(Own, "zeropp")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="use_strategy takes a Trainer or a class derived from it, got dict"):
        use_strategy(dict, PLAIN)  # type: ignore[type-var]


def test_the_example_goes_on(tmp_path: Path) -> None:
    arguments = [*SMALL_EXAMPLE, "--lora", "--steps", "4", "--output", tmp_path]
    final = tmp_path / "final" / "adapter_model.safetensors"
    whole = run_example("hf_trainer.py", *arguments)
    saved = final.read_bytes()
    shutil.rmtree(tmp_path / "checkpoint-4")  # as if it had been killed before
    second = run_example("hf_trainer.py", *arguments, "--resume")
    assert len(whole) == 4
    assert second == whole[2:]
    assert final.read_bytes() == saved


def test_the_example_takes_a_model_and_data(tmp_path: Path) -> None:
    llama.make_base(llama.ADAPTED).cpu().save_pretrained(tmp_path / "base")
    llama.tokenizer().save_pretrained(tmp_path / "base")
    (tmp_path / "text").write_text(" ".join(map(str, range(2, 100))) * 20)
    own = ["--model", tmp_path / "base", "--data", tmp_path / "text", "--sequence", "16", "--checkpointing"]
    options = [*own, "--gpus-per-node", "1", "--batch", "1", "--steps", "2", "--output", tmp_path / "out"]
    assert len(run_example("hf_trainer.py", *options)) == 2
    final = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "final")
    assert final.config.vocab_size == llama.VOCABULARY


def loaded_sharded(folder: str) -> None:
    """In a worker."""
    with new_job():
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(fsdp_size=4))
        with pytest.raises(ValueError, match="a strategy would shard it again: load it without distributed_config"):
            use_strategy(make_trainer(f"{folder}/out", model), ZEROPP)


@pytest.mark.skipif(TorchVersion(version("transformers")) < "5.24", reason="from_pretrained shards nothing")
def test_models_that_were_loaded_sharded_are_refused(pool: Pools, tmp_path: Path) -> None:
    llama.make_base().save_pretrained(tmp_path)
    pool(4).run(loaded_sharded, str(tmp_path))


# As axolotl loads them.
IN_4_BITS = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_quant_storage=torch.bfloat16
)


def trained_in_4_bits(folder: str) -> tuple[list[float], list[float], int]:
    """In a worker: the losses of a training, those of plain layers of the same values, and how many are quantized."""
    losses, quantized = [], 0
    for frozen in ("as stored", None):
        with new_job():
            model: Any = AutoModelForCausalLM.from_pretrained(
                folder, quantization_config=IN_4_BITS, device_map=models.device(), dtype=torch.float32
            ).requires_grad_(False)
            if frozen is None:
                quantize_frozen_params(model, "as stored", dtype=torch.float32)
                dequantize_frozen_params(model)
                for name in ("is_loaded_in_4bit", "hf_quantizer", "quantization_method"):
                    vars(model).pop(name, None)
                model.is_quantized = False
            strategy = Strategy.mixzpp(weights=None, gradients=None, frozen=frozen, gpus_per_node=2)
            adapted = llama.adapt(model, {"default": "lora"})
            trainer = use_strategy(make_trainer(f"{folder}/out", adapted, max_steps=2), strategy)
            trainer.train()
            quantized += sum(isinstance(module, FrozenModule) for module in trainer.model.modules())
            losses.append(logged(trainer, "loss") + logged(trainer, "eval_loss"))
    return losses[0], losses[1], quantized


def test_adapters_train_on_bitsandbytes_layers_as_on_plain_ones(pool: Pools, tmp_path: Path) -> None:
    llama.make_base().save_pretrained(tmp_path)
    for losses, plain, quantized in pool(4).run(trained_in_4_bits, str(tmp_path)):
        assert quantized == 14
        assert len(losses) == 3
        assert losses == pytest.approx(plain, rel=1e-4)  # Trainer logs few digits
