"""Everything once, in half a minute: both adapters, every codec, every public name. Details are tested elsewhere."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import llama, lora, models
from harness.adapter import STOCK, Adapter, Case, Fsdp1, Fsdp2
from harness.covering import ADAPTERS, over_adapters, over_each
from harness.launch import launch
from harness.pool import Pool
from harness.training import mean_loss, train, trained_weights
from peft import PeftModel
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import ShardingStrategy

import fsdp_zpp
from fsdp_zpp import (
    NF4,
    CodecState,
    Elastic,
    Int2Delta,
    Int3,
    Int4,
    Int4Delta,
    Int8,
    LocalSteps,
    LoCo,
    QuantizedReduceState,
    Strategy,
    agreed_weights,
    clip_grad_norm_,
    count_tokens,
    dequantize_frozen_params,
    end_training,
    exchange_weights,
    gathered_weights,
    invalidate,
    load_frozen_params,
    members,
    plan,
    quantize_frozen_params,
    quantized_reduce_hook,
    save_adapter,
    save_frozen_params,
    traffic,
)
from fsdp_zpp.__main__ import main
from fsdp_zpp.comm.agreement import from_first_rank
from fsdp_zpp.planner.model_size import module_size
from fsdp_zpp.strategy.strategy import LEGAL_LEVELS

pytestmark = pytest.mark.smoke

ELSEWHERE = {"fully_shard", "Codec"}
"""Names that the harness calls (``fully_shard``), and the base of all codecs."""
CLUSTER: dict[str, Any] = {"nodes": 4, "gpus_per_node": 8, "inter_gbps": 100, "intra_gbps": 2400, "gpu_memory": 80}
DEEPSPEED = {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True, "zero_hpz_partition_size": 2}
CODECS = {
    "zeropp": Strategy.zeropp(gpus_per_node=2),
    "loco": Strategy.loco(gpus_per_node=2),
    "loco inside too": Strategy.loco(gpus_per_node=2, error_feedback=LoCo(hops="both", dtype=Int8(64))),
    "int8": Strategy("GGG", weights=Int8(64), gradients=Int8(64), gpus_per_node=2),
    "int4": Strategy("IIG", weights=Int4(32), gradients=Int4(32), intra_gradients=None, gpus_per_node=2),
    "int3": Strategy.zeropp(gradients=Int3(), gpus_per_node=2),
    "mixzpp": Strategy.mixzpp(gpus_per_node=2),
    "delta": Strategy.zeropp(weights=Int4Delta(), gpus_per_node=2),
    "delta in two bits": Strategy.zeropp(weights=Int2Delta(), gpus_per_node=2),
    "of deepspeed": Strategy.from_deepspeed({"zero_optimization": DEEPSPEED}),
}
FROZEN = {"int8": Int8(64), "int4": Int4(32), "nf4": NF4(64)}


def test_every_public_name_is_here() -> None:
    source = Path(__file__).read_text()
    assert [name for name in fsdp_zpp.__all__ if not re.search(rf"\b{name}\b", source)] == []


@over_each(rest=False, adapter=ADAPTERS, scopes=LEGAL_LEVELS)
def test_scopes(pool: Callable[[int], Pool], adapter: Adapter, scopes: str) -> None:
    case = Case(model=(("blocks", 1),), steps=2, micro_batches=2)
    ours = pool(4).run(trained_weights, adapter, case, Strategy(scopes, gpus_per_node=2))
    assert max(map(models.distance, ours, pool(4).once(trained_weights, adapter, case, STOCK))) <= 1e-6


def losses(adapter: Adapter, strategy: Strategy) -> tuple[float, float]:
    """In a worker: the loss after three steps and an announced write, and stock's; an engine gets all weights."""
    model, stock = adapter.make(Case(), strategy), adapter.make(Case(), STOCK)
    for each in (model, stock):
        train(adapter, each, Case(steps=3))
    invalidate(model)
    assert traffic(model)["gather"]["inter"] > 0
    assert "head.weight" in dict(gathered_weights(model))
    return mean_loss(model, 9), mean_loss(stock, 9)


@pytest.mark.parametrize("name", CODECS)
@over_adapters
def test_codecs(pool: Callable[[int], Pool], adapter: Adapter, name: str) -> None:
    for mean, stock in pool(4).run(losses, adapter, CODECS[name]):
        assert mean == pytest.approx(stock, rel=0.02)


def clipped() -> float:
    """In a worker: the norm that is left of the gradients of parts on different meshes."""
    net = models.make_net()
    for block in net.blocks:
        Fsdp2().apply(block, CODECS["int8"])
    Fsdp2().apply(net, Strategy("III", gpus_per_node=2))
    models.loss_of(net, models.batch(0, 0)).backward()
    clip_grad_norm_(net.parameters(), 0.5)
    return float(clip_grad_norm_(net.parameters(), 1.0))


