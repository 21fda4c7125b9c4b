"""torchtitan's trainer with a strategy, beside its own FSDP and HSDP, on four processes as two nodes of two.

torchtitan asks torch for an accelerator when it is imported, and takes CUDA if there is none. Where there is no GPU,
torch answers "cpu" to that one question, here and in the workers, which import this file.
"""

# ruff: noqa: E402

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import io
import json
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch._utils
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.launch import launch
from harness.pool import Pool, start_method, too_few_gpus
from safetensors.torch import load_file
from test_interrupted_saves import SEEDS, STRATEGIES, InFolder, Saves, check_kills, copies_of, needs_forks, over_kinds
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.distributed.tensor import debug
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import LlamaConfig, LlamaForCausalLM

import fsdp_zpp
from fsdp_zpp import Int4, Strategy
from fsdp_zpp.torch_internals import major_minor

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
    """Import the module in which torchtitan keeps its device, and have that be the CPU if there is no GPU.

    Besides, torchtitan calls functions of torch 2.14.
    """
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

from datasets import Dataset
from torchtitan.components.lora import LoRAConverter
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ConfigManager
from torchtitan.config.override import override
from torchtitan.distributed import fsdp
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.models.llama3 import parallelize as llama3_parallelize, parallelize_llama
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.models.qwen3.config_registry import qwen3_debugmodel
from torchtitan.trainer import Trainer

from fsdp_zpp.integrations.torchtitan import config_registry, with_strategy
from fsdp_zpp.integrations.torchtitan.trainer import total_traffic


@override(target=FlexAttention.Config, description="causal attention, across documents")
def without_masks(config: FlexAttention.Config) -> ScaledDotProductAttention.Config:
    """Replace torchtitan's default, which has no backward on CPUs."""
    return ScaledDotProductAttention.Config(sharding_config=config.sharding_config)


class ByteTokenizer(BaseTokenizer):
    """A token for each byte."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing to configure."""

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()
        self.eos_id = 0

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        return [*text.encode(), *([0] if add_eos else [])]

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode()

    def get_vocab_size(self) -> int:
        return 256


def _sums(path: str) -> Dataset:
    return Dataset.from_dict({"text": ["".join(f"{a}+{b}={a + b}\n" for b in range(60)) for a in range(60)]})


DATASETS["sums"] = DatasetConfig(path="", loader=_sums, sample_processor=lambda sample: sample["text"])


def small_config(debugmodel: Callable[[], Trainer.Config] = llama3_debugmodel, layers: int = 1) -> Trainer.Config:
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


def strategy() -> Trainer.Config:
    """Return the small Llama 3 with a strategy, which a flag says."""
    return with_strategy(small_config(), None)


def layers(count: int, debugmodel: Callable[[], Trainer.Config]) -> Trainer.Config:
    """Return a small model with so many layers and a strategy."""
    return with_strategy(small_config(debugmodel, count), None)


two_layers = partial(layers, 2, llama3_debugmodel)  # for two stages of a pipeline
qwen3 = partial(layers, 1, qwen3_debugmodel)  # whose head is tied
deepseek_v3 = partial(layers, 2, deepseek_v3_debugmodel)  # which has experts in its second layer


def lora() -> Trainer.Config:
    """Return a configuration with torchtitan's adapters."""
    config = small_config()
    assert config.model_spec is not None
    converter = LoRAConverter.Config(target_modules=["wo", "w1", "w2"]).build()
    config.model_spec = replace(config.model_spec, model=converter.convert(config.model_spec.model))
    return with_strategy(config, None)


def partly_frozen() -> Trainer.Config:
    """Return a configuration with embedding and attention frozen, by a user's own function."""
    return _parallelized_by(_freeze_and_parallelize)


def unsharded() -> Trainer.Config:
    """Return a configuration with a function that shards nothing."""
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
    """Return the small configuration with torchtitan's chunked loss."""
    config = strategy()
    config.loss = llama3_debugmodel().loss
    return config


def misspelt() -> Trainer.Config:
    """Return the small configuration with a strategy that is none."""
    config = strategy()
    config.parallelism.strategy = "zeropp"
    return config


