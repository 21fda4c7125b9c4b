"""The side of an inference engine: tensors that follow a trainer's weights. It needs neither ranks nor the trainer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from fsdp_zpp.codecs.weight_changes import add_changes

from .weight_update import WeightUpdate

_ALIGNMENT = 16


class OutOfSyncError(RuntimeError):
    """Changes were made since a version of a tensor that this receiver does not hold; it needs whole tensors."""


class DeltaReceiver:
    """Follows the weights that a trainer sends with ``gathered_weights(model, since=token)``, bit for bit.

    It holds a copy of each tensor, in the dtype in which it is sent, to which changes are added; or has the caller hold
    it, see :meth:`apply`. Several receivers may follow one token, if each gets all of its updates.

    Args:
        device: Where the copies are; None means where updates arrive. Changes are decoded on an accelerator if either
            the copies or the updates are there.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._device = None if device is None else torch.device(device)
        self._tensors: dict[str, Tensor] = {}
        self._versions: dict[str, tuple[str, int]] = {}

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Return the copies by name, for engines that must load all weights at once. Do not write to them."""
        return MappingProxyType(self._tensors)

    @property
    def version(self) -> int:
        """Return the number of the last pass that has sent something, 0 before the first."""
        return max((version for _, version in self._versions.values()), default=0)

    def updated(self, updates: Iterable[WeightUpdate]) -> Iterator[tuple[str, Tensor]]:
        """Apply updates one by one, and yield (name, tensor) as ``load_weights`` of engines takes them.

        The tensors are the receiver's own copies: load them, but do not write to them.

        Raises:
            OutOfSyncError: As :meth:`apply`.
        """
        for update in updates:
            yield update.name, self.apply(update)

    @torch.no_grad()
    def apply(self, update: WeightUpdate, into: Tensor | None = None) -> Tensor:
        """Apply an update. One that was applied already, and arrives once more, changes nothing.

        Args:
            update: The update.
            into: The tensor to update in place, of the update's dtype and shape and contiguous, for engines that hold
                tensors as the trainer names them: pass the same at every update, and write nothing else to it. None:
                the receiver's own copy.

        Returns:
            The tensor with its new values: ``into``, or the receiver's own copy, which later updates change.

        Raises:
            OutOfSyncError: If changes were made since another version than the one that is held, because updates were
                missed, or this receiver joined late. Nothing has changed; call ``reset`` of the token on the trainer.
            ValueError: If ``into`` has another dtype or shape, or is not contiguous.
        """
        if into is not None:
            _check_target(update, into)
        held = self._versions.get(update.name)
        target = self._tensors.get(update.name) if into is None else into
        if held == (update.stream, update.version) and target is not None:
            return target
        if update.kind == "whole":
            target = self._replace(update, into)
        else:
            if target is None or held != (update.stream, update.since):
                raise OutOfSyncError(_out_of_sync(update, held, target))
            _add(update, target)
        self._versions[update.name] = (update.stream, update.version)
        return target

    def _replace(self, update: WeightUpdate, into: Tensor | None) -> Tensor:
        if into is None:
            into = self._tensors.get(update.name)
            if into is None or into.dtype != update.dtype or into.shape != update.shape:
                into = torch.empty(update.shape, dtype=update.dtype, device=self._device or update.data.device)
            self._tensors[update.name] = into
        return into.copy_(update.data)


def _add(update: WeightUpdate, target: Tensor) -> None:
    """Add changes to ``target``, on an accelerator if either of both is there: the bits are the same."""
    device = update.data.device if target.device.type == "cpu" else target.device
    payload, values = update.data.to(device), target.to(device)
    if payload.storage_offset() % _ALIGNMENT or payload.data_ptr() % _ALIGNMENT or not payload.is_contiguous():
        payload = payload.clone(memory_format=torch.contiguous_format)
    add_changes(values.view(-1), payload, update.codec())
    if values is not target:
        target.copy_(values)


def _check_target(update: WeightUpdate, into: Tensor) -> None:
    if into.dtype != update.dtype or into.shape != update.shape or not into.is_contiguous():
        raise ValueError(
            f"{update.name} is {update.dtype} of shape {update.shape}, but is to be updated in a tensor of dtype "
            f"{into.dtype}, shape {tuple(into.shape)} and strides {into.stride()}; pass a contiguous one like it, or "
            "let the receiver hold a copy"
        )


def _out_of_sync(update: WeightUpdate, held: tuple[str, int] | None, target: Tensor | None) -> str:
    if held is None or target is None:
        has = "has no version of it"
    elif held[0] != update.stream:
        has = "has what was sent before everything was sent anew, or by another token"
    else:
        has = f"has version {held[1]}"
    return (
        f"version {update.version} of {update.name} changes version {update.since}, but this receiver {has}: it joined "
        "late or has missed updates; call reset() of the trainer's SyncToken, so that the next pass sends whole tensors"
    )
