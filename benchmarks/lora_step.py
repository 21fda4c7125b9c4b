"""Step time and memory of LoRA on a frozen base: quantized and owned by fsdp_zpp, beside torch's FSDPs with bf16.

    python benchmarks/lora_step.py --nodes 2 --gpus-per-node 2 --size 6.7B \
        --strategies full_shard,hybrid_shard,fsdp2:hybrid_shard,mixzpp,fsdp2:mixzpp

emulates the nodes on one host (see nodes.py). Under torchrun on real nodes, start it with ``--worker`` instead. Weights
are random and made one layer at a time, each sharded before the next is made, so that no rank ever holds the model.
Strategies go under FullyShardedDataParallel, or with ``fsdp2:`` before the name under fully_shard. One that runs out of
memory is reported as that. Writes a Markdown table and JSON with machine and versions to ``--out``.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
import traceback
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
import transformers
from nodes import start
from peft import LoraConfig, get_peft_model
from step import SIZES as SMALLER_SIZES
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard as torch_fully_shard,
    register_fsdp_forward_method,
)
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from fsdp_zpp import Int4, Int8, Strategy, fully_shard, quantize_frozen_params, traffic

SIZES: dict[str, dict[str, int]] = {
    **SMALLER_SIZES,
    "70B": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}
ADAPTERS_ONLY = ("NNN", "NNG", "III", "IIG", "IGG", "GGG")
STRATEGIES: dict[str, Any] = {
    "full_shard": ShardingStrategy.FULL_SHARD,
    "hybrid_shard": ShardingStrategy.HYBRID_SHARD,
    "mixzpp": Strategy.mixzpp(),
    "mixzpp-int4": Strategy.mixzpp(frozen=Int4(128)),
    **{f"frozen-{levels}": Strategy(levels) for levels in ADAPTERS_ONLY},
}
"""``frozen-...``: the base in int8, sharded inside nodes; adapters by these letters, in full precision."""


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--gpus-per-node", type=int, default=2)
    parser.add_argument("--size", choices=SIZES, default="1.35B")
    parser.add_argument(
        "--strategies",
        default="full_shard,hybrid_shard,fsdp2:hybrid_shard,mixzpp,fsdp2:mixzpp",
        help=f"of {', '.join(STRATEGIES)}",
    )
    parser.add_argument("--rank", type=int, default=16, help="of the adapters on q, k, v and o")
    parser.add_argument("--micro-batch", type=int, default=1, help="sequences a GPU in a step")
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations of each layer")
    parser.add_argument("--steps", type=int, default=8, help="timed steps, after --warmup others")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--generate", type=int, default=0, help="tokens to generate after training, on all ranks alike")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu is for trying it out")
    parser.add_argument("--out", type=Path, default=Path("runs/lora_step"), help="folder for lora_step.{md,json}")
    parser.add_argument("--worker", action="store_true", help="this process is one rank, started by torchrun")
    arguments = parser.parse_args()
    unknown = {name for name in arguments.strategies.split(",") if name.removeprefix("fsdp2:") not in STRATEGIES}
    if unknown:
        parser.error(f"unknown strategies {sorted(unknown)}; known are {', '.join(STRATEGIES)}")
    return arguments


# ---- the model, layer by layer


def network(arguments: argparse.Namespace, one_dtype: bool) -> nn.Module:
    """A PEFT model without values: a bf16 base, adapters in fp32 unless all is to be of ``one_dtype``."""
    config = LlamaConfig(
        **SIZES[arguments.size], vocab_size=32000, max_position_embeddings=arguments.sequence + arguments.generate
    )
    config.use_cache = False
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
        lora = LoraConfig(r=arguments.rank, lora_alpha=2 * arguments.rank, target_modules=targets)
        adapted = get_peft_model(model, lora)
        if one_dtype:
            adapted.to(torch.bfloat16)
    model.model.rotary_emb = LlamaRotaryEmbedding(config).to(device_of(arguments))
    return adapted


def materialize(module: nn.Module, device: torch.device) -> nn.Module:
    """Give values to what of ``module`` has none, the same on every rank."""
    for inner in module.modules():
        for name, parameter in list(inner._parameters.items()):
            if parameter is None or not parameter.is_meta:
                continue
            values = torch.empty_like(parameter, device=device)
            nn.init.ones_(values) if isinstance(inner, LlamaRMSNorm) else nn.init.normal_(values, std=0.02)
            inner._parameters[name] = nn.Parameter(values, requires_grad=parameter.requires_grad)
    return module


def build(arguments: argparse.Namespace, name: str) -> nn.Module:
    """The model under a strategy, in bf16 computation and communication."""
    torch.manual_seed(0)
    strategy, device = STRATEGIES[name.removeprefix("fsdp2:")], device_of(arguments)
    fsdp2 = name.startswith("fsdp2:")
    mesh = None
    if strategy is ShardingStrategy.HYBRID_SHARD:
        shape = (arguments.nodes, arguments.gpus_per_node)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    elif fsdp2:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    # torch's FSDP1 flattens frozen and trainable parameters together, for which they must be of one dtype.
    model = network(arguments, one_dtype=not fsdp2 and not isinstance(strategy, Strategy))
    layers = model.get_base_model().model.layers
    for index, layer in enumerate(layers):
        materialize(layer, device)
        if arguments.checkpointing:
            apply_activation_checkpointing(layers, check_fn=lambda module, layer=layer: module is layer)
        if "frozen-" in name:
            quantize_frozen_params(layer, Int8(256))
        layers[index] = shard(layers[index], strategy, fsdp2, mesh, device)
    materialize(model, device)
    if "frozen-" in name:
        quantize_frozen_params(model, Int8(256))
    return shard(model, strategy, fsdp2, mesh, device)


def shard(module: nn.Module, strategy: Any, fsdp2: bool, mesh: DeviceMesh | None, device: torch.device) -> nn.Module:
    """One unit, ours for a Strategy and torch's for torch's."""
    half = torch.bfloat16
    if fsdp2:
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half)
        if isinstance(strategy, Strategy):
            return fully_shard(module, strategy=strategy, mesh=mesh, mp_policy=policy)
        return torch_fully_shard(module, mesh=mesh, mp_policy=policy)
    return FullyShardedDataParallel(
        module,
        sharding_strategy=strategy,
        mixed_precision=MixedPrecision(half, half, half),
        device_id=device,
        device_mesh=mesh,
        use_orig_params=True,
    )


# ---- what is measured


def device_of(arguments: argparse.Namespace) -> torch.device:
    """This rank's device."""
    return torch.device("cuda", torch.cuda.current_device()) if arguments.device == "cuda" else torch.device("cpu")