def build(config: str, *options: str) -> Trainer:
    """Return the trainer of a configuration of this module with command-line options.

    That of ``own_NAME`` is torchtitan's own of the configuration NAME.
    """
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
    """A training: losses of steps and validations, the last step's metrics, and what this rank has sent until each."""

    losses: list[float]
    metrics: dict[str, float]
    traffic: list[dict[str, dict[str, int]]]
    validated: list[float]


def train(config: str, folder: Path, *options: str) -> Run:
    """In a worker: train with torchtitan's own loop."""
    debug._clear_sharding_prop_cache()
    trainer = build(config, "--dump_folder", str(folder), *options)
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


TWO_STEPS = ["--training.steps", "2"]
TWO_MICRO_BATCHES = ["--training.global_batch_size", "16"]
VALIDATION = "--validator.enable --validator.freq 2 --validator.steps 1 --validator.dataloader.dataset sums".split()
CHECKPOINTS = "--checkpoint.enable --checkpoint.interval 2 --checkpoint.no-last_save_model_only".split()
FROM_STEP_2 = ["--checkpoint.load_step", "2"]
MONITOR = "--parallelism.monitor"


def flag(strategy: str | None = None, **arguments: Any) -> list[str]:
    """Return the flag of a strategy, on nodes of two unless it says otherwise."""
    preset = {} if strategy is None else {"preset": strategy}
    return ["--parallelism.strategy", json.dumps(preset | {"gpus_per_node": 2} | arguments)]


BATCH_AND_VALIDATION = [*TWO_MICRO_BATCHES, *VALIDATION, *CHECKPOINTS]


@pytest.mark.parametrize("levels", ["IIG", pytest.param("NNG", marks=pytest.mark.wide)])
def test_trains_and_validates_as_torchtitans_fsdp(workers: Workers, stock: Stock, tmp_path: Path, levels: str) -> None:
    own, _ = stock("strategy", *BATCH_AND_VALIDATION)
    run = workers(train, "strategy", tmp_path, *flag(levels=levels), *BATCH_AND_VALIDATION)[0]
    assert run.losses == pytest.approx(own.losses, rel=1e-6)  # sums in another order
    assert run.validated == pytest.approx(own.validated, rel=1e-6)
    assert run.metrics.keys() == own.metrics.keys()
    assert run.metrics["grad_norm"] == pytest.approx(own.metrics["grad_norm"], rel=1e-5)
    assert own.losses[-1] < 0.9 * own.losses[0]


def test_zeropp_trains_and_validates(workers: Workers, stock: Stock, tmp_path: Path) -> None:
    own, _ = stock("strategy", *BATCH_AND_VALIDATION)
    run = workers(train, "strategy", tmp_path, *flag("zeropp"), *TWO_MICRO_BATCHES, *VALIDATION)[0]
    assert run.losses == pytest.approx(own.losses, rel=0.01)
    assert run.losses != own.losses
    assert run.validated == pytest.approx(own.validated, rel=0.01)


def test_without_codec_state_checkpoints_are_torchtitans_own(workers: Workers, stock: Stock, tmp_path: Path) -> None:
    own, folder = stock("strategy", *BATCH_AND_VALIDATION)
    shutil.copytree(folder / "checkpoint" / "step-2", tmp_path / "checkpoint" / "step-2")
    rest = workers(train, "strategy", tmp_path, *flag(levels="GGG"), *TWO_MICRO_BATCHES, *CHECKPOINTS)[0]
    assert rest.losses == pytest.approx(own.losses[2:], rel=1e-6)


def test_nothing_goes_between_nodes_before_the_last_micro_batch_and_a_monitor_logs_that(
    workers: Workers, tmp_path: Path
) -> None:
    options = [*flag(levels="IIG"), MONITOR, *TWO_STEPS, "--training.global_batch_size"]
    one, three = (workers(train, "strategy", tmp_path, *options, str(8 * count))[0] for count in (1, 3))
    for kind in ("gather", "reduce"):
        first, other = one.traffic[-1][kind], three.traffic[-1][kind]
        assert other == {"inter": first["inter"], "intra": 3 * first["intra"]}
        assert first["inter"] > 0
    # That of the step before the last one, which sent as much.
    assert three.metrics["fsdp_zpp/step"] == 1
    sent = [traffic["gather"]["inter"] for traffic in three.traffic]
    assert three.metrics["fsdp_zpp/weights/inter/bytes"] == sent[1] - sent[0] > 0


