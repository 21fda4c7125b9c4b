"""Elastic nodes: what is refused, and how they are written in a configuration."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fsdp_zpp import Elastic, LocalSteps, Strategy


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_nodes": 0}, ValueError, "min_nodes must be 1 or more and max_nodes no fewer, got min_nodes=1 and max"),
        ({"max_nodes": 2, "min_nodes": 3}, ValueError, "min_nodes=3 and max_nodes=2"),
        ({"max_nodes": 2.0}, TypeError, "max_nodes must be an int of 1 or more nodes, got 2.0"),
        ({"max_nodes": True}, TypeError, "got True"),
        ({"max_nodes": 2, "endpoint": "login1"}, ValueError, "endpoint must be host:port such as 'login1:29400'"),
        ({"max_nodes": 2, "endpoint": ":29400"}, ValueError, "got ':29400'"),
        ({"max_nodes": 2, "endpoint": "login1:0"}, ValueError, "got 'login1:0'"),
        ({"max_nodes": 2, "endpoint": 29400}, TypeError, "endpoint must be a text such as"),
        ({"max_nodes": 2, "run_id": ""}, TypeError, "run_id must be a text that is not empty, got ''"),
        ({"max_nodes": 2, "timeout": 0}, ValueError, "timeout must be a number of seconds above 0, got 0"),
        ({"max_nodes": 2, "heartbeat": "1"}, ValueError, "heartbeat must be a number of seconds above 0, got '1'"),
        ({"max_nodes": 2, "last_call": 1}, ValueError, "last_call must be a number of seconds above 1, got 1"),
        ({"max_nodes": 2, "join_timeout": float("inf")}, ValueError, "join_timeout must be .* got inf"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Elastic(**arguments)


def test_local_steps_refuse_what_elastic_nodes_cannot_do() -> None:
    with pytest.raises(ValueError, match=r"overlap=2 leaves an exchange under way .*: pass overlap=0"):
        LocalSteps(overlap=2, elastic=Elastic(2))
    for name, value in {"start": 5, "stop": 9, "moments_every": 3}.items():
        with pytest.raises(ValueError, match=f"elastic nodes do not support {name}={value!r}, .*: leave it out"):
            LocalSteps(elastic=Elastic(2), **{name: value})
    with pytest.raises(TypeError, match=r"elastic must be Elastic\(...\) or None, got 2"):
        LocalSteps(elastic=2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="elastic is an argument of LocalSteps, too"):
        Strategy.diloco(elastic=Elastic(2), local_steps=LocalSteps())


def test_the_endpoint_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FSDP_ZPP_ENDPOINT", raising=False)
    with pytest.raises(ValueError, match=r"pass Elastic.endpoint='host:port'. or set FSDP_ZPP_ENDPOINT"):
        Elastic(2).address()
    monkeypatch.setenv("FSDP_ZPP_ENDPOINT", "login1:29400")
    assert Elastic(2).address() == ("login1", 29400)
    assert Elastic(2, endpoint="[::1]:5").address() == ("::1", 5)


def test_it_is_written_and_read() -> None:
    strategy = Strategy.diloco(8, Elastic(4, min_nodes=2, endpoint="login1:29400", timeout=12.5))
    written = json.loads(json.dumps(strategy.to_dict()))
    assert Strategy.from_dict(written) == strategy
    assert len({strategy, Strategy.from_dict(written)}) == 1
    short = {"preset": "diloco", "local_steps": {"every": 8, "elastic": {"max_nodes": 4}}}
    assert Strategy.from_dict(short) == Strategy.diloco(8, Elastic(4))
    assert Strategy.from_dict({"preset": "diloco", "local_steps": {"elastic": False}}) == Strategy.diloco()


@pytest.mark.parametrize(
    ("elastic", "message"),
    [
        ({"max_node": 4}, "local_steps.elastic.max_node: unknown key; did you mean local_steps.elastic.max_nodes?"),
        ({"max_nodes": 0}, "local_steps.elastic: min_nodes must be"),
        (True, "local_steps.elastic: must be false or a mapping with max_nodes"),
        (4, "local_steps.elastic: must be true, false or a mapping of Elastic's arguments, got 4"),
    ],
)
def test_errors_of_a_configuration_name_the_key(elastic: object, message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        Strategy.from_dict({"preset": "diloco", "local_steps": {"elastic": elastic}})
    assert message in str(error.value)


def test_it_is_shown() -> None:
    assert str(LocalSteps(elastic=Elastic(4, min_nodes=2))).endswith(", among 2 to 4 nodes that come and go")
