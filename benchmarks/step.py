"""Step time, memory and bytes between nodes of strategies side by side, on the same model and data, in one run.

    python benchmarks/step.py --nodes 2 --gpus-per-node 2 --size 1.35B --strategies full_shard,hybrid_shard,zeropp

emulates the nodes on one host (see nodes.py). Under torchrun on real nodes, start it with ``--worker`` instead.
Strategies go under FullyShardedDataParallel, or with ``fsdp2:`` before the name under fully_shard. Writes a Markdown
table and JSON with machine and versions to ``--out``.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from nodes import start
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard as torch_fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from fsdp_zpp import Int4, Int8, LoCo, Strategy, fully_shard, traffic
from fsdp_zpp.strategy import LEGAL_LEVELS

SIZES = {
    "tiny": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 8},
    "1.35B": {
        "hidden_size": 2048,
        "intermediate_size": 5504,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
    },
    "6.7B": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
}
STRATEGIES: dict[str, Any] = {
    "full_shard": ShardingStrategy.FULL_SHARD,
    "hybrid_shard": ShardingStrategy.HYBRID_SHARD,
    **{levels: Strategy(levels) for levels in LEGAL_LEVELS},
    **{f"zeropp-{levels}": Strategy.zeropp(levels=levels) for levels in LEGAL_LEVELS},
    "qwZ": Strategy("GGG", weights=Int8(256)),
    "qgZ": Strategy("GGG", gradients=Int4(128)),
    "zeropp": Strategy.zeropp(),
    "loco": Strategy.loco(),
    "loco-int8": Strategy.loco(error_feedback=LoCo(dtype=Int8(256))),
    "loco-both": Strategy.loco(error_feedback=LoCo(hops="both", dtype=Int8(256))),
    "zeropp-full-inside": Strategy.zeropp(intra_gradients=None),
    "zeropp-int4-inside": Strategy.zeropp(intra_gradients=Int4(128)),
}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--gpus-per-node", type=int, default=2)
    parser.add_argument("--size", choices=SIZES, default="1.35B")
    parser.add_argument("--strategies", default="full_shard,hybrid_shard,zeropp", help=f"of {', '.join(STRATEGIES)}")
    parser.add_argument("--micro-batch", type=int, default=2, help="sequences a GPU in a micro-batch")
    parser.add_argument(
        "--micro-batches", type=int, default=1, help="micro-batches a step, all but the last in no_sync"
    )
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=8, help="timed steps, after --warmup others")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/step"), help="folder for step.md and step.json")
    parser.add_argument(
        "--fast-network", action="store_true", help="nodes in name only: NVLink between them, which shows other costs"
    )
    parser.add_argument("--worker", action="store_true", help="this process is one rank, started by torchrun")
    arguments = parser.parse_args()
    unknown = {name for name in arguments.strategies.split(",") if name.removeprefix("fsdp2:") not in STRATEGIES}
    if unknown:
        parser.error(f"unknown strategies {sorted(unknown)}; known are {', '.join(STRATEGIES)}")
    return arguments


def network(arguments: argparse.Namespace, device: str = "meta") -> LlamaForCausalLM:
    """The model, without a strategy."""
    config = LlamaConfig(**SIZES[arguments.size], vocab_size=32000, max_position_embeddings=arguments.sequence)
    config.use_cache = False
    with torch.device(device):
        return LlamaForCausalLM(config)


def build(arguments: argparse.Namespace, name: str) -> nn.Module:
    """The model under a strategy, bf16 compute and communication with fp32 master weights."""
    torch.manual_seed(0)
    model = network(arguments, f"cuda:{torch.cuda.current_device()}")
    strategy = STRATEGIES[name.removeprefix("fsdp2:")]
    mesh = None
    if strategy is ShardingStrategy.HYBRID_SHARD:
        shape = (arguments.nodes, arguments.gpus_per_node)
        mesh = init_device_mesh("cuda", shape, mesh_dim_names=("replicate", "shard"))
    if name.startswith("fsdp2:"):
        return build_fsdp2(model, strategy, mesh)
    return FullyShardedDataParallel(
        model,
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}),
        mixed_precision=MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16),
        device_id=torch.cuda.current_device(),
        device_mesh=mesh,
        use_orig_params=True,
    )


def build_fsdp2(model: LlamaForCausalLM, strategy: Any, mesh: Any) -> nn.Module:
    """``model`` under fully_shard, ours for a Strategy and torch's for torch's."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for module in (*model.model.layers, model):
        if isinstance(strategy, Strategy):
            fully_shard(module, strategy=strategy, mp_policy=policy)
        else:
            torch_fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


