"""Small models with odd shapes, and what it takes to train them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers

from .pool import device_type


class Block(nn.Module):
    """A residual MLP whose sizes divide by nothing, with a buffer."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.register_buffer("shift", torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x) + self.shift)))


class Net(nn.Module):
    """Embedding, blocks, head."""

    def __init__(
        self,
        blocks: int = 2,
        width: int = 22,
        hidden: int = 37,
        vocabulary: int = 61,
        tied: bool = False,  # the head shares the embedding's weight
        twice: bool = False,  # the first block runs twice in a forward
        unused: bool = False,  # there is a block that no forward runs
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(blocks))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.twice = twice
        self.skipped: int | None = None  # the block that forwards leave out; may be set at any time
        self.unused = Block(width, hidden) if unused else None
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.twice:
            x = self.blocks[0](x)
        for i, block in enumerate(self.blocks):
            if i != self.skipped:
                x = block(x)
        return self.head(x)


def device() -> torch.device:
    """This rank's device."""
    return torch.device(device_type(), torch.cuda.current_device()) if device_type() == "cuda" else torch.device("cpu")


def make_net(seed: int = 0, frozen: bool = False, **arguments: Any) -> Net:
    """A net with the same weights on every rank."""
    torch.manual_seed(seed)
    net = Net(**arguments)
    if frozen:
        net.blocks[0].requires_grad_(False)
    return net.to(device())


def recompute(model: nn.Module, kind: str, is_target: Callable[[nn.Module], bool]) -> None:
    """Recompute the target modules in the backward; ``kind`` ends in "reentrant" or "no_reentrant"."""
    impl = wrappers.CheckpointImpl["NO_REENTRANT" if kind.endswith("no_reentrant") else "REENTRANT"]
    wrapper = partial(wrappers.checkpoint_wrapper, checkpoint_impl=impl)
    wrappers.apply_activation_checkpointing(model, wrapper, is_target)


class PlainSgd:
    """An optimizer that torch knows nothing of."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())

    @torch.no_grad()
    def step(self) -> None:
        for p in (p for p in self.parameters if p.grad is not None):
            p.data.sub_(p.grad, alpha=0.1)

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None


def make_optimizer(name: str, parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer by name."""
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    how: dict[str, Any] = {"fused": True} if name == "adamw-fused" else {"foreach": name == "adamw-foreach"}
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1, **how)


def batch(step: int, micro_batch: int, rank: int | None = None) -> Tensor:
    """Two sequences of eight random bytes, other ones on each rank."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro_batch + 7919 * rank)
    return torch.randint(256, (2, 8), generator=generator).to(device())


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Cross entropy of the next token, tokens being taken modulo the vocabulary."""
    tokens = tokens % model.embedding.num_embeddings
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest relative distance |a - b| / |b| over all tensors."""
    assert ours.keys() == theirs.keys(), set(ours) ^ set(theirs)
    largest = torch.stack([(ours[name] - b).norm() / b.norm().clamp(min=1e-12) for name, b in theirs.items()]).max()
    assert not largest.isnan()  # which Python's max() would pass over
    return largest.item()
