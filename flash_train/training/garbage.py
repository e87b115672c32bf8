"""Python's garbage collector, out of the way of training."""

import gc
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

__all__ = ["GarbageFreeze"]


class GarbageFreeze(Callback):
    """Collects garbage after the first step, and leaves what is there then out of later collections (gc.freeze).

    From time to time Python looks at every container of the process for cycles that nobody holds: with torch and a
    compiled model some half a million, which takes tenths of a second in the middle of some step. Nearly all of them
    are made before the second step and stay. What is made later is collected as ever. When training ends, nothing is
    left out any more; what somebody else froze before stays frozen.
    """

    def __init__(self) -> None:
        self._due = self._frozen = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._due = gc.get_freeze_count() == 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._due:
            self._due, self._frozen = False, True
            gc.collect()
            gc.freeze()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._unfreeze()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._unfreeze()

    def _unfreeze(self) -> None:
        if self._frozen:
            gc.unfreeze()
        self._frozen = False
