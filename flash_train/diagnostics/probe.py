"""MemoryProbe and probe_memory: what fills the memory of one training step, of any model."""

import contextlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from flash_train.diagnostics.explanation import advised, circumstances
from flash_train.diagnostics.ledger import ledger_of
from flash_train.diagnostics.memory import GIB, held_by, steps_left
from flash_train.diagnostics.meters import AllocatorMeter, Meter, ProfilerMeter
from flash_train.diagnostics.monitor import Monitor, highest, never_raises, step_is_complete, step_of
from flash_train.memory.advice import Advisory
from flash_train.memory.attribution import Breakdown, Recorder, is_compiled
from flash_train.memory.cards import ROUNDING
from flash_train.memory.cuda_rules import inside
from flash_train.memory.live import CATEGORIES
from flash_train.memory.training_step import describe, loss_and_beside, of_batch

logger = logging.getLogger(__name__)

__all__ = ["Breakdown", "MemoryProbe", "probe_memory"]

_PARTS = tuple(name.replace(" ", "_") for name in (*CATEGORIES, "untracked"))
_EAGER = "the model is compiled, and the probed step ran it uncompiled: these are the eager module's bytes"
_NOT_MEASURED = "nothing but the tracker measured this step (see the log), so nothing can be untracked"


class StepProbe:
    """One step under a Recorder and a meter, from the moment of its making; `finish` or `abandon` ends it."""

    def __init__(self, module: nn.Module, device: torch.device, meter: Meter | None, *, step: int) -> None:
        self._module, self._meter, self._step = module, meter, step
        on_gpu = device.type == "cuda"
        self._rounding = ROUNDING if on_gpu else 1
        declared = inside(torch.cuda.get_device_capability(device)) if on_gpu and torch.version.cuda else None
        self._recorder = Recorder(module, device=device.type, inside=declared)
        self._compiled = is_compiled(module)
        self._open = contextlib.ExitStack()
        if "torch._dynamo" in sys.modules:
            self._open.enter_context(torch.compiler.set_stance("force_eager"))
            # That the recorder's hooks are called for torch.compile's wrapper as well: it knows whose they are.
            self._open.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="Using `torch.compile\\(module\\)` when there are global hooks")
        self._open.enter_context(self._recorder)

    def hold(self, optimizers: Iterable[Optimizer], batch: Any) -> None:
        """What is alive now, and whose."""
        self._recorder.hold_training(optimizers)
        self._recorder.hold("inputs", batch)

    def enter(self, phase: str) -> None:
        """What follows belongs to `phase`."""
        if self._meter is not None:
            self._meter.enter(phase)
        self._recorder.enter(phase)

    def leave(self) -> None:
        """What follows belongs to no phase: between micro-batches, or validation."""
        if self._meter is not None:
            self._meter.leave()
        self._recorder.enter("")

    def forward_ends(self) -> None:
        """What is alive of the forward, the backward will need."""
        self._recorder.hold_activations()

    def backward_ends(self) -> None:
        """The parameters have their gradients."""
        self._recorder.hold_gradients()

    def finish(self, optimizers: Iterable[Optimizer]) -> Breakdown:
        """After the step."""
        self._recorder.hold_training(optimizers)
        self.abandon()
        if self._recorder.error is not None:
            raise self._recorder.error
        if self._meter is not None:
            self._meter.leave()
            self._meter.step_ends(self._step)
        measured = {} if self._meter is None else self._meter.collect()
        known = self._meter is not None and any(name in measured for name in ("forward", "step"))
        return self._recorder.breakdown(
            measured,
            step=self._step,
            source=self._meter.source if self._meter is not None and known else "tracker",
            rounded_to=self._rounding,
            compiled=self._compiled,
            notes=(*([_EAGER] if self._compiled else []), *([] if known else [_NOT_MEASURED])),
        )

    def abandon(self) -> None:
        """Stop looking; the meter is its owner's to close."""
        self._open.close()


