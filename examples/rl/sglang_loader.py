"""Loads updates of fsdp_zpp in SGLang's workers, as a custom weight loader. For SGLang 0.5.23.

    PYTHONPATH=examples/rl python -m sglang.launch_server --model path/or/name \\
        --custom-weight-loader sglang_loader.load_updates

The trainer sends them with ``/update_weights_from_tensor``; see ``send_changes`` in sglang_trainer.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from fsdp_zpp import DeltaReceiver, WeightUpdate

LOADER = "sglang_loader.load_updates"
"""The loader's name, for the server's option and for requests."""

_receivers: WeakKeyDictionary[nn.Module, DeltaReceiver] = WeakKeyDictionary()


def load_updates(model: nn.Module, named: Iterable[tuple[str, Tensor]]) -> None:
    """Apply updates to a copy of the weights in host memory, and load the tensors that they concern.

    Args:
        model: SGLang's model.
        named: Headers of updates, where SGLang has names of tensors, and their data.
    """
    receiver = _receivers.setdefault(model, DeltaReceiver(device="cpu"))
    model.load_weights(receiver.updated(WeightUpdate.from_header(header, data) for header, data in named))
