"""Files that a frozen base comes from: checkpoints in full precision, and quantized bases that were saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from harness import llama, lora, models
from harness.adapter import Adapter, Case
from harness.covering import ADAPTERS, over_each
from harness.lora import refused
from harness.pool import Pools
from peft import PromptTuningConfig, VeraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp_zpp import NF4, Int4, Int8, Strategy, load_frozen_params, quantize_frozen_params, save_frozen_params
from fsdp_zpp.codecs import Codec
from fsdp_zpp.frozen.checkpoint_reading import TensorFiles

CODECS = [Int8(64), Int4(32), NF4(128)]
WEIGHT = "blocks.0.up.weight"
EITHER = pytest.mark.parametrize("make", [lora.make_base, lora.make_empty], ids=["with values", "on meta"])
Make = Callable[..., models.Net]


def save(folder: Path, **arguments: Any) -> Path:
    base = lora.make_base(**arguments)
    quantize_frozen_params(base, lora.CODEC)
    save_frozen_params(base, folder)
    return folder


def loading(folder: Path) -> Callable[[nn.Module], Any]:
    return lambda net: load_frozen_params(net, folder)


def quantizing(checkpoint: Any) -> Callable[[nn.Module], Any]:
    return lambda net: quantize_frozen_params(net, lora.CODEC, checkpoint=checkpoint)


def write_checkpoint(path: Path, tensors: dict[str, Tensor], changes: dict[str, Tensor | None] | None = None) -> Path:
    """A safetensors file of ``tensors``, of which ``changes`` replace some or leave them out."""
    state = {key: value for key, value in (tensors | (changes or {})).items() if value is not None}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({key: value.detach().clone() for key, value in state.items()}, path)
    return path


def write_index(path: Path, where: dict[str, Any]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"weight_map": where}))
    return path


def overwrite(file: Path) -> None:
    """Replace the bytes of a file that may be mapped."""
    with file.open("r+b") as stream:
        stream.write(b"\xff" * file.stat().st_size)


# ---- what a checkpoint in full precision must have


@EITHER
def test_all_of_a_checkpoint_is_loaded_and_copied(tmp_path: Path, make: Make) -> None:
    state = lora.make_base().state_dict()
    path = write_checkpoint(tmp_path / "model.safetensors", state)
    net = make(**({"seed": 1} if make is lora.make_base else {}))
    quantize_frozen_params(net, lora.CODEC, checkpoint=tmp_path)
    overwrite(path)
    assert torch.equal(lora.output_of(net), lora.output_of(lora.rounded(lora.make_base())))


@EITHER
@pytest.mark.parametrize("name", ["blocks.1.down.weight", "blocks.1.norm.bias", "blocks.0.shift"])
def test_a_checkpoint_that_lacks_a_tensor_or_has_another_shape_is_refused(
    tmp_path: Path, make: Make, name: str
) -> None:
    state = lora.make_base().state_dict()
    path = write_checkpoint(tmp_path / "model.safetensors", state, {name: None})
    refused(make(), quantizing(path), f"has no {name}; it has", str(path), "complete checkpoint")
    write_checkpoint(path, state, {name: torch.ones(1)})
    refused(make(), quantizing(path), f"{name} is (", f"in the model and (1,) in the checkpoint's {path}")


def test_dtypes_that_need_scales_are_refused(tmp_path: Path) -> None:
    state = lora.make_base().state_dict()
    saids = {
        torch.float8_e4m3fn: "the checkpoint has blocks.1.up.weight as torch.float8",
        torch.int8: "blocks.1.up.weight is torch.float32 in the model and torch.int8 in",
    }
    for dtype, said in saids.items():
        weight = {"blocks.1.up.weight": torch.zeros(91, 66).to(dtype)}
        path = write_checkpoint(tmp_path / "model.safetensors", state, weight)
        refused(lora.make_base(), quantizing(path), said, str(path))


def test_a_trained_weight_may_be_missing_and_is_loaded_if_it_is_there(tmp_path: Path) -> None:
    state = lora.make_base().state_dict()
    write_checkpoint(tmp_path / "model.safetensors", state, {"head.weight": None})
    net = lora.make_base(seed=1)
    head = net.head.weight.requires_grad_(True)
    quantize_frozen_params(net, lora.CODEC, checkpoint=tmp_path)
    assert torch.equal(net.head.weight, lora.make_base(seed=1).head.weight)
    assert net.head.weight is head
    empty = lora.make_empty()
    empty.head.requires_grad_(True)
    refused(empty, quantizing(tmp_path), "has no head.weight")
    write_checkpoint(tmp_path / "model.safetensors", state)
    quantize_frozen_params(empty, lora.CODEC, checkpoint=tmp_path)
    assert empty.head.weight.requires_grad
    assert torch.equal(empty.head.weight, lora.make_base().head.weight)


def test_a_tied_weight_may_be_stored_twice_if_both_are_equal(tmp_path: Path) -> None:
    state = lora.make_base(tied=True).state_dict()
    path = write_checkpoint(tmp_path / "model.safetensors", state)
    net = lora.make_empty(tied=True)
    quantize_frozen_params(net, lora.CODEC, checkpoint=path)
    assert torch.equal(lora.output_of(net), lora.output_of(lora.rounded(lora.make_base(tied=True))))
    write_checkpoint(path, state, {"head.weight": torch.zeros(71, 66)})
    refused(lora.make_empty(tied=True), quantizing(path), "ties embedding.weight and head.weight, but they differ in")


def test_buffers_are_loaded_and_saved_but_for_computed_ones_which_are_refused_on_meta(tmp_path: Path) -> None:
    def make() -> nn.Module:
        net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)).requires_grad_(False)
        net.register_buffer("angles", torch.arange(4.0), persistent=False)
        return net

    trained, net = make(), make()
    trained(torch.randn(8, 64))
    path = write_checkpoint(tmp_path / "model.safetensors", trained.state_dict())
    refused(make().to("meta"), quantizing(path), "angles is on the meta device", "init_empty_weights")
    quantize_frozen_params(net, lora.CODEC, checkpoint=path)
    for name, value in trained[1].state_dict().items():
        assert torch.equal(net[1].state_dict()[name], value)
    save_frozen_params(net, tmp_path / "base")
    index = json.loads((tmp_path / "base" / lora.INDEX).read_text())
    of_norm = {f"1.{name}" for name in net[1].state_dict()}
    assert set(index["weight_map"]) == {"0.weight.codes", "0.weight.scales", "0.bias"} | of_norm


def test_of_several_files_the_models_is_read(tmp_path: Path) -> None:
    state, said = lora.make_base().state_dict(), "has no model.safetensors or model.safetensors.index.json"
    refused(lora.make_empty(), quantizing(tmp_path), said)
    write_checkpoint(tmp_path / "weights.safetensors", state)
    refused(lora.make_empty(), quantizing(tmp_path), said)
    quantize_frozen_params(lora.make_empty(), checkpoint=tmp_path / "weights.safetensors")
    save(tmp_path, blocks=1)
    refused(lora.make_empty(), quantizing(tmp_path), "load it with load_frozen_params")
    write_checkpoint(tmp_path / "model-1.safetensors", state)
    write_index(tmp_path / "model.safetensors.index.json", dict.fromkeys(state, "model-1.safetensors"))
    quantize_frozen_params(lora.make_empty(), checkpoint=tmp_path)


# ---- what a saved base must have

MISFITS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "fewer layers": ({}, {"blocks": 4}, ("has no blocks.2.shift", "12 tensors of this Net")),
    "more layers": ({"blocks": 3}, {}, ("has blocks.2", "no place in this Net", lora.INDEX, "the architecture")),
    "tied": ({"tied": True}, {}, ("has no head.weight",)),
    "untied": ({}, {"tied": True}, ("ties embedding.weight and head.weight", lora.INDEX)),
    "another shape": ({}, {"hidden": 90}, ("is (90, 66) in the model and (91, 66) in",)),
}


@EITHER
@pytest.mark.parametrize("case", MISFITS)
def test_files_of_another_model_are_refused(tmp_path: Path, make: Make, case: str) -> None:
    saved, model, messages = MISFITS[case]
    refused(make(**model), loading(save(tmp_path, **saved)), *messages)


def test_a_model_that_is_trained_or_quantized_already_is_refused(tmp_path: Path) -> None:
    net = lora.make_base()
    net.head.requires_grad_(True)
    refused(net, loading(save(tmp_path)), "has head.weight as a quantized weight", "trainable")
    quantize_frozen_params(net)
    refused(net, loading(tmp_path), "which is already quantized in this Net")


@pytest.mark.parametrize("tied", [False, True])
def test_all_of_a_base_is_loaded_and_copied(tmp_path: Path, tied: bool) -> None:
    expected = lora.output_of(lora.rounded(lora.make_base(tied=tied)))
    save(tmp_path, tied=tied)
    nets = [lora.make_base(seed=1, tied=tied), lora.make_empty(tied=tied)]
    for net in nets:
        load_frozen_params(net, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    overwrite(file)
    for net in nets:
        assert torch.equal(net.blocks[1].shift, lora.make_base(tied=tied).blocks[1].shift)
        assert torch.equal(lora.output_of(net), expected)


def test_files_are_in_the_documented_format(tmp_path: Path) -> None:
    model = llama.make_base().requires_grad_(False)
    with pytest.raises(ValueError, match="which save_frozen_params writes"):
        load_frozen_params(model, tmp_path)
    with pytest.raises(ValueError, match="nothing of this LlamaForCausalLM is quantized"):
        save_frozen_params(model, tmp_path)
    quantize_frozen_params(model, Int8(64))
    save_frozen_params(model, tmp_path)
    index = json.loads((tmp_path / "frozen_base.safetensors.index.json").read_text())
    name = "model.layers.1.mlp.up_proj.weight"
    assert index["metadata"]["weights"][name] == {"shape": [112, 64], "dtype": "float32", "codec": "Int8", "block": 64}
    with safe_open(tmp_path / index["weight_map"][f"{name}.codes"], "pt") as file:
        codes, scales = file.get_tensor(f"{name}.codes").view(torch.int8), file.get_tensor(f"{name}.scales")
        norm = file.get_tensor("model.norm.weight")
    by_hand = (codes.view(-1, 64) * scales[:, None]).view(112, 64)
    assert torch.equal(by_hand, llama.rounded_base(Int8(64)).model.layers[1].mlp.up_proj.weight.cpu())
    assert torch.equal(norm, llama.make_base().model.norm.weight.cpu())


# ---- broken files


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n", b"null"])
def test_corrupt_files_are_named(tmp_path: Path, content: bytes) -> None:
    state = lora.make_base().state_dict()
    path = write_checkpoint(tmp_path / "model.safetensors", state)
    whole = path.read_bytes()
    for corrupt in (content, whole[:-100]):
        path.write_bytes(corrupt)
        refused(lora.make_base(), quantizing(path), f"{path} is not a complete safetensors file", "give a complete")
    path.rename(tmp_path / "part.safetensors")
    index = write_index(tmp_path / "model.safetensors.index.json", dict.fromkeys(state, "part.safetensors"))
    said = "part.safetensors is not a complete safetensors file"
    refused(lora.make_base(), quantizing(index), said, "give a complete")
    index.write_bytes(content)
    refused(lora.make_base(), quantizing(index), f"{index} is not an index of safetensors files", "give a complete")
    folder = save(tmp_path / "base")
    (saved,) = folder.glob("*.safetensors")
    saved.write_bytes(content)
    refused(lora.make_base(), loading(folder), f"{saved} is not a complete safetensors file", "save the base again")
    (folder / lora.INDEX).write_bytes(content)
    refused(lora.make_base(), loading(folder), f"{lora.INDEX} is not an index", "save the base again")


def test_an_index_names_files_of_its_folder(tmp_path: Path) -> None:
    state = lora.make_base().state_dict()
    index = tmp_path / "folder" / "model.safetensors.index.json"
    write_checkpoint(tmp_path / "model.safetensors", state)
    for file in ("../model.safetensors", str(tmp_path / "model.safetensors"), "a/../../model.safetensors", "", 3):
        write_index(index, dict.fromkeys(state, file))
        refused(lora.make_base(), quantizing(index), str(index), f"names {file!r} as the file of", "not in its folder")
    write_index(index, dict.fromkeys(state, "model.safetensors"))
    refused(lora.make_base(), quantizing(index), "there is no file", f"which {index} names", "give a complete")
    write_checkpoint(index.parent / "model.safetensors", state, {"head.weight": None})
    refused(lora.make_base(), quantizing(index), "model.safetensors has no head.weight, which", "give a complete")
    (index.parent / "model.safetensors").unlink()
    (index.parent / "model.safetensors").symlink_to(tmp_path / "model.safetensors")  # as a download cache has it
    quantize_frozen_params(lora.make_base(), checkpoint=index)


def of_weight(**said: Any) -> Callable[[dict[str, Any]], None]:
    return lambda index: index["metadata"]["weights"][WEIGHT].update(said)


WRONG_INDEX: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "format": (lambda index: index["metadata"].pop("format"), "is not the index of a quantized base"),
    "version": (lambda index: index["metadata"].update(version=2), "has the format version 2, but this fsdp_zpp reads"),
    "weight map": (lambda index: index.pop("weight_map"), "it has no weight_map"),
    "shape": (of_weight(shape=[91, -66]), "not a quantized weight"),
    "codec": (of_weight(codec="Int3"), "not a quantized weight"),
    "another block": (of_weight(block=32), "in blocks of 32"),
    "no codes": (lambda index: index["weight_map"].pop(f"{WEIGHT}.codes"), f"has no {WEIGHT}.codes"),
    "..": (lambda index: index["weight_map"].update({f"{WEIGHT}.codes": "../x.safetensors"}), "not in its folder"),
}


def test_a_wrong_index_of_a_base_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path) / lora.INDEX
    right = path.read_text()
    for change, message in WRONG_INDEX.values():
        index = json.loads(right)
        change(index)
        path.write_text(json.dumps(index))
        refused(lora.make_base(), loading(tmp_path), message, str(tmp_path), "save the base again")


WRONG_TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "longer": lambda values: torch.cat([values, values[:64]]),
    "shorter": lambda values: values[:-1],
    "dtype": lambda values: values.to(torch.float16),
}


def test_tensors_of_a_base_that_do_not_fit_or_are_not_finite_are_refused(tmp_path: Path) -> None:
    (file,) = save(tmp_path).glob("*.safetensors")
    right = {key: value.clone() for key, value in load_file(file).items()}
    for key in (f"{WEIGHT}.codes", f"{WEIGHT}.scales"):
        for change in WRONG_TENSORS.values():
            save_file(right | {key: change(right[key])}, file)
            said = f"has {key} as torch.", f"{WEIGHT}, Int8 in blocks of 64", "again"
            refused(lora.make_base(), loading(tmp_path), *said)
    for key in (f"{WEIGHT}.scales", "blocks.0.norm.weight"):
        for value in (torch.nan, torch.inf):
            broken = right[key].clone()
            broken.view(-1)[1:2].fill_(value)
            save_file(right | {key: broken}, file)
            said = f"is broken: {key} has values that are NaN or infinite", "save the"
            refused(lora.make_base(), loading(tmp_path), *said)
    save_file(right | {"blocks.0.norm.weight": torch.ones(1)}, file)
    for net in (lora.make_base(), lora.make_empty()):
        refused(net, loading(tmp_path), "blocks.0.norm.weight is (66,) in the model and (1,) in", ".safetensors")
    save_file(right | {"blocks.0.shift": torch.full_like(right["blocks.0.shift"], -torch.inf)}, file)  # a mask
    load_frozen_params(lora.make_base(), tmp_path)


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_weights_that_are_not_finite_are_not_quantized(tmp_path: Path, value: float) -> None:
    net = lora.make_base()
    net.blocks[0].up.weight[5, 7] = value
    refused(net, lambda net: quantize_frozen_params(net, lora.CODEC), f"{WEIGHT} has values that are NaN or infinite")
    path = write_checkpoint(tmp_path / "model.safetensors", net.state_dict())
    message = f"the checkpoint's {WEIGHT} has values that are NaN or infinite"
    refused(lora.make_empty(), quantizing(path), message, "give a complete one")


DIFFERENT = {
    "checkpoint": "not a complete safetensors",
    "base": "not a complete safetensors",
    "another save": "rank 2 read different files from rank 0",
}


def on_rank_2(folder: Path) -> None:
    for kind, said in DIFFERENT.items():
        own = folder / kind / ("broken" if dist.get_rank() == 2 else "whole")
        refused(lora.make_base(seed=1), quantizing(own) if kind == "checkpoint" else loading(own), said)


def test_what_one_rank_reads_wrong_is_an_error_on_all(pool: Pools, tmp_path: Path) -> None:
    for kind in DIFFERENT:
        for name in ("whole", "broken"):
            if kind == "checkpoint":
                write_checkpoint(tmp_path / kind / name / "model.safetensors", lora.make_base().state_dict())
            else:
                save(tmp_path / kind / name)
        if kind != "another save":
            (broken,) = (tmp_path / kind / "broken").glob("*.safetensors")
            broken.write_bytes(broken.read_bytes()[:-1])
    pool(4).run(on_rank_2, tmp_path)


# ---- the recipe for models that don't fit: without values, quantized from files, adapted, saved, loaded


def empty(tied: bool = False, tie: bool = True) -> nn.Module:
    """The base without values, as accelerate makes it."""
    with init_empty_weights():
        model = LlamaForCausalLM(LlamaConfig(**llama.CONFIG, tie_word_embeddings=tied))
    if tie:
        model.tie_weights()
    return model.requires_grad_(False)


def logits_of(model: nn.Module) -> Tensor:
    return llama.logits_of(model.to(models.device()))


def test_a_broken_tie_is_named(tmp_path: Path) -> None:
    base = llama.make_base(tied=True)
    base.save_pretrained(tmp_path / "base")
    model = empty(tied=True, tie=False)
    said = "has no lm_head.weight; ", "if the model ties it to another one, call model.tie_weights()"
    refused(model, quantizing(tmp_path / "base"), *said)
    quantize_frozen_params(base.requires_grad_(False), lora.CODEC)
    save_frozen_params(base, tmp_path / "quantized")
    refused(model, loading(tmp_path / "quantized"), *said)
    with pytest.raises(ValueError, match=r"has no embed_tokens\.weight; it has model"):
        load_frozen_params(empty().model, tmp_path / "quantized")


ADAPTED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "lora": lambda base: llama.adapt(base, {"default": "lora", "other": "head trained"}),
    "vera": lambda base: get_peft_model(base, VeraConfig(target_modules=["q_proj", "v_proj"], r=4)),
    "prompt": lambda base: get_peft_model(
        base, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2, num_layers=2, token_dim=64)
    ),
}


@pytest.mark.parametrize("make", ADAPTED.values(), ids=ADAPTED)
def test_adapters_are_no_part_of_the_base(tmp_path: Path, make: Callable[[nn.Module], nn.Module]) -> None:
    model = make(llama.make_base())
    quantize_frozen_params(model, lora.CODEC)
    save_frozen_params(model, tmp_path)
    plain = llama.make_base().requires_grad_(False)
    names = {name for name, _ in plain.named_parameters()}
    index = json.loads((tmp_path / lora.INDEX).read_text())
    assert {key.removesuffix(".codes").removesuffix(".scales") for key in index["weight_map"]} == names
    load_frozen_params(plain, tmp_path)
    assert torch.equal(logits_of(plain), logits_of(llama.rounded_base(lora.CODEC)))
    adapted = make(llama.make_base().requires_grad_(False))
    load_frozen_params(adapted, tmp_path)
    of_adapter = {n: p for n, p in adapted.named_parameters() if p.requires_grad}
    expected = {n: p for n, p in make(llama.make_base()).named_parameters() if p.requires_grad}
    assert all(torch.equal(of_adapter[name], value) for name, value in expected.items())


# ---- several ranks


def from_checkpoint(adapter: Adapter, codec: Codec, path: str) -> None:
    sizes: list[int] = []
    original = TensorFiles.values

    def watched(self: TensorFiles, key: str, first: int, last: int) -> Tensor:
        read = original(self, key, first, last)
        sizes.append(read.numel())
        return read

    model = empty()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorFiles, "values", watched)
        quantize_frozen_params(model, codec, checkpoint=path, gpus_per_node=2)
    model = llama.shard(adapter, llama.adapt(model, {"default": "lora"}), Strategy("IGG", gpus_per_node=2))
    alone = llama.adapt(llama.rounded_base(codec), {"default": "lora"})
    assert torch.equal(llama.logits_of(model), llama.logits_of(alone))
    largest = llama.VOCABULARY * llama.CONFIG["hidden_size"]
    assert max(sizes) <= 0.55 * largest  # the rows that half of the largest weight lies in


@over_each(rest=False, adapter=ADAPTERS, codec=CODECS[1:], max_shard_size={"one file": "1GB", "several": "60KB"})
def test_quantizing_from_a_checkpoint_reads_the_own_rows_alone(
    pool: Pools, adapter: Adapter, codec: Codec, max_shard_size: str, tmp_path: Path
) -> None:
    llama.make_base().save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (max_shard_size == "60KB")
    pool(4).run(from_checkpoint, adapter, codec, str(tmp_path))


def logits_of_net(model: Any) -> Tensor:
    with torch.no_grad():
        return model(models.batch(99, 0, rank=0)[:, :-1] % model.embedding.num_embeddings)


def saved(adapter: Adapter, codec: Codec, scope: str, path: str) -> Tensor:
    """In a worker: logits of a net whose base is saved under a strategy, before and after the same."""
    net = lora.make_net()
    for buffer in net.buffers():
        buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(0)))
    quantize_frozen_params(net, codec, placement=scope, gpus_per_node=2)
    model = adapter.shard(net, Case(), Strategy("IGG", gpus_per_node=2))
    before = logits_of_net(model)
    save_frozen_params(model, path, max_file_size=10_000)
    assert torch.equal(logits_of_net(model), before)
    return before


def loaded(adapter: Adapter, scope: str, gpus_per_node: int, path: str, expected: Tensor) -> None:
    net = lora.make_net()
    for tensor in (*net.parameters(), *net.buffers()):
        if not tensor.requires_grad:
            tensor.data.zero_()
    report = load_frozen_params(net, path, placement=scope, gpus_per_node=gpus_per_node)
    assert report.weights == 6
    assert set(report.left) == {"1-D"}
    model = adapter.shard(net, Case(), Strategy("GGG", gpus_per_node=gpus_per_node))
    assert torch.equal(logits_of_net(model), expected)


@over_each(rest=False, adapter=ADAPTERS, scope=["N", "I"], codec=CODECS)
def test_saved_and_loaded_at_other_world_sizes(
    pool: Pools, adapter: Adapter, scope: str, codec: Codec, tmp_path: Path
) -> None:
    expected = pool(4).run(saved, adapter, codec, scope, str(tmp_path))[0]
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    for world, gpus_per_node in ((2, 2), (4, 4)):
        pool(world).run(loaded, adapter, scope, gpus_per_node, str(tmp_path), expected)
