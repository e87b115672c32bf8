"""Which window of the text is which row of training: a pure function of the seed, without end."""

import hashlib

import numpy as np


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
        self._latest: tuple[int, np.ndarray] | None = None

    def starts(self, rows: np.ndarray) -> np.ndarray:
        """First tokens [B] of the windows at these rows [B]."""
        epochs, within = np.divmod(rows, self.windows)
        starts = np.empty_like(rows)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            starts[here] = self._epoch(int(epoch))[within[here]]
        return starts

    def _epoch(self, epoch: int) -> np.ndarray:
        if self._latest is None or self._latest[0] != epoch:
            key = hashlib.sha256(f"{self.seed}/{epoch}".encode()).digest()
            # numpy promises RandomState's streams for good, and a Generator's only within a version.
            random = np.random.RandomState(np.frombuffer(key, np.dtype("<u4")))
            phase = random.randint(self.phases)
            self._latest = epoch, phase + self.sequence_length * random.permutation(self.windows)
        return self._latest[1]
