"""Hugging Face's Trainer with a sharding strategy of fsdp_zpp, on a small Llama and the Python standard library.

    torchrun --nproc-per-node 4 examples/hf_trainer.py --gpus-per-node 2
    torchrun --nproc-per-node 4 examples/hf_trainer.py --gpus-per-node 2 --lora

takes four processes, on GPUs or on the CPU, as two nodes of two; --resume goes on from the last checkpoint in --output.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from fsdp_zpp import Strategy, traffic
from fsdp_zpp.integrations.transformers import use_strategy


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Consecutive windows of a stream of bytes."""

    def __init__(self, text: torch.Tensor, length: int = 256) -> None:
        self.windows = text[: len(text) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.windows[index].long()
        return {"input_ids": window, "labels": window}


def main() -> None:
    """Train, evaluate, save checkpoints and, at the end, a model for ``from_pretrained``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--gpus-per-node", type=int, help="default: as many as torchrun started on each")
    add("--lora", action="store_true", help="train adapters on a frozen base that is quantized")
    add("--hidden", type=int, default=128)
    add("--layers", type=int, default=4)
    add("--steps", type=int, default=60)
    add("--output", type=Path, default=Path("runs/hf_trainer"))
    add("--resume", action="store_true")
    options = parser.parse_args()
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    sizes = {"hidden_size": options.hidden, "intermediate_size": 2 * options.hidden}
    sizes |= {"vocab_size": 256, "num_hidden_layers": options.layers, "num_attention_heads": 4}
    torch.manual_seed(0)
    model, strategy = (
        LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False)),
        Strategy.zeropp(gpus_per_node=options.gpus_per_node),
    )
    if options.lora:
        adapters = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model.to(torch.bfloat16), adapters)  # in 16 bits, as bases are published
        strategy = Strategy.mixzpp(gpus_per_node=options.gpus_per_node)

    arguments = TrainingArguments(
        output_dir=str(options.output),
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=options.steps,
        learning_rate=1e-3,
        logging_steps=1,
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=options.steps // 2,
        save_steps=options.steps // 2,
        load_best_model_at_end=True,
        report_to=[],
        disable_tqdm=True,
    )
    training, validation = Windows(text[: -256 * 64]), Windows(text[-256 * 64 :])
    trainer = Trainer(model, arguments, train_dataset=training, eval_dataset=validation)
    use_strategy(trainer, strategy)
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model(str(options.output / "final"))
    if trainer.is_world_process_zero():
        print("bytes that this rank has sent:", traffic(trainer.model))


if __name__ == "__main__":
    main()
