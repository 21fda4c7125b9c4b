"""Trainer and SFTTrainer with a strategy: as with their own FSDP2, with checkpoints, best model and adapters."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from fuzz.optimizers import ScheduleFree
from harness import llama
from harness.offload import without_pinning
from harness.pool import Pool, device_type
from hugging_face import choose_own_fsdp, new_job
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.torch_version import TorchVersion
from trainer_training import TOKENS, logged, make_trainer
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback

from fsdp_zpp import Int4, Int4Delta, Int8, LocalSteps, LoCo, Strategy, traffic
from fsdp_zpp.integrations.transformers import use_strategy

ACCELERATE = TorchVersion(version("accelerate"))
PLAIN = Strategy("GGG", gpus_per_node=2)
ZEROPP = Strategy.zeropp(gpus_per_node=2)
STATEFUL = Strategy("IIG", weights=Int4Delta(64), gradients=Int4(64), error_feedback=LoCo(), gpus_per_node=2)
LOCAL = Strategy("III", local_steps=LocalSteps(3, codec=Int4(64)), gpus_per_node=2)
WHOLE = ("whole", "local steps")
"""Kinds of training that change all weights."""
"""With all that codecs keep from step to step."""
QUANTIZED = Strategy("IGG", gradients=Int4(64), frozen=Int8(64), gpus_per_node=2)
"""Strategy without a codec of weights, or the model would compute with adapters that differ from those in files."""


def trained(folder: str, strategy: Strategy | None, options: dict[str, Any]) -> tuple[list[float], list[float], Any]:
    """In a worker: the losses of a training and of its evaluations, and the bytes that it sent."""
    with new_job():
        trainer = make_trainer(folder, llama.make_base(), **options)
        if strategy is None:
            choose_own_fsdp(trainer.accelerator, FullyShardedDataParallelPlugin(fsdp_version=2))
            trainer.is_fsdp_enabled = True
        else:
            use_strategy(trainer, strategy)
        trainer.train()
        sent = None if strategy is None else traffic(trainer.model)
        return logged(trainer, "loss"), logged(trainer, "eval_loss"), sent


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_losses_are_those_of_trainers_own_fsdp(pool: Callable[[int], Pool], tmp_path: Path, precision: str) -> None:
    options = {"bf16": precision == "bf16"}
    own, plain, zeropp = (pool(4).run(trained, str(tmp_path), each, options)[0] for each in (None, PLAIN, ZEROPP))
    rounding = 1e-4 if precision == "fp32" else 5e-3  # Trainer logs four digits; sums in bf16 depend on their order
    for which in range(2):  # training, evaluation
        assert own[which][-1] < own[which][0]
        assert plain[which] == pytest.approx(own[which], rel=rounding)
        assert zeropp[which] == pytest.approx(own[which], rel=0.01)
    fewer = 4 if precision == "fp32" else 2
    assert zeropp[2]["gather"]["inter"] < plain[2]["gather"]["inter"] / fewer
    assert zeropp[2]["reduce"]["inter"] < plain[2]["reduce"]["inter"] / fewer


OFFLOAD: dict[str, Any] = {"fsdp": True, "fsdp_config": {"cpu_offload": True, "state_dict_type": "SHARDED_STATE_DICT"}}


def trained_offloaded(folder: str, strategy: Strategy) -> tuple[list[float], list[float], str]:
    """In a worker: the losses of a training whose parameters are on the CPU, and where optimizer state is."""
    with new_job(), without_pinning():
        trainer = use_strategy(make_trainer(folder, llama.make_base(), **OFFLOAD), strategy)
        trainer.train()
        states = trainer.optimizer.optimizer.state.values()
        (device,) = {value.device.type for state in states for value in state.values()}
        return logged(trainer, "loss"), logged(trainer, "eval_loss"), device


@pytest.mark.parametrize("strategy", [STATEFUL, LOCAL], ids=["stateful", "local steps"])
def test_offloaded_parameters_train_as_others(pool: Callable[[int], Pool], tmp_path: Path, strategy: Strategy) -> None:
    *offloaded, device = pool(4).run(trained_offloaded, str(tmp_path), strategy)[0]
    *kept, _ = pool(4).run(trained, str(tmp_path), strategy, {})[0]
    assert device == "cpu"
    for which in range(2):
        assert offloaded[which] == pytest.approx(kept[which], rel=0 if device_type() == "cpu" else 1e-3)


def resumed(folder: str, kind: str, options: dict[str, Any]) -> tuple[list[list[float]], list[dict[str, Tensor]]]:
    """In a worker: losses and weights after a training, and after one that goes on from its middle."""
    losses, weights = [], []
    for middle in (None, f"{folder}/checkpoint-2"):
        with new_job(), without_pinning():
            model = make_model("whole" if kind in WHOLE else kind)
            trainer = make_trainer(folder, model, save_strategy="steps", save_steps=2, **options)
            use_strategy(trainer, {"quantized": QUANTIZED, "local steps": LOCAL}.get(kind, STATEFUL))
            trainer.train(resume_from_checkpoint=middle)
            losses.append(logged(trainer, "loss") + logged(trainer, "eval_loss"))
            weights.append(trainer.accelerator.get_state_dict(trainer.model))
    return losses, weights


def make_model(kind: str) -> nn.Module:
    """Return a whole Llama, one of which the last layer is trained, or one with adapters."""
    if kind == "whole":
        return llama.make_base()
    if kind == "partly frozen":
        model = llama.make_base().requires_grad_(False)
        model.model.layers[-1].requires_grad_(True)
        return model
    return llama.adapt(llama.make_base(llama.ADAPTED), {"default": "lora"})


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("whole", {}),
        ("whole", {"fsdp": True, "fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}}),
        ("lora", {}),
        ("local steps", {}),
        ("whole", OFFLOAD),
        ("quantized", OFFLOAD),
        ("quantized", {}),
        pytest.param(
            "quantized",
            {"fsdp": True, "fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}},
            marks=pytest.mark.skipif(ACCELERATE < "1.15", reason="accelerate saves rank 0's shards alone, so refused"),
        ),
    ],
)
def test_a_training_is_resumed_bit_for_bit(
    pool: Callable[[int], Pool], tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    (losses, losses_again), (weights, weights_again) = pool(4).run(resumed, str(tmp_path), kind, options)[0]
    assert losses_again == losses
    assert weights
    assert all(torch.equal(weights_again[name], weight) for name, weight in weights.items())
    files = {path.name for path in (tmp_path / "checkpoint-2").iterdir()}
    assert ("codecs" in files) == (kind != "quantized")  # whose strategy keeps nothing
    assert ("adapter_model.safetensors" in files) == (kind not in WHOLE)
    if kind not in WHOLE:
        assert saved_names(tmp_path / "checkpoint-2")
        assert all("lora" in name for name in saved_names(tmp_path / "checkpoint-2"))  # and nothing of the base


def saved_names(checkpoint: Path) -> list[str]:
    """Return the parameters in a checkpoint's model and optimizer."""
    names: list[str] = []
    for folder in ("pytorch_model_fsdp_0", "optimizer_0"):
        if (checkpoint / folder).is_dir():
            names += FileSystemReader(checkpoint / folder).read_metadata().state_dict_metadata
        elif "model" in folder:
            names += torch.load(checkpoint / "pytorch_model_fsdp.bin")
        else:
            names += torch.load(checkpoint / "optimizer.bin")["state"]
    return [name for name in names if "param_groups" not in name]


