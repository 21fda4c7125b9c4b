"""Effects of sharding strategies and their codecs on the loss. Studies, each with its own ``--help``:

    python benchmarks/loss/run.py compare                                           # which is ./run train
    python benchmarks/loss/run.py convergence --nodes 2 --gpus-per-node 1 --batch 64 --seeds 0,1,2
    python benchmarks/loss/run.py local-steps --nodes 2 --gpus-per-node 1 --seeds 0,1,2
    python benchmarks/loss/run.py diloco-scaling --nodes 2 --gpus-per-node 1
    python benchmarks/loss/run.py muon --nodes 2 --gpus-per-node 1 --seeds 0,1,2
    python benchmarks/loss/run.py lora --base runs/base --text OTHER --nodes 2 --gpus-per-node 1
    python benchmarks/loss/run.py straddling
    python benchmarks/loss/run.py small-parameters
    python benchmarks/loss/run.py entropy
    python benchmarks/loss/run.py gaussian-codes

A run leaves one JSON file with its figures and its manifest in ``runs/``; report.py reports the studies in
``results/``, to which result_files.py adds it.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "common"))
sys.path.append(str(Path(__file__).parents[2] / "examples"))  # compare.py trains as train.py does

STUDIES = {
    "compare": "examples/train.py under strategies and under torch's FULL_SHARD, with the same seed and data",
    "convergence": "a small GPT-2 under many ways to encode gradients and weights, with and without error feedback",
    "local-steps": "the same GPT-2 on nodes that train on their own and exchange weights every few steps",
    "diloco-scaling": "DiLoCo by its authors' recipe, beside the losses that they published",
    "muon": "the same GPT-2 with Muon and with AdamW, sharded inside nodes and over all ranks",
    "lora": "adapters of the same GPT-2, whose frozen base is in bf16, int8 or NF4",
    "small-parameters": "the gradients of small parameters after codecs, on 64 ranks",
    "straddling": "the error of blocks that straddle parameters, one layer encoded once",
    "entropy": "what a lossless stage could save of the bytes that nodes send",
    "gaussian-codes": "the entropy of codes of normally distributed values, beside theory",
}
ENCODING_ERRORS = ("small-parameters", "straddling", "gaussian-codes")
"""Studies of encoding_errors.py, which are computed at once; the others are modules."""


def main() -> None:
    """Run the study that the first argument names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES, help="; ".join(map(": ".join, STUDIES.items())))
    parser.add_argument("options", nargs=argparse.REMAINDER, help="of the study")
    arguments = parser.parse_args()
    name = arguments.study.replace("-", "_")
    if arguments.study in ENCODING_ERRORS:
        getattr(importlib.import_module("encoding_errors"), name)(arguments.options)
    else:
        importlib.import_module(name).main(arguments.options)


if __name__ == "__main__":
    main()
