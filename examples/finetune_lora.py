"""Fine-tune with LoRA on a frozen base that is quantized once, sharded, and stays quantized.

    torchrun --nproc-per-node 4 examples/finetune_lora.py --gpus-per-node 2 --model path/to/model --compare

takes a local Hugging Face model: a folder with config.json and safetensors, of which no rank ever holds more than it
keeps in full precision; or a config alone, with random weights. ``--compare`` also fine-tunes the unquantized base
under FSDP's FULL_SHARD. All other options are those of train.py.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from peft import LoraConfig, get_peft_model
from torch import nn
from train import introduce_text, run_once, start
from train_loop import Trainer
from train_model import build
from train_options import Options, Run, codec_from, parse_options
from train_progress import make_console
from train_report import plot, print_table, write_json
from train_sharding import shard, unit_sizes
from train_text import load_corpus
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp_zpp import NF4, Int4, Int8, quantize_frozen_params, save_adapter, save_frozen_params
from fsdp_zpp.codecs import Codec

FROZEN = {"int8": Int8, "int4": Int4, "nf4": NF4}
_FROZEN = ", ".join(FROZEN)


@dataclass(frozen=True)
class LoraOptions:
    """What this example has besides train.py's options."""

    model: Path | None
    frozen: Codec
    rank: int
    targets: str | list[str]
    save_base: Path | None

    @property
    def folder(self) -> Path | None:
        """The folder of a model that has weights, if one was given."""
        has_weights = self.model is not None and self.model.is_dir() and any(self.model.glob("*.safetensors"))
        return self.model if has_weights else None


def parse() -> tuple[LoraOptions, Options]:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", type=Path, help="folder of a model, or a config.json (default: a small Llama)")
    parser.add_argument("--frozen", default="int8:256", help=f"codec of the base: {_FROZEN}, or with a block, int8:256")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters (default: 16)")
    parser.add_argument("--targets", default="all-linear", help="modules to adapt, by commas (default: all-linear)")
    parser.add_argument("--save-base", type=Path, help="folder to save the quantized base to")
    ours, others = parser.parse_known_args()
    frozen = codec_from(ours.frozen, FROZEN)
    if frozen is None:
        parser.error(f"--frozen {ours.frozen} is none of: {_FROZEN}, nor one of these with :BLOCK")
    # Adapters take a higher learning rate and fewer steps than whole models; what the user gives comes later and wins.
    options = parse_options(["--lr", "5e-3", "--steps", "150", "--output", "runs/finetune_lora", *others])
    if options.run.strategy is None:
        parser.error("--strategy full_shard quantizes nothing; --compare runs it besides")
    run = Run(f"LoRA on {frozen}", replace(options.run.strategy, frozen=frozen))
    targets = ours.targets if ours.targets == "all-linear" else ours.targets.split(",")
    return LoraOptions(ours.model, frozen, ours.rank, targets, ours.save_base), replace(options, run=run)


class LoraTrainer(Trainer):
    """Trains adapters; without a strategy, on the base as it is. See :class:`Trainer`."""

    lora: LoraOptions

    def _make_model(self) -> nn.Module:
        model = self._base().requires_grad_(False)
        torch.manual_seed(self.options.seed)
        strategy = self.run.strategy
        # A quantized base is gathered by block whatever is wrapped, and adapters are small: one unit has all of them.
        by_layer = strategy is None
        sizes = unit_sizes(model, by_layer=by_layer)
        if strategy is not None:
            quantize_frozen_params(
                model,
                strategy.frozen,
                placement=strategy.parameters,
                gpus_per_node=self.options.gpus_per_node,
                checkpoint=self.lora.folder,
                device=self.device,
                dtype=torch.bfloat16 if self.options.precision == "bf16" else None,
            )
        config = LoraConfig(
            r=self.lora.rank, lora_alpha=2 * self.lora.rank, target_modules=self.lora.targets, task_type="CAUSAL_LM"
        )
        adapted = get_peft_model(model, config)
        self.trained_unit_sizes = unit_sizes(adapted, trained=True, by_layer=by_layer)
        self.unit_sizes = [size + trained for size, trained in zip(sizes, self.trained_unit_sizes, strict=True)]
        return shard(adapted, strategy, self.options, self.device, by_layer)

    def _base(self) -> nn.Module:
        """The base: without values if they are to come from files and to be quantized."""
        torch.manual_seed(self.options.seed)
        if self.lora.model is None:
            return build(self.options, self.corpus.vocab)
        config: Any = AutoConfig.from_pretrained(self.lora.model)
        config.use_cache = False
        if self.lora.folder is None:
            return AutoModelForCausalLM.from_config(config)
        if self.run.strategy is None:
            return AutoModelForCausalLM.from_pretrained(self.lora.folder, dtype=torch.float32)
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(config)
        model.tie_weights()  # init_empty_weights unties them
        return model


def main() -> None:
    """Run what the command line asks for and report it."""
    lora, options = parse()
    device = start(options)
    console = make_console(dist.get_rank())
    has_tokenizer = lora.model is not None and lora.model.is_dir() and any(lora.model.glob("tokenizer*"))
    corpus = load_corpus(
        options.data,
        tokenizer=str(lora.model) if has_tokenizer else "byte",
        vocab=options.vocab,
        validation=options.validation,
        sequence=options.sequence,
        cache=options.output,
        device=device,
    )
    introduce_text(console, options, corpus)
    LoraTrainer.lora = lora
    results = []
    for run in reversed(options.runs):

        def save(trainer: Trainer, run: Run = run) -> None:
            if run == options.run:
                save_adapter(trainer.model, options.output / "adapter")
                if lora.save_base is not None:
                    save_frozen_params(trainer.model, lora.save_base)

        results.append(run_once(run, options, corpus, device, console, LoraTrainer, save))
    results.reverse()
    if dist.get_rank() == 0:
        options.output.mkdir(parents=True, exist_ok=True)
        print_table(console, results, options)
        plot(results, options.output / "loss.png")
        write_json(results, options, options.output / "result.json")
        console.print(
            f"Wrote loss.png and result.json to {options.output}, the adapter to {options.output / 'adapter'}"
        )
        console.print("PeftModel.from_pretrained(base, folder) loads it, on one GPU as on many")
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
