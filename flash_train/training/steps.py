"""When the Trainer logs: the one rule that every part asks, so that all of them read the device in the same step."""

from lightning.pytorch import Trainer

__all__ = ["is_log_step"]


def is_log_step(trainer: Trainer, step: int) -> bool:
    """Whether the loggers are given the metrics of optimizer step `step`, counted from 1 as `trainer.global_step` is.

    Loggers call that step `step - 1`: Lightning counts it after they have been written.
    """
    interval = trainer.log_every_n_steps  # pyright: ignore[reportAttributeAccessIssue] (set by a connector)
    return interval > 0 and (step % interval == 0 or trainer.should_stop)
