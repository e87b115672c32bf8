"""What the monitors share: they never disturb training, and report once per log step, for all ranks."""

import contextlib
import functools
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from flash_train.diagnostics.ranks import Ranks, link

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound="Monitor")


def never_raises(hook: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], R | None]:
    """An exception in `hook` ends the measuring, with one logged traceback, and not the training."""

    @functools.wraps(hook)
    def guarded(self: M, *args: P.args, **kwargs: P.kwargs) -> R | None:
        if self._failed:
            return None
        try:
            return hook(self, *args, **kwargs)
        except Exception:
            self._failed = True
            with contextlib.suppress(Exception):
                self._release()
            logger.exception("%s stopped measuring after this error; training goes on.", type(self).__name__)
            return None

    return guarded


def step_of(trainer: Trainer) -> int:
    """The number under which Lightning logs the optimizer step in progress.

    `trainer.global_step` is one higher from the optimizer's step on, and counts twice with two optimizers.
    """
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def step_is_complete(trainer: Trainer) -> bool:
    """In `on_train_batch_end`: this batch was the last of its optimizer step."""
    return not trainer.fit_loop._should_accumulate()


class Monitor(Callback, ABC):
    """Collects numbers on each rank, and turns those of all ranks into metrics at Lightning's log steps.

    A rank whose measuring failed still takes part in the exchange, so that the others do not wait for it; for one that
    is gone they wait once, and not long (see `Ranks`).
    """

    numbers: tuple[str, ...]
    """What each rank contributes."""

    def __init__(self) -> None:
        self._start_over()

    def _start_over(self) -> None:
        """Forget the run before."""
        self._failed = False
        self._reported = -1
        self._logged: frozenset[str] = frozenset()
        self._link: Ranks | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_over()

    def _release(self) -> None:
        """Let go of what the process has only one of; also after a failure, when it may be half there."""

    @abstractmethod
    def _collect(self, trainer: Trainer, *, final: bool) -> Mapping[str, float]:
        """This rank's numbers since the last report; a missing one is not known."""

    @abstractmethod
    def _combine(self, numbers: Mapping[str, list[float]]) -> dict[str, float]:
        """Metrics from each number of each rank, in the order of ranks; NaN is not known."""

    def _report(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """At the end of a step: log through Lightning, in the same call and under the same number as its own keys."""
        every = log_every(trainer)
        if not every or (step_of(trainer) + 1) % every or not step_is_complete(trainer):
            return
        numbers = self._exchange(trainer, final=False)
        if _any_known(numbers):
            self._reported = step_of(trainer)
            metrics = self._guarded_combine(numbers) or {}
            self._logged = frozenset(metrics)
            self._log(trainer, pl_module, metrics)

    def _report_rest(self, trainer: Trainer) -> None:
        """At the end of training: what came after the last report, under the number of the last step."""
        last = step_of(trainer) - 1
        metrics = self._guarded_combine(self._exchange(trainer, final=True)) or {}
        if self._reported == last:
            metrics = {name: value for name, value in metrics.items() if name not in self._logged}
        if metrics and log_every(trainer) and last >= 0:
            for each in trainer.loggers:
                each.log_metrics(metrics, step=last)

    def _exchange(self, trainer: Trainer, *, final: bool) -> dict[str, list[float]]:
        local = self._guarded_collect(trainer, final=final) or {}
        values = [local.get(name, math.nan) for name in self.numbers]
        ranks = [values]
        if trainer.world_size > 1:
            self._link = self._link or link(type(self).__name__)
            if self._link is not None:
                ranks = self._link.gather(values)
            else:  # a strategy with a way of its own
                mine = torch.tensor(values, dtype=torch.float64, device=trainer.strategy.root_device)
                ranks = trainer.strategy.all_gather(mine).tolist()
        return {name: [rank[i] for rank in ranks] for i, name in enumerate(self.numbers)}

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        with contextlib.suppress(Exception):
            self._release()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")

    @never_raises
    def _guarded_collect(self, trainer: Trainer, *, final: bool) -> Mapping[str, float]:
        return self._collect(trainer, final=final)

    @never_raises
    def _guarded_combine(self, numbers: Mapping[str, list[float]]) -> dict[str, float]:
        return self._combine(numbers)

    @never_raises
    def _log(self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]) -> None:
        # Not through the module, whose `log` takes some 0.3 ms for a number and then a few microseconds in every step.
        # Tensors on the host, as callback_metrics are, so that nobody who reads them waits for the device.
        connector = trainer._logger_connector
        ours = dict(zip(metrics, torch.tensor(list(metrics.values()), dtype=torch.float64).unbind(), strict=True))
        connector._callback_metrics.update(ours)
        log = connector.log_metrics

        def log_with_ours(metrics: Any, step: int | None = None) -> None:
            if step is not None:  # another callback's
                return log(metrics, step)
            connector.log_metrics = log
            log({**metrics, **ours})

        connector.log_metrics = log_with_ours  # once: Lightning logs what the module has of this step after the hooks


def highest(values: list[float]) -> float | None:
    """The largest value that is known, or None."""
    return max((value for value in values if not math.isnan(value)), default=None)


def _any_known(numbers: Mapping[str, list[float]]) -> bool:
    return any(highest(values) is not None for values in numbers.values())


def log_every(trainer: Trainer) -> int:
    return trainer.log_every_n_steps  # pyright: ignore[reportAttributeAccessIssue]