def synchronize(arguments: argparse.Namespace) -> None:
    """Wait for all ranks and their GPUs."""
    dist.barrier()
    if arguments.device == "cuda":
        torch.cuda.synchronize()


def peak_gib(arguments: argparse.Namespace) -> float | None:
    """The largest peak of any rank since the last reset; None on the CPU."""
    if arguments.device != "cuda":
        return None
    peak = torch.tensor(torch.cuda.max_memory_allocated() / 2**30, device="cuda")
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    torch.cuda.reset_peak_memory_stats()
    return peak.item()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> torch.Tensor:
    """One optimizer step; returns the loss."""
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def measure(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    """Median step time in ms, its spread, peak memory in GiB, and bytes sent by this rank a step."""
    started = time.perf_counter()
    model = build(arguments, name)
    synchronize(arguments)
    figures: dict[str, Any] = {"strategy": name, "build_s": time.perf_counter() - started}
    figures["build_peak_gib"] = peak_gib(arguments)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-4, fused=arguments.device == "cuda")
    shape = (arguments.micro_batch, arguments.sequence)
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(32000, shape, generator=generator).to(device_of(arguments))
    first_loss = step(model, optimizer, tokens).item()
    for _ in range(arguments.warmup - 1):
        step(model, optimizer, tokens)
    peak_gib(arguments)
    ours = isinstance(STRATEGIES[name.removeprefix("fsdp2:")], Strategy)
    before = traffic(model) if ours else {}
    times = []
    for _ in range(arguments.steps):
        synchronize(arguments)
        start_of_step = time.perf_counter()
        loss = step(model, optimizer, tokens)
        synchronize(arguments)
        times.append((time.perf_counter() - start_of_step) * 1e3)
    figures |= {
        "step_ms": statistics.median(times),
        "fastest_ms": min(times),
        "slowest_ms": max(times),
        "peak_gib": peak_gib(arguments),
        "tokens_per_s": tokens.numel() * dist.get_world_size() / statistics.median(times) * 1e3,
        "loss": [first_loss, loss.item()],
    }
    if ours:
        after: Any = traffic(model)
        figures["sent_mib_a_step"] = {
            f"{kind} {hop}": (after[kind][hop] - before[kind][hop]) / arguments.steps / 2**20
            for kind in after
            for hop in after[kind]
        }
    if arguments.generate:
        figures |= generate(arguments, model)
    return figures


