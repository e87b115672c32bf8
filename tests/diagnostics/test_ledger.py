"""The ledger gives overlapping scopes their own peaks from one mark."""

import logging

import pytest
import torch
from tiny_training import FakeAllocator

from flash_train.diagnostics.counters import allocator_of
from flash_train.diagnostics.ledger import PeakLedger, ledger_of


def test_an_inner_scope_does_not_hide_the_outer_ones_peak() -> None:
    allocator = FakeAllocator()
    ledger = PeakLedger(allocator)
    with ledger.scope("run") as run:
        allocator.spike(701)
        with ledger.scope("step") as step:
            allocator.spike(307)
            with ledger.scope("forward") as forward:
                allocator.spike(13)
        allocator.spike(97)
    assert (forward.allocated, step.allocated, run.allocated) == (13, 307, 701)
    assert run.reserved == 701


def test_a_scope_sees_nothing_from_before_it_and_nothing_after() -> None:
    allocator = FakeAllocator()
    ledger = PeakLedger(allocator)
    allocator.spike(1009)
    allocator.allocate(11)
    first = ledger.open("first")
    allocator.spike(20)
    second = ledger.open("second", closing=first)
    allocator.spike(500)
    ledger.close(second)
    assert (first.allocated, second.allocated) == (31, 511)


def test_scopes_may_end_in_any_order_but_once() -> None:
    ledger = PeakLedger(FakeAllocator())
    first, second = ledger.open("first"), ledger.open("second")
    ledger.close(first)
    ledger.close(second)
    with pytest.raises(ValueError, match="'first' is not open"):
        ledger.close(first)


def test_a_reset_from_outside_is_counted_and_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    allocator = FakeAllocator()
    ledger = PeakLedger(allocator)
    allocator.allocate(1000)
    ledger.fold()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            allocator.free(100)
            allocator.reset_peaks()
            ledger.fold()
    assert ledger.outside_resets == 2
    assert len(caplog.messages) == 1 and "ledger_of" in caplog.text


def test_our_own_resets_are_not_taken_for_somebody_elses() -> None:
    allocator = FakeAllocator()
    ledger = PeakLedger(allocator)
    for size in (1000, 10, 500, 1):
        with ledger.scope("step"):
            allocator.spike(size)
    assert ledger.outside_resets == 0


def test_a_cpu_has_no_mark_to_read() -> None:
    assert allocator_of(torch.device("cpu")) is None
    assert ledger_of(torch.device("cpu")) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpu_allocators_peaks_are_read_to_its_rounding() -> None:
    device = torch.device("cuda", 0)
    ledger = ledger_of(device)
    assert ledger is not None and ledger_of(device) is ledger
    base = ledger.fold().current[0]
    with ledger.scope("outer") as outer:
        torch.empty(3 * 2**20, dtype=torch.uint8, device=device)
        with ledger.scope("inner") as inner:
            torch.empty(2**20 - 3, dtype=torch.uint8, device=device)
    assert outer.allocated - base == 3 * 2**20
    assert inner.allocated - base == 2**20  # blocks are multiples of 512 bytes
