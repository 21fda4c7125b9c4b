"""Fine-tune with LoRA on a frozen base that is quantized once, sharded, and stays quantized: one file, to copy from.

    torchrun --nproc-per-node 4 examples/finetune_lora.py --gpus-per-node 2 --model path/to/model

takes a local Hugging Face model: a folder with config.json and safetensors, of which no rank ever holds more than it
keeps in full precision; or a config alone, with random weights. With ``--full-shard`` the base stays as it is, under
torch's FULL_SHARD, to compare with.
"""

from __future__ import annotations

import os
import sysconfig
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from accelerate import init_empty_weights
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from fsdp_zpp import (
    NF4,
    Int4,
    Int8,
    Strategy,
    fully_shard,
    quantize_frozen_params,
    save_adapter,
    save_frozen_params,
    traffic,
)

CODECS = {"int8": Int8, "int4": Int4, "nf4": NF4}


def parse() -> Namespace:
    """Parse the options."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, help="folder of a model, or a config.json (default: a small Llama)")
    add("--frozen", choices=CODECS, default="int8", help="codec of the base")
    add("--full-shard", action="store_true", help="leave the base as it is, and shard by torch's FULL_SHARD")
    add("--rank", type=int, default=16, help="of the adapters")
    add("--targets", nargs="+", help="modules to adapt (default: all linear ones)")
    add("--gpus-per-node", type=int, help="consecutive ranks that form a node (default: those of this machine)")
    add("--fsdp2", action="store_true", help="shard with fully_shard instead of FullyShardedDataParallel")
    add("--data", type=Path, nargs="+", default=[], help="text files (default: Python's standard library)")
    add("--sequence", type=int, default=1024 if torch.cuda.is_available() else 128, help="tokens")
    add("--batch", type=int, default=4, help="sequences of a rank")
    add("--steps", type=int, default=150)
    add("--lr", type=float, default=5e-3, help="adapters take a higher learning rate than whole models")
    add("--seed", type=int, default=0, help="of the adapters and of the order of the data")
    add("--output", type=Path, default=Path("runs/finetune_lora"), help="folder for the adapter")
    add("--save-base", type=Path, help="folder to save the quantized base to")
    return parser.parse_args()


def load_tokens(options: Namespace, device: torch.device) -> Tensor:
    """Return the text in tokens, or in bytes if there is no tokenizer, as rank 0 reads it. Collective."""
    tokens = [torch.empty(0)]
    if dist.get_rank() == 0:
        files = options.data or sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = b"\n".join(file.read_bytes() for file in files)
        if options.model and options.model.is_dir() and any(options.model.glob("tokenizer*")):
            lines = text.decode(errors="replace").splitlines(keepends=True)
            encoded = AutoTokenizer.from_pretrained(options.model)(lines, add_special_tokens=False)["input_ids"]
            tokens = [torch.tensor([token for line in encoded for token in line], dtype=torch.int32)]
        else:
            tokens = [torch.frombuffer(bytearray(text), dtype=torch.uint8)]
    dist.broadcast_object_list(tokens)
    return tokens[0].to(device)


def make_model(options: Namespace, device: torch.device) -> Any:
    """Make the base, quantized unless it is to be compared with, and adapters, alike on every rank. Collective."""
    torch.manual_seed(options.seed)
    has_files = options.model and options.model.is_dir() and any(options.model.glob("*.safetensors"))
    if options.model:
        config = AutoConfig.from_pretrained(options.model, use_cache=False)
    else:
        sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4}
        config = LlamaConfig(vocab_size=256, **sizes, use_cache=False)
    if not has_files:
        model = AutoModelForCausalLM.from_config(config)
    elif options.full_shard:
        # In the adapters' dtype: torch's FullyShardedDataParallel takes one dtype a layer.
        model = AutoModelForCausalLM.from_pretrained(options.model, config=config, dtype=torch.float32)
    else:
        with init_empty_weights():  # the values come from the files, to every rank the rows that it keeps
            model = AutoModelForCausalLM.from_config(config)
        model.tie_weights()  # which init_empty_weights has untied
    model.requires_grad_(False)
    if not options.full_shard:
        quantize_frozen_params(
            model,
            CODECS[options.frozen](),
            gpus_per_node=options.gpus_per_node,
            checkpoint=options.model if has_files else None,
            device=device,
            dtype=torch.bfloat16 if device.type == "cuda" else None,
        )
    torch.manual_seed(options.seed)
    targets = options.targets or "all-linear"
    adapters = LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules=targets, task_type="CAUSAL_LM")
    return get_peft_model(model, adapters)


def shard(model: Any, options: Namespace, device: torch.device) -> Any:
    """Shard adapters and norms as one unit, since a quantized base is gathered by block anyway; else by layer."""
    strategy = None if options.full_shard else Strategy.zeropp(gpus_per_node=options.gpus_per_node)
    names = model.get_base_model()._no_split_modules if options.full_shard else ()
    layers = [module for module in model.modules() if type(module).__name__ in names]
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    dtype = torch.bfloat16 if device.type == "cuda" else None
    if not options.fsdp2:
        return torch_fsdp.FullyShardedDataParallel(
            model,
            sharding_strategy=strategy or torch_fsdp.ShardingStrategy.FULL_SHARD,
            auto_wrap_policy=ModuleWrapPolicy({type(layer) for layer in layers}) if layers else None,
            mixed_precision=torch_fsdp.MixedPrecision(param_dtype=dtype, reduce_dtype=dtype),
            device_mesh=mesh,
            device_id=device,
            use_orig_params=True,
        )
    shard_unit = partial(fully_shard, strategy=strategy) if strategy else torch_fsdp.fully_shard
    for module in (*layers, model.to(device)):
        shard_unit(module, mesh=mesh, mp_policy=torch_fsdp.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype))
    return model


def loss_of(model: nn.Module, tokens: Tensor, starts: Tensor, sequence: int) -> Tensor:
    """Return mean cross-entropy, in nats a token, of the sequences that begin at ``starts``."""
    batch = tokens[(starts[:, None] + torch.arange(sequence + 1)).to(tokens.device)].long()
    logits = model(input_ids=batch[:, :-1]).logits
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def train(model: Any, tokens: Tensor, options: Namespace) -> None:
    """Train the adapters; rank 0 prints the mean loss of all ranks, ten times. Collective."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=options.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    generator = torch.Generator().manual_seed(options.seed)
    for step in range(1, options.steps + 1):
        shape = (dist.get_world_size(), options.batch)
        starts = torch.randint(len(tokens) - options.sequence, shape, generator=generator)[dist.get_rank()]
        loss = loss_of(model, tokens, starts, options.sequence)
        loss.backward()
        clip = partial(nn.utils.clip_grad_norm_, parameters) if options.fsdp2 else model.clip_grad_norm_
        clip(1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step in (1, options.steps) or step % max(1, options.steps // 10) == 0:
            dist.all_reduce(loss := loss.detach())
            if dist.get_rank() == 0:
                print(f"step {step}: loss {loss.item() / dist.get_world_size():.4f}")


def main() -> None:
    """Fine-tune, and save the adapter."""
    options = parse()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    model = shard(make_model(options, device), options, device)
    if options.save_base:  # it does not change, and a folder that has one already raises before any training
        save_frozen_params(model, options.save_base)
    train(model, load_tokens(options, device), options)
    if not options.full_shard:
        save_adapter(model, options.output / "adapter")  # PeftModel.from_pretrained(base, folder) reads it, on one GPU
        if dist.get_rank() == 0:
            print("bytes that this rank has sent:", traffic(model))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
