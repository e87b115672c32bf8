"""Several processes: the maximum and which rank; and one that dies holds nobody up. Two, by gloo on a CPU."""

import csv
import json
import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger
from test_memory_monitor import OnAccelerator
from tiny_training import FakeAllocator, TinyModule, batches, trainer
from torch.multiprocessing.spawn import start_processes

from flash_train.diagnostics.ranks import Ranks

# Lightning forks from a process that has threads, as its users' notebooks do.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork\\(\\) may lead to deadlocks:DeprecationWarning")


def join(rank: int, folder: str, body) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    store = dist.distributed_c10d._get_default_store()
    ranks = Ranks("test", store=store, rank=rank, size=2, patience=timedelta(seconds=0.5))
    Path(folder, f"{rank}.json").write_text(json.dumps(body(rank, ranks)))
    os._exit(0)  # as a process that is killed: it says goodbye to nobody


def run(folder: Path, body) -> list[list]:
    start_processes(join, args=(str(folder), body), nprocs=2, start_method="fork")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def everybody(rank: int, ranks: Ranks) -> list:
    found = []
    for turn in range(12):  # more than the store keeps answers of
        if turn == 3 and rank == 1:
            time.sleep(0.2)  # late, within the others' patience
        found.append(ranks.gather([float(turn), 10.0 + rank]))
    return found


def test_every_rank_gets_the_numbers_of_all_in_their_order(tmp_path: Path) -> None:
    expected = [[[float(turn), 10.0], [float(turn), 11.0]] for turn in range(12)]
    assert run(tmp_path, everybody) == [expected, expected]


def one_dies(rank: int, ranks: Ranks) -> list:
    found = []
    for turn in range(3):
        if rank == 1 and turn == 1:
            return found
        begin = time.monotonic()
        [mine, other] = ranks.gather([float(rank)])
        found.append([mine, [str(x) for x in other], time.monotonic() - begin, sorted(ranks.missing)])
    return found


def test_a_rank_that_died_is_waited_for_once_and_not_long(tmp_path: Path) -> None:
    (first, second, third), _ = run(tmp_path, one_dies)
    assert first[:2] == [[0.0], ["1.0"]] and first[3] == []
    for each in (second, third):
        assert each[:2] == [[0.0], ["nan"]] and each[3] == [1]
    assert 0.5 <= second[2] < 3 and third[2] < 0.3


def one_is_late(rank: int, ranks: Ranks) -> list:
    found = []
    for turn in range(3):
        if (turn, rank) in ((1, 1), (2, 0)):
            time.sleep(1.0)  # rank 1 comes after rank 0 has gone on, and then rank 0 lets it catch up
        found.append([str(x) for row in ranks.gather([float(turn)]) for x in row])
    return found


def test_a_rank_that_was_late_is_waited_for_again(tmp_path: Path) -> None:
    expected = [["0.0", "0.0"], ["1.0", "nan"], ["2.0", "2.0"]]
    assert run(tmp_path, one_is_late) == [expected, expected]


def first_dies(rank: int, ranks: Ranks) -> list:
    if rank == 0:
        return []
    begin = time.monotonic()
    answers = [ranks.gather([7.0]) for _ in range(2)]
    return [[str(x) for row in answer for x in row] for answer in answers] + [time.monotonic() - begin]


def test_without_rank_0_each_has_its_own_numbers(tmp_path: Path) -> None:
    _, (first, second, took) = run(tmp_path, first_dies)
    assert first == second == ["nan", "7.0"] and took < 3


def test_in_data_parallel_training_the_highest_rank_is_logged_with_its_number(tmp_path: Path) -> None:
    allocator = FakeAllocator()

    def during(where: str) -> None:
        allocator.spike(2**20 * (1 + dist.get_rank() if dist.is_initialized() else 1))

    logger = CSVLogger(tmp_path)
    fit = trainer(OnAccelerator(allocator), devices=2, strategy="ddp_fork", logger=logger)
    torch.set_num_threads(1)  # a fork has one thread, whatever the pool of its parent had
    fit.fit(TinyModule(during=during), batches(8))
    with next(tmp_path.rglob("metrics.csv")).open() as file:
        rows = [row for row in csv.DictReader(file) if row["memory/peak_allocated_gib"]]
    assert [(float(row["memory/peak_allocated_gib"]), row["memory/peak_allocated_rank"]) for row in rows] == [
        (2 / 1024, "1.0"),
        (2 / 1024, "1.0"),
    ]
