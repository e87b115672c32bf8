"""SpeedMonitor: tokens per second, step time and utilisation, in any LightningModule."""

import logging
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from flash_train.diagnostics.clock import Moment, now
from flash_train.diagnostics.monitor import Monitor, highest, never_raises, step_is_complete, step_of
from flash_train.diagnostics.peak_flops import device_peak
from flash_train.diagnostics.tokens import tokens_in

logger = logging.getLogger(__name__)

RESULTS = ("tokens_per_second", "tokens_per_second_per_device", "step_ms", "data_wait_percent", "mfu_percent")


@dataclass
class _Step:
    """One optimizer step that counts. Host times in seconds."""

    start: Moment
    end: Moment
    before: Moment | None  # the end of the step before, unless something that does not count came between
    tokens: int
    host_seconds: float
    waited: float
    waited_before: float

    def seconds(self) -> float:
        """From the end of the step before; or the step's own time and its wait for data."""
        if self.before is not None:
            return self.end.seconds_since(self.before)
        return self.end.seconds_since(self.start) + self.waited_before


@dataclass
class _Window:
    """Sums over the steps since the last report."""

    tokens: int = 0
    seconds: float = 0.0
    host_seconds: float = 0.0
    waited: float = 0.0
    step_seconds: list[float] = field(default_factory=list)

    def add(self, step: _Step) -> None:
        self.tokens += step.tokens
        self.seconds += step.seconds()
        self.host_seconds += step.host_seconds
        self.waited += step.waited
        self.step_seconds.append(step.end.seconds_since(step.start))


