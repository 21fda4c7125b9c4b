"""Forwards and backwards of a program: micro-batches in all orders, and evaluations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from harness import models as harness_models
from harness.pool import device_type
from torch import Tensor
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from . import program as ops, stock
from .modules import InTheMiddleError
from .program import Program, Use
from .trace import Trace
from .trained import Trained

ROWS = 3


class Forwards(Trained):
    """A training whose models run forwards and backwards."""

    def __init__(self, program: Program, strategy: Any) -> None:
        self.trace = Trace()
        self.number = 0
        super().__init__(program, strategy)
        self.scaler = (
            ShardedGradScaler(device=device_type(), init_scale=2.0**6, growth_interval=2) if program.scaler else None
        )

    def do_microbatch(self, op: ops.MicroBatch) -> None:
        try:
            with self._micro_batch(op.sync, op):
                self._run(op)
        except InTheMiddleError:
            self._recover()
            assert op.fails
        else:
            assert not op.fails
        self._restore(op)

    def _run(self, op: ops.MicroBatch) -> None:
        losses: list[Tensor] = []
        for at in range(op.forwards):
            losses.append(self._loss(op.passes, op, at, op.direct))
            if op.fails == "loss":
                raise InTheMiddleError
            self.trace.shown[f"op {self.number}: loss{at or ''}"] = losses[-1].detach().float().cpu()
            if op.backwards == "pipelined" and at:
                self._backward(losses.pop(0), op, last=False)
        if op.backwards == "sum":
            losses = [torch.stack(losses).sum() if len(losses) > 1 else losses[0]]
        if op.backwards == "in reverse":
            losses.reverse()
        for at, loss in enumerate(losses):
            last = at == len(losses) - 1
            if op.backwards == "twice":
                self._backward(loss, op, last=False, retain_graph=True)
            self._backward(loss, op, last)

    def _backward(self, loss: Tensor, op: ops.MicroBatch, last: bool, **arguments: Any) -> None:
        if op.backwards == "pipelined":
            self._last_of_pipeline(op, last)
        if op.overflows == dist.get_rank() % self.program.data_ranks:
            loss = loss * float("inf")
        (self.scaler.scale(loss) if self.scaler else loss).backward(**arguments)

    def _last_of_pipeline(self, op: ops.MicroBatch, last: bool) -> None:
        """Synchronize gradients of the last backward only, as torch's schedules do."""
        for i in range(len(self.models)):
            for root in self.roots(i):
                root.set_requires_gradient_sync(op.sync and last)
                root.set_is_last_backward(last)

    @contextmanager
    def _micro_batch(self, sync: bool, op: ops.MicroBatch | None = None) -> Iterator[None]:
        with ExitStack() as stack:
            for i in range(len(self.models)):
                for root in self.roots(i):
                    if not self.is_fsdp1:
                        root.set_requires_gradient_sync(sync)
                        if op is not None and not op.all_reduce:
                            root.set_requires_all_reduce(False)
                        if op is not None and not op.reshard:
                            root.set_reshard_after_backward(False)
                    elif not sync:
                        stack.enter_context(root.no_sync())
            for i, unit in op.unsynced if op is not None else ():
                self.units(i)[unit].set_requires_gradient_sync(False, recurse=False)
            yield

    def _restore(self, op: ops.MicroBatch) -> None:
        if self.is_fsdp1 or (op.all_reduce and op.reshard):
            return
        for i in range(len(self.models)):
            for root in self.roots(i):
                root.set_requires_all_reduce(True)
                root.set_reshard_after_backward(True)

    def _recover(self) -> None:
        """Called after an exception of the program's own."""
        raise NotImplementedError

    def _loss(
        self,
        passes: tuple[ops.Pass, ...],
        op: Any = None,
        at: int = 0,
        direct: tuple[int, int] | None = None,
        without_adapters: bool = False,
    ) -> Tensor:
        rank = dist.get_rank() % self.program.data_ranks
        generator = torch.Generator().manual_seed(1000 * self.number + 100000 * at + rank)
        x = torch.randn(ROWS, self.program.models[0].width, generator=generator).to(harness_models.device())
        for i, (model, part) in enumerate(zip(self.models, passes, strict=True)):
            width = self.program.models[i].width
            x = torch.nn.functional.pad(x, (0, max(0, width - x.shape[1])))[:, :width]
            use = self._without_adapters(i, part.use(rank)) if without_adapters else part.use(rank)
            if direct is None:
                x = model(x, part.order, use, lambda at, x, i=i: self._between(op, i, at, x))
            elif direct[0] == i:
                x = self.call_block(i, direct[1], x, use[direct[1]])
        return (x.float() - torch.randn(x.shape, generator=generator).to(x.device)).square().mean()

    def call_block(self, i: int, unit: int, x: Tensor, use: tuple[int, ...]) -> Tensor:
        """Call a block by itself."""
        return self.units(i)[unit](x, use)

    def _without_adapters(self, i: int, use: Use) -> Use:
        specs = [*(unit.branches for unit in self.program.models[i].units), self.program.models[i].root]
        return tuple(
            tuple(b for b in of_unit if not branches[b].adapter) for of_unit, branches in zip(use, specs, strict=True)
        )

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

    def do_evaluation(self, op: ops.Evaluation) -> None:
        for model in self.models:
            model.eval()
        self._show_average(True)
        if op.reference:
            self._switch_adapters(False)
        with torch.inference_mode() if op.inference else torch.no_grad():
            loss = self._loss(op.passes, direct=op.direct, without_adapters=op.reference)
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
                for b, branch in enumerate(each.branches):
                    if branch.adapter:
                        self.block(i, unit).branches[b].requires_grad_(on)

    def _show_average(self, shown: bool) -> None:
        """Have optimizers that train other weights than they evaluate change them."""
        for optimizer in self.optimizers:
            if hasattr(optimizer, "train"):
                self.show_shards()
                optimizer.eval() if shown else optimizer.train()

    def show_shards(self) -> None:
        """Have models show what optimizers hold."""
        for model in self.models:
            stock.reshard(model, self.strategy)
