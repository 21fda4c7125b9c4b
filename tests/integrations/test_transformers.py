"""Trainer with a strategy: as with its own FSDP2, with checkpoints, the best model, adapters and a monitor.

Also models that ``from_pretrained`` shards, or loads in few bits, before Trainer has them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from fuzz.modules import ScheduleFree
from harness import llama, models
from harness.offload import without_pinning
from harness.pool import Pool
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
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainerCallback
from transformers.distributed import DistributedConfig
from transformers.distributed.utils import gather_full_state_dict

from fsdp_zpp import (
    NF4,
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
from fsdp_zpp.frozen.modules import FrozenModule
from fsdp_zpp.integrations.transformers import MonitorCallback, use_strategy, with_strategy
from fsdp_zpp.runtime.unit import unit_of

Pools = Callable[[int], Pool]
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


def make_model(kind: str) -> nn.Module:
    """Return a whole Llama, or one with adapters."""
    if kind in WHOLE:
        return llama.make_base()
    return llama.adapt(llama.make_base(llama.ADAPTED), {"default": "lora"})


def resumed(folder: str, kind: str, options: dict[str, Any]) -> tuple[list[list[float]], list[dict[str, Tensor]], bool]:
    """In a worker: losses and weights after a training, and after one that goes on from its middle; and whether its
    parameters are offloaded.
    """
    losses, weights = [], []
    options = options | {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "no"}
    for middle in (None, f"{folder}/checkpoint-2"):
        with new_job(), without_pinning():
            trainer = make_trainer(folder, make_model(kind), **options)
            use_strategy(trainer, {"quantized": QUANTIZED, "local steps": LOCAL}.get(kind, STATEFUL))
            trainer.train(resume_from_checkpoint=middle)
            losses.append(logged(trainer, "loss"))
            weights.append(trainer.accelerator.get_state_dict(trainer.model))
    return losses, weights, offloads(trainer.model)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("local steps", OFFLOAD), ("lora", FULL), ("quantized", {}), pytest.param("whole", {}, marks=pytest.mark.wide)],
    ids=["local steps, offloaded", "lora, full", "quantized", "whole"],
)
def test_a_training_is_resumed_bit_for_bit(pool: Pools, tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    if options is FULL and TorchVersion(version("accelerate")) < "1.15":
        pytest.skip("accelerate saves rank 0's shards alone, so refused")
    (losses, losses_again), (weights, weights_again), offloaded = pool(4).run(resumed, str(tmp_path), kind, options)[0]
    assert len(losses) == STEPS
    assert losses_again == losses
    assert weights
    assert all(torch.equal(weights_again[name], weight) for name, weight in weights.items())
    assert offloaded == (options is OFFLOAD)
    files = {path.name for path in (tmp_path / "checkpoint-2").iterdir()}
    assert ("codecs" in files) == (kind != "quantized")  # whose strategy keeps nothing
    assert ("adapter_model.safetensors" in files) == (kind not in WHOLE)
    if kind not in WHOLE:
        names = saved_names(tmp_path / "checkpoint-2")
        assert names
        assert all("lora" in name for name in names)  # and nothing of the base


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
    saves = {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True}
    saves |= FULL if kind == "whole" else {}
    with new_job():
        # The greater, the better, so that the last one is not the best.
        trainer = make_trainer(folder, make_model(kind), greater_is_better=True, **saves)
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


@pytest.mark.parametrize(("kind", "strategy"), [("whole", PLAIN), ("quantized", QUANTIZED)], ids=["whole", "quantized"])
def test_the_best_model_is_evaluated_and_saved_for_plain_use(
    pool: Pools, tmp_path: Path, kind: str, strategy: Strategy
) -> None:
    results = pool(4).run(evaluated, str(tmp_path), kind, strategy)
    before, during, after, logits, generated = results[0]
    assert before > during[0] > during[1]
    assert after == pytest.approx(during[0], rel=1e-6)
    if kind == "whole":
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    else:
        loaded = PeftModel.from_pretrained(llama.rounded_base(Int8(64), llama.ADAPTED).cpu(), tmp_path / "saved")
    torch.testing.assert_close(loaded(input_ids=TOKENS).logits, logits, rtol=1e-4, atol=1e-4)
    assert all(each[-1] == generated for each in results)  # each rank generates
    best = loaded.generate(input_ids=TOKENS, max_new_tokens=8, do_sample=False)
    assert generated[-1] == best[0].tolist()


class Own(Trainer):
    """Overrides what users override, as they do; trains other weights than it evaluates."""

    def create_optimizer(self) -> torch.optim.Optimizer:  # type: ignore[override]
        self.optimizer = ScheduleFree(self.model.parameters())
        return self.optimizer

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        Path(output_dir or "", f"own{self.args.process_index}").touch()


def trained_by_own(folder: str, levels: str, of_class: bool) -> list[float]:
    """In a worker: the losses of a training and of evaluations in it; of a class's trainer, or of one that is there."""
    strategy = Strategy(levels, gpus_per_node=2)
    with new_job():
        cls = use_strategy(Own, strategy) if of_class else Own
        trainer = make_trainer(folder, llama.make_base(), cls=cls)
        if not of_class:
            use_strategy(trainer, strategy)
        trainer.train()
        trainer.save_model(folder)
        assert isinstance(trainer.optimizer.optimizer, ScheduleFree)
        return logged(trainer, "loss") + logged(trainer, "eval_loss")


