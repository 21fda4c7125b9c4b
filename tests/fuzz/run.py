"""Runs a program, by stock FSDP or by ours, and notes what it shows."""

from __future__ import annotations

import traceback
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.adapter import STOCK, original_name
from harness.pool import shared_folder
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    StateDictType,
)
from torch.distributed.tensor import DTensor

import fsdp_zpp

from . import program as ops, stock
from .laws import SeenWeights, changed_though_frozen, has_gradient_law
from .showing import Showing
from .trace import Trace
from .tuning import tune


class Run(Showing):
    """One run of a program."""

    seen: SeenWeights | None = None

    def run(self) -> Trace:
        """Run the program to its end, or to the first exception that is not its own."""
        try:
            if self.program.has_codecs:
                self.show_weights("start")
            for number, op in enumerate(self.program.ops):
                self.number = number
                getattr(self, "do_" + type(op).__name__.lower())(op)
            self.finish()
            self.show_weights("end")
            self.trace.replicas_differ = self._replicas_differ()
            if self.program.has_codecs:
                self.trace.wrong += changed_though_frozen(self.program, self.trace)
        except Exception as error:
            at = f"op {self.number}, {self.program.ops[self.number]!r}"
            self.trace.error = f"raises {type(error).__name__}: {error}\n(at {at})\n{traceback.format_exc()}"
        return self.trace

    def before_sharding(self, i: int, net: Any) -> None:
        if self.strategy is not STOCK and self.program.has_codecs:
            if self.seen is None:
                self.seen = SeenWeights(self.program)
            self.seen.watch(i, net)

    def do_microbatch(self, op: ops.MicroBatch) -> None:
        if self.seen is not None:
            self.seen.forget()
        super().do_microbatch(op)
        # Looking at full weights reshards, which half of the programs do without.
        if self.seen is not None and self.program.observe and op.sync and not op.unsynced and op.fails is None:
            for i, model in enumerate(self.models):
                self.trace.wrong += self.seen.check(i, self.adapter.full_weights(model))

    def finish(self) -> None:
        """Have nodes that train on their own agree, before weights are shown."""
        if self.strategy is STOCK or self.program.strategy.local_steps is None:
            return
        # They exchange what is due before a forward that trains.
        self._loss(next(op.passes for op in reversed(self.program.ops) if isinstance(op, ops.MicroBatch)))
        for model in self.models:
            fsdp_zpp.exchange_weights(model)

    def show_weights(self, when: str) -> None:
        """Put all weights into the trace. Collective."""
        for i, model in enumerate(self.models):
            for name, value in self.adapter.full_weights(model).items():
                self.trace.shown[f"{when}: weight of model {i}: {name}"] = value

    def _replicas_differ(self) -> bool:
        """Whether ranks have different weights in the end. Collective."""
        own = torch.cat([value.flatten() for name, value in self.trace.shown.items() if name.startswith("end")])
        own = own.nan_to_num(nan=-1e30)  # equal to itself
        highest, lowest = own.clone(), own.clone()
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
        return not highest.equal(lowest)

    def _recover(self) -> None:
        """What a user does after an exception: forget the step."""
        for i, model in enumerate(self.models):
            for root in self.roots(i):
                if hasattr(root, "reset_iter_state"):
                    root.reset_iter_state()
            model.zero_grad()
            self._forget_accumulated(range(len(self.units(i))), i)

    def _note_gradients(self) -> None:
        """Note which parameters have a gradient on some rank, and which of these only zeros. Collective.

        This rank may hold no part of one, and flat parameters have names of their own.
        """
        if self.program.adapter == "fsdp1 flat":
            return
        named = [(i, original_name(n), p.grad) for i, m in enumerate(self.models) for n, p in m.named_parameters()]
        found = torch.tensor([0 if gradient is None else 1 + _has_values(gradient) for *_, gradient in named])
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        for (i, name, _), state in zip(named, found.tolist(), strict=True):
            self.trace.facts[f"op {self.number}: model {i}: {name}: gradient"] = ("None", "zeros", "values")[state]

    def do_step(self, op: ops.Step) -> None:
        self._note_gradients()
        if not self.trace.gradients and has_gradient_law(self.program):
            for i, model in enumerate(self.models):
                if all(p.grad is None for p in model.parameters()):
                    continue
                for name, value in self.adapter.full_gradients(model).items():
                    self.trace.gradients[f"gradient of model {i}: {name}"] = value
        if self.scaler is not None and op.clip is not None:
            for i in op.optimizers:
                self.scaler.unscale_(self.optimizers[i])
        if op.clip is not None:
            for i in range(len(self.models)):
                for root in self.roots(i):
                    self._clip(root, op.clip)
        for i in op.optimizers:
            if self.scaler is None:
                self.optimizers[i].step()
            else:
                self.scaler.step(self.optimizers[i])
        if self.scaler is not None:
            self.scaler.update()
        if self.program.observe:
            self.show_weights(f"op {self.number}")

    def _clip(self, model: Any, norm: float) -> None:
        self.adapter.clip(model, norm)

    def do_zerograd(self, op: ops.ZeroGrad) -> None:
        if isinstance(op.of, int):
            self.optimizers[op.of].zero_grad(op.set_to_none)
            if not op.set_to_none or self.program.interleaved:  # which follows a step, and all is reduced
                return
            for i in range(len(self.models)):
                self._forget_accumulated((unit for j, unit in self.program.optimizers[op.of] if j == i), i)
            return
        for i, model in enumerate(self.models):
            (model if op.of == "models" else self.net(i)).zero_grad(op.set_to_none)
            if not op.set_to_none:
                continue
            self._forget_accumulated(range(len(self.units(i))), i)

    def _forget_accumulated(self, units: Any, i: int) -> None:
        if self.strategy is STOCK:
            for unit in units:
                stock.forget_accumulated(self.units(i)[unit], nested=unit < len(self.net(i).blocks))

    def do_freeze(self, op: ops.Freeze) -> None:
        unit: Any = self.units(op.model)[op.unit]
        if op.branch is not None:
            unit = self.block(op.model, op.unit).branches[op.branch]
        unit.requires_grad_(not op.frozen)

    def do_sharpstep(self, op: ops.SharpStep) -> None:
        optimizer = self.optimizers[op.optimizer]

        def closure() -> Tensor:
            optimizer.zero_grad()
            with self._micro_batch(True):
                loss = self._loss(op.passes)
                loss.backward()
            self.after_backward()
            # The same on all ranks, which must agree on what they do with it.
            total = loss.detach().clone()
            dist.all_reduce(total)
            return total

        optimizer.step(closure)
        if self.program.observe:
            self.show_weights(f"op {self.number}")

    def after_backward(self) -> None:
        """Called after the backwards that an optimizer runs."""

    def do_tune(self, op: ops.Tune) -> None:
        tune(self.units(op.model), op)

    def do_load(self, op: ops.Load) -> None:
        for model in self.models:
            if self.is_fsdp1:
                stock.reshard(model, self.strategy)
            if self.is_fsdp1:
                with FullyShardedDataParallel.state_dict_type(model, StateDictType[op.kind]):
                    model.load_state_dict(halved(model.state_dict()))
            else:
                model.load_state_dict(halved(model.state_dict()), assign=op.assign)
        if op.assign:
            self.optimizers = self.make_optimizers()

    def do_loadinplace(self, op: ops.LoadInPlace) -> None:
        for model in self.models:
            stock.reshard(model, self.strategy)
            with shared_folder() as folder:
                dcp.save(halved(get_model_state_dict(model)), checkpoint_id=folder)
                dcp.load(get_model_state_dict(model), checkpoint_id=folder)

    def do_write(self, op: ops.Write) -> None:
        for model in self.models:
            summon = op.how == "summon" and self.is_fsdp1
            stock.reshard(model, self.strategy)
            with (
                FullyShardedDataParallel.summon_full_params(model, writeback=True) if summon else nullcontext(),
                torch.no_grad(),
            ):
                for p in model.parameters():
                    (p.data if op.how == "data" else p).mul_(0.75)
            if not summon and self.strategy is not STOCK:
                fsdp_zpp.invalidate(model)

    def do_summon(self, op: ops.Summon) -> None:
        self.show_weights(f"op {self.number}")

    def do_move(self, op: ops.Move) -> None:
        if self.is_fsdp1 and self.strategy is STOCK:
            return  # FSDP1 would lose gradients, and a move changes no value
        for model in self.models:
            model._apply(torch.clone)
            if self.is_fsdp1 and self.strategy is STOCK:
                stock.follow_move(model)

    def do_resume(self, op: ops.Resume) -> None:
        saved = []
        for i, model in enumerate(self.models):
            saved.append(get_state_dict(model, self._optimizers_of(i)))
        codecs = None if self.strategy is STOCK or not self.program.has_codecs else self._codec_states()
        self.models = [self.make(i, 1) for i in range(len(self.models))]
        self.optimizers = self.make_optimizers()
        for i, (model, (weights, states)) in enumerate(zip(self.models, saved, strict=True)):
            # What has not had a gradient so far has no state.
            options = StateDictOptions(strict=False)
            set_state_dict(
                model, self._optimizers_of(i), model_state_dict=weights, optim_state_dict=states, options=options
            )
        if codecs is not None:
            for model, state in zip(self.models, codecs, strict=True):
                fsdp_zpp.CodecState(model).load_state_dict(state)

    def _codec_states(self) -> list[dict[str, Any]]:
        return [fsdp_zpp.CodecState(model).state_dict() for model in self.models]

    def _optimizers_of(self, i: int) -> list[torch.optim.Optimizer]:
        return [
            optimizer
            for optimizer, owned in zip(self.optimizers, self.program.optimizers, strict=True)
            if {model for model, _ in owned} == {i}
        ]


def _has_values(gradient: Tensor) -> bool:
    own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return bool((own != 0).any())


def halved(state: dict[str, Any]) -> dict[str, Any]:
    with torch.no_grad():
        return {name: _half_of(value) for name, value in state.items()}


def _half_of(value: Any) -> Any:
    if not hasattr(value, "local_shards"):
        return value * 0.5
    for shard in value.local_shards():  # a ShardedTensor, which has no arithmetic
        shard.tensor = shard.tensor * 0.5
    return value
