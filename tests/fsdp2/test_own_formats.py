"""Weights that encode themselves for the all-gather, and torchao's low-precision layers: as under torch's own FSDP.

The bytes of a weight that encodes itself go through both hops, into the secondary shard.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import STOCK, Adapter, Case, Fsdp1, Fsdp2, Precision
from harness.messages import collected
from harness.pool import Pool
from harness.training import load, save
from harness.wiretap import Wiretap, sent_in
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fsdp_zpp import CodecState, Int8, LoCo, Strategy, gathered_weights
from fsdp_zpp.comm.hops import keep_until_read

FSDP1, FSDP2 = Fsdp1(), Fsdp2()
TWO: dict[str, Any] = {"gpus_per_node": 2}
BLOCKS, WIDTH, HIDDEN, VOCABULARY = 2, 32, 64, 64
"""Widths that float8 and MXFP8 can block."""
SIZES = (("blocks", BLOCKS), ("width", WIDTH), ("hidden", HIDDEN), ("vocabulary", VOCABULARY))
# Gradients in bf16 have so few bits that fp32 sums of them are exact, in whatever order: weights are equal bit by bit.
CASE = Case(model=SIZES, precision=Precision(torch.bfloat16, torch.float32), clip=None)


# ---- formats

_PRESERVED = {
    getattr(torch.ops.aten, packet).default
    for packet in ("empty_like", "new_zeros", "copy_", "view", "as_strided", "_to_copy", "clone", "detach")
} | {torch.ops.aten.slice.Tensor, torch.ops.aten.split.Tensor}


class RowScaled(Tensor):
    """A trained weight in full precision that travels as int8 codes and a scale for each row.

    The scales are relative to the largest value on all ranks, which is no tensor of the gather but its metadata.
    """

    values: Tensor
    encoded: ClassVar[int] = 0
    """How often this rank has encoded a shard."""

    @staticmethod
    def __new__(cls, values: Tensor) -> RowScaled:
        """Wrap ``values``."""
        made = Tensor._make_wrapper_subclass(
            cls, values.shape, values.stride(), values.storage_offset(), dtype=values.dtype, device=values.device
        )
        made.values = values
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values"], None

    @staticmethod
    def __tensor_unflatten__(tensors: dict[str, Tensor], *unused: Any) -> RowScaled:
        return RowScaled(tensors["values"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(RowScaled, lambda each: each.values, (args, kwargs or {}))
        out = func(*args, **kwargs)
        return tree_map_only(Tensor, RowScaled, out) if func in _PRESERVED else out

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        """Codes [rows, columns] and scales [rows]; collective."""
        RowScaled.encoded += 1
        largest = self.values.abs().max()
        dist.all_reduce(largest, dist.ReduceOp.MAX, mesh.get_group())
        scales = self.values.abs().amax(1) / largest
        steps = (scales * largest / 127).clamp(min=1e-20)
        return ((self.values / steps[:, None]).round().to(torch.int8), scales), (largest,)

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        """The values of all ranks."""
        (codes, scales), (largest,) = outputs, metadata
        # It was made in the stream of the gather, where torch lets its memory be reused once this has returned.
        keep_until_read(largest)
        return shown((codes.float() * (scales * largest / 127)[:, None]).to(dtype), out)


torch.serialization.add_safe_globals([RowScaled])  # for checkpoints, as torchao does


def shown(values: Tensor, out: Any) -> Any:
    """Return decoded values as torch asks for them, or write them to what it has."""
    if out is None:
        return values, (values,)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
        out.copy_(values)
    return None


def in_blocks(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and "blocks" in name


def row_scaled(net: models.Net) -> None:
    """Let the linear layers of blocks encode themselves."""
    for block in net.blocks:
        for layer in (block.up, block.down):
            layer.weight = nn.Parameter(RowScaled(layer.weight.detach()))


def float8(net: nn.Module, own_gather: bool) -> None:
    """Convert to torchao's Float8Linear; with ``own_gather``, weights are cast before the gather."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=own_gather, emulate=True)
    convert_to_float8_training(net, config=config, module_filter_fn=in_blocks)


