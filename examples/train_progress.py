"""What a run shows while it trains."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from train_options import Options


def make_console(rank: int) -> Console:
    """A console that is silent on all ranks but 0."""
    # Without a terminal rich assumes 80 columns, too few for the table.
    return Console(quiet=rank != 0, width=None if sys.stdout.isatty() else 132, highlight=False)


class TrainingProgress:
    """A progress bar on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console, label: str, options: Options) -> None:
        self.console, self.label, self.options = console, label, options
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task(label, total=options.stop_at, figures="")

    def __enter__(self) -> TrainingProgress:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def training(self, done: int, loss: float, step_seconds: float) -> None:
        """Show a training loss after ``done`` steps."""
        figures = f"loss {loss:.4f}, {self.options.tokens_per_step / step_seconds:,.0f} tokens/s"
        if self.console.is_terminal:
            self.bar.update(self.task, completed=done, figures=figures)
        else:
            self._print(done, figures)

    def validation(self, done: int, loss: float) -> None:
        """Show a validation loss after ``done`` steps."""
        self._print(done, f"validation loss {loss:.4f}")

    def _print(self, done: int, figures: str) -> None:
        self.console.print(f"{self.label}: step {done}/{self.options.stop_at}, {figures}")
