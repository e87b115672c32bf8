"""What the monitors do in a step, counted: the eager step of a small model waits for every microsecond of the host."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from test_memory_monitor import OnAccelerator
from tiny_training import FakeAllocator, RecordingLogger, TinyModule, batches, trainer

from flash_train.diagnostics import leaks
from flash_train.diagnostics.in_use import AllocatorGauge
from flash_train.diagnostics.leaks import LeakDetector
from flash_train.diagnostics.memory import MemoryMonitor
from flash_train.diagnostics.speed import SpeedMonitor

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Counts(pl.Callback):
    """`counted()` between the ends of two steps, by step."""

    def __init__(self, counted: Any) -> None:
        self.counted, self.before, self.of_step = counted, 0, []

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        now = self.counted()
        self.of_step.append(now - self.before)
        self.before = now


def monitors(memory: MemoryMonitor) -> list[pl.Callback]:
    return [memory, SpeedMonitor(), LeakDetector()]


def test_the_allocator_is_read_five_times_in_one_step_of_ten_once_in_two_and_else_never(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Counting(FakeAllocator):
        reads = 0

        def read(self) -> Any:
            self.reads += 1
            return super().read()

    memory = OnAccelerator(allocator := Counting())
    monkeypatch.setattr(leaks, "gauge_of", lambda device: AllocatorGauge(memory.ledger, device))
    counts = Counts(lambda: allocator.reads)
    settings = {"max_steps": 30, "log_every_n_steps": 10}
    trainer(*monitors(memory), counts, **settings).fit(TinyModule(), batches(30))
    assert counts.of_step[1:10] == [4, 4, 4, 4, 0, 0, 0, 0, 1]  # the phases of the first steps; the window's end
    assert counts.of_step[10:20] == [5, 0, 0, 0, 0, 1, 0, 0, 0, 1]  # the phases, and what is in use every fifth step
    assert counts.of_step[20:] == counts.of_step[10:20]


def test_the_monitors_numbers_come_with_the_loss_in_one_call_and_nothing_of_them_stays_in_lightnings_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results: Any = _ResultCollection
    logged, log = [], results.log

    def counted(self: Any, fx: str, name: str, *args: Any, **more: Any) -> None:
        logged.append(name)
        log(self, fx, name, *args, **more)

    monkeypatch.setattr(results, "log", counted)
    recording = RecordingLogger()
    fit = trainer(*monitors(MemoryMonitor()), max_steps=8, log_every_n_steps=4, logger=recording)
    fit.fit(TinyModule(), batches(8))
    assert logged == ["train/loss"] * 8
    first, second = ({*metrics} for step, metrics in recording.calls if step in (3, 7) and "train/loss" in metrics)
    assert first & second >= {"memory/peak_allocated_gib", "memory/forward/peak_allocated_gib"}
    assert "speed/step_ms" in second and len([step for step, _ in recording.calls if step == 3]) == 1
    for name in second - {"epoch"}:  # as a ModelCheckpoint and a progress bar read them
        assert isinstance(fit.callback_metrics[name], torch.Tensor) and isinstance(
            fit.logged_metrics[name], torch.Tensor
        )


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_the_statistics_are_read_less_than_once_a_step_and_nobody_waits(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(lambda: torch.cuda.set_sync_debug_mode("default"))
    reads, read = [], torch.cuda.memory_stats_as_nested_dict
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda *args: reads.append(1) or read(*args))

    class Mode(pl.Callback):
        def __init__(self, mode: str) -> None:
            for hook in ("train_batch_start", "before_backward", "before_optimizer_step", "train_batch_end"):
                setattr(self, f"on_{hook}", lambda *_: torch.cuda.set_sync_debug_mode(mode))

    watched: list[Any] = monitors(MemoryMonitor())
    counts = Counts(lambda: len(reads))
    callbacks = [Mode("error"), *watched, Mode("default"), counts]
    trainer(*callbacks, accelerator="cuda", max_steps=30, log_every_n_steps=10).fit(TinyModule(), batches(30))
    assert not any(each._failed for each in watched)
    assert counts.of_step[10:20] == counts.of_step[20:] == [5, 0, 0, 0, 0, 1, 0, 0, 0, 1]