def quantize(net: nn.Module, kind: str) -> None:
    """Let weights compute in MXFP8, or be kept in int8."""
    from torchao.prototype import quantized_training
    from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe
    from torchao.quantization import quantize_

    if kind == "mxfp8 weights":
        config = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL)
    else:  # which optimizers write to by stochastic rounding
        config = quantized_training.int8_weight_only_quantized_training()
    quantize_(net, config, filter_fn=in_blocks)


def compiled_float8(net: models.Net) -> None:
    """Convert, and compile a block."""
    torch._dynamo.reset()
    float8(net, own_gather=True)
    net.blocks[0].compile(backend="aot_eager")


CONVERT: dict[str, Callable[[Any], None]] = {
    "rows": row_scaled,
    "float8 gathers": partial(float8, own_gather=True),
    "int8 weights": partial(quantize, kind="int8 weights"),
    "float8 gathers, scales with the step": partial(float8, own_gather=True),
    "float8 gathers, compiled": compiled_float8,
    "float8": partial(float8, own_gather=False),
    # These have an all-gather of their own, but that is of their values in the dtype to compute in.
    "mxfp8 weights": partial(quantize, kind="mxfp8 weights"),
}
ENCODE_THEMSELVES = ("rows", "float8 gathers", "int8 weights")
"""The start of their names."""


def skip_if_not_converted(kind: str) -> None:
    """Skip the test without torchao, or if that does not convert layers for this torch."""
    if kind != "rows":
        pytest.importorskip("torchao")
    try:
        CONVERT[kind](models.make_net(**dict(SIZES)))
    except AssertionError as error:
        pytest.skip(f"torchao: {error}")


# ---- trainings


def make(kind: str, strategy: Any, adapter: Adapter = FSDP2) -> Any:
    """In a worker: a sharded net of converted layers."""
    net = models.make_net(**dict(SIZES))
    torch.manual_seed(0)
    CONVERT[kind](net)
    return adapter.shard(net.to(models.device()), CASE, strategy)


def optimizer_of(model: Any, name: str = "sgd") -> torch.optim.Optimizer:
    """Make an optimizer that steps one weight at a time, as torchao's int8 weights ask for."""
    if name == "adamw":
        return models.make_optimizer("adamw", model.parameters())
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)


def batch(step: int, micro_batch: int = 0) -> Tensor:
    """Make a batch of this rank that MXFP8 can block."""
    generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + dist.get_rank())
    return torch.randint(VOCABULARY, (2, 17), generator=generator).to(models.device())


def train(
    model: Any,
    steps: range,
    optimizer: Any = None,
    micro_batches: int = 1,
    adapter: Adapter = FSDP2,
    after_step: Callable[[Any], object] = lambda model: None,
) -> list[float]:
    """Train; return the last micro-batch's loss of each step."""
    optimizer, losses = optimizer or optimizer_of(model), []
    for step in steps:
        for micro_batch in range(micro_batches):
            with adapter.micro_batch(model, micro_batch == micro_batches - 1, False):
                loss = models.loss_of(model, batch(step, micro_batch))
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step(model)
        losses.append(loss.item())
    return losses


Trained = tuple[list[float], dict[str, Tensor], list[tuple[str, str]]]


