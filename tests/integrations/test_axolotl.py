"""axolotl with a strategy: its losses, checkpoints and adapters, and what its configuration may not ask for.

axolotl does not mean to train in several processes on CPUs. Of its ways to place a model only that of ``fsdp_config``
needs no GPU, but for a mesh of GPUs, which the strategy's plugin leaves out.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml
from harness import lora
from harness.covering import over_each
from harness.launch import ROOT
from harness.pool import Pool, device_type
from hugging_face import logged, new_job, shard_trainer_by_own_fsdp
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny_chats import TOKENS, framework_workers, write_model
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM

from fsdp_zpp import NF4, Int8, traffic

pytest.importorskip("axolotl")

from axolotl.integrations.base import BasePlugin, PluginManager
from axolotl.loaders import ModelLoader

os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"  # which axolotl looks at when it begins to train, here and in workers

Workers = Callable[..., list[Any]]
EXAMPLE = ROOT / "examples" / "axolotl_lora.yaml"
NODES = {"gpus_per_node": 2}
FULL = {"fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}}


class OwnShardingPlugin(BasePlugin):
    """axolotl's own FSDP2, which accelerate does not choose on a CPU."""

    def register(self, cfg: Any) -> None:
        if device_type() == "cpu":
            ModelLoader.use_parallel_config = None

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        shard_trainer_by_own_fsdp(trainer)


OWN = FULL | {
    "plugins": [f"test_axolotl.{OwnShardingPlugin.__name__}"],
    "fsdp_zpp": None,
    "fsdp_version": 2,
    "experimental_skip_move_to_device": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
}
"""Options of the example without a strategy."""
NO_KERNELS = dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel"), False)
"""axolotl sets them where the base is not quantized, and some run on GPUs alone."""
WHOLE = {"adapter": None, "learning_rate": 2e-3, "val_set_size": 16, "eval_steps": 2}
"""Options of the example without adapters, and with evaluations."""
PARTLY_FROZEN = WHOLE | {"unfrozen_parameters": ["model.layers.1.*", "model.norm.*"]}
"""Options of the example without adapters, of which the last layer and the norm are trained."""


