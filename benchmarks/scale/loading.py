"""Memory of each rank while a large model is loaded: by from_pretrained everywhere, by rank 0, and by each its part.

    python benchmarks/scale/loading.py --ranks 4

saves a Llama with random weights in bf16, and loads it on CPU ranks in fp32, each way in processes of its own. It uses
``examples/finetune_full.py``, as docs/guides/load-a-large-model.md describes, and writes ``loading.json`` to ``--out``.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

sys.path.append(str(Path(__file__).parents[1] / "common"))

from manifest import manifest
from report import WAYS

from fsdp_zpp.bench.results import write

EXAMPLE = Path(__file__).parents[2] / "examples" / "finetune_full.py"


def parse() -> Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=8, help="of 28 M parameters each")
    parser.add_argument("--out", type=Path, default=Path("runs/scale"), help="folder for loading.json")
    return parser.parse_args()


def example() -> Any:
    """Import the example."""
    specification = importlib.util.spec_from_file_location(EXAMPLE.stem, EXAMPLE)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def gib(field: str) -> float:
    """Return a figure of this process's memory: VmHWM is the peak of VmRSS."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 2**20


def load(way: str, options: Namespace, device: torch.device) -> Any:
    """Load and shard the model in one of the ways."""
    script = example()
    if way == "whole":
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        return script.shard(model, options, device)
    model = script.shard(script.make_model(options), options, device)
    if way == "parts":
        script.load_weights(model, options.model, device)
        return model
    weights = {}
    if dist.get_rank() == 0:
        weights = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).state_dict()
    broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=broadcast)
    return model


def measure(rank: int, way: str, options: Namespace, folder: str) -> None:
    """In a process: load, and leave this rank's row in ``folder``."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store-{way}-{options.fsdp1}", options.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    before, start = gib("VmRSS"), time.perf_counter()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
    model = load(way, options, torch.device("cpu"))
    seconds = time.perf_counter() - start
    shards = sum(getattr(each, "_local_tensor", each).numel() * each.element_size() for each in model.parameters())
    row = {"way": way, "adapter": "FSDP" if options.fsdp1 else "FSDP2", "rank": rank, "seconds": seconds}
    row |= {"peak_gib": gib("VmHWM") - before, "kept_gib": gib("VmRSS") - before, "shards_gib": shards / 2**30}
    torch.save(row, f"{folder}/row-{way}-{options.fsdp1}-{rank}")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Measure and write the result."""
    arguments = parse()
    made_by, rows = manifest(), []
    sizes = {"hidden_size": 1536, "intermediate_size": 4096, "num_attention_heads": 12}
    with tempfile.TemporaryDirectory() as folder:
        config = LlamaConfig(vocab_size=32_000, num_hidden_layers=arguments.layers, **sizes)
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        model.save_pretrained(f"{folder}/model", max_shard_size="200MB")
        arguments.parameters = sum(each.numel() for each in model.parameters())
        del model
        for way in WAYS:
            for fsdp1 in (False, True):
                options = Namespace(model=Path(folder, "model"), strategy="zeropp", gpus_per_node=1, fsdp1=fsdp1)
                options.checkpointing, options.ranks = False, arguments.ranks
                mp.spawn(measure, (way, options, folder), arguments.ranks)
                rows += [torch.load(f"{folder}/row-{way}-{fsdp1}-{rank}") for rank in range(arguments.ranks)]
                write(arguments.out / "loading.json", made_by, arguments, rows)
                print(*rows[-arguments.ranks :], sep="\n", flush=True)


if __name__ == "__main__":
    main()
