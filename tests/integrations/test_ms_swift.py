"""ms-swift with a strategy: its losses, checkpoints and adapters, and what its arguments may not ask for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from framework_workers import framework_workers
from harness import lora
from peft import PeftModel
from tiny_chats import TOKENS, write_models_and_chats
from transformers import AutoModelForCausalLM

from fsdp_zpp import Int8, Strategy

pytest.importorskip("swift.trainers")

from ms_swift_training import OWN, arguments_for, import_ms_swift, trained

ZEROPP = Strategy.zeropp(gpus_per_node=2)
MIXZPP = Strategy.mixzpp(gpus_per_node=2)
FULL: dict[str, Any] = {"tuner_type": "full", "learning_rate": 2e-3}
WHOLE = {"fsdp": json.dumps({"fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}})}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small model in fp32, the same in bf16, and chats."""
    folder = tmp_path_factory.mktemp("ms_swift")
    write_models_and_chats(folder)
    return folder


@pytest.fixture(scope="module")
def workers() -> Iterator[Callable[..., list[Any]]]:
    """Return ``workers(function, *args)`` on four ranks, in processes of their own: ms-swift patches much there."""
    yield from framework_workers(import_ms_swift)


@pytest.mark.parametrize("kind", ["adapters", "whole"])
def test_losses_are_those_of_ms_swifts_own_fsdp(
    workers: Callable[..., list[Any]], folder: Path, tmp_path: Path, kind: str
) -> None:
    options = FULL if kind == "whole" else {}
    own, plain, zeropp = (
        workers(trained, arguments_for(folder, tmp_path / name, **options), strategy)[0]
        for name, strategy in {"own": OWN, "plain": Strategy("GGG", gpus_per_node=2), "zeropp": ZEROPP}.items()
    )
    assert own.losses[-1] < 0.97 * own.losses[0]
    assert plain.losses == pytest.approx(own.losses, rel=1e-5)  # sums in another order
    assert zeropp.losses == pytest.approx(own.losses, rel=0.01)
    torch.testing.assert_close(plain.logits, own.logits, rtol=1e-3, atol=1e-3)
    for hop in ("gather", "reduce"):
        assert 0 < 3 * zeropp.sent[hop]["inter"] < plain.sent[hop]["inter"]


def test_adapters_on_a_quantized_bf16_base_are_read_by_plain_peft(
    workers: Callable[..., list[Any]], folder: Path, tmp_path: Path
) -> None:
    arguments = arguments_for(folder / "bf16", tmp_path, torch_dtype="bfloat16", bf16="true")
    first = workers(trained, arguments, MIXZPP)[0]
    assert first.losses[-1] < first.losses[0]
    base = AutoModelForCausalLM.from_pretrained(folder / "bf16" / "model", dtype=torch.float32)
    for parameter in base.parameters():
        if parameter.dim() == 2:
            lora.round_weight(parameter, Int8(256))
    loaded = PeftModel.from_pretrained(base, tmp_path / "checkpoint-4").eval()
    torch.testing.assert_close(loaded(input_ids=TOKENS).logits, first.logits, rtol=0.05, atol=0.05)
    without = base.eval()
    with loaded.disable_adapter():
        assert not torch.allclose(without(input_ids=TOKENS).logits, first.logits, rtol=0.05, atol=0.05)
    shutil.rmtree(tmp_path / "checkpoint-4")
    resumed = workers(trained, [*arguments, "--resume_from_checkpoint", str(tmp_path / "checkpoint-2")], MIXZPP)[0]
    assert resumed.losses == first.losses
    assert torch.equal(resumed.logits, first.logits)


def test_a_whole_model_is_read_by_from_pretrained(
    workers: Callable[..., list[Any]], folder: Path, tmp_path: Path
) -> None:
    # Without a codec of weights, or the model would compute with weights that differ from those in files.
    strategy = Strategy.zeropp(gpus_per_node=2, weights=None)
    first = workers(trained, arguments_for(folder, tmp_path, **FULL, **WHOLE), strategy)[0]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4", dtype=torch.float32)
    torch.testing.assert_close(loaded(input_ids=TOKENS).logits, first.logits, rtol=1e-4, atol=1e-4)


def test_dpo_shards_its_reference_by_the_strategy(
    workers: Callable[..., list[Any]], folder: Path, tmp_path: Path
) -> None:
    options = FULL | {"rlhf_type": "dpo", "dataset": folder / "pairs.jsonl", "learning_rate": 1e-3}
    own, plain = (
        workers(trained, arguments_for(folder, tmp_path / name, **options), strategy)[0]
        for name, strategy in {"own": OWN, "plain": Strategy("GGG", gpus_per_node=2)}.items()
    )
    assert own.losses[-1] < own.losses[0]
    assert plain.losses == pytest.approx(own.losses, rel=1e-4)


ARGUMENTS = {"tuner_backend": "peft", "sequence_parallel_size": 1, "optimizer": None, "task_type": "causal_lm"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"deepspeed": "zero3"}, "deepspeed: 'zero3' .* a strategy is for torch's FSDP"),
    ({"quant_method": "bnb"}, r"quant_method: 'bnb' .* not been tried .* Strategy.mixzpp\(frozen=NF4\(\)\)"),
    ({"use_swift_lora": True}, "use_swift_lora: True .* PEFT's adapters alone"),
    ({"use_ray": True}, "use_ray: True .* NPROC_PER_NODE"),
    ({"tuner_backend": "unsloth"}, "tuner_backend: 'unsloth' .* one process"),
    ({"sequence_parallel_size": 2}, "sequence_parallel_size: 2 .* not been tried"),
    ({"optimizer": "muon"}, "optimizer: 'muon' .* whole matrices"),
    ({"rlhf_type": "grpo"}, "rlhf_type: 'grpo' .* only causal_lm, dpo have"),
    ({"task_type": "embedding"}, "rlhf_type: 'embedding' .* only causal_lm, dpo have"),
]


@pytest.mark.parametrize(
    ("options", "message"), REFUSED, ids=lambda value: str(value) if isinstance(value, dict) else ""
)
def test_conflicts_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    from fsdp_zpp.integrations.ms_swift import check_arguments

    check_arguments(SimpleNamespace(**ARGUMENTS))
    with pytest.raises(ValueError, match=message):
        check_arguments(SimpleNamespace(**ARGUMENTS | options))