@pytest.fixture(autouse=True)
def _on_cpus_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelLoader, "use_parallel_config", ModelLoader.use_parallel_config)  # which the plugin changes
    if device_type() == "cpu":
        monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small model in fp32, the same in bf16, their tokenizer of bytes, and texts."""
    folder = tmp_path_factory.mktemp("axolotl")
    for name, dtype in {"model": torch.float32, "bf16": torch.bfloat16}.items():
        write_model(folder / name, dtype)
    texts = [f"{a} plus {b} is {a + b}" for a in range(16) for b in range(8)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def import_axolotl() -> None:
    """In a worker: import axolotl."""
    import axolotl.cli.config
    import axolotl.common.datasets
    import axolotl.core.trainers
    import axolotl.train  # noqa: F401


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """Return ``workers(function, *args)`` on four ranks."""
    yield from framework_workers(import_axolotl)


@contextmanager
def axolotl_job() -> Iterator[None]:
    """Return a context in which axolotl runs as its command would run it, and after which it keeps nothing."""
    on_cpu = {"ACCELERATE_USE_CPU": "true"} if device_type() == "cpu" else {}
    PluginManager.get_instance().plugins.clear()
    with (
        new_job(),
        patch.dict(os.environ, {"HF_HUB_OFFLINE": "1"} | on_cpu),
        patch.object(sys, "argv", ["axolotl"]),
        patch("axolotl.utils.distributed.distributed_state", None),  # which accelerate has forgotten
        patch("axolotl.train.cleanup_distributed"),  # the workers' process group outlives a job
        patch.object(ModelLoader, "use_parallel_config", ModelLoader.use_parallel_config),  # which plugins change
    ):
        yield


def options_for(folder: Path, output: Path) -> dict[str, Any]:
    """Return the options for the small model: four steps of two micro-batches."""
    return {
        "base_model": str(folder / "model"),
        "datasets": [{"path": str(folder / "texts.jsonl"), "ds_type": "json", "type": "completion"}],
        "dataset_prepared_path": str(folder / "prepared"),
        "dataset_num_proc": 1,
        "dataloader_num_workers": 0,  # a pool's workers may have no processes of their own
        "output_dir": str(output),
        "sequence_len": 64,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "save_steps": 2,
        "learning_rate": 5e-3,
        "lr_scheduler": "constant",
        "optimizer": "adamw_torch",
        "bf16": False,
    }


@dataclass
class Result:
    """Results that a training leaves behind: also logits of the sharded model, and the folder of the best checkpoint,
    if one was to be found.
    """

    losses: list[float]
    evaluated: list[float]
    logits: Tensor
    sent: dict[str, Any] | None
    best: str | None


def trained(options: dict[str, Any]) -> Result:
    """In a worker: a training by axolotl's own functions."""
    with axolotl_job():
        from axolotl.cli.args import TrainerCliArgs
        from axolotl.cli.config import load_cfg
        from axolotl.common.datasets import load_datasets
        from axolotl.train import train

        torch.manual_seed(0)  # axolotl makes adapters before it sets a seed
        cfg = load_cfg(str(EXAMPLE), **options)
        model, _, trainer = train(cfg=cfg, dataset_meta=load_datasets(cfg=cfg, cli_args=TrainerCliArgs()))
        assert isinstance(trainer.model, FSDPModule)  # by itself accelerate would choose DDP on a CPU
        with torch.no_grad():
            logits = model(input_ids=TOKENS.to(trainer.args.device)).logits.float().cpu()
        sent = None if options["fsdp_zpp"] is None else traffic(model)
        best = trainer.state.best_model_checkpoint
        return Result(logged(trainer, "loss"), logged(trainer, "eval_loss"), logits, sent, best)


@pytest.mark.parametrize("kind", ["adapters", "whole"])
def test_losses_are_those_of_axolotls_own_fsdp(workers: Workers, folder: Path, tmp_path: Path, kind: str) -> None:
    options = NO_KERNELS | (WHOLE if kind == "whole" else {})
    own, plain, zeropp = (
        workers(trained, options_for(folder, tmp_path / name) | options | each)[0]
        for name, each in {
            "own": OWN,
            "plain": {"fsdp_zpp": {"levels": "GGG"} | NODES},
            "zeropp": {"fsdp_zpp": {"preset": "zeropp"} | NODES},
        }.items()
    )
    assert own.losses[-1] < 0.95 * own.losses[0]
    assert len(own.evaluated) == (3 if kind == "whole" else 0)  # axolotl evaluates before the first step, too
    for which in ("losses", "evaluated"):
        assert getattr(plain, which) == pytest.approx(getattr(own, which), rel=1e-5)  # sums in another order
        assert getattr(zeropp, which) == pytest.approx(getattr(own, which), rel=0.01)
    for hop in ("gather", "reduce"):
        assert 0 < 4 * zeropp.sent[hop]["inter"] < plain.sent[hop]["inter"]
    if kind == "whole":
        check_files(tmp_path / "plain", folder, "full", "none", plain.logits)


KINDS: dict[str, dict[str, Any]] = {"full": WHOLE, "lora": {}, "partly frozen": PARTLY_FROZEN}
FROZEN = {"none": None, "mixzpp": Int8(64), "nf4": NF4(64)}


def options_of(folder: Path, output: Path, kind: str, frozen: str) -> dict[str, Any]:
    """Return the example's options for a cell of the matrix; checkpoints of what is no adapter are full ones."""
    codec = {"none": None, "mixzpp": "int8:64", "nf4": "nf4:64"}[frozen]
    # Without a codec of weights, or the model would compute with weights that differ from those in files.
    strategy = {"preset": "mixzpp", "weights": None, "frozen": codec} | NODES
    options = options_for(folder, output) | NO_KERNELS | KINDS[kind] | ({} if kind == "lora" else FULL)
    return options | {"fsdp_zpp": strategy}


