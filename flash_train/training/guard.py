"""Stops a run whose loss or gradient is no longer finite, and says where that began."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from flash_train.training.later import Later
from flash_train.training.steps import is_log_step

__all__ = ["NonFiniteGuard", "NonFiniteLoss"]


class NonFiniteLoss(RuntimeError):
    """The loss or the gradient became infinite or NaN.

    Attributes:
        step: the optimizer step it was first seen in, counted from 0 as the loggers count.
        epoch, batch_idx: of the micro-batch.
        batch_sha256: of its inputs as little-endian int64.
        loss: its loss.
        gradient_norm: of the optimizer step before it; NaN when none was measured.
    """

    def __init__(
        self, *, step: int, epoch: int, batch_idx: int, inputs: Tensor, loss: float, gradient_norm: float, noticed: int
    ) -> None:
        self.step = step
        self.epoch = epoch
        self.batch_idx = batch_idx
        self.batch_sha256 = hashlib.sha256(inputs.numpy().astype("<i8").tobytes()).hexdigest()
        self.loss = loss
        self.gradient_norm = gradient_norm
        what = "gradient" if math.isfinite(loss) else "loss"
        super().__init__(
            f"The {what} is not finite in step {step} (noticed in step {noticed}): loss {loss:g}, gradient norm of the "
            f"step before {gradient_norm:.4g}. It is batch {batch_idx} of epoch {epoch}, inputs {list(inputs.shape)} "
            f"beginning with {inputs.flatten()[:8].tolist()}, sha256 {self.batch_sha256[:16]}. Resume from a "
            "checkpoint before that step with a lower learning rate, a longer warm-up or a smaller gradient_clip."
        )


@dataclass
class _Latch:
    """The first bad micro-batch, on the device; it can be asked what it holds, which synchronises."""

    index: Tensor  # [] int64, -1 while all was well
    values: Tensor  # [2] fp32: the loss, the gradient norm before
    inputs: Tensor

    @classmethod
    def like(cls, inputs: Tensor) -> "_Latch":
        index = torch.full((), -1, dtype=torch.int64, device=inputs.device)
        return cls(index, torch.zeros(2, device=inputs.device), torch.zeros_like(inputs))

    def close(self, bad: Tensor, index: int, values: Tensor, inputs: Tensor) -> None:
        first = bad & (self.index < 0)
        self.index.masked_fill_(first, index)
        self.values = torch.where(first, values, self.values)
        self.inputs = torch.where(first, inputs, self.inputs)


class NonFiniteGuard(Callback):
    """Raises NonFiniteLoss within one logging interval of the first micro-batch whose loss is not finite, or, on a GPU,
    a micro-batch later.

    What is remembered of that micro-batch is latched on the device by a few small kernels, without a synchronisation;
    it is sent to the host on log steps, and read when the next micro-batch has begun, so that the device never waits.
    Before a checkpoint is written (so that none holds such weights), and at the end, it is read at once.
    A module that publishes `gradient_norm` (LanguageModel) has its gradient watched too, except under fp16, where the
    loss scaler skips such steps. A batch is tokens, or a mapping with tokens under "inputs".
    """

    def __init__(self) -> None:
        self._latch: _Latch | None = None
        self._positions: list[tuple[int, int, int]] = []
        self._known = 0  # micro-batches before the first of these
        self._coming: tuple[int, Later] | None = None
        self._step = 0
        self._norm: Tensor | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._latch, self._positions, self._known, self._coming, self._norm = None, [], 0, None, None
        self._step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._receive()
        inputs = batch["inputs"] if isinstance(batch, Mapping) else batch
        if self._latch is None or self._latch.inputs.shape != inputs.shape:
            self._check()
            self._latch = _Latch.like(inputs)
        loss = outputs["loss"].float() * trainer.accumulate_grad_batches  # Lightning divided it
        before = loss.new_full((), math.nan) if self._norm is None else self._norm.float()
        bad = torch.isfinite(loss).logical_not_()
        self._positions.append((self._step, trainer.current_epoch, batch_idx))
        finished = trainer.global_step > self._step
        if finished:
            self._norm = _watched_norm(trainer, pl_module)
            if self._norm is not None:
                bad |= torch.isfinite(self._norm).logical_not_()
        self._latch.close(bad, self._known + len(self._positions) - 1, torch.stack([loss, before]), inputs)
        if finished:
            self._step = trainer.global_step
            if is_log_step(trainer, self._step):
                self._coming = len(self._positions), Later(self._latch.index)
                if self._coming[1].is_there:
                    self._receive()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._check()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._check()

    def _receive(self) -> None:
        if self._coming is None:
            return
        count, index = self._coming
        self._coming = None
        if int(index.numbers()) >= 0:
            self._check()
        self._forget(count)

    def _forget(self, count: int) -> None:
        """The first micro-batches of those that are remembered: they were well."""
        self._positions, self._known = self._positions[count:], self._known + count

    def _check(self) -> None:
        self._coming = None
        if self._latch is not None and (index := int(self._latch.index)) >= 0:
            step, epoch, batch_idx = self._positions[index - self._known]
            loss, norm = self._latch.values.tolist()
            raise NonFiniteLoss(
                step=step,
                epoch=epoch,
                batch_idx=batch_idx,
                inputs=self._latch.inputs.cpu(),
                loss=loss,
                gradient_norm=norm,
                noticed=self._positions[-1][0],
            )
        self._forget(len(self._positions))


def _watched_norm(trainer: Trainer, pl_module: LightningModule) -> Tensor | None:
    scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
    return None if scaled else getattr(pl_module, "gradient_norm", None)
