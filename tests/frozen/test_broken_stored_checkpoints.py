"""Broken files of a quantized checkpoint are an error on all ranks that names the tensor; the model stays as it was."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import stored_checkpoints as stored
import torch
import torch.distributed as dist
from harness import frozen_files as files
from harness.pool import Pool
from refused_files import refused
from torch import Tensor

from fsdp_zpp import Int8, quantize_frozen_params

LAYER = "model.layers.1.mlp.down_proj."
KEY = f"{LAYER}weight"
CODECS = pytest.mark.parametrize("codec", ["as stored", Int8(64)], ids=str)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that returns a copy of a checkpoint of some format, which is made once."""
    made: dict[str, Path] = {}

    def copy(name: str) -> Path:
        if name not in made:
            made[name] = stored.FORMATS[name](tmp_path_factory.mktemp("made"))
        folder = tmp_path_factory.mktemp("copy")
        for file in (stored.FILE, "config.json"):
            shutil.copy(made[name] / file, folder / file)
        return folder

    return copy


def reading(folder: Path, codec: Any) -> Callable[[Any], Any]:
    return lambda net: quantize_frozen_params(net, codec, checkpoint=folder)


def dropped(key: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.pop(key)


def replaced(key: str, make: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({key: make(tensors[key]).contiguous()})


def halved(tensors: dict[str, Tensor]) -> None:
    replaced(KEY, lambda w: w[:, :128])(tensors)
    replaced(f"{KEY}_scale_inv", lambda s: s[:, :1])(tensors)


STATE = f"{KEY}.quant_state.bitsandbytes__nf4"


def in_state(**changes: Any) -> Callable[[dict[str, Tensor]], None]:
    def edit(state: Tensor) -> Tensor:
        content = json.loads(bytes(state.tolist())) | changes
        return torch.tensor(list(json.dumps(content).encode()), dtype=torch.uint8)

    return replaced(STATE, edit)


BROKEN: dict[str, tuple[str, Callable[[dict[str, Tensor]], None], str]] = {
    "fp8 without scales": ("fp8", dropped(f"{KEY}_scale_inv"), f"needs {KEY}_scale_inv, which is missing"),
    "fp8, too few scales": ("fp8", replaced(f"{KEY}_scale_inv", lambda s: s.new_ones(3, 2)), f"{KEY}_scale_inv as a"),
    "fp8, flat scales": ("fp8", replaced(f"{KEY}_scale_inv", lambda s: s.new_ones(5)), f"{KEY}_scale_inv as a tensor"),
    "fp8, scales in int64": ("fp8", replaced(f"{KEY}_scale_inv", Tensor.long), "needs fp32, bf16, fp16 or e8m0"),
    "fp8, NaN": ("fp8", replaced(f"{KEY}_scale_inv", lambda s: s * torch.nan), "NaN or infinite"),
    "fp8, half a weight": ("fp8", replaced(KEY, lambda w: w[:, :128]), "a scale for each 128 x 128 of (128, 128)"),
    "fp8 of another shape": ("fp8", halved, "(128, 256) in the model and (128, 128) in"),
    "nf4 without absmax": ("nf4", dropped(f"{KEY}.absmax"), f"{KEY}.absmax as nothing"),
    "nf4 without a state": ("nf4", dropped(STATE), f"{STATE} or ...fp4, which is missing"),
    "nf4 without its table": ("nf4", dropped(f"{KEY}.quant_map"), f"{KEY}.quant_map as nothing"),
    "nf4 with another table": ("nf4", replaced(f"{KEY}.quant_map", torch.zeros_like), "needs the values of nf4"),
    "nf4, broken state": ("nf4", replaced(STATE, lambda s: s[:-4]), f"{STATE} describes no weight"),
    "nf4, another state": ("nf4", in_state(quant_type="fp4"), "{'quant_type': 'fp4'}, which are not known of nf4"),
    "nf4, more in its state": ("nf4", in_state(rotation=1), "{'rotation': 1}, which are not known of nf4"),
    "nf4, too few scales": ("nf4", replaced(f"{KEY}.absmax", lambda s: s[:-1]), "torch.float32 (512,)"),
    "nf4, scales in fp16": ("nf4", replaced(f"{KEY}.absmax", Tensor.half), "torch.float32 (512,)"),
    "nf4, too few codes": ("nf4", replaced(KEY, lambda w: w[:-1]), "needs 32768 codes in 16384 elements"),
    "nf4, codes in int8": ("nf4", replaced(KEY, lambda w: w.view(torch.int8)), "4-bit codes in one of"),
    "nf4, NaN": ("nf4", replaced(f"{KEY}.absmax", lambda s: s * torch.inf), "NaN or infinite"),
    "int8 without scales": ("int8", dropped(f"{LAYER}SCB"), f"its scales {LAYER}SCB, which are missing"),
    "int8, too few scales": ("int8", replaced(f"{LAYER}SCB", lambda s: s[:-1]), "one torch.float32 scale for each row"),
    "int8 in tiles": ("int8", replaced(f"{LAYER}weight_format", lambda f: f + 1), "only codes in rows can be read"),
}


@CODECS
@pytest.mark.parametrize("case", BROKEN)
def test_tensors_that_do_not_fit_are_named(checkpoints: Callable[[str], Path], case: str, codec: Any) -> None:
    name, act, message = BROKEN[case]
    folder = stored.change(checkpoints(name), act)
    refused(stored.empty(folder), reading(folder, codec), message)


@CODECS
def test_a_truncated_file_is_named(checkpoints: Callable[[str], Path], codec: Any) -> None:
    folder = checkpoints("fp8")
    path = folder / stored.FILE
    path.write_bytes(path.read_bytes()[:-100])
    refused(stored.empty(folder), reading(folder, codec), f"{path} is not a complete safetensors file")


def test_an_unknown_method_is_named(checkpoints: Callable[[str], Path]) -> None:
    folder = checkpoints("fp8")
    model, path = stored.empty(folder), folder / "config.json"
    content = json.loads(path.read_text())
    content["quantization_config"]["quant_method"] = "of tomorrow"
    path.write_text(json.dumps(content))
    refused(model, reading(folder, "as stored"), "quantized by 'of tomorrow'; those that can be read are fp8, ")
    path.write_text("{")
    refused(model, reading(folder, "as stored"), f"{path} can't be read as JSON")


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "a method in a list": ({"quant_method": ["fp8"]}, "quant_method ['fp8'], and a string belongs"),
    "one block size": ({"weight_block_size": [32]}, "weight_block_size [32], and two sizes belong"),
    "an empty block": ({"weight_block_size": [0, 128]}, "weight_block_size [0, 128], and two sizes belong"),
    "a block's name": ({"weight_block_size": "x"}, "weight_block_size 'x', and a list belongs"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_of_another_kind_are_named(checkpoints: Callable[[str], Path], case: str) -> None:
    settings, message = SETTINGS[case]
    folder = checkpoints("fp8")
    model, path = stored.empty(folder), folder / "config.json"
    content = json.loads(path.read_text())
    content["quantization_config"] |= settings
    path.write_text(json.dumps(content))
    refused(model, reading(folder, "as stored"), message)


def test_a_configuration_of_another_kind_is_named(checkpoints: Callable[[str], Path]) -> None:
    folder = checkpoints("fp8")
    model = stored.empty(folder)
    (folder / "config.json").write_text('{"quantization_config": ["fp8"]}')
    refused(model, reading(folder, "as stored"), "quantization_config ['fp8'], and a mapping belongs")


def test_a_configuration_is_found_where_its_library_writes_it(checkpoints: Callable[[str], Path]) -> None:
    folder = checkpoints("fp8, other blocks")
    path = folder / "config.json"
    content = json.loads(path.read_text())
    config = content.pop("quantization_config")
    model = stored.empty(folder)
    for place in (
        {"quantization_config": config},
        {"compression_config": config},
        {"a": {"quantization_config": config}},
    ):
        path.write_text(json.dumps(content | place))
        assert quantize_frozen_params(stored.empty(folder), "as stored", checkpoint=folder).weights == 14
    parts = {
        part: {"quantization_config": config | {"weight_block_size": [64, size]}}
        for part, size in (("a", 128), ("b", 64))
    }
    path.write_text(json.dumps(content | parts))
    refused(model, reading(folder, "as stored"), f"{path} has several quantization_config, which differ")
    path.write_text(json.dumps(content))
    refused(model, reading(folder, "as stored"), "nothing says which values share one of the scales of")
    (folder / "hf_quant_config.json").write_text("{}")
    refused(model, reading(folder, "as stored"), "says that the checkpoint is quantized by ModelOpt; those that can be")


def test_without_a_configuration_names_and_dtypes_tell(checkpoints: Callable[[str], Path]) -> None:
    for name in ("nf4, nested", "int8"):
        folder = checkpoints(name)
        model = stored.empty(folder)
        (folder / "config.json").unlink()
        assert quantize_frozen_params(model, "as stored", checkpoint=folder).weights == 14


def test_without_a_configuration_open_blocks_are_refused(checkpoints: Callable[[str], Path]) -> None:
    folder = checkpoints("fp8")
    model = stored.empty(folder)
    (folder / "config.json").unlink()
    refused(model, reading(folder, "as stored"), "nothing says which values share one of the scales of")


def test_a_function_has_no_codes_to_keep() -> None:
    state = files.make_base().state_dict()
    refused(
        files.make_base(), lambda net: quantize_frozen_params(net, "as stored", checkpoint=state.get), "give a path"
    )


def on_one_rank(folders: list[str], codec: Any) -> str:
    """In a worker: the error, where one rank's files are broken; whether its model is as before."""
    model = stored.empty(Path(folders[0]))
    before = files.snapshot(model)
    with pytest.raises(ValueError, match=r"_scale_inv, which is missing|read different files from") as error:
        quantize_frozen_params(model, codec, checkpoint=folders[dist.get_rank() == 2], gpus_per_node=2)
    assert files.snapshot(model) == before
    return str(error.value)


@CODECS
def test_what_one_rank_can_not_read_is_an_error_on_all(
    pool: Callable[[int], Pool], checkpoints: Callable[[str], Path], codec: Any
) -> None:
    good, bad, other = checkpoints("fp8"), checkpoints("fp8"), checkpoints("fp8, other blocks")
    stored.change(bad, dropped(f"{KEY}_scale_inv"))
    for message in pool(4).run(on_one_rank, [str(good), str(bad)], codec):
        assert f"{KEY}_scale_inv, which is missing" in message
    for message in pool(4).run(on_one_rank, [str(good), str(other)], codec):
        assert "read different files from" in message
