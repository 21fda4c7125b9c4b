"""A callback of Lightning's Trainer that logs what the model communicates."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer

from fsdp_zpp.runtime.monitor import Monitor, monitor


class MonitorCallback(Callback):
    """Logs what :func:`fsdp_zpp.monitor` says of the model, by names that begin with ``fsdp_zpp/``.

    Examples:
        >>> trainer = Trainer(strategy=FSDPStrategy(...), callbacks=[MonitorCallback()])
    """

    def __init__(self) -> None:
        self._monitor: Monitor | None = None
        self._done = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to measure, now that the model is sharded."""
        self._close()
        assert trainer.strategy.model is not None
        self._monitor, self._done = monitor(trainer.strategy.model), trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        """End a step, if the optimizer has made one, and log its figures."""
        if self._monitor is not None and trainer.global_step != self._done:
            self._done = trainer.global_step
            pl_module.log_dict({f"fsdp_zpp/{name}": figure for name, figure in self._monitor.step().items()})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the measurement."""
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """End the measurement."""
        self._close()

    def _close(self) -> None:
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
