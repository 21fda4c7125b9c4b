"""Models whose checkpoints are quantized, in every format: their bases are sharded as stored, or encoded anew."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import moe
import pytest
import quantized_models as checkpoints
import torch
import torch.distributed as dist
from harness import frozen_files, llama, lora, models
from harness.adapter import Adapter
from harness.covering import ADAPTERS, over_each
from harness.llama import greedy_tokens
from harness.pool import Pool
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from fsdp_zpp import NF4, Int8, Strategy, dequantize_frozen_params, quantize_frozen_params, save_adapter
from fsdp_zpp.codecs.base import Codec
from fsdp_zpp.frozen.modules import frozen_sites

AS_STORED = "as stored"
CASES = {
    f"{kind} {format}": (kind, format)
    for kind, formats in {
        "llama": ("gptq4 in order of activations", "gptq8 v2", "nf4", "int8 of bitsandbytes", "int8 by rows", "nvfp4"),
        "qwen3": ("gptq4", "awq", "int4", "int8 plain", "fp8 by rows"),
        "deepseek": ("fp8", "int4"),
        "gpt_oss": ("mxfp4",),
    }.items()
    for format in formats
}
ANEW = dict(zip(CASES.values(), itertools.cycle([Int8(64), NF4(64)]), strict=False))


def oracle(kind: str, folder: str, codec: Codec | str) -> Any:
    """The model that a quantized base stands for: with the values that were packed, encoded anew or not."""
    model = checkpoints.dequantized(kind, f"{folder}/base")
    if isinstance(codec, Codec):
        for parameter in moe.chosen(model).values():
            lora.round_weight(parameter, codec)
    return model


def adapt(kind: str, base: Any) -> PeftModel:
    """Add an adapter to the attention, and to the experts if there are any."""
    return llama.adapt(base, {"default": "lora"}) if kind == "llama" else moe.adapt(base)


def shard(adapter: Adapter, kind: str, model: Any) -> Any:
    """Shard it, one unit a layer."""
    strategy = Strategy("IGG", gpus_per_node=2)
    return llama.shard(adapter, model, strategy) if kind == "llama" else moe.shard(adapter, model, strategy)


def backward(model: Any, alone: bool) -> None:
    """Leave the mean gradient of all ranks' batches on ``model``; ``alone`` takes them all itself."""
    for rank in range(dist.get_world_size()) if alone else [dist.get_rank()]:
        loss = llama.loss_of(model, llama.tokens(0, rank))
        (loss / (dist.get_world_size() if alone else 1)).backward()


def distance(one: Tensor, other: Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()


def trained(adapter: Adapter, kind: str, codec: Any, folder: str) -> tuple[Any, ...]:
    """In a worker: how a sharded model compares with the oracle before, while and after an adapter is trained."""
    base = checkpoints.make_empty(kind) if codec == AS_STORED else checkpoints.make(kind).requires_grad_(False)
    report = quantize_frozen_params(base, codec, checkpoint=f"{folder}/base", placement="G", gpus_per_node=2)
    model = shard(adapter, kind, adapt(kind, base))
    alone = adapt(kind, oracle(kind, folder, codec))
    same = [torch.equal(llama.logits_of(model), llama.logits_of(alone))]
    same.append(greedy_tokens(model, 4) == greedy_tokens(alone, 4))
    optimizers = [
        torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.01) for each in (model, alone)
    ]
    backward(model, alone=False)
    backward(alone, alone=True)
    far = [models.distance(adapter.full_gradients(model), lora.gradients_of(alone))]
    for optimizer in optimizers:
        optimizer.step()
    far.append(distance(llama.logits_of(model), llama.logits_of(alone)))
    save_adapter(model, f"{folder}/adapter")
    loaded = PeftModel.from_pretrained(oracle(kind, folder, codec), f"{folder}/adapter").to(models.device())
    same.append(torch.equal(llama.logits_of(loaded), llama.logits_of(model)))
    return report.weights, same, far


