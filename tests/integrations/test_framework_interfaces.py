"""What the doors to LLaMA-Factory and ms-swift need of them, on stand-ins, for where neither is installed.

The stand-ins have the names and signatures that were found in LLaMA-Factory 0.9.5 and 0.9.6.dev0 and in ms-swift
4.6.0. Where a framework is installed, its own are compared with them.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import textwrap
from pathlib import Path
from typing import Any

import pytest
from harness.launch import launch

from fsdp_zpp.config.strategy import Strategy

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
SFT = {"stage": "sft", "fsdp_zpp": {"preset": "mixzpp", "gpus_per_node": 2}}
SHARDED = "('fsdp', True), ('fsdp_config', {'state_dict_type': 'SHARDED_STATE_DICT'})"


def run(folder: Path, files: dict[str, str], code: str) -> str:
    """Run ``code`` where the files of a stand-in are found before any package, and return all that it prints."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))
    script = folder / "script.py"
    script.write_text(textwrap.dedent(code))
    done = launch(1, script, working=folder)
    return done.stdout + done.stderr


def llama_factory(folder: Path, arguments: dict[str, Any]) -> str:
    code = f"from fsdp_zpp.integrations.llama_factory import run_exp\nrun_exp({arguments!r})"
    return run(folder, LLAMA_FACTORY, code)


@pytest.fixture(autouse=True)
def _trainer() -> None:
    pytest.importorskip("fsdp_zpp.integrations.transformers", exc_type=ImportError)


@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_llama_factorys_trainers_have_the_strategy_of_the_key(tmp_path: Path, stage: str) -> None:
    printed = llama_factory(tmp_path, SFT | {"stage": stage})
    assert printed.startswith(str(Strategy.mixzpp(gpus_per_node=2)))
    assert "'fsdp_zpp'" not in printed
    assert SHARDED in printed
    assert "('use_reentrant_gc', False)" in printed


def test_what_a_configuration_sets_stays(tmp_path: Path) -> None:
    options = {"fsdp": False, "fsdp_config": {"state_dict_type": "FULL_STATE_DICT", "cpu_offload": True}}
    assert str(sorted(options.items()))[1:-1] in llama_factory(tmp_path, SFT | options)


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


def test_llama_factorys_conflicts_are_refused_by_key(tmp_path: Path) -> None:
    code = f"""
        from fsdp_zpp.integrations.llama_factory import run_exp

        for options in {[options for options, _ in CONFLICTS]!r}:
            try:
                run_exp({SFT!r} | options)
            except ValueError as error:
                print(error)
    """
    printed = run(tmp_path, LLAMA_FACTORY, code).splitlines()
    for line, (_, message) in zip(printed, CONFLICTS, strict=True):
        assert message in line


def test_variables_that_choose_another_trainer_are_refused(tmp_path: Path) -> None:
    code = f"""
        import os
        from fsdp_zpp.integrations.llama_factory import run_exp

        os.environ["USE_MCA"] = "1"
        run_exp({SFT!r})
    """
    assert "USE_MCA: '1' can't be combined with fsdp_zpp: it replaces the" in run(tmp_path, LLAMA_FACTORY, code)


def test_the_command_takes_llama_factorys_names_and_a_file(tmp_path: Path) -> None:
    (tmp_path / "sft.json").write_text('{"stage": "sft", "fsdp_zpp": "zeropp"}')
    code = """
        import sys
        from fsdp_zpp.integrations.llama_factory import main

        for arguments in (["chat"], ["train"], ["train", "sft.json"]):
            sys.argv[1:] = arguments
            try:
                main()
            except ValueError as error:
                print(error)
    """
    unknown, without, trained = run(tmp_path, LLAMA_FACTORY, code).splitlines()[:3]  # then warnings
    assert unknown.endswith("got chat")
    assert without.startswith("give a configuration file")
    assert trained.startswith(str(Strategy.zeropp()))


def test_v1_needs_a_newer_llama_factory(tmp_path: Path) -> None:
    code = f"from fsdp_zpp.integrations.llama_factory import run_sft\nrun_sft({SFT!r})"
    last = run(tmp_path, LLAMA_FACTORY, code).splitlines()[-1]
    assert "needs llamafactory 0.9.6.dev0 or later for V1, and 0.9.5 is installed: see docs/guides/llama-fac" in last


