import hashlib
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from toy_training import RecordingLogger, ToyData, batch, language_model, trainer

from flash_train.training import deferred_logging, guard, history, progress
from flash_train.training.checkpoint import Checkpoint
from flash_train.training.deferred_logging import DeferredLogging
from flash_train.training.guard import NonFiniteGuard, NonFiniteLoss
from flash_train.training.history import LossHistory
from flash_train.training.later import Later
from flash_train.training.progress import ProgressBar, Summary
from flash_train.training.resume import checkpoint_files, read_header


class Poison(Callback):
    """Makes an infinity of one weight, or of one gradient, in a step."""

    def __init__(self, *, step: int, gradient: bool) -> None:
        self.step = step
        self.gradient = gradient

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step and not self.gradient:
            pl_module.model.head.bias.data[0] = float("inf")  # pyright: ignore

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if trainer.global_step == self.step and self.gradient:
            pl_module.model.head.bias.grad[0] = float("inf")  # pyright: ignore


def fit(folder: Path, *callbacks: Callback, **options: Any) -> None:
    defaults = {"max_steps": 12, "limit_val_batches": 0, "log_every_n_steps": 4, "accumulate_grad_batches": 2}
    trainer(folder, *callbacks, **{**defaults, **options}).fit(language_model(), ToyData())


@pytest.mark.parametrize("gradient", [False, True])
def test_a_value_that_is_not_finite_stops_the_run_with_its_step_batch_and_last_norm(
    tmp_path: Path, gradient: bool
) -> None:
    norms = RecordingLogger()
    fit(tmp_path, logger=norms, log_every_n_steps=1)
    with pytest.raises(NonFiniteLoss) as caught:
        fit(tmp_path, NonFiniteGuard(), Poison(step=4, gradient=gradient))
    error = caught.value
    # Four steps make an epoch of seven batches; the loss goes bad in the first half of the fifth, the norm at its end.
    position = 8 if gradient else 7
    assert (error.step, error.epoch, error.batch_idx) == (4, 1, position - 7)
    inputs = batch(position)["inputs"]
    assert error.batch_sha256 == hashlib.sha256(inputs.numpy().astype("<i8").tobytes()).hexdigest()
    assert error.gradient_norm == pytest.approx(norms.rows[3][1]["train/gradient_norm"])
    assert "in step 4 (noticed in step 7)" in str(error) and str(inputs.flatten()[:8].tolist()) in str(error)
    assert str(error).startswith("The gradient is not" if gradient else "The loss is not")


def test_no_checkpoint_is_written_of_weights_that_are_not_finite(tmp_path: Path) -> None:
    checkpoint = Checkpoint(dirpath=tmp_path / "checkpoints", every_n_train_steps=1, keep=9)
    with pytest.raises(NonFiniteLoss):
        fit(tmp_path, checkpoint, NonFiniteGuard(), Poison(step=2, gradient=True), log_every_n_steps=100)
    assert [read_header(file).step for file in checkpoint_files(tmp_path / "checkpoints")] == [2, 1]


def test_the_loss_curve_has_every_step_under_the_number_the_loggers_use(tmp_path: Path) -> None:
    history, log = LossHistory(), RecordingLogger()
    fit(tmp_path, history, logger=log)
    curve = history.curve()
    assert [step for step, _ in curve] == list(range(12))
    logged = {step: row["train/loss"] for step, row in log.rows if "train/loss" in row}
    assert logged == {step: loss for step, loss in curve if step in (3, 7, 11)}


def test_losses_are_read_in_bulk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    history = LossHistory()
    send = history._send
    monkeypatch.setattr(history, "_send", lambda: (reads.append(len(history._pending)), send()))
    fit(tmp_path, history)
    assert [count for count in reads if count] == [4, 4, 4]


class Slow(Later):
    """As on a GPU: whoever reads it in the step that it is of waits for that step."""

    now = 0

    def __init__(self, x: Tensor) -> None:
        super().__init__(x)
        self.is_there, self.made = False, Slow.now

    def numbers(self) -> Tensor:
        waits.append(Slow.now == self.made)
        return super().numbers() if self.is_there else self._host


waits: list[bool] = []


class Count(Callback):
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        Slow.now += 1


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (deferred_logging, guard, history, progress):
        monkeypatch.setattr(module, "Later", Slow)
    monkeypatch.setattr(deferred_logging.DeferredLogging, "_is_slow", staticmethod(lambda x: True))
    waits.clear()


@pytest.mark.parametrize("options", [{}, {"val_check_interval": 4, "limit_val_batches": 1}, {"log_every_n_steps": 1}])
def test_on_a_slow_device_the_loggers_and_the_terminal_get_the_same_and_no_step_is_waited_for(
    tmp_path: Path, options: dict[str, Any], request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows(name: str) -> tuple[list[Any], list[list[float]], str]:
        log, curve = RecordingLogger(), LossHistory()
        fit(
            tmp_path / name, Count(), DeferredLogging(), curve, NonFiniteGuard(), ProgressBar(), logger=log,
            enable_progress_bar=True, **options,
        )  # fmt: skip
        return log.rows, curve.curve(), "".join(capsys.readouterr().out.split("step")[1:])

    expected = rows("fast")
    request.getfixturevalue("slow")
    assert rows("slow") == expected and len(expected[0]) >= 3
    assert len(waits) >= 8 and sum(waits) <= 3, "each of three readers at the end of the run alone"


def test_on_a_slow_device_the_guard_names_the_same_step_and_batch_a_micro_batch_later(
    tmp_path: Path, slow: None
) -> None:
    with pytest.raises(NonFiniteLoss) as caught:
        fit(tmp_path, Count(), NonFiniteGuard(), Poison(step=4, gradient=False))
    assert (caught.value.step, caught.value.epoch, caught.value.batch_idx) == (4, 1, 0)
    assert "in step 4 (noticed in step 7)" in str(caught.value)


def test_on_a_slow_device_a_run_that_dies_has_logged_what_it_was_about_to(tmp_path: Path, slow: None) -> None:
    class Dies(Callback):
        def on_train_batch_end(
            self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if trainer.global_step == 9:
                raise RuntimeError("of something else")

    log = RecordingLogger()
    with pytest.raises(RuntimeError, match="of something else"):
        fit(tmp_path, DeferredLogging(), Dies(), logger=log)
    assert [step for step, row in log.rows if "train/loss" in row] == [3, 7]


class Meter(Callback):
    """Logs what the monitors of speed and memory log."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        pl_module.log("speed/tokens_per_second", 123456.0)
        pl_module.log("memory/peak_allocated_gib", 0.25)


def test_progress_and_summary_show_loss_speed_and_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, ProgressBar(), Summary(), Meter(), enable_progress_bar=True)
    text = capsys.readouterr().out
    for step in (4, 8, 12):
        assert f"step {step}/12  loss " in text
    assert "tokens/s 123,456  peak 0.25 GiB" in text
    assert "Summary" in text.split("step 12/12")[1] and "optimizer steps" in text


@pytest.mark.parametrize("interval", [4, 5, 100])
def test_the_summary_of_a_run_that_ends_between_two_log_steps_has_the_loss_of_its_last_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], interval: int
) -> None:
    history = LossHistory()
    fit(tmp_path, history, Summary(), log_every_n_steps=interval)
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "loss" in line]
    assert f"{history.curve()[-1][1]:.4f}" in row
