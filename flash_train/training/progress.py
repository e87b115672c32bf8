"""What is shown while a run goes on, and at its end."""

import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from rich import get_console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from flash_train.training.later import Later
from flash_train.training.steps import is_log_step

__all__ = ["ProgressBar", "Summary"]

SHOWN = {  # name of a metric: label and format
    "train/loss": ("loss", "{:.4f}"),
    "validation/loss": ("validation loss", "{:.4f}"),
    "validation/bits_per_byte": ("validation bits per byte", "{:.4f}"),
    "speed/tokens_per_second": ("tokens/s", "{:,.0f}"),
    "memory/peak_allocated_gib": ("peak", "{:.3g} GiB"),
    "memory/predicted_gib": ("predicted peak", "{:.3g} GiB"),
}
LIVE = ("train/loss", "speed/tokens_per_second", "memory/peak_allocated_gib")


class ProgressBar(RichProgressBar):
    """Optimizer steps done and to do, with the loss, tokens per second and peak memory that were logged last.

    The numbers change with log steps only; a GPU's are read when the next step has begun (`Later`). Where there is no
    terminal, each log step prints one line instead.
    """

    def __init__(self, *, refresh_rate: int = 10) -> None:
        super().__init__(refresh_rate=refresh_rate)
        self._step = 0
        self._texts: dict[str, str] = {}
        self._coming: tuple[int, dict[str, Later]] | None = None

    @property
    def total_train_batches(self) -> int | float:
        """Optimizer steps of the whole run, infinite where nothing bounds them."""
        trainer = self.trainer
        steps = trainer.max_steps if trainer.max_steps > 0 else math.inf
        epochs = trainer.max_epochs if trainer.max_epochs is not None and trainer.max_epochs > 0 else math.inf
        if math.isinf(epochs) or math.isinf(trainer.num_training_batches):
            return steps
        return min(steps, epochs * math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches))

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Label and text of each live number, as of the last log step: Lightning asks at the end of epochs too."""
        return dict(self._texts)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._step, self._coming = trainer.global_step, None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.is_disabled or trainer.global_step == self._step:
            return
        self._show(trainer, pl_module)
        self._step = trainer.global_step
        if self.train_progress_bar_id is None:
            self._initialize_train_progress_bar_id()  # a run resumed inside an epoch does not begin one
        if is_log_step(trainer, self._step):
            self._coming = self._step, _values(trainer, LIVE)
            if all(value.is_there for value in self._coming[1].values()):
                self._show(trainer, pl_module)
        self._update(self.train_progress_bar_id, self._step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.is_disabled:
            self._show(trainer, pl_module)
        super().on_train_end(trainer, pl_module)

    def _show(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What came of the last log step, once."""
        if self._coming is None:
            return
        step, values = self._coming
        self._coming, self._texts = None, _texts(values)
        self._update_metrics(trainer, pl_module)
        self._print_line(step)

    def configure_columns(self, trainer: Trainer) -> list[Any]:
        """Few and narrow enough for 80 columns with the metrics that come after them."""
        _, _, count, _, _ = super().configure_columns(trainer)
        return [TextColumn("{task.description}"), BarColumn(bar_width=10), count, TimeRemainingColumn(compact=True)]

    def _get_train_description(self, current_epoch: int) -> str:
        return ""  # only validation's bar needs a name

    def _print_line(self, step: int) -> None:
        console = get_console()
        if not console.is_terminal:
            texts = [f"{label} {text}" for label, text in self._texts.items()]
            console.print(f"step {step}/{self.total_train_batches}", *texts, sep="  ", highlight=False)


class Summary(Callback):
    """Prints a short table when training has ended: how long, how far, the last loss, and what was logged of SHOWN."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._first_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = time.perf_counter()
        self._first_step = trainer.global_step

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        trained = self._began is not None and trainer.global_step > self._first_step
        if stage == "fit" and trainer.is_global_zero and trained:
            get_console().print(self._table(trainer, getattr(pl_module, "step_loss", None)))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, KeyboardInterrupt):  # then Lightning calls no teardown
            self.teardown(trainer, pl_module, "fit")

    def _table(self, trainer: Trainer, step_loss: Tensor | None) -> Table:
        assert self._began is not None
        table = Table(title="Summary", show_header=False)
        steps = f"{trainer.global_step:,}"
        if self._first_step:
            steps += f" (resumed after {self._first_step:,})"
        table.add_row("optimizer steps", steps)
        table.add_row("time", f"{time.perf_counter() - self._began:.1f} s")
        texts = _texts(_values(trainer, SHOWN))
        if step_loss is not None and not is_log_step(trainer, trainer.global_step):  # what was logged is older, if any
            label, style = SHOWN["train/loss"]
            texts = {label: style.format(float(step_loss))} | {key: texts[key] for key in texts if key != label}
        for label, text in texts.items():
            table.add_row(label, text)
        return table


def _values(trainer: Trainer, names: Iterable[str]) -> dict[str, Later]:
    metrics = trainer.callback_metrics
    return {name: Later(torch.as_tensor(metrics[name]).detach()) for name in names if name in metrics}


def _texts(values: Mapping[str, Later]) -> dict[str, str]:
    return {SHOWN[name][0]: SHOWN[name][1].format(float(value.numbers())) for name, value in values.items()}
