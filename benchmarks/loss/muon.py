"""Validation loss and sent bytes of Muon beside AdamW, where the optimizer's shards are whole in a node and where not.

    python benchmarks/loss/run.py muon --nodes 2 --gpus-per-node 2 --seeds 0,1,2

A configuration is ``adamw:SHARDING`` or ``muon:SHARDING``. All have the same initial weights and the same data for a
seed. jobs.py says how runs are made; each finished run is a file in ``--output``. At the end comes a table of all runs
there.

``unsharded`` keeps all states on every rank: torch's ``fully_shard`` over groups of one, replicated over all ranks.
``full_shard`` is torch's, ``IGG`` and ``III`` are scopes without codecs; ``zeropp`` and ``zeropp-III`` have those of
``Strategy.zeropp``. Muon takes the matrices of layers and AdamW the rest, as in docs/concepts/scopes.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from guides_muon import whole_muon
from jobs import Run, add_options, carry_out, parse_configs, parser_of, settings_of
from markdown_tables import aligned
from result_files import Result, Row
from sent_bytes import DTensorCollectives, full_shard_sends
from tables import MUON_NAMES, UNSHARDED, muon
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard as torch_fully_shard
from training import Corpus, Settings, Trainee, adamw, train
from transformers import PreTrainedModel

from fsdp_zpp import Strategy, clip_grad_norm_, fully_shard, traffic

# ---- training, and the bytes that model and optimizer send

HOPS = ("inter", "intra")


@dataclass(frozen=True)
class MuonSettings(Settings):
    """Settings that runs must have in common to be compared.

    Args:
        muon_lr: Muon's peak learning rate; ``lr`` is AdamW's.
    """

    muon_lr: float


def strategy_of(sharding: str, gpus_per_node: int) -> Strategy | None:
    """Return a sharding's strategy; None for torch's own."""
    if sharding in (UNSHARDED, "full_shard"):
        return None
    preset, _, levels = sharding.partition("-")
    if preset == "zeropp":
        return Strategy.zeropp(levels=levels or "IGG", gpus_per_node=gpus_per_node)
    return Strategy(sharding, gpus_per_node=gpus_per_node)


def sharded(
    model: PreTrainedModel, sharding: str, gpus_per_node: int, device: torch.device, dtype: torch.dtype
) -> PreTrainedModel:
    """Make every layer a unit, with ``dtype`` for computation and communication and fp32 master weights."""
    world = dist.get_world_size()
    if sharding == UNSHARDED:
        mesh = init_device_mesh(device.type, (world, 1), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(device.type, (world,))
    strategy = strategy_of(sharding, gpus_per_node)
    shard_unit = partial(fully_shard, strategy=strategy) if strategy else torch_fully_shard
    for module in (*model.transformer.h, model):
        shard_unit(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype))
    return model


def optimizers_of(model: PreTrainedModel, optimizer: str, settings: MuonSettings) -> list[torch.optim.Optimizer]:
    """Make AdamW, or Muon for the matrices of layers and AdamW for the rest."""
    if optimizer == "adamw":
        return [adamw(model.parameters(), settings.lr)]
    matrices = [p for p in model.transformer.h.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    return [whole_muon(matrices, lr=settings.muon_lr), adamw(others, settings.lr)]


class Sent:
    """Bytes that this rank sends in a step: for the model, and for its optimizers.

    Args:
        model: Sharded model; None if it is torch's own, which counts nothing.
        gpus_per_node: Ranks of a node.
    """

    def __init__(self, model: nn.Module | None, gpus_per_node: int) -> None:
        self._model = model
        self._gpus_per_node = gpus_per_node
        self._totals: list[dict[str, int]] = []
        self.by_optimizers: dict[str, float] | None = None

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Return a context of the optimizers' steps."""
        if self._model is not None:
            kinds = traffic(self._model).values()
            self._totals.append({hop: sum(sent[hop] for sent in kinds) for hop in HOPS})
        if self.by_optimizers is not None:  # all steps are alike
            yield
            return
        with DTensorCollectives(self._gpus_per_node) as collectives:
            yield
        self.by_optimizers = collectives.sent

    @property
    def by_model(self) -> dict[str, int] | None:
        """Return the median over steps; a step after a validation finds weights that this has gathered."""
        if self._model is None:
            return None
        return {hop: int(median(b[hop] - a[hop] for a, b in pairwise(self._totals))) for hop in HOPS}


def train_and_count(
    settings: MuonSettings, name: str, seed: int, corpus: Corpus, device: torch.device
) -> dict[str, Any]:
    """Train a configuration once and count what it sends. Collective."""
    optimizer, sharding = name.split(":")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    watches: list[Sent] = []
    full_shard_sent: dict[str, int] = {}

    def prepare(model: PreTrainedModel, device: torch.device) -> Trainee:
        full_shard_sent.update(full_shard_sends(model, settings.nodes, settings.gpus_per_node, dtype))
        sharded(model, sharding, settings.gpus_per_node, device, dtype)
        is_ours = strategy_of(sharding, settings.gpus_per_node) is not None
        watches.append(Sent(model if is_ours else None, settings.gpus_per_node))
        clip = partial(clip_grad_norm_, list(model.parameters()))
        return Trainee(model, optimizers_of(model, optimizer, settings), clip, stepping=watches[0].stepping)

    row = train(settings, prepare, seed, corpus, device)
    sent = full_shard_sent if sharding == "full_shard" else watches[0].by_model
    return row | {"sent_by_model": sent, "sent_by_optimizer": watches[0].by_optimizers}


# ---- the study


def parse(given: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--lr", type=float, default=1e-3, help="of AdamW")
    parser.add_argument("--muon-lr", type=float, default=0.02, help="of Muon")
    add_options(parser, Path("runs/muon"))
    return parse_configs(parser, MUON_NAMES, given)


def report(_: Path, results: list[Result], settings: Settings) -> None:
    """Print a table of the runs with these settings."""
    print(f"\n{aligned(muon([result for result in results if result['arguments'] == asdict(settings)]))}")


def train_run(run: Run, corpus: Corpus, device: torch.device) -> Row:
    """Train a run. Collective."""
    assert isinstance(run.settings, MuonSettings)
    return train_and_count(run.settings, run.name, run.seed, corpus, device)


def main(given: list[str]) -> None:
    """Train and report, or be one rank of a job."""
    arguments = parse(given)

    def runs(sha256: str) -> list[Run]:
        settings = settings_of(arguments, sha256, MuonSettings)
        return [Run(name, seed, settings, name) for seed in arguments.seeds for name in arguments.configs]

    carry_out(arguments, runs, report, train_run)
