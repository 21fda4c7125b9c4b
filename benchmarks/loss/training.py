"""One training of a study: a small model on bytes, sharded and optimized in one way, with one seed.

The bytes are real text: sources and documents, those of the installed Python packages or of folders.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import itertools
import math
import os
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from configurations import Sharding
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim.lr_scheduler import LambdaLR
from transformers import AttentionInterface, AutoModelForCausalLM, GPT2Config, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from fsdp_zpp import Strategy, agreed_weights, exchange_weights

# ---- text

SUFFIXES = (".py", ".md", ".rst", ".txt")
"""Files of Python's packages."""
OF_FOLDERS = (*SUFFIXES, ".c", ".h")
"""Files of given folders. Packages' headers are left out, since they come in other versions with each torch."""
HELD_OUT = 0.02
"""Share of the files that are held out."""


@dataclass(frozen=True)
class Corpus:
    """Bytes for training and bytes of other files for validation, both uint8.

    Args:
        training: Flat.
        held_out: Flat.
        files: Number of files in both.
        sha256: Of the training bytes and the held-out bytes, one after the other.
    """

    training: Tensor
    held_out: Tensor
    files: int
    sha256: str

    def to(self, device: torch.device) -> Corpus:
        """Return the corpus on a device."""
        return replace(self, training=self.training.to(device), held_out=self.held_out.to(device))

    def summary(self) -> dict[str, int | str]:
        """Return figures by which a reader can tell whether he has the same text."""
        lengths = {"training_bytes": len(self.training), "held_out_bytes": len(self.held_out)}
        return {"files": self.files, **lengths, "sha256": self.sha256}


def load_corpus(folders: list[Path]) -> Corpus:
    """Load the text of ``folders``, from the disk if it was read before.

    Args:
        folders: Folders with text; empty for the standard library and the installed packages.
    """
    suffixes = OF_FOLDERS if folders else SUFFIXES
    folders = [folder.resolve() for folder in folders] or _python_folders()
    key = hashlib.sha256("\n".join(map(str, (*folders, *suffixes, HELD_OUT))).encode()).hexdigest()[:16]
    kept = Path(tempfile.gettempdir()) / f"fsdp_zpp-corpus-{key}.pt"
    if not kept.exists():
        partial = kept.with_suffix(f".{os.getpid()}")
        torch.save(vars(_read(folders, suffixes)), partial)
        partial.rename(kept)
    return Corpus(**torch.load(kept, mmap=True))


