"""MemoryMonitor in somebody's LightningModule: what it logs, what it returns, and that it never disturbs."""

import csv
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from tiny_training import FakeAllocator, RecordingLogger, TinyModule, ValidatedModule, batches, trainer
from torch import Tensor

from flash_train.diagnostics.ledger import PeakLedger
from flash_train.diagnostics.memory import MemoryMonitor
from flash_train.diagnostics.meters import AllocatorMeter

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class OnAccelerator(MemoryMonitor):
    """Measures as on an accelerator, whose allocator the test plays."""

    def __init__(self, allocator: FakeAllocator, **settings: Any) -> None:
        super().__init__(**settings)
        self.ledger = PeakLedger(allocator)

    def _choose_meter(self, trainer: Any) -> AllocatorMeter:
        return self._meter_on(self.ledger, trainer)


def spikes(allocator: FakeAllocator, *sizes: dict[str, int]) -> Any:
    """Allocates and frees the n-th batch's bytes in each phase; the last entry repeats."""
    seen: dict[str, int] = {}

    def during(where: str) -> None:
        seen[where] = seen.get(where, -1) + 1
        allocator.spike(sizes[min(seen[where], len(sizes) - 1)].get(where, 0))

    return during


def test_on_a_cpu_one_step_is_measured_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    monitor = MemoryMonitor()
    with caplog.at_level(logging.INFO):
        module = ValidatedModule()
        trainer(monitor, val_check_interval=2).fit(module, batches(9), batches(2))
    result = monitor.result()
    parameters = sum(p.nbytes for p in module.parameters())
    assert (result["device"], result["source"], result["peak_reserved_bytes"]) == ("cpu", "profiler", None)
    assert all(result["phases"][name] > 3 * parameters for name in ("forward", "backward", "optimizer", "validation"))
    assert result["phases"]["optimizer"] >= 4 * parameters  # weights, gradients and AdamW's two moments
    assert result["peak_allocated_bytes"] == max(result["phases"].values())
    assert "step 2 measured on the CPU" in caplog.text
    assert [step for step in range(9) if monitor.disturbs_timing(step)] == []  # training is over


def test_the_prediction_stands_beside_the_measured_peak_and_changes_no_number() -> None:
    losses, recording = [], RecordingLogger()
    for predict in (False, True):
        torch.manual_seed(2)
        monitor, module = MemoryMonitor(predict=predict), TinyModule()
        trainer(monitor, logger=recording, accumulate_grad_batches=2).fit(module, batches(8))
        losses.append(recording.values_of("train/loss")[-1])
    result = monitor.result()
    assert abs(result["prediction_error_percent"]) < 1 and result["prediction_refusal"] is None
    phases = result["prediction"]["phases"]
    assert result["predicted_bytes"] == max(phase["measured"] for phase in phases.values())
    assert [x["change"] for x in result["advice"]] == ["cross-entropy over 2,048 rows at a time"]
    assert recording.values_of("memory/predicted_gib") == [result["predicted_bytes"] / 2**30] * 2
    assert losses[0] == losses[1]


def test_what_cannot_be_predicted_is_said_once_and_is_trained(caplog: pytest.LogCaptureFixture) -> None:
    class Counts(TinyModule):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * int((batch["targets"] > 0).sum())

    monitor = MemoryMonitor(predict=True)
    trainer(monitor).fit(Counts(), batches(4))
    result = monitor.result()
    assert result["predicted_bytes"] is None and result["prediction_error_percent"] is None
    assert result["prediction_refusal"].startswith("training_step must not depend on the values of tensors, and aten.")
    assert result["peak_allocated_bytes"] > 0 and caplog.text.count("No peak memory is predicted: training_step") == 1


def test_a_small_run_after_a_big_one_starts_from_clean_peaks() -> None:
    def peak_of(width: int) -> int:
        monitor = MemoryMonitor()
        trainer(monitor, max_steps=3).fit(TinyModule(width=width), batches(3))
        return monitor.result()["peak_allocated_bytes"]

    alone = peak_of(33)
    assert peak_of(1009) > 5 * alone
    assert peak_of(33) == alone


def test_the_second_fit_of_one_monitor_starts_from_clean_peaks() -> None:
    allocator = FakeAllocator()
    monitor = OnAccelerator(allocator)
    for size in (5003, 101):
        trainer(monitor).fit(TinyModule(during=spikes(allocator, {"forward": size})), batches(4))
        assert monitor.result()["peak_allocated_bytes"] == size


