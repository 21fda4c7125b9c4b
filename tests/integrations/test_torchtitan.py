"""torchtitan's trainer with a strategy, beside its own FSDP and HSDP, on four processes as two nodes of two."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.covering import over_each
from harness.launch import launch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torchtitan_flags import EP, INTERLEAVED, TWO_STEPS, flag
from torchtitan_or_skip import torchtitan_or_skip
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp_zpp import Int4, Strategy

torchtitan_or_skip()

CHECKPOINTS = "--checkpoint.enable --checkpoint.interval 2 --checkpoint.no-last_save_model_only".split()

MODEL_LAST = "--checkpoint.last_save_model_only"
IN_HF = [MODEL_LAST, "--checkpoint.last_save_in_hf"]
# torchtitan's debug model of one layer, as transformers names its sizes.
HF_CONFIG = LlamaConfig(
    vocab_size=2048,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=1,
    num_attention_heads=16,
    rms_norm_eps=1e-5,
    max_position_embeddings=131072,
    rope_parameters={
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
)

VALIDATION = "--validator.enable --validator.freq 2 --validator.steps 1 --validator.dataloader.dataset sums".split()


@pytest.fixture(scope="module")
def own(stock: Callable[..., Any]) -> Any:
    """Return the results of torchtitan's own FSDP."""
    return stock("strategy", *VALIDATION)


def test_full_shard_is_torchtitans_fsdp(torchtitan: Callable[..., list[Any]], own: Any, tmp_path: Path) -> None:
    run = torchtitan("train", "strategy", tmp_path, *flag(levels="GGG"), *VALIDATION)[0]
    assert run.losses == pytest.approx(own.losses, rel=1e-6)  # sums in another order
    assert run.validated == pytest.approx(own.validated, rel=1e-6)
    assert run.metrics.keys() == own.metrics.keys()
    assert run.metrics["grad_norm"] == pytest.approx(own.metrics["grad_norm"], rel=1e-5)
    assert own.losses[-1] < 0.9 * own.losses[0]


def test_zeropp_trains_and_validates(torchtitan: Callable[..., list[Any]], own: Any, tmp_path: Path) -> None:
    run = torchtitan("train", "strategy", tmp_path, *flag("zeropp"), *VALIDATION)[0]
    assert run.losses == pytest.approx(own.losses, rel=0.01)
    assert run.losses != own.losses
    assert run.validated == pytest.approx(own.validated, rel=0.01)


def test_nothing_goes_between_nodes_before_the_last_micro_batch(
    torchtitan: Callable[..., list[Any]], tmp_path: Path
) -> None:
    options = [*flag(levels="IIG"), "--training.steps", "2", "--training.global_batch_size"]
    (_, one), (_, three) = (
        torchtitan("train", "strategy", tmp_path, *options, str(8 * count))[0].traffic for count in (1, 3)
    )
    for kind in ("gather", "reduce"):
        assert three[kind] == {"inter": one[kind]["inter"], "intra": 3 * one[kind]["intra"]}
        assert one[kind]["inter"] > 0


@pytest.mark.parametrize("levels", ["IIG", "NNG"])
def test_accumulates_torchtitans_gradients(
    torchtitan: Callable[..., list[Any]], stock: Callable[..., Any], tmp_path: Path, levels: str
) -> None:
    batch = [*TWO_STEPS, "--training.global_batch_size", "16"]
    own = stock("strategy", *batch)
    sharded = torchtitan("train", "strategy", tmp_path, *flag(levels=levels), *batch)[0]
    assert sharded.losses == pytest.approx(own.losses, rel=1e-6)
    assert sharded.metrics["grad_norm"] == pytest.approx(own.metrics["grad_norm"], rel=1e-5)