def trained(kind: str, adapter: Adapter, strategy: Any) -> Trained:
    """In a worker: losses of two steps, the second after an evaluation, weights, and what is logged."""

    def precompute(model: Any) -> None:
        if kind == "float8 gathers, scales with the step":
            importlib.import_module("torchao.float8").precompute_float8_dynamic_scale_for_fsdp(model)

    with collected() as records:
        model = make(kind, strategy, adapter)
        torch.manual_seed(dist.get_rank())  # of stochastic rounding
        optimizer = optimizer_of(model)
        micro_batches = 2 if adapter == FSDP2 else 1  # which stock FSDP1 sums in 16 bits
        losses = train(model, range(1), optimizer, micro_batches, adapter, precompute)
        # torchao's own tensors can't be used in inference mode after a training.
        with torch.inference_mode() if kind == "rows" else torch.no_grad():
            losses.append(models.loss_of(model, batch(9)).item())
        losses += train(model, range(1, 2), optimizer, micro_batches, adapter, precompute)
    if kind == "int8 weights":
        shards = {name: adapter.local(parameter).detach() for name, parameter in model.named_parameters()}
        return losses, {n: v if type(v) is Tensor else v.dequantize() for n, v in shards.items()}, records
    weights = adapter.full_weights(model)
    if strategy is not STOCK and strategy.optimizer != "N":  # whatever shards are, these are plain tensors
        gathered = dict(gathered_weights(model))
        assert all(type(weight) is Tensor for weight in gathered.values())
        assert all(torch.equal(gathered[name].cpu().float(), weight) for name, weight in weights.items())
    return losses, weights, records


@pytest.mark.parametrize(
    ("kind", "adapter", "scopes"),
    [
        ("rows", FSDP2, "GGG"),
        ("rows", FSDP2, "IGG"),
        ("float8 gathers", FSDP2, "NNG"),
        ("int8 weights", FSDP2, "IGG"),
        ("float8 gathers, scales with the step", FSDP2, "IIG"),
        ("float8 gathers, compiled", FSDP2, "IGG"),
        ("float8", FSDP1, "IGG"),
        ("mxfp8 weights", FSDP2, "IGG"),
    ],
    ids=str,
)
def test_training_equals_stock_bit_by_bit(
    pool: Callable[[int], Pool], kind: str, adapter: Adapter, scopes: str
) -> None:
    skip_if_not_converted(kind)
    ours = pool(4).run(trained, kind, adapter, Strategy(scopes, **TWO))
    for (losses, weights, _), (expected, others, _) in zip(
        ours, pool(4).once(trained, kind, adapter, STOCK), strict=True
    ):
        assert losses == expected
        assert all(torch.equal(weights[name], others[name]) for name in others)
    [(_, line)] = ours[0][2]
    says = "; weights that encode themselves gathered in their own bytes (2 of 3 uni"
    assert (says in line) == kind.startswith(ENCODE_THEMSELVES)
    assert "weights gathered in full precision" in line


WITH_CODECS = {
    "zeropp": Strategy.zeropp(**TWO),
    "LoCo": Strategy("IIG", weights=Int8(64), gradients=Int8(64), error_feedback=LoCo(), **TWO),
    "weights alone": Strategy("IGG", weights=Int8(64), **TWO),
}


@pytest.mark.parametrize(
    ("kind", "adapter", "name"),
    [
        ("rows", FSDP2, "zeropp"),
        ("float8 gathers", FSDP2, "LoCo"),
        ("float8", FSDP1, "weights alone"),
    ],
    ids=str,
)
def test_codecs_encode_what_does_not_encode_itself_and_the_log_says_so(
    pool: Callable[[int], Pool], kind: str, adapter: Adapter, name: str
) -> None:
    skip_if_not_converted(kind)
    strategy = WITH_CODECS[name]
    first, *others = pool(4).run(trained, kind, adapter, strategy)
    assert [records for _, _, records in others] == [[]] * 3
    [(level, line)] = first[2]
    assert level == "INFO"
    if kind.startswith(ENCODE_THEMSELVES):
        assert f"weights gathered as {strategy.weights} (1 of 3 units, " in line
        own = f"weights that encode themselves gathered in their own bytes, not as {strategy.weights} (2 of 3 uni"
        assert own in line
    else:
        assert f"weights gathered as {strategy.weights};" in line
        assert "themselves" not in line
    stock = pool(4).once(trained, kind, adapter, STOCK)
    for (losses, _, _), (expected, _, _) in zip([first, *others], stock, strict=True):
        assert losses != expected
        assert losses[0] == pytest.approx(expected[0], rel=1e-2)
        assert losses == pytest.approx(expected, rel=5e-2)