def test_what_users_override_is_called_and_evaluated_weights_may_be_others(pool: Pools, tmp_path: Path) -> None:
    # Weights are kept from one forward to the next, or never.
    of_instance, fresh = (
        pool(4).run(trained_by_own, str(tmp_path), *arguments)[0] for arguments in (("IGG", False), ("GGG", True))
    )
    assert of_instance == pytest.approx(fresh, rel=1e-4)
    assert len(fresh) == 6
    assert {path.name for path in tmp_path.iterdir()} >= {*(f"own{rank}" for rank in range(4)), "model.safetensors"}


INTER, SHARE = "fsdp_zpp/weights/inter/bytes", "fsdp_zpp/inter/share"


class Reporter(TrainerCallback):
    """Keeps what those who report to TensorBoard and the like are given."""

    def __init__(self) -> None:
        self.reported: list[dict[str, float]] = []

    def on_log(self, *arguments: Any, **others: Any) -> None:
        self.reported.append(dict(others["logs"]))


def reported(folder: str) -> list[dict[str, float]]:
    """In a worker: what a trainer's monitor reports in a training after one that has failed."""
    with new_job():
        trainer = use_strategy(make_trainer(folder, llama.make_base(), eval_strategy="no"), PLAIN)
        reporter, failing = Reporter(), TrainerCallback()
        failing.on_step_end = Mock(side_effect=RuntimeError("failed"))  # type: ignore[method-assign]
        for callback in (MonitorCallback(trainer), failing):
            trainer.add_callback(callback)
        with pytest.raises(RuntimeError, match="failed"):
            trainer.train()
        trainer.remove_callback(failing)
        trainer.add_callback(reporter)
        trainer.train()
        return [logs for logs in reporter.reported if "loss" in logs]


def test_trainer_reports_each_step_also_after_a_failure(pool: Pools, tmp_path: Path) -> None:
    logs = pool(4).run(reported, str(tmp_path))[0]
    assert [each["fsdp_zpp/step"] for each in logs] == list(range(1, STEPS + 1))
    # Without codecs and with all gradients reduced at the end, as FULL_SHARD; its scopes reduce every micro-batch.
    assert all(each[INTER] > 0 and each[SHARE] >= 1 for each in logs)


def refused(folder: str, kind: str) -> str:
    """In a worker: what is said to something that can't be."""
    options: dict[str, Any] = {
        "batch": {"auto_find_batch_size": True},
        "only": {"save_only_model": True},
        "compiled": {"torch_compile": True, "torch_compile_backend": "eager"},
        "FSDP1": {"fsdp": True, "fsdp_config": {"version": 1, "sync_module_states": False}},
        "adapters": FULL | {"save_strategy": "steps", "save_steps": 2},
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


shards_when_loading = pytest.mark.skipif(TorchVersion(version("transformers")) < "5.24", reason="refused")
Sizes = dict[str, int]
EXPERTS: Sizes = {"fsdp_size": 4, "ep_size": 2}
ON_TENSOR_RANKS: Sizes = {"fsdp_size": 2, "tp_size": 2, "ep_size": 2}
HSDP: Sizes = {"dp_replicate_size": 2, "fsdp_size": 2}
MIXTURE: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 64),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_experts"), 4),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    "num_hidden_layers": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