def test_clipping(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(clipped) == [pytest.approx(0.5, rel=1e-5)] * 4  # torch divides by the norm plus 1e-6


def exchanged(adapter: Adapter, local_steps: LocalSteps) -> tuple[list[Any], list[Any]]:
    """In a worker: a weight of two nodes that have trained on their own, what they agreed on before, and after."""
    model = adapter.make(Case(), Strategy.diloco(local_steps=local_steps, gpus_per_node=1))
    train(adapter, model, Case(steps=3))
    with agreed_weights(model):
        agreed = adapter.full_weights(model)["head.weight"]
    own = adapter.full_weights(model)["head.weight"]
    exchange_weights(model)
    return [own.tolist(), agreed.tolist()], adapter.full_weights(model)["head.weight"].tolist()


@pytest.mark.parametrize("local_steps", [LocalSteps(2), LocalSteps(2, error_feedback=LoCo())], ids=str)
@over_adapters
def test_local_steps(pool: Callable[[int], Pool], adapter: Adapter, local_steps: LocalSteps) -> None:
    ((own, agreed), last), ((others, agreed_there), last_there) = pool(2).run(exchanged, adapter, local_steps)
    assert own != others
    assert agreed == agreed_there
    assert last == last_there


def elastic(adapter: Adapter) -> tuple[int, ...]:
    """In a worker: the place of a node that comes and goes, but is the only one, and the steps that it has made."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if dist.get_rank() == 0 else None
    endpoint = from_first_rank(f"127.0.0.1:{store.port}" if store is not None else "")
    model = adapter.make(Case(), Strategy.diloco(2, Elastic(1, endpoint=endpoint, run_id=endpoint)))
    train(adapter, model, Case(steps=3))
    count_tokens(model, 7)
    exchange_weights(model)
    end_training(model)
    return tuple(members(model))


@over_adapters
def test_elastic_nodes(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    assert pool(2).run(elastic, adapter) == [(0, 1, 3)] * 2


def saved(adapter: Adapter, folder: str) -> None:
    """In a worker: a checkpoint of everything, loaded again."""
    model = adapter.make(Case(), CODECS["loco"])
    optimizer = models.make_optimizer("sgd", model.parameters())
    train(adapter, model, Case(steps=1), optimizer=optimizer)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "codecs": CodecState(model)}
    dcp.save(state, checkpoint_id=folder)
    dcp.load(state, checkpoint_id=folder)


@over_adapters
def test_checkpoint(pool: Callable[[int], Pool], adapter: Adapter, tmp_path: Path) -> None:
    pool(4).run(saved, adapter, str(tmp_path))


def hooked() -> float:
    """In a worker: the loss after three steps of FULL_SHARD with the hook."""
    model = Fsdp1().make(Case(), ShardingStrategy.FULL_SHARD)
    model.register_comm_hook(QuantizedReduceState(Int8(64), gpus_per_node=2), quantized_reduce_hook)
    train(Fsdp1(), model, Case(steps=3))
    return mean_loss(model, 9)


def test_comm_hook(pool: Callable[[int], Pool]) -> None:
    _, stock = pool(4).run(losses, Fsdp1(), CODECS["int8"])[0]
    assert pool(4).run(hooked)[0] == pytest.approx(stock, rel=0.02)


def frozen(adapter: Adapter, name: str) -> bool:
    """In a worker: whether a frozen base computes what the oracle does; it then trains."""
    strategy = Strategy("IGG", frozen=FROZEN[name], gpus_per_node=2)
    model = adapter.shard(lora.make_net(), Case(), strategy)
    tokens = models.batch(99, 0, rank=0)[:, :-1] % model.embedding.num_embeddings
    with torch.no_grad():
        same = model(tokens).equal(lora.rounded_net(FROZEN[name])(tokens))
    train(adapter, model, Case(steps=1, clip=None))
    return same


@pytest.mark.parametrize("name", FROZEN)
@over_adapters
def test_frozen_base(pool: Callable[[int], Pool], adapter: Adapter, name: str) -> None:
    assert all(pool(4).run(frozen, adapter, name))


def adapted(adapter: Adapter, folder: str) -> Any:
    """In a worker: logits of a model whose adapter and whose base are saved."""
    base = llama.make_base().requires_grad_(False)
    quantize_frozen_params(base, Int8(64), gpus_per_node=2)
    save_frozen_params(base, f"{folder}/base")
    model = llama.shard(adapter, llama.adapt(base, {"default": "lora"}), Strategy(gpus_per_node=2))
    save_adapter(model, f"{folder}/adapter")
    return llama.logits_of(model)


@over_adapters
def test_files(pool: Callable[[int], Pool], adapter: Adapter, tmp_path: Path) -> None:
    expected = pool(4).run(adapted, adapter, str(tmp_path))[0]
    base = llama.make_base().requires_grad_(False)
    load_frozen_params(base, tmp_path / "base")
    assert dequantize_frozen_params(base) > 0
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert (llama.logits_of(loaded) - expected).abs().max() < 1e-4


def test_planner(capsys: pytest.CaptureFixture[str]) -> None:
    net = models.make_net()
    assert plan(module_size(net), **CLUSTER).choice.strategy
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in CLUSTER.items()]
    assert main(["plan", "--params", "7e9", *arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["choice"] == plan(7e9, **CLUSTER).choice.name


def test_example(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one plus two makes three.\n" * 2000)
    tiny = "--hidden 32 --layers 1 --sequence 32 --batch 4 --steps 2 --gpus-per-node 2".split()
    done = launch(4, "examples/train.py", "--output", tmp_path, "--data", text, *tiny, on_cpu=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "step-2" / ".metadata").exists()
