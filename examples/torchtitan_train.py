"""torchtitan's Llama 3 debug model on the Python standard library, with a strategy. Needs GPUs, as torchtitan does.

    torchrun --nproc-per-node=4 examples/torchtitan_train.py --parallelism.strategy zeropp
    torchrun --nproc-per-node=4 examples/torchtitan_train.py --parallelism.strategy '{"levels":"IIG","gpus_per_node":2}'
    torchrun --nproc-per-node=4 examples/torchtitan_train.py --parallelism.strategy None    # torchtitan's own FSDP

All of torchtitan's flags work. With its own data and tokenizer, a configuration as the guide shows is enough.
"""

from __future__ import annotations

import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.train import main

from fsdp_zpp import Strategy
from fsdp_zpp.integrations.torchtitan import StrategyTrainer, with_strategy


class ByteTokenizer(BaseTokenizer):
    """A token for each byte; 0 ends a document."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing to configure."""

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()
        self.eos_id = 0

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        """Return the bytes of ``text``."""
        return [*text.encode(), *([0] if add_eos else [])]

    def decode(self, tokens: list[int]) -> str:
        """Return the text of ``tokens``."""
        return bytes(tokens).decode(errors="replace")

    def get_vocab_size(self) -> int:
        """Return the number of tokens."""
        return 256


def load(folder: str) -> Dataset:
    """Return the source files of a folder, one a sample."""
    files = sorted(Path(folder).glob("*.py"))
    return Dataset.from_dict({"text": [file.read_text(errors="replace") for file in files]})


DATASETS["standard_library"] = DatasetConfig(
    path=sysconfig.get_paths()["stdlib"], loader=load, sample_processor=lambda sample: sample["text"]
)


def standard_library() -> StrategyTrainer.Config:
    """Return torchtitan's debug model, with ZeRO++ unless ``--parallelism.strategy`` says otherwise."""
    config = with_strategy(llama3_debugmodel(), Strategy.zeropp())
    config.tokenizer = ByteTokenizer.Config()
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset="standard_library")
    config.dump_folder = "runs/torchtitan_train"
    return config


if __name__ == "__main__":
    sys.argv[1:1] = ["--module", "__main__", "--config", "standard_library"]
    main()
