"""Which window of the text is which row of training: a pure function of the seed, without end and without memory."""

import hashlib
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from flash_train.training.data.permutation import Permutation

# Weights of several texts become so many rows of every this many.
BLOCK_ROWS = 1000


class Stream(Protocol):
    """Tokens one behind the other, read a few at a time."""

    def __len__(self) -> int: ...

    @property
    def array(self) -> np.ndarray:
        """All of them at once."""
        ...

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """The `length` tokens from each of `starts` [B] on, [B, length]; past the end the last one repeats."""
        ...


class Rows(Protocol):
    """The rows of training by their number, from 0 on and without end."""

    def windows(self, rows: np.ndarray) -> np.ndarray:
        """Tokens [B, T + 1] of these rows [B]."""
        ...


class WindowOrder:
    """Epochs of windows, one after the other: row r lies in epoch r // windows.

    An epoch cuts `tokens` tokens into windows of `sequence_length` + 1 that share their last token with the next
    one's first, from a random phase on, and goes through them in a random order. Every epoch has the same number of
    windows, so that a row says its epoch; an epoch leaves out less than two windows of text at the ends, the next
    one others. Phase and permutation are functions of (seed, epoch) alone.
    """

    def __init__(self, tokens: int, *, sequence_length: int, seed: int) -> None:
        self.sequence_length = sequence_length
        self.seed = seed
        self.windows = max(1, (tokens - 1) // sequence_length - 1)
        self.phases = tokens - self.windows * sequence_length

    def starts(self, rows: np.ndarray) -> np.ndarray:
        """First tokens [B] of the windows at these rows [B]."""
        epochs, within = np.divmod(rows, self.windows)
        starts = np.empty_like(rows)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            starts[here] = self._epoch(int(epoch), within[here])
        return starts

    def _epoch(self, epoch: int, within: np.ndarray) -> np.ndarray:
        key = f"{self.seed}/{epoch}"
        phase = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") % self.phases
        return phase + self.sequence_length * Permutation(self.windows, key)(within)


@dataclass(frozen=True)
class ShuffledWindows:
    """The rows of training on one text."""

    stream: Stream
    order: WindowOrder

    def windows(self, rows: np.ndarray) -> np.ndarray:
        """Tokens [B, T + 1] of these rows [B]."""
        return self.stream.windows(self.order.starts(rows), self.order.sequence_length + 1)


class Mixture:
    """The rows of training on several texts, each with its own share of every BLOCK_ROWS rows, in a random order.

    A text that is at its end begins its next epoch, whatever the others do. Which text a row is of, and which of its
    rows, is computed from the row's number and the seed alone: no draw is remembered.
    """

    def __init__(self, texts: list[ShuffledWindows], shares: list[int], *, seed: int) -> None:
        assert len(texts) == len(shares) and sum(shares) == BLOCK_ROWS and min(shares) > 0
        self.texts = texts
        self.shares = np.array(shares)
        self.seed = seed

    def windows(self, rows: np.ndarray) -> np.ndarray:
        """Tokens [B, T + 1] of these rows [B]."""
        texts, within = self.places(rows)
        windows = np.empty((len(rows), self.texts[0].order.sequence_length + 1), np.int64)
        for text in np.unique(texts):
            here = texts == text
            windows[here] = self.texts[text].windows(within[here])
        return windows

    def places(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The text [B] that each of these rows [B] is of, and its number [B] among that text's rows."""
        blocks, within = np.divmod(rows, BLOCK_ROWS)
        for block in np.unique(blocks):
            here = blocks == block
            within[here] = Permutation(BLOCK_ROWS, f"mixture/{self.seed}/{block}")(within[here])
        ends = np.cumsum(self.shares)
        texts = np.searchsorted(ends, within, side="right")
        return texts, blocks * self.shares[texts] + within - (ends - self.shares)[texts]


def block_shares(weights: list[float]) -> list[int]:
    """Rows of every BLOCK_ROWS for each of `weights`, in proportion, at least 1 each (largest remainders)."""
    exact = BLOCK_ROWS * np.array(weights, np.float64) / sum(weights)
    shares = np.maximum(1, np.floor(exact)).astype(int)
    for index in np.argsort(shares - exact, kind="stable"):
        shares[index] += BLOCK_ROWS > shares.sum()
    while shares.sum() > BLOCK_ROWS:
        shares[np.argmax(shares)] -= 1
    return shares.tolist()
