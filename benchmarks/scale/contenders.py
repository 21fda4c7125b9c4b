"""Contenders of beside_hsdp.py: models of nine parameters a unit under torch's FSDPs and under strategies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from sharding import shard
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from fsdp_zpp import Int4Delta, Strategy
from fsdp_zpp_kernels import ops, triton as triton_backend
from fsdp_zpp_kernels.triton import Launch

WORLD, GPUS_PER_NODE, WIDTH = 16, 8, 64  # a norm has four values a rank, as many as a tail is a multiple of
DTYPE = torch.bfloat16


class Contender(NamedTuple):
    """One of the things compared.

    Attributes:
        adapter: ``"fsdp1"``, ``"fsdp2"``, or None for the model by itself.
        strategy: A strategy, or the name of one of torch's own.
        micro_batches: Forwards and backwards in a step.
        layers_a_unit: Layers in a unit.
    """

    adapter: str | None
    strategy: Strategy | str
    micro_batches: int = 1
    layers_a_unit: int = 1


DELTA, DELTA_IIG = (Strategy.zeropp(levels=levels, weights=Int4Delta()) for levels in ("IGG", "IIG"))
COMPUTATION, REFERENCE = "computation", "fsdp2 HSDP"
CONTENDERS = {
    COMPUTATION: Contender(None, "none"),
    REFERENCE: Contender("fsdp2", "HSDP"),
    "fsdp2 FULL_SHARD": Contender("fsdp2", "FULL_SHARD"),
    "fsdp2 IGG": Contender("fsdp2", Strategy("IGG")),
    "fsdp2 zeropp": Contender("fsdp2", Strategy.zeropp()),
    "fsdp2 delta": Contender("fsdp2", DELTA),
    "fsdp2 HSDP, two layers a unit": Contender("fsdp2", "HSDP", layers_a_unit=2),
    "fsdp2 zeropp, two layers a unit": Contender("fsdp2", Strategy.zeropp(), layers_a_unit=2),
    "fsdp1 FULL_SHARD": Contender("fsdp1", "FULL_SHARD"),
    "fsdp1 IGG": Contender("fsdp1", Strategy("IGG")),
    "fsdp1 zeropp": Contender("fsdp1", Strategy.zeropp()),
    "fsdp1 delta": Contender("fsdp1", DELTA),
    f"{COMPUTATION} x 4": Contender(None, "none", 4),
    f"{REFERENCE} x 4": Contender("fsdp2", "HSDP", 4),
    "fsdp2 delta-IIG x 4": Contender("fsdp2", DELTA_IIG, 4),
}


class Block(nn.Module):
    """Seven matrices and two norms, as in a layer of a Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.attention = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value, out = self.attention
        attention, feed_forward = self.norms
        y = attention(x)
        x = x + out(query(y) + key(y) + value(y))
        y = feed_forward(x)
        return x + self.down(self.gate(y) * self.up(y))


class Model(nn.Module):
    """Blocks between two matrices of the root."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Announcing(torch.optim.Optimizer):
    """An optimizer whose steps call hooks like any other's and change nothing: its computation is the same for all."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Do nothing."""


def build(contender: Contender, blocks: int) -> nn.Module:
    """Build a contender's model."""
    torch.manual_seed(0)
    model = Model(blocks)
    if contender.adapter is None:
        return model.to(DTYPE)
    mesh = None
    if contender.adapter == "fsdp2" and isinstance(contender.strategy, str):
        shape = {"HSDP": (WORLD // GPUS_PER_NODE, GPUS_PER_NODE), "FULL_SHARD": (WORLD,)}[contender.strategy]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("inter", "intra")[-len(shape) :])
    units: list[Any] = list(model.blocks)
    if contender.layers_a_unit > 1:
        units = [units[first : first + contender.layers_a_unit] for first in range(0, blocks, contender.layers_a_unit)]
    return shard(model, units, contender.adapter, contender.strategy, DTYPE, mesh)


def make_step(contender: Contender, blocks: int) -> Callable[[], None]:
    """Return a function that makes one optimizer step of a contender."""
    model = build(contender, blocks)
    optimizer = Announcing(model.parameters())
    x = torch.randn(4, WIDTH, dtype=DTYPE, requires_grad=True)

    def step() -> None:
        for number in range(contender.micro_batches):
            last = number == contender.micro_batches - 1
            if isinstance(model, FSDPModule):
                model.set_is_last_backward(last)
                model.set_requires_all_reduce(last)
            model(x).backward(x)
        optimizer.step()
        optimizer.zero_grad()

    return step


def prepare_kernels_only() -> None:
    """Make ops take the Triton backend, and launches stop where a GPU would be given the kernel."""

    def compiled(launch: Launch, arguments: tuple[Tensor | float, ...]) -> None:
        launch._compiled = lambda *arguments: None

    ops.backend_for = lambda tensor: triton_backend
    Launch._compile = compiled  # type: ignore[method-assign]