def files_of(folder: Path) -> dict[str, bytes]:
    """Return what is in the folder of a checkpoint, but for what a job has locked to save it alone."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "being_saved"}


def train_watched(checkpoint: Path, copies: Path, config: str, folder: Path, *options: str) -> Run:
    """In a worker: train, and copy a checkpoint each time that this rank is to change it."""
    with copies_of(checkpoint, copies, dist.get_rank()):
        return train(config, folder, *options)


def train_offloaded(config: str, folder: Path, *options: str) -> Run:
    """In a worker: train with parameters on the CPU, in pinned memory if there is a GPU; check where they are."""
    pinned = torch.cuda.is_available()
    policy = partial(CPUOffloadPolicy, pin_memory=pinned)  # torchtitan pins, which torch can't without a GPU
    devices: set[str] = set()

    def note(optimizer: torch.optim.Optimizer, *unused: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                devices.update(each.device.type for each in (parameter, parameter.grad) if each is not None)

    handle = register_optimizer_step_pre_hook(note)
    try:
        with mock.patch.object(fsdp, "CPUOffloadPolicy", policy):
            run = train(config, folder, "--training.enable_cpu_offload", *options)
    finally:
        handle.remove()
    assert devices == {"cpu"}
    return run


RESUMABLE = [*flag("loco", weights="int4delta", levels="IIG"), *TWO_MICRO_BATCHES, *CHECKPOINTS]


@pytest.fixture(scope="module")
def whole(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """Return a training with codec state in its checkpoints, and its folder."""
    folder = tmp_path_factory.mktemp("whole")
    return workers(train, "strategy", folder, *RESUMABLE)[-1], folder


def interrupted(folder: Path, tmp_path: Path) -> Path:
    """Return a folder with what a training has left that was killed after its second step."""
    shutil.copytree(folder / "checkpoint" / "step-2", tmp_path / "half" / "checkpoint" / "step-2")
    return tmp_path / "half"


def test_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    workers: Workers, whole: tuple[Run, Path], tmp_path: Path
) -> None:
    run, folder = whole
    rest = workers(train, "strategy", interrupted(folder, tmp_path), *RESUMABLE)[-1]
    assert rest.losses == run.losses[2:]


def test_a_checkpoint_is_none_for_torchtitan_while_it_is_saved_over(
    workers: Workers, whole: tuple[Run, Path], tmp_path: Path
) -> None:
    run, folder = whole
    shutil.copytree(folder, tmp_path / "job")
    checkpoint, copies = tmp_path / "job/checkpoint/step-4", tmp_path / "copies"
    older = files_of(checkpoint)
    without = [*RESUMABLE, *FROM_STEP_2, "--checkpoint.exclude_from_loading", "codecs"]
    other = workers(train_watched, checkpoint, copies, "strategy", tmp_path / "job", *without)[-1]
    assert other.losses != run.losses[2:]
    cut_off = [files_of(copy) for copy in copies.iterdir()]
    complete = [files for files in cut_off if ".metadata" in files]
    assert len(cut_off) > len(complete) + 4
    assert files_of(checkpoint) != older
    assert all(files in (older, files_of(checkpoint)) for files in complete)


def test_offloaded_parameters_train_and_resume_as_others(
    workers: Workers, whole: tuple[Run, Path], tmp_path: Path
) -> None:
    kept, _ = whole
    run = workers(train_offloaded, "strategy", tmp_path, *RESUMABLE)[-1]
    rounding = 1e-3 if torch.cuda.is_available() else 0  # CPUs round the optimizer's step otherwise
    assert run.losses == pytest.approx(kept.losses, rel=rounding)
    assert run.metrics["grad_norm"] == pytest.approx(kept.metrics["grad_norm"], rel=rounding)
    rest = workers(train_offloaded, "strategy", tmp_path, *RESUMABLE, *FROM_STEP_2)[-1]
    assert rest.losses == run.losses[2:]


@pytest.mark.wide
def test_all_stages_of_a_pipeline_have_their_codec_state(workers: Workers, tmp_path: Path) -> None:
    # torch's schedules run a model once before the first step, which would send one weight delta more.
    options = [*INTERLEAVED, *flag("loco", weights="int8", gpus_per_node=1), *CHECKPOINTS]
    run = workers(train, "two_layers", tmp_path, *options)[-1]
    rest = workers(train, "two_layers", tmp_path, *options, *FROM_STEP_2)[-1]
    assert rest.losses == run.losses[2:]


def test_codec_state_of_experts_alone_is_saved_in_the_background(workers: Workers, tmp_path: Path) -> None:
    strategy = flag(levels="IGG", overrides={"GroupedExperts": {"levels": "IGG", "weights": "int4delta"}})
    options = [*TWO_STEPS, *EP, *strategy, *CHECKPOINTS, "--checkpoint.async_mode", "async"]
    workers(train, "deepseek_v3", tmp_path, *options)
    saved = FileSystemReader(tmp_path / "checkpoint" / "step-2").read_metadata().state_dict_metadata
    units = [key.partition("/")[2] for key in saved if key.startswith("codecs.rank0/")]
    assert [unit.endswith("experts") for unit in units] == [True], units
    assert not (tmp_path / "checkpoint" / "step-2" / "being_saved").exists()  # its turn has ended


def seed_checkpoint(folder: Path, *options: str) -> list[str]:
    """In a worker: the keys of what torchtitan saves in a seed checkpoint."""
    trainer = build("strategy", "--dump_folder", str(folder), "--checkpoint.create_seed_checkpoint", *options)
    keys = list(trainer.checkpointer.states)
    trainer.close()
    return keys


def test_a_seed_checkpoint_has_no_codec_state(workers: Workers, tmp_path: Path) -> None:
    keys = workers(seed_checkpoint, tmp_path, *flag("loco"), MONITOR, *CHECKPOINTS)[0]
    assert "model" in keys
    assert "codecs" not in keys


TP = ["--parallelism.tensor_parallel_degree", "2"]
PP = ["--parallelism.pipeline_parallel_degree", "2"]
INTERLEAVED = [*PP, "--parallelism.pipeline_parallel_schedule", "Interleaved1F1B"]
EP = ["--parallelism.expert_parallel_degree", "2"]
HSDP = ["--parallelism.data_parallel_replicate_degree", "2"]
FULL_DTENSOR = ["--parallelism.spmd_backend", "full_dtensor"]
PARALLELISMS: list[tuple[str, str, int, list[str], list[str]]] = [
    ("strategy", "III", 2, HSDP, HSDP),
    ("strategy", "III", 1, TP, [*TP, *HSDP]),
    ("qwen3", "NNG", 1, [*TP, *FULL_DTENSOR], [*TP, *FULL_DTENSOR]),
    ("deepseek_v3", "IIG", 1, [*EP, *TP], [*EP, *TP]),
    ("two_layers", "NNG", 1, INTERLEAVED, INTERLEAVED),
]
WIDE_PARALLELISMS: list[tuple[str, str, int, list[str], list[str]]] = [
    # A CPU's random numbers depend on the shards, so what shards inside nodes begins with the weights of HSDP.
    ("strategy", "III", 2, [], HSDP),
    ("strategy", "IGG", 2, HSDP, []),
    ("qwen3", "IIG", 2, [], []),
    ("deepseek_v3", "NGG", 2, [], []),
    ("strategy", "IGG", 1, TP, TP),
    ("qwen3", "III", 2, [*HSDP, *FULL_DTENSOR], [*HSDP, *FULL_DTENSOR]),
    ("qwen3", "NNN", 1, [*TP, *FULL_DTENSOR], [*TP, *HSDP, *FULL_DTENSOR]),
    ("deepseek_v3", "IGG", 2, EP, EP),
    ("deepseek_v3", "III", 2, EP, [*EP, *HSDP]),
    ("two_layers", "IGG", 1, PP, PP),
]


@pytest.mark.parametrize(
    ("config", "levels", "gpus_per_node", "options", "stock_options"),
    [*PARALLELISMS, *(pytest.param(*row, marks=pytest.mark.wide) for row in WIDE_PARALLELISMS)],
)
def test_parallelisms_train_as_torchtitans(
    workers: Workers,
    stock: Stock,
    tmp_path: Path,
    config: str,
    levels: str,
    gpus_per_node: int,
    options: list[str],
    stock_options: list[str],
) -> None:
    strategy = flag(levels=levels, gpus_per_node=gpus_per_node)
    run = workers(train, config, tmp_path, *TWO_STEPS, *options, *strategy)[-1]
    own, _ = stock(config, *TWO_STEPS, *stock_options)
    assert run.losses == pytest.approx(own.losses, rel=1e-6)  # sums in another order
    assert run.metrics["grad_norm"] == pytest.approx(own.metrics["grad_norm"], rel=1e-5)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ("deepseek_v3", [*EP, *TP]),
        ("two_layers", INTERLEAVED),
        pytest.param("strategy", TP, marks=pytest.mark.wide),
    ],
)
def test_parallelisms_under_zeropp_train_as_torchtitans_but_for_rounding(
    workers: Workers, stock: Stock, tmp_path: Path, config: str, options: list[str]
) -> None:
    own, _ = stock(config, *TWO_STEPS, *options)
    run = workers(train, config, tmp_path, *TWO_STEPS, *options, *flag("zeropp", gpus_per_node=1))[-1]
    assert run.losses == pytest.approx(own.losses, rel=0.02)
    assert run.losses != own.losses


def test_traffic_is_that_of_all_stages_of_a_rank(workers: Workers, tmp_path: Path) -> None:
    options = ["--training.steps", "1", *flag(levels="IIG", gpus_per_node=1)]
    one, two = (workers(train, "two_layers", tmp_path, *options, *stages) for stages in (PP, INTERLEAVED))
    # Of either, a rank has one layer of two, and the embedding or the head, which is as large.
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
    """In a worker: train with context parallelism whose ranks attend to their own part alone.

    Ring attention has no CPU kernels.
    """
    with mock.patch.object(llama3_parallelize, "apply_cp_to_forward"):
        return train(config, folder, *options)


def test_context_parallel_ranks_are_data_parallel_ones(workers: Workers, tmp_path: Path) -> None:
    options = [*TWO_STEPS, "--parallelism.context_parallel_degree", "2"]
    own = workers(train_in_chunks, "own_strategy", tmp_path, *options)[0]
    run = workers(train_in_chunks, "strategy", tmp_path, *options, *flag(levels="IGG"))[0]
    assert run.losses == pytest.approx(own.losses, rel=1e-6)
    assert all(run.traffic[-1]["reduce"].values())  # of four ranks on two nodes


def refusal(config: str, *options: str) -> str:
    """In a worker: what a trainer that is to be refused raises, or prints when it reads its flags."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            build(config, *options)
    except SystemExit:
        return printed.getvalue()
    except (TypeError, ValueError, NotImplementedError) as error:
        return str(error)
    raise AssertionError(f"{options} were accepted")


