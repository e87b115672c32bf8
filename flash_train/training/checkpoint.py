"""Checkpoints from which a run continues exactly, bit for bit on a CPU."""

import logging
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint as LightningCheckpoint
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_warn

from flash_train.training.random_state import (
    generator_states,
    random_state,
    set_generator_states,
    set_random_state,
)
from flash_train.training.resume import checkpoint_files
from flash_train.training.signals import DeferredSignals

__all__ = ["AtomicCheckpointIO", "Checkpoint"]

log = logging.getLogger(__name__)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's reader and writer, but a local file appears under its name only once it is wholly on the disk.

    Raises OSError with the file's name if it cannot be written; then nothing of it is left, and an older one stays.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        if "://" in str(path):
            return super().save_checkpoint(checkpoint, path, storage_options)
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        try:
            with open(partial, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException as error:
            with suppress(OSError):
                partial.unlink(missing_ok=True)  # a full disk is not helped by half a checkpoint
            if (reason := _reason(error)) is not None:
                raise OSError(reason.errno, reason.strerror, str(path)) from error
            raise
        _sync_folder(path.parent)


class Checkpoint(LightningCheckpoint):
    """Writes `dirpath`/step_00000500.ckpt after every so many optimizer steps and keeps the last few.

    Each file is written between two optimizer steps, never inside one: what is resumed has no half update and no half
    accumulation. Ctrl-C and SIGTERM therefore wait for the end of the step, a last checkpoint is written and then they
    take their course; a second one does not wait. The last step is always saved, and so is the last whole step before
    an exception that did not come from a step itself. (Lightning's ModelCheckpoint saves at any micro-batch; it can
    stand beside this one, to keep the best by a metric.)

    The states of the random generators are in it, and what is drawn between two training batches (by validation, a
    data loader, a callback) does not move the training's own draws: dropout is the same with and without a stop.
    In several processes signals are not held back, since the processes would not stop at the same step.

    A checkpoint is written before the validation that may be due after the same step; a run that ended in between
    validates when it is resumed, so that it validates when, and as often as, one that was never stopped.

    Args:
        dirpath: folder of the checkpoints, made when needed.
        every_n_train_steps: optimizer steps between checkpoints.
        keep: how many to keep, the newest.

    Raises:
        ValueError: one of the two numbers is not positive.
    """

    def __init__(self, *, dirpath: str | Path, every_n_train_steps: int = 1000, keep: int = 2) -> None:
        if every_n_train_steps < 1:
            raise ValueError(
                f"every_n_train_steps counts optimizer steps and cannot be {every_n_train_steps}: "
                "leave the callback out (callbacks.checkpoint=null) for a run without checkpoints."
            )
        if keep < 1:
            raise ValueError(
                f"keep is the number of checkpoints that stay and cannot be {keep}: 2 is enough to go back."
            )
        self.dirpath = Path(dirpath)
        self.every_n_train_steps = every_n_train_steps
        self.keep = keep
        self._signals = DeferredSignals()
        self._inside_step = False
        self._steps_before = 0
        self._saved_step = 0
        self._saving = False
        self._validation_due = False
        self._generators: dict[str, torch.Tensor] | None = None
        self._resumed_random_state: dict[str, Any] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = AtomicCheckpointIO()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._saved_step = trainer.global_step
        self._inside_step = False
        if self._validation_due:
            _validate(trainer)
        if trainer.world_size == 1:
            self._signals.hold()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self._inside_step:
            if self._saved_step == trainer.global_step:
                self._signals.deliver()
            self._inside_step = True
            self._steps_before = trainer.global_step
        if self._resumed_random_state is not None:
            set_random_state(self._resumed_random_state, pl_module.device)
            self._resumed_random_state = None
        elif self._generators is not None:
            set_generator_states(self._generators, pl_module.device)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._generators = generator_states(pl_module.device)
        if trainer.global_step == self._steps_before:
            return
        self._inside_step = False
        loop = trainer.fit_loop
        self._validation_due = loop.epoch_loop._should_check_val_fx(loop._data_fetcher)  # pyright: ignore
        due = trainer.global_step % self.every_n_train_steps == 0
        if due or _is_last_step(trainer) or self._signals.received is not None:
            self._save(trainer)
        if self._signals.received == signal.SIGTERM:
            self._signals.deliver()  # for Lightning it is a wish, granted after this batch

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._inside_step:  # validation changes nothing that is saved, so it can be left at any time
            self._signals.deliver()
            self._signals.release()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validation_due = False
        if trainer.state.fn == "fit" and not trainer.sanity_checking and trainer.world_size == 1:
            self._signals.hold()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._signals.deliver()
        self._signals.release()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._validation_due:  # of the last step: there was nothing left to train
            _validate(trainer)
            self._signals.release()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._signals.release()
        if self._inside_step or self._saving or trainer.world_size > 1 or trainer.global_step == self._saved_step:
            return
        try:
            self._save(trainer)
        except Exception as error:  # the exception that ended the run is the one to show
            rank_zero_warn(f"No last checkpoint could be written: {error}")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        generators = self._generators or generator_states(pl_module.device)
        checkpoint["random_states"] = _from_every_rank(trainer, random_state(generators))
        runs = [logger.version for logger in trainer.loggers if isinstance(logger, WandbLogger)]
        checkpoint["validation_due"] = self._validation_due
        checkpoint["wandb_run_id"] = runs[0] if runs else None

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: Mapping[str, Any]) -> None:
        self._validation_due = checkpoint.get("validation_due", False)
        states = checkpoint.get("random_states", [])
        if len(states) == trainer.world_size:
            self._resumed_random_state = states[trainer.global_rank]
        else:
            rank_zero_warn(
                f"The checkpoint has the random states of {len(states)} processes, not of {trainer.world_size}: "
                "dropout does not continue where it was."
            )

    def _save(self, trainer: Trainer) -> None:
        if trainer.fast_dev_run:  # pyright: ignore[reportAttributeAccessIssue] (set by a connector)
            return
        path = self.dirpath / f"step_{trainer.global_step:08d}.ckpt"
        for logger in trainer.loggers:
            logger.save()  # a resumed run does not log again what came before its checkpoint
        self._saving = True  # left set by a failure, which must not be answered with another attempt
        trainer.save_checkpoint(path, weights_only=False)
        self._saving = False
        self._saved_step = trainer.global_step
        if trainer.is_global_zero:
            left_behind = self.dirpath.glob(".step_*.ckpt.partial")  # by a kill while it was written
            for old in (*checkpoint_files(self.dirpath)[self.keep :], *left_behind):
                old.unlink(missing_ok=True)
        if self._signals.received is not None:
            log.warning(f"Wrote {path}, from which resume_from continues.")


def _is_last_step(trainer: Trainer) -> bool:
    last_of_epoch = trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
    return trainer.global_step == trainer.max_steps or trainer.should_stop or last_of_epoch


def _validate(trainer: Trainer) -> None:
    """The validation that a stopped run owed, as the epoch loop would have run it."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    progress = loop.batch_progress.state_dict()
    loop.restarting = False  # it did not begin
    trainer.validating = True
    loop.run()
    trainer.training = True
    loop.batch_progress.load_state_dict(progress)  # the epoch loop takes it for done, and counts it


def _from_every_rank(trainer: Trainer, state: dict[str, Any]) -> list[Any]:
    states: list[Any] = [state]
    if trainer.world_size > 1:
        states = [None] * trainer.world_size
        torch.distributed.all_gather_object(states, state)
    return states


def _reason(error: BaseException | None) -> OSError | None:
    """What the file system said, which torch's writer hides behind an error of its own."""
    while error is not None and not (isinstance(error, OSError) and error.errno):
        error = error.__context__
    return error


def _sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
