"""Hugging Face's Trainer on a model that fsdp_zpp has sharded: shard first, then hand it over. Needs GPUs.

    torchrun --nproc-per-node 4 examples/hf_trainer.py --gpus-per-node 2
    torchrun --nproc-per-node 4 examples/hf_trainer.py --gpus-per-node 2 --lora

Trainer leaves alone a model that is sharded by fully_shard already, provided that accelerate takes the run for one of
FSDP2. It never does so without an accelerator.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path

os.environ["ACCELERATE_USE_FSDP"] = "true"
os.environ["FSDP_VERSION"] = "2"

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from fsdp_zpp import Strategy, fully_shard, save_adapter, traffic


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Consecutive windows of a stream of tokens."""

    def __init__(self, tokens: torch.Tensor, length: int) -> None:
        self.windows = tokens[: len(tokens) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.windows[index].long()
        return {"input_ids": window, "labels": window}


def main() -> None:
    """Train a small Llama on the Python standard library."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus-per-node", type=int, help="default: as many as torchrun started on each")
    parser.add_argument("--lora", action="store_true", help="train adapters on a frozen base that is quantized")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", type=Path, default=Path("runs/hf_trainer"))
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    training, validation = text[: -256 * 512], text[-256 * 512 :]
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(device)
    layers, strategy = list(model.model.layers), Strategy.zeropp(gpus_per_node=options.gpus_per_node)
    if options.lora:
        layers = []  # the quantized base is gathered by block anyway, and all adapters are as small as one unit
        config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        model, strategy = get_peft_model(model, config), Strategy.mixzpp(gpus_per_node=options.gpus_per_node)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for module in (*layers, model):
        fully_shard(module, strategy=strategy, mp_policy=policy)

    arguments = TrainingArguments(
        output_dir=str(options.output),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_steps=options.steps,
        learning_rate=1e-3,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=options.steps // 2,
        save_strategy="no",
        report_to=[],
    )
    trainer = Trainer(model, arguments, train_dataset=Windows(training, 512), eval_dataset=Windows(validation, 512))
    trainer.train()
    if options.lora:
        save_adapter(model, options.output / "adapter")  # not trainer.save_model(), which would save shards
    if dist.get_rank() == 0:
        print("bytes that this rank has sent:", traffic(model))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
