"""SpeedMonitor: what counts as time, what is left out, and what it divides by what."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny_training import B, FakeTime, RecordingLogger, T, TinyModule, ValidatedModule, batches, trainer

from flash_train.diagnostics import clock, speed
from flash_train.diagnostics.memory import MemoryMonitor
from flash_train.diagnostics.speed import SpeedMonitor
from flash_train.diagnostics.tokens import tokens_in


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    """The monitors' clock: it stands still but for what a test puts into it."""
    fake = FakeTime()
    monkeypatch.setattr(clock, "time", fake)
    monkeypatch.setattr(speed, "time", fake)
    return fake


class SlowLoader:
    """Needs `seconds` for each batch."""

    def __init__(self, time: FakeTime, seconds: float, count: int) -> None:
        self.time, self.seconds, self.batches = time, seconds, batches(count)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            self.time.sleep(self.seconds)
            yield batch


def sleeping(time: FakeTime, seconds: dict[str, float]) -> Any:
    return lambda where: time.sleep(seconds.get(where, 0.0))


def test_a_run_of_twenty_steps_gives_all_figures(time: FakeTime) -> None:
    recording = RecordingLogger()
    monitor = SpeedMonitor(device_peak_flops=1e6)
    module = TinyModule(during=sleeping(time, {"forward": 0.25, "backward": 0.5, "optimizer": 0.05}))
    module.flops_per_token = 101  # pyright: ignore[reportArgumentType]
    fit = trainer(monitor, max_steps=20, log_every_n_steps=10, logger=recording)
    fit.fit(module, SlowLoader(time, 0.2, 20))
    rate = B * T / 1.0
    assert monitor.result() == pytest.approx(
        {
            "tokens_per_second": rate,
            "tokens_per_second_per_device": rate,
            "step_ms": 800.0,
            "data_wait_percent": 20.0,
            "mfu_percent": 100 * rate * 101 / 1e6,
        }
    )
    for name, value in monitor.result().items():
        assert recording.values_of(f"speed/{name}") == pytest.approx([value, value])
        assert recording.steps_of(f"speed/{name}") == recording.steps_of("train/loss") == [9, 19]
        assert fit.callback_metrics[f"speed/{name}"].item() == pytest.approx(value)


def test_slow_first_steps_do_not_count(time: FakeTime) -> None:
    waits = iter([100.0, 10.0, 5.0])
    monitor = SpeedMonitor()
    trainer(monitor, max_steps=8).fit(
        TinyModule(during=lambda where: time.sleep(next(waits, 0.5) * (where == "forward"))), batches(8)
    )
    assert monitor.result()["step_ms"] == pytest.approx(500.0)


def test_validation_between_steps_does_not_count(time: FakeTime) -> None:
    monitor = SpeedMonitor()
    during = sleeping(time, {"forward": 1.0, "validation": 1000.0})
    trainer(monitor, max_steps=8, val_check_interval=1).fit(ValidatedModule(during=during), batches(8), batches(2))
    assert monitor.result()["tokens_per_second"] == pytest.approx(B * T)


@pytest.mark.parametrize("weights_only", [False, True])
def test_writing_checkpoints_does_not_count(time: FakeTime, tmp_path: Path, weights_only: bool) -> None:
    class Slow(ModelCheckpoint):
        def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
            super()._save_checkpoint(trainer, filepath)
            time.sleep(1000.0)

    monitor = SpeedMonitor()
    keep = Slow(tmp_path, every_n_train_steps=2, save_weights_only=weights_only)
    trainer(monitor, keep, max_steps=8, enable_checkpointing=True).fit(
        TinyModule(during=sleeping(time, {"forward": 1.0})), batches(8)
    )
    assert monitor.result()["tokens_per_second"] == pytest.approx(B * T)


def test_steps_that_torch_compile_compiles_in_do_not_count(time: FakeTime) -> None:
    class Compiled(TinyModule):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 5:
                torch.compile(lambda x: x + 1, backend="eager")(torch.ones(3))
                time.sleep(1000.0)

    monitor = SpeedMonitor()
    trainer(monitor, max_steps=8, log_every_n_steps=8).fit(
        Compiled(during=sleeping(time, {"forward": 1.0})), batches(8)
    )
    assert monitor.result()["tokens_per_second"] == pytest.approx(B * T)


