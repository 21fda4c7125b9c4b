"""Fine-tune all weights of a model that no rank could hold, and export it to Hugging Face: one file, to copy from.

    torchrun --nproc-per-node 4 examples/finetune_full.py --gpus-per-node 2 --model path/to/model --output result

takes a folder with config.json and safetensors. The model is constructed without values; each rank then reads from the
files the parts that it keeps. The result is a folder that ``from_pretrained`` loads. With ``--fsdp1``, torch takes
memory for the whole model on each rank while it loads.
"""

from __future__ import annotations

import os
import sysconfig
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from fsdp_zpp import Strategy, fully_shard, traffic


def parse() -> Namespace:
    """Parse the options."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder with config.json and safetensors")
    add("--output", type=Path, default=Path("runs/finetune_full"), help="folder for the result")
    add("--strategy", default="zeropp", help="a preset such as zeropp or mics, or scopes such as GGG")
    add("--gpus-per-node", type=int, help="consecutive ranks that form a node (default: those of this machine)")
    add("--fsdp1", action="store_true", help="shard with FullyShardedDataParallel instead of fully_shard")
    add("--checkpointing", action="store_true", help="recompute the activations of each layer")
    add("--data", type=Path, nargs="+", default=[], help="text files (default: Python's standard library)")
    add("--sequence", type=int, default=1024 if torch.cuda.is_available() else 64, help="tokens")
    add("--batch", type=int, default=1, help="sequences of a rank")
    add("--steps", type=int, default=10)
    add("--lr", type=float, default=1e-5)
    add("--seed", type=int, default=0, help="of the order of the data")
    return parser.parse_args()


def make_model(options: Namespace) -> Any:
    """Make the model without values, in fp32, in which the optimizer updates them; its buffers have theirs."""
    config = AutoConfig.from_pretrained(options.model, use_cache=False)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.tie_weights()  # which init_empty_weights has untied
    if options.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def shard(model: Any, options: Namespace, device: torch.device) -> Any:
    """Shard each layer and the rest as a unit, before there are values."""
    kind = "preset" if options.strategy.islower() else "levels"
    strategy = Strategy.from_dict({kind: options.strategy, "gpus_per_node": options.gpus_per_node})
    layers = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    dtype = torch.bfloat16 if device.type == "cuda" else None
    if options.fsdp1:
        return torch_fsdp.FullyShardedDataParallel(
            model,
            sharding_strategy=strategy,
            auto_wrap_policy=ModuleWrapPolicy({type(layer) for layer in layers}),
            mixed_precision=torch_fsdp.MixedPrecision(param_dtype=dtype, reduce_dtype=dtype),
            device_mesh=mesh,
            device_id=device,
            use_orig_params=True,
            param_init_fn=partial(allocate, device, WeakValueDictionary()),
        )
    for module in (*layers, model):
        policy = torch_fsdp.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
        fully_shard(module, mesh=mesh, strategy=strategy, mp_policy=policy)
    return model


def allocate(device: torch.device, made: WeakValueDictionary[int, nn.Parameter], module: nn.Module) -> None:
    """Give the parameters of a module memory, unit by unit as FullyShardedDataParallel asks; tied ones stay tied."""
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.is_meta:
            new = made.get(id(parameter))
            if new is None:
                new = made[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device=device))
            module.register_parameter(name, new)


def load_weights(model: Any, folder: Path, device: torch.device) -> None:
    """Read this rank's shards from safetensors. Collective."""
    reader = dcp.HuggingFaceStorageReader(str(folder))
    stored = reader.read_metadata().state_dict_metadata
    state = get_model_state_dict(model)
    # A tied weight is in the files under one of its names.
    if missing := state.keys() - stored.keys() - model.all_tied_weights_keys.keys():
        raise SystemExit(f"{folder} has no {sorted(missing)}; see docs/guides/load-a-large-model.md")
    state = {
        name: torch.empty_like(shard, device=device) if shard.is_meta else shard
        for name, shard in state.items()
        if name in stored
    }
    dcp.load(state, storage_reader=reader)
    if isinstance(model, torch_fsdp.FSDPModule):
        model.load_state_dict(state, assign=True, strict=False)
        model.tie_weights()
        model.to(device)  # buffers
    else:
        set_model_state_dict(model, state, options=StateDictOptions(strict=False))


def load_tokens(options: Namespace, device: torch.device) -> Tensor:
    """Return the text in tokens, or in bytes if there is no tokenizer, as rank 0 reads it. Collective."""
    tokens = [torch.empty(0)]
    if dist.get_rank() == 0:
        files = options.data or sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = b"\n".join(file.read_bytes() for file in files)
        if any(options.model.glob("tokenizer*")):
            lines = text.decode(errors="replace").splitlines(keepends=True)
            encoded = AutoTokenizer.from_pretrained(options.model)(lines, add_special_tokens=False)["input_ids"]
            tokens = [torch.tensor([token for line in encoded for token in line], dtype=torch.int32)]
        else:
            tokens = [torch.frombuffer(bytearray(text), dtype=torch.uint8)]
    dist.broadcast_object_list(tokens)
    return tokens[0].to(device)


def train(model: Any, tokens: Tensor, options: Namespace) -> None:
    """Train all weights; rank 0 prints the mean loss of all ranks, ten times. Collective."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    generator = torch.Generator().manual_seed(options.seed)
    for step in range(1, options.steps + 1):
        shape = (dist.get_world_size(), options.batch)
        starts = torch.randint(len(tokens) - options.sequence, shape, generator=generator)[dist.get_rank()]
        batch = tokens[(starts[:, None] + torch.arange(options.sequence)).to(tokens.device)].long()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        clip = model.clip_grad_norm_ if options.fsdp1 else partial(nn.utils.clip_grad_norm_, model.parameters())
        clip(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step in (1, options.steps) or step % max(1, options.steps // 10) == 0:
            dist.all_reduce(loss := loss.detach())
            if dist.get_rank() == 0:
                print(f"step {step}: loss {loss.item() / dist.get_world_size():.4f}")


def export(model: Any, folder: Path, device: torch.device) -> None:
    """Write what ``from_pretrained`` reads, in bf16: rank 0 gathers all weights in its CPU's memory. Collective."""
    # On CPUs torch's FullyShardedDataParallel crashes with cpu_offload; without it, all ranks gather all weights.
    on_rank_0 = isinstance(model, torch_fsdp.FSDPModule) or device.type != "cpu"
    options = StateDictOptions(full_state_dict=True, cpu_offload=on_rank_0)
    weights = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        plain = getattr(model, "module", model)  # of FullyShardedDataParallel
        for name, value in weights.items():
            weights[name] = value.bfloat16()  # one by one, so that they are not there twice
        plain.save_pretrained(folder, state_dict=weights)
        plain.config.dtype = torch.bfloat16  # save_pretrained has written that of the shards
        plain.config.save_pretrained(folder)
    dist.barrier()


def main() -> None:
    """Fine-tune and export."""
    options = parse()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    model = shard(make_model(options), options, device)
    load_weights(model, options.model, device)
    train(model, load_tokens(options, device), options)
    export(model, options.output, device)
    if dist.get_rank() == 0:
        print("bytes that this rank has sent:", traffic(model))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
