"""Words for the names of configurations, for legends of figures; tables have the names.

A name of a strategy is one that benchmarks/step knows (labels.py); those of the studies of the loss are codecs of
gradients or local steps (benchmarks/loss/tables.py).
"""

from __future__ import annotations

import re

from labels import label

_CODECS = {
    "full_shard": "full precision",
    "int8": "8 bits",
    "int4": "4 bits",
    "int4c": "4 bits",
    "int4x2": "4 bits",
    "int2": "2 bits",
    "none": "full precision",
    "topk": "the largest values",
}
"""Names of what is sent. Blocks and hops are those of a family, which a figure has in its title."""
_FEEDBACK = {
    "loco": "LoCo",
    "loco-beta0": "Classical feedback",
    "hadamard": "Hadamard transform",
    "stochastic": "Random rounding",
}
_CHANGES = {
    "at-once": "exchanged at once",
    "momentum-auto": "momentum auto",
    "overlap": "overlap {}",
    "mix": "mix {}",
    "outer": "outer rate {}",
    "momentum": "momentum {}",
    "start": "{} synchronous steps first",
    "moments": "moments every {}",
}


def in_words(name: str) -> str:
    """Return what a configuration's name means, such as "4 bits, error feedback, exchanged at once".

    Args:
        name: Name of a strategy, or of a configuration of a study; of local steps, with ``local32:`` or without.

    Raises:
        ValueError: If it has a part that is not known.
    """
    weights = "8-bit weights, " if name.startswith("w8:") else ""
    sent, *changes = name.removeprefix("w8:").split(":")
    exchanged = re.fullmatch(r"local([\d-]+)", sent)
    if exchanged:
        sent, *changes = changes
    codec, _, feedback = sent.partition("+")
    is_local = exchanged or changes or codec in ("none", "topk")
    if codec not in _CODECS or (codec == "full_shard" and not weights):
        return label(name)
    words = [_CODECS[codec]]
    if feedback:
        words.append("error feedback" if is_local else _FEEDBACK[feedback])
    words += map(_change, changes)
    if exchanged:
        words.append(f"every {exchanged[1]} steps")
    return weights + ", ".join(words)


def _change(change: str) -> str:
    """Return what a change of local steps means."""
    word = change if change in _CHANGES else change.rstrip("0123456789.")
    if word not in _CHANGES:
        raise ValueError(f"{change!r} is no known change of a configuration; known are {', '.join(_CHANGES)}")
    return _CHANGES[word].format(change.removeprefix(word))
