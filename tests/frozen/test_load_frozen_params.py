"""A saved base must be that of the model, tensor for tensor; whatever it lacks or has wrong changes nothing."""

from __future__ import annotations

from pathlib import Path

import torch
from harness import frozen_files as files
from refused_files import EITHER, Make, loading, refused, save

from fsdp_zpp import load_frozen_params, quantize_frozen_params


@EITHER
def test_files_of_fewer_layers_are_refused(tmp_path: Path, make: Make) -> None:
    refused(make(blocks=4), loading(save(tmp_path)), "has no blocks.2.shift", "12 tensors of this Net", str(tmp_path))


@EITHER
def test_files_of_more_layers_are_refused(tmp_path: Path, make: Make) -> None:
    save(tmp_path, blocks=3)
    refused(make(), loading(tmp_path), "has blocks.2", "no place in this Net", files.INDEX, "the architecture")


@EITHER
def test_tied_files_are_refused_by_an_untied_model(tmp_path: Path, make: Make) -> None:
    refused(make(), loading(save(tmp_path, tied=True)), "has no head.weight")


@EITHER
def test_untied_files_are_refused_by_a_tied_model(tmp_path: Path, make: Make) -> None:
    refused(make(tied=True), loading(save(tmp_path)), "ties embedding.weight and head.weight", files.INDEX)


@EITHER
def test_tied_files_load_into_a_tied_model(tmp_path: Path, make: Make) -> None:
    net = make(tied=True)
    load_frozen_params(net, save(tmp_path, tied=True))
    assert torch.equal(files.output_of(net), files.output_of(files.rounded(files.make_base(tied=True))))


@EITHER
def test_no_tensor_is_broadcast(tmp_path: Path, make: Make) -> None:
    files.change_tensors(save(tmp_path), lambda tensors: tensors.update({"blocks.0.norm.weight": torch.ones(1)}))
    refused(make(), loading(tmp_path), "blocks.0.norm.weight is (66,) in the model and (1,) in", ".safetensors")


@EITHER
def test_a_weight_of_another_shape_is_refused(tmp_path: Path, make: Make) -> None:
    refused(make(hidden=90), loading(save(tmp_path)), "is (90, 66) in the model and (91, 66) in")


def test_a_weight_that_is_trained_now_is_refused(tmp_path: Path) -> None:
    net = files.make_base()
    net.head.requires_grad_(True)
    refused(net, loading(save(tmp_path)), "has head.weight as a quantized weight", "trainable")


def test_a_model_that_is_quantized_already_is_refused(tmp_path: Path) -> None:
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


def test_a_loaded_base_does_not_alias_its_files(tmp_path: Path) -> None:
    net = files.make_empty()
    load_frozen_params(net, save(tmp_path))
    before = files.output_of(net)
    (file,) = tmp_path.glob("*.safetensors")
    with file.open("r+b") as stream:
        stream.seek(0)
        stream.write(b"\xff" * file.stat().st_size)
    assert torch.equal(files.output_of(net), before)
