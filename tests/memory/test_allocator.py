"""The rules of torch's CUDA allocator, one by one, and what they made of runs on an H200 that was limited to 24 GiB."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_train.memory.allocator import CachingAllocator, OutOfMemory
from flash_train.memory.cards import CARDS, GIB, MIB, Card, card_of
from flash_train.memory.live import round_up
from flash_train.memory.predict import Predictor
from flash_train.memory.replay import UNLIMITED, Replay
from flash_train.models.gpt import GPT
from flash_train.training.module import LanguageModel
from flash_train.training.optimizer import adamw
from tests.memory.points import Point, batch_of, module_of
from tests.memory.toys import Language

KIB = 2**10


@pytest.mark.parametrize(
    "asked, allocated, reserved",
    [
        (0, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # a rest of 1 MiB is not cut off
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),
        (13 * MIB, 14 * MIB, 14 * MIB),
    ],
)
def test_a_block_has_a_segment_of_its_size_class(asked: int, allocated: int, reserved: int) -> None:
    allocator = CachingAllocator(GIB)
    allocator.alloc(asked)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


def test_small_blocks_share_two_mebibytes_and_take_nothing_of_the_large_ones() -> None:
    allocator = CachingAllocator(GIB)
    allocator.free(allocator.alloc(20 * MIB))
    for _ in range(4):
        allocator.alloc(512 * KIB)
    assert allocator.reserved == 22 * MIB
    allocator.alloc(512)
    assert allocator.reserved == 24 * MIB


def test_the_smallest_free_block_that_holds_it_is_taken() -> None:
    allocator = CachingAllocator(GIB)
    for block in [allocator.alloc(size * MIB) for size in (40, 14, 30)]:
        allocator.free(block)
    allocator.alloc(13 * MIB)
    allocator.alloc(30 * MIB)
    allocator.alloc(40 * MIB)
    assert allocator.reserved == 84 * MIB


def test_free_neighbours_become_one_block_and_others_do_not() -> None:
    allocator = CachingAllocator(GIB)
    allocator.free(allocator.alloc(60 * MIB))
    first, second, third = (allocator.alloc(20 * MIB) for _ in range(3))
    allocator.free(first)
    allocator.free(third)
    hole = allocator.alloc(40 * MIB)  # 40 MiB are free, in two pieces
    assert allocator.reserved == 100 * MIB
    allocator.free(hole)
    allocator.free(second)
    allocator.alloc(60 * MIB)
    assert allocator.reserved == 100 * MIB and allocator.allocated == 60 * MIB


def test_at_the_limit_whole_free_segments_are_given_back_and_split_ones_are_not() -> None:
    allocator = CachingAllocator(100 * MIB)
    allocator.free(allocator.alloc(40 * MIB))
    allocator.free(allocator.alloc(50 * MIB))
    kept = allocator.alloc(20 * MIB)  # of the 40
    allocator.alloc(60 * MIB)
    assert (allocator.retries, allocator.reserved, allocator.peak_reserved) == (1, 100 * MIB, 100 * MIB)
    with pytest.raises(OutOfMemory) as error:
        allocator.alloc(21 * MIB)  # 20 are free
    assert error.value.asked == 21 * MIB
    allocator.free(kept)
    allocator.alloc(40 * MIB)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_replay_leaves_what_training_keeps_however_many_steps_it_takes(accumulate: int) -> None:
    predictor = Predictor(Language("sdpa"), optimizer=partial(adamw, lr=1e-4, fused=True), accumulate=accumulate,
                          precision="bf16-mixed", card=CARDS["h100"])  # fmt: skip
    batch = {name: torch.zeros(2, 16, dtype=torch.int64) for name in ("inputs", "targets")}
    prediction = predictor(batch)
    assert prediction.replay is not None
    kept = [
        block for block in prediction.phases["optimizer"].blocks
        if block.category in ("parameters", "gradients", "optimizer state")
    ]  # fmt: skip
    training = prediction.replay.train(UNLIMITED, cublas=64 * MIB)
    assert training.allocator.allocated == sum(round_up(block.size, 512) for block in kept) + 64 * MIB
    assert prediction.peak - prediction.smooth <= 4 * 512, "small blocks are cut"


def test_of_a_gpu_without_a_name_cublas_may_take_what_any_takes() -> None:
    assert card_of(24 * GIB).cublas_sizes == (CARDS["l4"].cublas, CARDS["h200"].cublas)
    assert CARDS["h200"].cublas_sizes == (64 * MIB,)


H200 = replace(CARDS["h200"], memory=24 * GIB)
LIMIT = H200.memory - H200.context


def replay(arm: str, length: int, card: Card = H200) -> Replay:
    """Of GPT-2 124M, one row in each micro-batch of several."""
    with FakeTensorMode():
        model: Any = GPT(vocabulary_size=50304, context_length=length, implementation=arm,
                         width=768, depth=12, heads=12)  # fmt: skip
        module = LanguageModel(model, optimizer=partial(adamw, lr=1e-4, fused=True))
    predictor = Predictor(module, precision="bf16-mixed", accumulate=2, card=card)
    batch = {name: torch.empty(1, length, dtype=torch.int64, device="meta") for name in ("inputs", "targets")}
    found = predictor(batch).replay
    assert found is not None
    return found


@pytest.mark.parametrize("arm, length, asked", [("naive", 4480, 860), ("naive", 4928, 1112), ("flash", 25280, 4851)])
def test_a_run_that_died_on_an_h200_of_24_gib_dies_of_the_same_block(arm: str, length: int, asked: int) -> None:
    found = replay(arm, length)
    with pytest.raises(OutOfMemory) as error:
        found.train(LIMIT, cublas=H200.cublas)
    assert round(error.value.asked / MIB) == asked
    assert found.reserved(LIMIT) > LIMIT


@pytest.mark.parametrize("arm", ["sdpa", "flash"])
def test_a_run_that_fit_an_h200_of_24_gib_fits(arm: str) -> None:
    found = replay(arm, 22976)
    assert found.reserved(LIMIT) <= LIMIT
    assert max(found.train(LIMIT, cublas=H200.cublas).phases.values()) / GIB == pytest.approx(22.56, abs=0.01)


MEASURED = {
    1_396_557_312: Point(factor="", attention="naive", rows=2, precision="bf16-true", checkpointing="block",
                         chunk_rows=1000, dropout=0.1),
    2_157_892_096: Point(factor="", model="llama_124m", attention="flash", rows=10, depth=4, precision="bf16-true",
                         optimizer="sgd", accumulate=3, chunk_rows=1000),
    3_984_628_224: Point(factor="", model="llama_124m", attention="flash", rows=11, depth=9, optimizer="sgd",
                         checkpointing="selective", checkpoint_every=2, accumulate=3, chunk_rows=2048, dropout=0.1),
    3_986_328_064: Point(factor="", model="llama_124m", attention="sdpa", length=835, rows=10, optimizer="sgd",
                         checkpointing="selective", checkpoint_every=2, chunk_rows=2048, half_residual=True),
}  # fmt: skip
"""What `torch.cuda.max_memory_allocated` said of runs by tests/memory/accuracy.py on an NVIDIA H200, in bytes."""


@pytest.mark.parametrize("measured", MEASURED)
def test_what_the_allocator_leaves_uncut_is_in_the_peak_as_it_was_on_an_h200(measured: int) -> None:
    point = MEASURED[measured]
    with torch.device("meta"):
        module, batch = module_of(point), batch_of(point)
    predictor = Predictor(module, precision=point.precision, accumulate=point.accumulate, card=CARDS["h200"])
    prediction = predictor(batch)
    assert prediction.smooth < 0.994 * measured
    assert prediction.peak == pytest.approx(measured, rel=0.004)
    assert prediction.categories["uncut"] == prediction.peak - prediction.smooth
    assert sum(prediction.categories.values()) == prediction.peak
    assert predictor.breakdown(batch).peak.measured == prediction.peak
