"""Train a small Llama on text under a sharding strategy: one file, to copy from.

    torchrun --nproc-per-node 4 examples/train.py --gpus-per-node 2 --strategy zeropp

takes four processes, on GPUs or on the CPU, as two nodes of two. What fsdp_zpp adds to a training with FSDP is in
``make_strategy``, ``shard`` and ``state_of``. ``./run train`` compares such a training with torch's FULL_SHARD.
"""

from __future__ import annotations

import math
import os
import sysconfig
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import AdamW, Optimizer
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from fsdp_zpp import CodecState, Strategy, fully_shard, traffic

PRESETS = {name: getattr(Strategy, name) for name in ("zeropp", "loco", "mics", "zero1", "zero2", "zero3")}
LIBRARY = Path(sysconfig.get_paths()["stdlib"])
NOT_PROSE = {*"test tests encodings pydoc_data idlelib turtledemo ensurepip site-packages dist-packages".split()}


def make_parser(description: str | None = __doc__) -> ArgumentParser:
    """Return the options. A CPU learns something in a minute on two cores; a GPU gets a model worth sharding."""
    parser = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
    add, gpu = parser.add_argument, torch.cuda.is_available()
    add("--strategy", default="zeropp", help=f"{', '.join(PRESETS)}, scopes such as IGG, or torch's own full_shard")
    add("--gpus-per-node", type=int, help="consecutive ranks that form a node (default: those of this machine)")
    add("--fsdp2", action="store_true", help="shard with fully_shard instead of FullyShardedDataParallel")
    add("--data", type=Path, nargs="+", default=[], help="text files (default: Python's standard library)")
    add("--hidden", type=int, default=1024 if gpu else 128, help="width of the model")
    add("--layers", type=int, default=16 if gpu else 2)
    add("--sequence", type=int, default=1024 if gpu else 128, help="tokens, which are bytes")
    add("--batch", type=int, default=8 if gpu else 4, help="sequences of a rank in a micro-batch")
    add("--micro-batches", type=int, default=1, help="of a step")
    add("--lr", type=float, default=4e-4 if gpu else 1.5e-3, help="peak learning rate")
    add("--steps", type=int, default=300, help="of the whole training")
    add("--stop-at", type=int, help="step to stop at, and to resume from (default: --steps)")
    add("--seed", type=int, default=0, help="of the weights and of the order of the data")
    add("--output", type=Path, default=Path("runs/train"), help="folder to write to")
    add("--resume", type=Path, help="checkpoint to go on from")
    return parser


def load_text(paths: list[Path], device: torch.device) -> Tensor:
    """Return bytes as rank 0 reads them, so that all ranks have the same: uint8 on ``device``. Collective."""
    text = [b""]
    if dist.get_rank() == 0:
        files = paths or [f for f in sorted(LIBRARY.rglob("*.py")) if not NOT_PROSE & {*f.relative_to(LIBRARY).parts}]
        text = [b"\n".join(file.read_bytes() for file in files)]
    dist.broadcast_object_list(text)
    return torch.frombuffer(bytearray(text[0]), dtype=torch.uint8).to(device)