def test_the_steps_of_the_memory_probe_do_not_count(time: FakeTime) -> None:
    steps = iter(range(8))
    during = lambda where: time.sleep((1000.0 if next(steps) in (4, 5) else 1.0) * (where == "forward"))  # noqa: E731
    monitor = SpeedMonitor()

    class Forward(TinyModule):
        def on_after_backward(self) -> None:
            pass

        def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
            pass

    trainer(monitor, MemoryMonitor(probe_step=5), max_steps=8).fit(Forward(during=during), batches(8))
    assert monitor.result()["tokens_per_second"] == pytest.approx(B * T)


def test_with_accumulation_a_step_is_all_its_micro_batches(time: FakeTime) -> None:
    recording = RecordingLogger()
    monitor = SpeedMonitor(warmup_steps=1)
    settings = {"accumulate_grad_batches": 3, "max_steps": 4, "logger": recording}
    trainer(monitor, **settings).fit(TinyModule(during=sleeping(time, {"forward": 1.0})), batches(12))
    assert monitor.result()["step_ms"] == pytest.approx(3000.0)
    assert monitor.result()["tokens_per_second"] == pytest.approx(B * T)
    assert recording.steps_of("speed/step_ms") == [1, 3]


def test_logging_and_other_callbacks_do_count(time: FakeTime) -> None:
    class Slow(pl.Callback):
        def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
            time.sleep(1.0)

    monitor = SpeedMonitor()
    trainer(monitor, Slow(), max_steps=8).fit(TinyModule(during=sleeping(time, {"forward": 1.0})), batches(8))
    assert monitor.result()["tokens_per_second"] == pytest.approx(B * T / 2)
    assert monitor.result()["step_ms"] == pytest.approx(1000.0)


def test_a_run_no_longer_than_its_warm_up_has_no_speed() -> None:
    monitor = SpeedMonitor()
    trainer(monitor, max_steps=3).fit(TinyModule(), batches(3))
    assert set(monitor.result().values()) == {None}


def test_all_ranks_together_and_the_slowest_of_them() -> None:
    monitor = SpeedMonitor(device_peak_flops=1000.0)
    ranks = {"tokens_per_second": [10.0, 30.0], "step_ms": [7.0, 5.0], "data_wait_percent": [1.0, 2.0]}
    metrics = monitor._combine(ranks | {"flops_per_token": [5.0, 5.0]})
    assert metrics == {
        "speed/tokens_per_second": 40.0,
        "speed/tokens_per_second_per_device": 20.0,
        "speed/step_ms": 7.0,
        "speed/data_wait_percent": 2.0,
        "speed/mfu_percent": 10.0,
    }


def test_tokens_are_found_in_any_batch() -> None:
    ids, floats = torch.zeros(3, 5, dtype=torch.int64), torch.zeros(7)
    assert tokens_in(ids) == 15
    assert tokens_in({"labels": ids[:1], "inputs": ids}) == 15
    assert tokens_in({"weights": floats, "input_ids": ids}) == 15
    assert tokens_in({"lengths": ids[0], "input_ids": ids}) == 15
    assert tokens_in([floats, (ids[:, :2], ids)]) == 6
    assert tokens_in({"inputs": floats, "targets": ids[:2]}) == 10
    assert tokens_in("text") == 0


def test_tokens_can_be_counted_by_the_user(time: FakeTime) -> None:
    monitor = SpeedMonitor(tokens_in_batch=lambda batch: 7)
    trainer(monitor, max_steps=5).fit(TinyModule(during=sleeping(time, {"forward": 1.0})), batches(5))
    assert monitor.result()["tokens_per_second"] == pytest.approx(7.0)


def test_a_warm_up_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="warmup_steps must be at least 0, got -1"):
        SpeedMonitor(warmup_steps=-1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_step_times_are_the_devices_own() -> None:
    class Busy(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            torch.cuda._sleep(50_000_000)  # cycles: some 25 to 40 ms, which the host does not wait for
            return super().training_step(batch, batch_idx)

    monitor = SpeedMonitor()
    trainer(monitor, accelerator="cuda", max_steps=20, log_every_n_steps=10).fit(Busy(), batches(20))
    step_ms = monitor.result()["step_ms"]
    assert step_ms is not None and 15 < step_ms < 100
    assert monitor.result()["tokens_per_second"] == pytest.approx(B * T / step_ms * 1e3, rel=0.1)
