r"""Hugging Face's Trainer with a sharding strategy of fsdp_zpp, on your model and data or on small ones.

    torchrun --nproc-per-node 4 examples/hf_trainer.py --gpus-per-node 2 --lora
    torchrun --nproc-per-node 8 examples/hf_trainer.py --lora --model Qwen/Qwen3-8B --data corpus.txt --sequence 2048 \
        --batch 1 --checkpointing --lr 2e-4

The first takes four processes, on GPUs or on the CPU, as two nodes of two, a small Llama of random weights, and the
Python standard library, byte by byte. Without --lora, all weights are trained. --resume goes on from the last
checkpoint in --output.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from fsdp_zpp import Strategy, traffic
from fsdp_zpp.integrations.transformers import use_strategy


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Consecutive windows of a stream of tokens."""

    def __init__(self, tokens: torch.Tensor, length: int) -> None:
        self.windows = tokens[: len(tokens) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.windows[index].long()
        return {"input_ids": window, "labels": window}


def load_tokens(model: str | None, files: list[Path]) -> torch.Tensor:
    """Return the text in the model's tokens, or in bytes for the small Llama."""
    files = files or sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    if model is None:
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)
    lines = text.decode(errors="replace").splitlines(keepends=True)
    encoded = AutoTokenizer.from_pretrained(model)(lines, add_special_tokens=False)["input_ids"]
    return torch.tensor([token for line in encoded for token in line], dtype=torch.int32)


def make_model(options: argparse.Namespace) -> PreTrainedModel:
    """Make the model: in fp32 if the optimizer updates it, and in 16 bits, as models are published, if it is frozen."""
    dtype = torch.bfloat16 if options.lora else torch.float32
    if options.model is not None:
        return AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
    sizes = {"hidden_size": options.hidden, "intermediate_size": 2 * options.hidden}
    sizes |= {"vocab_size": 256, "num_hidden_layers": options.layers, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False)).to(dtype)


def main() -> None:
    """Train, evaluate, save checkpoints and, at the end, a model for ``from_pretrained``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="folder or name of a model (default: a small Llama of random weights)")
    add("--data", type=Path, nargs="+", default=[], help="text files (default: Python's standard library)")
    add("--sequence", type=int, default=256, help="tokens")
    add("--batch", type=int, default=4, help="sequences of a rank in a micro-batch, of which a step has two")
    add("--checkpointing", action="store_true", help="recompute the activations of each layer")
    add("--gpus-per-node", type=int, help="default: as many as torchrun started on each")
    add("--lora", action="store_true", help="train adapters on a frozen base that is quantized")
    add("--hidden", type=int, default=128, help="of the small Llama")
    add("--layers", type=int, default=4, help="of the small Llama")
    add("--steps", type=int, default=60)
    add("--lr", type=float, default=1e-3)
    add("--output", type=Path, default=Path("runs/hf_trainer"))
    add("--resume", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    model, strategy = make_model(options), Strategy.zeropp(gpus_per_node=options.gpus_per_node)
    if options.lora:
        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
        strategy = Strategy.mixzpp(gpus_per_node=options.gpus_per_node)

    arguments = TrainingArguments(
        output_dir=str(options.output),
        fsdp=True,  # leaves the model in the CPU's memory until it is sharded
        fsdp_config={"state_dict_type": "SHARDED_STATE_DICT", "activation_checkpointing": options.checkpointing},
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        per_device_train_batch_size=options.batch,
        gradient_accumulation_steps=2,
        max_steps=options.steps,
        learning_rate=options.lr,
        logging_steps=1,
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=options.steps // 2,
        save_steps=options.steps // 2,
        load_best_model_at_end=True,
        report_to=[],
        disable_tqdm=True,
    )
    tokens = load_tokens(options.model, options.data)
    held_out = min(64, len(tokens) // options.sequence // 10) * options.sequence
    if not held_out:
        raise SystemExit(f"the data has {len(tokens)} tokens, and ten sequences of {options.sequence} are needed")
    training, validation = (Windows(part, options.sequence) for part in (tokens[:-held_out], tokens[-held_out:]))
    trainer = Trainer(model, arguments, train_dataset=training, eval_dataset=validation)
    use_strategy(trainer, strategy)
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model(str(options.output / "final"))
    if trainer.is_world_process_zero():
        print("bytes that this rank has sent:", traffic(trainer.model))


if __name__ == "__main__":
    main()
