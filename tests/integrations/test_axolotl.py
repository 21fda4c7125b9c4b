"""axolotl with a strategy: its losses, checkpoints and adapters, and what its configuration may not ask for.

axolotl does not mean to train in several processes on CPUs. Of its ways to place a model only that of ``fsdp_config``
needs no GPU, and that builds a mesh of GPUs, which nothing uses. Here it is left out.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml
from accelerate.utils import FullyShardedDataParallelPlugin
from harness import lora
from harness.hugging_face import choose_own_fsdp, new_job
from harness.launch import ROOT
from harness.pool import Pool, device_type, too_few_gpus
from peft import PeftModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fsdp_zpp import NF4

pytest.importorskip("axolotl")

EXAMPLE = ROOT / "examples" / "axolotl_lora.yaml"
TOKENS = torch.arange(3, 35).view(2, 16)
NODES = {"gpus_per_node": 2}


class OwnShardingPlugin(pytest.importorskip("axolotl.integrations.base").BasePlugin):  # type: ignore[misc]
    """axolotl's own FSDP2, which accelerate does not choose on a CPU."""

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        choose_own_fsdp(trainer.accelerator, FullyShardedDataParallelPlugin(fsdp_version=2))
        trainer.is_fsdp_enabled = True


OWN = {
    "plugins": [f"{__name__}.{OwnShardingPlugin.__name__}"],
    "fsdp_zpp": None,
    "fsdp_version": 2,
    "fsdp_config": {"state_dict_type": "FULL_STATE_DICT"},
    "experimental_skip_move_to_device": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
}
"""The example without a strategy."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model, its tokenizer of bytes, and texts."""
    folder = tmp_path_factory.mktemp("axolotl")
    names = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(names),
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    texts = [f"{a} plus {b} is {a + b}" for a in range(16) for b in range(8)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


@pytest.fixture(scope="module")
def workers() -> Iterator[Callable[..., list[Any]]]:
    """``workers(function, *args)`` on four ranks, in processes of their own: axolotl patches much in its process."""
    if reason := too_few_gpus(4):
        pytest.skip(reason)
    pool = Pool(4)
    pool.run(import_axolotl)  # which takes so long that it is no part of a training's time
    yield pool.run
    pool.stop()


def import_axolotl() -> None:
    """In a worker."""
    import axolotl.cli.config
    import axolotl.common.datasets
    import axolotl.core.trainers
    import axolotl.train  # noqa: F401


@contextmanager
def axolotl_job() -> Iterator[None]:
    """A context in which axolotl runs as its command would run it, and after which it keeps nothing."""
    from axolotl.integrations.base import PluginManager

    quiet = {"AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    on_cpu = {"ACCELERATE_USE_CPU": "true"} if device_type() == "cpu" else {}
    PluginManager.get_instance().plugins.clear()
    with (
        new_job(),
        patch.dict(os.environ, quiet | on_cpu),
        patch.object(sys, "argv", ["axolotl"]),
        patch("axolotl.utils.distributed.distributed_state", None),  # which accelerate has forgotten
        patch("axolotl.train.cleanup_distributed"),  # the workers' process group outlives a job
        patch("axolotl.loaders.model.build_parallelism_config", lambda cfg: (None, None)),
    ):
        yield


def options_for(folder: Path, output: Path) -> dict[str, Any]:
    """What the example has to say otherwise for the small model, of four steps of two micro-batches."""
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


def trained(options: dict[str, Any]) -> tuple[list[float], Tensor]:
    """In a worker: the losses of a training by axolotl's own functions, and logits of the model that it leaves."""
    with axolotl_job():
        from axolotl.cli.args import TrainerCliArgs
        from axolotl.cli.config import load_cfg
        from axolotl.common.datasets import load_datasets
        from axolotl.train import train

        torch.manual_seed(0)  # axolotl makes adapters before it sets a seed
        cfg = load_cfg(str(EXAMPLE), **options)
        model, _, trainer = train(cfg=cfg, dataset_meta=load_datasets(cfg=cfg, cli_args=TrainerCliArgs()))
        with torch.no_grad():
            logits = model(input_ids=TOKENS.to(trainer.args.device)).logits.float().cpu()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], logits


@pytest.fixture(scope="module")
def own(workers: Callable[..., list[Any]], folder: Path) -> list[float]:
    """The losses of axolotl's own FSDP2."""
    return workers(trained, options_for(folder, folder / "own") | NO_KERNELS | OWN)[0][0]


NO_KERNELS = dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel"), False)
"""axolotl sets them where the base is not quantized, and some run on GPUs alone."""


def test_losses_are_those_of_axolotls_own_fsdp(
    workers: Callable[..., list[Any]], folder: Path, tmp_path: Path, own: list[float]
) -> None:
    strategies = {"plain": {"levels": "GGG"} | NODES, "zeropp": {"preset": "zeropp"} | NODES}
    plain, zeropp = (
        workers(trained, options_for(folder, tmp_path / name) | NO_KERNELS | {"fsdp_zpp": strategy})[0][0]
        for name, strategy in strategies.items()
    )
    print(own, plain, zeropp)
    assert own[-1] < 0.95 * own[0]
    assert plain == pytest.approx(own, rel=1e-5)  # sums in another order
    assert zeropp == pytest.approx(own, rel=0.01)
    assert zeropp != plain


@pytest.mark.parametrize("kind", ["quantized", "head trained"])
def test_the_example_resumes_bit_for_bit_and_leaves_peft_its_adapter(
    workers: Callable[..., list[Any]], folder: Path, tmp_path: Path, kind: str
) -> None:
    # Without a codec of weights, or the model would compute with adapters that differ from those in files.
    strategy = yaml.safe_load(EXAMPLE.read_text())["fsdp_zpp"] | {"weights": None} | NODES
    options = options_for(folder, tmp_path)
    if kind == "head trained":
        strategy |= {"frozen": None, "error_feedback": True}
        options |= NO_KERNELS | {"lora_modules_to_save": ["lm_head"]}
    options |= {"fsdp_zpp": strategy}
    losses, logits = workers(trained, options)[0]
    resumed, _ = workers(trained, options | {"resume_from_checkpoint": str(tmp_path / "checkpoint-2")})[0]
    assert resumed == losses
    assert losses[-1] < losses[0]
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    if kind == "quantized":
        for parameter in base.parameters():
            if parameter.dim() == 2:
                lora.round_weight(parameter, NF4(64))
    adapted = PeftModel.from_pretrained(base, tmp_path).eval()
    torch.testing.assert_close(adapted(input_ids=TOKENS).logits, logits, rtol=1e-4, atol=1e-4)


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
    ({"dp_replicate_size": 2}, "dp_replicate_size: 2 .*levels: III, gpus_per_node"),
    ({"dp_shard_size": 2}, "dp_shard_size: 2 .* levels= and gpus_per_node="),
    ({"tensor_parallel_size": 2}, "tensor_parallel_size: 2 .* leave it out"),
    ({"adapter": "qlora", "load_in_4bit": True}, "load_in_4bit: True .*frozen: nf4} with adapter: lora"),
    ({"load_in_8bit": True}, "load_in_8bit: True .*frozen: int8:256"),
    ({"torch_compile": True}, "torch_compile: True .* leave it out"),
    ({"optimizer": "muon"}, "optimizer: 'muon' .* such as adamw_torch_fused"),
    ({"unfrozen_parameters": ["^lm_head.weight$[:64]"]}, "unfrozen_parameters: .* name whole parameters"),
    ({"lora_o_kernel": True}, "lora_o_kernel: True .* frozen= is there to avoid"),
    ({"fsdp_config": {}, "fp32_norms": True}, "fp32_norms: True .* leave it out"),
]


def validated(options: dict[str, Any]) -> Any:
    """The example's configuration as axolotl validates it on each rank."""
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


def test_axolotl_is_told_of_fsdp2_where_there_are_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    cfg = validated({"fsdp_zpp": {"preset": "zeropp", "weights": None, "frozen": "nf4"}})
    assert cfg.fsdp_zpp == {"preset": "zeropp", "weights": None, "frozen": "nf4"}  # None is a value, too
    assert cfg.fsdp_version == 2
    assert cfg.fsdp_config.final_state_dict_type == "FULL_STATE_DICT"
    assert cfg.experimental_skip_move_to_device is True
    assert not any(cfg[kernel] for kernel in NO_KERNELS)
    given = {"state_dict_type": "FULL_STATE_DICT", "activation_checkpointing": True}
    cfg = validated({"fsdp_config": given, "experimental_skip_move_to_device": False})
    assert {key: cfg.fsdp_config[key] for key in given} == given
    assert cfg.experimental_skip_move_to_device is False
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert validated({}).fsdp_config is None  # axolotl preprocess, merge-lora and inference


def test_without_the_plugin_nothing_is_checked() -> None:
    assert validated({"plugins": [], "fsdp_zpp": None, "load_in_8bit": True}).load_in_8bit
