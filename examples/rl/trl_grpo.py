"""TRL's GRPO with a sharding strategy of fsdp_zpp, which generates on a vLLM server.

    VLLM_SERVER_DEV_MODE=1 vllm serve path/or/name --weight-transfer-config '{"backend": "nccl"}' \\
        --logprobs-mode processed_logprobs --max-logprobs -1
    torchrun --nproc-per-node 4 examples/rl/trl_grpo.py --model path/or/name --data prompts.jsonl

The server has other GPUs than the training. Each line of the data is ``{"prompt": ...}``; long answers are rewarded.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from fsdp_zpp import Strategy
from fsdp_zpp.integrations.transformers import use_strategy


def reward(completions: list[str], **others: object) -> list[float]:
    """Reward different words."""
    return [float(len(set(text.split()))) for text in completions]


def main() -> None:
    """Train; TRL sends the server the weights of each step, gathered layer by layer, with adapters merged into them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True)
    add("--data", type=Path, required=True)
    add("--server", default="http://localhost:8000")
    add("--lora", action="store_true", help="train adapters on a base in 8 bits")
    add("--steps", type=int, default=100)
    add("--output", type=Path, default=Path("runs/trl_grpo"))
    options = parser.parse_args()
    strategy = Strategy.mixzpp() if options.lora else Strategy.zeropp()
    trainer = use_strategy(GRPOTrainer, strategy)(
        model=AutoModelForCausalLM.from_pretrained(options.model),
        args=GRPOConfig(
            output_dir=str(options.output),
            bf16=True,
            max_steps=options.steps,
            learning_rate=1e-6,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=options.server,
            report_to=[],
        ),
        train_dataset=load_dataset("json", data_files=str(options.data), split="train"),
        reward_funcs=reward,
        peft_config=LoraConfig(r=16, target_modules="all-linear") if options.lora else None,
    )
    trainer.train()
    trainer.save_model(str(options.output / "final"))


if __name__ == "__main__":
    main()
