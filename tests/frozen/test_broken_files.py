"""Broken files, wrong indices and wrong codes are errors on all ranks, and change nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import frozen_files as files
from harness.messages import Reply, assert_refused, attempt as attempt_refusal
from harness.pool import Pool
from refused_files import loading, quantizing, refused, save
from torch import Tensor

from fsdp_zpp import load_frozen_params, quantize_frozen_params

CORRUPT: dict[str, bytes] = {"empty": b"", "text": b"version https://git-lfs.github.com/spec/v1\n", "null": b"null"}


@pytest.mark.parametrize("content", CORRUPT.values(), ids=CORRUPT)
def test_corrupt_files_are_named(tmp_path: Path, content: bytes) -> None:
    state = files.make_base().state_dict()
    path = files.write_checkpoint(tmp_path / "model.safetensors", state)
    whole = path.read_bytes()
    for said in (content, whole[:-100]):
        path.write_bytes(said)
        refused(files.make_base(), quantizing(path), f"{path} is not a complete safetensors file", "give a complete")
    index = tmp_path / "model.safetensors.index.json"
    path.rename(tmp_path / "part.safetensors")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(state, "part.safetensors")}))
    said = "part.safetensors is not a complete safetensors file"
    refused(files.make_base(), quantizing(index), said, "give a complete")
    index.write_bytes(content)
    refused(files.make_base(), quantizing(index), f"{index} is not an index of safetensors files", "give a complete")
    folder = save(tmp_path / "base")
    (saved,) = folder.glob("*.safetensors")
    saved.write_bytes(content)
    refused(files.make_base(), loading(folder), f"{saved} is not a complete safetensors file", "save the base again")
    (folder / files.INDEX).write_bytes(content)
    refused(files.make_base(), loading(folder), f"{files.INDEX} is not an index", "save the base again")


def test_an_index_names_files_of_its_folder(tmp_path: Path) -> None:
    state = files.make_base().state_dict()
    index = tmp_path / "folder" / "model.safetensors.index.json"
    files.write_checkpoint(tmp_path / "model.safetensors", state)

    def write(file: Any, **more: str) -> None:
        index.parent.mkdir(exist_ok=True)
        index.write_text(json.dumps({"weight_map": {**dict.fromkeys(state, file), **more}}))

    for file in ("../model.safetensors", str(tmp_path / "model.safetensors"), "a/../../model.safetensors", "", 3):
        write(file)
        refused(files.make_base(), quantizing(index), str(index), f"names {file!r} as the file of", "not in its folder")
    write("model.safetensors")
    refused(files.make_base(), quantizing(index), "there is no file", f"which {index} names", "give a complete")
    files.write_checkpoint(index.parent / "model.safetensors", state, head__weight=None)
    refused(files.make_base(), quantizing(index), "model.safetensors has no head.weight, which", "give a complete")
    (index.parent / "model.safetensors").unlink()
    (index.parent / "model.safetensors").symlink_to(tmp_path / "model.safetensors")  # as a download cache has it
    quantize_frozen_params(files.make_base(), checkpoint=index)


WEIGHT = "blocks.0.up.weight"


def of_weight(**said: Any) -> Callable[[dict[str, Any]], None]:
    """An index that says something else of a weight."""
    return lambda index: index["metadata"]["weights"][WEIGHT].update(said)


WRONG_INDEX: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "format": (lambda index: index["metadata"].pop("format"), "is not the index of a quantized base"),
    "version": (lambda index: index["metadata"].update(version=2), "has the format version 2, but this fsdp_zpp reads"),
    "metadata": (lambda index: index.pop("metadata"), "is not the index of a quantized base"),
    "weights": (lambda index: index["metadata"].update(weights=[]), "is not the index of a quantized base"),
    "weight map": (lambda index: index.pop("weight_map"), "it has no weight_map"),
    "weight": (lambda index: index["metadata"]["weights"].update({WEIGHT: 3}), "not a quantized weight"),
    "no shape": (lambda index: index["metadata"]["weights"][WEIGHT].pop("shape"), "not a quantized weight"),
    "shape": (of_weight(shape=[91, -66]), "not a quantized weight"),
    "codec": (of_weight(codec="Int3"), "not a quantized weight"),
    "dtype": (of_weight(dtype="nn"), "not a quantized weight"),
    "no block": (of_weight(block=63), "not a quantized weight"),
    "another block": (of_weight(block=32), "in blocks of 32"),
    "larger blocks": (of_weight(block=128), "in blocks of 128"),
    "another codec": (of_weight(codec="Int4"), "Int4 in blocks of 64"),
    "no codes": (lambda index: index["weight_map"].pop(f"{WEIGHT}.codes"), f"has no {WEIGHT}.codes"),
    "..": (lambda index: index["weight_map"].update({f"{WEIGHT}.codes": "../x.safetensors"}), "not in its folder"),
}


@pytest.mark.parametrize(("change", "message"), WRONG_INDEX.values(), ids=WRONG_INDEX)
def test_a_wrong_index_of_a_base_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    files.change_index(save(tmp_path), change)
    refused(files.make_base(), loading(tmp_path), message, str(tmp_path), "save the base again")


WRONG_TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "longer": lambda values: torch.cat([values, values[:64]]),
    "shorter": lambda values: values[:-1],
    "2-D": lambda values: values[None],
    "dtype": lambda values: values.to(torch.float16),
}


@pytest.mark.parametrize("change", WRONG_TENSORS.values(), ids=WRONG_TENSORS)
@pytest.mark.parametrize("kind", ["codes", "scales"])
def test_codes_and_scales_that_do_not_fit_are_refused(
    tmp_path: Path, kind: str, change: Callable[[Tensor], Tensor]
) -> None:
    key = f"{WEIGHT}.{kind}"
    files.change_tensors(save(tmp_path), lambda tensors: tensors.update({key: change(tensors[key])}))
    refused(files.make_base(), loading(tmp_path), f"has {key} as torch.", f"{WEIGHT}, Int8 in blocks of 64", "again")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("key", [f"{WEIGHT}.scales", "blocks.0.norm.weight"])
def test_a_base_with_values_that_are_not_finite_is_refused(tmp_path: Path, key: str, value: float) -> None:
    files.change_tensors(save(tmp_path), lambda tensors: tensors[key].view(-1)[1:2].fill_(value))
    refused(files.make_base(), loading(tmp_path), f"is broken: {key} has values that are NaN or infinite", "save the")


def test_a_mask_of_infinite_values_is_none_of_them(tmp_path: Path) -> None:
    files.change_tensors(save(tmp_path), lambda tensors: tensors["blocks.0.shift"].fill_(-torch.inf))
    load_frozen_params(files.make_base(), tmp_path)


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_weights_that_are_not_finite_are_not_quantized(tmp_path: Path, value: float) -> None:
    net = files.make_base()
    net.blocks[0].up.weight[5, 7] = value
    refused(net, lambda net: quantize_frozen_params(net, files.CODEC), f"{WEIGHT} has values that are NaN or infinite")
    path = files.write_checkpoint(tmp_path / "model.safetensors", net.state_dict())
    message = f"the checkpoint's {WEIGHT} has values that are NaN or infinite"
    refused(files.make_empty(), quantizing(path), message, "give a complete one")


def on_rank_2(kind: str, folder: str) -> tuple[Reply, bool]:
    """In a worker: what is said where rank 2 sees other files than the others, and whether the net is as it was."""
    own = Path(folder) / ("broken" if dist.get_rank() == 2 else "whole")
    net = files.make_base(seed=1)
    before = files.snapshot(net)

    def load() -> None:
        if kind == "checkpoint":
            quantize_frozen_params(net, files.CODEC, checkpoint=own, gpus_per_node=2)
        else:
            load_frozen_params(net, own, gpus_per_node=2)

    return attempt_refusal((load, ValueError, "")), files.snapshot(net) == before


@pytest.mark.parametrize("kind", ["checkpoint", "base", "another save"])
def test_what_one_rank_reads_wrong_is_an_error_on_all(pool: Callable[[int], Pool], tmp_path: Path, kind: str) -> None:
    message = "rank 2 read different files from rank 0" if kind == "another save" else "not a complete safetensors file"
    for name in ("whole", "broken"):
        if kind == "checkpoint":
            files.write_checkpoint(tmp_path / name / "model.safetensors", files.make_base().state_dict())
        else:
            save(tmp_path / name)
    if kind != "another save":
        (broken,) = (tmp_path / "broken").glob("*.safetensors")
        broken.write_bytes(broken.read_bytes()[:-1])
    replies = pool(4).run(on_rank_2, kind, str(tmp_path))
    assert_refused([reply for reply, _ in replies], (None, ValueError, message))
    assert [same for _, same in replies] == [True] * 4