def test_an_absent_llama_factory_is_named(tmp_path: Path) -> None:
    code = """
        import importlib.metadata as metadata

        found = metadata.version

        def version(name):
            if name == "llamafactory":
                raise metadata.PackageNotFoundError(name)
            return found(name)

        metadata.version = version
        import fsdp_zpp.integrations.llama_factory
    """
    last = run(tmp_path, {}, code).splitlines()[-1]
    assert last == (
        "ImportError: fsdp_zpp.integrations.llamafactory needs llamafactory: see docs/guides/llama-factory.md"
    )


def test_ms_swifts_trainers_have_the_strategy(tmp_path: Path) -> None:
    code = """
        from types import SimpleNamespace
        from swift.trainers import TrainerFactory
        from fsdp_zpp import Strategy
        from fsdp_zpp.integrations.ms_swift import use_strategy

        use_strategy(Strategy.mixzpp(gpus_per_node=2))
        args = dict(tuner_backend="peft", sequence_parallel_size=1, optimizer=None, task_type="causal_lm")
        print(TrainerFactory.get_trainer_cls(SimpleNamespace(**args)).strategy)
        for wrong in (Strategy.zeropp(), "zeropp"):
            try:
                use_strategy(wrong)
            except (TypeError, ValueError) as error:
                print(error)
    """
    lines = run(tmp_path, MS_SWIFT, code).splitlines()
    assert lines[0] == str(Strategy.mixzpp(gpus_per_node=2))
    assert lines[1].startswith("ms-swift's trainers have a strategy already, ")
    assert lines[2].startswith("strategy must be a Strategy such as Strategy.zeropp(), got 'zeropp'")


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


@pytest.mark.skipif(not is_installed("llamafactory"), reason="LLaMA-Factory is not installed")
def test_llama_factory_is_as_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISABLE_VERSION_CHECK", "1")
    from llamafactory.extras.misc import is_env_enabled
    from llamafactory.hparams import read_args
    from llamafactory.train import tuner

    from fsdp_zpp.integrations.llama_factory import TRAINERS

    assert parameters(tuner.run_exp) == ["args", "callbacks"]
    assert parameters(read_args) == ["args"]
    assert parameters(is_env_enabled) == ["env_var", "default"]
    for stage, name in TRAINERS.items():
        assert hasattr(importlib.import_module(f"llamafactory.train.{stage}.trainer"), name)
        importlib.import_module(f"llamafactory.train.{stage}.workflow")


V1 = "llamafactory.v1.plugins.trainer_plugins.distributed"


def test_v1s_registry_is_as_recorded() -> None:
    interface = pytest.importorskip(f"{V1}.interface")
    engine = importlib.import_module(f"{V1}.fsdp2").FSDP2Engine
    from fsdp_zpp.integrations._llama_factory_v1 import distributed_by

    registered = distributed_by(Strategy.zeropp())
    methods = {
        "shard_model": ["model", "dist_config", "kwargs"],
        "save_model": ["model", "output_dir", "processor"],
        "save_checkpoint": ["model", "optimizer", "ckpt_dir", "kwargs"],
        "load_checkpoint": ["model", "optimizer", "ckpt_dir", "kwargs"],
    }
    for name, expected in methods.items():
        assert parameters(getattr(interface.FSDP2Distributed, name)) == expected
        assert len(parameters(getattr(registered, name))) == len(expected)
    assert parameters(interface.DistributedPlugin("fsdp2").register) == []
    assert parameters(engine.__init__)[1:] == ["dist_config", "bf16"]
    assert parameters(engine.prepare_model)[1:] == ["model", "ignored_params"]
    assert parameters(engine.is_lora_module_wrap)[1:] == ["model"]


@pytest.mark.skipif(not is_installed("swift.trainers") if is_installed("swift") else True, reason="no ms-swift")
def test_ms_swift_is_as_recorded() -> None:
    from swift.trainers import TrainerFactory

    assert parameters(TrainerFactory.get_trainer_cls) == ["args"]
    assert {"causal_lm", "dpo"} <= set(TrainerFactory.TRAINER_MAPPING)
