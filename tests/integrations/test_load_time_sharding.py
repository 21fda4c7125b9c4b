"""Models that ``from_pretrained(distributed_config=...)`` shards by a strategy: HSDP, tensor and expert parallelism."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.pool import Pool
from hugging_face import new_job
from torch import Tensor
from torch.torch_version import TorchVersion
from trainer_training import STEPS, TOKENS, logged, make_trainer
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.distributed.utils import gather_full_state_dict

from fsdp_zpp import NF4, Int4Delta, Strategy
from fsdp_zpp.integrations.transformers import use_strategy, with_strategy
from fsdp_zpp.runtime.unit import unit_of

pytestmark = pytest.mark.skipif(TorchVersion(version("transformers")) < "5.24", reason="refused")

Sizes = dict[str, int]
EXPERTS: Sizes = {"fsdp_size": 4, "ep_size": 2}
ON_TENSOR_RANKS: Sizes = {"fsdp_size": 2, "tp_size": 2, "ep_size": 2}
HSDP: Sizes = {"dp_replicate_size": 2, "fsdp_size": 2}
MIXTURE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def loaded(folder: str, sizes: Sizes, strategy: Strategy | None, experts: Strategy | None = None) -> Any:
    """Save a mixture of experts, the same on every rank, and load it sharded."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **MIXTURE))
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            # Logits that are apart; and experts that are clearly chosen, which no codec's rounding changes.
            parameter.data.mul_(20 if name.endswith("gate.weight") else 2)
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    config = DistributedConfig(**sizes)
    if strategy is not None:
        config = with_strategy(config, strategy, experts=experts)
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)


def trained(folder: str, sizes: Sizes, strategy: Strategy | None, experts: Strategy | None) -> tuple[list[float], ...]:
    """In a worker: the losses of Trainer's training and evaluations, and the norms of gradients."""
    with new_job():
        trainer = make_trainer(f"{folder}/out", loaded(folder, sizes, strategy, experts))
        trainer.train()
        return tuple(logged(trainer, what) for what in ("loss", "eval_loss", "grad_norm"))


@pytest.mark.parametrize(
    ("sizes", "levels", "of_experts"),
    [(EXPERTS, "GGG", None), (EXPERTS, "NNG", None), (EXPERTS, "IGG", "III"), (HSDP, "III", None), (HSDP, "IIG", None)],
    ids=lambda each: each if isinstance(each, str) else " ".join(each or ["same"]),
)
def test_trainer_trains_as_with_torchs_fsdp(
    pool: Callable[[int], Pool], tmp_path: Path, sizes: Sizes, levels: str, of_experts: str | None
) -> None:
    experts = of_experts and Strategy(of_experts, gpus_per_node=1)
    delta = Strategy.zeropp(weights=Int4Delta(64), gpus_per_node=1)
    own, plain, zeropp = (
        pool(4).run(trained, str(tmp_path), sizes, *strategies)[0]
        for strategies in (
            (None, None),
            (Strategy(levels, gpus_per_node=2), experts),
            (Strategy.zeropp(gpus_per_node=2), delta if experts else None),
        )
    )
    losses, evaluations, norms = own
    assert losses[-1] < losses[0] - 0.1
    assert plain[0] == pytest.approx(losses, rel=1e-5)
    assert plain[1] == pytest.approx(evaluations, rel=1e-5)
    assert plain[2] == pytest.approx(norms, rel=1e-4)
    assert zeropp[0] == pytest.approx(losses, rel=0.02)
    assert zeropp[0] != pytest.approx(losses, rel=1e-6)


def weights_and_copies(folder: str, strategy: Strategy | None) -> tuple[dict[str, Tensor], list[str]]:
    """In a worker: trained weights, and what differs between ranks of tensor parallelism that have copies of it."""
    with new_job():
        model = loaded(folder, ON_TENSOR_RANKS, strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)
    fsdp, tp = (model._mesh_manager.get_mesh(name) for name in ("fsdp", "tp"))
    for step in range(STEPS):
        tokens = torch.randint(
            64, (2, 16), generator=torch.Generator().manual_seed(100 * step + fsdp.get_local_rank())
        ).to(models.device())
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    differing = []
    for name, parameter in model.named_parameters():
        if {"tp", "ep"} & set(parameter.device_mesh.mesh_dim_names):
            continue
        local = parameter.to_local().detach().contiguous()
        ranks = [torch.empty_like(local) for _ in range(2)]
        dist.all_gather(ranks, local, group=tp.get_group())
        differing += [] if torch.equal(*ranks) else [name]
    return gather_full_state_dict(model), differing


@pytest.mark.parametrize("levels", ["GGG", "III", "IIG"])
def test_tensor_and_expert_parallelism_train_as_with_torchs_fsdp(
    pool: Callable[[int], Pool], tmp_path: Path, levels: str
) -> None:
    own = pool(4).run(weights_and_copies, str(tmp_path), None)[0][0]
    weights, differing = pool(4).run(weights_and_copies, str(tmp_path), Strategy(levels, gpus_per_node=1))[0]
    assert differing == []
    assert weights.keys() == own.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, own[name], rtol=1e-4, atol=1e-5)


