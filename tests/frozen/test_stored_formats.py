"""Weights that a checkpoint stores quantized decode to what the library that owns their format makes of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import stored_checkpoints as stored
import torch
from harness import llama
from torch import Tensor, nn

from fsdp_zpp import (
    NF4,
    Int8,
    Strategy,
    dequantize_frozen_params,
    plan,
    quantize_frozen_params,
    save_frozen_params,
)
from fsdp_zpp.codecs.base import Codec
from fsdp_zpp.collectives.mesh import ProcessMesh
from fsdp_zpp.config.topology import Topology
from fsdp_zpp.frozen.files.decoded_files import DecodedFiles
from fsdp_zpp.frozen.files.identity import check_base, describe_base
from fsdp_zpp.frozen.files.tensor_files import TensorFiles
from fsdp_zpp.frozen.modules import FrozenModule
from fsdp_zpp.frozen.placement import Placement
from fsdp_zpp.frozen.stored.format import StoredFormat, StoredWeight, stored_in
from fsdp_zpp.frozen.stored.fp8 import Fp8
from fsdp_zpp.frozen.weight import FrozenWeight

DEVICE = torch.device("cpu")
QUANTIZED = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module", params=stored.FORMATS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each format."""
    return stored.FORMATS[request.param](tmp_path_factory.mktemp("stored"))


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def rounded(codec: Codec, values: Tensor) -> Tensor:
    flat = values.reshape(-1).clone()
    codec.decode(codec.encode(flat.clone(), 1, 1), flat, 1, 1)
    return flat.view_as(values)


def test_codes_that_are_kept_decode_as_their_owner_decodes_them(checkpoint: Path) -> None:
    model = stored.empty(checkpoint)
    report = quantize_frozen_params(model, "as stored", checkpoint=checkpoint)
    assert report.weights == 14
    assert set(report.left) == {"1-D", "not stored quantized"}
    assert report.bytes_after < report.parameters * 1.05
    assert isinstance(model.get_submodule(QUANTIZED.removesuffix(".weight")), FrozenModule)
    dequantize_frozen_params(model)
    expected = stored.decoded(checkpoint)
    assert weights_of(model).keys() == expected.keys()
    for name, weight in weights_of(model).items():
        assert torch.equal(weight, expected[name]), name


def test_a_codec_encodes_what_the_owner_decodes(checkpoint: Path) -> None:
    for codec in (Int8(64), NF4(128)):
        model = stored.empty(checkpoint)
        assert quantize_frozen_params(model, codec, checkpoint=checkpoint).weights == 16
        dequantize_frozen_params(model)
        expected = stored.decoded(checkpoint)
        for name, weight in weights_of(model).items():
            value = expected[name]
            assert torch.equal(weight, rounded(codec, value) if value.dim() == 2 else value), name


def test_the_owners_model_has_the_same_weights_and_outputs(checkpoint: Path) -> None:
    owner = stored.owners_model(checkpoint)
    model = stored.empty(checkpoint, torch.bfloat16)
    quantize_frozen_params(model, "as stored", checkpoint=checkpoint)
    ours, theirs = (llama.logits_of(each, on=DEVICE) for each in (model, owner))
    # bf16 has 8 bits, and LLM.int8 rounds activations to 8 bits, too.
    assert (ours - theirs).norm() < 0.02 * theirs.norm()


def test_weights_that_are_trained_are_decoded(checkpoint: Path) -> None:
    model = stored.empty(checkpoint)
    trained = model.get_parameter(QUANTIZED).requires_grad_()
    assert trained.is_meta
    assert quantize_frozen_params(model, "as stored", checkpoint=checkpoint).weights == 13
    weight = model.get_parameter(QUANTIZED)
    assert weight.requires_grad
    assert torch.equal(weight.detach(), stored.decoded(checkpoint)[QUANTIZED])


def stored_weight(folder: Path, key: str) -> StoredWeight:
    path = folder / stored.FILE
    with stored.safe_open(path, "pt") as file:
        files = TensorFiles(dict.fromkeys(file.keys(), path), path, "")
    found = DecodedFiles(files).stored(key)
    assert found is not None
    return found


