"""Files of a frozen base: quantized from a checkpoint slice by slice, saved, loaded at another world size, resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import llama
from harness.adapter import Adapter
from harness.covering import ADAPTERS, over_adapters, over_each
from harness.fsdp1 import Fsdp1
from harness.pool import Pool
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from fsdp_zpp import NF4, Int4, Int8, Strategy, load_frozen_params, quantize_frozen_params, save_frozen_params
from fsdp_zpp.codecs.base import Codec
from fsdp_zpp.frozen.files.tensor_files import TensorFiles

CODECS = [Int8(64), Int4(32), NF4(128)]


def write_checkpoint(folder: Path, files: int) -> Path:
    """The base as a checkpoint of some files, as Hugging Face writes it."""
    state = {name: value.clone() for name, value in llama.make_base().cpu().state_dict().items()}
    if files == 1:
        save_file(state, folder / "model.safetensors")
        return folder / "model.safetensors"
    names = [f"model-{i}.safetensors" for i in range(files)]
    where = {key: names[i % files] for i, key in enumerate(state)}
    for name in names:
        save_file({key: value for key, value in state.items() if where[key] == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def on_meta() -> nn.Module:
    """The base without values, but for what its constructor computes."""
    model = llama.make_base()
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)
    return model


# ---- from a checkpoint in full precision


def from_checkpoint(adapter: Adapter, codec: Codec, path: str) -> tuple[bool, int, int]:
    """In a worker: whether a model without values comes out as the oracle, and the most values read at once."""
    sizes: list[int] = []

    original = TensorFiles.values

    def watched(self: TensorFiles, key: str, first: int, last: int) -> Tensor:
        read = original(self, key, first, last)
        sizes.append(read.numel())
        return read

    TensorFiles.values = watched  # type: ignore[method-assign]
    try:
        model = on_meta()
        quantize_frozen_params(model, codec, checkpoint=path, gpus_per_node=2)
        model = llama.adapt(model, {"default": "lora"})
    finally:
        TensorFiles.values = original  # type: ignore[method-assign]
    model = llama.shard(adapter, model, Strategy("IGG", gpus_per_node=2))
    alone = llama.adapt(llama.rounded_base(codec), {"default": "lora"})
    largest = llama.VOCABULARY * llama.CONFIG["hidden_size"]
    return torch.equal(llama.logits_of(model), llama.logits_of(alone)), max(sizes), largest


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("codec", CODECS, ids=str)
@over_adapters
def test_quantizing_from_a_checkpoint_reads_the_own_rows_alone(
    pool: Callable[[int], Pool], adapter: Adapter, codec: Codec, files: int, tmp_path: Path
) -> None:
    path = write_checkpoint(tmp_path, files)
    for same, read_at_once, largest in pool(4).run(from_checkpoint, adapter, codec, str(path)):
        assert same
        assert read_at_once <= 0.55 * largest  # the rows that half of the largest weight lies in


def test_missing_weights_are_named(tmp_path: Path) -> None:
    save_file({"other": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"has no model\.embed_tokens\.weight; it has other"):
        quantize_frozen_params(on_meta(), checkpoint=tmp_path)
    with pytest.raises(ValueError, match=r"holds neither \*\.safetensors nor"):
        quantize_frozen_params(on_meta(), checkpoint=tmp_path / "..")


def test_other_shapes_are_named(tmp_path: Path) -> None:
    state = {name: torch.zeros(1, 1) for name in llama.make_base().state_dict()}
    save_file(state, tmp_path / "model.safetensors")
    said = r"is \(131, 64\) in the model and \(1, 1\) in the checkpoint's .*model.safetensors"
    with pytest.raises(ValueError, match=said):
        quantize_frozen_params(on_meta(), checkpoint=tmp_path)


def test_a_function_may_make_the_weights() -> None:
    state = llama.make_base().state_dict()
    model = on_meta()
    quantize_frozen_params(model, Int8(64), checkpoint=lambda name: state[name])
    assert torch.equal(llama_logits(model), llama_logits(llama.rounded_base(Int8(64))))


def llama_logits(model: nn.Module) -> Tensor:
    """Logits of a fixed batch, without ranks."""
    with torch.no_grad():
        return model.to("cpu")(input_ids=torch.arange(14).view(2, 7)).logits


# ---- the quantized base itself


def saved(adapter: Adapter, codec: Codec, scope: str, path: str) -> Tensor:
    """In a worker: logits of a model whose base is saved under a strategy, before and after the same."""
    model = llama.adapt(llama.make_base(), {"default": "lora"})
    quantize_frozen_params(model, codec, placement=scope, gpus_per_node=2)
    model = llama.shard(adapter, model, Strategy("IGG", gpus_per_node=2))
    before = llama.logits_of(model)
    save_frozen_params(model, path, max_file_size=20_000)
    assert torch.equal(llama.logits_of(model), before)
    return before


def loaded(adapter: Adapter, scope: str, gpus_per_node: int, path: str, meta: bool) -> Tensor:
    """In a worker: logits of a model that the base was loaded into."""
    base = on_meta() if meta else llama.make_base().requires_grad_(False)
    if not meta:
        for parameter in base.parameters():
            parameter.data.zero_()
    report = load_frozen_params(base, path, placement=scope, gpus_per_node=gpus_per_node)
    assert report.weights == sum(p.dim() == 2 for p in llama.make_base().parameters())
    assert report.left == {"not quantized in the files": tuple(n for n, _ in base.named_parameters())}
    model = llama.adapt(base, {"default": "lora"})
    return llama.logits_of(llama.shard(adapter, model, Strategy("GGG", gpus_per_node=gpus_per_node)))


@over_each(scope=["N", "I", "G"], codec=CODECS)
def test_saved_and_loaded_at_other_world_sizes(
    pool: Callable[[int], Pool], scope: str, codec: Codec, tmp_path: Path
) -> None:
    expected = pool(4).run(saved, ADAPTERS[0], codec, scope, str(tmp_path))[0]
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    for adapter in ADAPTERS:
        for world, gpus_per_node, meta in ((2, 2, True), (4, 2, False), (4, 4, True)):
            for logits in pool(world).run(loaded, adapter, scope, gpus_per_node, str(tmp_path), meta):
                assert torch.equal(logits, expected)


def test_files_are_in_the_documented_format(tmp_path: Path) -> None:
    model = llama.make_base().requires_grad_(False)
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


def test_what_can_not_be_saved_or_loaded_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="which save_frozen_params writes"):
        load_frozen_params(on_meta(), tmp_path)
    with pytest.raises(ValueError, match="nothing of this LlamaForCausalLM is quantized"):
        save_frozen_params(llama.make_base(), tmp_path)
    model = llama.make_base().requires_grad_(False)
    quantize_frozen_params(model)
    save_frozen_params(model, tmp_path)
    with pytest.raises(ValueError, match=r"has no embed_tokens\.weight; it has model"):
        load_frozen_params(on_meta().model, tmp_path)


# ---- torch.distributed.checkpoint


def resumed(adapter: Adapter, folder: str) -> tuple[list[float], list[float], list[str]]:
    """In a worker: losses after a resume, and without; and what of the base is in the checkpoint."""

    def make() -> tuple[Any, torch.optim.Optimizer]:
        model = llama.adapt(llama.make_base(), {"default": "lora"})
        model = llama.shard(adapter, model, Strategy.mixzpp(frozen=Int8(64), gpus_per_node=2))
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    model, optimizer = make()
    llama.train(model, optimizer)
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder)
    expected = llama.train(model, optimizer, 3)
    model, optimizer = make()
    state, optimizer_state = get_state_dict(model, optimizer)
    both = {"model": state, "optimizer": optimizer_state}
    dcp.load(both, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=both["model"], optim_state_dict=both["optimizer"])
    of_base = [name for name in state if "proj.base_layer.weight" in name or "embed_tokens" in name]
    return llama.train(model, optimizer, 3), expected, of_base


@pytest.mark.parametrize("adapter", [Fsdp1(mesh=True), ADAPTERS[1]], ids=str)
def test_resume_is_bit_for_bit(pool: Callable[[int], Pool], adapter: Adapter, tmp_path: Path) -> None:
    for ours, expected, of_base in pool(4).run(resumed, adapter, str(tmp_path)):
        assert ours == expected
        assert of_base == []
