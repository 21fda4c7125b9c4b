"""Train a Llama on real text with a ZeRO++ sharding strategy, and compare it with FSDP's FULL_SHARD.

    torchrun --nproc-per-node 4 examples/train.py --gpus-per-node 2 --strategy zeropp --compare

treats the four processes as two nodes of two. ``--help`` lists the options.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from rich.console import Console
from train_loop import RunResult, Trainer
from train_options import Options, Run, parse_options
from train_progress import TrainingProgress, make_console
from train_report import plot, print_table, write_json
from train_text import Corpus, load_corpus


def main() -> None:
    """Run what the command line asks for and report it."""
    options = parse_options()
    device = start(options)
    console = make_console(dist.get_rank())
    corpus = load_corpus(
        options.data,
        tokenizer=options.tokenizer,
        vocab=options.vocab,
        validation=options.validation,
        sequence=options.sequence,
        cache=options.output,
        device=device,
    )
    introduce_text(console, options, corpus)
    introduce_model(console, options)
    # The chosen strategy goes first: what it refuses, it refuses before FULL_SHARD has run for nothing.
    results = [run_once(run, options, corpus, device, console) for run in reversed(options.runs)][::-1]
    if dist.get_rank() == 0:
        options.output.mkdir(parents=True, exist_ok=True)
        print_table(console, results, options)
        plot(results, options.output / "loss.png")
        write_json(results, options, options.output / "result.json")
        console.print(f"Wrote loss.png and result.json to {options.output}, the checkpoint to {options.save}")
    dist.destroy_process_group()


def start(options: Options) -> torch.device:
    """Join the process group and return this rank's device."""
    if options.device == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    return device


def introduce_text(console: Console, options: Options, corpus: Corpus) -> None:
    """Say where and on what a run trains."""
    console.print(
        f"{options.world} ranks as {options.nodes} x {options.gpus_per_node} on {options.device}, "
        f"{options.precision}; text of {corpus.text_bytes / 1e6:.1f} MB, "
        f"{len(corpus.training) / 1e6:.1f} M {options.tokenizer} tokens to train on, "
        f"{len(corpus.validation):,} held out, vocabulary {corpus.vocab:,}"
    )


def introduce_model(console: Console, options: Options) -> None:
    """Say what a run trains."""
    console.print(
        f"Llama: hidden {options.hidden}, layers {options.layers}, heads {options.heads}, "
        f"sequence {options.sequence}; {options.steps} steps of {options.tokens_per_step:,} tokens, "
        f"learning rate {options.lr:g}, seed {options.seed}"
    )


def run_once(
    run: Run,
    options: Options,
    corpus: Corpus,
    device: torch.device,
    console: Console,
    trainer_class: type[Trainer] = Trainer,
    at_the_end: Callable[[Trainer], None] = lambda trainer: None,
) -> RunResult:
    """Train under one strategy, and forget all but the figures."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    trainer = trainer_class(run, options, corpus, device)
    with TrainingProgress(console, run.label, options) as progress:
        result = trainer.train(progress)
    at_the_end(trainer)
    # FSDP's modules refer to each other in cycles, and would keep their memory during the next run.
    del trainer
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return result


if __name__ == "__main__":
    main()
