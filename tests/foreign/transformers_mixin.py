"""transformers' own checks of FSDP, from the tests in its source distribution, with ours in place of torch's.

Only what transformers' package leaves out is ours: the source distribution lacks the module by which its tests start
processes, which a pool of workers does here.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from harness import models
from harness.pool import device_type

from fsdp_zpp import Strategy, fully_shard

from .architectures import config_of

FOLDER = "FSDP_ZPP_TRANSFORMERS"
"""The environment variable that names the folder of an unpacked source distribution of transformers."""
PACKAGE = "tests_of_transformers"


def why_not() -> str:
    """Why the checks can't run, for ``pytest.skip``; empty if they can."""
    get = f"pip download --no-deps --no-binary :all: transformers=={transformers.__version__}"
    if FOLDER not in os.environ:
        return f"set {FOLDER} to the folder of an unpacked source distribution of transformers ({get})"
    folder = Path(os.environ[FOLDER])
    if not (folder / "tests" / "test_fsdp_mixin.py").exists():
        return f"{FOLDER}={folder} has no tests/test_fsdp_mixin.py; unpack there what this downloads: {get}"
    if f"Version: {transformers.__version__}\n" not in (folder / "PKG-INFO").read_text():
        return f"{FOLDER}={folder} is not transformers {transformers.__version__}, which is installed ({get})"
    return ""


def load() -> Any:
    """The module of the checks."""
    if PACKAGE not in sys.modules:
        package = ModuleType(PACKAGE)
        package.__path__ = [str(Path(os.environ[FOLDER]) / "tests")]
        processes = ModuleType(f"{PACKAGE}.distributed_testing_utils")
        for name, value in _PROCESSES.items():
            setattr(processes, name, value)
        sys.modules |= {PACKAGE: package, processes.__name__: processes}
        try:
            importlib.import_module("parameterized")
        except ImportError:  # its decorators are not asked for what they decorate
            stand_in: Any = ModuleType("parameterized")
            stand_in.parameterized = mock.MagicMock()
            sys.modules["parameterized"] = stand_in
    return importlib.import_module(f"{PACKAGE}.test_fsdp_mixin")


def _start_processes(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("a pool of workers runs the checks")


_PROCESSES: dict[str, Any] = {
    "_get_distributed_backend": lambda: dist.get_backend(),
    "_get_distributed_device_type": device_type,
    "_get_rank_device": lambda rank: models.device(),
    "_set_rank_device": lambda rank: None,
    "_start_rank_processes": _start_processes,
}


@contextmanager
def ours(strategy: Strategy) -> Iterator[None]:
    """A context in which transformers shards with a strategy."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        with mock.patch(
            "transformers.distributed.fsdp.fully_shard", wraps=partial(fully_shard, strategy=strategy)
        ) as f:
            yield
            assert f.called
    finally:
        torch.use_deterministic_algorithms(deterministic)


def run_check(name: str, architecture: str, strategy: Strategy, *args: Any) -> None:
    """In a worker: run one of the module's checks on a small model.

    Args:
        name: The check's name, without what all of them begin and end with.
        architecture: See :mod:`foreign.architectures`.
        strategy: The strategy.
        *args: What the check takes beside a configuration.
    """
    config = config_of(architecture)
    check = getattr(load(), f"_test_{name}_impl")
    with ours(strategy):
        check(dist.get_rank(), type(config), config.to_diff_dict(), *args)