def test_every_logger_gets_memory_under_the_step_number_of_the_loss(tmp_path: Path) -> None:
    recording = RecordingLogger()
    loggers = [CSVLogger(tmp_path), recording]
    trainer(MemoryMonitor(probe_step=1), max_steps=6, logger=loggers).fit(TinyModule(), batches(6))
    key = "memory/peak_allocated_gib"
    assert recording.steps_of(key) == recording.steps_of("train/loss") == [1, 3, 5]
    with next(tmp_path.rglob("metrics.csv")).open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows if row[key]] == [row["step"] for row in rows if row["train/loss"]]


def test_a_run_too_short_to_log_still_reports_at_its_last_step() -> None:
    recording = RecordingLogger()
    monitor = MemoryMonitor()
    trainer(monitor, max_steps=1, log_every_n_steps=50, logger=recording).fit(TinyModule(), batches(50))
    assert recording.steps_of("memory/peak_allocated_gib") == [0]
    assert monitor.result()["peak_allocated_bytes"] > 0


def test_windows_and_phases_each_have_their_own_peak() -> None:
    allocator, recording = FakeAllocator(), RecordingLogger()
    allocator.allocate(1000)
    steps = [
        {"forward": 2**20, "backward": 2**22, "optimizer": 2**21},
        {"forward": 2**21},
        {"forward": 2**18, "backward": 2**17, "optimizer": 2**16},
    ]
    module = TinyModule(during=spikes(allocator, *steps))
    monitor = OnAccelerator(allocator)
    trainer(monitor, logger=recording).fit(module, batches(4))
    in_bytes = {
        name: [value * 2**30 - 1000 for value in recording.values_of(f"memory/{name}peak_allocated_gib")]
        for name in ("", "forward/", "backward/", "optimizer/")
    }
    assert in_bytes[""] == [2**22, 2**18]
    assert in_bytes["forward/"] == [2**21, 2**18]
    assert in_bytes["backward/"] == [2**22, 2**17]
    assert in_bytes["optimizer/"] == [2**21, 2**16]
    assert recording.values_of("memory/peak_reserved_gib") == [(2**22 + 1000) / 2**30] * 2
    assert monitor.result()["phases"] == {
        "forward": 2**21 + 1000,
        "backward": 2**22 + 1000,
        "optimizer": 2**21 + 1000,
        "validation": None,
    }


def test_with_accumulation_a_peak_is_over_all_micro_batches() -> None:
    allocator, recording = FakeAllocator(), RecordingLogger()
    module = TinyModule(during=spikes(allocator, {"forward": 11}, {"forward": 5003}, {"forward": 7}))
    monitor = OnAccelerator(allocator)
    settings = {"accumulate_grad_batches": 3, "max_steps": 2, "log_every_n_steps": 1, "logger": recording}
    trainer(monitor, **settings).fit(module, batches(6))
    assert recording.steps_of("memory/peak_allocated_gib") == [0, 1]
    assert [round(v * 2**30) for v in recording.values_of("memory/forward/peak_allocated_gib")] == [5003, 7]


def test_validation_has_its_own_phase_and_the_sanity_check_none() -> None:
    allocator = FakeAllocator()
    during = spikes(allocator, {"validation": 90_001}, {"validation": 701})  # the first is the sanity check
    monitor = OnAccelerator(allocator)
    trainer(monitor, num_sanity_val_steps=1, val_check_interval=2).fit(
        ValidatedModule(during=during), batches(4), batches(1)
    )
    assert monitor.result()["phases"]["validation"] == 701
    assert monitor.result()["peak_allocated_bytes"] == 701


def test_phases_can_be_thinned_out_without_losing_the_windows_peak() -> None:
    allocator = FakeAllocator()
    during = spikes(allocator, {"forward": 3}, {"forward": 907}, {"forward": 5})
    monitor = OnAccelerator(allocator, phases_every_n_steps=2)
    trainer(monitor).fit(TinyModule(during=during), batches(4))
    assert monitor.result()["phases"]["forward"] == 5
    assert monitor.result()["peak_allocated_bytes"] == 907


def test_by_default_phases_are_those_of_the_first_five_steps_and_of_one_step_in_each_window() -> None:
    allocator, recording = FakeAllocator(), RecordingLogger()
    during = spikes(allocator, *({"forward": 2**step} for step in range(25)))
    trainer(OnAccelerator(allocator), max_steps=25, log_every_n_steps=4, logger=recording).fit(
        TinyModule(during=during), batches(25)
    )
    forward = {
        step: round(metrics["memory/forward/peak_allocated_gib"] * 2**30)
        for step, metrics in recording.calls
        if "memory/forward/peak_allocated_gib" in metrics
    }
    assert forward == {3: 2**3, 7: 2**4, 11: 2**8, 15: 2**12, 19: 2**16, 23: 2**20, 24: 2**24}


