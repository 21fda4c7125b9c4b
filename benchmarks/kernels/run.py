"""Bytes a second of each kernel, read and written, against a device copy in the same run. Needs one GPU.

    python benchmarks/kernels/run.py --blocks 64 128 256 512 1024 2048 4096 --mib 1 4 16 64 256 1024
    python benchmarks/kernels/run.py --blocks 256 --mib 256 --only "int4 over"

Beside them come other libraries' kernels for the same work, where they are installed (``elsewhere.py``). A size is that
of the values in 16 bits: of the input of a quantization, the output of a dequantization, and the values that all peers
of a sum quantized. ``timing.py`` says how time is taken.
Prints a Markdown table for each block and writes the result (kernels.json) to ``--out``, after each block.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "common"))

import elsewhere
from cases import copy_case, own_cases
from manifest import manifest
from report import by_size, with_copies
from timing import Case, measure

from fsdp_zpp.bench.results import write


def wanted(case: Case, only: str) -> bool:
    """Return whether the case's name holds a match."""
    return re.search(only, case.name) is not None


def _compile(block: int, index: int) -> None:
    """Compile one case, in a process of its own."""
    case = list(own_cases(2**19, block))[index]
    case.prepare()[0]()


def compile_all(blocks: list[int], only: str) -> None:
    """Fill Triton's cache from many processes at once: one by one, compiling would take most of the time."""
    names = list(enumerate(own_cases(2**19, blocks[0])))
    jobs = [(block, index) for block in blocks for index, case in names if wanted(case, only)]
    if len(jobs) < 2:
        return
    workers = min(os.cpu_count() or 1, 16, len(jobs))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for done in [pool.submit(_compile, *job) for job in jobs]:
            done.result()


def measure_block(block: int, mibs: list[int], only: str, copies: dict[int, float], failed: list[str]) -> list[Any]:
    """Measure each kernel and size. Kernels of other libraries that fail are named in ``failed``."""
    rows = []
    for mib in mibs:
        own = list(own_cases(mib * 2**19, block))
        for case in (*own, *elsewhere.cases(mib * 2**19, block)):
            if not wanted(case, only):
                continue
            try:
                rate = measure(case) / 1e12
            except Exception as error:
                if case in own:
                    raise
                failed.append(f"{case.name}, block {block}, {mib} MiB ({type(error).__name__})")
            else:
                figures = {"tb_per_s": rate, "of_a_copy": rate / copies[mib]}
                rows.append({"kernel": case.name, "block": block, "mib": mib, **figures})
    return rows


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[256])
    parser.add_argument("--mib", type=int, nargs="+", default=[512], help="sizes of the values in 16 bits, in MiB")
    parser.add_argument("--only", default="", metavar="REGEX", help="kernels whose names hold a match")
    parser.add_argument("--out", type=Path, default=Path("runs/kernels"), help="folder for kernels.json")
    return parser.parse_args()


def main() -> None:
    """Measure, print a table for each block and write the result."""
    arguments = parse()
    made_by = manifest()
    made_by["versions"] |= elsewhere.versions()
    compile_all(arguments.blocks, arguments.only)
    copies = {mib: measure(copy_case(mib * 2**19)) / 1e12 for mib in arguments.mib}
    others = {"copies_tb_per_s": copies, "not_measured": elsewhere.missing()}
    rows: list[Any] = []
    for block in arguments.blocks:
        new = measure_block(block, arguments.mib, arguments.only, copies, others["not_measured"])
        rows += new
        # After every block, so that a run that is cut short leaves its measurements.
        write(arguments.out / "kernels.json", made_by, arguments, rows, **others)
        print(f"blocks of {block}", by_size(with_copies(new, copies)), "", sep="\n")


if __name__ == "__main__":
    main()
