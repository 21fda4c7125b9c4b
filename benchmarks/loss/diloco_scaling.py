"""Validation loss of DiLoCo by its authors' recipe: the first row of "Scaling Laws for DiLoCo" (arXiv 2503.09799).

    python benchmarks/loss/run.py diloco-scaling --nodes 1 --configs synchronous --seeds 0,1,2
    python benchmarks/loss/run.py diloco-scaling --nodes 2 --gpus 1 --configs local30:none:at-once:outer0.6

A node is a replica. ``synchronous`` trains one replica on the whole batch; tables.py says how the others are named.
Batch and learning rate are those of the paper's fits for the number of replicas, unless they are given. jobs.py says
how runs are made; each finished run is a file in ``--output``, for any number of nodes. At the end comes a table of all
there.

The recipe is that of the paper's smallest model (section 3 and table 10): transformer with QK-norm and z-loss, AdamW
(0.9, 0.99) with a weight decay of 1 / steps, clipping at 1, a thousand steps of warmup and a cosine to 5 %, 20 tokens a
parameter. Our model reads bytes instead of 32,768 kinds of tokens, so its
embedding is small, and it has 8 layers of the paper's width instead of 6: 34 M parameters.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from configurations import local_steps
from jobs import Run, add_options, carry_out, parser_of, settings_of
from markdown_tables import aligned
from result_files import Result, Row
from tables import SYNCHRONOUS, diloco
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from training import Corpus, Settings, Trainee, train
from transformers import PreTrainedModel, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from fsdp_zpp import Strategy

# ---- the recipe

PARAMETERS = 34e6
WARMUP_STEPS = 1000
Z_LOSS = 1e-4


@dataclass(frozen=True)
class RecipeSettings(Settings):
    """Settings of a run; only batches and learning rates may differ between runs that are compared.

    Args:
        compiled: Whether layers and the loss are compiled.
    """

    final_lr: ClassVar[float] = 0.05

    compiled: bool


def fitted_lr(replicas: int) -> float:
    """Return the peak learning rate that the paper's fit gives (table 10)."""
    return 22256 * PARAMETERS**-0.8827 * replicas**0.2929


def fitted_batch(replicas: int) -> int:
    """Return how many sequences of 2,048 tokens a replica's step takes by the paper's fit (table 10)."""
    return round(0.00709 * PARAMETERS**0.4695 * replicas**0.3399 / replicas)


def model_of(settings: Settings) -> Qwen3Config:
    """Make the configuration of the model: bytes, and heads of their own for keys and values."""
    return Qwen3Config(
        vocab_size=256,
        hidden_size=settings.hidden,
        intermediate_size=settings.intermediate,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        head_dim=settings.hidden // settings.heads,
        max_position_embeddings=settings.sequence,
        tie_word_embeddings=False,
        use_cache=False,
    )


def with_z_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy, and a penalty on the logarithm of the softmax's denominator."""
    logits = logits.float().flatten(0, 1)
    normalizer = logits.logsumexp(dim=-1)
    return F.cross_entropy(logits, targets.flatten()) + Z_LOSS * normalizer.square().mean()


def train_by_recipe(
    settings: RecipeSettings, name: str, seed: int, corpus: Corpus, device: torch.device
) -> dict[str, Any]:
    """Train a configuration once. Collective."""
    loss = torch.compile(with_z_loss) if settings.compiled else with_z_loss

    def objective(model: nn.Module, batch: Tensor) -> Tensor:
        return loss(model(batch[:, :-1]).logits, batch[:, 1:])

    def prepare(model: PreTrainedModel, device: torch.device) -> Trainee:
        is_local = name != SYNCHRONOUS
        if settings.compiled:
            for layer in model.model.layers:
                layer.compile()
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        sharded = FullyShardedDataParallel(
            model,
            # fsdp_zpp teaches FSDP to take a Strategy, which torch's annotation doesn't know.
            sharding_strategy=_strategy(name, settings),  # type: ignore[arg-type]
            auto_wrap_policy=ModuleWrapPolicy({Qwen3DecoderLayer}),
            mixed_precision=MixedPrecision(param_dtype=dtype, reduce_dtype=dtype),
            device_id=device,
            use_orig_params=True,
        )
        decay = 1 / settings.steps
        optimizer = torch.optim.AdamW(
            sharded.parameters(), settings.lr, betas=(0.9, 0.99), weight_decay=decay, fused=True
        )
        return Trainee(sharded, [optimizer], sharded.clip_grad_norm_, is_local)

    return train(settings, prepare, seed, corpus, device, model_of(settings), objective)


def _strategy(name: str, settings: Settings) -> Strategy:
    steps = None if name == SYNCHRONOUS else local_steps(name)
    return Strategy("III", local_steps=steps, gpus_per_node=settings.gpus_per_node)


# ---- the study

PLAIN = "local30:none:at-once:outer0.6"
"""The paper's own: all weights at once every 30 steps, in full precision."""


def parse(given: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--configs", help=f"default: {SYNCHRONOUS} on one node, {PLAIN} on several")
    parser.add_argument("--lr", type=float, help="peak learning rate; default: the paper's fit")
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, default=True)
    add_options(parser, Path("runs/diloco-scaling"))
    parser.set_defaults(gpus_per_node=1, batch=None, tokens=700_000_000, sequence=2048, validate_every=1000)
    arguments = parser.parse_args(given)
    arguments.configs = (arguments.configs or (SYNCHRONOUS if arguments.nodes == 1 else PLAIN)).split(",")
    try:
        for name in arguments.configs:
            if (name == SYNCHRONOUS) != (arguments.nodes == 1):
                raise ValueError(f"{SYNCHRONOUS} is for one node, and local steps are for several; got {name!r}")
            if name != SYNCHRONOUS:
                local_steps(name)
    except ValueError as error:
        parser.error(str(error))
    arguments.batch = arguments.batch or fitted_batch(arguments.nodes)
    arguments.lr = arguments.lr or fitted_lr(arguments.nodes)
    return arguments


def train_run(run: Run, corpus: Corpus, device: torch.device) -> Row:
    """Train a run. Collective."""
    assert isinstance(run.settings, RecipeSettings)
    return train_by_recipe(run.settings, run.name, run.seed, corpus, device)


def report(_: Path, results: list[Result], __: Settings) -> None:
    """Print a table of all runs."""
    print(f"\n{aligned(diloco(results))}")


def main(given: list[str]) -> None:
    """Train and report, or be one rank of a job."""
    arguments = parse(given)

    def runs(sha256: str) -> list[Run]:
        settings = settings_of(arguments, sha256, RecipeSettings)
        settings = replace(settings, warmup=min(0.5, WARMUP_STEPS / settings.steps))
        label = f"{arguments.nodes}x{arguments.gpus_per_node}"
        label = f"{label}-{{}}-lr{arguments.lr:.4g}-batch{arguments.batch}-{arguments.tokens / 1e6:.0f}M"
        return [Run(name, seed, settings, label.format(name)) for seed in arguments.seeds for name in arguments.configs]

    carry_out(arguments, runs, report, train_run)
