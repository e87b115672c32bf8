"""Batches of rows, assembled whole, and the iterables that hand them to a trainer.

The iterables are not DataLoaders themselves: Lightning gives a DataLoader another sampler when there are several
ranks, and a warning when it has no workers, and both would be wrong here.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from flash_train.training.data.order import Rows, Stream

IGNORED = -100

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Share:
    """This rank's part of every global batch: rows rank, rank + ranks, ... of its batch_size * ranks rows."""

    batch_size: int
    ranks: int = 1
    rank: int = 0

    @property
    def global_rows(self) -> int:
        return self.batch_size * self.ranks

    def rows(self, first: int) -> np.ndarray:
        """Row numbers [B] in the global batch that begins with row `first`."""
        return first + self.rank + self.ranks * np.arange(self.batch_size)


class TrainingRows(Dataset[Batch]):
    """Global batches by their first row, each with inputs and targets, int64 [B, T].

    With a `separator`, a token, each has "documents" too, int64 [B, T]: every separator begins a new document, and a
    row's first one may be the rest of one. The separator is thus the last target of one document and the first input
    of the next: no target is to be told from another document, and every token remains a target.
    """

    def __init__(self, rows: Rows, share: Share, *, separator: int | None = None) -> None:
        self.rows = rows
        self.share = share
        self.separator = separator

    def __getitem__(self, first: int) -> Batch:
        windows = self.rows.windows(self.share.rows(first))
        return _batch(windows[:, :-1], windows[:, 1:], self.separator)


class ValidationRows(Dataset[Batch]):
    """The whole split in consecutive windows, each token but the first being a target exactly once.

    Every batch on every rank is [B, T]: what a last window or a last batch lacks has the target -100 (IGNORED), and
    a batch may consist of it altogether. `separator` is that of `TrainingRows`.
    """

    def __init__(self, tokens: Stream, *, sequence_length: int, share: Share, separator: int | None = None) -> None:
        self.tokens = tokens
        self.sequence_length = sequence_length
        self.share = share
        self.separator = separator

    def __len__(self) -> int:
        windows = -(-(len(self.tokens) - 1) // self.sequence_length)
        return -(-windows // self.share.global_rows)

    def __getitem__(self, index: int) -> Batch:
        starts = self.share.rows(index * self.share.global_rows) * self.sequence_length
        windows = self.tokens.windows(starts, self.sequence_length + 1).astype(np.int64)
        beyond = starts[:, None] + np.arange(1, self.sequence_length + 1) >= len(self.tokens)
        targets = np.where(beyond, IGNORED, windows[:, 1:])
        return _batch(windows[:, :-1], targets, self.separator)


class ValidationSources(Dataset[Batch]):
    """Several texts' validation rows. Each batch is of one text, whose number it has under "source" (int64, a scalar).

    The texts take turns in proportion to their lengths, one batch of each first, so that a few batches say something of
    every text.
    """

    def __init__(self, sources: Sequence[ValidationRows]) -> None:
        self.sources = sources
        places = [
            (index / len(rows), number, index) for number, rows in enumerate(sources) for index in range(len(rows))
        ]
        self.order = [(number, index) for _, number, index in sorted(places)]

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> Batch:
        number, place = self.order[index]
        return {**self.sources[number][place], "source": torch.tensor(number)}


def _batch(inputs: np.ndarray, targets: np.ndarray, separator: int | None) -> Batch:
    batch = {"inputs": _copy(inputs), "targets": _copy(targets)}
    if separator is not None:
        batch["documents"] = (batch["inputs"] == separator).cumsum(1)
    return batch


def _copy(tokens: np.ndarray) -> Tensor:
    # Contiguous, for targets that are a shifted view of one tensor could not be flattened.
    return torch.from_numpy(tokens.astype(np.int64, order="C"))


@dataclass(frozen=True)
class TrainingBatches:
    """Batches without end, from the row that `position()` tells when an iteration begins.

    The data module saves and restores the place, and nothing is left to do for `state_dict` and `load_state_dict`:
    without them Lightning warns of a stop between two of its epochs' ends, which does no harm here.

    Raises RuntimeError, which begins with "DataLoader worker", within seconds of the death of a worker process.
    """

    rows: TrainingRows
    position: Callable[[], int]
    workers: int
    pin_memory: bool

    def __iter__(self) -> Iterator[Batch]:
        # The rows are counted here and not in a worker, which would not see how far the trainer has come.
        firsts = count(self.position(), self.rows.share.global_rows)
        try:
            yield from DataLoader(
                self.rows,
                batch_size=None,
                sampler=firsts,
                num_workers=self.workers,
                pin_memory=self.pin_memory,
                worker_init_fn=partial(_begin_worker, os.getpid()),
            )
        except (EOFError, OSError) as error:
            if not self.workers or str(error).startswith("Caught "):  # so a worker's own error begins
                raise
            # Torch watches its workers, and says so in these words, but not while it takes a batch from one.
            raise RuntimeError(f"DataLoader worker died while it handed over a batch: {error!r}") from error

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        return None


def _begin_worker(parent: int, worker: int) -> None:
    """A terminal and a scheduler signal every process of a run: the trainer ends its step, and then its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The second one works: torch ends by this signal who does not come when he is called.
    signal.signal(signal.SIGTERM, lambda number, _: signal.signal(number, signal.SIG_DFL))
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """End this process with the one that began it; torch does not see that it died before its worker looked first."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


@dataclass(frozen=True)
class ValidationBatches:
    """The validation split once; without workers, which would be started anew for each validation."""

    rows: ValidationRows | ValidationSources
    pin_memory: bool

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Batch]:
        yield from DataLoader(self.rows, batch_size=None, shuffle=False, pin_memory=self.pin_memory)
