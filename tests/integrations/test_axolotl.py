"""axolotl with a strategy: its losses, checkpoints and adapters, and what its configuration may not ask for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from framework_workers import framework_workers
from harness import lora
from harness.pool import Pool, device_type
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from fsdp_zpp import NF4, Int8

pytest.importorskip("axolotl")

from axolotl_training import (
    EXAMPLE,
    NO_KERNELS,
    OWN,
    PARTLY_FROZEN,
    TOKENS,
    WHOLE,
    import_axolotl,
    merge,
    options_for,
    trained,
    write_models_and_texts,
)

NODES = {"gpus_per_node": 2}


@pytest.fixture(autouse=True)
def _on_cpus_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    from axolotl.loaders import ModelLoader

    monkeypatch.setattr(ModelLoader, "use_parallel_config", ModelLoader.use_parallel_config)  # which the plugin changes
    if device_type() == "cpu":
        monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small model, its tokenizer of bytes, and texts."""
    folder = tmp_path_factory.mktemp("axolotl")
    write_models_and_texts(folder)
    return folder


@pytest.fixture(scope="module")
def workers() -> Iterator[Callable[..., list[Any]]]:
    """Return ``workers(function, *args)`` on four ranks, in processes of their own: axolotl patches much there."""
    yield from framework_workers(import_axolotl)


@pytest.mark.parametrize("kind", ["adapters", "whole"])
def test_losses_are_those_of_axolotls_own_fsdp(
    workers: Callable[..., list[Any]], folder: Path, tmp_path: Path, kind: str
) -> None:
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
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
        torch.testing.assert_close(loaded(input_ids=TOKENS).logits, plain.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["quantized", "head trained", "whole"])
def test_the_example_resumes_bit_for_bit_and_leaves_what_is_read_without_it(
    workers: Callable[..., list[Any]], folder: Path, tmp_path: Path, kind: str
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
    if kind == "whole":
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    else:
        base = AutoModelForCausalLM.from_pretrained(folder / "model")
        if kind == "quantized":
            for parameter in base.parameters():
                if parameter.dim() == 2:
                    lora.round_weight(parameter, NF4(64))
        loaded = PeftModel.from_pretrained(base, tmp_path).eval()
    torch.testing.assert_close(loaded(input_ids=TOKENS).logits, first.logits, rtol=1e-4, atol=1e-4)


KINDS: dict[str, dict[str, Any]] = {"full": WHOLE, "lora": {}, "partly frozen": PARTLY_FROZEN}
FROZEN = {"none": None, "mixzpp": Int8(64), "nf4": NF4(64)}
FULL = {"fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}}


def options_of(folder: Path, output: Path, kind: str, frozen: str) -> dict[str, Any]:
    """Return the example's options for a cell of the matrix; checkpoints of what is no adapter are full ones."""
    codec = {"none": None, "mixzpp": "int8:64", "nf4": "nf4:64"}[frozen]
    # Without a codec of weights, or the model would compute with weights that differ from those in files.
    strategy = {"preset": "mixzpp", "weights": None, "frozen": codec} | NODES
    return (
        options_for(folder, output)
        | NO_KERNELS
        | KINDS[kind]
        | ({} if kind == "lora" else FULL)
        | {"fsdp_zpp": strategy}
    )


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


def check_names(files: Path, folder: Path, kind: str) -> None:
    """Check that a model that is no adapter has every tensor."""
    if kind != "lora":
        assert load_file(files / "model.safetensors").keys() == load_file(folder / "model/model.safetensors").keys()


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_is_whole(
    workers: Callable[..., list[Any]], folder: Path, tmp_path: Path, kind: str, frozen: str
) -> None:
    options = options_of(folder, tmp_path, kind, frozen)
    first = workers(trained, options)[0]
    assert first.losses[-1] < first.losses[0]
    for files in (tmp_path, tmp_path / "checkpoint-4"):
        torch.testing.assert_close(logits_of(files, folder, kind, frozen), first.logits, rtol=1e-4, atol=1e-4)
        check_names(files, folder, kind)
    shutil.rmtree(tmp_path / "checkpoint-4")
    assert torch.equal(workers(trained, options)[0].logits, first.logits)


@pytest.mark.parametrize("kind", KINDS)
def test_the_best_is_saved_in_the_end(
    workers: Callable[..., list[Any]], folder: Path, tmp_path: Path, kind: str
) -> None:
    # The best is that with the largest loss, so that the last is not the best.
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    best |= {"val_set_size": 16, "eval_steps": 2}
    result = workers(trained, options_of(folder, tmp_path, kind, "nf4") | best)[0]
    assert Path(result.best).name == "checkpoint-2"
    for files in (tmp_path, tmp_path / "checkpoint-2"):
        torch.testing.assert_close(logits_of(files, folder, kind, "nf4"), result.logits, rtol=1e-4, atol=1e-4)
        check_names(files, folder, kind)
    last = logits_of(tmp_path / "checkpoint-4", folder, kind, "nf4")
    assert not torch.allclose(last, result.logits, atol=1e-3)


@pytest.mark.parametrize("strategy", ["mixzpp", {"preset": "zeropp", "frozen": "nf4"}], ids=str)
def test_adapters_on_a_bf16_base_are_read_without_it(
    workers: Callable[..., list[Any]], folder: Path, tmp_path: Path, strategy: Any
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
    from axolotl.integrations.base import PluginManager
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
    cfg = validated({"fsdp_zpp": {"preset": "zeropp", "weights": None, "frozen": "nf4"}})
    assert cfg.fsdp_zpp == {"preset": "zeropp", "weights": None, "frozen": "nf4"}  # None is a value, too
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
