"""One training run, from initial weights or a checkpoint to its figures."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass, field
from statistics import median

import torch
import torch.distributed as dist
import train_checkpoint as checkpoint
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from train_model import build, optimizer_and_schedule
from train_options import Options, Run
from train_progress import TrainingProgress
from train_sharding import accumulating, clip_gradients, shard, unit_sizes
from train_text import Corpus, Share
from train_traffic import Traffic, full_shard_traffic, minus

from fsdp_zpp import CodecState, traffic


@dataclass(frozen=True)
class RunResult:
    """The figures of one run.

    Attributes:
        label: Name of the run.
        strategy: The strategy, in words.
        parameters: Parameters of the model.
        losses: Training loss of every step.
        validation: Pairs of steps done and validation loss.
        train_loss: Mean of the last ten training losses.
        validation_loss: The last validation loss.
        step_seconds: Median time of an optimizer step after warm-up, without evaluation and checkpoints.
        tokens_per_second: Over all ranks.
        peak_memory: Largest of any rank, in bytes: allocated GPU memory, or resident memory of the process.
        traffic: Bytes that this rank sent in an optimizer step.
        full_shard_traffic: What it would have been under FULL_SHARD.
    """

    label: str
    strategy: str
    parameters: int
    losses: list[float]
    validation: list[tuple[int, float]]
    train_loss: float
    validation_loss: float
    step_seconds: float
    tokens_per_second: float
    peak_memory: int
    traffic: Traffic
    full_shard_traffic: Traffic


@dataclass
class _Meter:
    """Times windows of steps, so that the device is waited for once a window and not once a step."""

    device: torch.device
    seconds: list[float] = field(default_factory=list)
    pending: list[Tensor] = field(default_factory=list)
    since: float = field(default_factory=time.perf_counter)

    def flush(self) -> list[float]:
        """Mean over all ranks of the losses pending; ends a window."""
        losses = torch.stack(self.pending)
        dist.all_reduce(losses)
        values = (losses / dist.get_world_size()).tolist()
        self.seconds.append((time.perf_counter() - self.since) / len(values))
        self.pending.clear()
        return values

    def restart(self) -> None:
        """Begin a window."""
        self.since = time.perf_counter()

    @property
    def step_seconds(self) -> float:
        """Median over all windows but the first, which pays for allocation and compilation."""
        return median(self.seconds[1:] or self.seconds)


class Trainer:
    """Trains one model under one strategy. All methods are collective.

    Args:
        run: The strategy.
        options: Everything else.
        corpus: Text.
        device: This rank's device.
    """

    def __init__(self, run: Run, options: Options, corpus: Corpus, device: torch.device) -> None:
        self.run, self.options, self.corpus, self.device = run, options, corpus, device
        self.model = self._make_model()
        self.optimizer, self.schedule = optimizer_and_schedule(self.model, options)
        self.history = checkpoint.History()
        codecs = CodecState(self.model) if run.strategy else None
        self.state = checkpoint.TrainingState(self.model, self.optimizer, self.schedule, self.history, codecs)
        self.share = Share(dist.get_rank(), options.world, options.batch, options.sequence)
        self.sent: list[tuple[bool, Traffic]] = []
        self.evaluated = False
        if options.resume:
            checkpoint.load(self.state, options.resume)
            if self.history.step >= options.stop_at:
                raise SystemExit(f"{options.resume} is at step {self.history.step}; nothing is left to train")

    def _make_model(self) -> nn.Module:
        """The sharded model; leaves the sizes of its units."""
        model = build(self.options, self.corpus.vocab)
        self.unit_sizes = self.trained_unit_sizes = unit_sizes(model)
        return shard(model, self.run.strategy, self.options, self.device)

    def train(self, progress: TrainingProgress) -> RunResult:
        """Train to the end, showing ``progress``."""
        options, history = self.options, self.history
        meter = _Meter(self.device)
        for step in range(history.step, options.stop_at):
            meter.pending.append(self._step(step))
            done = step + 1
            last = done == options.stop_at
            evaluates = last or done % options.eval_every == 0
            saves = self.run == options.run and (last or done % (options.save_every or options.stop_at) == 0)
            if not (evaluates or saves or done % options.log_every == 0):
                continue
            history.losses += meter.flush()
            progress.training(done, history.losses[-1], meter.seconds[-1])
            if evaluates:
                history.validation.append((done, self.evaluate()))
                progress.validation(*history.validation[-1])
            if saves:
                checkpoint.save(self.state, options.save)
            meter.restart()
        return self._result(meter.step_seconds)

    def _step(self, step: int) -> Tensor:
        """One optimizer step; returns this rank's mean loss without waiting for it."""
        options = self.options
        before = self._traffic()
        self.model.train()
        total = torch.zeros((), device=self.device)
        batches = self.share.training_batches(self.corpus.training, options.seed, step, options.micro_batches)
        for index, batch in enumerate(batches):
            accumulates = index < options.micro_batches - 1
            with accumulating(self.model, accumulates):
                loss = self._loss(batch) / options.micro_batches
                loss.backward()
            total += loss.detach()
        clip_gradients(self.model, options.clip)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.sent.append((self.evaluated, minus(self._traffic(), before)))
        self.evaluated = False
        return total

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean cross-entropy over the validation windows of all ranks."""
        self.model.eval()
        batches = self.share.validation_batches(self.corpus.validation, self.options.eval_batches)
        loss = torch.stack([self._loss(batch) for batch in batches]).mean()
        dist.all_reduce(loss)
        self.evaluated = True
        return loss.item() / self.options.world

    def _loss(self, batch: Tensor) -> Tensor:
        batch = batch.to(self.device, non_blocking=True)
        logits = self.model(batch[:, :-1]).logits
        return cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    def _traffic(self) -> Traffic:
        return traffic(self.model) if self.run.strategy else {}

    def _step_traffic(self) -> Traffic:
        # A step right after an evaluation finds the weights that the evaluation has gathered, and sends less.
        ordinary = [sent for evaluated, sent in self.sent if not evaluated] or [sent for _, sent in self.sent]
        first = ordinary[0]
        return {
            kind: {hop: int(median(sent[kind][hop] for sent in ordinary)) for hop in hops}
            for kind, hops in first.items()
        }

    def _result(self, step_seconds: float) -> RunResult:
        options = self.options
        estimate = full_shard_traffic(
            self.unit_sizes,
            self.trained_unit_sizes,
            nodes=options.nodes,
            gpus_per_node=options.gpus_per_node,
            micro_batches=options.micro_batches,
            bytes_per_value=2 if options.precision == "bf16" else 4,
        )
        recent = self.history.losses[-10:]
        return RunResult(
            label=self.run.label,
            strategy=str(self.run.strategy or "torch's ShardingStrategy.FULL_SHARD"),
            parameters=sum(self.unit_sizes),
            losses=self.history.losses,
            validation=self.history.validation,
            train_loss=sum(recent) / len(recent),
            validation_loss=self.history.validation[-1][1],
            step_seconds=step_seconds,
            tokens_per_second=options.tokens_per_step / step_seconds,
            peak_memory=_peak_memory(self.device),
            traffic=self._step_traffic() if self.run.strategy else estimate,
            full_shard_traffic=estimate,
        )


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    largest = torch.tensor(peak, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)
