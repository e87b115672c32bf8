"""MemoryMonitor: peak memory per window and per phase, in any LightningModule."""

import gc
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from flash_train.diagnostics.ledger import PeakLedger, ledger_of
from flash_train.diagnostics.meters import AllocatorMeter, Meter, ProfilerMeter
from flash_train.diagnostics.monitor import Monitor, highest, log_every, never_raises, step_is_complete, step_of
from flash_train.diagnostics.prediction import predict_step
from flash_train.memory.advice import Advisory
from flash_train.memory.sizes import error_percent

logger = logging.getLogger(__name__)

GIB = 2**30
PHASES = ("forward", "backward", "optimizer", "validation")


class MemoryMonitor(Monitor):
    """Logs peak memory at Lightning's log steps, in GiB, each the highest of all ranks:

    `memory/peak_allocated_gib` and `memory/peak_reserved_gib` since the last log step, whatever ran in it;
    `memory/{forward,backward,optimizer,validation}/peak_allocated_gib` of each phase in it;
    `memory/alloc_retries` since training began (each emptied the allocator's cache, and was slow);
    with several ranks, `memory/peak_allocated_rank`, the one with the highest;
    with `predict`, `memory/predicted_gib`, which the peak of the training steps should be.

    On an accelerator the peaks are the allocator's, of every step, without synchronisation. On a CPU they are the live
    tensor bytes of one step and of one validation batch (see `cpu_peak`), logged from then on; `result()["source"]` is
    then "profiler". That step and the one before it are slower, and `disturbs_timing` says so.

    A phase lasts until the next begins. Lightning clears the last step's gradients after the forward pass, so they
    count in `forward`; clipping and the update are `optimizer`; with gradient accumulation a phase's peak is the
    highest over the micro-batches. Under manual optimization all of a batch is one phase, `step`. The sanity check
    before training is not measured.

    Args:
        probe_step: the step measured on a CPU, counted from 0 as this run begins; a shorter run measures its last. By
            default the first that has both gradients and optimizer state from the step before.
        phases_every_n_steps: on an accelerator, measure phases in every n-th step; by default in the first five of a
            run and in every tenth, or in one of a window that is shorter. The counters cost some 0.25 ms of the host's
            time per micro-batch; the peak of the window, of every step, needs none of them.
        predict: before the first step, predict its peak (see `predict_peak`): a second or two in which a copy of the
            module takes that step on fake tensors, so its `training_step` is called once more. What cannot be
            predicted is said once, with the reason.
    """

    numbers = ("allocated", "reserved", *PHASES, "step", "retries", "predicted")

    def __init__(self, *, probe_step: int = 2, phases_every_n_steps: int | None = None, predict: bool = False) -> None:
        if probe_step < 0:
            raise ValueError(f"probe_step counts steps from 0, got {probe_step}: leave it out for the third step.")
        if phases_every_n_steps is not None and phases_every_n_steps < 1:
            raise ValueError(f"phases_every_n_steps must be at least 1, got {phases_every_n_steps}: 1 is every step.")
        self._probe_step = probe_step
        self._phases_every = phases_every_n_steps
        self._predicts = predict
        super().__init__()

    def _start_over(self) -> None:
        super()._start_over()
        self._device = torch.device("cpu")
        self._meter: Meter | None = None
        self._source = "allocator"
        self._in_step = False
        self._outside_resets = 0
        self._highest: dict[str, int] = {}
        self._rank: int | None = None
        self._to_predict = self._predicts
        self.prediction: Advisory | None = None
        self._refusal: str | None = None

    def result(self) -> dict[str, Any]:
        """The whole run so far, in bytes, the highest of all ranks; None for what was not measured."""
        phases = {name: self._highest.get(name) for name in PHASES}
        if "step" in self._highest:
            phases["step"] = self._highest["step"]
        return {
            "device": self._device.type,
            "source": self._source,
            "peak_allocated_bytes": self._highest.get("allocated"),
            "peak_allocated_rank": self._rank,
            "peak_reserved_bytes": self._highest.get("reserved"),
            "phases": phases,
            "alloc_retries": self._highest.get("retries", 0),
            "outside_resets": self._outside_resets,
            **self._predicted(),
        }

    def _predicted(self) -> dict[str, Any]:
        """What was predicted, None where nothing was. Validation is not, and may peak above training."""
        if self.prediction is None:
            return {"predicted_bytes": None, "prediction_error_percent": None, "prediction_refusal": self._refusal}
        breakdown = self.prediction.breakdown
        predicted = breakdown.peak.measured
        measured = max(self._highest.get(name, 0) for name in ("forward", "backward", "optimizer", "step"))
        return {
            "predicted_bytes": predicted,
            "prediction_error_percent": error_percent(predicted, measured) if measured else None,
            "prediction_refusal": None,
            "prediction": breakdown.to_json(tensors=3),
            "advice": [asdict(advice) for advice in self.prediction.advice],
        }

    def disturbs_timing(self, step: int) -> bool:
        """Whether `step`, numbered as Lightning logs it, runs under the profiler."""
        return isinstance(self._meter, ProfilerMeter) and step in self._meter.steps

    # Beginning and end

    @never_raises
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._device = trainer.strategy.root_device
        # What an earlier run left behind would count as this run's: tensors in cycles, and cached blocks.
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self._meter = self._choose_meter(trainer)
        self._source = "allocator" if self._meter is None else self._meter.source

    def _choose_meter(self, trainer: Trainer) -> Meter | None:
        if self._device.type == "cpu":
            first, left = step_of(trainer), steps_left(trainer)
            measured = self._probe_step if left is None else max(min(self._probe_step, left - 1), 0)
            return ProfilerMeter(first + measured, first_step=first)
        ledger = ledger_of(self._device)
        if ledger is None:
            logger.warning("torch keeps no peak memory on %r devices: none is measured.", self._device.type)
            return None
        return self._meter_on(ledger, trainer)

    def _meter_on(self, ledger: PeakLedger, trainer: Trainer) -> AllocatorMeter:
        first, window = step_of(trainer), log_every(trainer)
        return AllocatorMeter(ledger, phases_every=self._phases_every, first_step=first, window=window)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._report_rest(trainer)
        if isinstance(self._meter, ProfilerMeter) and "forward" not in self._highest and "step" not in self._highest:
            logger.warning("No training step's peak was measured: none ran under the profiler (see probe_step).")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # Above all out of memory: the peak that led to it. Other ranks may be gone, so it is this rank's alone.
        self._leave()
        numbers = self._guarded_collect(trainer, final=True) or {}
        self._guarded_combine({name: [float(value)] for name, value in numbers.items()})
        super().on_exception(trainer, pl_module, exception)

    def _release(self) -> None:
        meter, self._meter = self._meter, None
        if meter is not None:
            meter.close()

    # Phases

    @never_raises
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._to_predict:
            self._to_predict = False
            self._predict(trainer, pl_module, batch)
        if self._meter is None:
            return
        if not self._in_step:
            self._in_step = True
            self._meter.step_begins(step_of(trainer), lambda: held_by(trainer, pl_module, batch))
        self._enter("forward" if pl_module.automatic_optimization else "step")

    @never_raises
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if pl_module.automatic_optimization:
            self._enter("backward")

    @never_raises
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if pl_module.automatic_optimization:
            self._enter("optimizer")

    def _predict(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> None:
        try:
            found = predict_step(trainer, pl_module, batch)
            self.prediction = replace(found, breakdown=replace(found.breakdown, trace=None))  # which is long
        except Exception as error:  # whatever a foreign module does on fake tensors
            self._refusal = (str(error).strip() or type(error).__name__).splitlines()[0]
            logger.warning("No peak memory is predicted: %s", self._refusal)

    def _enter(self, phase: str) -> None:
        if self._meter is not None:
            self._meter.enter(phase)

    @never_raises
    def _leave(self) -> None:
        if self._meter is not None:
            self._meter.leave()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batch_ends(trainer)
        self._report(trainer, pl_module)

    @never_raises
    def _batch_ends(self, trainer: Trainer) -> None:
        if self._meter is None:
            return
        self._meter.leave()
        if step_is_complete(trainer):
            self._in_step = False
            self._meter.step_ends(step_of(trainer))

    @never_raises
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._meter is not None:
            self._meter.validation_batch_begins(lambda: held_by(trainer, pl_module, batch))

    @never_raises
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._meter is not None:
            self._meter.validation_batch_ends()

    @never_raises
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._meter is not None:
            self._meter.validation_ends()

    # Numbers

    def _collect(self, trainer: Trainer, *, final: bool) -> Mapping[str, float]:
        predicted = {} if self.prediction is None else {"predicted": self.prediction.breakdown.peak.measured}
        if self._meter is None:
            return predicted
        if isinstance(self._meter, AllocatorMeter):
            self._outside_resets = self._meter.outside_resets
        return self._meter.collect() | predicted

    def _combine(self, numbers: Mapping[str, list[float]]) -> dict[str, float]:
        window = {name: int(value) for name in numbers if (value := highest(numbers[name])) is not None}
        at = self._note_rank(numbers.get("allocated", []))
        for name, value in window.items():
            self._highest[name] = max(self._highest.get(name, 0), value)
        metrics = {f"memory/peak_{x}_gib": window[x] / GIB for x in ("allocated", "reserved") if x in window}
        if at is not None:
            metrics["memory/peak_allocated_rank"] = float(at)
        for phase in (*PHASES, "step"):
            if phase in window:
                metrics[f"memory/{phase}/peak_allocated_gib"] = window[phase] / GIB
        if "predicted" in window:
            metrics["memory/predicted_gib"] = window["predicted"] / GIB
        if "retries" in window:
            metrics["memory/alloc_retries"] = float(window["retries"])
        return metrics

    def _note_rank(self, allocated: list[float]) -> int | None:
        """Which of several ranks has the highest peak of the window; and, if there was none as high, of the run."""
        peak = highest(allocated)
        if len(allocated) < 2 or peak is None:
            return None
        at = allocated.index(peak)
        if peak > self._highest.get("allocated", 0):
            self._rank = at
        return at


def held_by(trainer: Trainer, pl_module: LightningModule, batch: Any) -> list[Any]:
    """Whose tensors are alive during a step: the module, the optimizers, the batch, and callbacks that keep a copy."""
    kept: list[Any] = [pl_module, *trainer.optimizers, batch]
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        assert isinstance(callback, Callback)
        kept.extend(value for value in vars(callback).values() if isinstance(value, (nn.Module, Tensor)))
    return kept


def steps_left(trainer: Trainer) -> int | None:
    """Optimizer steps until training ends, as far as the limits of steps and epochs tell; None without a limit."""
    limits: list[int] = []
    if trainer.max_steps >= 0:
        limits.append(trainer.max_steps - trainer.global_step)
    batches = trainer.num_training_batches  # infinite where the data has no length
    if trainer.max_epochs is not None and trainer.max_epochs >= 0 and batches != float("inf"):
        per_epoch = math.ceil(batches / trainer.accumulate_grad_batches)
        limits.append((trainer.max_epochs - trainer.current_epoch) * per_epoch)
    return min(limits, default=None)
