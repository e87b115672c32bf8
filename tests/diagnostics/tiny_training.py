"""A LightningModule that is nobody's in particular, an allocator and a clock that tests control."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from flash_train.diagnostics.counters import Reading

VOCABULARY, WIDTH = 101, 33
B, T = 5, 37


class TinyModule(pl.LightningModule):
    """Embedding and output layer; `during` is called with the name of what is going on."""

    def __init__(self, *, width: int = WIDTH, during: Callable[[str], Any] = lambda where: None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY))
        self.during = during

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.net(batch["inputs"])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.during("forward")
        loss = self.loss(batch)
        self.log("train/loss", loss)
        return loss

    def on_after_backward(self) -> None:
        self.during("backward")

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        self.during("optimizer")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class ValidatedModule(TinyModule):
    """The same, with validation."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.during("validation")
        self.log("validation/loss", self.loss(batch))


class RecordingLogger(DummyLogger):
    """Keeps (step, metrics) of every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:  # pyright: ignore
        self.calls.append((step, metrics))

    def steps_of(self, key: str) -> list[int | None]:
        return [step for step, metrics in self.calls if key in metrics]

    def values_of(self, key: str) -> list[float]:
        return [metrics[key] for _, metrics in self.calls if key in metrics]


def batches(count: int, *, rows: int = B, length: int = T) -> DataLoader[Any]:
    """`count` batches of `rows` sequences of `length` tokens."""
    tokens = torch.randint(VOCABULARY, (rows * count, length + 1), generator=torch.Generator().manual_seed(7))
    samples: Any = [{"inputs": row[:-1].clone(), "targets": row[1:].clone()} for row in tokens]
    return DataLoader(samples, batch_size=rows)


def trainer(*callbacks: pl.Callback, **settings: Any) -> pl.Trainer:
    """On the CPU, quiet, four steps unless `settings` say otherwise."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 4,
        "log_every_n_steps": 2,
        "logger": False,
        "num_sanity_val_steps": 0,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    return pl.Trainer(callbacks=list(callbacks), **(defaults | settings))


class FakeAllocator:
    """Counts bytes as a caching allocator does: reserved memory does not shrink."""

    def __init__(self) -> None:
        self.allocated = self.allocated_peak = self.reserved = self.reserved_peak = self.retries = 0

    def allocate(self, size: int) -> None:
        self.allocated += size
        self.reserved = max(self.reserved, self.allocated)
        self.allocated_peak = max(self.allocated_peak, self.allocated)
        self.reserved_peak = max(self.reserved_peak, self.reserved)

    def free(self, size: int) -> None:
        self.allocated -= size

    def spike(self, size: int) -> None:
        self.allocate(size)
        self.free(size)

    def read(self) -> Reading:
        current, peak = (self.allocated, self.reserved), (self.allocated_peak, self.reserved_peak)
        return Reading(current=current, peak=peak, retries=self.retries)

    def reset_peaks(self) -> None:
        self.allocated_peak, self.reserved_peak = self.allocated, self.reserved


class FakeTime(SimpleNamespace):
    """Stands in for the module `time`: moves only when told to, and by a hair at each look."""

    seconds: float = 0.0

    def perf_counter(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds
