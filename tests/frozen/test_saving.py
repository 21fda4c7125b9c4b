"""Saving a frozen base is all or nothing, wherever it is interrupted."""

from __future__ import annotations

import resource
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from harness import frozen_files as files, lora
from harness.adapter import Adapter, Case
from harness.covering import over_adapters
from harness.disk import FILE_SIZE, STEPS, Killed, dying_at, failing_at, quantized, stored_in
from harness.pool import Pool
from torch import nn

from fsdp_zpp import Int8, Strategy, load_frozen_params, quantize_frozen_params, save_frozen_params
from fsdp_zpp.frozen.encoding import MIN_NUMEL


def test_a_save_that_ends_anywhere_leaves_the_older_base_or_the_newer(tmp_path: Path) -> None:
    older, newer = quantized(0), quantized(1)
    expected = {"older": files.output_of(older), "newer": files.output_of(newer)}
    step, ended = 0, True
    while ended:
        for end in (dying_at, failing_at):
            folder = tmp_path / f"{end.__name__}{step}"
            save_frozen_params(older, folder, max_file_size=FILE_SIZE)
            with end(step) as steps, suppress(Killed, RuntimeError):
                save_frozen_params(newer, folder, max_file_size=FILE_SIZE)
            ended = len(steps.begun) > step
            now = "newer" if "replace" in steps.done else "older"
            assert torch.equal(stored_in(folder), expected[now])
            save_frozen_params(newer, folder, max_file_size=FILE_SIZE)  # which also clears up
            assert torch.equal(stored_in(folder), expected["newer"])
            assert len(list(folder.iterdir())) == len(list((tmp_path / "dying_at0").iterdir()))
        step += 1
    assert set(steps.done) == {name for _, name in STEPS}
    to_disk = [name for name in steps.done if name in ("save_file", "fsync", "replace")]
    assert to_disk[-4:] == ["fsync", "fsync", "replace", "fsync"]
    assert to_disk[:-4] == ["save_file", "fsync"] * (len(to_disk[:-4]) // 2)


def test_a_full_disk_leaves_the_older_base(tmp_path: Path) -> None:
    older, newer = quantized(0), quantized(1)
    save_frozen_params(older, tmp_path)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_SIZE, hard))
    try:
        with pytest.raises(RuntimeError, match=r"could not be saved to .*; what was there before still is"):
            save_frozen_params(newer, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert torch.equal(stored_in(tmp_path), files.output_of(older))


def test_a_loaded_base_outlives_its_files(tmp_path: Path) -> None:
    """Saving over the files that a base was loaded from."""
    save_frozen_params(quantized(0), tmp_path)
    net = files.make_empty()
    load_frozen_params(net, tmp_path)
    save_frozen_params(net, tmp_path)
    expected = files.output_of(quantized(0))
    assert torch.equal(files.output_of(net), expected)
    assert torch.equal(stored_in(tmp_path), expected)


def test_other_files_in_the_folder_stay(tmp_path: Path) -> None:
    for name in ("model.safetensors", "frozen_base-notes.txt", "frozen_base-mine.safetensors"):
        (tmp_path / name).write_text("mine")
    save_frozen_params(quantized(0), tmp_path)
    save_frozen_params(quantized(1), tmp_path)
    assert len(list(tmp_path.iterdir())) == 5


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RuntimeError, match=r"could not be saved to .*; what was there before still is"):
        save_frozen_params(quantized(0), tmp_path / "file")


def test_buffers_that_are_not_persistent_are_not_saved(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)).requires_grad_(False)
    net.register_buffer("angles", torch.arange(4.0), persistent=False)
    quantize_frozen_params(net)
    save_frozen_params(net, tmp_path)
    names = {key for file in tmp_path.glob("*.safetensors") for key in files.load_file(file)}
    of_norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert names == {"0.weight.codes", "0.weight.scales", "0.bias", *(f"1.{name}" for name in of_norm)}


def saved_when_sharded(adapter: Adapter, folder: str) -> list[str]:
    """In a worker: what of a base comes out otherwise when it is saved from a sharded model and loaded."""
    net, other = (lora.make_net(seed) for seed in (0, 1))
    generator = torch.Generator().manual_seed(0)
    for buffer in net.buffers():
        buffer.copy_(torch.randn(buffer.shape, generator=generator))
    expected = {
        name: tensor.detach().clone()
        for name, tensor in (*net.named_parameters(), *net.named_buffers())
        if not tensor.requires_grad and (tensor.dim() < 2 or tensor.numel() < MIN_NUMEL)
    }
    weights = {
        name: module.weight for name, module in lora.rounded_net(Int8(256)).named_modules() if name.endswith("base")
    }
    save_frozen_params(adapter.shard(net, Case(), Strategy.mixzpp(gpus_per_node=2)), folder)
    load_frozen_params(other, folder, gpus_per_node=2)
    loaded = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    found = {name: module.weight.detach() + 0 for name, module in other.named_modules() if name in weights}
    wrong = [name for name, tensor in expected.items() if not torch.equal(loaded[name], tensor)]
    return wrong + [name for name, weight in weights.items() if not torch.equal(found[name], weight)]


@over_adapters
def test_a_base_saved_from_a_sharded_model_loads_bit_for_bit(
    pool: Callable[[int], Pool], adapter: Adapter, tmp_path: Path
) -> None:
    assert pool(4).run(saved_when_sharded, adapter, str(tmp_path)) == [[]] * 4
