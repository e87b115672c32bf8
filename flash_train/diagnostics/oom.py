"""OOMExplainer: says why memory ran out, and what to change."""

import json
import logging
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from torch import Tensor
from torch.optim import Optimizer

from flash_train.diagnostics.explanation import Circumstances, Explanation, circumstances, explain, module_names
from flash_train.diagnostics.incident import Incident, counters_of, forget, incident_of, listen, observed, out_of_memory
from flash_train.diagnostics.probe import MemoryProbe

logger = logging.getLogger(__name__)

R = TypeVar("R")
PATIENCE = 3
"""Times the seconds, after which an explanation is given up."""


class OOMExplainer(Callback):
    """When training or validation runs out of memory, says why, and what to change with which effect.

    Once in the allocator's own observer, before the frames unwind: what was asked for, in which phase, module and
    autograd node, and the allocator's counters. Once after: the step of that batch is taken again on fake tensors,
    which need no device memory, the request is matched with the tensor that it was for, what was alive then is listed,
    and changes are ranked by their predicted effect (see `memory_advice`). A step that cannot be taken on fake tensors
    is explained by the last probed one, if there is a MemoryProbe.

    It is printed, and written on each rank to `folder`/oom_rank<rank>: report.txt, report.json and, on a GPU,
    snapshot.pickle (torch's, for pytorch.org/memory_viz); a WandbLogger gets the folder as an artifact of type
    "out-of-memory". The exception goes on as it is. Until then each batch costs a few assignments; on a CPU there is no
    observer, and what was asked for is read from the exception.

    The fake step calls the module's training_step or validation_step: what these do beside computing (printing, a
    wandb.log of their own) they do again.

    Args:
        folder: where the files go; None: where the first logger writes, or the trainer's default_root_dir.
        history: of how many of the last allocations and frees the snapshot shall have the Python stacks. 0 costs
            nothing; else each allocation costs about 2 microseconds.
        seconds: after which no more changes are tried; after three times as many the explanation ends as it is.
    """

    def __init__(self, *, folder: str | Path | None = None, history: int = 0, seconds: float = 60.0) -> None:
        if folder is not None and not isinstance(folder, str | Path):
            raise TypeError(f"folder must be a path or None, got {type(folder).__name__}: give a string")
        if not isinstance(history, int) or isinstance(history, bool) or history < 0:
            raise ValueError(f"history must be a number of allocations from 0 on, got {history!r}: 100000 is much")
        if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not seconds > 0:
            raise ValueError(f"seconds must be a positive number, got {seconds!r}: 60 is usual")
        self._wanted_folder, self._history, self._seconds = folder, history, seconds
        self.explanation: Explanation | None = None
        self._start_over()

    def _start_over(self) -> None:
        self._phase = "setup"
        self._batch: Any = None
        self._names: dict[int, str] = {}
        self._folder: Path | None = None
        self._device = torch.device("cpu")
        self._outside_before: int | None = None
        self._incident: Incident | None = None
        self._snapshot: Any = None

    # Before anything happens

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # log_dir is a broadcast, which all ranks must take part in: so not in on_exception.
        folder = self._wanted_folder
        if folder is None:
            folder = (trainer.log_dir if trainer.loggers else None) or trainer.default_root_dir
        self._guard(lambda: self._begin(trainer, pl_module, Path(folder)))

    def _begin(self, trainer: Trainer, pl_module: LightningModule, folder: Path) -> None:
        self._start_over()
        self.explanation = None
        self._folder = folder / f"oom_rank{trainer.global_rank}"
        self._device = trainer.strategy.root_device
        if self._device.type != "cuda":
            return
        listen(self._on_out_of_memory)
        free, total = torch.cuda.mem_get_info(self._device)
        self._outside_before = counters_of(self._index, limit=total, free=free).outside
        if self._history:
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=self._history)

    @property
    def _index(self) -> int:
        return torch.cuda.current_device() if self._device.index is None else self._device.index

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._guard(self._release)

    def _release(self) -> None:
        forget(self._on_out_of_memory)
        self._batch = self._snapshot = self._incident = None
        if self._history and self._device.type == "cuda":
            torch.cuda.memory._record_memory_history(enabled=None)

    # Where the run is

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._guard(lambda: self._names.update(module_names(pl_module)))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._batch, self._incident, self._snapshot = batch, None, None
        self._phase = "forward" if pl_module.automatic_optimization else "step"

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._phase == "forward":
            self._phase = "backward"

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._phase == "backward":
            self._phase = "optimizer"

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._phase, self._batch = "between two batches", None

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if not self._names:
            self._guard(lambda: self._names.update(module_names(pl_module)))
        self._batch, self._incident, self._snapshot = batch, None, None
        self._phase = "the sanity check" if trainer.sanity_checking else "validation"

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._phase, self._batch = "between two batches", None

    # When it happens

    def _on_out_of_memory(self, device: int, requested: int, limit: int, free: int) -> None:
        """The allocator's observer; in whatever thread asked."""
        if device == self._index:
            self._incident = observed(device, requested, limit, free, self._names)
            self._snapshot = torch.cuda.memory._snapshot(device)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._guard(lambda: self._on_exception(trainer, pl_module, exception))
        self._guard(self._release)  # Lightning tears no callback down after an exception

    def _on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        error = out_of_memory(exception)
        if error is None:
            return
        if not self._names:
            self._names.update(module_names(pl_module))
        incident = self._incident or incident_of(error, self._names)
        where = self._circumstances(trainer, pl_module)
        text = str(error)
        self.explanation = _in_time(
            lambda: explain(incident, text, where, seconds=self._seconds), PATIENCE * self._seconds
        )
        self._show(trainer, self.explanation)

    def _circumstances(self, trainer: Trainer, pl_module: LightningModule) -> Circumstances:
        probes = [each.breakdown for each in trainer.callbacks if isinstance(each, MemoryProbe)]  # pyright: ignore
        probed = next((each for each in probes if each is not None), None)
        return circumstances(
            trainer, pl_module, self._batch, self._phase, outside_before=self._outside_before, probed=probed
        )

    def _show(self, trainer: Trainer, explanation: Explanation) -> None:
        # rich, once there is something to show
        from flash_train.diagnostics.oom_output import as_text, print_explanation

        folder = self._folder
        self._guard(lambda: print_explanation(explanation))
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.txt").write_text(as_text(explanation))
        (folder / "report.json").write_text(json.dumps(explanation.to_json(), indent=2) + "\n")
        if self._snapshot is not None:
            (folder / "snapshot.pickle").write_bytes(pickle.dumps(self._snapshot, protocol=4))  # which viewers read
        logger.warning("The explanation is in %s.", folder)
        for each in trainer.loggers:
            if isinstance(each, WandbLogger) and trainer.is_global_zero:  # the others have no run
                name = f"out-of-memory-{each.version}" if each.version else "out-of-memory"
                each.experiment.log_artifact(str(folder), name=name, type="out-of-memory")

    def _guard(self, act: Callable[[], Any]) -> None:
        """Whatever goes wrong here is logged, and the run goes on, or its own exception does."""
        try:
            act()
        except (Exception, KeyboardInterrupt):
            logger.exception("OOMExplainer failed; the run is not touched by it.")


def _in_time(work: Callable[[], R], seconds: float) -> R:
    """`work()` in a thread, which is left behind after `seconds`: a foreign step may wait for other ranks."""
    results: list[R] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="OOMExplainer", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"the explanation was not ready after {seconds:g} seconds")
    return results[0]