class Generation(TrainerCallback):
    """Generates after each evaluation."""

    def __init__(self) -> None:
        self.generated: list[list[int]] = []

    def on_evaluate(self, *_: Any, model: Any, **others: Any) -> None:
        tokens = model.generate(TOKENS.to(next(model.parameters()).device), max_new_tokens=8, do_sample=False)
        self.generated.append(tokens[0].tolist())


def evaluated(folder: str, kind: str, strategy: Strategy) -> tuple[Any, ...]:
    """In a worker: a training with evaluations around it, the best model of which is saved."""
    with new_job():
        trainer = make_trainer(
            folder,
            make_model(kind),
            save_strategy="steps",
            save_steps=2,
            load_best_model_at_end=True,
            greater_is_better=True,  # so that the last one is not the best
        )
        generation = Generation()
        trainer.add_callback(generation)
        use_strategy(trainer, strategy)
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        after = trainer.evaluate()["eval_loss"]
        trainer.save_model(f"{folder}/saved")
        with torch.no_grad():
            logits = trainer.model(input_ids=TOKENS.to(trainer.args.device)).logits.cpu()
        return before, logged(trainer, "eval_loss"), after, logits, generation.generated


@pytest.mark.parametrize(
    ("kind", "strategy"), [("whole", PLAIN), ("partly frozen", QUANTIZED), ("quantized", QUANTIZED), ("lora", PLAIN)]
)
def test_the_best_model_is_evaluated_and_saved_for_plain_use(
    pool: Callable[[int], Pool], tmp_path: Path, kind: str, strategy: Strategy
) -> None:
    results = pool(4).run(evaluated, str(tmp_path), kind, strategy)
    before, during, after, logits, generated = results[0]
    assert before > during[0] > during[1]
    assert after == pytest.approx(during[0], rel=1e-6)
    unsharded = llama.rounded_base(Int8(64), llama.ADAPTED) if kind == "quantized" else llama.make_base(llama.ADAPTED)
    base = unsharded.cpu()
    if kind in ("whole", "partly frozen"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    else:
        loaded = PeftModel.from_pretrained(base, tmp_path / "saved")
    torch.testing.assert_close(loaded(input_ids=TOKENS).logits, logits, rtol=1e-4, atol=1e-4)
    assert all(each[-1] == generated for each in results)  # each rank generates
    best = loaded.generate(input_ids=TOKENS, max_new_tokens=8, do_sample=False)
    assert generated[-1] == best[0].tolist()


class Own(Trainer):
    """Overrides what users override, as they do."""

    def create_optimizer(self) -> torch.optim.Optimizer:  # type: ignore[override]
        self.optimizer = torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], lr=0.1)
        return self.optimizer

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        Path(output_dir or "", f"own{self.args.process_index}").touch()


