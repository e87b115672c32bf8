"""LeakDetector: says when memory grows from step to step, how fast, since when, and which module's tensors stay."""

import gc
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils._pytree import tree_leaves

from flash_train.diagnostics.in_use import gauge_of
from flash_train.diagnostics.monitor import Monitor, highest, never_raises, step_is_complete, step_of
from flash_train.diagnostics.peak import BornInside
from flash_train.diagnostics.speed import compilations
from flash_train.diagnostics.trend import Growth, Trend
from flash_train.memory.attribution import is_compiled
from flash_train.memory.cards import ROUNDING
from flash_train.memory.live import Block, round_up
from flash_train.memory.sizes import human_bytes, parse_bytes

logger = logging.getLogger(__name__)

_JUDGED, _TRACED = 2, 4
"""Steps: what the first two of the four made and the end of the last still finds, stays. A batch that was loaded ahead,
and gradients, are gone by then."""
_COMPILED = "the model is compiled, so that its tensors cannot be followed"


class LeakDetector(Monitor):
    """Warns once when the bytes in use between steps grow steadily: by how much a step, since which step, when memory
    will have run out at this rate, and whose tensors stay.

    It reads what is in use at the end of every fifth step: a GPU's allocated bytes, without the batch at hand; on a
    CPU what malloc has given out. Peaks and lengths have no part in it. Nothing is waited for. Once memory grows, the
    operators of four steps are followed (these are slower, and `disturbs_timing` says so), to name what they leave
    behind: `result()` has it. A compiled model is not followed. Logged at Lightning's log steps, the highest of all
    ranks: `memory/growth_mib_per_step` over the last 16 readings. See `Trend` for what counts as growth.

    Args:
        every_n_steps: read so often. With 5, growth is told some 80 steps after it began.
        warmup_steps: of this run, not looked at: optimizer states, workspaces and caches are made in them.
        least: bytes a step, as "64KiB"; slower growth is not reported.
    """

    numbers = ("growth",)

    def __init__(self, *, every_n_steps: int = 5, warmup_steps: int = 10, least: str | int = "64KiB") -> None:
        if not isinstance(every_n_steps, int) or isinstance(every_n_steps, bool) or every_n_steps < 1:
            raise ValueError(f"every_n_steps must be a number of steps from 1 on, got {every_n_steps!r}: 5 is usual")
        if not isinstance(warmup_steps, int) or isinstance(warmup_steps, bool) or warmup_steps < 0:
            raise ValueError(f"warmup_steps must be a number of steps from 0 on, got {warmup_steps!r}: 10 is usual")
        self._every, self._warmup = every_n_steps, warmup_steps
        self._least = parse_bytes(least, name="least")
        super().__init__()

    def _start_over(self) -> None:
        super()._start_over()
        self._device = torch.device("cpu")
        self._gauge: Any = None
        self._trend = Trend(least=self._least)
        self._source: str | None = None
        self._first = 0
        self._compiled_before = 0
        self._growth: Growth | None = None
        self._leak: dict[str, Any] | None = None
        self._tracing: BornInside | None = None
        self._traced = range(0)
        self._in_step = False

    def result(self) -> dict[str, Any]:
        """What was read, and what grew: bytes, steps, and the blocks that stayed; `leak` is None where nothing does."""
        return {"source": self._source, "growth_bytes_per_step": self._trend.slope, "leak": self._leak}

    def disturbs_timing(self, step: int) -> bool:
        """Whether the operators of `step`, numbered as Lightning logs it, are followed."""
        return step in self._traced

    # Beginning and end

    @never_raises
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._device, self._first = trainer.strategy.root_device, step_of(trainer)
        self._compiled_before = compilations()
        gc.collect()  # what an earlier run left behind would go at some step of this one, and hide its growth
        self._gauge = gauge_of(self._device)
        if self._gauge is None:
            logger.warning("Nothing tells what is in use on a %s device here: leaks are not seen.", self._device.type)
            return
        self._source = self._gauge.source

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._report_rest(trainer)
        self._end(trainer, why="training ended before its tensors could be followed")

    @never_raises
    def _end(self, trainer: Trainer, *, why: str) -> None:
        if self._growth is not None and self._leak is None:
            self._tell(self._growth, [], why)

    def _release(self) -> None:
        tracing, self._tracing = self._tracing, None
        if tracing is not None:
            tracing.__exit__(None, None, None)
        gauge, self._gauge = self._gauge, None
        if gauge is not None:
            gauge.close()

    # Steps

    @never_raises
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._growth is None or self._leak is not None:
            return
        step = step_of(trainer)
        if (
            self._tracing is None
            and not self._in_step
            and not self._others_measure(trainer, range(step, step + _TRACED))
        ):
            if is_compiled(pl_module) or compilations() != self._compiled_before:
                self._tell(self._growth, [], _COMPILED)
                return
            self._traced = range(step, step + _TRACED)
            self._tracing = BornInside(device=self._device.type, module=pl_module)
            self._tracing.__enter__()
        if self._tracing is not None and not self._in_step:
            self._tracing.enter(str(step))
        self._in_step = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batch_ends(trainer, batch)
        self._report(trainer, pl_module)

    @never_raises
    def _batch_ends(self, trainer: Trainer, batch: Any) -> None:
        if self._gauge is None or not step_is_complete(trainer):
            return
        step, self._in_step = step_of(trainer), False
        if self._tracing is not None:
            if step == self._traced[-1]:
                self._name_what_stayed()
        elif self._growth is None and step >= self._first + self._warmup and step % self._every == 0:
            if not self._others_measure(trainer, range(step, step + 1)):
                self._growth = self._trend.add(step, self._gauge.read() - _size_of(batch, self._device))

    def _others_measure(self, trainer: Trainer, steps: range) -> bool:
        others: list[Any] = [each for each in trainer.callbacks if each is not self]  # pyright: ignore
        return any(
            each.disturbs_timing(step) for each in others if hasattr(each, "disturbs_timing") for step in steps
        )  # fmt: skip

    def _name_what_stayed(self) -> None:
        tracing, self._tracing = self._tracing, None
        assert tracing is not None and self._growth is not None
        tracing.__exit__(None, None, None)
        if tracing.error is not None:
            raise tracing.error
        stayed = tracing.survivors([str(step) for step in self._traced[:_JUDGED]])
        why = "not a tensor of two whole steps stayed: it is no tensor, or does not grow in every step"
        self._tell(self._growth, stayed, why)

    def _tell(self, growth: Growth, stayed: list[Block], why: str) -> None:
        left = None if self._gauge is None else self._gauge.left()
        runs_out = None if left is None else growth.step + int(left / growth.slope)
        total = sum(block.size for block in stayed)
        large = [block for block in stayed if block.size >= total / 100]  # not what logs keep of each step
        alike = Counter((block.size, block.module, block.operation, block.shape, block.dtype) for block in large)
        self._leak = asdict(growth) | {
            "out_of_memory_step": runs_out,
            "first_module": _name(large[0].module) if large else None,
            "stayed": [
                {"bytes": size * count, "count": count, "module": _name(module), "operation": operation,
                 "shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}
                for (size, module, operation, shape, dtype), count in alike.most_common()
            ],
        }  # fmt: skip
        whose = f"first in {_name(large[0].module)}: {_largest(self._leak['stayed'])}" if large else why
        logger.warning(
            "Memory grows by %s a step since step %d, to %s now (step %d)%s; %s.",
            human_bytes(growth.slope), growth.since, human_bytes(growth.size), growth.step,
            "" if runs_out is None else f", and will have run out at about step {runs_out}", whose,
        )  # fmt: skip

    # Numbers

    def _collect(self, trainer: Trainer, *, final: bool) -> Mapping[str, float]:
        slope = self._trend.slope
        return {} if slope is None else {"growth": slope}

    def _combine(self, numbers: Mapping[str, list[float]]) -> dict[str, float]:
        value = highest(numbers["growth"])
        return {} if value is None else {"memory/growth_mib_per_step": value / 2**20}


def _size_of(batch: Any, device: torch.device) -> int:
    """What its tensors take of an accelerator's allocator, but for what that leaves unsplit of large blocks; on a CPU
    nobody knows which of them malloc gave."""
    if device.type == "cpu":
        return 0
    tensors = [x for x in tree_leaves(batch) if isinstance(x, torch.Tensor)]
    return sum(round_up(tensor.nbytes, ROUNDING) for tensor in tensors if tensor.device.type == device.type)


def _name(module: str) -> str:
    return module or "the training step"


def _largest(stayed: list[dict[str, Any]]) -> str:
    ordered = sorted(stayed, key=lambda each: -each["bytes"])
    texts = [
        f"{each['count']} x {each['shape']} {each['dtype']} ({each['operation'].removeprefix('aten.')} in "
        f"{each['module']}, {human_bytes(each['bytes'] / _JUDGED)} a step)"
        for each in ordered[:3]
    ]
    more = len(ordered) - len(texts)
    return "; ".join(texts) + (f"; {more} more" if more else "")
