"""Typical GPUs, the links between them, and networks: figures of vendors' data sheets, by name.

They are peaks. A GPU computes at a part of its peak, and collectives reach a part of a link's: see ``hardware``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from fsdp_zpp.suggestions import did_you_mean


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    Attributes:
        memory: GiB of memory, which vendors write as GB.
        tflops: Dense TFLOP/s in bf16 with fp32 accumulation, at its peak.
        link: Name of the link to other GPUs of a usual machine.
        host: Name of the link to the host's memory.
        source: Where the figures are from.
    """

    memory: float
    tflops: float
    link: str
    host: str
    source: str


@dataclass(frozen=True)
class Link:
    """A link between the GPUs of a machine, or of a GPU to the host's memory.

    Attributes:
        gbps: Gbit/s that one GPU sends, at the link's peak, in one direction.
        fast: Whether it is NVLink, over which codecs don't pay.
        source: Where the figure is from.
    """

    gbps: float
    fast: bool
    source: str


@dataclass(frozen=True)
class Network:
    """A network card of a node.

    Attributes:
        gbps: Gbit/s that it sends, at line rate.
        source: Where the figure is from.
    """

    gbps: float
    source: str


_AMPERE = "NVIDIA A100 Tensor Core GPU data sheet (2021): without sparsity"
_HOPPER = "NVIDIA H100 Tensor Core GPU data sheet (2023): half of the figure with sparsity"
_GA102 = "NVIDIA Ampere GA102 GPU Architecture whitepaper, appendix: FP32 accumulation, without sparsity"
_ADA = "NVIDIA Ada GPU Architecture whitepaper, appendix: FP32 accumulation, without sparsity"

GPUS: Mapping[str, Gpu] = {
    "a10": Gpu(24, 125, "pcie4", "pcie4", "NVIDIA A10 data sheet (2021): without sparsity"),
    "a100": Gpu(80, 312, "nvlink3", "pcie4", _AMPERE),
    "a100-40gb": Gpu(40, 312, "nvlink3", "pcie4", _AMPERE),
    "a100-pcie": Gpu(80, 312, "pcie4", "pcie4", _AMPERE),
    "a6000": Gpu(48, 154.8, "pcie4", "pcie4", _GA102),
    "b200": Gpu(180, 2250, "nvlink5", "pcie5", "NVIDIA HGX B200 data sheet (2025): half of the figure with sparsity"),
    "h100": Gpu(80, 989, "nvlink4", "pcie5", _HOPPER),
    "h100-pcie": Gpu(80, 756, "pcie5", "pcie5", _HOPPER),
    "h200": Gpu(
        140, 989, "nvlink4", "pcie5", "NVIDIA H200 Tensor Core GPU data sheet (2024): half of the figure with sparsity"
    ),
    "l4": Gpu(
        24, 121, "pcie4", "pcie4", "NVIDIA L4 Tensor Core GPU data sheet (2023): half of the figure with sparsity"
    ),
    "l40s": Gpu(48, 362.05, "pcie4", "pcie4", "NVIDIA L40S data sheet (2023): without sparsity"),
    "rtx3090": Gpu(24, 71, "pcie4", "pcie4", _GA102),
    "rtx4090": Gpu(24, 165.2, "pcie4", "pcie4", _ADA),
    "rtx5090": Gpu(
        32,
        209.5,
        "pcie5",
        "pcie5",
        "NVIDIA RTX Blackwell GPU Architecture whitepaper: FP32 accumulation, without sparsity",
    ),
}

_PCIE = "PCI Express base specification: 16 lanes, 128b/130b encoding, one direction"
_HALF = "half of the total of both directions"

LINKS: Mapping[str, Link] = {
    "nvlink3": Link(2400, True, f"NVIDIA A100 data sheet: {_HALF}, 600 GB/s"),
    "nvlink4": Link(3600, True, f"NVIDIA H100 data sheet: {_HALF}, 900 GB/s"),
    "nvlink5": Link(7200, True, f"NVIDIA HGX B200 data sheet: {_HALF}, 1.8 TB/s"),
    "nvlink-bridge": Link(450, True, f"NVIDIA RTX A6000 data sheet: {_HALF}, 112.5 GB/s, between two GPUs"),
    "pcie3": Link(126, False, _PCIE),
    "pcie4": Link(252, False, _PCIE),
    "pcie5": Link(504, False, _PCIE),
}

_ETHERNET = "IEEE 802.3, by its name"
_INFINIBAND = "InfiniBand Trade Association roadmap: four lanes"

NETWORKS: Mapping[str, Network] = {
    **{f"{rate}gbe": Network(float(rate), _ETHERNET) for rate in ("1", "2.5", "10", "25", "40", "50", "100", "200")},
    "400gbe": Network(400, _ETHERNET),
    "ib-edr": Network(100, _INFINIBAND),
    "ib-hdr": Network(200, _INFINIBAND),
    "ib-ndr": Network(400, _INFINIBAND),
    "ib-xdr": Network(800, _INFINIBAND),
}

T = TypeVar("T")


def gpu_named(name: str) -> Gpu:
    """Return a GPU by its name.

    Raises:
        ValueError: If there is none of that name.
    """
    return _named("gpu", GPUS, name)


def link_named(name: str) -> Link:
    """Return a link by its name; raise like :func:`gpu_named`."""
    return _named("link", LINKS, name)


def network_named(name: str) -> Network:
    """Return a node's network by the name of its card, after the number of cards if it has several: ``8xib-ndr``.

    Raises:
        ValueError: If there is none of that name.
    """
    several = re.fullmatch(r"([1-9]\d*)x(.+)", name)
    if several is None:
        return _named("net", NETWORKS, name)
    card = _named("net", NETWORKS, several[2])
    return replace(card, gbps=int(several[1]) * card.gbps)


def _named(what: str, known: Mapping[str, T], name: str) -> T:
    if name in known:
        return known[name]
    hint = f"{asked} " if (asked := did_you_mean(name, known)) else ""
    raise ValueError(f"{what} {name!r} is not in the catalog; {hint}allowed are {', '.join(known)}, or give numbers")
