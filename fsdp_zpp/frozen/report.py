"""Reports on a quantized base: how many parameters, how many bytes, what stays as it is and why."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from fsdp_zpp.codecs.as_stored import AsStored, codec_of_plain
from fsdp_zpp.codecs.base import Codec

from .placement import Placement

logger = logging.getLogger("fsdp_zpp")

_WHERE = {"N": "replicated on every rank", "I": "sharded inside nodes", "G": "sharded over all ranks"}


@dataclass(frozen=True)
class FrozenReport:
    """A report on what ``quantize_frozen_params`` did.

    Attributes:
        model: The name of the model's class.
        codec: How weights were quantized.
        placement: Which rank holds which chunk of them.
        weights: The number of weights that were quantized, tied ones counted once.
        parameters: The number of their values.
        bytes_before: Bytes of all their values, in the dtype that they had.
        bytes_after: Bytes that this rank keeps of them.
        left: Names of frozen parameters that stay as they are, by the reason.
        parameters_left: The number of values of these parameters.
        stored: The number of weights that were quantized already, and whose codes stay.
    """

    model: str
    codec: Codec
    placement: Placement
    weights: int
    parameters: int
    bytes_before: int
    bytes_after: int
    left: dict[str, tuple[str, ...]]
    parameters_left: int
    stored: int = 0

    def __str__(self) -> str:
        topology = self.placement.mesh.topology
        left = "; ".join(f"{len(names)} {reason} ({names[0]}, ...)" for reason, names in self.left.items())
        return (
            f"{self.model}: frozen base {self._encoded}, {_WHERE[self.placement.scope]} on {topology}: {self.weights} "
            f"weights, {self.parameters:,} parameters, {_size(self.bytes_before)} before, {_size(self.bytes_after)} a "
            f"GPU after; left as they are: {left or 'none'}"
        )

    @property
    def _encoded(self) -> str:
        """Return how weights are encoded, as text."""
        codec = codec_of_plain(self.codec)
        if isinstance(codec, AsStored) or self.stored == self.weights > 0:
            return "as stored"
        return f"as {codec}" + (f", but {self.stored} of {self.weights} weights as stored" if self.stored else "")


def log_report(reports: list[FrozenReport]) -> None:
    """Log reports on parts of a model as one line, on the mesh's first rank."""
    if reports and reports[0].placement.mesh.rank == 0:
        logger.info("%s", merge(reports))


def merge(reports: list[FrozenReport]) -> FrozenReport:
    """Make one report of those on parts of a model, under the name of the last."""
    first, last = reports[0], reports[-1]
    left: dict[str, tuple[str, ...]] = {}
    for report in reports:
        for reason, names in report.left.items():
            left[reason] = (*left.get(reason, ()), *names)
    return FrozenReport(
        last.model,
        first.codec,
        first.placement,
        sum(report.weights for report in reports),
        sum(report.parameters for report in reports),
        sum(report.bytes_before for report in reports),
        sum(report.bytes_after for report in reports),
        left,
        sum(report.parameters_left for report in reports),
        sum(report.stored for report in reports),
    )


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**28 else f"{nbytes / 2**20:.2f} MiB"
