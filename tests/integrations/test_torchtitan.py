"""torchtitan's trainer with a strategy, beside its own FSDP and HSDP, on four processes as two nodes of two.

torchtitan asks torch for an accelerator when it is imported, and takes CUDA if there is none. Where there is no GPU,
torch answers "cpu" to that one question, here and in the workers, which import this file.
"""

# ruff: noqa: E402

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch._utils
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.launch import ROOT, launch
from harness.pool import Pool, too_few_gpus
from hugging_face import offloads
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.distributed.tensor import debug
from transformers import LlamaConfig, LlamaForCausalLM

import fsdp_zpp
from fsdp_zpp import Int4, Strategy
from fsdp_zpp._torch_compat import major_minor

pytest.importorskip("torchtitan")
if not hasattr(torch_fsdp, "DataParallelMeshDims"):
    pytest.skip("torchtitan 0.3 does not import on this torch", allow_module_level=True)

CPU = SimpleNamespace(
    set_device=lambda device: None,
    current_device=lambda: 0,
    device_count=lambda: 1,
    synchronize=lambda: None,
    empty_cache=lambda: None,
    get_device_name=lambda device=None: "CPU",
    get_device_properties=lambda device=None: SimpleNamespace(total_memory=2**34),
    memory_stats=lambda device=None: {},
    reset_peak_memory_stats=lambda device=None: None,
)
"""Names that torchtitan asks a device module for."""


Workers = Callable[..., list[Any]]
Stock = Callable[..., tuple[Any, Path]]


def prepare() -> None:
    """Have torchtitan's device be the CPU if there is no GPU, and give it functions of torch 2.14."""
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = dist.distributed_c10d._set_pg_timeout  # type: ignore[attr-defined]
    for schedule in (PipelineScheduleSingle, PipelineScheduleMulti):
        if "arg_mbs" not in inspect.signature(schedule.step).parameters:
            schedule.step = taking_micro_batches(schedule.step)  # type: ignore[method-assign]
    if torch.cuda.is_available():
        return
    with (
        mock.patch.object(torch._utils, "_get_available_device_type", return_value="cpu"),
        mock.patch.object(torch._utils, "_get_device_module", return_value=CPU),
    ):
        importlib.import_module("torchtitan.tools.utils")


def taking_micro_batches(step: Any) -> Any:
    """Return a schedule's step as it is from torch 2.14 on, which takes a list of micro-batches and not a batch."""

    def step_of(self: Any, *, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, **options: Any) -> Any:
        arguments = [torch.cat(each) for each in zip(*(arg_mbs or []), strict=True)]
        named = {name: torch.cat([each[name] for each in kwarg_mbs]) for name in kwarg_mbs[0]}
        target = None if target_mbs is None else torch.cat(target_mbs)
        return step(self, *arguments, target=target, **options, **named)

    return step_of


prepare()
sys.path.append(str(ROOT / "examples"))

from datasets import Dataset
from torchtitan.config import ConfigManager
from torchtitan.config.override import override
from torchtitan.distributed import fsdp
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.models.flux.config_registry import flux_debugmodel
from torchtitan.models.llama3 import parallelize as llama3_parallelize, parallelize_llama
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.models.qwen3.config_registry import qwen3_debugmodel
from torchtitan.trainer import Trainer
from torchtitan_train import ByteTokenizer

from fsdp_zpp.integrations import torchtitan as integration
from fsdp_zpp.integrations.torchtitan import with_strategy


@override(target=FlexAttention.Config, description="causal attention, across documents")
def without_masks(config: FlexAttention.Config) -> ScaledDotProductAttention.Config:
    """Replace torchtitan's default, which has no backward on CPUs."""
    return ScaledDotProductAttention.Config(sharding_config=config.sharding_config)


def _sums(path: str) -> Dataset:
    return Dataset.from_dict({"text": ["".join(f"{a}+{b}={a + b}\n" for b in range(60)) for a in range(60)]})


DATASETS["sums"] = DatasetConfig(path="", loader=_sums, sample_processor=lambda sample: sample["text"])