class SpeedMonitor(Monitor):
    """Logs the speed of training at Lightning's log steps, over the steps since the last one:

    `speed/tokens_per_second` of all devices together and `speed/tokens_per_second_per_device`, over all the time that
    passed, data loading, logging and callbacks included;
    `speed/step_ms`: from a step's first forward to the end of its update, the window's median, on the slowest rank;
    `speed/data_wait_percent`: the share of the host's time in which it waited for the data loader, highest rank;
    `speed/mfu_percent`: tokens/s per device times the module's plain attribute `flops_per_token`, over the device's
    dense peak (`peak_flops`). Without the attribute, or with an unknown device, there is none.

    On a GPU times come from events in the stream, read once the device has passed them: no synchronisation, but the
    last steps, still in flight, belong to the next window; the end of training waits once.
    Left out are the first `warmup_steps`; steps in which torch.compile compiled; steps that another callback slows
    down for a measurement (a method `disturbs_timing(step)`); and the time between two steps in which validation ran
    or a checkpoint was written. Steps interrupted by either in their middle are left out whole.

    Args:
        warmup_steps: steps of this run, from its beginning, that do not count.
        tokens_in_batch: tokens of one batch on one device. By default the number of elements of "inputs", "input_ids"
            or "tokens", or else of the first integer tensor in the batch.
        device_peak_flops: dense FLOP/s of one device, instead of the table's.
    """

    numbers = ("tokens_per_second", "step_ms", "data_wait_percent", "flops_per_token")

    def __init__(
        self,
        *,
        warmup_steps: int = 3,
        tokens_in_batch: Callable[[Any], int] | None = None,
        device_peak_flops: float | None = None,
    ) -> None:
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps must be at least 0, got {warmup_steps}: 0 counts every step.")
        self._warmup_steps = warmup_steps
        self._tokens_in = tokens_in_batch or tokens_in
        self._given_peak = device_peak_flops
        super().__init__()

    def _start_over(self) -> None:
        super()._start_over()
        self._device = torch.device("cpu")
        self._peak = self._given_peak
        self._pending: deque[_Step] = deque()
        self._window = _Window()
        self._windows: list[dict[str, float]] = []
        self._steps = 0
        self._in_step = False
        self._interruptions = 0
        self._last_end: tuple[Moment, float, Any] | None = None
        self._waited = 0.0
        self._fetch_began = 0.0
        self._watched: Any = None
        self._disturbing: list[Callable[[int], bool]] = []
        self._flops_per_token: float | None = None

    def result(self) -> dict[str, float | None]:
        """Each metric's median over the windows of the run; None for what was not measured."""
        known = {name: [window[name] for window in self._windows if name in window] for name in RESULTS}
        return {name: statistics.median(values) if values else None for name, values in known.items()}

    # Beginning and end

    @never_raises
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._device = trainer.strategy.root_device
        self._watch_fetches(trainer)
        callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        self._disturbing = [each.disturbs_timing for each in callbacks if hasattr(each, "disturbs_timing")]
        flops = getattr(pl_module, "flops_per_token", None)
        if isinstance(flops, (int, float)) and flops > 0:
            self._flops_per_token = float(flops)
            if self._peak is None:
                self._peak = device_peak(self._device, str(trainer.precision))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._report_rest(trainer)

    def _watch_fetches(self, trainer: Trainer) -> None:
        """Time the training loop's calls of the data loader, around its own profiling of them."""
        loop = self._watched = trainer.fit_loop.epoch_loop
        before, after = loop._on_before_fetch, loop._on_after_fetch

        def began() -> None:
            before()
            self._fetch_began = time.perf_counter()

        def ended() -> None:
            self._waited += time.perf_counter() - self._fetch_began
            after()

        loop._on_before_fetch, loop._on_after_fetch = began, ended

    def _release(self) -> None:
        watched, self._watched = self._watched, None
        if watched is not None:
            del watched._on_before_fetch, watched._on_after_fetch

    # What does not count

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._interruptions += 1

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._interruptions += 1

    def _interrupted_so_far(self, trainer: Trainer) -> Any:
        """Changes when validation has run or a checkpoint was written (without weights only, no hook tells of it)."""
        saved = [getattr(each, "_last_global_step_saved", None) for each in trainer.checkpoint_callbacks]
        return self._interruptions, saved

    # Steps

    @never_raises
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self._in_step:
            self._in_step = True
            self._tokens = 0
            self._interrupted_at_start = self._interrupted_so_far(trainer)
            self._compiled_at_start = compilations()
            self._waited_before = self._waited
            self._host_start = time.perf_counter()
            self._start = now(self._device)
        self._tokens += self._tokens_in(batch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batch_ends(trainer)
        self._report(trainer, pl_module)

    @never_raises
    def _batch_ends(self, trainer: Trainer) -> None:
        if not step_is_complete(trainer):
            return
        end, host_end = now(self._device), time.perf_counter()
        interrupted = self._interrupted_so_far(trainer)
        if interrupted == self._interrupted_at_start and self._counts(trainer):
            before, host_before, interrupted_before = self._last_end or (None, 0.0, None)
            if interrupted_before != self._interrupted_at_start:
                before = None
            host_seconds = host_end - (self._host_start - self._waited_before if before is None else host_before)
            self._pending.append(
                _Step(self._start, end, before, self._tokens, host_seconds, self._waited, self._waited_before)
            )
        self._steps += 1
        self._in_step = False
        self._waited = 0.0
        self._last_end = (end, host_end, interrupted)
        self._settle()

    def _counts(self, trainer: Trainer) -> bool:
        if self._steps < self._warmup_steps or compilations() != self._compiled_at_start:
            return False
        step = step_of(trainer)
        return not any(disturbs(step) for disturbs in self._disturbing)

    def _settle(self) -> None:
        while self._pending and self._pending[0].end.reached():
            self._window.add(self._pending.popleft())

    # Numbers

    def _collect(self, trainer: Trainer, *, final: bool) -> Mapping[str, float]:
        if final and self._pending:
            self._pending[-1].end.wait()
        self._settle()
        window, self._window = self._window, _Window()
        few = 3 if final and self._windows else 1  # the last steps, still in flight at the last report, are no window
        if len(window.step_seconds) < few:
            return {}
        numbers = {"step_ms": statistics.median(window.step_seconds) * 1e3}
        if self._watched is not None:
            numbers["data_wait_percent"] = 100 * window.waited / window.host_seconds
        if window.tokens:
            numbers["tokens_per_second"] = window.tokens / window.seconds
        elif not self._windows:
            logger.warning("No tokens/s: the batch holds no integer tensor. SpeedMonitor(tokens_in_batch=...) counts.")
        if self._flops_per_token is not None:
            numbers["flops_per_token"] = self._flops_per_token
        return numbers

    def _combine(self, numbers: Mapping[str, list[float]]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for name in ("step_ms", "data_wait_percent"):
            if (value := highest(numbers[name])) is not None:
                metrics[name] = value
        rates = numbers["tokens_per_second"]
        if all(rate == rate for rate in rates):
            metrics["tokens_per_second"] = sum(rates)
            metrics["tokens_per_second_per_device"] = per_device = sum(rates) / len(rates)
            flops = highest(numbers["flops_per_token"])
            if flops is not None and self._peak is not None:
                metrics["mfu_percent"] = 100 * per_device * flops / self._peak
        if metrics:
            self._windows.append(metrics)
        return {f"speed/{name}": value for name, value in metrics.items()}


def compilations() -> int:
    """How many frames torch.compile has compiled so far in this process; 0 without importing it."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else utils.counters["frames"]["total"]
