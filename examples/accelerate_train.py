"""Hugging Face's accelerate with a sharding strategy of fsdp_zpp, on a small Llama and the Python standard library.

    torchrun --nproc-per-node 4 examples/accelerate_train.py --gpus-per-node 2

takes four processes, on GPUs or on the CPU, as two nodes of two. ``accelerate launch`` does as well.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from accelerate import Accelerator, skip_first_batches
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp_zpp import Strategy, traffic
from fsdp_zpp.integrations.accelerate import use_strategy

MICRO_BATCHES = 2


def main() -> None:
    """Train, and leave a checkpoint to go on from."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--preset", default="zeropp", help="a preset of Strategy, such as loco")
    add("--gpus-per-node", type=int, help="default: as many as torchrun started on each")
    add("--hidden", type=int, default=128)
    add("--layers", type=int, default=4)
    add("--steps", type=int, default=60)
    add("--output", type=Path, default=Path("runs/accelerate"))
    add("--resume", type=Path, help="checkpoint to go on from")
    options = parser.parse_args()
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    loader = DataLoader(TensorDataset(text[: len(text) // 256 * 256].view(-1, 256)), batch_size=4)
    sizes = {"hidden_size": options.hidden, "intermediate_size": 2 * options.hidden}
    sizes |= {"vocab_size": 256, "num_hidden_layers": options.layers, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    strategy = Strategy.from_dict({"preset": options.preset, "gpus_per_node": options.gpus_per_node})
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=MICRO_BATCHES)
    use_strategy(accelerator, strategy)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    first = 0
    if options.resume is not None:
        accelerator.load_state(options.resume)
        first = int(options.resume.name.removeprefix("step-"))
    batches = iter(skip_first_batches(loader, first * MICRO_BATCHES))
    for step in range(first, options.steps):
        for _ in range(MICRO_BATCHES):
            (tokens,) = next(batches)
            with accelerator.accumulate(model):
                loss = model(input_ids=tokens, labels=tokens).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"step {step + 1}: loss {accelerator.reduce(loss.detach(), 'mean').item()}")
    accelerator.save_state(options.output / f"step-{options.steps}")
    accelerator.print("bytes that this rank has sent:", traffic(model))
    accelerator.end_training()


if __name__ == "__main__":
    main()