ZEROPP = "--parallelism.strategy zeropp"
IN_HF = ["--checkpoint.last_save_model_only", "--checkpoint.last_save_in_hf"]


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ("strategy", f"{ZEROPP} --training.no-disable_cuda_graphs", "set --training.disable_cuda_graphs"),
        ("strategy", "--parallelism.strategy mixzpp", "frozen=auto.* leave frozen out"),
        ("lora", "--parallelism.strategy mixzpp", "torchtitan loads them afterwards; leave frozen out"),
        ("strategy", '--parallelism.strategy {"overrides":{"*Experts":{"frozen":"nf4"}}}', "frozen=nf4.* leave frozen"),
        (
            "strategy",
            "--parallelism.strategy zero2 --parallelism.fsdp_reshard_after_forward always",
            "always contradicts 'NGG'",
        ),
        ("strategy", "--parallelism.strategy zero4", "--parallelism.strategy: .*'zero4'.* zeropp"),
        ("strategy", '--parallelism.strategy {"weight":"int8"}', "strategy: weight: .* did you mean weights"),
        ("strategy", '--parallelism.strategy {"weights":3}', "--parallelism.strategy: weights: .*3"),
        ("strategy", '--parallelism.strategy {"weights"}', "--parallelism.strategy: .* is not JSON"),
        ("strategy", f"{ZEROPP} --comm.mode torchcomms", "--comm.mode default"),
        ("strategy", MONITOR, "parallelism.monitor measures what a strategy sends; set parallelism.strategy, too"),
        ("misspelt", "", "Strategy.from_dict"),
        ("chunked", ZEROPP, "config.loss = config.loss.loss_fn"),
        ("unsharded", ZEROPP, "did not call fully_shard"),
        (
            "lora",
            f"--parallelism.strategy zero3 --checkpoint.enable {' '.join(IN_HF)}",
            r"checkpoint.last_save_in_hf would leave out 6 tensors of the model \(layers.0.",
        ),
    ],
)
def test_refused_on_every_rank(workers: Workers, config: str, options: str, message: str) -> None:
    texts = workers(refusal, config, *options.split())
    assert all(re.search(message, re.sub(r"[\s│]+", " ", text)) for text in texts), texts
    assert workers(whose_fully_shard)[0].startswith("torch.distributed.fsdp")