def _python_folders() -> list[Path]:
    packages = [Path(path) for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    return sorted({path.resolve() for path in (Path(sysconfig.get_paths()["stdlib"]), *packages)})


def _read(folders: list[Path], suffixes: tuple[str, ...]) -> Corpus:
    # By path inside its folder, so that the order does not depend on where Python is installed.
    found = ((folder, path) for folder in folders for path in _text_files(folder, suffixes))
    paths = [(path.relative_to(folder).as_posix(), path) for folder, path in found]
    with ThreadPoolExecutor(16) as pool:
        # Packages hold broken links.
        texts = list(pool.map(lambda item: item[1].read_bytes() if item[1].is_file() else b"", paths))
    files = sorted((name, hashlib.sha256(text).digest(), text) for (name, _), text in zip(paths, texts, strict=True))
    parts: tuple[list[bytes], list[bytes]] = [], []
    seen: set[bytes] = set()
    for _, digest, text in files:
        if text and digest not in seen:
            seen.add(digest)
            parts[digest[0] < 256 * HELD_OUT].append(text)
    training, held_out = (b"\n".join(part) for part in parts)
    tensors = (torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in (training, held_out))
    return Corpus(*tensors, len(seen), hashlib.sha256(training + held_out).hexdigest())


def _text_files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    return [Path(at, name) for at, _, names in os.walk(folder) for name in names if name.endswith(suffixes)]


# ---- runs

# For an attention that it does not know, transformers makes no mask: with its own "sdpa" it looks, in every forward,
# whether the positions are those of packed sequences, for which the host waits for the GPU. None is plain causal.
ATTENTION = "causal_sdpa"
AttentionInterface.register(ATTENTION, sdpa_attention_forward)


@dataclass(frozen=True)
class Settings:
    """Settings that runs must have in common to be compared.

    Args:
        tokens: Training tokens of a run.
        batch: Sequences a rank.
        sequence: Tokens of each.
        hidden: Width of the model.
        intermediate: Width of its feed-forward layers.
        layers: Number of decoder layers.
        heads: Attention heads.
        lr: Peak learning rate.
        warmup: Share of the steps in which it rises.
        validate_every: Steps between validations.
        validation_tokens: Tokens of each.
        device: ``cuda`` or ``cpu``.
        nodes: Number of nodes that strategies are told of.
        gpus_per_node: Ranks of each.
        text: SHA-256 of the text.

    Attributes:
        final_lr: Share of the peak learning rate at which the last step ends.
    """

    final_lr: ClassVar[float] = 0.0

    tokens: int
    batch: int
    sequence: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    lr: float
    warmup: float
    validate_every: int
    validation_tokens: int
    device: str
    nodes: int
    gpus_per_node: int
    text: str

    @property
    def tokens_a_step(self) -> int:
        """Return the tokens of a step over all ranks."""
        return self.batch * self.sequence * self.nodes * self.gpus_per_node

    @property
    def steps(self) -> int:
        """Return the number of optimizer steps; the last one completes ``tokens``."""
        return math.ceil(self.tokens / self.tokens_a_step)


@dataclass(frozen=True)
class Trainee:
    """A sharded model and what trains it.

    Args:
        model: Sharded model.
        optimizers: Optimizers, each of some of its parameters.
        clip: Clips the norm of all gradients.
        has_local_steps: Whether nodes hold weights of their own.
        stepping: Makes a context that the optimizers step in.
        whole: Returns the weights as shards hold them, whole, on each rank; None if nothing else is validated.
    """

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    clip: Callable[[float], object]
    has_local_steps: bool = False
    stepping: Callable[[], AbstractContextManager[object]] = nullcontext
    whole: Callable[[], Mapping[str, Tensor]] | None = None


Prepare = Callable[[PreTrainedModel, torch.device], Trainee]
"""Shards a model, which has the same weights on all ranks, and makes its optimizers."""
Objective = Callable[[nn.Module, Tensor], Tensor]
"""Returns a model's mean loss over a batch of :func:`windows`."""


def train(
    settings: Settings,
    prepare: Prepare,
    seed: int,
    corpus: Corpus,
    device: torch.device,
    config: PretrainedConfig | None = None,
    objective: Objective | None = None,
    keep: Path | None = None,
    exact: tuple[float, Prepare] | None = None,
) -> dict[str, Any]:
    """Train once. Collective.

    With local steps nodes hold weights of their own, and the one model that nodes agree on is validated: in the middle
    of training that of their last exchanges, each unit's up to ``every`` steps ago (at the start, when all nodes hold
    the same, the model itself), and at the end the model after all units were exchanged once more.

    Args:
        settings: Model, data and schedule.
        prepare: Shards the model and makes its optimizers.
        seed: Seed of the initial weights and of the order of the data.
        corpus: Text on ``device``.
        device: This rank's device.
        config: Configuration of the model; the studies' GPT-2 by default.
        objective: What training minimizes; the cross-entropy by default.
        keep: File for the weights of the shards at the end, if the trainee has ``whole``.
        exact: A share of the steps, the last ones, which a second trainee repeats from the state before them; for a
            trainee that has ``whole``, sharded alike.

    Returns:
        The losses on all ranks' data, against the tokens trained on, and the time. With local steps, also the loss just
        before units were exchanged once more; with ``whole``, the last validation loss with the weights of the shards,
        which no code but a cast to bf16 has changed; with ``exact``, the last validation loss of the second trainee.
    """
    began = time.perf_counter()
    config = gpt2(settings) if config is None else config
    network, parameters = build(config, seed, device)
    objective = cross_entropy if objective is None else objective
    trainee = prepare(network, device)
    model, is_local = trainee.model, trainee.has_local_steps
    # From here on random numbers are for rounding, whose errors must not be the same on all ranks.
    torch.manual_seed(seed * dist.get_world_size() + dist.get_rank())
    order = data_order(settings, seed, corpus.training)
    validation: list[tuple[int, Tensor]] = []
    losses = torch.zeros(settings.steps, device=device)
    repeated_from = settings.steps if exact is None else round(settings.steps * (1 - exact[0]))
    ends = sorted({*range(0, settings.steps, settings.validate_every), repeated_from, settings.steps})
    for start, end in itertools.pairwise(ends):
        if start % settings.validate_every == 0:
            with agreed(model, is_local and start > 0):
                validation.append((start, validate(settings, model, corpus.held_out)))
                note_progress(start, validation[-1][1], began)
        if start == repeated_from:
            weights = {name: value.clone() for name, value in trainee.whole().items()}
            states = [copy.deepcopy(optimizer.state_dict()) for optimizer in trainee.optimizers]
        losses[start:end] = take_steps(settings, trainee, objective, corpus.training, order, range(start, end))
    before_last_exchange = None
    if is_local:
        with agreed(model, True):
            before_last_exchange = validate(settings, model, corpus.held_out).item()
        exchange_weights(model)
    with agreed(model, is_local):
        validation.append((settings.steps, validate(settings, model, corpus.held_out)))
    at_shards = None
    if trainee.whole is not None:
        whole, _ = build(config, seed, device)
        whole.load_state_dict(trainee.whole())
        if keep is not None and dist.get_rank() == 0:
            keep.parent.mkdir(parents=True, exist_ok=True)
            torch.save(whole.state_dict(), keep)
        at_shards = validate(settings, whole.to(torch.bfloat16), corpus.held_out).item()
    exact_end = None
    if exact is not None:
        network, _ = build(config, seed, device)
        network.load_state_dict(weights)
        second = exact[1](network, device)
        for optimizer, state in zip(second.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        take_steps(settings, second, objective, corpus.training, order, range(repeated_from, settings.steps))
        exact_end = validate(settings, second.model, corpus.held_out).item()
    dist.all_reduce(losses)
    result = {
        "parameters": parameters,
        "validation": [(step * settings.tokens_a_step, loss.item()) for step, loss in validation],
        "at_shards": at_shards,
        "before_last_exchange": before_last_exchange,
        "exact_end": exact_end,
        "training": [part.mean().item() for part in (losses / dist.get_world_size()).split(settings.validate_every)],
        "seconds": time.perf_counter() - began,
    }
    del network, model, trainee
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return result


def take_steps(
    settings: Settings, trainee: Trainee, objective: Objective, tokens: Tensor, order: Tensor, steps: range
) -> Tensor:
    """Train on the sequences of some steps. Collective.

    Args:
        settings: Data and schedule.
        trainee: Model and optimizers, whose state is that after the steps before these.
        objective: What training minimizes.
        tokens: Training bytes on the device.
        order: Starts of this rank's sequences, [all steps, batch].
        steps: Numbers of the steps.

    Returns:
        The losses on this rank's data, by step.
    """
    schedules = [LambdaLR(optimizer, learning_rate(settings), steps.start - 1) for optimizer in trainee.optimizers]
    losses = []
    for step in steps:
        loss = objective(trainee.model, windows(tokens, order[step], settings.sequence))
        loss.backward()
        losses.append(loss.detach())
        trainee.clip(1.0)
        with trainee.stepping():
            for optimizer in trainee.optimizers:
                optimizer.step()
        for schedule in schedules:
            schedule.step()
        for optimizer in trainee.optimizers:
            optimizer.zero_grad()
    return torch.stack(losses)


def note_progress(step: int, loss: Tensor, began: float) -> None:
    """Print how far a run is, since long ones take minutes."""
    if dist.get_rank() == 0:
        seconds = time.perf_counter() - began
        print(f"step {step}: validation loss {loss.item():.4f}, {seconds:.0f} s", file=sys.stderr, flush=True)


def gpt2(settings: Settings) -> GPT2Config:
    """Make the configuration of the studies' GPT-2."""
    # GPT-2's norms and activations are a kernel each, so a small model on many GPUs spends its time on matrices.
    return GPT2Config(
        vocab_size=256,
        n_embd=settings.hidden,
        n_inner=settings.intermediate,
        n_layer=settings.layers,
        n_head=settings.heads,
        n_positions=settings.sequence,
        activation_function="gelu_pytorch_tanh",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation=ATTENTION,  # type: ignore[call-arg]
    )


def build(config: PretrainedConfig, seed: int, device: torch.device) -> tuple[PreTrainedModel, int]:
    """Build the model, with the same weights on all ranks, and count its parameters."""
    torch.manual_seed(seed)
    with device:
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    return model, sum(parameter.numel() for parameter in model.parameters())


def under_fsdp1(model: PreTrainedModel, device: torch.device, *, strategy: Sharding, lr: float) -> Trainee:
    """Make every layer a unit, with bf16 compute and communication and fp32 master weights, and AdamW of all."""
    sharded = FullyShardedDataParallel(
        model,
        # fsdp_zpp teaches FSDP to take a Strategy, which torch's annotation doesn't know.
        sharding_strategy=strategy,  # type: ignore[arg-type]
        auto_wrap_policy=ModuleWrapPolicy({GPT2Block}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        device_id=device,
        use_orig_params=True,
    )
    has_local_steps = isinstance(strategy, Strategy) and strategy.local_steps is not None
    whole = None if has_local_steps else sharded.state_dict
    return Trainee(sharded, [adamw(sharded.parameters(), lr)], sharded.clip_grad_norm_, has_local_steps, whole=whole)


def adamw(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.AdamW:
    """Make the studies' AdamW."""
    return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def agreed(model: nn.Module, is_local: bool) -> AbstractContextManager[None]:
    """Return a context in which the model is the one that nodes agree on, if they have weights of their own."""
    return agreed_weights(model) if is_local else nullcontext()


def learning_rate(settings: Settings) -> Callable[[int], float]:
    """Return the factor of a step: linear warmup, then a cosine to ``final_lr``; 0 leaves least noise in the losses."""
    warmup = round(settings.steps * settings.warmup)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        progress = (step - warmup) / max(1, settings.steps - warmup)
        return settings.final_lr + (1 - settings.final_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    return factor


def data_order(settings: Settings, seed: int, tokens: Tensor) -> Tensor:
    """Return the starts of this rank's sequences, [steps, batch]: no text twice before all of it was seen."""
    places = (len(tokens) - 1) // settings.sequence
    world = settings.nodes * settings.gpus_per_node
    needed = settings.steps * world * settings.batch
    generator = torch.Generator().manual_seed(seed)
    epochs = [torch.randperm(places, generator=generator) for _ in range(math.ceil(needed / places))]
    starts = torch.cat(epochs)[:needed].view(settings.steps, world, settings.batch) * settings.sequence
    return starts[:, dist.get_rank()].to(tokens.device)


def windows(tokens: Tensor, starts: Tensor, sequence: int) -> Tensor:
    """Return tokens [batch, sequence + 1]: the inputs and, one further, the targets."""
    return tokens[starts[:, None] + torch.arange(sequence + 1, device=tokens.device)].long()


def cross_entropy(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean over the batch, in nats a byte."""
    logits = model(batch[:, :-1]).logits
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def validate(settings: Settings, model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean loss over the same held-out sequences each time, a scalar on the device. Collective."""
    world = settings.nodes * settings.gpus_per_node
    # No gradients are kept, so that fewer and larger batches fit.
    batch = 4 * settings.batch
    batches = max(1, settings.validation_tokens // (world * batch * settings.sequence))
    last = len(tokens) - settings.sequence - 1
    starts = torch.linspace(0, last, batches * world * batch, dtype=torch.float64).long().view(batches, world, batch)
    mine = starts[:, dist.get_rank()].to(tokens.device)
    model.eval()
    total = torch.stack([cross_entropy(model, windows(tokens, part, settings.sequence)) for part in mine]).mean()
    model.train()
    dist.all_reduce(total)
    return total / world