def logits_of(files: Path, folder: Path, kind: str, frozen: str) -> Tensor:
    """Compute, in one process, the logits of files, of adapters on what the base was rounded to."""
    if kind != "lora":
        return AutoModelForCausalLM.from_pretrained(files, dtype=torch.float32)(input_ids=TOKENS).logits
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    if (codec := FROZEN[frozen]) is not None:
        for parameter in base.parameters():
            if parameter.dim() == 2:
                lora.round_weight(parameter, codec)
    return PeftModel.from_pretrained(base, files).eval()(input_ids=TOKENS).logits


def check_files(files: Path, folder: Path, kind: str, frozen: str, logits: Tensor) -> None:
    """Check that files answer as the sharded model did, and that a model that is no adapter has every tensor."""
    torch.testing.assert_close(logits_of(files, folder, kind, frozen), logits, rtol=1e-4, atol=1e-4)
    if kind != "lora":
        assert load_file(files / "model.safetensors").keys() == load_file(folder / "model/model.safetensors").keys()


@pytest.mark.parametrize("kind", ["quantized", "head trained", "whole"])
def test_the_example_resumes_bit_for_bit_and_leaves_what_is_read_without_it(
    workers: Workers, folder: Path, tmp_path: Path, kind: str
) -> None:
    # Without a codec of weights, or the model would compute with weights that differ from those in files.
    strategy = yaml.safe_load(EXAMPLE.read_text())["fsdp_zpp"] | {"weights": None} | NODES
    options = options_for(folder, tmp_path)
    if kind != "quantized":
        strategy |= {"frozen": None, "error_feedback": True}
        options |= NO_KERNELS | (WHOLE if kind == "whole" else {"lora_modules_to_save": ["lm_head"]})
    options |= {"fsdp_zpp": strategy}
    first = workers(trained, options)[0]
    # As if it had been killed after the checkpoint of step 2, from which auto_resume_from_checkpoints goes on.
    shutil.rmtree(tmp_path / "checkpoint-4")
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["global_step"] == 2
    assert (tmp_path / "checkpoint-2" / "codecs").is_dir() == (kind != "quantized")  # whose strategy keeps nothing
    resumed = workers(trained, options)[0]
    assert len(first.losses) == 4
    assert resumed.losses == first.losses
    assert resumed.evaluated == first.evaluated[:2] + first.evaluated[1:]  # and before the first after a checkpoint
    assert torch.equal(resumed.logits, first.logits)
    assert first.losses[-1] < first.losses[0]
    cell = ("full", "none") if kind == "whole" else ("lora", "nf4" if kind == "quantized" else "none")
    check_files(tmp_path, folder, *cell, first.logits)


@over_each(kind=list(KINDS), frozen=list(FROZEN))
def test_what_is_saved_is_whole(workers: Workers, folder: Path, tmp_path: Path, kind: str, frozen: str) -> None:
    options = options_of(folder, tmp_path, kind, frozen)
    first = workers(trained, options)[0]
    assert first.losses[-1] < first.losses[0]
    for files in (tmp_path, tmp_path / "checkpoint-4"):
        check_files(files, folder, kind, frozen, first.logits)
    shutil.rmtree(tmp_path / "checkpoint-4")
    assert torch.equal(workers(trained, options)[0].logits, first.logits)