@pytest.mark.parametrize("anew", [False, True], ids=[AS_STORED, "anew"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_logits_equal_the_dequantized_models(
    case: tuple[str, str], anew: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints.write(tmp_path / "base", *case)
    codec = ANEW[case] if anew else AS_STORED
    model = checkpoints.make(case[0]).requires_grad_(False)
    quantize_frozen_params(model, codec, checkpoint=tmp_path / "base")
    assert torch.equal(llama.logits_of(model), llama.logits_of(oracle(case[0], str(tmp_path), codec)))
    assert "no place for" not in caplog.text  # all that was stored is part of some weight


@over_each(case=CASES, anew={AS_STORED: False, "anew": True}, adapter=ADAPTERS)
def test_adapters_train_on_quantized_checkpoints(
    pool: Callable[[int], Pool], adapter: Adapter, case: tuple[str, str], anew: bool, tmp_path: Path
) -> None:
    checkpoints.write(tmp_path / "base", *case)
    codec = ANEW[case] if anew else AS_STORED
    for weights, same, far in pool(4).run(trained, adapter, case[0], codec, str(tmp_path)):
        assert weights >= 4
        assert same == [True] * 3  # logits, generated tokens, and logits with the adapter that plain PEFT loads
        assert max(far) <= 1e-5, far  # sums over ranks in another order


# ---- what the libraries that own the formats make of the same files


def saved(adapter: Adapter, kind: str, folder: str) -> Tensor:
    """In a worker: logits of a sharded model whose base is kept as stored, and whose adapter is saved."""
    base = checkpoints.make(kind).requires_grad_(False)
    quantize_frozen_params(base, AS_STORED, checkpoint=f"{folder}/base", gpus_per_node=2)
    model = shard(adapter, kind, adapt(kind, base))
    llama.loss_of(model, llama.tokens(0)).backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    save_adapter(model, f"{folder}/adapter")
    return llama.logits_of(model)


@over_each(case={"gpt_oss": ("gpt_oss", "mxfp4"), "qwen3": ("qwen3", "fp8")}, adapter=ADAPTERS)
def test_an_adapter_loads_in_peft_beside_the_same_checkpoint(
    pool: Callable[[int], Pool], adapter: Adapter, case: tuple[str, str], tmp_path: Path
) -> None:
    folder = checkpoints.write(tmp_path / "base", *case)
    expected = pool(4).run(saved, adapter, case[0], str(tmp_path))
    base = owners_model(folder, checkpoints.FORMATS[case[1]].config, torch.float32)
    base = base.to(models.device(), torch.float32)  # transformers 5.17 leaves experts in bf16, whatever it is asked for
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter")
    for logits in expected:
        assert torch.equal(llama.logits_of(loaded), logits)


@pytest.mark.parametrize(
    ("kind", "format"),
    [
        ("gpt_oss", "mxfp4"),
        ("qwen3", "fp8"),
        ("deepseek", "fp8"),
        ("qwen3", "int4"),
        ("llama", "int8 plain"),
        ("qwen3", "fp8 by rows"),
        ("llama", "int8 by rows"),
        ("llama", "nvfp4"),
    ],
)
def test_weights_equal_those_that_transformers_dequantizes(kind: str, format: str, tmp_path: Path) -> None:
    folder = checkpoints.write(tmp_path, kind, format)
    theirs = owners_model(folder, checkpoints.FORMATS[format].config)
    for smallest in (1, 10**9):
        ours = checkpoints.make(kind).bfloat16().requires_grad_(False)
        # What is not kept, or encoded, is decoded all the same.
        quantize_frozen_params(ours, AS_STORED if smallest == 1 else Int8(64), checkpoint=folder, min_numel=smallest)
        assert bool(dequantize_frozen_params(ours)) == (smallest == 1)
        expected, weights = theirs.state_dict(), ours.state_dict()
        # transformers 5.17 leaves the scales that compressed-tensors has used beside the weights.
        assert {name for name in expected if not name.rpartition(".")[2].startswith("weight_")} == set(weights)
        for name, value in weights.items():
            # Routers stay in fp32 there.
            assert torch.equal(value, expected[name].to(models.device(), torch.bfloat16)), name


def owners_model(folder: Path, config: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> Any:
    """The model as transformers loads it with the library that owns the format."""
    import transformers

    if config["quant_method"] == "compressed-tensors":
        pytest.importorskip("compressed_tensors")
        own = {key: value for key, value in config.items() if key != "quant_method"}
        asked: Any = transformers.CompressedTensorsConfig(**own, dequantize=True)
    else:
        kinds = {"mxfp4": transformers.Mxfp4Config, "fp8": transformers.FineGrainedFP8Config}
        asked = kinds[config["quant_method"]](dequantize=True)
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, quantization_config=asked, output_loading_info=True
    )
    if loading["missing_keys"]:  # 5.17, beside a newer compressed-tensors, looks for int8 in files of packed integers
        pytest.skip(f"this transformers does not find {min(loading['missing_keys'])}")
    return model


# ---- files that are broken


def refused(case: tuple[str, str], codec: Any, folder: str) -> tuple[str, bool]:
    """In a worker: what quantizing from a folder of this rank's own says, and whether it left the model alone."""
    model = checkpoints.make(case[0]).requires_grad_(False)
    before = frozen_files.snapshot(model)
    try:
        quantize_frozen_params(model, codec, checkpoint=f"{folder}/{dist.get_rank()}", gpus_per_node=1)
    except ValueError as error:
        return str(error), frozen_files.snapshot(model) == before
    return "", False


@over_each(case=CASES, codec={AS_STORED: AS_STORED, "int8": Int8(64)}, rest=False)
def test_a_checkpoint_that_one_rank_lacks_a_part_of_is_refused_by_all(
    pool: Callable[[int], Pool], case: tuple[str, str], codec: Any, tmp_path: Path
) -> None:
    for rank in (0, 1):
        checkpoints.write(tmp_path / str(rank), *case)
    path = tmp_path / "1" / "model.safetensors"
    tensors = load_file(path)
    lost = next(name for name in tensors if name.endswith(SCALES))
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, path)
    module = lost.rsplit(".", 1)[0].removesuffix(".weight")
    for said, untouched in pool(2).run(refused, case, codec, str(tmp_path)):
        assert module in said
        assert untouched


SCALES = ("scales", "weight_scale", "weight_scale_inv", "absmax", "SCB")


def test_stacks_of_experts_in_different_orders_can_only_be_encoded_anew(tmp_path: Path) -> None:
    case = "qwen3", "gptq4 in order of activations"
    checkpoints.write(tmp_path / "base", *case)
    model = checkpoints.make("qwen3").requires_grad_(False)
    before = frozen_files.snapshot(model)
    with pytest.raises(ValueError, match=r"experts.*different formats; give a codec in place of 'as stored'"):
        quantize_frozen_params(model, AS_STORED, checkpoint=tmp_path / "base")
    assert frozen_files.snapshot(model) == before
    quantize_frozen_params(model, Int8(64), checkpoint=tmp_path / "base")
    assert torch.equal(llama.logits_of(model), llama.logits_of(oracle("qwen3", str(tmp_path), Int8(64))))
    # By default, they alone are encoded anew, beside what is in full precision.
    model = checkpoints.make("qwen3").requires_grad_(False)
    report = quantize_frozen_params(model, checkpoint=tmp_path / "base")
    weights = {f"{path}.{name}": weight for path, _, name, weight in frozen_sites(model)}
    encoded = {name for name, weight in weights.items() if weight.codec == Int8(256)}
    # The inputs of the down projections are of one group.
    assert {name.rpartition(".")[2] for name in encoded} == {"gate_up_proj", "weight"}
    assert len(encoded) == 4
    assert (report.weights, report.stored) == (10, 6)
    exact = checkpoints.dequantized("qwen3", tmp_path / "base")
    for name, parameter in moe.chosen(exact).items():
        if name in encoded:
            lora.round_weight(parameter, Int8(256))
    assert torch.equal(llama.logits_of(model), llama.logits_of(exact))
