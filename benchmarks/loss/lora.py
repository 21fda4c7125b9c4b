"""Validation loss of LoRA whose frozen base is in bf16, int8 or NF4, on other text than the base was trained on.

    python benchmarks/loss/run.py convergence --configs full_shard --keep-weights --output runs/base ...
    python benchmarks/loss/run.py lora --base runs/base --text OTHER --nodes 2 --gpus-per-node 1

The base of a seed is what ``convergence`` has trained with it, with the same model. ``bf16`` is torch's FULL_SHARD, the
others are the recommended strategy for a quantized base (examples/finetune_lora.py), wrapped by layer. All have the
same data for a seed, and the same initial adapters, which a quantized base rounds to bf16. Another base needs another
``--output``. jobs.py says how runs are made; each finished run is a file in ``--output``. At the end comes a table of
all runs there.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch
from jobs import Run, add_options, carry_out, parse_configs, parser_of, settings_of
from markdown_tables import aligned
from peft import LoraConfig, get_peft_model
from result_files import Result, Row
from tables import LORA_REFERENCE, REFERENCE, convergence
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from training import Corpus, Settings, Trainee, train, under_fsdp1
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fsdp_zpp import NF4, Codec, Int8, Strategy, quantize_frozen_params

FROZEN: dict[str, Codec | None] = {LORA_REFERENCE: None, "int8": Int8(256), "nf4": NF4()}
"""Codecs of the base, by the configuration's name."""


@dataclass(frozen=True)
class LoraSettings(Settings):
    """Settings that runs must have in common to be compared.

    Args:
        rank: Rank of the adapters, which all linear modules but the head have.
    """

    rank: int


def adapted(
    network: PreTrainedModel, device: torch.device, *, settings: LoraSettings, name: str, base: Path, seed: int
) -> Trainee:
    """Give the model its base and adapters, and shard it. Collective."""
    network.load_state_dict(torch.load(base, map_location=device))
    use_linear_layers(network)
    network.requires_grad_(False)
    codec = FROZEN[name]
    strategy: Strategy | ShardingStrategy = ShardingStrategy.FULL_SHARD
    if codec is not None:
        quantize_frozen_params(network, codec, gpus_per_node=settings.gpus_per_node, dtype=torch.bfloat16)
        strategy = Strategy.zeropp(gpus_per_node=settings.gpus_per_node)
    torch.manual_seed(seed)
    config = LoraConfig(r=settings.rank, lora_alpha=2 * settings.rank, target_modules="all-linear")
    trainee = under_fsdp1(get_peft_model(network, config), device, strategy=strategy, lr=settings.lr)
    return replace(trainee, whole=None)  # the shards have no base that could be validated


def use_linear_layers(network: PreTrainedModel) -> None:
    """Replace GPT-2's own layers, whose weights are transposed, by nn.Linear, which is what gets quantized."""
    for parent in list(network.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, Conv1D):
                linear = nn.Linear(*layer.weight.shape, device=layer.weight.device)
                linear.weight.data, linear.bias.data = layer.weight.data.T.contiguous(), layer.bias.data
                setattr(parent, name, linear)


def parse(given: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--base", type=Path, required=True, help="folder of convergence's results and weights")
    add_options(parser, Path("runs/lora"))
    return parse_configs(parser, FROZEN, given)


@cache  # each configuration of a seed starts from the same file
def sha256_of(base: Path) -> str:
    """Return the SHA-256 of a base's weights; exit if they were not kept."""
    if not base.exists():
        sys.exit(f"there is no {base}; train the base with convergence --configs {REFERENCE} --keep-weights")
    with base.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def report(_: Path, results: list[Result], settings: Settings) -> None:
    """Print a table of the runs with these settings."""
    shown = [result for result in results if result["arguments"] == asdict(settings)]
    print(f"\n{aligned(convergence(shown, LORA_REFERENCE))}")


def main(given: list[str]) -> None:
    """Train and report, or be one rank of a job."""
    arguments = parse(given)

    def runs(sha256: str) -> list[Run]:
        settings = settings_of(arguments, sha256, LoraSettings)
        made = [Run(name, seed, settings, name) for seed in arguments.seeds for name in arguments.configs]
        return [replace(run, base=sha256_of(base_of(run))) for run in made]

    def base_of(run: Run) -> Path:
        return Path(arguments.base, replace(run, label=REFERENCE).weights)

    def train_run(run: Run, corpus: Corpus, device: torch.device) -> Row:
        assert isinstance(run.settings, LoraSettings)
        prepare = partial(adapted, settings=run.settings, name=run.name, base=base_of(run), seed=run.seed)
        return train(run.settings, prepare, run.seed, corpus, device)

    carry_out(arguments, runs, report, train_run)