def make_model(options: Namespace) -> LlamaForCausalLM:
    """Make a Llama with the same random weights on every rank."""
    torch.manual_seed(options.seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=options.hidden,
        intermediate_size=64 * math.ceil(options.hidden * 8 / 3 / 64),
        num_hidden_layers=options.layers,
        num_attention_heads=max(4, options.hidden // 64),
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def make_strategy(name: str, gpus_per_node: int | None) -> Strategy | None:
    """Make a strategy from its name or its scopes; None for torch's own FULL_SHARD."""
    if name == "full_shard":
        return None
    return PRESETS.get(name, partial(Strategy, name))(gpus_per_node=gpus_per_node)


def shard(model: Any, strategy: Strategy | None, fsdp2: bool, device: torch.device) -> Any:
    """Shard ``model``, each layer and the rest as a unit, by ``strategy`` or, without one, by torch's FULL_SHARD."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    dtype = torch.bfloat16 if device.type == "cuda" else None
    if not fsdp2:
        return torch_fsdp.FullyShardedDataParallel(
            model,
            sharding_strategy=strategy or torch_fsdp.ShardingStrategy.FULL_SHARD,
            auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}),
            mixed_precision=torch_fsdp.MixedPrecision(param_dtype=dtype, reduce_dtype=dtype),
            device_mesh=mesh,
            device_id=device,
            use_orig_params=True,
        )
    shard_unit = partial(fully_shard, strategy=strategy) if strategy else torch_fsdp.fully_shard
    for module in (*model.to(device).model.layers, model):
        shard_unit(module, mesh=mesh, mp_policy=torch_fsdp.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype))
    return model


def loss_of(model: nn.Module, tokens: Tensor, starts: Tensor, sequence: int) -> Tensor:
    """Return mean cross-entropy, in nats a token, of the sequences that begin at ``starts``."""
    batch = tokens[(starts[:, None] + torch.arange(sequence + 1)).to(tokens.device)].long()
    logits = model(batch[:, :-1]).logits
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def train_step(model: Any, optimizer: Optimizer, tokens: Tensor, step: int, options: Namespace) -> Tensor:
    """Train one step; return the mean loss of all ranks, without waiting for it. Collective."""
    # The data depends on the seed and the step alone: a resumed run goes on with what it would have seen.
    generator = torch.Generator().manual_seed(options.seed * 1_000_003 + step)
    shape = (options.micro_batches, dist.get_world_size(), options.batch)
    starts = torch.randint(len(tokens) - options.sequence, shape, generator=generator)[:, dist.get_rank()]
    total = torch.zeros((), device=tokens.device)
    for index, micro_batch in enumerate(starts):
        last = index == options.micro_batches - 1  # gradients accumulate until then
        if options.fsdp2:
            model.set_requires_gradient_sync(last)
        with nullcontext() if last or options.fsdp2 else model.no_sync():
            loss = loss_of(model, tokens, micro_batch, options.sequence) / options.micro_batches
            loss.backward()
        total += loss.detach()
    clip = partial(nn.utils.clip_grad_norm_, model.parameters()) if options.fsdp2 else model.clip_grad_norm_
    clip(1.0)
    for group in optimizer.param_groups:
        group["lr"] = options.lr * schedule(step, options.steps)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def schedule(step: int, steps: int) -> float:
    """Return the share of the learning rate: a fifth of the steps to warm up, then a cosine down to a tenth."""
    warmup = math.ceil(steps / 5)
    cosine = math.cos(math.pi * (step - warmup) / max(1, steps - warmup))
    return (step + 1) / (warmup + 1) if step < warmup else 0.1 + 0.9 * 0.5 * (1 + cosine)


def state_of(model: nn.Module, optimizer: Optimizer, strategy: Strategy | None, step: int) -> dict[str, Any]:
    """Return this rank's shards of all that a run needs to go on exactly where it stopped. Collective."""
    weights, moments = get_state_dict(model, optimizer)
    codecs = {"codecs": CodecState(model, optimizer)} if strategy else {}
    return {"model": weights, "optimizer": moments, "step": step, **codecs}


def main() -> None:
    """Train, and print a line for every tenth of the steps."""
    options = make_parser().parse_args()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    say = print if dist.get_rank() == 0 else lambda *line: None
    tokens = load_text(options.data, device)
    strategy = make_strategy(options.strategy, options.gpus_per_node)
    model = shard(make_model(options), strategy, options.fsdp2, device)
    optimizer = AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    first, stop = 0, options.stop_at or options.steps
    if options.resume:
        state = state_of(model, optimizer, strategy, first)
        dcp.load(state, checkpoint_id=options.resume)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        if (first := state["step"]) >= stop:
            raise SystemExit(f"{options.resume} is at step {first}: nothing is left to train until step {stop}")
    say("   step       loss  ms a step")
    losses, since = [], time.perf_counter()
    for step in range(first, stop):
        losses.append(train_step(model, optimizer, tokens, step, options))
        if (step + 1) % max(1, options.steps // 10) == 0 or step + 1 == stop:
            loss = torch.stack(losses).mean().item()  # waits for the GPU, for the first time since the last line
            say(f"{step + 1:7} {loss:10.4f} {1e3 * (time.perf_counter() - since) / len(losses):10.1f}")
            losses, since = [], time.perf_counter()
    dcp.save(state_of(model, optimizer, strategy, stop), checkpoint_id=options.output / f"step-{stop}")
    if strategy:
        say("bytes that this rank has sent:", traffic(model))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