def rows(weight: StoredWeight, first: int, last: int) -> Tensor:
    """Some rows of a weight; a row of a stack is one of its matrices."""
    row = weight.shape[1:].numel()
    return weight.values(first * row, last * row).view(-1, *weight.shape[1:])


def test_any_rows_are_read_alone(checkpoint: Path) -> None:
    weight = stored_weight(checkpoint, QUANTIZED)
    expected = stored.decoded(checkpoint)[QUANTIZED]
    for first, last in ((0, 1), (5, 9), (60, 128), (127, 128), (3, 3)):
        assert torch.equal(rows(weight, first, last), expected[first:last])


def test_nf4_is_kept_by_the_librarys_own_codec(tmp_path: Path) -> None:
    stored.FORMATS["nf4, nested"](tmp_path)
    assert stored_weight(tmp_path, QUANTIZED).format.codec == NF4(64)


def test_codes_that_are_kept_are_not_saved_again(tmp_path: Path) -> None:
    stored.FORMATS["fp4"](tmp_path)
    model = stored.empty(tmp_path)
    quantize_frozen_params(model, "as stored", checkpoint=tmp_path)
    with pytest.raises(ValueError, match=r"is kept as stored, bitsandbytes fp4 in blocks of 64, and its codes are in"):
        save_frozen_params(model, tmp_path / "saved")


def test_a_base_is_told_from_another(tmp_path: Path) -> None:
    stored.FORMATS["fp4"](tmp_path)
    models = [stored.empty(tmp_path) for _ in range(3)]
    for model in models[:2]:
        quantize_frozen_params(model, "as stored", checkpoint=tmp_path)
    described = describe_base(models[0])
    assert len(described) == 14
    check_base(models[1], described, "here")
    key = f"{QUANTIZED}.absmax"
    stored.change(tmp_path, lambda tensors: tensors.update({key: tensors[key] * 2}))
    quantize_frozen_params(models[2], "as stored", checkpoint=tmp_path)
    with pytest.raises(ValueError, match=r"1 of the 14 quantized weights of this LlamaForCausalLM differ"):
        check_base(models[2], described, "here")


def test_the_name_stands_for_a_codec_of_frozen_weights_alone() -> None:
    strategy = Strategy.from_dict({"preset": "zeropp", "frozen": "as stored"})
    assert strategy == Strategy.zeropp(frozen="as stored")
    assert strategy.to_dict()["frozen"] == "as stored"
    with pytest.raises(ValueError, match="which is for frozen weights alone"):
        Strategy.from_dict({"weights": "as stored"})
    with pytest.raises(ValueError, match="encodes no values itself; name a codec with as many bits"):
        plan(7e9, nodes=1, gpus_per_node=8, intra_gbps=2400, trainable=10**7, frozen=strategy.frozen)  # type: ignore[arg-type]


# ---- fp8 in all shapes, by the definition