@pytest.mark.parametrize("kind", KINDS)
def test_the_best_is_saved_in_the_end(workers: Workers, folder: Path, tmp_path: Path, kind: str) -> None:
    # The best is that with the largest loss, so that the last is not the best.
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    best |= {"val_set_size": 16, "eval_steps": 2}
    result = workers(trained, options_of(folder, tmp_path, kind, "nf4") | best)[0]
    assert Path(result.best).name == "checkpoint-2"
    for files in (tmp_path, tmp_path / "checkpoint-2"):
        check_files(files, folder, kind, "nf4", result.logits)
    last = logits_of(tmp_path / "checkpoint-4", folder, kind, "nf4")
    assert not torch.allclose(last, result.logits, atol=1e-3)


@pytest.mark.parametrize("strategy", ["mixzpp", {"preset": "zeropp", "frozen": "nf4"}], ids=str)
def test_adapters_on_a_bf16_base_are_read_without_it(
    workers: Workers, folder: Path, tmp_path: Path, strategy: Any
) -> None:
    options = {"base_model": str(folder / "bf16"), "bf16": True, "fsdp_zpp": strategy}
    result = workers(trained, options_for(folder, tmp_path) | options)[0]
    assert result.losses[-1] < result.losses[0]
    base = AutoModelForCausalLM.from_pretrained(folder / "bf16")
    assert base.dtype == torch.bfloat16
    before = base(input_ids=TOKENS).logits
    after = PeftModel.from_pretrained(base, tmp_path).eval()(input_ids=TOKENS).logits
    # The base here is not rounded to the codec.
    assert (after - result.logits).norm() < 0.3 * (after - before).norm()


def merge(options: dict[str, Any]) -> None:
    """In a worker: what ``axolotl merge-lora`` does."""
    with axolotl_job():
        from axolotl.cli.merge_lora import do_cli

        do_cli(config=str(EXAMPLE), **options)


