"""A few numbers of every rank for every rank, which one that died or is late cannot hold up."""

import array
import logging
import math
import time
from collections import Counter
from datetime import timedelta
from typing import Any

import torch.distributed as dist

logger = logging.getLogger(__name__)

PATIENCE = timedelta(seconds=30)
_KEPT = 10  # exchanges whose answer stays in the store, for a rank that comes late
_LINKS: Counter[str] = Counter()  # by name: each run's exchanges have keys of their own


class Ranks:
    """`gather` a list of floats from all ranks, through the process group's key-value store on the host.

    No collective, which would wait for a rank that is gone as long as the process group does, and on a GPU for all
    that was queued there. Rank 0 collects and answers; who does not come within `patience` is left out, said once, and
    not waited for again until what it said last has come after all. All ranks must make the links of one `name`, and
    call `gather`, in the same order.
    """

    def __init__(self, name: str, *, store: Any, rank: int, size: int, patience: timedelta = PATIENCE) -> None:
        self._store: Any = store
        self._rank, self._size = rank, size
        self._patience = patience.total_seconds()
        self._prefix = f"flash_train/{name}/{_LINKS[name]}"
        _LINKS[name] += 1
        self._turn = 0
        self.missing: set[int] = set()
        """The ranks that did not come the last time."""

    def gather(self, values: list[float]) -> list[list[float]]:
        """The values of each rank, in order; NaN for a rank that did not come."""
        turn, self._turn = self._turn, self._turn + 1
        unknown = [math.nan] * len(values)
        rows = [values if rank == self._rank else unknown for rank in range(self._size)]
        if self._store is None:
            return rows
        try:
            return self._collect(turn, rows) if self._rank == 0 else self._ask(turn, rows)
        except Exception as error:  # the store is gone, and rank 0 with it
            self._store = None
            self._note(set(range(self._size)) - {self._rank}, f"{type(error).__name__}: {error}".splitlines()[0])
            return rows

    def _collect(self, turn: int, rows: list[list[float]]) -> list[list[float]]:
        wanted, ends = set(range(1, self._size)), time.monotonic() + self._patience
        for rank in sorted(self.missing):
            late = f"{self._prefix}/{turn - 1}/{rank}"
            if self._store.check([late]):
                self._store.delete_key(late)
                self.missing.discard(rank)
        while not self._take(turn, wanted, rows) and time.monotonic() < ends and not wanted <= self.missing:
            time.sleep(0.002)
        self._note(wanted, f"nothing came within {self._patience:g} s")
        self._store.set(f"{self._prefix}/{turn}", _packed([x for row in rows for x in row]))
        if turn >= _KEPT:
            self._store.delete_key(f"{self._prefix}/{turn - _KEPT}")
        return rows

    def _take(self, turn: int, wanted: set[int], rows: list[list[float]]) -> bool:
        """Whatever has come of `wanted`, which it leaves; whether that was all."""
        for rank in sorted(wanted):
            key = f"{self._prefix}/{turn}/{rank}"
            if self._store.check([key]):
                rows[rank] = _unpacked(self._store.get(key))
                self._store.delete_key(key)
                wanted.discard(rank)
        return not wanted

    def _ask(self, turn: int, rows: list[list[float]]) -> list[list[float]]:
        self._store.set(f"{self._prefix}/{turn}/{self._rank}", _packed(rows[self._rank]))
        key, ends = f"{self._prefix}/{turn}", time.monotonic() + 1.5 * self._patience  # rank 0 may wait for another
        if 0 in self.missing and self._store.check([f"{self._prefix}/{turn - 1}"]):
            self.missing.discard(0)
        while not self._store.check([key]):
            if 0 in self.missing or time.monotonic() > ends:
                self._note({0}, f"nothing came within {1.5 * self._patience:g} s")
                return rows
            time.sleep(0.002)
        self._note(set(), "")
        width, answer = len(rows[0]), _unpacked(self._store.get(key))
        return [answer[rank * width : (rank + 1) * width] for rank in range(self._size)]

    def _note(self, missing: set[int], why: str) -> None:
        gone = sorted(missing - self.missing)
        if gone:
            names = f"{'rank' if len(gone) == 1 else 'ranks'} {', '.join(map(str, gone))}"
            logger.warning("Numbers are without %s from here on: %s.", names, why)
        self.missing = set(missing)


def link(name: str) -> Ranks | None:
    """The link of this name between the ranks of the default process group; None where there is none."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    store = dist.distributed_c10d._get_default_store()
    return Ranks(name, store=store, rank=dist.get_rank(), size=dist.get_world_size())


def _packed(values: list[float]) -> bytes:
    return array.array("d", values).tobytes()


def _unpacked(raw: bytes) -> list[float]:
    values = array.array("d")
    values.frombytes(bytes(raw))
    return values.tolist()
