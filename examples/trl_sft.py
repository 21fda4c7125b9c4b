"""TRL's SFTTrainer with a sharding strategy of fsdp_zpp: adapters on a quantized base learn to continue sentences.

    torchrun --nproc-per-node 4 examples/trl_sft.py --model path/or/name --data texts.jsonl --gpus-per-node 2

takes four processes, on GPUs or on the CPU, as two nodes of two. Each line of the data is ``{"text": ...}``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from fsdp_zpp import Strategy, traffic
from fsdp_zpp.integrations.transformers import use_strategy


def main() -> None:
    """Train, save checkpoints and, at the end, adapters for PEFT."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True)
    add("--data", type=Path, required=True)
    add("--gpus-per-node", type=int, help="default: as many as torchrun started on each")
    add("--steps", type=int, default=60)
    add("--output", type=Path, default=Path("runs/trl_sft"))
    add("--resume", action="store_true", help="go on from the last checkpoint in --output")
    options = parser.parse_args()
    arguments = SFTConfig(
        output_dir=str(options.output),
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        max_steps=options.steps,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="steps",
        save_steps=options.steps // 2,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(options.model),
        arguments,
        train_dataset=load_dataset("json", data_files=str(options.data), split="train"),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    use_strategy(trainer, Strategy.mixzpp(gpus_per_node=options.gpus_per_node))
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model(str(options.output / "final"))
    if trainer.is_world_process_zero():
        print("bytes that this rank has sent:", traffic(trainer.model))


if __name__ == "__main__":
    main()
