"""The loss of every optimizer step, kept without waiting for the device in every step."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from flash_train.training.later import Later
from flash_train.training.steps import is_log_step

__all__ = ["LossHistory"]


class LossHistory(Callback):
    """Records `pl_module.step_loss` (see LanguageModel) after each optimizer step, of this rank.

    The losses stay on the device; on log steps they are sent to the host in bulk, and read on the next ones. The curve
    is in checkpoints, so that a resumed run has all of it.
    """

    LONGEST_WAIT = 256  # of losses on the device when the logging interval is longer, or logging is off

    def __init__(self) -> None:
        self._curve: list[tuple[int, float]] = []
        self._pending: list[tuple[int, Tensor]] = []
        self._coming: tuple[list[int], Later] | None = None
        self._step = 0

    def curve(self) -> list[list[float]]:
        """[[step, loss in nats per token], ...] with steps counted from 0, as the loggers count them."""
        self._read()
        return [[step, loss] for step, loss in self._curve]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = trainer.global_step
        self._pending, self._coming = [], None
        self._curve = [point for point in self._curve if point[0] < self._step]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:
            return
        loss = pl_module.step_loss
        assert isinstance(loss, Tensor)
        self._pending.append((self._step, loss))
        self._step = trainer.global_step
        if is_log_step(trainer, self._step) or len(self._pending) >= self.LONGEST_WAIT:
            self._send()

    def state_dict(self) -> dict[str, Any]:
        self._read()
        return {"curve": torch.tensor(self._curve, dtype=torch.float64)}  # 16 bytes a step, a list takes 60

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._curve = [(int(step), loss) for step, loss in state_dict["curve"].tolist()]

    def _send(self) -> None:
        """What is pending on its way to the host, and what was, into the curve."""
        self._receive()
        if self._pending:
            steps, losses = zip(*self._pending, strict=True)
            self._coming, self._pending = (list(steps), Later(torch.stack(losses))), []

    def _receive(self) -> None:
        if self._coming is not None:
            steps, losses = self._coming
            self._curve += zip(steps, losses.numbers().tolist(), strict=True)
            self._coming = None

    def _read(self) -> None:
        self._send()
        self._receive()
