"""A model and data of a few numbers, for tests of the training loop alone."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from flash_train.training.checkpoint import Checkpoint
from flash_train.training.module import LanguageModel
from flash_train.training.optimizer import adamw
from flash_train.training.schedule import warmup_cosine

B, T, V, C = 3, 5, 11, 7
BATCHES_PER_EPOCH = 7


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, C)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(C, V)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.dropout(self.embedding(tokens)))


def batch(position: int) -> dict[str, Tensor]:
    """Batch number `position` of a text in which each token is followed by its double, most of the time."""
    generator = torch.Generator().manual_seed(position)
    inputs = torch.randint(V, (B, T), generator=generator)
    noise = torch.randint(V, (B, T), generator=generator)
    targets = torch.where(torch.rand((B, T), generator=generator) < 0.8, inputs * 2 % V, noise)
    return {"inputs": inputs, "targets": targets}


class ToyBatches:
    """Batches in the order of their position, which it can save; a pass over it is an epoch."""

    def __init__(self) -> None:
        self.position = 0

    def __len__(self) -> int:
        return BATCHES_PER_EPOCH

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for _ in range(BATCHES_PER_EPOCH - self.position % BATCHES_PER_EPOCH):
            self.position += 1
            yield batch(self.position - 1)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict["position"]


class ToyData(LightningDataModule):
    def train_dataloader(self) -> ToyBatches:
        return ToyBatches()

    def val_dataloader(self) -> DataLoader:
        short = batch(1001)
        short["targets"][1:] = -100
        # A DataLoader draws from the global generator whenever it is iterated, as a user's own may.
        return DataLoader([batch(1000), short], batch_size=None)  # pyright: ignore[reportArgumentType]


def language_model(*, total_steps: int = 10, **options: Any) -> LanguageModel:
    torch.manual_seed(4)
    defaults = {
        "optimizer": partial(adamw, lr=0.05),
        "schedule": partial(warmup_cosine, warmup_steps=2, total_steps=total_steps),
    }
    return LanguageModel(ToyModel(), **{**defaults, **options})


def trainer(folder: Path, *callbacks: Callback, max_steps: int = 10, **options: Any) -> Trainer:
    """A quiet CPU trainer that writes into `folder`; a Checkpoint is among the callbacks unless one is given."""
    if not any(isinstance(callback, Checkpoint) for callback in callbacks):
        callbacks = (*callbacks, Checkpoint(dirpath=folder / "checkpoints", every_n_train_steps=100))
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
    }
    return Trainer(
        default_root_dir=folder,
        max_steps=max_steps,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **{**defaults, **options},
    )


class RecordingLogger(Logger):
    """Keeps what it is given: [(step, metrics), ...]."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "recording"

    @property
    def version(self) -> str:
        return "0"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def steps(self, name: str) -> list[int | None]:
        return [step for step, metrics in self.rows if name in metrics]