def test_manual_optimization_is_one_phase() -> None:
    class Manual(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            optimizer = self.optimizers()
            assert not isinstance(optimizer, list)
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            optimizer.step()
            return loss

    for monitor in (MemoryMonitor(), OnAccelerator(FakeAllocator())):
        trainer(monitor).fit(Manual(), batches(4))
        phases = monitor.result()["phases"]
        assert phases.pop("step") is not None
        assert set(phases.values()) == {None}


def test_an_allocator_reset_by_somebody_else_is_reported() -> None:
    allocator = FakeAllocator()
    allocator.allocate(1000)

    def during(where: str) -> None:
        if where == "backward":
            allocator.free(1)
            allocator.reset_peaks()

    monitor = OnAccelerator(allocator)
    trainer(monitor).fit(TinyModule(during=during), batches(4))
    assert monitor.result()["outside_resets"] == 4


def test_a_failure_of_the_monitor_is_logged_once_and_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeAllocator):
        def read(self) -> Any:
            if self.allocated > 0:
                raise RuntimeError("driver gone")
            return super().read()

    allocator = Broken()
    module = TinyModule(during=lambda where: allocator.allocate(1))
    fit = trainer(OnAccelerator(allocator))
    fit.fit(module, batches(4))
    assert fit.global_step == 4
    assert [record.message for record in caplog.records if "stopped measuring" in record.message] == [
        "OnAccelerator stopped measuring after this error; training goes on."
    ]


def test_somebody_elses_profiler_is_left_alone_and_said_in_one_sentence(caplog: pytest.LogCaptureFixture) -> None:
    monitor = MemoryMonitor()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        trainer(monitor, val_check_interval=2).fit(ValidatedModule(), batches(4), batches(3))
    assert monitor.result()["peak_allocated_bytes"] is None
    assert caplog.text.count("another one is running") == 2  # for the step and for validation
    assert "No training step's peak was measured" in caplog.text and "Traceback" not in caplog.text


def test_running_out_of_memory_leaves_the_peak_that_led_to_it() -> None:
    allocator = FakeAllocator()

    def during(where: str) -> None:
        allocator.spike(4001)
        if where == "backward":
            raise torch.OutOfMemoryError("too much")

    monitor = OnAccelerator(allocator)
    with pytest.raises(torch.OutOfMemoryError):
        trainer(monitor).fit(TinyModule(during=during), batches(4))
    assert monitor.result()["peak_allocated_bytes"] == monitor.result()["phases"]["backward"] == 4001
    assert monitor.ledger._open == []


def test_the_highest_rank_is_what_counts() -> None:
    monitor = MemoryMonitor()
    metrics = monitor._combine({"allocated": [2.0**30, 3 * 2.0**30], "forward": [float("nan"), 2.0**29]})
    assert metrics == {
        "memory/peak_allocated_gib": 3.0,
        "memory/peak_allocated_rank": 1.0,
        "memory/forward/peak_allocated_gib": 0.5,
    }
    monitor._combine({"allocated": [2 * 2.0**30, 2.0**30]})
    assert monitor.result()["peak_allocated_rank"] == 1  # of the run
    assert monitor.result()["peak_allocated_bytes"] == 3 * 2**30


@pytest.mark.parametrize("settings", [{"probe_step": -1}, {"phases_every_n_steps": 0}])
def test_settings_outside_their_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(settings))} .* got {next(iter(settings.values()))}"):
        MemoryMonitor(**settings)


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_a_small_run_after_a_big_one_starts_from_clean_peaks() -> None:
    def result_of(width: int) -> dict[str, Any]:
        monitor = MemoryMonitor()
        trainer(monitor, accelerator="cuda", max_steps=5).fit(TinyModule(width=width), batches(5))
        return monitor.result()

    result_of(33)  # the library's own workspaces come with the first product
    alone, big, again = result_of(33), result_of(100_003), result_of(33)
    assert alone["source"] == "allocator" and alone["outside_resets"] == 0
    assert all(alone["phases"][name] for name in ("forward", "backward", "optimizer"))
    assert big["peak_allocated_bytes"] > alone["peak_allocated_bytes"] + 4 * 100_003 * 2 * 101
    assert again["peak_allocated_bytes"] == alone["peak_allocated_bytes"]
    assert again["peak_reserved_bytes"] < big["peak_reserved_bytes"]