def test_offloaded_parameters_train_and_resume_as_others(torchtitan: Callable[..., list[Any]], tmp_path: Path) -> None:
    strategy = flag("loco", weights="int4delta", levels="IIG")
    options = [*strategy, "--training.global_batch_size", "16", *CHECKPOINTS]
    kept = torchtitan("train", "strategy", tmp_path / "kept", *options)[-1]
    whole = torchtitan("train_offloaded", None, "strategy", tmp_path / "whole", *options)[-1]
    rounding = 1e-3 if torch.cuda.is_available() else 0  # CPUs round the optimizer's step otherwise
    assert whole.losses == pytest.approx(kept.losses, rel=rounding)
    assert whole.metrics["grad_norm"] == pytest.approx(kept.metrics["grad_norm"], rel=rounding)
    torchtitan("train_offloaded", 4, "strategy", tmp_path / "half", *options)
    rest = torchtitan("train_offloaded", None, "strategy", tmp_path / "half", *options)[-1]
    assert rest.losses == whole.losses[2:]


@pytest.mark.parametrize(
    ("config", "weights", "parallel"),
    # torch's schedules run a model once before the first step, which sends one delta more.
    [("strategy", "int4delta", []), ("two_layers", "int8", INTERLEAVED)],
)
def test_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    torchtitan: Callable[..., list[Any]], tmp_path: Path, config: str, weights: str, parallel: list[str]
) -> None:
    options = [*parallel, *flag("loco", weights=weights, gpus_per_node=1), *CHECKPOINTS]
    whole = torchtitan("train", config, tmp_path / "whole", *options)[-1]
    torchtitan("train_until", 4, config, tmp_path / "half", *options)
    rest = torchtitan("train", config, tmp_path / "half", *options)[-1]
    assert rest.losses == whole.losses[2:]
    without = [*options, "--checkpoint.load_step", "2", "--checkpoint.exclude_from_loading", "codecs"]
    assert torchtitan("train", config, tmp_path / "half", *without)[-1].losses != rest.losses


