"""A random order of n things that is computed, number by number, and never held: a Feistel network on 0 ... n-1."""

import hashlib
import math

import numpy as np

ROUNDS = 8


class Permutation:
    """One of the orders of 0 ... `size`-1, a pure function of (size, key) on every machine; its memory is a few bytes.

    A number is a pair (high, low) of about sqrt(size) values each, and a round adds a hash of one to the other. The
    grid of pairs is a little larger than `size`: who lands outside walks on until it is inside, which keeps the map
    one-to-one (M. Luby and C. Rackoff, 1988; J. Black and P. Rogaway, 2002).
    """

    def __init__(self, size: int, key: str) -> None:
        self.size = size
        self._highs = math.isqrt(size - 1) + 1
        self._lows = -(-size // self._highs)
        seeds = hashlib.shake_256(key.encode()).digest(8 * ROUNDS)
        self._seeds = np.frombuffer(seeds, "<u8").astype(np.uint64)

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        """Where each of `numbers` (integers in [0, size), any shape) goes, int64."""
        places = self._walk(numbers.astype(np.uint64))
        while (outside := places >= self.size).any():
            places[outside] = self._walk(places[outside])
        return places.astype(np.int64)

    def _walk(self, numbers: np.ndarray) -> np.ndarray:
        highs, lows = np.uint64(self._highs), np.uint64(self._lows)
        high, low = np.divmod(numbers, lows)
        for one, other in self._seeds.reshape(-1, 2):
            high = (high + _hash(low ^ one)) % highs
            low = (low + _hash(high ^ other)) % lows
        return high * lows + low


def _hash(x: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64 (G. Steele et al., 2014), less its top bit so that a sum does not overflow."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) >> np.uint64(1)
