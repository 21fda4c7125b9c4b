"""Codec state next to a framework's checkpoint, where ranks are not in step."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import models
from harness.adapter import Adapter, Case
from harness.covering import ADAPTERS, over_adapters, over_each
from harness.pool import Pool
from harness.training import train

from fsdp_zpp import Strategy
from fsdp_zpp.integrations._codec_files import load_codec_state, save_codec_state


def trained(adapter: Adapter) -> tuple[Any, Any]:
    """Return a model with errors to save, and its optimizer."""
    case = Case(steps=1)
    model = adapter.make(case, Strategy.loco(gpus_per_node=1))
    optimizer = models.make_optimizer("adamw", model.parameters())
    train(adapter, model, case, optimizer=optimizer)
    return model, optimizer


def replaced(adapter: Adapter, checkpoint: Path) -> bool:
    """In a worker: whether a rank wrote anew while rank 0, which gives it time to, was removing what was there."""
    model, optimizer = trained(adapter)
    save_codec_state(model, [optimizer], checkpoint)
    store = dist.distributed_c10d._get_default_store()
    key = f"{checkpoint} is written"
    overtaken = False
    remove, write = shutil.rmtree, dcp.save

    def remove_slowly(folder: Path) -> None:
        nonlocal overtaken
        with contextlib.suppress(dist.DistStoreError):
            store.wait([key], timedelta(seconds=1))
            overtaken = True
        remove(folder)

    def write_and_tell(*args: Any, **kwargs: Any) -> None:
        store.set(key, "yes")
        write(*args, **kwargs)

    with mock.patch("shutil.rmtree", remove_slowly), mock.patch.object(dcp, "save", write_and_tell):
        save_codec_state(model, [optimizer], checkpoint)
    return overtaken


@over_adapters
def test_ranks_write_once_what_was_there_is_gone(pool: Callable[[int], Pool], adapter: Adapter, tmp_path: Path) -> None:
    folder = tmp_path / "step-4"
    folder.mkdir()
    assert not any(pool(2).run(replaced, adapter, folder))
    assert (folder / "codecs" / ".metadata").is_file()


def not_removed(adapter: Adapter, checkpoint: Path) -> str:
    """In a worker: what a rank hears if rank 0 may not remove what was there."""
    model, optimizer = trained(adapter)
    save_codec_state(model, [optimizer], checkpoint)
    with mock.patch("shutil.rmtree", side_effect=PermissionError("not yours")):
        try:
            save_codec_state(model, [optimizer], checkpoint)
        except PermissionError as error:
            return str(error)
    return "nothing"


@over_adapters
def test_all_ranks_hear_that_it_cannot_be_removed(
    pool: Callable[[int], Pool], adapter: Adapter, tmp_path: Path
) -> None:
    folder = tmp_path / "step-4"
    folder.mkdir()
    for error in pool(2).run(not_removed, adapter, folder):
        assert error == "not yours"


def heard_of_incomplete(adapter: Adapter, checkpoint: Path, harm: str) -> str:
    """In a worker: what a rank hears if the codec state lacks something."""
    model, optimizer = trained(adapter)
    save_codec_state(model, [optimizer], checkpoint)
    if dist.get_rank() == 0:
        files = sorted((checkpoint / "codecs").iterdir())
        if harm == "cut short":
            files[-1].write_bytes(files[-1].read_bytes()[:100])
        else:
            {path.name: path for path in files}[harm].unlink()
    dist.barrier()
    try:
        load_codec_state(model, [optimizer], checkpoint)
    except ValueError as error:
        return str(error)
    return "nothing"


@over_each(adapter=ADAPTERS, harm=[".metadata", "__0_0.distcp", "__1_0.distcp", "cut short"])
def test_all_ranks_hear_what_to_do_with_incomplete_codec_state(
    pool: Callable[[int], Pool], adapter: Adapter, harm: str, tmp_path: Path
) -> None:
    for error in pool(2).run(heard_of_incomplete, adapter, tmp_path, harm):
        assert f"the codec state in {tmp_path / 'codecs'} can't be read" in error
        assert "resume from another checkpoint, or remove this folder" in error