def probe_memory(
    module: nn.Module,
    batch: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: Optimizer | None = None,
    warmup: int = 1,
) -> Breakdown:
    """What fills the memory of a training step of `module` on `batch`, which is really taken: weights move.

    Runs `warmup` steps, and one more under the probe, each `loss(batch)`, backward and, with an optimizer, its step.
    The gradients are cleared at the end. On a GPU the phases' peaks are the allocator's, on a CPU those of its events.

    >>> import torch
    >>> model = torch.nn.Linear(256, 64, bias=False)
    >>> probed = probe_memory(model, torch.ones(32, 256), loss=lambda x: model(x).square().mean())
    >>> probed.phases["forward"].categories["parameters"], probed.score_matrices
    (65536, ())

    Args:
        module: on its device, in its mode (train or eval); compiled or not.
        batch: what `loss` takes, on the same device.
        loss: from the batch to the loss, autocast and all; None: the module's `training_step`.
        optimizer: of the module's parameters; None: forward and backward alone.
        warmup: steps before the probed one. With one, the probed step finds an optimizer's state, as training does.

    Raises:
        TypeError: `module` is no nn.Module, or `optimizer` no Optimizer.
        ValueError: `loss` is missing, or gives no loss; `warmup` is no number from 0 on.
    """
    step = _checked(module, loss, optimizer, warmup)
    device = next((x.device for x in (*module.parameters(), *module.buffers())), torch.device("cpu"))
    optimizers = [] if optimizer is None else [optimizer]
    meter, probe = _meter_of(device, warmup), None
    try:
        for number in range(warmup + 1):
            if meter is not None:
                meter.step_begins(number, lambda: [module, *optimizers, batch])
            if number == warmup:
                probe = StepProbe(module, device, meter, step=number)
                probe.hold(optimizers, batch)
            _take(step, module, optimizer, batch, probe)
        assert probe is not None
        return probe.finish(optimizers)
    finally:
        if probe is not None:
            probe.abandon()
        if meter is not None:
            meter.close()
        module.zero_grad()


def _take(
    step: Callable[[Any], Any], module: nn.Module, optimizer: Optimizer | None, batch: Any, probe: StepProbe | None
) -> None:
    if probe is not None:
        probe.enter("forward")
    loss, beside = loss_and_beside(step(batch))
    if not isinstance(loss, Tensor) or not loss.requires_grad or loss.numel() != 1:
        raise ValueError(
            f"loss must give one number with a gradient, got {describe(loss)}: "
            "return what .backward() is to be called on"
        )
    if probe is not None:
        probe.forward_ends()
    module.zero_grad()  # here as in Lightning, between forward and backward
    if probe is not None:
        probe.enter("backward")
    loss.backward()
    if probe is not None:
        probe.backward_ends()
    if optimizer is not None:
        if probe is not None:
            probe.enter("optimizer")
        optimizer.step()
    del loss, beside  # as late as in Lightning


def _checked(module: Any, loss: Any, optimizer: Any, warmup: Any) -> Callable[[Any], Any]:
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be an nn.Module, got {type(module).__name__}: give the module, not its class")
    if any(x.device.type == "meta" for x in (*module.parameters(), *module.buffers())):
        raise ValueError(
            f"module must be on a device with memory, and {type(module).__name__} is on meta: predict_peak takes it"
        )
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer or None, got {type(optimizer).__name__}: "
            "give the optimizer itself, made of the module's parameters"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("optimizer must take one gradient a step, and LBFGS takes as many as it likes: give another")
    if not isinstance(warmup, int) or isinstance(warmup, bool) or warmup < 0:
        raise ValueError(f"warmup must be a number of steps from 0 on, got {warmup!r}: 1 makes the optimizer's state")
    if callable(loss):
        return loss
    training_step: Any = getattr(module, "training_step", None)
    if loss is not None or not callable(training_step):
        raise ValueError(
            f"loss must be a function from the batch to the loss, got {loss!r}, and {type(module).__name__} "
            f"has {'a' if callable(training_step) else 'no'} training_step: give loss=lambda batch: ..."
        )
    return of_batch(training_step)


def _meter_of(device: torch.device, step: int, *, first_step: int = 0) -> Meter | None:
    if device.type == "cpu":
        return ProfilerMeter(step, first_step=first_step)
    if device.index is None:
        device = torch.device(device.type, getattr(torch, device.type).current_device())
    ledger = ledger_of(device)
    return None if ledger is None else AllocatorMeter(ledger)


