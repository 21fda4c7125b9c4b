"""The interfaces of frameworks that integrations need: a version, and names, on stand-ins where none is installed.

The stand-ins have the names and signatures that were found in Axolotl 0.19, LLaMA-Factory 0.9.5 and ms-swift 4.6.0.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from harness.launch import launch

from fsdp_zpp.integrations._common import require
from fsdp_zpp.strategy.strategy import Strategy

VERSION = "fsdp_zpp.integrations._common.version"


def test_each_has_an_extra() -> None:
    extras = importlib.metadata.metadata("fsdp_zpp").get_all("Provides-Extra", [])
    assert {"accelerate", "transformers", "lightning", "torchtitan", "axolotl"} <= {*extras}


def test_an_absent_framework_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImportError, match=r"needs no_such_framework: run pip install '\.\[no_such_framework\]' in"):
        require("no_such_framework", "1.0")
    name = "fsdp_zpp.integrations.llama_factory"
    monkeypatch.delitem(sys.modules, name, raising=False)
    with patch(VERSION, side_effect=importlib.metadata.PackageNotFoundError), pytest.raises(ImportError) as error:
        importlib.import_module(name)
    assert str(error.value) == (
        "fsdp_zpp.integrations.llama_factory needs llamafactory: see docs/guides/llama-factory-ms-swift.md"
    )


@pytest.mark.parametrize("installed", ["1.9.1", "1.13.0.dev1"])
def test_an_old_framework_is_named_with_its_version(installed: str) -> None:
    for enough in ("1.13.0", "2.0"):
        with patch(VERSION, return_value=enough):
            require("accelerate", "1.13")
    told = f"needs accelerate 1.13 or later, and {installed} is installed: run pip install"
    with patch(VERSION, return_value=installed), pytest.raises(ImportError, match=told):
        require("accelerate", "1.13")


def test_fsdp_zpp_itself_imports_no_framework() -> None:
    names = ["accelerate", "transformers", "trl", "lightning", "torchtitan", "axolotl"]
    code = f"import sys, fsdp_zpp; print([name for name in {names} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", check=True)
    assert result.stdout.strip() == "[]"


LLAMA_FACTORY = {
    "llamafactory/__init__.py": "",
    "llamafactory/extras/__init__.py": "",
    "llamafactory/extras/misc.py": """
        import os

        def is_env_enabled(env_var, default="0"):
            return os.getenv(env_var, default).lower() in ["true", "y", "1"]
    """,
    "llamafactory/hparams/__init__.py": """
        import json, sys

        def read_args(args=None):
            return args if args is not None else json.load(open(sys.argv[1])) if sys.argv[1:] else []
    """,
    "llamafactory/train/__init__.py": "",
    "llamafactory/train/tuner.py": """
        import importlib

        def run_exp(args=None, callbacks=None):
            stage = args["stage"]
            name = {"sft": "CustomSeq2SeqTrainer", "dpo": "CustomDPOTrainer"}[stage]
            module = importlib.import_module(f"llamafactory.train.{stage}.trainer")
            workflow = importlib.import_module(f"llamafactory.train.{stage}.workflow")
            print(getattr(vars(workflow).get(name, getattr(module, name)), "strategy", None), sorted(args.items()))
    """,
    "llamafactory/train/sft/__init__.py": "",
    "llamafactory/train/sft/trainer.py": "from transformers import Seq2SeqTrainer\n"
    "class CustomSeq2SeqTrainer(Seq2SeqTrainer): ...",
    "llamafactory/train/sft/workflow.py": "from .trainer import CustomSeq2SeqTrainer",
    "llamafactory/train/dpo/__init__.py": "",
    "llamafactory/train/dpo/trainer.py": "from transformers import Trainer\nclass CustomDPOTrainer(Trainer): ...",
    "llamafactory/train/dpo/workflow.py": "",  # which imports the trainer in its function
    "llamafactory-0.9.5.dist-info/METADATA": "Metadata-Version: 2.1\nName: llamafactory\nVersion: 0.9.5\n",
}
MS_SWIFT = {
    "swift/__init__.py": "",
    "swift/trainers.py": """
        from transformers import Seq2SeqTrainer

        class TrainerFactory:
            @classmethod
            def get_trainer_cls(cls, args):
                return Seq2SeqTrainer
    """,
    "ms_swift-4.6.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: ms_swift\nVersion: 4.6.0\n",
}
AXOLOTL = {
    "axolotl/__init__.py": "",
    "axolotl/integrations/__init__.py": "",
    "axolotl/integrations/base.py": "class BasePlugin: ...",
    "axolotl/loaders.py": "class ModelLoader: ...",
    "axolotl-0.19.dist-info/METADATA": "Metadata-Version: 2.1\nName: axolotl\nVersion: 0.19\n",
}
SFT = {"stage": "sft", "fsdp_zpp": {"preset": "mixzpp", "gpus_per_node": 2}}
ALL_SET = {"fsdp": False, "fsdp_config": {"state_dict_type": "FULL_STATE_DICT", "cpu_offload": True}}
CONFLICTS: list[tuple[dict[str, Any], str]] = [
    ({"fsdp_zpp": None}, "fsdp_zpp: give a strategy, such as fsdp_zpp: mixzpp; without one, run llamafactory-cli"),
    ({"fsdp_zpp": "mixz"}, "fsdp_zpp: preset: 'mixz' is not known"),
    ({"deepspeed": "ds_z3.json"}, "deepspeed: 'ds_z3.json' can't be combined with fsdp_zpp: a strategy is for torch's"),
    ({"quantization_bit": 4}, "{preset: mixzpp, frozen: nf4}"),
    ({"use_unsloth": True}, "unsloth trains in one process"),
    ({"use_kt": True}, "use_kt: True can't be combined with fsdp_zpp: it replaces the trainer"),
    ({"use_ray": True}, "the strategy would not reach the processes that Ray starts"),
    ({"use_galore": True}, "it works on whole matrices"),
    ({"fp8": True}, "weights: int8:256"),
    ({"pissa_convert": True}, "convert them after the training"),
    ({"stage": "ppo"}, "stage: 'ppo' can't be combined with fsdp_zpp: it has not been tried"),
]


PACKED = {"load_in_4bit": True, "fsdp_zpp": "zeropp"}
AXOLOTLS_CONFLICTS: list[tuple[dict[str, Any], str]] = [
    ({"fsdp_zpp": None}, "fsdp_zpp: give the plugin a strategy, such as fsdp_zpp: zeropp"),
    ({"fsdp_zpp": "zerop"}, "fsdp_zpp: preset: 'zerop' is not known; allowed are zeropp"),
    ({"deepspeed": {"zero_optimization": {"stage": 3}}}, "a strategy is for torch's FSDP"),
    ({"fsdp": ["full_shard"]}, "axolotl has deprecated it"),
    ({"fsdp_version": 1}, "a strategy needs FSDP2"),
    ({"fsdp_config": {"offload_params": True}}, "fsdp_config.offload_params: True can't be combined with fsdp_zpp"),
    ({"fsdp_config": {"final_state_dict_type": "SHARDED_STATE_DICT"}}, "fsdp_config.final_state_dict_type: "),
    ({"adapter": "lora", "fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}}, "of the adapters alone"),
    ({"dp_replicate_size": 2}, "fsdp_zpp: {levels: III, gpus_per_node"),
    ({"dp_shard_size": 2}, "set levels and gpus_per_node"),
    (PACKED, "fsdp_zpp: {frozen: as stored}"),
    ({"torch_compile": True}, "torch_compile: True can't be combined with fsdp_zpp"),
    ({"optimizer": "muon"}, "such as adamw_torch_fused"),
    ({"unfrozen_parameters": ["^lm_head.weight$[:64]"]}, "name whole parameters"),
    ({"lora_o_kernel": True}, "frozen= is there to avoid"),
]


def test_axolotl_is_told_of_fsdp2_in_several_processes_and_conflicts_are_named(tmp_path: Path) -> None:
    code = f"""
        import os
        from fsdp_zpp.integrations.axolotl import StrategyArgs, StrategyPlugin, check_configuration

        def registered(world, **config):
            os.environ["WORLD_SIZE"] = str(world)
            StrategyPlugin().register(config)
            return config

        os.environ["ACCELERATE_USE_CPU"] = "true"
        print(registered(4, fsdp_zpp="zeropp", fsdp_config={{"activation_checkpointing": True}}))
        print(registered(1, fsdp_zpp="mixzpp"))
        check_configuration({PACKED | {"fsdp_zpp": {"preset": "zeropp", "frozen": "as stored"}}!r})
        plugin = "fsdp_zpp.integrations.axolotl.StrategyPlugin"
        for options in {[options for options, _ in AXOLOTLS_CONFLICTS]!r}:
            try:
                StrategyArgs(fsdp_zpp=options.get("fsdp_zpp", "mixzpp"))
                check_configuration({{"fsdp_zpp": "mixzpp", "plugins": [plugin]}} | options)
            except ValueError as error:
                print(*str(error).splitlines())
        print(StrategyPlugin().get_input_args())
    """
    several, one, *conflicts, arguments = run(tmp_path, AXOLOTL, code)
    assert ast.literal_eval(several) == {
        "fsdp_zpp": "zeropp",
        "fsdp_config": {
            "state_dict_type": "SHARDED_STATE_DICT",
            "final_state_dict_type": "FULL_STATE_DICT",
            "activation_checkpointing": True,
        },
        "fsdp_version": 2,
        "experimental_skip_move_to_device": True,
    }
    kernels = [f"lora_{name}_kernel" for name in ("mlp", "qkv", "o", "embedding")]
    assert ast.literal_eval(one) == {"fsdp_zpp": "mixzpp"} | dict.fromkeys(kernels, False)
    for line, (_, message) in zip(conflicts, AXOLOTLS_CONFLICTS, strict=True):
        assert message in line
    assert arguments == "fsdp_zpp.integrations.axolotl.StrategyArgs"


def run(folder: Path, files: dict[str, str], code: str) -> list[str]:
    """Run ``code`` where the files of a stand-in are found before any package, and return the lines that it prints."""
    pytest.importorskip("fsdp_zpp.integrations.transformers", exc_type=ImportError)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))
    (folder / "script.py").write_text(textwrap.dedent(code))
    done = launch(1, folder / "script.py", working=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_llama_factorys_trainers_have_the_strategy_of_the_key_or_its_conflicts_are_named(tmp_path: Path) -> None:
    (tmp_path / "sft.json").write_text(json.dumps({"stage": "sft", "fsdp_zpp": "zeropp"}))
    calls: list[tuple[str, Any]] = [
        *(("run_exp", SFT | options) for options in ({}, {"stage": "dpo"}, ALL_SET)),
        ("run_by_variable", "USE_V1"),
        ("sft_by_v1", ["sft", "sft.json"]),
        *(("command", arguments) for arguments in (["chat"], ["train"], ["train", "sft.json"])),
        *(("run_exp", SFT | options) for options, _ in CONFLICTS),
        ("run_by_variable", "USE_MCA"),
    ]
    code = f"""
        import os, sys
        from unittest.mock import patch
        from fsdp_zpp.integrations.llama_factory import main, run_exp

        def command(arguments):
            sys.argv[1:] = arguments
            main()

        def run_by_variable(name):
            with patch.dict(os.environ, {{name: "1"}}):
                run_exp({SFT})

        def sft_by_v1(arguments):
            with patch.dict(os.environ, USE_V1="1"):
                command(arguments)

        for name, options in {calls!r}:
            try:
                globals()[name](options)
            except (ImportError, ValueError) as error:
                print(error)
    """
    lines = run(tmp_path, LLAMA_FACTORY, code)
    sft, dpo, all_set, *v1 = lines[:5]
    unknown, without, of_file, *conflicts, of_variable = lines[5:]
    for printed in (sft, dpo):
        assert printed.startswith(str(Strategy.mixzpp(gpus_per_node=2)))
        assert "'fsdp_zpp'" not in printed
        assert "('fsdp', True), ('fsdp_config', {'state_dict_type': 'SHARDED_STATE_DICT'})" in printed
        assert "('use_reentrant_gc', False)" in printed
    assert str(sorted(ALL_SET.items()))[1:-1] in all_set
    for refused in v1:
        assert "no release of LLaMA-Factory has a V1 that takes a strategy: leave USE_V1 out, and run train" in refused
    assert unknown == "the command must be train, as of llamafactory-cli, got chat"
    assert without.startswith("give a configuration file")
    assert of_file.startswith(str(Strategy.zeropp()))
    for line, (_, message) in zip(conflicts, CONFLICTS, strict=True):
        assert message in line
    assert "USE_MCA: '1' can't be combined with fsdp_zpp: it replaces the" in of_variable


MS_SWIFTS_CONFLICTS: list[tuple[dict[str, Any], str]] = [
    ({"deepspeed": "zero3"}, "deepspeed: 'zero3' can't be combined with fsdp_zpp: a strategy is for torch's FSDP"),
    ({"quant_method": "bnb"}, "use Strategy.mixzpp(frozen=NF4())"),
    ({"use_swift_lora": True}, "PEFT's adapters alone"),
    ({"use_ray": True}, "NPROC_PER_NODE"),
    ({"tuner_backend": "unsloth"}, "one process"),
    ({"sequence_parallel_size": 2}, "has not been tried"),
    ({"optimizer": "muon"}, "whole matrices"),
    ({"rlhf_type": "grpo"}, "rlhf_type: 'grpo' can't be combined with fsdp_zpp: it has not been tried"),
]


def test_ms_swifts_trainers_have_the_strategy_or_its_conflicts_are_named(tmp_path: Path) -> None:
    code = f"""
        from types import SimpleNamespace
        from swift.trainers import TrainerFactory
        from fsdp_zpp import Strategy
        from fsdp_zpp.integrations.ms_swift import use_strategy

        def trainer(**options):
            args = dict(tuner_backend="peft", sequence_parallel_size=1, optimizer=None, task_type="causal_lm")
            return TrainerFactory.get_trainer_cls(SimpleNamespace(**args | options))

        use_strategy(Strategy.mixzpp(gpus_per_node=2))
        print(trainer().strategy)
        calls = [(use_strategy, (Strategy.zeropp(),), {{}}), (use_strategy, ("zeropp",), {{}})]
        calls += [(trainer, (), options) for options in {[options for options, _ in MS_SWIFTS_CONFLICTS]!r}]
        for function, arguments, options in calls:
            try:
                function(*arguments, **options)
            except (TypeError, ValueError) as error:
                print(error)
    """
    own, again, wrong, *conflicts = run(tmp_path, MS_SWIFT, code)
    assert own == str(Strategy.mixzpp(gpus_per_node=2))
    assert again.startswith("ms-swift's trainers have a strategy already, ")
    assert wrong.startswith("strategy must be a Strategy such as Strategy.zeropp(), got 'zeropp'")
    for line, (_, message) in zip(conflicts, MS_SWIFTS_CONFLICTS, strict=True):
        assert message in line
