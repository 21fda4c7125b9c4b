"""Files of a base must be those of the model, tensor for tensor; whatever they lack or have wrong changes nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import frozen_files as files, models
from harness.pool import Pool
from harness.refusals import Reply, assert_refused, attempt as attempt_refusal
from safetensors.torch import save_file
from torch import Tensor, nn

from fsdp_zpp import load_frozen_params, quantize_frozen_params, save_frozen_params


def save(folder: Path, **arguments: Any) -> Path:
    """A saved base."""
    base = files.make_base(**arguments)
    quantize_frozen_params(base, files.CODEC)
    save_frozen_params(base, folder)
    return folder


def refused(net: nn.Module, load: Callable[[nn.Module], Any], *messages: str) -> None:
    """Assert that a call is refused, names all of ``messages``, and leaves the net alone."""
    before = files.snapshot(net)
    with pytest.raises(ValueError, match=re.escape(messages[0])) as error:
        load(net)
    for message in messages:
        assert message in str(error.value)
    assert files.snapshot(net) == before


def loading(folder: Path) -> Callable[[nn.Module], Any]:
    return lambda net: load_frozen_params(net, folder)


def quantizing(checkpoint: Any) -> Callable[[nn.Module], Any]:
    return lambda net: quantize_frozen_params(net, files.CODEC, checkpoint=checkpoint)


EITHER = pytest.mark.parametrize("make", [files.make_base, files.make_empty], ids=["with values", "on meta"])
Make = Callable[..., models.Net]

# ---- quantized files and a model


@EITHER
def test_files_of_fewer_layers(tmp_path: Path, make: Make) -> None:
    refused(make(blocks=4), loading(save(tmp_path)), "has no blocks.2.shift", "12 tensors of this Net", str(tmp_path))


@EITHER
def test_files_of_more_layers(tmp_path: Path, make: Make) -> None:
    save(tmp_path, blocks=3)
    refused(make(), loading(tmp_path), "has blocks.2", "no place in this Net", files.INDEX, "the architecture")


@EITHER
def test_tied_files_and_an_untied_model(tmp_path: Path, make: Make) -> None:
    refused(make(), loading(save(tmp_path, tied=True)), "has no head.weight")


@EITHER
def test_untied_files_and_a_tied_model(tmp_path: Path, make: Make) -> None:
    refused(make(tied=True), loading(save(tmp_path)), "ties embedding.weight and head.weight", files.INDEX)


@EITHER
def test_tied_files_and_a_tied_model(tmp_path: Path, make: Make) -> None:
    net = make(tied=True)
    load_frozen_params(net, save(tmp_path, tied=True))
    assert torch.equal(files.output_of(net), files.output_of(files.rounded(files.make_base(tied=True))))


@EITHER
def test_no_norm_is_broadcast(tmp_path: Path, make: Make) -> None:
    files.change_tensors(save(tmp_path), lambda tensors: tensors.update({"blocks.0.norm.weight": torch.ones(1)}))
    refused(make(), loading(tmp_path), "blocks.0.norm.weight is (66,) in the model and (1,) in", ".safetensors")


@EITHER
def test_another_shape_of_the_second_weight(tmp_path: Path, make: Make) -> None:
    refused(make(hidden=90), loading(save(tmp_path)), "is (90, 66) in the model and (91, 66) in")


def test_trained_meanwhile(tmp_path: Path) -> None:
    net = files.make_base()
    net.head.requires_grad_(True)
    refused(net, loading(save(tmp_path)), "has head.weight, quantized, which is not a frozen weight", "trainable")


def test_quantized_already(tmp_path: Path) -> None:
    net = files.make_base()
    quantize_frozen_params(net)
    refused(net, loading(save(tmp_path)), "which is already quantized in this Net")


def test_buffers_are_saved_and_loaded(tmp_path: Path) -> None:
    expected = files.output_of(files.rounded(files.make_base()))
    save(tmp_path)
    for net in (files.make_base(seed=1), files.make_empty()):
        load_frozen_params(net, tmp_path)
        assert torch.equal(net.blocks[1].shift, files.make_base().blocks[1].shift)
        assert torch.equal(files.output_of(net), expected)


def test_nothing_aliases_files(tmp_path: Path) -> None:
    net = files.make_empty()
    load_frozen_params(net, save(tmp_path))
    before = files.output_of(net)
    (file,) = tmp_path.glob("*.safetensors")
    with file.open("r+b") as stream:
        stream.seek(0)
        stream.write(b"\xff" * file.stat().st_size)
    assert torch.equal(files.output_of(net), before)


# ---- a checkpoint in full precision


@EITHER
def test_all_of_a_checkpoint_is_loaded(tmp_path: Path, make: Make) -> None:
    path = files.write_checkpoint(tmp_path / "model.safetensors", files.make_base().state_dict())
    net = make(**({"seed": 1} if make is files.make_base else {}))
    quantize_frozen_params(net, files.CODEC, checkpoint=tmp_path)
    with path.open("r+b") as stream:  # parameters are copies of what is mapped
        stream.write(b"\xff" * path.stat().st_size)
    assert torch.equal(files.output_of(net), files.output_of(files.rounded(files.make_base())))


def test_batch_norm_from_a_checkpoint(tmp_path: Path) -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)).requires_grad_(False)

    trained = make()
    for _ in range(3):
        trained(torch.randn(8, 64))
    files.write_checkpoint(tmp_path / "model.safetensors", trained.state_dict())
    for net in (make(), make().to("meta")):
        quantize_frozen_params(net, files.CODEC, checkpoint=tmp_path)
        for name, value in trained[1].state_dict().items():
            assert torch.equal(net[1].state_dict()[name], value)


MISSING = ["blocks__1__down__weight", "blocks__1__norm__bias", "blocks__0__shift"]


@EITHER
@pytest.mark.parametrize("name", MISSING)
def test_a_checkpoint_lacks_a_tensor(tmp_path: Path, make: Make, name: str) -> None:
    state = files.make_base().state_dict()
    path = files.write_checkpoint(tmp_path / "model.safetensors", state, **{name: None})
    refused(make(), quantizing(path), f"has no {name.replace('__', '.')}; it has", str(path), "complete checkpoint")
    del state[name.replace("__", ".")]
    refused(make(), quantizing(lambda key: state[key]), f"has no {name.replace('__', '.')}", "is asked for all")


@EITHER
@pytest.mark.parametrize("name", MISSING)
def test_a_checkpoint_has_another_shape(tmp_path: Path, make: Make, name: str) -> None:
    state = files.make_base().state_dict()
    path = files.write_checkpoint(tmp_path / "model.safetensors", state, **{name: torch.ones(1)})
    key = name.replace("__", ".")
    refused(make(), quantizing(path), f"{key} is (", f"in the model and (1,) in the checkpoint's {path}")
    refused(make(), quantizing(lambda name: torch.ones(1) if name == key else state[name]), f"{key} is (", "(1,) in")


def test_dtypes_that_values_alone_do_not_explain(tmp_path: Path) -> None:
    state = files.make_base().state_dict()
    for dtype in (torch.float8_e4m3fn, torch.int8):
        weight = torch.zeros(91, 66).to(dtype)
        path = files.write_checkpoint(tmp_path / "model.safetensors", state, blocks__1__up__weight=weight)
        refused(files.make_base(), quantizing(path), "blocks.1.up.weight is torch.float32 in the model and", str(path))


def test_what_is_trained_may_be_missing(tmp_path: Path) -> None:
    state = files.make_base().state_dict()
    files.write_checkpoint(tmp_path / "model.safetensors", state, head__weight=None)
    net = files.make_base(seed=1)
    head = net.head.weight.requires_grad_(True)
    quantize_frozen_params(net, files.CODEC, checkpoint=tmp_path)
    assert torch.equal(net.head.weight, files.make_base(seed=1).head.weight)
    assert net.head.weight is head
    empty = files.make_empty()
    empty.head.requires_grad_(True)
    refused(empty, quantizing(tmp_path), "has no head.weight")


def test_what_is_trained_is_loaded_if_it_is_there(tmp_path: Path) -> None:
    files.write_checkpoint(tmp_path / "model.safetensors", files.make_base().state_dict())
    net = files.make_empty()
    net.head.requires_grad_(True)
    quantize_frozen_params(net, files.CODEC, checkpoint=tmp_path)
    assert net.head.weight.requires_grad
    assert torch.equal(net.head.weight, files.make_base().head.weight)


def test_a_tied_weight_that_is_stored_twice(tmp_path: Path) -> None:
    state = files.make_base(tied=True).state_dict()
    path = files.write_checkpoint(tmp_path / "model.safetensors", state)
    net = files.make_empty(tied=True)
    quantize_frozen_params(net, files.CODEC, checkpoint=path)
    assert torch.equal(files.output_of(net), files.output_of(files.rounded(files.make_base(tied=True))))
    files.write_checkpoint(path, state, head__weight=torch.zeros(71, 66))
    refused(files.make_empty(tied=True), quantizing(path), "ties embedding.weight and head.weight, but they differ in")


def test_computed_buffers_without_values(tmp_path: Path) -> None:
    def make() -> nn.Module:
        net = nn.Sequential(nn.Linear(64, 64)).requires_grad_(False)
        net.register_buffer("angles", torch.arange(4.0), persistent=False)
        return net

    path = files.write_checkpoint(tmp_path / "model.safetensors", make().state_dict())
    for checkpoint in (path, lambda name: torch.zeros(64, 64)):
        refused(make().to("meta"), quantizing(checkpoint), "angles is on the meta device", "init_empty_weights")
    quantize_frozen_params(make(), files.CODEC, checkpoint=path)


# ---- which file of a folder, and whether it is one


def test_the_model_is_chosen(tmp_path: Path) -> None:
    state = files.make_base().state_dict()
    other = {"layers.0.weight": torch.zeros(2)}
    for name in ("adapter_model", "consolidated", "a"):
        save_file(other, tmp_path / f"{name}.safetensors")
        index = {"weight_map": dict.fromkeys(other, f"{name}.safetensors")}
        (tmp_path / f"{name}.safetensors.index.json").write_text(json.dumps(index))
    save(tmp_path, blocks=1)
    refused(files.make_empty(), quantizing(tmp_path), "has no model.safetensors", "consolidated", "the path of one")
    files.write_checkpoint(tmp_path / "model-1.safetensors", state)
    index = {"weight_map": dict.fromkeys(state, "model-1.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    quantize_frozen_params(files.make_empty(), checkpoint=tmp_path)


def test_the_only_file_is_chosen(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    files.write_checkpoint(folder / "weights.safetensors", files.make_base().state_dict())
    save_file({"x": torch.zeros(1)}, folder / "adapter_model.safetensors")
    quantize_frozen_params(files.make_empty(), checkpoint=folder)
    (folder / "weights.safetensors").unlink()
    refused(files.make_empty(), quantizing(folder), "adapter_model.safetensors, which is an adapter's")
    save(tmp_path / "b")
    refused(files.make_empty(), quantizing(tmp_path / "b"), "load it with load_frozen_params")


def broken(path: Path, content: bytes) -> None:
    path.write_bytes(content)


CORRUPT: dict[str, bytes] = {"empty": b"", "text": b"version https://git-lfs.github.com/spec/v1\n", "null": b"null"}


@pytest.mark.parametrize("content", CORRUPT.values(), ids=CORRUPT)
def test_corrupt_files(tmp_path: Path, content: bytes) -> None:
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


def test_an_index_and_its_files(tmp_path: Path) -> None:
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
def test_a_wrong_index_of_a_base(tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
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
def test_wrong_codes_of_a_base(tmp_path: Path, kind: str, change: Callable[[Tensor], Tensor]) -> None:
    key = f"{WEIGHT}.{kind}"
    files.change_tensors(save(tmp_path), lambda tensors: tensors.update({key: change(tensors[key])}))
    refused(files.make_base(), loading(tmp_path), f"has {key} as torch.", f"{WEIGHT}, Int8 in blocks of 64", "again")


# ---- ranks


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
def test_all_ranks_hear_of_it(pool: Callable[[int], Pool], tmp_path: Path, kind: str) -> None:
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