def test_one_process_merges_adapters_by_the_same_file(folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    model = get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False)).eval()
    model.save_pretrained(tmp_path / "adapter")
    pool = Pool(1)
    pool.run(import_axolotl)
    pool.run(merge, options_for(folder, tmp_path) | {"lora_model_dir": str(tmp_path / "adapter")})
    pool.stop()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(merged(TOKENS).logits, model(TOKENS).logits, rtol=1e-4, atol=1e-4)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"fsdp_zpp": None}, "fsdp_zpp: give the plugin a strategy, such as fsdp_zpp: zeropp"),
    ({"fsdp_zpp": "zerop"}, "fsdp_zpp: preset: 'zerop' is not known; allowed are zeropp"),
    ({"fsdp_zpp": {"weigths": "int8"}}, "fsdp_zpp: weigths: unknown key; did you mean weights"),
    ({"fsdp_zpp": {"gpus_per_node": "eight"}}, "fsdp_zpp: gpus_per_node must be a positive int or None, got 'eight'"),
    ({"fsdp_zpp": 3}, "fsdp_zpp: a strategy is the name of a preset"),
    ({"deepspeed": {"zero_optimization": {"stage": 3}}}, "deepspeed: .* a strategy is for torch's FSDP"),
    ({"fsdp": ["full_shard"]}, "fsdp: .* leave it out"),
    ({"fsdp_config": {"reshard_after_forward": True}, "fsdp_version": 1}, "fsdp_version: 1 .* needs FSDP2"),
    ({"fsdp_config": {"version": 1}}, "fsdp_version: 1 .* needs FSDP2"),
    ({"fsdp_config": {"offload_params": True}}, "fsdp_config.offload_params: True .* leave it out"),
    ({"fsdp_config": {"cpu_ram_efficient_loading": True}}, "fsdp_config.cpu_ram_efficient_loading: True .* of each"),
    ({"fsdp_config": {"final_state_dict_type": "SHARDED_STATE_DICT"}}, "fsdp_config.final_state_dict_type: "),
    ({"fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}}, "fsdp_config.state_dict_type: .* of the adapters alone"),
    ({"dp_replicate_size": 2}, "dp_replicate_size: 2 .*levels: III, gpus_per_node"),
    ({"dp_shard_size": 2}, "dp_shard_size: 2 .* set levels and gpus_per_node"),
    ({"tensor_parallel_size": 2}, "tensor_parallel_size: 2 .* leave it out"),
    ({"adapter": "qlora", "load_in_4bit": True, "fsdp_zpp": "zeropp"}, "load_in_4bit: True .*frozen: as stored}"),
    ({"load_in_8bit": True, "fsdp_zpp": "zeropp"}, "load_in_8bit: True .*frozen: as stored}"),
    ({"torch_compile": True}, "torch_compile: True .* leave it out"),
    ({"optimizer": "muon"}, "optimizer: 'muon' .* such as adamw_torch_fused"),
    ({"unfrozen_parameters": ["^lm_head.weight$[:64]"]}, "unfrozen_parameters: .* name whole parameters"),
    ({"lora_o_kernel": True}, "lora_o_kernel: True .* frozen= is there to avoid"),
    ({"fsdp_config": {}, "fp32_norms": True}, "fp32_norms: True .* leave it out"),
]


def validated(options: dict[str, Any]) -> Any:
    """Return the example's configuration as axolotl validates it on each rank."""
    from axolotl.utils.config import prepare_plugins, validate_config
    from axolotl.utils.dict import DictDefault

    PluginManager.get_instance().plugins.clear()
    cfg = DictDefault(yaml.safe_load(EXAMPLE.read_text()) | options)
    prepare_plugins(cfg)
    return validate_config(cfg)


@pytest.mark.parametrize(
    ("options", "message"), REFUSED, ids=lambda value: None if isinstance(value, str) else str(value)
)
def test_conflicts_are_refused_by_key(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=message):
        validated(options)


@pytest.mark.skipif(device_type() != "cpu", reason="there are GPUs")
def test_several_processes_without_gpus_are_told_how_to_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    with pytest.raises(ValueError, match="to train on CPUs, set ACCELERATE_USE_CPU=true"):
        validated({})
    monkeypatch.setenv("WORLD_SIZE", "1")
    validated({})  # axolotl preprocess, merge-lora and inference


def test_axolotl_is_told_of_fsdp2_where_there_are_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    strategy = {"preset": "zeropp", "weights": None, "frozen": "nf4"}
    cfg = validated({"fsdp_zpp": strategy})
    assert cfg.fsdp_zpp == strategy  # None is a value, too
    assert cfg.fsdp_version == 2
    assert cfg.fsdp_config.final_state_dict_type == "FULL_STATE_DICT"
    assert cfg.experimental_skip_move_to_device is True
    assert not any(cfg[kernel] for kernel in NO_KERNELS)
    options = {"state_dict_type": "FULL_STATE_DICT", "activation_checkpointing": True}
    cfg = validated({"adapter": None, "fsdp_config": options, "experimental_skip_move_to_device": False})
    assert {key: cfg.fsdp_config[key] for key in options} == options
    assert cfg.experimental_skip_move_to_device is False
    monkeypatch.setenv("WORLD_SIZE", "1")
    cfg = validated({})  # axolotl preprocess, merge-lora and inference
    assert cfg.fsdp_config is None
    assert all(cfg[kernel] is False for kernel in NO_KERNELS)


@pytest.mark.parametrize("frozen", ["as stored", "auto", "nf4"])
@pytest.mark.parametrize("loaded", [{"adapter": "qlora", "load_in_4bit": True}, {"load_in_8bit": True}], ids=str)
def test_a_base_takes_over_what_bitsandbytes_packs(
    monkeypatch: pytest.MonkeyPatch, loaded: dict[str, Any], frozen: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    cfg = validated({**loaded, "fsdp_zpp": {"preset": "zeropp", "frozen": frozen}})
    assert {key: cfg[key] for key in loaded} == loaded
    assert cfg.fsdp_version == 2


def test_without_the_plugin_nothing_is_checked() -> None:
    assert validated({"plugins": [], "fsdp_zpp": None, "load_in_8bit": True}).load_in_8bit