class MemoryProbe(Monitor):
    """Says what fills the memory of one training step: by category, by module, by tensor, beside the allocator's peak.

    `breakdown` holds it from then on. It is printed, written to `folder` (memory_probe.json and .png), and logged under
    its step, in GiB, each the highest of all ranks: `memory/probe/peak_gib`;
    `memory/probe/{parameters,gradients,optimizer_state,activations,inputs,workspaces,temporaries,untracked}_gib` at
    that peak; `memory/probe/score_matrices_gib`, saved for the backward, and `memory/probe/flash_would_save_gib` of the
    peak.

    The probed step is some times slower than others; on a CPU the one before it is slower too (the profiler's work),
    and `disturbs_timing` says so. All other steps run as without the probe. A compiled model runs uncompiled in the
    probed step, which may take more memory than others, and nothing of what was compiled is lost. Under manual
    optimization a batch is one phase, `step`.

    Args:
        step: which one, counted from 0 as this run begins; a shorter run probes its last. By default after
            MemoryMonitor's on a CPU, since there can be one profiler at a time.
        folder: where the files go; None: where the first logger writes, and nowhere without a logger.
        advice: also take the step again on fake tensors, in other ways, and print what each would save (see
            `memory_advice`); `advisory` holds it. Some seconds, once; training_step is called on a copy, so what it
            does beside computing it does again. A step that cannot be predicted is judged by the probed one. Only where
            there is one process.
    """

    numbers = ("peak", *_PARTS, "score_matrices", "flash_would_save")

    def __init__(self, *, step: int = 4, folder: str | Path | None = None, advice: bool = False) -> None:
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise ValueError(f"step counts steps from 0, got {step!r}: leave it out for the fifth step")
        if folder is not None and not isinstance(folder, str | Path):
            raise TypeError(f"folder must be a path or None, got {type(folder).__name__}: give a string")
        self._wanted_step = step
        self._wanted_folder = folder
        self._wants_advice = advice
        super().__init__()

    def _start_over(self) -> None:
        super()._start_over()
        self.breakdown: Breakdown | None = None
        self.advisory: Advisory | None = None
        self._at: int | None = None
        self._first = 0
        self._device = torch.device("cpu")
        self._folder: Path | None = None
        self._meter: Meter | None = None
        self._probe: StepProbe | None = None
        self._in_step = False

    def result(self) -> dict[str, Any] | None:
        """The breakdown as JSON has it, with each phase's ten largest tensors; None before the probed step."""
        return None if self.breakdown is None else self.breakdown.to_json(tensors=10)

    def disturbs_timing(self, step: int) -> bool:
        """Whether `step`, numbered as Lightning logs it, is probed, or runs under the probe's profiler."""
        if self._at is None:
            return False
        return step == self._at or (self._device.type == "cpu" and step == self._at - 1 >= self._first)

    # Beginning and end

    @never_raises
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._device = trainer.strategy.root_device
        self._first, left = step_of(trainer), steps_left(trainer)
        wanted = self._wanted_step if left is None else max(min(self._wanted_step, left - 1), 0)
        self._at = self._first + wanted
        folder = trainer.log_dir if self._wanted_folder is None and trainer.loggers else self._wanted_folder
        self._folder = None if folder is None else Path(folder)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.breakdown is None and not self._failed:
            logger.warning("No step was probed: training ended before step %s (see MemoryProbe's step).", self._at)

    def _release(self) -> None:
        probe, self._probe = self._probe, None
        if probe is not None:
            probe.abandon()
        meter, self._meter = self._meter, None
        if meter is not None:
            meter.close()

    # The step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.disturbs_timing(step_of(trainer)):
            self._batch_begins(trainer, pl_module, batch)

    @never_raises
    def _batch_begins(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> None:
        step = step_of(trainer)
        if not self._in_step:
            self._in_step = True
            if self._meter is None and (self._device.type == "cpu" or step == self._at):
                self._meter = self._choose_meter(trainer)
            if self._meter is not None:
                self._meter.step_begins(step, lambda: held_by(trainer, pl_module, batch))
            if step == self._at:
                self._probe = StepProbe(pl_module, self._device, self._meter, step=step)
        if self._probe is not None:
            self._probe.hold(trainer.optimizers, batch)
            self._probe.enter("forward" if pl_module.automatic_optimization else "step")

    def _choose_meter(self, trainer: Trainer) -> Meter | None:
        assert self._at is not None
        others: list[Any] = [each for each in trainer.callbacks if each is not self]  # pyright: ignore
        steps = range(max(self._at - 1, self._first), self._at + 1)
        if self._device.type == "cpu" and any(
            each.disturbs_timing(step) for each in others if hasattr(each, "disturbs_timing") for step in steps
        ):
            logger.warning("Step %d is measured by another callback: the probe counts what it tracks.", self._at)
            return None
        return _meter_of(self._device, self._at, first_step=self._first)

    @never_raises
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._probe is not None:
            self._probe.forward_ends()
            if pl_module.automatic_optimization:
                self._probe.enter("backward")

    @never_raises
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._probe is not None:
            self._probe.backward_ends()

    @never_raises
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._probe is not None and pl_module.automatic_optimization:
            self._probe.enter("optimizer")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._in_step:
            self._batch_ends(trainer)
            if step_of(trainer) == self._at and step_is_complete(trainer):  # on every rank, also on one that failed
                metrics = self._guarded_combine(self._exchange(trainer, final=False)) or {}
                self._log(trainer, pl_module, metrics)
                if self._wants_advice and trainer.world_size == 1:
                    self._advise(trainer, pl_module, batch)

    @never_raises
    def _advise(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> None:
        from flash_train.diagnostics.oom_output import print_advice

        where = circumstances(trainer, pl_module, batch, "between two batches", probed=self.breakdown)
        self.advisory, left_out = advised(where, seconds=60.0)
        print_advice(() if self.advisory is None else self.advisory.advice, left_out=left_out)

    @never_raises
    def _batch_ends(self, trainer: Trainer) -> None:
        if self._probe is not None:
            self._probe.leave()
        if not step_is_complete(trainer):
            return
        self._in_step = False
        if self._probe is not None:
            self.breakdown = self._probe.finish(trainer.optimizers)
            self._release()
            if trainer.is_global_zero:
                self._show(trainer, self.breakdown)
        elif self._meter is not None:
            self._meter.step_ends(step_of(trainer))

    def _show(self, trainer: Trainer, breakdown: Breakdown) -> None:
        # rich and matplotlib, once there is something to show
        from flash_train.diagnostics.probe_output import print_breakdown, write_files

        print_breakdown(breakdown)
        if self._folder is None:
            return
        try:
            chart = write_files(self._folder, breakdown)[-1]
        except OSError as error:
            logger.warning("The probe's files could not be written to %s: %s", self._folder, error)
            return
        for each in trainer.loggers:
            if hasattr(each, "log_image"):
                image: Any = {"key": "memory/probe/chart", "images": [str(chart)], "step": breakdown.step}
                each.log_image(**image)  # pyright: ignore[reportAttributeAccessIssue]

    # Numbers

    @never_raises
    def _log(self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]) -> None:
        # Not through the module, which would log them again at each log step.
        for each in trainer.loggers if metrics else ():
            each.log_metrics(metrics, step=step_of(trainer))

    def _collect(self, trainer: Trainer, *, final: bool) -> Mapping[str, float]:
        if self.breakdown is None:
            return {}
        peak, saves = self.breakdown.peak, self.breakdown.flash_saves
        return {
            "peak": peak.measured,
            **{name.replace(" ", "_"): size for name, size in peak.categories.items()},
            "untracked": peak.untracked,
            "score_matrices": sum(each.saved for each in self.breakdown.score_matrices),
            "flash_would_save": 0 if saves is None else saves.peak,
        }

    def _combine(self, numbers: Mapping[str, list[float]]) -> dict[str, float]:
        return {
            f"memory/probe/{name}_gib": value / GIB for name in numbers if (value := highest(numbers[name])) is not None
        }
