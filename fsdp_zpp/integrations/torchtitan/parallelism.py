"""torchtitan's parallelism section with a strategy in it, and what can't be combined with one."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Annotated

from torchtitan.config import ParallelismConfig, TrainingConfig
from tyro.constructors import PrimitiveConstructorSpec

from fsdp_zpp.config.mapping import PRESETS
from fsdp_zpp.config.strategy import Strategy


def strategy_from_text(text: str) -> Strategy | None:
    """Return the strategy that ``--parallelism.strategy`` stands for.

    Args:
        text: The name of a preset, a JSON mapping as :meth:`Strategy.from_dict` takes it, or ``None``.

    Raises:
        ValueError: If it is none of these; says what is allowed.
    """
    if text == "None":
        return None
    try:
        return Strategy.from_dict(json.loads(text) if text.lstrip().startswith("{") else text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{text!r} is not JSON: {error}") from None
    except TypeError as error:
        raise ValueError(str(error)) from None  # tyro reports no other error as one of the flag


def _text_of(strategy: Strategy | None) -> str:
    return "None" if strategy is None else json.dumps(strategy.to_dict())


_FLAG = PrimitiveConstructorSpec(
    nargs=1,
    metavar=f"{{{','.join(PRESETS)},None}}|JSON",
    instance_from_str=lambda arguments: strategy_from_text(arguments[0]),
    is_instance=lambda value: value is None or isinstance(value, Strategy),
    str_from_instance=lambda strategy: [_text_of(strategy)],
)


@dataclass(kw_only=True, slots=True)
class StrategyParallelism(ParallelismConfig):
    """torchtitan's parallelism section with a strategy.

    Raises:
        TypeError: If ``strategy`` is neither a ``Strategy`` nor None.
        ValueError: If it is None and there is to be a monitor.
    """

    strategy: Annotated[Strategy | None, _FLAG] = None
    """
    Sharding strategy: the name of a preset, or a JSON mapping of its arguments, such as
    '{"preset": "zeropp", "gpus_per_node": 8}'. None is torchtitan's own FSDP or HSDP.
    """

    monitor: bool = False
    """Log what the model communicates in each step, and how long it takes, among torchtitan's metrics."""

    def __post_init__(self) -> None:
        ParallelismConfig.__post_init__(self)  # super() does not work in a dataclass with slots
        if self.strategy is not None:
            _check_type(self.strategy)
        elif self.monitor:
            raise ValueError("parallelism.monitor measures what a strategy sends; set parallelism.strategy, too")

    def to_dict(self) -> dict[str, object]:
        """Return the whole section, in types that JSON has, since torchtitan logs it."""
        section = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return section | {"strategy": None if self.strategy is None else self.strategy.to_dict()}


def check_combination(strategy: Strategy, parallelism: ParallelismConfig, training: TrainingConfig) -> None:
    """Raise if these settings can't be combined with a strategy.

    Raises:
        TypeError: If ``strategy`` is not a :class:`Strategy`: fields of a configuration can be set to anything.
        ValueError: The error names the key, its value, what is allowed, and what to do instead.
    """
    _check_type(strategy)
    alone = "pass --parallelism.strategy None for torchtitan's own FSDP"
    if parallelism.enable_fsdp_symm_mem:
        raise ValueError(
            "parallelism.enable_fsdp_symm_mem is for torch's own collectives, which a strategy replaces; leave it out, "
            f"or {alone}"
        )
    if not training.disable_cuda_graphs:
        raise ValueError(
            "training.disable_cuda_graphs=False would replay the communication of the first micro-batch in all others, "
            "and a strategy's differs between them; set --training.disable_cuda_graphs"
        )
    for part in strategy.all_strategies:
        _check_part(part, parallelism)


def _check_part(strategy: Strategy, parallelism: ParallelismConfig) -> None:
    if parallelism.fsdp_reshard_after_forward == "always" and strategy.parameters == "N":
        raise ValueError(
            f"parallelism.fsdp_reshard_after_forward=always contradicts {strategy.levels!r}, whose parameter "
            "scope N keeps the parameters unsharded until they change; leave it out, or choose parameter scope I or G"
        )
    if strategy.frozen is not None:
        raise ValueError(
            f"parallelism.strategy: frozen={strategy.frozen} quantizes weights when the model is sharded, and "
            "torchtitan loads them afterwards; leave frozen out"
        )


def _check_type(strategy: object) -> None:
    if not isinstance(strategy, Strategy):
        raise TypeError(
            f"parallelism.strategy must be a Strategy or None, got {strategy!r}; for a preset's name or a mapping, "
            "pass Strategy.from_dict(...)"
        )
