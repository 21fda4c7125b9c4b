"""Programs as scripts, with which a failure can be run again."""

from __future__ import annotations

from .program import Program

SCRIPT = """\
# cd tests && torchrun --standalone --nproc-per-node {world} this.py
from fsdp_zpp import *
from fuzz.program import *
from fuzz.compare import main

main(
    {program}
)
"""


def as_script(program: Program) -> str:
    """A script that runs ``program`` and says where ours and stock differ."""
    return SCRIPT.format(program=repr(program), world=program.world)