def whose_fully_shard() -> str:
    """In a worker: the module of the ``fully_shard`` that torchtitan shards by without a strategy."""
    return str(fsdp.fully_shard.__module__)


def test_another_trainer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"FluxTrainer\.Config; for another trainer,"):
        config_registry.flux_debugmodel()


@pytest.mark.parametrize("config", ["llama3_70b", "qwen3_14b", "deepseek_v3_16b"])
def test_configurations_have_one_key(config: str) -> None:
    module = "fsdp_zpp.integrations.torchtitan"
    default, chosen = (
        ConfigManager().parse_args(["--module", module, "--config", config, *options]).to_dict()["parallelism"]
        for options in ([], flag("loco", weights="int4:64"))
    )
    assert json.loads(json.dumps(default["strategy"])) == Strategy.zeropp().to_dict()
    assert json.loads(json.dumps(chosen["strategy"])) == Strategy.loco(weights=Int4(64), gpus_per_node=2).to_dict()


def own_model_under_strategys_trainer() -> str:
    """In a worker: what ``traffic`` says of a model that torchtitan's HSDP shards, without a strategy."""
    model = build("strategy", "--parallelism.strategy", "None", *HSDP).model_parts[0]
    assert isinstance(model, FSDPModule)
    try:
        return str(fsdp_zpp.traffic(model))
    except ValueError as error:
        return str(error)


