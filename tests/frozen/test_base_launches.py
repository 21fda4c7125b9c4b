"""What a sharded base launches in a step: one gather a unit and pass, one decode a use, and little beside.

On a GPU a step of LoRA waits for the CPU as soon as a weight takes more than that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from harness import llama
from harness.adapter import Adapter
from harness.covering import ADAPTERS, over_pairs
from harness.pool import Pool
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_zpp import NF4, Int4, Int8, Strategy, quantize_frozen_params
from fsdp_zpp.codecs.base import Codec
from fsdp_zpp.collectives.hops import Hop
from fsdp_zpp.frozen.base import FrozenBase
from fsdp_zpp.frozen.weight import FrozenWeight
from fsdp_zpp.kernels import dequantize_nf4_rows, dequantize_rows, reference

CODECS = [Int8(256), Int4(32), NF4(64), NF4(4096)]  # the last one's chunks are longer than their weights
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="counts decodes in the backend of CPUs")
DECODES = {"dequantize_rows": dequantize_rows, "dequantize_nf4_rows": dequantize_nf4_rows}


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


def launched_in_a_step(
    adapter: Adapter, codec: Codec, checkpointing: str, compiled: bool
) -> tuple[list[str], int, int, int]:
    """In a worker: the units that a warm step gathers, its decodes, its uses of weights, and the weights."""
    model = adapted(adapter, codec, checkpointing)
    for layer in llama.layers_of(model) if compiled else []:
        layer.compile()
    for _ in range(2):
        step_of(model)
    (base,) = FrozenBase.below(model)
    gathers: list[str] = []
    uses: list[FrozenWeight] = []
    all_gather, dense = Hop.all_gather, FrozenWeight.dense

    def gathering(self: Hop, payload: Tensor, label: str, out: Tensor | None = None) -> Tensor:
        gathers.append(label)
        return all_gather(self, payload, label, out)

    def using(self: FrozenWeight, *args: Any) -> Tensor:
        uses.append(self)
        return dense(self, *args)

    with patch.object(Hop, "all_gather", gathering), patch.object(FrozenWeight, "dense", using), counted() as launches:
        step_of(model)
    units = {unit.label for unit in base.units}
    return [label for label in gathers if label in units], launches.decodes, len(uses), len(base.weights)


@over_pairs(
    rest=False,
    adapter=ADAPTERS,
    codec=CODECS,
    checkpointing=["off", "reentrant", "no_reentrant"],
    compiled=[False, True],
)
def test_one_gather_a_unit_and_pass_and_one_decode_a_use(
    pool: Callable[[int], Pool], adapter: Adapter, codec: Codec, checkpointing: str, compiled: bool
) -> None:
    for gathers, decodes, uses, weights in pool(2).run(launched_in_a_step, adapter, codec, checkpointing, compiled):
        # Embedding, two layers, head. The forward's last two are still there when the backward comes to them, and so
        # is a layer that has just been recomputed. What remains are two gathers in each direction.
        assert len(gathers) == 4, gathers
        assert decodes == uses
        assert uses <= weights * (2 if checkpointing == "off" else 3)


def operations_of_linears(codec: Codec, shape: tuple[int, int]) -> tuple[Counter[str], Counter[str], int]:
    """In a worker: operations of a forward and a backward of a frozen layer, and of torch's own; and decodes."""
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
    return found[0].operations, found[1].operations, found[0].decodes


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("shape", [(64, 64), (37, 65)], ids=str)
def test_a_linear_layer_allocates_and_decodes_beside_what_torch_does(
    pool: Callable[[int], Pool], codec: Codec, shape: tuple[int, int]
) -> None:
    for ours, torchs, decodes in pool(2).run(operations_of_linears, codec, shape):
        assert decodes == 2  # forward and backward
        more = {name: count for name, count in (ours - torchs).items() if "empty" not in name}
        assert (ours - torchs)["aten.empty.memory_format"] == 2
        # Padding is cut off by views.
        views = {"aten.slice.Tensor", "aten.view.default", "aten._unsafe_view.default", "aten.detach.default"}
        assert set(more) <= views, more
