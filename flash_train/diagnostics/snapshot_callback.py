"""MemorySnapshot: a memory snapshot of some steps, as a pickle for viewers and as a page that needs no network."""

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from flash_train.diagnostics.monitor import Monitor, never_raises, step_is_complete, step_of
from flash_train.diagnostics.snapshot import check_snapshot, pack
from flash_train.diagnostics.snapshot_page import write_snapshot_page
from flash_train.memory.sizes import human_bytes, parse_bytes

logger = logging.getLogger(__name__)


class MemorySnapshot(Monitor):
    """Records what the CUDA allocator does in the steps `first` to `last`, each with its Python stack, and writes
    memory_snapshot.pickle (for pytorch.org/memory_viz, `write_snapshot_page` and flash-snapshot) and .html to `folder`.

    A run that ends earlier, also by an exception, leaves what there is by then. Every rank writes, with its number in
    the files' names if there are several. Steps that are recorded are some 30 % slower (`disturbs_timing`), and
    writing takes seconds; all others run as without. On a CPU torch records nothing, and nothing is written. Where
    somebody else records already, their recording is used, and goes on.

    Args:
        first, last: steps, counted from 0 as this run begins, both recorded.
        folder: where the files go; None: where the first logger writes, or else the trainer's default_root_dir.
        limit: most bytes of the pickle, as "100MiB"; the oldest events are left out of a larger one.
        max_entries: most events recorded; the oldest are forgotten. One takes up to some kilobytes of the host.
    """

    numbers = ()

    def __init__(
        self, *, first: int = 3, last: int = 4, folder: str | Path | None = None, limit: str | int = "100MiB",
        max_entries: int = 200_000,
    ) -> None:  # fmt: skip
        for name, value, least in (("first", first, 0), ("last", last, first), ("max_entries", max_entries, 1)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be a whole number from {least} on, got {value!r}: leave it out")
        if folder is not None and not isinstance(folder, str | Path):
            raise TypeError(f"folder must be a path or None, got {type(folder).__name__}: give a string")
        self._range, self._wanted_folder = range(first, last + 1), folder
        self._limit, self._max_entries = parse_bytes(limit, name="limit"), max_entries
        super().__init__()

    def _start_over(self) -> None:
        super()._start_over()
        self.files: list[Path] = []
        self._steps = range(0)
        self._recording = self._foreign = False
        self._marks: list[tuple[float, str]] = []

    def result(self) -> dict[str, Any]:
        """The files that were written."""
        return {"files": [str(file) for file in self.files]}

    def disturbs_timing(self, step: int) -> bool:
        """Whether `step`, numbered as Lightning logs it, is recorded."""
        return step in self._steps

    @never_raises
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._records_on(trainer.strategy.root_device):
            logger.warning("torch records allocations of CUDA devices alone: there will be no snapshot.")
            return
        begin = step_of(trainer)
        self._steps = range(begin + self._range.start, begin + self._range.stop)

    def _records_on(self, device: torch.device) -> bool:
        return device.type == "cuda"

    @never_raises
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        step = step_of(trainer)
        if step not in self._steps:
            return
        if not self._recording:
            self._recording, self._foreign = True, self._begin()
        # Unix time: torch converts its events' times to it, by readings of both clocks when the process began and now.
        if not self._marks or self._marks[-1][1] != f"step {step}":
            self._marks.append((time.time() * 1e6, f"step {step}"))

    @never_raises
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._recording and step_of(trainer) == self._steps[-1] and step_is_complete(trainer):
            self._finish(trainer)

    @never_raises
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._recording:
            self._finish(trainer)
        elif self._steps and not self.files:
            logger.warning("There is no memory snapshot: training ended before step %d.", self._steps[0])

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._finish_early(trainer)
        super().on_exception(trainer, pl_module, exception)

    @never_raises
    def _finish_early(self, trainer: Trainer) -> None:
        if self._recording:
            self._finish(trainer)

    def _finish(self, trainer: Trainer) -> None:
        snapshot = check_snapshot(self._take(), "the recording")
        self._release()
        folder = Path(self._wanted_folder or (trainer.log_dir if trainer.loggers else None) or trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        name = "memory_snapshot" + (f"_rank{trainer.global_rank}" if trainer.world_size > 1 else "")
        page, file = folder / f"{name}.html", folder / f"{name}.pickle"
        title = f"steps {self._steps[0]} to {self._steps[-1]}"
        write_snapshot_page(page, snapshot, names=[title], device=self._index(trainer), marks=self._marks)
        self.files.append(page)
        file.write_bytes(pack(snapshot, limit=self._limit))
        self.files.append(file)
        logger.info("Memory snapshot: %s, %s (%s)", page, file, human_bytes(file.stat().st_size))

    def _release(self) -> None:
        recording, self._recording = self._recording, False
        if recording and not self._foreign:
            self._end()

    # What a test plays

    def _begin(self) -> bool:
        """Start recording; whether somebody did already."""
        if torch._C._cuda_isHistoryEnabled():
            return True
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=self._max_entries)
        return False

    def _take(self) -> Mapping[str, Any]:
        return torch.cuda.memory._snapshot()

    def _end(self) -> None:
        torch.cuda.memory._record_memory_history(enabled=None)

    def _index(self, trainer: Trainer) -> int | None:
        return trainer.strategy.root_device.index

    # There are no numbers.

    def _collect(self, trainer: Trainer, *, final: bool) -> Mapping[str, float]:
        return {}

    def _combine(self, numbers: Mapping[str, list[float]]) -> dict[str, float]:
        return {}