def test_none_is_torchtitans_own(workers: Workers) -> None:
    assert "no part of this" in workers(own_model_under_strategys_trainer)[0]


def logits_of(model: nn.Module) -> Tensor:
    """Return what a model answers, on the CPU."""
    tokens = torch.arange(1, 13, device=next(model.parameters()).device).view(1, -1)
    with torch.no_grad():
        return model(tokens).cpu()


def answers_of(config: str, folder: Path, *options: str) -> dict[int, Tensor]:
    """In a worker: what a model answers after each step of a training that is saved, and before all of them."""
    trainer = build(config, "--dump_folder", str(folder), *options)
    model, save, load = trainer.model_parts[0], trainer.checkpointer.save, trainer.checkpointer.load
    answers = {}

    def watched(step: int, last_step: bool = False) -> bool:
        if done := save(step, last_step):
            answers[step] = logits_of(model)
        return done

    def watched_load(step: int = -1) -> bool:
        done = load(step)
        answers[0] = logits_of(model)
        return done

    # torchtitan's loop waits for two seconds at its end.
    with (
        mock.patch.object(trainer.checkpointer, "save", watched),
        mock.patch.object(trainer.checkpointer, "load", watched_load),
        mock.patch("time.sleep"),
    ):
        trainer.train()
    trainer.close()
    return answers


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
HF_CONFIG = LlamaConfig(
    vocab_size=2048,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=1,
    num_attention_heads=16,
    rms_norm_eps=1e-5,
    max_position_embeddings=131072,
    rope_parameters={
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
)


@pytest.mark.parametrize(
    "kind", [*(pytest.param(kind, marks=pytest.mark.wide) for kind in ("strategy", "lora")), "partly_frozen"]
)
def test_checkpoints_are_whole(workers: Workers, tmp_path: Path, kind: str) -> None:
    options = [*flag("zero3"), "--checkpoint.enable", "--checkpoint.interval", "2"]
    answers = workers(answers_of, kind, tmp_path / "first", *options, IN_HF[0])[0]
    assert answers.keys() == {0, 2, 4}
    assert not torch.allclose(answers[4], answers[0], atol=1e-3)
    checkpoints = [tmp_path / "first" / "checkpoint" / f"step-{step}" for step in (2, 4)]
    for plain, step in zip(workers(loaded, kind, tmp_path, checkpoints)[0], (2, 4), strict=True):
        torch.testing.assert_close(plain, answers[step], rtol=1e-4, atol=1e-5)
    options += ["--checkpoint.initial_load_path", str(checkpoints[0]), "--checkpoint.no-initial_load_model_only"]
    resumed = workers(answers_of, kind, tmp_path / "second", *options, *([] if kind == "lora" else IN_HF))[0]
    assert torch.equal(resumed[0], answers[2])
    assert torch.equal(resumed[4], answers[4])
    if kind != "lora":
        model = LlamaForCausalLM(HF_CONFIG)
        file = tmp_path / "second" / "checkpoint" / "step-4" / "model-00001-of-00001.safetensors"
        model.load_state_dict(load_file(file))
        logits = model(torch.arange(1, 13).view(1, -1)).logits
        torch.testing.assert_close(logits, answers[4], rtol=1e-4, atol=1e-4)


class ByTorchtitan(InFolder):
    """Checkpoints of torchtitan, of which trainings that go on from the first save the second."""

    def save(self, strategy: Strategy, folder: Path, steps: int) -> None:
        again = FROM_STEP_2 * (folder / "checkpoint").exists()
        self._train(strategy, folder, 4, "--training.max_norm", str(0.01 * steps), *again)

    def go_on(self, strategy: Strategy, folder: Path) -> list[float]:
        """Go on from the last checkpoint that torchtitan takes for whole."""
        return self._train(strategy, folder, 6, "--checkpoint.load_only")

    def checkpoint(self, folder: Path) -> Path:
        return folder / "checkpoint" / "step-4"

    def _train(self, strategy: Strategy, folder: Path, steps: int, *options: str) -> list[float]:
        chosen = ["--parallelism.strategy", json.dumps(strategy.to_dict()), "--training.steps", str(steps)]
        return train("strategy", folder, *chosen, *CHECKPOINTS, *options).losses


@needs_forks
@pytest.mark.slow
@over_kinds
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_torchtitan_loads_after_a_kill_is_whole(
    tmp_path: Path, strategy: str, kind: Callable[[Saves, int], str]
) -> None:
    own = Pool(2)  # torchtitan changes processes
    with contextlib.ExitStack() as stack, ProcessPoolExecutor(1, start_method(), gc.freeze) as forker:
        stack.callback(own.stop)
        saves = Saves(ByTorchtitan(), STRATEGIES[strategy], tmp_path, own, forker)
        saves.know_earlier(lambda folder: shutil.rmtree(folder / "checkpoint" / "step-4"))
        check_kills(kind, saves, SEEDS[strategy])


EXAMPLE = """
import runpy

import test_torchtitan

runpy.run_path("examples/torchtitan_train.py", run_name="__main__")
"""


def test_example_trains(tmp_path: Path) -> None:
    (tmp_path / "on_cpu.py").write_text(EXAMPLE)
    small = "--training.seq_len 64 --training.local_batch_size 2 --training.steps 3 --metrics.disable_color_printing"
    result = launch(
        2,
        *(tmp_path / "on_cpu.py", "--dump_folder", tmp_path, *small.split()),
        *("--parallelism.strategy", '{"preset": "zeropp", "gpus_per_node": 1}'),
        *("--override.imports", "test_torchtitan.without_masks", "--parallelism.spmd_backend", "partial_dtensor"),
        on_cpu=True,
    )
    printed = result.stdout + result.stderr
    assert result.returncode == 0, printed
    losses = [float(loss) for loss in re.findall(r"loss: +(\d+\.\d+)", printed)]
    assert losses[-1] < losses[0]
    sent = re.findall(r"Bytes that this rank has sent: .*'inter': (\d+)", printed)
    assert len(sent) == 2
    assert all(int(nbytes) > 0 for nbytes in sent)