def generate(arguments: argparse.Namespace, model: nn.Module) -> dict[str, Any]:
    """Tokens a second of a greedy generation, the same on all ranks, and its peak memory."""
    prompt = torch.arange(16, device=device_of(arguments))[None] + 100
    context: AbstractContextManager[Any] = nullcontext()
    # generate() calls the model past what FSDP wraps, which holds the root's own parameters.
    if isinstance(model, FullyShardedDataParallel):
        context = FullyShardedDataParallel.summon_full_params(model, recurse=False, writeback=False)
    else:
        register_fsdp_forward_method(model, "generate")
    model.eval()
    with torch.no_grad(), context:
        options = {"min_new_tokens": arguments.generate, "do_sample": False, "use_cache": True, "pad_token_id": 0}
        model.generate(input_ids=prompt, max_new_tokens=arguments.generate, **options)
        synchronize(arguments)
        peak_gib(arguments)
        started = time.perf_counter()
        tokens = model.generate(input_ids=prompt, max_new_tokens=arguments.generate, **options)
        synchronize(arguments)
    seconds = time.perf_counter() - started
    gathered = [torch.empty_like(tokens) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tokens)
    return {
        "generate_tokens_per_s": arguments.generate / seconds,
        "generate_peak_gib": peak_gib(arguments),
        "same_on_all_ranks": all(torch.equal(other, tokens) for other in gathered),
    }


def attempt(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    """What :func:`measure` finds, or how it fails."""
    try:
        figures = measure(arguments, name)
    except torch.OutOfMemoryError as error:
        # All ranks hold the same share, so they fail alike; a rank that did not would wait for the others.
        figures = {"strategy": name, "failed": "out of memory", "error": str(error).splitlines()[0]}
        traceback.clear_frames(error.__traceback__)
    gc.collect()
    if arguments.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return figures


# ---- the report


def table(rows: list[dict[str, Any]]) -> str:
    """The figures as Markdown."""
    header = ["strategy", "step, ms (fastest to slowest)", "against the first", "peak, GiB", "peak while built, GiB"]
    header += ["tokens/s", "generated tokens/s"]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    first = next((row["step_ms"] for row in rows if "step_ms" in row), None)
    for row in rows:
        if "failed" in row:
            cells = [row["strategy"], row["failed"], *["-"] * (len(header) - 2)]
        else:
            cells = [row["strategy"], f"{row['step_ms']:.0f} ({row['fastest_ms']:.0f} to {row['slowest_ms']:.0f})"]
            cells += [
                f"{first / row['step_ms']:.2f}x",
                one_decimal(row["peak_gib"]),
                one_decimal(row["build_peak_gib"]),
            ]
            cells += [f"{row['tokens_per_s']:.0f}", one_decimal(row.get("generate_tokens_per_s"))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def one_decimal(value: float | None) -> str:
    """A figure, if there is one."""
    return "-" if value is None else f"{value:.1f}"


def write(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Write what there is so far."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    cuda = arguments.device == "cuda"
    machine = {
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "layout": f"{arguments.nodes} nodes x {arguments.gpus_per_node}",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
        "python": platform.python_version(),
    }
    options = {name: value for name, value in vars(arguments).items() if name not in ("out", "worker")}
    result = {"machine": machine, "arguments": options, "rows": rows}
    (arguments.out / "lora_step.json").write_text(json.dumps(result, indent=1))
    (arguments.out / "lora_step.md").write_text(table(rows) + "\n")


def work(arguments: argparse.Namespace) -> None:
    """One rank: measure all strategies in turn; rank 0 writes after each."""
    rows: list[dict[str, Any]] = []
    for name in arguments.strategies.split(","):
        rows.append(attempt(arguments, name))
        if dist.get_rank() == 0:
            print(json.dumps(rows[-1]), flush=True)
            write(arguments, rows)
    if dist.get_rank() == 0:
        print(table(rows))


if __name__ == "__main__":
    start(parse(), work)
