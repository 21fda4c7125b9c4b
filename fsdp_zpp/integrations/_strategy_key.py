"""The key of a framework's configuration file that names a strategy."""

from __future__ import annotations

from fsdp_zpp.config.strategy import Strategy

KEY = "fsdp_zpp"

NO_DEEPSPEED = "a strategy is for torch's FSDP: leave it out (Strategy.from_deepspeed reads such a file)"
NO_WHOLE_MATRICES = "it works on whole matrices, and a strategy leaves a shard of each on a rank: leave it out"
PACKED_BASE = (
    "training on a base that the framework has packed has not been tried with a strategy, which quantizes one itself: "
    "leave it out, and "
)
NO_PACKED_BASE = f"{PACKED_BASE}write fsdp_zpp: {{preset: mixzpp, frozen: nf4}}"
"""What to do instead of keys that ask for DeepSpeed, for an optimizer of whole matrices, or for a base in few bits."""


def strategy_of(value: object) -> Strategy:
    """Return the strategy that the key ``fsdp_zpp`` stands for.

    Raises:
        ValueError: If ``value`` stands for none; the error names the key.
    """
    try:
        return Strategy.from_dict(value)  # type: ignore[arg-type]  # which it checks
    except (TypeError, ValueError) as error:  # pydantic reports no TypeError
        raise ValueError(f"{KEY}: {error}") from None


def quantizes(strategy: Strategy) -> bool:
    """Return whether a strategy, or one of its overrides, quantizes frozen weights."""
    return any(each.frozen is not None for each in strategy.all_strategies)


def refuse(key: str, value: object, instead: str) -> None:
    """Raise a ValueError that says what to do in place of a key that can't be honoured."""
    raise ValueError(f"{key}: {value!r} can't be combined with fsdp_zpp: {instead}")
