"""What may happen between the steps of a training."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import models
from harness.fsdp2 import Fsdp2
from harness.training import logits
from soak_training import Training
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from fsdp_zpp import CodecState, invalidate


def evaluate(training: Training) -> None:
    """A forward in evaluation."""
    logits(training.model)


def infer(training: Training) -> None:
    """Likewise, in inference mode."""
    with torch.inference_mode():
        logits(training.model)


def skip_a_step(training: Training) -> None:
    """The scaler does."""
    training.step(overflows=True)


def drop_a_micro_batch(training: Training) -> None:
    """Accumulated gradients are cleared, by the model or by its optimizers."""
    with training.adapter.micro_batch(training.model, False, False):
        models.loss_of(training.model, models.batch(training.steps, 7)).backward()
    training.random.choice([training.model.zero_grad, training.zero_grad])()


def step_with_one_optimizer(training: Training) -> None:
    """The other's gradients are cleared."""
    models.loss_of(training.model, models.batch(training.steps, 8)).backward()
    training.random.choice(training.optimizers).step()
    training.model.zero_grad()


def abandon_a_forward(training: Training) -> None:
    """No backward follows it."""
    models.loss_of(training.model, models.batch(training.steps, 9))


def load_state_dict(training: Training) -> None:
    """The model's own."""
    kinds = [kind for kind in training.adapter.state_dict_kinds if kind != "LOCAL_STATE_DICT"]
    training.adapter.load_from(training.model, training.model, training.random.choice(kinds))


def assign(training: Training) -> None:
    """Other parameters, of which other optimizers are made."""
    if isinstance(training.adapter, Fsdp2):
        training.model.load_state_dict(training.model.state_dict(), assign=True)
        training.renew_optimizers()


def write(training: Training) -> None:
    """To the weights, with an announcement."""
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.mul_(0.99)
    invalidate(training.model)


def move(training: Training) -> None:
    """To other memory."""
    training.model._apply(torch.clone)


def look(training: Training) -> None:
    """At the full weights."""
    training.adapter.full_weights(training.model)


def renew_optimizers(training: Training) -> None:
    """Others take over."""
    training.renew_optimizers()


def freeze(training: Training) -> None:
    """A block, for a step; FullyShardedDataParallel, stock too, can't freeze what an abandoned forward has used."""
    training.step()
    training.block.requires_grad_(False)
    training.step()
    training.block.requires_grad_(True)


def resume(training: Training) -> None:
    """From state dicts of the model, its optimizers and its codecs."""
    training.adapter.before_load(training.model)
    state = get_state_dict(training.model, training.optimizers)
    codecs = CodecState(training.model).state_dict()
    set_state_dict(training.model, training.optimizers, model_state_dict=state[0], optim_state_dict=state[1])
    CodecState(training.model).load_state_dict(codecs)


def checkpoint(training: Training) -> None:
    """Save to files and go on from them, in a model that takes the place of this one."""
    # FullyShardedDataParallel, stock too, never frees a frozen unit whose last but one forward had no backward.
    training.step()
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    training.adapter.before_load(training.model)
    weights, states = get_state_dict(training.model, training.optimizers)
    dcp.save({"model": weights, "optimizer": states, "codecs": CodecState(training.model)}, checkpoint_id=folder[0])
    training.model = training.make()
    training.renew_optimizers()
    weights, states = get_state_dict(training.model, training.optimizers)
    state = {"model": weights, "optimizer": states, "codecs": CodecState(training.model)}
    dcp.load(state, checkpoint_id=folder[0])
    set_state_dict(
        training.model, training.optimizers, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


OFTEN: list[Callable[[Training], None]] = [
    evaluate,
    infer,
    skip_a_step,
    drop_a_micro_batch,
    step_with_one_optimizer,
    abandon_a_forward,
    load_state_dict,
    assign,
    write,
    move,
    look,
    renew_optimizers,
    freeze,
    resume,
]
SELDOM: list[Callable[[Training], None]] = [checkpoint]