def accumulating(model: nn.Module, accumulates: bool) -> AbstractContextManager[Any]:
    """Keeps gradients local in the context, if ``accumulates``."""
    if isinstance(model, FullyShardedDataParallel):
        return model.no_sync() if accumulates else nullcontext()
    model.set_requires_gradient_sync(not accumulates)
    return nullcontext()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    """One optimizer step over tokens [micro-batches, sequences, length]."""
    for index, micro_batch in enumerate(tokens):
        with accumulating(model, index < len(tokens) - 1):
            model(micro_batch, labels=micro_batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def measure(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    """Median step time in ms, its spread, peak memory in GiB, and bytes sent by this rank a step."""
    strategy = STRATEGIES[name.removeprefix("fsdp2:")]
    model = build(arguments, name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    shape = (arguments.micro_batches, arguments.micro_batch, arguments.sequence)
    tokens = torch.randint(32000, shape, device="cuda")
    for _ in range(arguments.warmup):
        step(model, optimizer, tokens)
    torch.cuda.reset_peak_memory_stats()
    before = traffic(model) if isinstance(strategy, Strategy) else None
    times = []
    for _ in range(arguments.steps):
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        step(model, optimizer, tokens)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    figures: dict[str, Any] = {
        "strategy": name,
        "step_ms": statistics.median(times),
        "fastest_ms": min(times),
        "slowest_ms": max(times),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "tokens_per_s": tokens.numel() * dist.get_world_size() / statistics.median(times) * 1e3,
    }
    if before is not None:
        after = traffic(model)
        figures["sent_mib_a_step"] = {
            f"{kind} {hop}": (after[kind][hop] - before[kind][hop]) / arguments.steps / 2**20
            for kind in after
            for hop in after[kind]
        }
    del model, optimizer
    gc.collect()
    torch.cuda.empty_cache()
    return figures


def table(rows: list[dict[str, Any]]) -> str:
    """The figures as Markdown."""
    first = rows[0]["step_ms"]
    lines = ["| strategy | step, ms (fastest to slowest) | against the first | peak, GiB | tokens/s |"]
    lines += ["|---|---|---|---|---|"]
    for row in rows:
        spread = f"{row['step_ms']:.0f} ({row['fastest_ms']:.0f} to {row['slowest_ms']:.0f})"
        speed = f"{first / row['step_ms']:.2f}x"
        lines.append(f"| {row['strategy']} | {spread} | {speed} | {row['peak_gib']:.1f} | {row['tokens_per_s']:.0f} |")
    return "\n".join(lines)


def work(arguments: argparse.Namespace) -> None:
    """One rank: measure all strategies in turn; rank 0 writes."""
    rows = []
    for name in arguments.strategies.split(","):
        rows.append(measure(arguments, name))
        if dist.get_rank() == 0:
            print(json.dumps(rows[-1]), flush=True)
    if dist.get_rank() == 0:
        arguments.out.mkdir(parents=True, exist_ok=True)
        machine = {
            "gpu": torch.cuda.get_device_name(),
            "layout": f"{arguments.nodes} nodes x {arguments.gpus_per_node} GPUs",
            "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "python": platform.python_version(),
        }
        options = {name: value for name, value in vars(arguments).items() if name not in ("out", "worker")}
        result = {"machine": machine, "arguments": options, "rows": rows}
        (arguments.out / "step.json").write_text(json.dumps(result, indent=1))
        (arguments.out / "step.md").write_text(table(rows) + "\n")
        print(table(rows))


if __name__ == "__main__":
    start(parse(), work)
