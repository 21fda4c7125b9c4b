"""A checkpoint that a base is quantized from must be that of the model, tensor for tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from harness import frozen_files as files
from refused_files import EITHER, Make, quantizing, refused, save
from safetensors.torch import save_file
from torch import nn

from fsdp_zpp import quantize_frozen_params


@EITHER
def test_all_of_a_checkpoint_is_loaded(tmp_path: Path, make: Make) -> None:
    path = files.write_checkpoint(tmp_path / "model.safetensors", files.make_base().state_dict())
    net = make(**({"seed": 1} if make is files.make_base else {}))
    quantize_frozen_params(net, files.CODEC, checkpoint=tmp_path)
    with path.open("r+b") as stream:  # parameters are copies of what is mapped
        stream.write(b"\xff" * path.stat().st_size)
    assert torch.equal(files.output_of(net), files.output_of(files.rounded(files.make_base())))


def test_buffers_are_loaded_from_a_checkpoint(tmp_path: Path) -> None:
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
def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path: Path, make: Make, name: str) -> None:
    state = files.make_base().state_dict()
    path = files.write_checkpoint(tmp_path / "model.safetensors", state, **{name: None})
    refused(make(), quantizing(path), f"has no {name.replace('__', '.')}; it has", str(path), "complete checkpoint")
    del state[name.replace("__", ".")]
    refused(make(), quantizing(lambda key: state[key]), f"has no {name.replace('__', '.')}", "is asked for all")


@EITHER
@pytest.mark.parametrize("name", MISSING)
def test_a_checkpoint_of_another_shape_is_refused(tmp_path: Path, make: Make, name: str) -> None:
    state = files.make_base().state_dict()
    path = files.write_checkpoint(tmp_path / "model.safetensors", state, **{name: torch.ones(1)})
    key = name.replace("__", ".")
    refused(make(), quantizing(path), f"{key} is (", f"in the model and (1,) in the checkpoint's {path}")
    refused(make(), quantizing(lambda name: torch.ones(1) if name == key else state[name]), f"{key} is (", "(1,) in")


def test_dtypes_that_need_scales_are_refused(tmp_path: Path) -> None:
    state = files.make_base().state_dict()
    for dtype in (torch.float8_e4m3fn, torch.int8):
        weight = torch.zeros(91, 66).to(dtype)
        path = files.write_checkpoint(tmp_path / "model.safetensors", state, blocks__1__up__weight=weight)
        refused(files.make_base(), quantizing(path), "the checkpoint has blocks.1.up.weight as torch.", str(path))


def test_a_trained_weight_may_be_missing(tmp_path: Path) -> None:
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


def test_a_trained_weight_is_loaded_if_it_is_there(tmp_path: Path) -> None:
    files.write_checkpoint(tmp_path / "model.safetensors", files.make_base().state_dict())
    net = files.make_empty()
    net.head.requires_grad_(True)
    quantize_frozen_params(net, files.CODEC, checkpoint=tmp_path)
    assert net.head.weight.requires_grad
    assert torch.equal(net.head.weight, files.make_base().head.weight)


def test_a_tied_weight_may_be_stored_twice_if_both_are_equal(tmp_path: Path) -> None:
    state = files.make_base(tied=True).state_dict()
    path = files.write_checkpoint(tmp_path / "model.safetensors", state)
    net = files.make_empty(tied=True)
    quantize_frozen_params(net, files.CODEC, checkpoint=path)
    assert torch.equal(files.output_of(net), files.output_of(files.rounded(files.make_base(tied=True))))
    files.write_checkpoint(path, state, head__weight=torch.zeros(71, 66))
    refused(files.make_empty(tied=True), quantizing(path), "ties embedding.weight and head.weight, but they differ in")


def test_computed_buffers_on_meta_are_refused(tmp_path: Path) -> None:
    def make() -> nn.Module:
        net = nn.Sequential(nn.Linear(64, 64)).requires_grad_(False)
        net.register_buffer("angles", torch.arange(4.0), persistent=False)
        return net

    path = files.write_checkpoint(tmp_path / "model.safetensors", make().state_dict())
    for checkpoint in (path, lambda name: torch.zeros(64, 64)):
        refused(make().to("meta"), quantizing(checkpoint), "angles is on the meta device", "init_empty_weights")
    quantize_frozen_params(make(), files.CODEC, checkpoint=path)


def test_of_several_files_the_models_is_read(tmp_path: Path) -> None:
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


def test_the_only_file_is_read_unless_it_is_an_adapters_or_a_base(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    files.write_checkpoint(folder / "weights.safetensors", files.make_base().state_dict())
    save_file({"x": torch.zeros(1)}, folder / "adapter_model.safetensors")
    quantize_frozen_params(files.make_empty(), checkpoint=folder)
    (folder / "weights.safetensors").unlink()
    refused(files.make_empty(), quantizing(folder), "adapter_model.safetensors, which is an adapter's")
    save(tmp_path / "b")
    refused(files.make_empty(), quantizing(tmp_path / "b"), "load it with load_frozen_params")
