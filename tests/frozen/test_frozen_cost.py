"""What a frozen base costs: bytes at rest and on the wire, gathers, decodes, memory."""

from __future__ import annotations

import ctypes
import gc
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from harness import llama, lora, models
from harness.adapter import Adapter, Case
from harness.covering import ADAPTERS, over_adapters, over_each
from harness.pool import Pool
from harness.wiretap import Wiretap, sent_in
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_zpp import NF4, Int4, Int8, Strategy, quantize_frozen_params, traffic
from fsdp_zpp.codecs.base import Codec
from fsdp_zpp.collectives.hops import Hop
from fsdp_zpp.frozen.base import FrozenBase
from fsdp_zpp.frozen.modules import frozen_modules
from fsdp_zpp.frozen.weight import FrozenWeight
from fsdp_zpp.kernels import dequantize_nf4_rows, dequantize_rows, reference
from fsdp_zpp.kernels.nf4 import LEVELS, levels_on

LARGE: dict[str, Any] = {"width": 256, "hidden": 688, "vocabulary": 512, "blocks": 4}
SHARES = {"N": 1.0, "I": 1 / 2, "G": 1 / 4}


@contextmanager
def gathers() -> Iterator[list[str]]:
    """In a worker: the labels of what is gathered in this context, one a hop."""
    labels: list[str] = []
    all_gather = Hop.all_gather

    def noting(self: Hop, payload: Tensor, label: str, out: Tensor | None = None) -> Tensor:
        labels.append(label)
        return all_gather(self, payload, label, out)

    with patch.object(Hop, "all_gather", noting):
        yield labels


# ---- bytes


def sent_in_steps(scope: str) -> tuple[int, int, int, list[tuple[Wiretap, dict[str, int]]]]:
    """In a worker: the size of a base under no FSDP, as reported and held, and what three backwards gather of it."""
    net = lora.make_net(**LARGE)
    parameters = sum(p.numel() for p in net.parameters() if p.dim() == 2 and not p.requires_grad)
    report = quantize_frozen_params(net, Int8(256), placement=scope, gpus_per_node=2)
    sent = [sent_in(lambda: models.loss_of(net, models.batch(0, 0)).backward(), net, 2) for _ in range(3)]
    held = sum(unit.nbytes for unit in {weight.holder for _, _, weight in frozen_modules(net)})
    return parameters, report.bytes_after, held, [(tap, counted["gather"]) for tap, counted in sent]


@pytest.mark.parametrize(("scope", "share"), SHARES.items())
def test_a_base_takes_its_scopes_share_and_crosses_nodes_once(
    pool: Callable[[int], Pool], scope: str, share: float
) -> None:
    for parameters, reported, held, ((first, counted), *others) in pool(4).run(sent_in_steps, scope):
        assert parameters * share < reported <= 1.02 * parameters * share
        # Under G what the first gather leaves in each node replaces the shard.
        assert held == (2 * reported if scope == "G" else reported)
        assert first.total("inter") == counted["inter"]
        if scope == "G":
            assert parameters / 4 < counted["inter"] <= 1.02 * parameters / 4
        else:
            assert counted["inter"] == 0
        for tap, counted in others:
            assert tap.total("inter") == counted["inter"] == 0
            assert tap.total("intra") == counted["intra"]
            # Each rank sends its half at most twice, once for the forward and once for the backward.
            assert (counted["intra"] > 0) == (scope != "N")
            assert counted["intra"] <= 2 * 1.02 * parameters / 2


def large_floats() -> list[int]:
    """In a worker: sizes of what is alive in floating point and as large as the base's largest weights."""
    tensors = [t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter) and t.is_floating_point()]
    largest = LARGE["width"] * LARGE["vocabulary"]
    return [t.numel() for t in tensors if t.numel() >= largest and t.untyped_storage().nbytes() > 0]