def files_of(folder: Path) -> dict[str, bytes]:
    """Return what is in the folder of a checkpoint, but for what a job has locked to save it alone."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "being_saved"}


def test_a_checkpoint_is_none_for_torchtitan_while_it_is_saved_over(
    torchtitan: Callable[..., list[Any]], tmp_path: Path
) -> None:
    options = [*flag("loco"), *CHECKPOINTS]
    checkpoint, copies = tmp_path / "job/checkpoint/step-4", tmp_path / "copies"
    torchtitan("train", "strategy", tmp_path / "job", *options)
    older = files_of(checkpoint)
    again = [*options, "--checkpoint.load_step", "2", "--training.max_norm", "0.01"]
    torchtitan("train_watched", checkpoint, copies, "strategy", tmp_path / "job", *again)
    cut_off = [files_of(copy) for copy in copies.iterdir()]
    whole = [files for files in cut_off if ".metadata" in files]
    assert len(cut_off) > len(whole) + 4
    assert files_of(checkpoint) != older
    assert all(files in (older, files_of(checkpoint)) for files in whole)


def test_a_save_in_the_background_ends_its_turn(torchtitan: Callable[..., list[Any]], tmp_path: Path) -> None:
    options = [*flag("loco"), *CHECKPOINTS, "--checkpoint.async_mode", "async"]
    torchtitan("train", "strategy", tmp_path, *options)
    for step in (2, 4):
        files = {path.name for path in (tmp_path / f"checkpoint/step-{step}").iterdir()}
        assert ".metadata" in files
        assert "being_saved" not in files


def test_without_codec_state_checkpoints_are_torchtitans_own(
    torchtitan: Callable[..., list[Any]], own: Any, tmp_path: Path
) -> None:
    torchtitan("train_until", 4, "own_strategy", tmp_path, *CHECKPOINTS)
    rest = torchtitan("train", "strategy", tmp_path, *flag(levels="GGG"), *CHECKPOINTS)[0]
    assert rest.losses == pytest.approx(own.losses[2:], rel=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--training.no-disable_cuda_graphs", "set --training.disable_cuda_graphs"),
        ("--parallelism.strategy mixzpp", "frozen=auto.* leave frozen out"),
        ("--parallelism.strategy zero2 --parallelism.fsdp_reshard_after_forward always", "always contradicts 'NGG'"),
        ('--parallelism.strategy {"overrides":{"*Experts":{"frozen":"nf4"}}}', "frozen=nf4.* leave frozen out"),
        ("--parallelism.strategy zero4", "--parallelism.strategy: .*'zero4'.* zeropp"),
        ('--parallelism.strategy {"weight":"int8"}', "--parallelism.strategy: weight: .* did you mean weights"),
        ('--parallelism.strategy {"weights":3}', "--parallelism.strategy: weights: .*3"),
        ('--parallelism.strategy {"weights"}', "--parallelism.strategy: .* is not JSON"),
    ],
)
def test_refused_on_every_rank(torchtitan: Callable[..., list[Any]], options: str, message: str) -> None:
    texts = torchtitan("refusal", "strategy", "--parallelism.strategy", "zeropp", *options.split())
    assert all(re.search(message, re.sub(r"[\s│]+", " ", text)) for text in texts), texts


def test_what_the_configuration_sets_is_refused(torchtitan: Callable[..., list[Any]]) -> None:
    assert "Strategy.from_dict" in torchtitan("refusal", "misspelt")[0]
    assert "--comm.mode default" in torchtitan("refusal", "strategy", *flag("zeropp"), "--comm.mode", "torchcomms")[0]


@pytest.mark.parametrize("config", ["llama3_70b", "qwen3_14b", "deepseek_v3_16b"])
def test_configurations_have_one_key(torchtitan: Callable[..., list[Any]], config: str) -> None:
    module = "fsdp_zpp.integrations.torchtitan"
    default, chosen = (
        json.loads(torchtitan("parallelism", module, config, *options)[0])["strategy"]
        for options in ([], flag("loco", weights="int4:64"))
    )
    assert default == Strategy.zeropp().to_dict()
    assert chosen == Strategy.loco(weights=Int4(64), gpus_per_node=2).to_dict()


def test_chunked_loss_is_refused(torchtitan: Callable[..., list[Any]]) -> None:
    for text in torchtitan("refusal", "chunked", *flag("zeropp")):
        assert "config.loss = config.loss.loss_fn" in text


def test_a_model_that_is_not_sharded_by_fully_shard_is_refused(torchtitan: Callable[..., list[Any]]) -> None:
    for text in torchtitan("refusal", "unsharded", *flag("zeropp")):
        assert "did not call fully_shard" in text
    assert torchtitan("whose_fully_shard")[0].startswith("torch.distributed.fsdp")


def test_another_trainer_is_refused(torchtitan: Callable[..., list[Any]]) -> None:
    assert "FluxTrainer.Config; for another trainer," in torchtitan("refused_configuration", "flux_debugmodel")[0]


def test_a_seed_checkpoint_has_no_codec_state(torchtitan: Callable[..., list[Any]], tmp_path: Path) -> None:
    assert "codecs" not in torchtitan("seed_checkpoint", tmp_path, *flag("loco"), *CHECKPOINTS)[0]


def test_codec_state_of_experts_alone_is_in_checkpoints(torchtitan: Callable[..., list[Any]], tmp_path: Path) -> None:
    strategy = flag(levels="IGG", overrides={"GroupedExperts": {"levels": "IGG", "weights": "int4delta"}})
    torchtitan("train", "deepseek_v3", tmp_path, *TWO_STEPS, *EP, *strategy, *CHECKPOINTS)
    saved = FileSystemReader(tmp_path / "checkpoint" / "step-2").read_metadata().state_dict_metadata
    units = [key.partition("/")[2] for key in saved if key.startswith("codecs.rank0/")]
    assert [unit.endswith("experts") for unit in units] == [True], units


KINDS = ["full", "lora", "partly_frozen"]


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_are_whole(torchtitan: Callable[..., list[Any]], tmp_path: Path, kind: str) -> None:
    def run(name: str, *arguments: Any) -> Any:
        return torchtitan(f"torchtitan_whole_models.{name}", kind, *arguments)[0]

    options = [*flag("zero3"), "--checkpoint.enable", "--checkpoint.interval", "2"]
    answers = run("trained", tmp_path / "first", *options, MODEL_LAST)
    assert answers.keys() == {0, 2, 4}
    assert not torch.allclose(answers[4], answers[0], atol=1e-3)
    checkpoints = [tmp_path / "first" / "checkpoint" / f"step-{step}" for step in (2, 4)]
    for plain, step in zip(run("loaded", tmp_path, checkpoints), (2, 4), strict=True):
        torch.testing.assert_close(plain, answers[step], rtol=1e-4, atol=1e-5)
    options += ["--checkpoint.initial_load_path", str(checkpoints[0]), "--checkpoint.no-initial_load_model_only"]
    resumed = run("trained", tmp_path / "second", *options, *([] if kind == "lora" else IN_HF))
    assert torch.equal(resumed[0], answers[2])
    assert torch.equal(resumed[4], answers[4])
    if kind != "lora":
        model = LlamaForCausalLM(HF_CONFIG)
        file = tmp_path / "second" / "checkpoint" / "step-4" / "model-00001-of-00001.safetensors"
        model.load_state_dict(load_file(file))
        logits = model(torch.arange(1, 13).view(1, -1)).logits
        torch.testing.assert_close(logits, answers[4], rtol=1e-4, atol=1e-4)


@over_each(kind=KINDS, strategy=["mixzpp", "nf4"])
def test_a_quantized_base_is_refused_on_every_rank(
    torchtitan: Callable[..., list[Any]], tmp_path: Path, kind: str, strategy: str
) -> None:
    options = flag("mixzpp", **({"frozen": "nf4"} if strategy == "nf4" else {}))
    for error in torchtitan("torchtitan_whole_models.refusal", kind, tmp_path, *options):
        assert "torchtitan loads them afterwards; leave frozen out" in error


def test_an_export_that_would_leave_adapters_out_is_refused_on_every_rank(
    torchtitan: Callable[..., list[Any]], tmp_path: Path
) -> None:
    options = [*flag("zero3"), "--checkpoint.enable", *IN_HF]
    for error in torchtitan("torchtitan_whole_models.refusal", "lora", tmp_path, *options):
        assert "checkpoint.last_save_in_hf would leave out 6 tensors of the model (layers.0." in error


def test_none_is_torchtitans_own(torchtitan: Callable[..., list[Any]]) -> None:
    assert "no part of this" in torchtitan("own_model_under_strategys_trainer")[0]


def test_example_trains(tmp_path: Path) -> None:
    small = "--training.seq_len 64 --training.local_batch_size 2 --training.steps 3 --metrics.disable_color_printing"
    result = launch(
        2,
        *("tests/integrations/torchtitan_on_cpu.py", "examples/torchtitan_train.py", "--dump_folder", tmp_path),
        *("--parallelism.strategy", '{"preset": "zeropp", "gpus_per_node": 1}', *small.split()),
        *("--override.imports", "torchtitan_attention.without_masks"),
        *("--parallelism.spmd_backend", "partial_dtensor"),
        on_cpu=True,
    )
    printed = result.stdout + result.stderr
    assert result.returncode == 0, printed
    losses = [float(loss) for loss in re.findall(r"loss: +(\d+\.\d+)", printed)]
    assert losses[-1] < losses[0]
    sent = re.findall(r"Bytes that this rank has sent: .*'inter': (\d+)", printed)
    assert len(sent) == 2
    assert all(int(nbytes) > 0 for nbytes in sent)