# ---- bytes


def sent_in_a_step(kind: str, strategy: Any) -> tuple[Wiretap, Any, int]:
    """In a worker: what a warm step sends, by the wiretap and by traffic(), and how often a shard was encoded."""
    model = make(kind, strategy)
    optimizer = optimizer_of(model)
    train(model, range(1), optimizer)
    before = RowScaled.encoded
    step = partial(train, model, range(1, 2), optimizer)
    if strategy is STOCK:
        tap, counted = sent_in(step, model, 2, counts=False)
    else:
        tap, counted = sent_in(step, model, 2)
    return tap, counted, RowScaled.encoded - before


MATRICES = BLOCKS * 2 * WIDTH * HIDDEN
NBYTES = {"rows": MATRICES + BLOCKS * 4 * (WIDTH + HIDDEN), "float8 gathers": MATRICES}
"""Bytes of all encoded weights of a net."""
VECTORS = 2 * BLOCKS * (2 * WIDTH + HIDDEN)
"""Bytes of norms and biases, in bf16, and below with embedding and head."""
OTHERS = VECTORS + 2 * 2 * WIDTH * VOCABULARY


@pytest.mark.parametrize("kind", NBYTES)
def test_bytes_are_its_own(pool: Callable[[int], Pool], kind: str) -> None:
    skip_if_not_converted(kind)
    stock = pool(4).run(sent_in_a_step, kind, STOCK)
    # Blocks are gathered twice, the root once; to the one other node.
    flat, once = (2 * (NBYTES[kind] + VECTORS) + OTHERS - VECTORS) // 4, (NBYTES[kind] + OTHERS) // 4
    # Four weights are encoded in the forward, and again in the backward unless something of the first gather is kept.
    for scopes, expected, times in (("GGG", flat, 8), ("IGG", once, 4), ("NNG", once, 4), ("III", 0, 8)):
        ours = pool(4).run(sent_in_a_step, kind, Strategy(scopes, **TWO))
        for (tap, counted, encoded), (stock_tap, _, _) in zip(ours, stock, strict=True):
            assert counted["gather"]["inter"] == expected
            assert stock_tap.total("inter", "all_gather") == flat
            assert kind != "rows" or encoded == times
            if scopes != "III":  # whose reduced gradients are gathered, too
                assert tap.total("inter", "all_gather") == expected
                assert tap.total("intra", "all_gather") == counted["gather"]["intra"]
            if scopes == "IGG":  # units are sent ahead: a small model goes in one chunk, before hops inside nodes
                gathers = [hop for collective, hop in tap.order if collective == "all_gather"]
                assert gathers[0] == "inter"
                assert gathers.count("inter") == 1


# ---- checkpoints


def resumed(kind: str, strategy: Any, path: str, fresh: bool) -> tuple[list[float], dict[str, Tensor]]:
    """In a worker: two steps, saved; two more, by the same model or by one that has trained and goes on from there."""
    model = make(kind, strategy)
    optimizer = optimizer_of(model, "adamw")
    train(model, range(2), optimizer)
    save(model, optimizer, CodecState(model), path)
    if fresh:
        model = make(kind, strategy)
        optimizer = optimizer_of(model, "adamw")
        train(model, range(8, 9), optimizer)
        load(model, optimizer, CodecState(model), path)
    return train(model, range(2, 4), optimizer), FSDP2.full_weights(model)


@pytest.mark.parametrize(("kind", "name"), [("rows", "LoCo"), ("float8 gathers", "zeropp")])
def test_a_resumed_training_equals_one_that_went_on(
    pool: Callable[[int], Pool], kind: str, name: str, tmp_path: Path
) -> None:
    skip_if_not_converted(kind)
    runs = [pool(4).run(resumed, kind, WITH_CODECS[name], str(tmp_path / f"{fresh}"), fresh) for fresh in (False, True)]
    for (losses, weights), (expected, others) in zip(*runs, strict=True):
        assert losses == expected
        assert all(torch.equal(weights[name], others[name]) for name in others)