def under_a_strategy(adapter: Adapter, scope: str) -> dict[str, Any]:
    """In a worker: what three steps under a strategy that quantizes send, gather and keep."""
    net = lora.make_net(**LARGE)
    strategy = Strategy(f"{scope}GG", weights=Int8(256), frozen=Int8(256), gpus_per_node=2)
    model = adapter.shard(net, Case(), strategy)
    optimizer = models.make_optimizer("sgd", [p for p in model.parameters() if p.requires_grad])
    base = next(iter(frozen_modules(model)))[2].base
    found: dict[str, Any] = {"sent": [], "dense": []}
    gc.collect()
    before = len(large_floats())

    def step() -> None:
        loss = models.loss_of(model, models.batch(len(found["sent"]), 0))
        found["dense"] += large_floats()[before:]
        loss.backward()
        gc.collect()
        found["dense"] += large_floats()[before:]
        found["gradients"] = [n for n, p in model.named_parameters() if not p.requires_grad and p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        crossed = base.traffic.sent.get(("gather", "inter"), 0)
        with gathers() as labels:
            tap, _ = sent_in(step, model, 2)
        crossed = base.traffic.sent.get(("gather", "inter"), 0) - crossed
        found["sent"].append((crossed, tap.total("inter", "all_gather")))
    of_base = sum(label.startswith("frozen ") and "frozen of" not in label for label in labels)
    return found | {"gathers of the base": of_base, "gathers": len(labels)}


@over_each(adapter=ADAPTERS, scope=list(SHARES))
def test_a_strategy_gathers_a_unit_once_a_pass_and_keeps_no_copy_in_full_precision(
    pool: Callable[[int], Pool], adapter: Adapter, scope: str
) -> None:
    parameters = sum(p.numel() for p in models.Net(**LARGE).parameters() if p.dim() == 2)
    blocks, others = LARGE["blocks"], 2  # embedding and head
    for found in pool(4).run(under_a_strategy, adapter, scope):
        assert (found["dense"], found["gradients"]) == ([], [])
        (first, _), *later = found["sent"]
        assert (first > 0) == (scope == "G")
        for of_base, of_all in later:
            assert of_base == 0
            assert 0 < of_all < 0.05 * parameters  # the adapters', and what else FSDP has
        of_base, of_all = found["gathers of the base"], found["gathers"]
        assert of_base == 0 if scope == "N" else blocks <= of_base <= 2 * (blocks + others)
        # A unit of adapters takes two hops in the forward and one in the backward, and FSDP1 has a unit of what else
        # is frozen (norms, biases), whose secondary shard stays: two in all. Four adapters a block don't count.
        if scope == "I":
            assert of_all - of_base <= blocks * (3 + 2) + 4


def unit_labels(adapter: Adapter) -> list[tuple[str, int]]:
    """In a worker: units, and how many weights each has, of a model that is wrapped once, inside of another."""
    outer = nn.Sequential(lora.make_net())
    quantize_frozen_params(outer, gpus_per_node=2)
    outer[0] = adapter.shard(outer[0], Case(wrap_blocks=False), Strategy(gpus_per_node=2))
    models.loss_of(outer[0], models.batch(0, 0))
    (base,) = FrozenBase.below(outer)
    return [(unit.label, len(unit.weights)) for unit in base.units]


@over_adapters
def test_layers_of_a_model_that_is_wrapped_once_are_units_of_the_base(
    pool: Callable[[int], Pool], adapter: Adapter
) -> None:
    for labels in pool(2).run(unit_labels, adapter):
        assert sorted(labels) == [("frozen 0", 2), *((f"frozen 0.blocks.{index}", 2) for index in range(3))]


def test_traffic_counts_a_base_without_fsdp() -> None:
    net = nn.Sequential(nn.Linear(64, 64)).requires_grad_(False)
    quantize_frozen_params(net)
    assert traffic(net)["gather"] == {"inter": 0, "intra": 0}


# ---- launches: on a GPU a step of LoRA waits for the CPU if a weight takes more than a decode and little beside

CODECS = [Int8(256), Int4(32), NF4(64), NF4(4096)]  # the last one's chunks are longer than their weights
DECODES = {"dequantize_rows": dequantize_rows, "dequantize_nf4_rows": dequantize_nf4_rows}
on_cpus = pytest.mark.skipif(torch.cuda.is_available(), reason="counts decodes in the backend of CPUs")


class Launches(TorchDispatchMode):
    """Counts operations, but those of a decode as one."""

    def __init__(self) -> None:
        super().__init__()
        self.decodes, self.operations = 0, Counter[str]()
        self._decodes = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        if not self._decodes:
            self.operations[str(func)] += 1
        return func(*args, **kwargs or {})

    def counting(self, prepare: Callable[..., Callable[..., None]]) -> Callable[..., Callable[..., None]]:
        """Return a backend's function that prepares a decode, whose calls are counted."""

        def prepared(*sizes: Any) -> Callable[..., None]:
            decode = prepare(*sizes)

            def counted(payload: Tensor, out: Tensor) -> None:
                self.decodes += 1
                self._decodes = True
                decode(payload, out)
                self._decodes = False

            return counted

        return prepared


@contextmanager
def counted() -> Iterator[Launches]:
    """Count what is launched in this context; ops prepare their calls anew, before and after."""
    launches = Launches()
    for op in DECODES.values():
        op._prepared.clear()
    with patch.multiple(reference, **{name: launches.counting(getattr(reference, name)) for name in DECODES}), launches:
        yield launches
    for op in DECODES.values():
        op._prepared.clear()


def adapted(adapter: Adapter, codec: Codec, checkpointing: str) -> Any:
    """In a worker: a Llama of two layers on a base that two ranks share."""
    model = llama.adapt(llama.make_base(llama.ADAPTED), {"a": "lora"})
    if checkpointing != "off":
        options = {"use_reentrant": checkpointing == "reentrant"}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        model.enable_input_require_grads()
    quantize_frozen_params(model, codec, gpus_per_node=2)
    # FullyShardedDataParallel takes reentrant checkpoints inside of what it wraps only if each is in a unit of its own.
    return llama.shard(adapter, model, Strategy.zeropp(gpus_per_node=2), by_layer=checkpointing == "reentrant")


def step_of(model: Any) -> None:
    """In a worker: a forward and a backward."""
    llama.loss_of(model, llama.tokens(0)).backward()
    model.zero_grad()


def launched_in_a_step(adapter: Adapter, codec: Codec, checkpointing: str) -> tuple[Any, ...]:
    """In a worker: the units that a warm step gathers, decodes and uses of weights, the weights, and a forward's."""
    model = adapted(adapter, codec, checkpointing.removeprefix("compiled "))
    for layer in llama.layers_of(model) if checkpointing.startswith("compiled") else []:
        layer.compile(backend="aot_eager")  # others build code, which takes long and launches the same
    for _ in range(2):
        step_of(model)
    (base,) = FrozenBase.below(model)
    uses: list[FrozenWeight] = []
    dense = FrozenWeight.dense

    def using(self: FrozenWeight, *args: Any) -> Tensor:
        uses.append(self)
        return dense(self, *args)

    with gathers() as labels, patch.object(FrozenWeight, "dense", using), counted() as launches:
        step_of(model)
    for _ in range(3):
        with gathers() as of_forward:
            llama.logits_of(model)
    units = {unit.label for unit in base.units}
    of_step, of_forward = ([label for label in each if label in units] for each in (labels, of_forward))
    return of_step, launches.decodes, len(uses), len(base.weights), sorted(of_forward)


LAUNCHES = [
    (ADAPTERS[0], Int8(256), "off"),
    (ADAPTERS[1], Int4(32), "reentrant"),
    (ADAPTERS[0], NF4(64), "no_reentrant"),
    (ADAPTERS[1], NF4(4096), "off"),
    pytest.param(ADAPTERS[0], NF4(4096), "compiled no_reentrant", marks=pytest.mark.wide),
    pytest.param(ADAPTERS[1], NF4(64), "compiled no_reentrant", marks=pytest.mark.wide),
]


@on_cpus
@pytest.mark.parametrize(("adapter", "codec", "checkpointing"), LAUNCHES, ids=str)
def test_one_gather_a_unit_and_pass_and_one_decode_a_use(
    pool: Callable[[int], Pool], adapter: Adapter, codec: Codec, checkpointing: str
) -> None:
    for labels, decodes, uses, weights, of_forward in pool(2).run(launched_in_a_step, adapter, codec, checkpointing):
        # Embedding, two layers, head. The forward's last two are still there when the backward comes to them, and so
        # is a layer that has just been recomputed. What remains are two gathers in each direction.
        assert len(labels) == 4, labels
        assert decodes == uses
        assert uses <= weights * (2 if checkpointing == "off" else 3)
        assert len(of_forward) == len(set(of_forward)) == 4  # in a row of forwards


def operations_of_linears() -> list[tuple[Counter[str], Counter[str], int]]:
    """In a worker: operations of a forward and a backward of a frozen layer, and of torch's own; and decodes."""
    results = []
    for codec in CODECS:
        for shape in ((64, 64), (37, 65)):
            torch.manual_seed(0)
            plain = nn.Linear(*shape, bias=False).requires_grad_(False)
            frozen = nn.Linear(*shape, bias=False).requires_grad_(False)
            quantize_frozen_params(frozen, codec, gpus_per_node=2, min_numel=1)
            x = torch.randn(2, 3, shape[0], requires_grad=True)
            found = []
            for layer in (frozen, plain):
                layer(x).sum().backward()
                with counted() as launches:
                    layer(x).sum().backward()
                found.append(launches)
            results.append((found[0].operations, found[1].operations, found[0].decodes))
    return results


@on_cpus
def test_a_linear_layer_allocates_and_decodes_beside_what_torch_does(pool: Callable[[int], Pool]) -> None:
    for ours, torchs, decodes in chain(*pool(2).run(operations_of_linears)):
        assert decodes == 2  # forward and backward
        more = {name: count for name, count in (ours - torchs).items() if "empty" not in name}
        assert (ours - torchs)["aten.empty.memory_format"] == 2
        # Padding is cut off by views.
        views = {"aten.slice.Tensor", "aten.view.default", "aten._unsafe_view.default", "aten.detach.default"}
        assert set(more) <= views, more


@pytest.mark.parametrize("codec", [NF4(64), Int8(64)], ids=str)
def test_a_base_that_is_prepared_has_the_levels_on_its_device(codec: Codec) -> None:
    levels_on.cache_clear()
    net = lora.make_net(**LARGE)
    quantize_frozen_params(net, codec)
    for base in FrozenBase.below(net):
        base.prepare()
    copies = [levels_on.cache_info().misses]
    models.loss_of(net, models.batch(0, 0, rank=0)).backward()
    copies.append(levels_on.cache_info().misses)
    assert copies == [int(isinstance(codec, NF4))] * 2  # so that no forward waits for a copy


def test_levels_are_those_of_the_paper_whatever_mode_asks_first() -> None:
    levels_on.cache_clear()
    with torch.inference_mode():
        levels = levels_on(torch.device("cpu"))
    assert not levels.is_inference()
    torch.testing.assert_close(levels, torch.tensor(LEVELS), rtol=0, atol=0)


# ---- a rank that reads a quantized checkpoint needs memory for its shard and two tensors

WIDTH = 8192
"""Of weights: 32 of them are two gigabytes in fp8."""


def _octets(*shape: int, most: int = 255) -> Tensor:
    """Random bytes: any are codes."""
    return torch.randint(0, most + 1, shape, dtype=torch.uint8)


def _scales(*shape: int) -> Tensor:
    return (torch.rand(shape) + 0.5).half()


FORMATS: dict[str, Callable[[], dict[str, Tensor]]] = {
    "fp8": lambda: {
        "weight": _octets(WIDTH, WIDTH, most=0x7E).view(torch.float8_e4m3fn),
        "weight_scale_inv": _scales(WIDTH // 128, WIDTH // 128),
    },
    "gptq": lambda: {
        "qweight": _octets(WIDTH // 8, 4 * WIDTH).view(torch.int32),
        "qzeros": _octets(WIDTH // 128, WIDTH // 2).view(torch.int32),
        "scales": _scales(WIDTH // 128, WIDTH),
        "g_idx": (torch.arange(WIDTH) // 128).int()[torch.randperm(WIDTH)],
    },
    "mxfp4": lambda: {  # of a stack of eight matrices
        "weight_blocks": _octets(8, WIDTH, WIDTH // 8 // 32, 16),
        "weight_scales": _octets(8, WIDTH, WIDTH // 8 // 32, most=7) + 118,
    },
}
"""For methods of quantization, random tensors of a weight of as many values as a square matrix has."""


class Stack(nn.Module):
    """A stack of eight matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, WIDTH // 8, WIDTH, dtype=torch.bfloat16))


def memory() -> int:
    """Bytes of this process that no file backs: what pages of files take can be dropped at any time."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon")


def peak(folder: str, method: str, codec: Any, layers: int) -> tuple[int, int]:
    """In a worker: how much its memory grows at most while it reads, and the bytes of its shard."""

    def make() -> nn.Module:
        return Stack() if method == "mxfp4" else nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)

    with torch.device("meta"):
        model = nn.Sequential(*(make() for _ in range(layers)))
    model.requires_grad_(False)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # or memory that other tests have freed would be used again, uncounted
    before, highest, done = memory(), 0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.wait(0.002):
            highest = max(highest, memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        report = quantize_frozen_params(model, codec, checkpoint=folder, gpus_per_node=4)
    finally:
        done.set()
        watcher.join()
    return max(highest, memory()) - before, report.bytes_after


@pytest.mark.slow
# CPUs take minutes to encode as much as two gigabytes.
@pytest.mark.parametrize(("codec", "layers"), [("as stored", 32), (Int8(256), 4)], ids=str)
@pytest.mark.parametrize("method", FORMATS)
def test_the_peak_is_the_shard_and_two_tensors(
    pool: Callable[[int], Pool], tmp_path: Path, method: str, codec: Any, layers: int
) -> None:
    tensors, files = FORMATS[method](), {}
    for layer in range(layers):
        named = {f"{layer}.{name}": tensor for name, tensor in tensors.items()}
        save_file(named, tmp_path / f"{layer}.safetensors")
        files |= dict.fromkeys(named, f"{layer}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": method}}))
    share = 1.0 if codec != "as stored" or method == "fp8" else 0.5
    for grown, shard in pool(4).run(peak, str(tmp_path), method, codec, layers):
        assert 0.24 * WIDTH**2 * layers * share < shard < 0.29 * WIDTH**2 * layers * share
        assert grown <= shard + 2 * 2 * WIDTH**2  # two tensors in bf16
