"""Runs a program, by stock FSDP or by ours, and notes what it shows."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from harness import models as harness_models
from harness.adapter import STOCK, Adapter
from harness.fsdp1 import Fsdp1
from harness.fsdp2 import Fsdp2
from harness.pool import device_type
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    StateDictType,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import fsdp_zpp

from . import program as ops
from .modules import InTheMiddleError, Net
from .program import Program

ADAPTERS: dict[str, Adapter] = {
    "fsdp1": Fsdp1(),
    "fsdp1 flat": Fsdp1(use_orig_params=False),
    "fsdp2": Fsdp2(),
}
ROWS = 3


@dataclass
class Trace:
    """What a run showed: losses and weights by the number of the op, and the exception that ended it."""

    shown: dict[str, Tensor] = field(default_factory=dict)
    error: str | None = None
    replicas_differ: bool = False


class Run:
    """One run of a program."""

    def __init__(self, program: Program, strategy: Any) -> None:
        self.program, self.strategy = program, strategy
        self.adapter = ADAPTERS[program.adapter]
        self.is_fsdp1 = program.adapter != "fsdp2"
        self.trace = Trace()
        self.models = [self._make(i, 0) for i in range(len(program.models))]
        self.optimizers = self._make_optimizers()
        self.scaler = (
            ShardedGradScaler(device=device_type(), init_scale=2.0**6, growth_interval=2) if program.scaler else None
        )
        self.unscaled: set[int] = set()

    # ---- what is trained

    def _make(self, i: int, seed: int) -> Any:
        torch.manual_seed(seed * 10 + i)
        spec = self.program.models[i]
        net = Net(spec).to(harness_models.device())
        arguments = self._arguments()
        for block, unit in enumerate(spec.units):
            if unit.wrapped:
                sharded = self.adapter.apply(net.blocks[block], self.strategy, **arguments)
                net.blocks[block] = sharded
        model = self.adapter.apply(net, self.strategy, **arguments)
        if self.program.zero_unused:
            model.set_reduce_scatter_unused_params(True)
        return model

    def _arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        if self.is_fsdp1:
            arguments |= {"use_orig_params": self.adapter.use_orig_params, "device_id": harness_models.device()}
        if self.program.precision is not None:
            names = {"bf16": torch.bfloat16, "fp32": torch.float32, "none": None}
            param, reduce = (names[name] for name in self.program.precision.split())
            if self.is_fsdp1:
                arguments["mixed_precision"] = MixedPrecision(param_dtype=param, reduce_dtype=reduce)
            else:
                arguments["mp_policy"] = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
        return arguments

    def net(self, i: int) -> Net:
        """A model within its wrapper."""
        return next(module for module in self.models[i].modules() if isinstance(module, Net))

    def units(self, i: int) -> list[nn.Module]:
        """Its blocks, sharded or not, and itself at the end."""
        return [*self.net(i).blocks, self.models[i]]

    def parameters(self, i: int, unit: int) -> list[nn.Parameter]:
        """The trainable parameters of a block, or of what is in none."""
        blocks = self.net(i).blocks
        if unit < len(blocks):
            chosen = list(blocks[unit].parameters())
        else:
            others = {p for block in blocks for p in block.parameters()}
            chosen = [p for p in self.models[i].parameters() if p not in others]
        return [p for p in chosen if p.requires_grad]

    def _make_optimizers(self) -> list[torch.optim.Optimizer]:
        made: list[torch.optim.Optimizer] = []
        # What is not used gets a gradient if errors are fed back, and would be decayed.
        decays = self.program.strategy.error_feedback is None
        for owned in self.program.optimizers:
            parameters = [p for i, unit in owned for p in self.parameters(i, unit)]
            if self.program.optimizer == "sgd":
                made.append(torch.optim.SGD(parameters, lr=0.2, momentum=0.5, weight_decay=0.1 * decays))
            else:  # a large epsilon, or rounding would decide where a gradient is near zero
                made.append(torch.optim.AdamW(parameters, lr=0.05, eps=0.01, weight_decay=0.3 * decays))
        return made

    # ---- what happens

    def run(self) -> Trace:
        """Run the program to its end, or to the first exception that is not its own."""
        try:
            if self.program.has_codecs:
                self.show_weights("start")
            for number, op in enumerate(self.program.ops):
                self.number = number
                getattr(self, "do_" + type(op).__name__.lower())(op)
            self.show_weights("end")
            self.trace.replicas_differ = self._replicas_differ()
        except Exception as error:
            at = f"op {self.number}, {self.program.ops[self.number]!r}"
            self.trace.error = f"raises {type(error).__name__}: {error}\n(at {at})\n{traceback.format_exc()}"
        return self.trace

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

    def do_microbatch(self, op: ops.MicroBatch) -> None:
        try:
            with self._micro_batch(op.sync):
                loss = self._loss(op)
                if op.fails == "loss":
                    raise InTheMiddleError
                self.trace.shown[f"op {self.number}: loss"] = loss.detach().float().cpu()
                if op.overflows == dist.get_rank():
                    loss = loss * float("inf")
                (self.scaler.scale(loss) if self.scaler else loss).backward()
        except InTheMiddleError:
            self._recover()
            assert op.fails
        else:
            assert not op.fails

    @contextmanager
    def _micro_batch(self, sync: bool) -> Iterator[None]:
        with ExitStack() as stack:
            for model in self.models:
                if not self.is_fsdp1:
                    model.set_requires_gradient_sync(sync)
                elif not sync:
                    stack.enter_context(model.no_sync())
            yield

    def _loss(self, op: ops.MicroBatch | ops.Evaluation) -> Tensor:
        rank = dist.get_rank()
        generator = torch.Generator().manual_seed(1000 * self.number + rank)
        x = torch.randn(ROWS, self.program.models[0].width, generator=generator).to(harness_models.device())
        for i, (model, part) in enumerate(zip(self.models, op.passes, strict=True)):
            width = self.program.models[i].width
            x = torch.nn.functional.pad(x, (0, max(0, width - x.shape[1])))[:, :width]
            x = model(x, part.order, part.use(rank), lambda at, x, i=i: self._between(op, i, at, x))
        return (x.float() - torch.randn(x.shape, generator=generator).to(x.device)).square().mean()

    def _between(self, op: Any, model: int, at: int, x: Tensor) -> Tensor:
        """Fail in the middle of the last model, if the op says so."""
        fails = getattr(op, "fails", None)
        if (
            fails not in ("forward", "backward")
            or model != len(self.models) - 1
            or at != (len(op.passes[model].order) + 1) // 2
        ):
            return x
        if fails == "forward":
            raise InTheMiddleError
        x = x * 1.0

        def fail(gradient: Tensor) -> Tensor:
            raise InTheMiddleError

        x.register_hook(fail)
        return x

    def _recover(self) -> None:
        """What a user does after an exception: forget the step."""
        for i, model in enumerate(self.models):
            if hasattr(model, "reset_iter_state"):
                model.reset_iter_state()
            model.zero_grad()
            self._forget_pending(range(len(self.units(i))), i)

    def do_evaluation(self, op: ops.Evaluation) -> None:
        for model in self.models:
            model.eval()
        with torch.no_grad():
            self.trace.shown[f"op {self.number}: loss in evaluation"] = self._loss(op).float().cpu()
        for model in self.models:
            model.train()

    def do_step(self, op: ops.Step) -> None:
        if self.scaler is not None and op.clip is not None:
            for i in op.optimizers:
                self.scaler.unscale_(self.optimizers[i])
        if op.clip is not None:
            for model in self.models:
                self._clip(model, op.clip)
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
            self.optimizers[op.of].zero_grad()
            for i in range(len(self.models)):
                self._forget_pending((unit for j, unit in self.program.optimizers[op.of] if j == i), i)
            return
        for i, model in enumerate(self.models):
            (model if op.of == "models" else self.net(i)).zero_grad()
            self._forget_pending(range(len(self.units(i))), i)

    def _forget_pending(self, units: Any, i: int) -> None:
        """As README has it, cleared gradients include those that wait for the last micro-batch; stock keeps some."""
        if self.strategy is not STOCK:
            return
        for unit in units:
            module = self.units(i)[unit]
            if isinstance(module, FullyShardedDataParallel):
                flat_param = module._handle.flat_param
                flat_param.grad = None
                if hasattr(flat_param, "_saved_grad_shard"):
                    del flat_param._saved_grad_shard
            elif isinstance(module, FSDPModule):
                for param in module._get_fsdp_state()._fsdp_param_group.fsdp_params:
                    param.sharded_param.grad = None
                    if hasattr(param, "_unsharded_param"):
                        param.unsharded_param.grad = None
                    if param.unsharded_accumulated_grad is not None:  # from torch 2.15 on, that same gradient
                        param.unsharded_accumulated_grad = None

    def do_freeze(self, op: ops.Freeze) -> None:
        self.units(op.model)[op.unit].requires_grad_(not op.frozen)

    def _reshard(self, model: Any) -> None:
        """A forward leaves the root unsharded, and stock FSDP1 goes on with that whatever is written to the shards."""
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
            elif isinstance(module, FullyShardedDataParallel) and self.strategy is STOCK and module._handle:
                module._handle.reshard(free_unsharded_flat_param=True)

    def do_load(self, op: ops.Load) -> None:
        for model in self.models:
            if self.is_fsdp1:
                self._reshard(model)
            if self.is_fsdp1:
                with FullyShardedDataParallel.state_dict_type(model, StateDictType[op.kind]):
                    model.load_state_dict(halved(model.state_dict()))
            else:
                model.load_state_dict(halved(model.state_dict()), assign=op.assign)
        if op.assign:
            self.optimizers = self._make_optimizers()

    def do_write(self, op: ops.Write) -> None:
        for model in self.models:
            summon = op.how == "summon" and self.is_fsdp1
            self._reshard(model)
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
                _follow_move(model)

    def do_resume(self, op: ops.Resume) -> None:
        saved = []
        for i, model in enumerate(self.models):
            saved.append(get_state_dict(model, self._optimizers_of(i)))
        codecs = None if self.strategy is STOCK or not self.program.has_codecs else self._codec_states()
        self.models = [self._make(i, 1) for i in range(len(self.models))]
        self.optimizers = self._make_optimizers()
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


def _follow_move(model: Any) -> None:
    """Have stock FSDP1 use the memory that it was moved to: by itself it goes back to the old one after a forward."""
    for module in FullyShardedDataParallel.fsdp_modules(model):
        flat: Any = None if module._handle is None else module._handle.flat_param
        if flat is not None and hasattr(flat, "_local_shard") and flat.shape == flat._local_shard.shape:
            flat._local_shard = flat.data


def halved(state: dict[str, Any]) -> dict[str, Any]:
    with torch.no_grad():
        return {name: _half_of(value) for name, value in state.items()}


def _half_of(value: Any) -> Any:
    if not hasattr(value, "local_shards"):
        return value * 0.5
    for shard in value.local_shards():  # a ShardedTensor, which has no arithmetic
        shard.tensor = shard.tensor * 0.5
    return value
