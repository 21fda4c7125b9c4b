"""The outer optimizer beside torch's SGD, with a momentum that is searched for in between."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from harness.covering import over_each
from harness.outer_fit import correlation_by_search, fitting_by_search
from torch import Tensor

from fsdp_zpp import LocalSteps
from fsdp_zpp.collectives.flat_layout import FlatLayout, Piece
from fsdp_zpp.collectives.outer_optimizer import OuterOptimizer

ROUNDS = 8
LAYOUTS = {
    "one parameter": FlatLayout.dense([Piece(0, "a", 37)]),
    "several": FlatLayout.dense([Piece(0, "a", 37), Piece(1, "b", 1), Piece(2, "c", 64)]),
    "with gaps": FlatLayout.aligned([Piece(0, "a", 37), Piece(1, "b", 12)], ["here", "there"], 32),
}
CONFIGS = {
    "auto": LocalSteps(outer_momentum="auto"),
    "auto, other lr": LocalSteps(outer_momentum="auto", outer_lr=1.1),
    "auto, not Nesterov's": LocalSteps(outer_momentum="auto", nesterov=False),
    "given": LocalSteps(outer_momentum=0.8),
}


def changes(layout: FlatLayout) -> Iterator[Tensor]:
    """Mean changes, which have something in common but at last; zeros where no parameter lies."""
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(layout.numel, generator=generator)
    for round_ in range(ROUNDS):
        change = torch.randn(layout.numel, generator=generator) + (0.8 if round_ < 5 else -0.5) * common
        for start, stop in layout.gaps:
            change[start:stop] = 0
        yield change * 0.9**round_


def started(config: LocalSteps, layout: FlatLayout) -> OuterOptimizer:
    optimizer = OuterOptimizer(config)
    for piece in layout.pieces:
        optimizer.start(piece.name, piece.numel, *[torch.device("cpu")] * 2)
    return optimizer


@over_each(times=2, config=CONFIGS, layout=LAYOUTS, resumes_after=[None, 3])
def test_it_is_sgd_with_a_momentum_that_fits(config: LocalSteps, layout: FlatLayout, resumes_after: int | None) -> None:
    is_auto = config.outer_momentum == "auto"
    optimizer, correlation, used = started(config, layout), 1.0, set()
    weights = torch.nn.Parameter(torch.zeros(layout.numel, dtype=torch.float64))
    sgd = torch.optim.SGD([weights], config.outer_lr, momentum=0.1, nesterov=config.nesterov)
    for round_, change in enumerate(changes(layout)):
        mu = fitting_by_search(config.outer_lr, correlation, config.nesterov) if is_auto else config.outer_momentum
        used.add(round(mu, 3))
        buffer = sgd.state[weights].get("momentum_buffer", torch.zeros_like(weights)).clone()
        sgd.param_groups[0]["momentum"] = mu
        weights.grad = change.double()
        before = weights.detach().clone()
        sgd.step()
        update = optimizer.step(change.clone(), layout)
        assert (update - (weights - before)).abs().max() < 1e-5
        if round_ == resumes_after:
            momentum, fit = optimizer.state_dict()
            optimizer.step(change.clone(), layout)  # what was saved does not change with it
            optimizer = started(config, layout)
            optimizer.load_state_dict(momentum, fit)
        # The step along the change, and what the momentum kept says of changes.
        norm = change.double() @ change.double()
        gain = ((before - weights) @ change.double() / norm).item()
        if round_:
            correlation = correlation_by_search(mu, (buffer @ change.double() / norm).item())
        figures = optimizer.fit(tuple(optimizer.products.tolist()))
        assert figures is not None
        assert (figures.gain, figures.momentum) == (pytest.approx(gain, rel=1e-4), pytest.approx(mu))
        assert figures.correlation == (pytest.approx(correlation, rel=1e-4) if round_ else None)
    assert len(used) >= 3 or not is_auto


@pytest.mark.parametrize("products", [(0.0, 0.0), (1.0, float("inf")), (float("nan"), 1.0)], ids=str)
def test_what_is_not_finite_leaves_the_momentum(products: tuple[float, float]) -> None:
    layout = LAYOUTS["one parameter"]
    optimizer = started(CONFIGS["auto"], layout)
    optimizer.step(torch.ones(37), layout)
    optimizer.fit((0.2, 1.0))
    optimizer.step(torch.ones(37), layout)
    before = optimizer.state_dict()[1]["correlation"]
    assert before < 1  # as it is at first
    assert optimizer.fit(products) is None
    assert optimizer.state_dict()[1]["correlation"] == before


@pytest.mark.parametrize("warms_up", [False, True])
def test_a_resumed_training_takes_the_momentum_that_it_is_given(warms_up: bool) -> None:
    layout, given = LAYOUTS["one parameter"], CONFIGS["given"]
    saved = started(LocalSteps(outer_momentum=0.5), layout)
    saved.step(torch.ones(37), layout)
    resumed = started(given, layout)
    resumed.load_state_dict(*saved.state_dict())
    if warms_up:
        resumed.warm_up({"a": torch.ones(37)})
    else:
        resumed.step(torch.ones(37), layout)
    assert torch.equal(resumed.state_dict()[0]["a"], torch.full((37,), 1.8))


def test_a_rank_without_values_adds_nothing() -> None:
    layout = LAYOUTS["one parameter"]
    optimizer = started(CONFIGS["given"], layout)
    optimizer.step(torch.ones(37), layout)
    assert optimizer.products.tolist() == [0, 37]
    optimizer.clear_products()
    assert optimizer.products.tolist() == [0, 0]
