"""DeferredLogging: metrics that are on the device reach the loggers a step later, and nobody waits for them."""

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from flash_train.training.later import Later

__all__ = ["DeferredLogging"]


class DeferredLogging(Callback):
    """Gives the loggers what Lightning logs in a training step, under that step's number, when the next one has begun.

    Lightning reads a logged tensor at the end of its step, which waits for the device to have done the whole of it; and
    the device then waits for the host, which has logged, fetched the next batch and started its first kernels. With
    this the copy is made in the background. What was deferred is logged before validation, before a checkpoint is
    written, and at the end, an exception's too. `trainer.logged_metrics` and `callback_metrics` are as ever. On a CPU
    there is nothing to wait for, and nothing is deferred. It should be the first of the callbacks.
    """

    def __init__(self) -> None:
        self._waiting: tuple[dict[str, float], list[str], Later, int] | None = None
        self._log: Any = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        connector = trainer._logger_connector
        self._waiting, self._log = None, connector.log_metrics

        def log(metrics: Mapping[str, Any], step: int | None = None) -> None:
            on_device = [name for name, x in metrics.items() if isinstance(x, Tensor) and self._is_slow(x)]
            if step is not None or not on_device or not trainer.training or not trainer.loggers:
                return self._log(metrics, step)
            self._flush(trainer)
            connector._logged_metrics.update(metrics)
            values = torch.stack([metrics[name].detach().double().squeeze() for name in on_device])
            others = {name: float(x) for name, x in metrics.items() if name not in on_device}
            named = others.pop("step", None)
            stepped = trainer.fit_loop.epoch_loop._batches_that_stepped
            if named is None:
                others.setdefault("epoch", trainer.current_epoch)
            self._waiting = others, on_device, Later(values), stepped if named is None else int(named)

        connector.log_metrics = log

    @staticmethod
    def _is_slow(x: Tensor) -> bool:
        return x.is_cuda

    def _flush(self, trainer: Trainer) -> None:
        if self._waiting is None:
            return
        metrics, names, values, step = self._waiting
        self._waiting = None
        metrics = metrics | dict(zip(names, values.numbers().tolist(), strict=True))
        for logger in trainer.loggers:
            logger.log_metrics(metrics=metrics, step=step)
            logger.save()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._flush(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._flush(trainer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._flush(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        with contextlib.suppress(
            Exception
        ):  # a device that has failed has no numbers, and the first error is the cause
            self._finish(trainer)

    def _finish(self, trainer: Trainer) -> None:
        self._flush(trainer)
        if self._log is not None:
            trainer._logger_connector.log_metrics = self._log
            self._log = None