def small_config(layers: int = 1, debugmodel: Callable[[], Trainer.Config] = llama3_debugmodel) -> Trainer.Config:
    """Return one of torchtitan's debug models, small enough for a CPU, with attention that runs there."""
    config = debugmodel()
    assert config.model_spec is not None
    model: Any = config.model_spec.model
    del model.layers[layers:]
    config.override.imports = ["test_torchtitan.without_masks"]
    config.tokenizer = ByteTokenizer.Config()
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset="sums")
    config.training.seq_len, config.training.local_batch_size, config.training.steps = 32, 2, 4
    # With bf16, rounding after sums in another order would show in the third digit.
    config.training.mixed_precision_param = "float32"
    config.training.disable_cuda_graphs = True
    config.parallelism.spmd_backend = "partial_dtensor"  # torchtitan's default needs torch 2.14
    config.metrics.disable_color_printing = True
    config.debug.seed = 0
    return config


def strategy(layers: int = 1, debugmodel: Callable[[], Trainer.Config] = llama3_debugmodel) -> Trainer.Config:
    """Return a small configuration with a strategy, which a flag says."""
    return with_strategy(small_config(layers, debugmodel), None)


def by_zeropp() -> Trainer.Config:
    return with_strategy(small_config(), Strategy.zeropp())


two_layers = partial(strategy, 2)  # for two stages of a pipeline
qwen3 = partial(strategy, 1, qwen3_debugmodel)  # whose head is tied
deepseek_v3 = partial(strategy, 2, deepseek_v3_debugmodel)  # which has experts in its second layer


def partly_frozen() -> Trainer.Config:
    """Return a configuration with embedding and attention frozen, by a user's own function."""
    return _parallelized_by(_freeze_and_parallelize)


def test_modules_that_are_imported_while_it_shards_have_torchs_fully_shard_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stock, early, late = torch_fsdp.fully_shard, ModuleType("early"), ModuleType("late")
    early.fully_shard = stock
    monkeypatch.setitem(sys.modules, "early", early)
    with integration._in_place_of_torchs(lambda module: module):
        assert early.fully_shard is torch_fsdp.fully_shard is not stock
        late.fully_shard = torch_fsdp.fully_shard
        monkeypatch.setitem(sys.modules, "late", late)
    assert early.fully_shard is late.fully_shard is torch_fsdp.fully_shard is stock


def unsharded() -> Trainer.Config:
    return _parallelized_by(lambda model, **arguments: model)


def _parallelized_by(function: Callable[..., nn.Module]) -> Trainer.Config:
    config = strategy()
    assert config.model_spec is not None
    config.model_spec = replace(config.model_spec, parallelize_fn=function)
    return config


def _freeze_and_parallelize(model: Any, **arguments: Any) -> nn.Module:
    for module in (model.tok_embeddings, model.layers["0"].attention):
        module.requires_grad_(False)
    return parallelize_llama(model, **arguments)


def chunked() -> Trainer.Config:
    config = strategy()
    config.loss = llama3_debugmodel().loss
    return config


def misspelt() -> Trainer.Config:
    config = strategy()
    config.parallelism.strategy = "zeropp"
    return config


def build(config: str, *options: str) -> Trainer:
    """Return the trainer of a configuration of this module, or, of ``own_NAME``, torchtitan's own of that of NAME."""
    name = config.removeprefix("own_")
    parsed = ConfigManager().parse_args(["--module", "test_torchtitan", "--config", name, *options])
    if name == config:
        return parsed.build()
    assert parsed.parallelism.strategy is None
    values = {field.name: getattr(parsed, field.name) for field in fields(parsed)}
    spec = parsed.model_spec
    values["model_spec"] = replace(spec, parallelize_fn=partial(_parallelize_by_sums, spec.parallelize_fn))
    return Trainer.Config(**values).build()


def _parallelize_by_sums(parallelize_fn: Any, model: Any, **arguments: Any) -> nn.Module:
    """Shard by torchtitan's own FSDP, with the one kind of sum that gloo has: it sets a divisor of 1, for NCCL's."""
    model = parallelize_fn(model, **arguments)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


@dataclass(frozen=True)
class Run:
    """A training: losses of steps, the last step's metrics, what this rank has sent until each, and validations."""

    losses: list[float]
    metrics: dict[str, float]
    traffic: list[dict[str, dict[str, int]]]
    validated: list[float]


