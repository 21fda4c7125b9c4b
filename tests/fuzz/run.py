"""Runs of a program, by stock FSDP or by ours, what they show, and laws of codecs beside staying near stock.

- Weights that a forward computes with are within the codec's error of the full-precision weights, as no stale one is.
- Weights that are frozen for good do not change.

:class:`fuzz.references.Measured` has the law for gradients.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import models as harness_models
from harness.adapter import STOCK, original_name
from harness.pool import device_type, shared_folder
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor

import fsdp_zpp
from fsdp_zpp import Int2Delta, Int4, Int4Delta, Int8, Strategy

from . import program as ops
from .features import is_left_out
from .modules import InTheMiddleError
from .program import Program
from .trained import Trained, forget_accumulated, reshard, tune

ROWS = 3


@dataclass
class Trace:
    """The results of a run."""

    shown: dict[str, Tensor] = field(default_factory=dict)  # losses and weights, by the number of the op
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of the first step
    facts: dict[str, str] = field(default_factory=dict)  # of parameters, as modules show them
    wrong: list[str] = field(default_factory=list)  # without any comparison
    error: str | None = None  # the exception that ended it
    replicas_differ: bool = False  # in the end

    @property
    def says(self) -> str | None:
        """The exception alone, without where it was raised."""
        return None if self.error is None else self.error.partition("\n")[0]


MARGIN = 1.05
"""For rounding of scales."""
IN_16_BITS = 2.0**-7


def weight_error(strategy: Strategy) -> float:
    """The largest error of a gathered weight, as a share of the largest weight."""
    if isinstance(strategy.weights, Int2Delta):
        return 0.3  # as below, times what may clip
    if isinstance(strategy.weights, Int4Delta):
        return 0.1  # of changes, each of which is a part of the weight at the rates of programs
    return {Int8: 1 / 254, Int4: 1 / 14}.get(type(strategy.weights), 0.0)  # type: ignore[call-overload]


class SeenWeights:
    """The weights that forwards have computed with."""

    def __init__(self, program: Program) -> None:
        self.bound = max(map(weight_error, program.strategies)) * MARGIN + IN_16_BITS * program.has_half + 1e-6
        self.of_exact = IN_16_BITS * program.has_half + 1e-6  # of parameters of one dimension
        self._seen: dict[tuple[int, str], list[Tensor]] = {}

    def watch(self, i: int, net: nn.Module) -> None:
        """Note the weights of the i-th model whenever a module of it runs."""
        for name, module in net.named_modules():
            if isinstance(getattr(module, "weight", None), nn.Parameter):
                module.register_forward_pre_hook(lambda module, args, key=(i, name): self._note(key, module))

    def _note(self, key: tuple[int, str], module: Any) -> None:
        self._seen.setdefault(key, []).append(module.weight.detach().float().clone())

    def forget(self) -> None:
        """Begin anew."""
        self._seen.clear()

    def check(self, i: int, full: dict[str, Tensor]) -> list[str]:
        """Return the weights of the i-th model that were seen and are not near the full ones."""
        largest = max(float(value.abs().max()) for value in full.values())
        wrong = []
        for (model, name), seen in self._seen.items():
            truth = full.get(f"{name}.weight")
            if model != i or truth is None:
                continue
            error = max(float((each.cpu() - truth).abs().max()) for each in seen)
            bound = self.bound if truth.ndim > 1 else self.of_exact
            if not error <= bound * largest and truth.isfinite().all():
                saw = f"a forward saw {name}.weight {error:.3g} from its value"
                wrong.append(f"{saw}, the largest weight is {largest:.3g}")
        return wrong


def changed_though_frozen(program: Program, trace: Trace) -> list[str]:
    """Return the weights that have changed from the start to the end, though they were frozen all along."""
    writes = any(isinstance(op, ops.Load | ops.Write) or op == ops.Event("load_in_place") for op in program.ops)
    if program.with_frozen or writes:
        return []
    frozen = tuple(
        f"start: weight of model {i}: blocks.{unit}.branches.{b}."
        for i, model in enumerate(program.models)
        for unit, each in enumerate(model.units)
        for b, branch in enumerate(each.branches)
        if branch.frozen and not (each.tied and b < 2)
    )
    ends = {name: name.replace("start", "end", 1) for name in trace.shown if name.startswith(frozen)}
    changed = [end for start, end in ends.items() if not trace.shown[start].equal(trace.shown[end])]
    return [f"{end} has changed though it is frozen" for end in changed]


def has_gradient_law(program: Program) -> bool:
    """Return whether weights are exact until the first step, and nothing is fed back to its gradient."""
    s = program.strategy
    return (
        program.adapter == "fsdp2"
        and not is_left_out("gradient law")
        and any(isinstance(codec, Int4 | Int8) for codec in s.gradient_codecs)
        and s.weights is None
        and s.error_feedback is None
        and program.inner is None
        and not (program.has_half or program.scaler or program.interleaved)
        and not any(op.what == "divide factor" for op in program.ops if isinstance(op, ops.Tune))
        and program.optimizer not in ("sam", "lbfgs")
    )


class Run(Trained):
    """One run of a program, whose models run forwards and backwards."""

    seen: SeenWeights | None = None

    def __init__(self, program: Program, strategy: Any) -> None:
        self.trace = Trace()
        self.number = 0
        super().__init__(program, strategy)
        make_scaler = partial(ShardedGradScaler, device_type(), init_scale=2.0**6, growth_interval=2)
        self.scaler = make_scaler() if program.scaler else None

    def run(self) -> Trace:
        """Run the program to its end, or to the first exception that is not its own."""
        try:
            if self.program.has_codecs:
                self.show_weights("start")
            for number, op in enumerate(self.program.ops):
                self.do(number, op)
            self.finish()
            self.show_weights("end")
            self.trace.replicas_differ = self._replicas_differ()
            if self.program.has_codecs:
                self.trace.wrong += changed_though_frozen(self.program, self.trace)
        except Exception as error:
            at = f"op {self.number}, {self.program.ops[self.number]!r}"
            self.trace.error = f"raises {type(error).__name__}: {error}\n(at {at})\n{traceback.format_exc()}"
        return self.trace

    def do(self, number: int, op: ops.Op) -> None:
        """Run one op."""
        self.number = number
        what = op.what if isinstance(op, ops.Event) else type(op).__name__.lower()
        getattr(self, f"do_{what}")(op)

    def before_sharding(self, i: int, net: Any) -> None:
        if self.strategy is not STOCK and self.program.has_codecs:
            self.seen = self.seen or SeenWeights(self.program)
            self.seen.watch(i, net)

    def finish(self) -> None:
        """Have nodes that train on their own agree, before weights are shown."""
        if self.strategy is STOCK or self.program.strategy.local_steps is None:
            return
        # They exchange what is due before a forward that trains.
        passes = next(op.passes for op in reversed(self.program.ops) if isinstance(op, ops.MicroBatch))
        self._loss(ops.MicroBatch(passes))
        for model in self.models:
            fsdp_zpp.exchange_weights(model)

    def show_weights(self, when: str) -> None:
        """Put all weights into the trace. Collective."""
        for i, model in enumerate(self.models):
            for name, value in self.adapter.full_weights(model).items():
                self.trace.shown[f"{when}: weight of model {i}: {name}"] = value

    def _replicas_differ(self) -> bool:
        """Return whether ranks have different weights in the end. Collective."""
        own = torch.cat([value.flatten() for name, value in self.trace.shown.items() if name.startswith("end")])
        own = own.nan_to_num(nan=-1e30)  # equal to itself
        highest, lowest = own.clone(), own.clone()
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
        return not highest.equal(lowest)

    def do_microbatch(self, op: ops.MicroBatch) -> None:
        if self.seen is not None:
            self.seen.forget()
        try:
            with self.micro_batch(op):
                self._run(op)
        except InTheMiddleError:
            self._recover()
            assert op.fails
        else:
            assert not op.fails
        # Looking at full weights reshards, which half of the programs do without.
        if self.seen is not None and self.program.observe and op.sync and not op.unsynced and op.fails is None:
            for i, model in enumerate(self.models):
                self.trace.wrong += self.seen.check(i, self.adapter.full_weights(model))

    def _run(self, op: ops.MicroBatch) -> None:
        losses: list[Tensor] = []
        for at in range(op.forwards):
            losses.append(self._loss(op, at))
            if op.fails == "loss":
                raise InTheMiddleError
            self.trace.shown[f"op {self.number}: loss{at or ''}"] = losses[-1].detach().float().cpu()
            if op.backwards == "pipelined" and at:
                self._backward(losses.pop(0), op, last=False)
        if op.backwards == "sum" and len(losses) > 1:
            losses = [torch.stack(losses).sum()]
        if op.backwards == "in reverse":
            losses.reverse()
        for loss in losses:
            if op.backwards == "twice":
                self._backward(loss, op, last=False, retain_graph=True)
            self._backward(loss, op, last=loss is losses[-1])

    def _backward(self, loss: Tensor, op: ops.MicroBatch, last: bool, **arguments: Any) -> None:
        if op.backwards == "pipelined":
            self.synchronize_in_pipeline(op, last)
        if op.overflows == dist.get_rank() % self.program.data_ranks:
            loss = loss * float("inf")
        (self.scaler.scale(loss) if self.scaler else loss).backward(**arguments)

    def synchronize_in_pipeline(self, op: ops.MicroBatch, last: bool) -> None:
        """Synchronize gradients of the last backward only, as torch's schedules do."""
        for root in self.all_roots():
            root.set_requires_gradient_sync(op.sync and last)
            root.set_is_last_backward(last)

    @contextmanager
    def micro_batch(self, op: ops.MicroBatch) -> Iterator[None]:
        """Return the context of a micro-batch."""
        with ExitStack() as stack:
            for root in self.all_roots():
                if self.is_fsdp1:
                    stack.enter_context(nullcontext() if op.sync else root.no_sync())
                    continue
                root.set_requires_gradient_sync(op.sync)
                setters = {root.set_requires_all_reduce: op.all_reduce, root.set_reshard_after_backward: op.reshard}
                for setter in (setter for setter, value in setters.items() if not value):
                    setter(False)
                    stack.callback(setter, True)
            for i, unit in op.unsynced:
                self.units(i)[unit].set_requires_gradient_sync(False, recurse=False)
            yield

    def _loss(self, op: ops.MicroBatch | ops.Evaluation, at: int = 0) -> Tensor:
        rank = dist.get_rank() % self.program.data_ranks
        generator = torch.Generator().manual_seed(1000 * self.number + 100000 * at + rank)
        x = torch.randn(ROWS, self.program.models[0].width, generator=generator).to(harness_models.device())
        for i, (model, part) in enumerate(zip(self.models, op.passes, strict=True)):
            width, use = self.program.models[i].width, part.use(rank)
            x = torch.nn.functional.pad(x, (0, max(0, width - x.shape[1])))[:, :width]
            if isinstance(op, ops.Evaluation) and op.reference:
                of_units = zip(use, self.program.models[i].branches, strict=True)
                use = tuple(tuple(b for b in used if not branches[b].adapter) for used, branches in of_units)
            if op.direct is None:
                x = model(x, part.order, use, lambda at, x, i=i: self._between(op, i, at, x))
            elif op.direct[0] == i:
                x = self.call_block(*op.direct, x, use[op.direct[1]])
        return (x.float() - torch.randn(x.shape, generator=generator).to(x.device)).square().mean()

    def call_block(self, i: int, unit: int, x: Tensor, use: tuple[int, ...]) -> Tensor:
        """Call a block by itself."""
        return self.units(i)[unit](x, use)

    def _between(self, op: Any, model: int, at: int, x: Tensor) -> Tensor:
        """Fail in the middle of the last model, if the op says so."""
        fails = getattr(op, "fails", None) in ("forward", "backward") and model == len(self.models) - 1
        if not fails or at != (len(op.passes[model].order) + 1) // 2:
            return x

        def fail(gradient: Tensor | None) -> Tensor:
            raise InTheMiddleError

        if op.fails == "forward":
            fail(None)
        x = x * 1.0
        x.register_hook(fail)
        return x

    def do_evaluation(self, op: ops.Evaluation) -> None:
        for model in self.models:
            model.eval()
        self._show_average(True)
        if op.reference:
            self._switch_adapters(False)
        with torch.inference_mode() if op.inference else torch.no_grad():
            loss = self._loss(op)
        self.trace.shown[f"op {self.number}: loss in evaluation"] = loss.detach().clone().float().cpu()
        if op.reference:
            self._switch_adapters(True)
        self._show_average(False)
        for model in self.models:
            model.train()

    def _switch_adapters(self, on: bool) -> None:
        """Set ``requires_grad`` on whatever modules show, as PEFT does."""
        for i, spec in enumerate(self.program.models):
            for unit, each in enumerate(spec.units):
                for module, branch in zip(self.block(i, unit).branches, each.branches, strict=True):
                    if branch.adapter:
                        module.requires_grad_(on)

    def _show_average(self, shown: bool) -> None:
        """Have optimizers that train other weights than they evaluate change them."""
        for optimizer in self.optimizers:
            if hasattr(optimizer, "train"):
                self.show_shards()
                optimizer.eval() if shown else optimizer.train()

    def show_shards(self) -> None:
        """Have models show what optimizers hold."""
        for model in self.models:
            reshard(model, self.strategy)

    def do_show(self, op: ops.Event) -> None:
        for i, model in enumerate(self.models):
            for name, p in model.named_parameters():
                # Ours wraps what is frozen of a unit in a unit of its own, which names show.
                key = f"op {self.number}: model {i} shows {original_name(name)}"
                self.trace.facts[f"{key}: trainable"] = str(p.requires_grad)
                if self.is_fsdp1:
                    continue
                self.trace.facts[f"{key}: sharded"] = str(isinstance(p, DTensor))
                self.trace.facts[f"{key}: shape"] = str(tuple(p.shape))
                value: Any = p.full_tensor() if isinstance(p, DTensor) else p
                if not self.program.has_codecs:  # of which unsharded parameters show what was decoded
                    self.trace.shown[key] = value.detach().clone().float().cpu()

    def do_remake_optimizers(self, op: ops.Event) -> None:
        if not self.is_fsdp1:
            for root in self.all_roots():
                root.reshard()  # which torch, too, leaves unsharded after a forward
        self.optimizers = self.make_optimizers()

    def _recover(self) -> None:
        """Forget the step, as a user does after an exception."""
        for root in self.all_roots():
            if hasattr(root, "reset_iter_state"):
                root.reset_iter_state()
        for i, model in enumerate(self.models):
            model.zero_grad()
            self._forget_accumulated(range(len(self.units(i))), i)

    def _note_gradients(self) -> None:
        """Note which parameters have a gradient on any rank, and which of these only zeros. Collective."""
        if self.program.adapter == "fsdp1 flat":  # whose parameters have names of their own
            return
        named = [(i, original_name(n), p.grad) for i, m in enumerate(self.models) for n, p in m.named_parameters()]
        local = [p.to_local() if isinstance(p, DTensor) else p for *_, p in named]
        found = torch.tensor([0 if gradient is None else 1 + bool((gradient != 0).any()) for gradient in local])
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
        optimizers = [self.optimizers[i] for i in op.optimizers]
        if op.clip is not None:
            for optimizer in optimizers if self.scaler else ():
                self.scaler.unscale_(optimizer)
            for root in self.all_roots():
                self.clip(root, op.clip)
        for optimizer in optimizers:
            self.scaler.step(optimizer) if self.scaler else optimizer.step()
        if self.scaler:
            self.scaler.update()
        if self.program.observe:
            self.show_weights(f"op {self.number}")

    def clip(self, model: Any, norm: float) -> None:
        """Clip the gradients of a root."""
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
            if op.set_to_none:
                self._forget_accumulated(range(len(self.units(i))), i)

    def _forget_accumulated(self, units: Any, i: int) -> None:
        if self.strategy is STOCK:
            for unit in units:
                forget_accumulated(self.units(i)[unit], nested=unit < len(self.net(i).blocks))

    def do_freeze(self, op: ops.Freeze) -> None:
        branches = None if op.branch is None else self.block(op.model, op.unit).branches
        part = self.units(op.model)[op.unit] if branches is None else branches[op.branch]
        part.requires_grad_(not op.frozen)

    def do_sharpstep(self, op: ops.SharpStep) -> None:
        optimizer, batch = self.optimizers[op.optimizer], ops.MicroBatch(op.passes)

        def closure() -> Tensor:
            optimizer.zero_grad()
            with self.micro_batch(batch):
                loss = self._loss(batch)
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
                reshard(model, self.strategy)
                with FullyShardedDataParallel.state_dict_type(model, StateDictType[op.kind]):
                    model.load_state_dict(halved(model.state_dict()))
            else:
                model.load_state_dict(halved(model.state_dict()), assign=op.assign)
        if op.assign:
            self.optimizers = self.make_optimizers()

    def do_load_in_place(self, op: ops.Event) -> None:
        for model in self.models:
            reshard(model, self.strategy)
            with shared_folder() as folder:
                dcp.save(halved(get_model_state_dict(model)), checkpoint_id=folder)
                dcp.load(get_model_state_dict(model), checkpoint_id=folder)

    def do_write(self, op: ops.Write) -> None:
        for model in self.models:
            summon = op.how == "summon" and self.is_fsdp1
            reshard(model, self.strategy)
            with (
                FullyShardedDataParallel.summon_full_params(model, writeback=True) if summon else nullcontext(),
                torch.no_grad(),
            ):
                for p in model.parameters():
                    (p.data if op.how == "data" else p).mul_(0.75)
            if not summon and self.strategy is not STOCK:
                fsdp_zpp.invalidate(model)

    def do_summon(self, op: ops.Event) -> None:
        self.show_weights(f"op {self.number}")

    def do_move(self, op: ops.Event) -> None:
        if self.is_fsdp1 and self.strategy is STOCK:
            return  # FSDP1 would lose gradients, and a move changes no value
        for model in self.models:
            model._apply(torch.clone)

    def do_resume(self, op: ops.Event) -> None:
        saved = [get_state_dict(model, self._optimizers_of(i)) for i, model in enumerate(self.models)]
        with_codecs = self.program.has_codecs and self.strategy is not STOCK
        codecs = [fsdp_zpp.CodecState(model).state_dict() for model in self.models] if with_codecs else []
        self.models = [self.make(i, 1) for i in range(len(self.models))]
        self.optimizers = self.make_optimizers()
        for i, (model, (weights, states)) in enumerate(zip(self.models, saved, strict=True)):
            loaded = {"model_state_dict": weights, "optim_state_dict": states}
            # Parameters that have not had a gradient so far have no state.
            set_state_dict(model, self._optimizers_of(i), **loaded, options=StateDictOptions(strict=False))
        for model, state in zip(self.models, codecs, strict=False):
            fsdp_zpp.CodecState(model).load_state_dict(state)

    def _optimizers_of(self, i: int) -> list[torch.optim.Optimizer]:
        owned = zip(self.optimizers, self.program.optimizers, strict=True)
        return [optimizer for optimizer, units in owned if {model for model, _ in units} == {i}]


@torch.no_grad()
def halved(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict with values halved."""
    for value in state.values():
        for shard in value.local_shards() if hasattr(value, "local_shards") else ():
            shard.tensor = shard.tensor * 0.5  # of a ShardedTensor, which has no arithmetic
    return {name: value if hasattr(value, "local_shards") else value * 0.5 for name, value in state.items()}