def test_copies_on_tensor_parallel_ranks_stay_equal_bit_for_bit(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    for _, differing in pool(4).run(weights_and_copies, str(tmp_path), Strategy.zeropp(gpus_per_node=1)):
        assert differing == []


def parts(folder: str, sizes: Sizes, strategy: Strategy, experts: Strategy | None) -> dict[str, int]:
    """In a worker: into how many parts a dense weight and the experts of a layer are split."""
    with new_job():
        model = loaded(folder, sizes, strategy, experts)
        layer = model.model.layers[0]
        parameters: dict[str, Any] = {"dense": layer.self_attn.q_proj.weight, "experts": layer.mlp.experts.down_proj}
        return {name: each.numel() // each.to_local().numel() for name, each in parameters.items()}


@pytest.mark.parametrize(
    ("sizes", "strategy", "experts", "expected"),
    [
        (EXPERTS, Strategy("GGG", gpus_per_node=2), None, {"dense": 4, "experts": 4}),
        # Copies of an expert are two ranks apart, each on another node.
        (EXPERTS, Strategy("III", gpus_per_node=2), None, {"dense": 2, "experts": 2}),
        (EXPERTS, Strategy("III", gpus_per_node=2), Strategy("GGG"), {"dense": 2, "experts": 4}),
        (ON_TENSOR_RANKS, Strategy("III", gpus_per_node=1), None, {"dense": 2, "experts": 2}),
        (HSDP, Strategy("III", gpus_per_node=2), None, {"dense": 2, "experts": 2}),
        ({"fsdp_size": 4, "ep_size": 4}, Strategy("III", gpus_per_node=2), None, {"dense": 2, "experts": 4}),
    ],
    ids=lambda each: each.levels if isinstance(each, Strategy) else None,
)
def test_experts_are_sharded_over_the_same_nodes_or_by_their_own_strategy(
    pool: Callable[[int], Pool],
    tmp_path: Path,
    sizes: Sizes,
    strategy: Strategy,
    experts: Strategy | None,
    expected: dict[str, int],
) -> None:
    assert pool(4).run(parts, str(tmp_path), sizes, strategy, experts) == [expected] * 4


def saved_by_trainer(folder: str) -> Tensor:
    """In a worker: what a trained model answers, which Trainer has saved."""
    with new_job():
        model = loaded(folder, EXPERTS, Strategy("III", gpus_per_node=2))
        trainer = make_trainer(f"{folder}/out", model, save_strategy="steps", save_steps=STEPS, save_only_model=True)
        trainer.train()
        with torch.no_grad():
            return model(input_ids=TOKENS.to(trainer.args.device)).logits.cpu()


def test_trainer_saves_whole_models(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    logits = pool(4).run(saved_by_trainer, str(tmp_path))[0]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / f"checkpoint-{STEPS}")
    torch.testing.assert_close(plain(input_ids=TOKENS).logits, logits, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_is_refused() -> None:
    sizes, zeropp = DistributedConfig(**EXPERTS), Strategy.zeropp()
    with pytest.raises(TypeError, match="takes a DistributedConfig of transformers, got"):
        with_strategy({}, zeropp)  # type: ignore[arg-type]
    for arguments in ({"strategy": "zeropp"}, {"strategy": zeropp, "experts": "zeropp"}):
        with pytest.raises(TypeError, match="strategy must be a Strategy such as"):
            with_strategy(sizes, **arguments)
    with pytest.raises(ValueError, match="from_pretrained loads them after that"):
        with_strategy(sizes, Strategy("IGG", frozen=NF4()))
    with pytest.raises(ValueError, match="has a strategy already"):
        with_strategy(with_strategy(sizes, zeropp), zeropp)
    with pytest.raises(ValueError, match="this DistributedConfig has one: set fsdp_size"):
        with_strategy(DistributedConfig(tp_size=2), zeropp)
    with pytest.raises(ValueError, match="ep_size is 1: leave it out"):
        with_strategy(DistributedConfig(fsdp_size=4), zeropp, experts=zeropp)
    with pytest.raises(ValueError, match="makes nodes of 3 ranks, and the copies of an expert are ep_size=2 ranks"):
        with_strategy(sizes, Strategy.zeropp(gpus_per_node=3))


def refused_by_trainer(folder: str) -> str:
    """In a worker: what is said to a trainer's strategy for a model that is sharded."""
    with new_job():
        trainer = make_trainer(folder, loaded(folder, EXPERTS, Strategy.zeropp(gpus_per_node=2)))
        with pytest.raises(ValueError, match="a strategy would shard it again") as error:
            use_strategy(trainer, Strategy.zeropp(gpus_per_node=2))
        return str(error.value)


def test_a_strategy_for_the_trainer_of_such_a_model_is_refused(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    for error in pool(4).run(refused_by_trainer, str(tmp_path)):
        assert "and then give Trainer no strategy" in error


def kinds_of_units(folder: str) -> list[bool]:
    """In a worker: whether a strategy has sharded a model loaded with one, and the next, loaded without."""
    sizes, strategy = {"fsdp_size": 2}, Strategy.zeropp(gpus_per_node=1)
    return [any(map(unit_of, loaded(folder, sizes, each).modules())) for each in (strategy, None)]


def test_without_a_strategy_torch_shards(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    assert pool(2).run(kinds_of_units, str(tmp_path)) == [[True, False]] * 2