def total_traffic(parts: list[nn.Module]) -> dict[str, dict[str, int]]:
    """Return the bytes that this rank has sent for all its stages of a pipeline, or for the model."""
    each = [fsdp_zpp.traffic(part) for part in parts]
    return {
        kind: {level: sum(sent[kind][level] for sent in each) for level in levels} for kind, levels in each[0].items()
    }


def train(config: str, folder: Path, *options: str) -> Run:
    debug._clear_sharding_prop_cache()
    trainer = build(config, "--dump_folder", str(folder), *options)
    assert offloads(trainer.model_parts[0]) == ("--training.enable_cpu_offload" in options)
    run = Run([], {}, [], [])

    def log(metrics: dict[str, float], step: int) -> None:
        if "validation_metrics/loss" in metrics:
            run.validated.append(metrics["validation_metrics/loss"])
            return
        run.losses.append(metrics["loss_metrics/global_avg_loss"])
        run.metrics.update(metrics)
        if getattr(trainer.config.parallelism, "strategy", None) is not None:
            run.traffic.append(total_traffic(trainer.model_parts))

    # torchtitan's loop waits for two seconds at its end.
    with mock.patch.object(trainer.metrics_processor.logger, "log", log), mock.patch("time.sleep"):
        trainer.train()
    trainer.close()
    return run


@pytest.fixture(scope="module")
def workers() -> Iterator[Callable[..., list[Any]]]:
    """Return ``workers(function, *args)`` on four ranks of their own: torchtitan changes a process's timeouts."""
    if reason := too_few_gpus(4):
        pytest.skip(reason)
    pool = Pool(4)
    yield pool.run
    pool.stop()