def saved_by_own(folder: str, kind: str) -> str:
    """In a worker: the optimizer that has trained; the model is saved."""
    with new_job():
        trainer = use_strategy(make_trainer(folder, make_model(kind), cls=Own), PLAIN)
        trainer.train()
        trainer.save_model(folder)
        return type(trainer.optimizer.optimizer).__name__


@pytest.mark.parametrize("kind", ["whole", "lora"])
def test_what_users_override_is_called(pool: Callable[[int], Pool], tmp_path: Path, kind: str) -> None:
    assert pool(4).run(saved_by_own, str(tmp_path), kind) == ["SGD"] * 4
    files = {path.name for path in tmp_path.iterdir()}
    assert files >= {f"own{rank}" for rank in range(4)}
    assert ("model.safetensors" if kind == "whole" else "adapter_model.safetensors") in files


class Averaging(Trainer):
    """Trains other weights than it evaluates."""

    def create_optimizer(self) -> torch.optim.Optimizer:  # type: ignore[override]
        self.optimizer = ScheduleFree(self.model.parameters())
        return self.optimizer


def averaged(folder: str, levels: str, of_class: bool) -> list[float]:
    """In a worker: the losses of a training and of evaluations in it; of a class's trainer, or of one that is there."""
    strategy = Strategy(levels, gpus_per_node=2)
    with new_job():
        cls = use_strategy(Averaging, strategy) if of_class else Averaging
        trainer = make_trainer(folder, llama.make_base(), cls=cls)
        if not of_class:
            use_strategy(trainer, strategy)
        trainer.train()
        return logged(trainer, "loss") + logged(trainer, "eval_loss")


@pytest.mark.parametrize("of_class", [False, True], ids=["instance", "class"])
def test_optimizers_may_evaluate_other_weights_than_they_train(
    pool: Callable[[int], Pool], tmp_path: Path, of_class: bool
) -> None:
    # Weights are kept from one forward to the next, or never.
    refreshed, fresh = (pool(4).run(averaged, str(tmp_path), levels, of_class)[0] for levels in ("IGG", "GGG"))
    assert refreshed == pytest.approx(fresh, rel=1e-4)
    assert len(refreshed) == 6


def refused(folder: str, kind: str) -> str:
    """In a worker: what is said to something that can't be."""
    options: dict[str, Any] = {
        "batch": {"auto_find_batch_size": True},
        "only": {"save_only_model": True},
        "compiled": {"torch_compile": True, "torch_compile_backend": "eager"},
        "FSDP1": {"fsdp": True, "fsdp_config": {"version": 1, "sync_module_states": False}},
        "adapters": {
            "fsdp": True,
            "fsdp_config": {"state_dict_type": "FULL_STATE_DICT"},
            "save_strategy": "steps",
            "save_steps": 2,
        },
    }.get(kind, {})
    is_old = patch("fsdp_zpp.integrations._requirement.version", lambda name: "1.14.0")
    with new_job(), is_old if kind == "adapters" else nullcontext():
        trainer = make_trainer(folder, make_model("lora" if kind == "adapters" else "whole"), **options)
        try:
            use_strategy(trainer, PLAIN)
            use_strategy(trainer, PLAIN)
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
        ("FSDP1", "a strategy needs fsdp_version=2, and the plugin says 1"),
        ("adapters", "needs accelerate 1.15 or later for checkpoints of adapters with FULL_STATE_DICT"),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank(
    pool: Callable[[int], Pool], tmp_path: Path, kind: str, message: str
) -> None:
    for error in pool(4).run(refused, str(tmp_path), kind):
        assert message in error


def test_what_a_class_cannot_have_is_refused() -> None:
    sharding = use_strategy(Averaging, PLAIN)
    assert issubclass(sharding, Averaging)
    with pytest.raises(ValueError, match="StrategyAveraging has a strategy already, "):
        use_strategy(sharding, PLAIN)
    with pytest.raises(TypeError, match="strategy must be a Strategy such as"):
        use_strategy(Averaging, "zeropp")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="use_strategy takes a Trainer or a class derived from it, got dict"):
        use_strategy(dict, PLAIN)  # type: ignore[type-var]