def loaded_sharded(folder: str, sizes: Sizes, strategy: Strategy | None, experts: Strategy | None = None) -> Any:
    """Save a mixture of experts, the same on every rank, and load it sharded."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **MIXTURE))
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            # Logits that are apart; and experts that are clearly chosen, which no codec's rounding changes.
            parameter.data.mul_(20 if name.endswith("gate.weight") else 2)
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    config = DistributedConfig(**sizes)
    if strategy is not None:
        config = with_strategy(config, strategy, experts=experts)
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)


def trained_where_loaded(
    folder: str, strategy: Strategy | None, experts: Strategy | None
) -> tuple[tuple[list[float], ...], Tensor, str]:
    """In a worker: the losses of Trainer's training and evaluations, and the norms of gradients; what the model answers
    after it, which Trainer has saved; and what is said to a strategy for the trainer.
    """
    saves = {} if strategy is None else {"save_strategy": "steps", "save_steps": 2, "save_only_model": True}
    with new_job():
        trainer = make_trainer(
            f"{folder}/out", loaded_sharded(folder, EXPERTS, strategy, experts), max_steps=2, **saves
        )
        with pytest.raises(ValueError, match="a strategy would shard it again") as error:
            use_strategy(trainer, ZEROPP)
        trainer.train()
        with torch.no_grad():
            logits = trainer.model(input_ids=TOKENS.to(trainer.args.device)).logits.cpu()
        return tuple(logged(trainer, what) for what in ("loss", "eval_loss", "grad_norm")), logits, str(error.value)


@shards_when_loading
def test_trainer_trains_models_that_were_loaded_sharded(pool: Pools, tmp_path: Path) -> None:
    (own, _, _), (plain, logits, refusal) = (
        pool(4).run(trained_where_loaded, str(folder), *strategies)[0]
        for folder, strategies in (
            (tmp_path / "own", (None, None)),
            (tmp_path / "plain", (Strategy("IGG", gpus_per_node=2), Strategy("III", gpus_per_node=1))),
        )
    )
    for which, rounding in enumerate((1e-5, 1e-5, 1e-4)):  # losses, evaluations, norms
        assert plain[which] == pytest.approx(own[which], rel=rounding)
    assert "and then give Trainer no strategy" in refusal
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "plain" / "out" / "checkpoint-2")
    torch.testing.assert_close(saved(input_ids=TOKENS).logits, logits, rtol=1e-4, atol=1e-4)


def weights_and_copies(folder: str, strategy: Strategy | None) -> tuple[dict[str, Tensor], list[str]]:
    """In a worker: trained weights, and what differs between ranks of tensor parallelism that have copies of it."""
    with new_job():
        model = loaded_sharded(folder, ON_TENSOR_RANKS, strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)
    fsdp, tp = (model._mesh_manager.get_mesh(name) for name in ("fsdp", "tp"))
    for step in range(2):
        tokens = torch.randint(
            64, (2, 16), generator=torch.Generator().manual_seed(100 * step + fsdp.get_local_rank())
        ).to(models.device())
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    differing = []
    for name, parameter in model.named_parameters():
        if {"tp", "ep"} & set(parameter.device_mesh.mesh_dim_names):
            continue
        local = parameter.to_local().detach().contiguous()
        ranks = [torch.empty_like(local) for _ in range(2)]
        dist.all_gather(ranks, local, group=tp.get_group())
        differing += [] if torch.equal(*ranks) else [name]
    return gather_full_state_dict(model), differing


@shards_when_loading
def test_tensor_and_expert_parallelism_train_as_with_torchs_fsdp(pool: Pools, tmp_path: Path) -> None:
    (own, _), (weights, differing) = (
        pool(4).run(weights_and_copies, str(tmp_path), strategy)[0]
        for strategy in (None, Strategy("III", gpus_per_node=1))
    )
    assert differing == []
    assert weights.keys() == own.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, own[name], rtol=1e-4, atol=1e-5)


@shards_when_loading
def test_copies_on_tensor_parallel_ranks_stay_equal_bit_for_bit_under_codecs(pool: Pools, tmp_path: Path) -> None:
    for _, differing in pool(4).run(weights_and_copies, str(tmp_path), Strategy.zeropp(gpus_per_node=1)):
        assert differing == []


def parts(folder: str, sizes: Sizes, strategy: Strategy, experts: Strategy | None) -> list[int]:
    """In a worker: into how many parts a dense weight and the experts of a layer are split."""
    with new_job():
        layer = loaded_sharded(folder, sizes, strategy, experts).model.layers[0]
        weights: list[Any] = [layer.self_attn.q_proj.weight, layer.mlp.experts.down_proj]
        return [each.numel() // each.to_local().numel() for each in weights]


IN_NODES = Strategy("III", gpus_per_node=2)


@shards_when_loading
@pytest.mark.parametrize(
    ("sizes", "strategy", "experts", "expected"),
    [
        # Copies of an expert are two ranks apart, each on another node.
        (EXPERTS, IN_NODES, None, [2, 2]),
        (EXPERTS, IN_NODES, Strategy("GGG"), [2, 4]),
        ({"fsdp_size": 4, "ep_size": 4}, IN_NODES, None, [2, 4]),
        (HSDP, IN_NODES, None, [2, 2]),
    ],
    ids=lambda each: each.levels if isinstance(each, Strategy) else None,
)
def test_experts_are_sharded_over_the_same_nodes_or_by_their_own_strategy(
    pool: Pools,
    tmp_path: Path,
    sizes: Sizes,
    strategy: Strategy,
    experts: Strategy | None,
    expected: list[int],
) -> None:
    assert pool(4).run(parts, str(tmp_path), sizes, strategy, experts) == [expected] * 4


@shards_when_loading
def test_strategies_that_cannot_shard_while_loading_are_refused() -> None:
    sizes, zeropp = DistributedConfig(**EXPERTS), Strategy.zeropp()
    with pytest.raises(TypeError, match="takes a DistributedConfig of transformers, got"):
        with_strategy({}, zeropp)  # type: ignore[arg-type]
    for arguments in ({"strategy": "zeropp"}, {"strategy": zeropp, "experts": "zeropp"}):
        with pytest.raises(TypeError, match="strategy must be a Strategy such as"):
            with_strategy(sizes, **arguments)
    with pytest.raises(ValueError, match="from_pretrained loads them after that"):
        with_strategy(sizes, Strategy("IGG", frozen=NF4()))
    with pytest.raises(ValueError, match="has a strategy already"):
        with_strategy(with_strategy(sizes, zeropp), zeropp)
    with pytest.raises(ValueError, match="this DistributedConfig has one: set fsdp_size"):
        with_strategy(DistributedConfig(tp_size=2), zeropp)
    with pytest.raises(ValueError, match="ep_size is 1: leave it out"):
        with_strategy(DistributedConfig(fsdp_size=4), zeropp, experts=zeropp)
    with pytest.raises(ValueError, match="makes nodes of 3 ranks, and the copies of an expert are ep_size=2 ranks"):
        with_strategy(sizes, Strategy.zeropp(gpus_per_node=3))


def kinds_of_units(folder: str) -> list[bool]:
    """In a worker: whether a strategy has sharded a model loaded with one, and the next, loaded without."""
    sizes, strategy = {"fsdp_size": 2}, Strategy.zeropp(gpus_per_node=1)
    return [any(map(unit_of, loaded_sharded(folder, sizes, each).modules())) for each in (strategy, None)]


@shards_when_loading
def test_without_a_strategy_torch_shards_while_loading(pool: Pools, tmp_path: Path) -> None:
    assert pool(2).run(kinds_of_units, str(tmp_path)) == [[True, False]] * 2


BITS: dict[str, dict[str, Any]] = {
    # As axolotl loads them.
    "4 bits": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_quant_storage": torch.bfloat16,
    },
    "8 bits": {"load_in_8bit": True},
}


def trained_in_few_bits(folder: str, bits: str, frozen: Any) -> tuple[list[float], list[float], int]:
    """In a worker: the losses of a training, those of plain layers of the same values, and how many are quantized."""
    losses, quantized = [], 0
    for is_plain in (False, True):
        with new_job():
            config = BitsAndBytesConfig(**BITS[bits])
            model: Any = AutoModelForCausalLM.from_pretrained(
                folder, quantization_config=config, device_map=models.device(), dtype=torch.float32
            ).requires_grad_(False)
            if is_plain:
                quantize_frozen_params(model, frozen, dtype=torch.float32)
                dequantize_frozen_params(model)
                for name in ("is_loaded_in_4bit", "is_loaded_in_8bit", "hf_quantizer", "quantization_method"):
                    vars(model).pop(name, None)
                model.is_quantized = False
            without: dict[str, Any] = {"weights": None, "gradients": None, "gpus_per_node": 2}
            strategy = Strategy.mixzpp(**without, frozen=None if is_plain else frozen)
            adapted = llama.adapt(model, {"default": "lora"})
            trainer = use_strategy(make_trainer(f"{folder}/out", adapted, max_steps=2), strategy)
            trainer.train()
            quantized += sum(isinstance(module, FrozenModule) for module in trainer.model.modules())
            losses.append(logged(trainer, "loss") + logged(trainer, "eval_loss"))
    return losses[0], losses[1], quantized


@pytest.mark.parametrize(("bits", "frozen"), [("4 bits", "as stored"), ("8 bits", "auto")])
def test_adapters_train_on_bitsandbytes_layers_as_on_plain_ones(
    pool: Pools, tmp_path: Path, bits: str, frozen: Any
) -> None:
    llama.make_base().save_pretrained(tmp_path)
    for losses, plain, quantized in pool(4).run(trained_in_few_bits, str(tmp_path), bits, frozen):
        assert quantized == (14 if frozen == "as stored" else 16)
        assert len(losses) == 3
        assert losses == pytest.approx(plain, rel=1e-4)  # Trainer logs few digits