@pytest.fixture(scope="module")
def stock(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Return ``stock(config, *options)``: torchtitan's own FSDP on the last rank, and its folder, kept for others."""

    @cache
    def get(config: str, *options: str) -> tuple[Run, Path]:
        folder = tmp_path_factory.mktemp("own")
        return workers(train, f"own_{config}", folder, *options)[-1], folder

    return get


ONE_STEP = ["--training.steps", "1"]
TWO_STEPS = ["--training.steps", "2"]
TWO_MICRO_BATCHES = ["--training.global_batch_size", "16"]
VALIDATION = "--validator.enable --validator.freq 2 --validator.steps 1 --validator.dataloader.dataset sums".split()
CHECKPOINTS = "--checkpoint.enable --checkpoint.interval 2 --checkpoint.no-last_save_model_only".split()
FROM_STEP_2 = ["--checkpoint.load_step", "2"]


def flag(preset: str | None = None, **arguments: Any) -> list[str]:
    """Return the flag of a strategy, on nodes of two unless it says otherwise."""
    chosen = {} if preset is None else {"preset": preset}
    return ["--parallelism.strategy", json.dumps(chosen | {"gpus_per_node": 2} | arguments)]


BATCH_AND_VALIDATION = [*TWO_MICRO_BATCHES, *VALIDATION, *CHECKPOINTS]


def test_trains_and_validates_as_torchtitans_fsdp(workers: Workers, stock: Stock, tmp_path: Path) -> None:
    own, _ = stock("strategy", *BATCH_AND_VALIDATION)
    run = workers(train, "strategy", tmp_path, *flag(levels="IIG"), *BATCH_AND_VALIDATION)[0]
    assert run.losses == pytest.approx(own.losses, rel=1e-6)  # sums in another order
    assert run.validated == pytest.approx(own.validated, rel=1e-6)
    assert run.metrics.keys() == own.metrics.keys()
    assert run.metrics["grad_norm"] == pytest.approx(own.metrics["grad_norm"], rel=1e-5)
    assert own.losses[-1] < 0.9 * own.losses[0]
    # Nothing goes between nodes before the last of both micro-batches.
    of_one = workers(train, "strategy", tmp_path / "one", *flag(levels="IIG"), *ONE_STEP)[0].traffic[0]
    for hop in ("gather", "reduce"):
        assert run.traffic[0][hop] == {"inter": of_one[hop]["inter"], "intra": 2 * of_one[hop]["intra"]}
        assert of_one[hop]["inter"] > 0
    zeropp = workers(train, "strategy", tmp_path / "zeropp", *flag("zeropp"), *TWO_MICRO_BATCHES, *VALIDATION)[0]
    assert zeropp.losses == pytest.approx(own.losses, rel=0.01)
    assert zeropp.losses != own.losses
    assert zeropp.validated == pytest.approx(own.validated, rel=0.01)


def test_without_codec_state_checkpoints_are_torchtitans_own(workers: Workers, stock: Stock, tmp_path: Path) -> None:
    own, folder = stock("strategy", *BATCH_AND_VALIDATION)
    shutil.copytree(folder / "checkpoint" / "step-2", tmp_path / "checkpoint" / "step-2")
    rest = workers(train, "strategy", tmp_path, *flag(levels="GGG"), *TWO_MICRO_BATCHES, *CHECKPOINTS)[0]
    assert rest.losses == pytest.approx(own.losses[2:], rel=1e-6)


def train_offloaded(config: str, folder: Path, *options: str) -> Run:
    """In a worker: train with parameters on the CPU, in pinned memory if there is a GPU."""
    pinned = torch.cuda.is_available()
    policy = partial(CPUOffloadPolicy, pin_memory=pinned)  # torchtitan pins, which torch can't without a GPU
    with mock.patch.object(fsdp, "CPUOffloadPolicy", policy):
        return train(config, folder, "--training.enable_cpu_offload", *options)


RESUMABLE = [*flag("loco", weights="int4delta", levels="IIG"), *TWO_MICRO_BATCHES, *CHECKPOINTS]


@pytest.fixture(scope="module")
def whole(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """Return a training with codec state in its checkpoints, and its folder."""
    folder = tmp_path_factory.mktemp("whole")
    return workers(train, "strategy", folder, *RESUMABLE)[-1], folder


def killed_while_saving(folder: Path, *options: str) -> list[bool]:
    """In a worker: fail to write step 4, and return whether that has the file by which torchtitan knows whole ones."""
    is_whole = []

    def fail(*arguments: object, **others: object) -> None:
        is_whole.append((folder / "checkpoint" / "step-4" / ".metadata").exists())
        raise RuntimeError("killed")

    with mock.patch.object(dcp, "save", fail), pytest.raises(RuntimeError, match="killed"):
        train("strategy", folder, *options)
    return is_whole


def test_a_run_resumes_bit_for_bit_and_passes_over_a_checkpoint_that_was_being_saved_over(
    workers: Workers, whole: tuple[Run, Path], tmp_path: Path
) -> None:
    run, folder = whole
    shutil.copytree(folder, tmp_path / "job")
    assert workers(killed_while_saving, tmp_path / "job", *RESUMABLE, *FROM_STEP_2) == [[False]] * 4
    assert workers(train, "strategy", tmp_path / "job", *RESUMABLE)[-1].losses == run.losses[2:]


def test_offloaded_parameters_resume_as_others(workers: Workers, whole: tuple[Run, Path], tmp_path: Path) -> None:
    run, folder = whole
    shutil.copytree(folder / "checkpoint" / "step-2", tmp_path / "checkpoint" / "step-2")
    rest = workers(train_offloaded, "strategy", tmp_path, *RESUMABLE)[-1]
    rounding = 1e-3 if torch.cuda.is_available() else 0  # CPUs round the optimizer's step otherwise
    assert rest.losses == pytest.approx(run.losses[2:], rel=rounding)
    assert rest.metrics["grad_norm"] == pytest.approx(run.metrics["grad_norm"], rel=rounding)


def test_all_stages_of_a_pipeline_have_their_codec_state(workers: Workers, tmp_path: Path) -> None:
    # torch's schedules run a model once before the first step, which would send one weight delta more.
    options = [*INTERLEAVED, *flag("loco", weights="int8", gpus_per_node=1), *CHECKPOINTS, *TWO_STEPS]
    options += ["--checkpoint.interval", "1"]
    run = workers(train, "two_layers", tmp_path, *options)[-1]
    rest = workers(train, "two_layers", tmp_path, *options, "--checkpoint.load_step", "1")[-1]
    assert rest.losses == run.losses[1:]


def test_codec_state_of_experts_alone_is_saved_in_the_background(workers: Workers, tmp_path: Path) -> None:
    strategy = flag(levels="IGG", overrides={"GroupedExperts": {"levels": "IGG", "weights": "int4delta"}})
    options = [*ONE_STEP, *EP, *strategy, *CHECKPOINTS, "--checkpoint.interval", "1"]
    workers(train, "deepseek_v3", tmp_path, *options, "--checkpoint.async_mode", "async")
    saved = FileSystemReader(tmp_path / "checkpoint" / "step-1").read_metadata().state_dict_metadata
    units = [key.partition("/")[2] for key in saved if key.startswith("codecs.rank0/")]
    assert [unit.endswith("experts") for unit in units] == [True], units
    assert not [*(tmp_path / "checkpoint" / "step-1").glob("*save_was_cut_off")]


def seed_checkpoint(folder: Path, *options: str) -> list[str]:
    """In a worker: the keys of what torchtitan saves in a seed checkpoint."""
    trainer = build("strategy", "--dump_folder", str(folder), "--checkpoint.create_seed_checkpoint", *options)
    keys = list(trainer.checkpointer.states)
    trainer.close()
    return keys


def test_a_seed_checkpoint_has_no_codec_state(workers: Workers, tmp_path: Path) -> None:
    keys = workers(seed_checkpoint, tmp_path, *flag("loco"), *CHECKPOINTS)[0]
    assert "model" in keys
    assert "codecs" not in keys


TP = ["--parallelism.tensor_parallel_degree", "2"]
PP = ["--parallelism.pipeline_parallel_degree", "2"]
INTERLEAVED = [*PP, "--parallelism.pipeline_parallel_schedule", "Interleaved1F1B"]
EP = ["--parallelism.expert_parallel_degree", "2"]
HSDP = ["--parallelism.data_parallel_replicate_degree", "2"]
FULL_DTENSOR = ["--parallelism.spmd_backend", "full_dtensor"]


@pytest.mark.parametrize(
    ("config", "strategy", "options"),
    [
        ("qwen3", {"levels": "NNG"}, [*TP, *FULL_DTENSOR]),
        ("deepseek_v3", {"levels": "IIG"}, [*EP, *TP]),
        ("deepseek_v3", {"preset": "zeropp"}, [*EP, *TP]),
        ("two_layers", {"levels": "NNG"}, INTERLEAVED),
    ],
    ids=["tp", "ep and tp", "ep and tp, zeropp", "pp"],
)
def test_parallelisms_train_as_torchtitans(
    workers: Workers, stock: Stock, tmp_path: Path, config: str, strategy: dict[str, str], options: list[str]
) -> None:
    run = workers(train, config, tmp_path, *TWO_STEPS, *options, *flag(**strategy, gpus_per_node=1))[-1]
    own, _ = stock(config, *TWO_STEPS, *options)
    if "preset" in strategy:
        assert run.losses == pytest.approx(own.losses, rel=0.02)
        assert run.losses != own.losses
        return
    assert run.losses == pytest.approx(own.losses, rel=1e-6)  # sums in another order
    assert run.metrics["grad_norm"] == pytest.approx(own.metrics["grad_norm"], rel=1e-5)


def test_traffic_is_that_of_all_stages_of_a_rank(workers: Workers, tmp_path: Path) -> None:
    options = [*ONE_STEP, *flag(levels="IIG", gpus_per_node=1)]
    one, two = (workers(train, "two_layers", tmp_path, *options, *stages) for stages in (PP, INTERLEAVED))
    # In either, a rank has one layer of two, and the embedding or the head, which is as large.
    assert [run.traffic for run in one] == [run.traffic for run in two]
    assert all(run.traffic[0]["reduce"]["inter"] > 0 for run in one)


@pytest.mark.skipif(major_minor(torch.__version__) < (2, 14), reason="torchtitan's default backend needs torch 2.14")
@pytest.mark.parametrize("options", [[], TP, PP])
def test_the_default_backend_trains_as_torchtitan_does(
    workers: Workers, stock: Stock, tmp_path: Path, options: list[str]
) -> None:
    options = [*TWO_STEPS, "--parallelism.spmd_backend", "spmd_types", *options]
    run = workers(train, "two_layers", tmp_path, *options, *flag(levels="IGG", gpus_per_node=1))[-1]
    assert run.losses == pytest.approx(stock("two_layers", *options)[0].losses, rel=1e-6)


def train_in_chunks(config: str, folder: Path, *options: str) -> Run:
    """In a worker: train with ranks that attend to their own part alone, since ring attention has no CPU kernels."""
    with mock.patch.object(llama3_parallelize, "apply_cp_to_forward"):
        return train(config, folder, *options)


def test_context_parallel_ranks_are_data_parallel_ones(workers: Workers, tmp_path: Path) -> None:
    options = [*ONE_STEP, "--parallelism.context_parallel_degree", "2"]
    own = workers(train_in_chunks, "own_strategy", tmp_path, *options)[0]
    run = workers(train_in_chunks, "strategy", tmp_path, *options, *flag(levels="IGG"))[0]
    assert run.losses == pytest.approx(own.losses, rel=1e-6)
    assert run.metrics["grad_norm"] == pytest.approx(own.metrics["grad_norm"], rel=1e-5)
    assert all(run.traffic[-1]["reduce"].values())  # of four ranks on two nodes


def refusal(config: str, *options: str) -> str:
    """Return what a trainer that is to be refused raises, or prints when it reads its flags."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            build(config, *options)
    except SystemExit:
        return re.sub(r"[\s│]+", " ", printed.getvalue())
    except (TypeError, ValueError, NotImplementedError) as error:
        return str(error)
    raise AssertionError(f"{options} were accepted")


ZEROPP = "--parallelism.strategy zeropp"
IN_HF = ["--checkpoint.last_save_model_only", "--checkpoint.last_save_in_hf"]
RESHARDS = "--parallelism.fsdp_reshard_after_forward always"


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ("strategy", f"{ZEROPP} --training.no-disable_cuda_graphs", "set --training.disable_cuda_graphs"),
        ("strategy", "--parallelism.strategy mixzpp", "frozen=auto.* leave frozen out"),
        ("strategy", '--parallelism.strategy {"overrides":{"*Experts":{"frozen":"nf4"}}}', "frozen=nf4.* leave frozen"),
        ("strategy", f"--parallelism.strategy zero2 {RESHARDS}", "always contradicts 'NGG'"),
        ("strategy", "--parallelism.strategy zero4", "--parallelism.strategy: .*'zero4'.* zeropp"),
        ("strategy", '--parallelism.strategy {"weights":3}', "--parallelism.strategy: weights: .*3"),
        ("strategy", '--parallelism.strategy {"weights"}', "--parallelism.strategy: .* is not JSON"),
        ("strategy", f"{ZEROPP} --comm.mode torchcomms", "--comm.mode default"),
        ("misspelt", "", "Strategy.from_dict"),
        ("chunked", ZEROPP, "config.loss = config.loss.loss_fn"),
    ],
)
def test_refused_before_anything_is_built(config: str, options: str, message: str) -> None:
    assert re.search(message, refusal(config, *options.split()))


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ("unsharded", ZEROPP.split(), "did not call fully_shard"),
    ],
)
def test_refused_on_every_rank(workers: Workers, config: str, options: list[str], message: str) -> None:
    assert all(re.search(message, text) for text in workers(refusal, config, *options))


def test_another_trainer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"FluxTrainer\.Config; for another trainer,"):
        with_strategy(flux_debugmodel(), Strategy.zeropp())


def test_the_flag_replaces_the_strategy() -> None:
    default, chosen = (
        ConfigManager().parse_args(["--module", "test_torchtitan", "--config", "by_zeropp", *options]).to_dict()
        for options in ([], flag("loco", weights="int4:64"))
    )
    default, chosen = (json.loads(json.dumps(each["parallelism"]["strategy"])) for each in (default, chosen))
    assert default == Strategy.zeropp().to_dict()
    assert chosen == Strategy.loco(weights=Int4(64), gpus_per_node=2).to_dict()


def shard_by_torchtitans_own() -> None:
    """In a worker: fail if a strategy shards a model without one."""
    model = build("strategy", "--parallelism.strategy", "None", *HSDP).model_parts[0]
    assert isinstance(model, FSDPModule)
    with pytest.raises(ValueError, match="no part of this"):
        fsdp_zpp.traffic(model)


def test_none_is_torchtitans_own(workers: Workers) -> None:
    workers(shard_by_torchtitans_own)


def logits_of(model: nn.Module) -> Tensor:
    tokens = torch.arange(1, 13, device=next(model.parameters()).device).view(1, -1)
    with torch.no_grad():
        return model(tokens).cpu()


def answer_of(config: str, folder: Path, *options: str) -> Tensor:
    """In a worker: what a model answers after a training."""
    trainer = build(config, "--dump_folder", str(folder), *options)
    with mock.patch("time.sleep"):
        trainer.train()
    answer = logits_of(trainer.model_parts[0])
    trainer.close()
    return answer


def loaded(config: str, folder: Path, checkpoints: list[Path]) -> list[Tensor]:
    """In a worker: what a model that is not sharded answers with all that is in each checkpoint."""
    trainer = build(config, "--dump_folder", str(folder), "--parallelism.strategy", "None")
    model = trainer.model_config.build()
    trainer.close()
    with torch.no_grad():
        model.init_states(buffer_device=None)
        for parameter in model.parameters():
            parameter.zero_()  # nothing of which is to stay
    answers = []
    for checkpoint in checkpoints:
        state = model.state_dict()
        dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
        model.load_state_dict(state)
        answers.append(logits_of(model))
    return answers


# torchtitan's debug model of one layer, as transformers names its sizes.
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SIZES = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 768, "max_position_embeddings": 131072}
HEADS = {"num_hidden_layers": 1, "num_attention_heads": 16}
HF_CONFIG = LlamaConfig(**SIZES, **HEADS, rms_norm_eps=1e-5, rope_parameters=ROPE)


def test_checkpoints_are_whole(workers: Workers, tmp_path: Path) -> None:
    options = [*flag("zero3"), "--checkpoint.enable", "--checkpoint.interval", "2"]
    answer = workers(answer_of, "partly_frozen", tmp_path / "first", *options, IN_HF[0])[0]
    checkpoints = [tmp_path / "first" / "checkpoint" / f"step-{step}" for step in (2, 4)]
    middle, last = workers(loaded, "partly_frozen", tmp_path, checkpoints)[0]
    assert not torch.allclose(middle, last, atol=1e-3)
    torch.testing.assert_close(last, answer, rtol=1e-4, atol=1e-5)
    options += ["--checkpoint.initial_load_path", str(checkpoints[0]), "--checkpoint.no-initial_load_model_only"]
    resumed = workers(answer_of, "partly_frozen", tmp_path / "second", *options, *IN_HF)[0]
    assert torch.equal(resumed, answer)
    model = LlamaForCausalLM(HF_CONFIG)
    file = tmp_path / "second" / "checkpoint" / "step-4" / "model-00001-of-00001.safetensors"
    model.load_state_dict(load_file(file))
    logits = model(torch.arange(1, 13).view(1, -1)).logits
    torch.testing.assert_close(logits, answer, rtol=1e-4, atol=1e-4)


EXAMPLE = """
import runpy

import test_torchtitan

runpy.run_path("examples/torchtitan_train.py", run_name="__main__")
"""


def test_example_trains(tmp_path: Path) -> None:
    (tmp_path / "on_cpu.py").write_text(EXAMPLE)
    small = "--training.seq_len 32 --training.local_batch_size 2 --training.steps 2 --metrics.disable_color_printing"
    result = launch(
        2,
        *(tmp_path / "on_cpu.py", "--dump_folder", tmp_path, *small.split(), "--debug.seed", "0"),
        *("--parallelism.strategy", '{"preset": "zeropp", "gpus_per_node": 1}'),
        *("--override.imports", "test_torchtitan.without_masks", "--parallelism.spmd_backend", "partial_dtensor"),
        on_cpu=True,
    )
    printed = result.stdout + result.stderr
    assert result.returncode == 0, printed
    losses = [float(loss) for loss in re.findall(r"loss: +(\d+\.\d+)", printed)]
    assert losses[-1] < losses[0]