def fp8_weight(
    shape: tuple[int, ...], block: tuple[int, int], scales: Tensor
) -> tuple[StoredFormat, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    kept = Fp8(torch.Size(shape), torch.bfloat16, {}, codes.dtype, block)
    return kept, {"codes": codes, "scales": scales}


def by_definition(codes: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Each value times the scale of its block, one by one."""
    rows, columns = torch.meshgrid(*(torch.arange(size) for size in codes.shape[-2:]), indexing="ij")
    return codes.float() * scales.float()[..., rows // block[0], columns // block[1]]


@pytest.mark.parametrize(
    "shape", [(300, 200), (128, 128), (7, 130), (2, 256, 130), (3, 96, 64), (2, 128, 128)], ids=str
)
@pytest.mark.parametrize("block", [(128, 128), (1, 200), (32, 64)], ids=str)
def test_fp8_in_blocks_that_end_within_a_weight(shape: tuple[int, ...], block: tuple[int, int]) -> None:
    grid = (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))
    scales = torch.rand(grid, generator=torch.Generator().manual_seed(2)) + 0.5
    kept, parts = fp8_weight(shape, block, scales)
    expected = by_definition(parts["codes"], scales, block)
    weight = stored_in(kept, parts)
    assert torch.equal(rows(weight, 0, shape[0]), expected)
    assert torch.equal(rows(weight, 1, 2), expected[1:2])
    # In chunks, as ranks hold them.
    for chunks in (1, 3):
        mesh = ProcessMesh(Topology(chunks, chunks), 0, None, None)
        payloads = []
        for rank in range(chunks):
            place = Placement("I", dataclasses.replace(mesh, rank=rank))
            payloads.append(FrozenWeight("a", kept.shape, torch.float32, kept.codec, place).keep(weight, DEVICE))
        out = torch.empty(chunks * place.chunk_numel(expected.numel(), kept.codec))
        kept.codec.decode_rows(torch.stack(payloads), out)
        assert torch.equal(out[: expected.numel()].view(shape), expected)


def test_fp8_with_one_scale_for_all_or_for_each_matrix() -> None:
    for shape, scales in (
        ((300, 200), torch.tensor(0.5)),
        ((3, 96, 64), torch.rand(3, 1, 1)),
        ((3, 96, 64), torch.rand(3)),
    ):
        block = (128, 200) if len(shape) == 2 else shape[-2:]
        kept, parts = fp8_weight(shape, block, scales)
        expected = parts["codes"].float() * (scales if scales.dim() != 1 else scales.view(3, 1, 1))
        assert torch.equal(rows(stored_in(kept, parts), 0, shape[0]), expected)


# ---- experts


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
@pytest.mark.parametrize("kind", ["qwen3", "deepseek"])
def test_experts_stay_as_stored(tmp_path: Path, kind: str, experts: str) -> None:
    stored.fp8(tmp_path, kind)
    owner = stored.owners_model(tmp_path)
    expected = weights_of(owner)
    model: Any = stored.empty(tmp_path, torch.bfloat16)
    quantize_frozen_params(model, "as stored", checkpoint=tmp_path)
    for each in (owner, model):
        each.set_experts_implementation(experts)
    # One expert at a time is decoded where they are eager.
    assert torch.equal(llama.logits_of(model, on=DEVICE), llama.logits_of(owner, on=DEVICE))
    stack = model.model.layers[1].mlp.experts
    assert isinstance(stack, FrozenModule)
    assert torch.equal(stack.gate_up_proj[3].dequantize(), expected["model.layers.1.mlp.experts.gate_up_proj"][3])
    dequantize_frozen_params(model)
    for name, weight in weights_of(model).items():
        assert torch.equal(weight, expected[name]), name


def test_matrices_that_end_within_a_block_can_only_be_encoded_anew(tmp_path: Path) -> None:
    stored.fp8(tmp_path, "qwen3", weight_block_size=(128, 64))

    def narrow(tensors: dict[str, Tensor]) -> None:
        for key in list(tensors):
            if ".experts." in key and key.endswith(("gate_proj.weight", "up_proj.weight")):
                tensors[key] = tensors[key][:96].contiguous()

    def narrow_config(text: str) -> str:
        return text.replace('"moe_intermediate_size": 128', '"moe_intermediate_size": 96')

    stored.change(tmp_path, narrow)
    stored.change(
        tmp_path,
        lambda tensors: tensors.update(
            {
                key: tensors[key][:, :96].contiguous()
                for key in list(tensors)
                if key.endswith("down_proj.weight") and ".experts." in key
            }
        ),
    )
    path = tmp_path / "config.json"
    path.write_text(narrow_config(path.read_text()))
    with pytest.raises(ValueError, match=r"the stack .*gate_up_proj can't stay as stored: a matrix of shape"):
        quantize_frozen_params(stored.empty(tmp_path), "as stored", checkpoint=tmp_path)
    model = stored.empty(tmp_path)
    quantize_frozen_params(model, Int8(64), checkpoint=tmp_path)
    name = "model.layers.1.mlp.experts.{}.gate_proj.weight"
    expected = rows(stored_weight(tmp_path, name.format(3)), 0, 96)
    dequantize_frozen_params(model)
    ours = model.get_parameter("model.layers.1.mlp.experts.gate_up_proj")[3, :96]
    assert (ours - expected).abs().max() < expected.abs().max() / 100
