import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import SIGTERMException
from toy_training import RecordingLogger, ToyData, language_model, trainer

from flash_train.training.checkpoint import Checkpoint
from flash_train.training.history import LossHistory
from flash_train.training.module import LanguageModel
from flash_train.training.optimizer import adamw, muon
from flash_train.training.resume import checkpoint_files, find_checkpoint, read_header
from flash_train.training.schedule import warmup_cosine_factor, warmup_stable_decay
from tests.training.endings import same


def fit(
    folder: Path,
    *callbacks: Callback,
    ckpt_path: Path | None = None,
    module: LanguageModel | None = None,
    **options: Any,
) -> LossHistory:
    """Train to `max_steps` with validation after every third batch, which draws random numbers of its own."""
    history = LossHistory()
    validation = {"check_val_every_n_epoch": None, "val_check_interval": 3, "num_sanity_val_steps": 1}
    run = trainer(folder, history, *callbacks, **validation, **options)
    run.fit(module or language_model(), datamodule=ToyData(), ckpt_path=ckpt_path, weights_only=True)
    return history


def contents(folder: Path) -> dict[str, Any]:
    checkpoint = torch.load(find_checkpoint(folder), weights_only=True)
    keys = ("state_dict", "optimizer_states", "lr_schedulers", "tokens_seen", "random_states", "global_step")
    return {key: checkpoint[key] for key in keys}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("stop", [1, 4, 5, 7])
def test_ten_steps_equal_some_then_a_resumed_rest(tmp_path: Path, accumulate: int, stop: int) -> None:
    """An epoch of 7 batches ends with step 4 (by two) or 7 (by one)."""
    whole = fit(tmp_path / "whole", max_steps=10, accumulate_grad_batches=accumulate)
    fit(tmp_path / "parts", max_steps=stop, accumulate_grad_batches=accumulate)
    torch.manual_seed(9)
    first = find_checkpoint(tmp_path / "parts")
    parts = fit(tmp_path / "parts", max_steps=10, ckpt_path=first, accumulate_grad_batches=accumulate)
    assert parts.curve() == whole.curve() and [step for step, _ in whole.curve()] == list(range(10))
    assert same(contents(tmp_path / "parts"), contents(tmp_path / "whole"))


def test_two_optimizers_in_one_and_a_decay_at_the_end_resume_as_exactly(tmp_path: Path) -> None:
    def module() -> LanguageModel:
        optimizer = partial(muon, lr=0.05, adamw_lr=0.03, not_muon=())
        return language_model(
            optimizer=optimizer, schedule=partial(warmup_stable_decay, warmup_steps=2, total_steps=10, decay=0.5)
        )

    fit(tmp_path / "whole", module=module(), max_steps=10)
    fit(tmp_path / "parts", module=module(), max_steps=6)
    fit(tmp_path / "parts", module=module(), max_steps=10, ckpt_path=find_checkpoint(tmp_path / "parts"))
    assert same(contents(tmp_path / "parts"), contents(tmp_path / "whole"))


def groups(folder: Path) -> list[dict[str, Any]]:
    return torch.load(find_checkpoint(folder), weights_only=True)["optimizer_states"][0]["param_groups"]


@pytest.mark.parametrize("scheduled", [True, False])
def test_a_resumed_run_learns_at_the_rate_and_with_the_decay_that_it_is_given(tmp_path: Path, scheduled: bool) -> None:
    """From its first step on; what a checkpoint brings is the state."""

    def module(**options: Any) -> LanguageModel:
        schedule: dict[str, Any] = {} if scheduled else {"schedule": None}
        return language_model(optimizer=partial(adamw, **options), **schedule)

    log = RecordingLogger()
    fit(tmp_path, module=module(lr=0.05), max_steps=6, logger=log)
    options = {"lr": 0.0125, "weight_decay": 0.3, "betas": (0.8, 0.9)}
    fit(tmp_path, module=module(**options), max_steps=10, ckpt_path=find_checkpoint(tmp_path), logger=log)
    rates = [row["train/learning_rate"] for _, row in log.rows if "train/learning_rate" in row]
    factor = partial(warmup_cosine_factor, warmup_steps=2, total_steps=10, floor=0.1)
    factors = [factor(step) if scheduled else 1.0 for step in range(10)]
    peaks = [0.05] * 6 + [0.0125] * 4
    assert rates == pytest.approx([peak * factor for peak, factor in zip(peaks, factors, strict=True)])
    assert [group["weight_decay"] for group in groups(tmp_path)] == [0.3, 0.0]
    assert all(group["betas"] == (0.8, 0.9) for group in groups(tmp_path))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        # As many in each group as before, so that torch would take the state of one parameter for another's.
        ({"decay": ["head.bias"], "no_decay": ["head.weight"]}, "head.bias was in group 1, and now it is in group 0"),
        ({"no_decay": ["head.weight"]}, "head.weight was in group 0, and now it is in group 1"),
        ({"decay": ["head.bias"]}, "head.bias was in group 1, and now it is in group 0"),
    ],
)
def test_a_run_whose_parameters_are_grouped_in_another_way_is_not_resumed(
    tmp_path: Path, options: dict[str, Any], text: str
) -> None:
    fit(tmp_path, max_steps=2)
    other = language_model(optimizer=partial(adamw, lr=0.05, **options))
    with pytest.raises(ValueError, match=text):
        fit(tmp_path, module=other, ckpt_path=find_checkpoint(tmp_path))


class Trip(Callback):
    """Does something once, in the hook and at the optimizer step it is told."""

    def __init__(self, hook: str, step: int, action: Callable[[], object]) -> None:
        def trip(run: Any, *_: Any) -> None:
            if run.global_step == step and not run.sanity_checking and not self.done:
                self.done = True
                action()

        self.done = False
        setattr(self, hook, trip)


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("hook", "step", "saved"),
    [
        ("on_before_backward", 3, 4),
        ("on_before_zero_grad", 3, 4),
        ("on_validation_batch_start", 3, 3),
        ("on_validation_batch_start", 1, 2),  # after the third batch, in the middle of the second step
    ],
)
def test_ctrl_c_saves_a_whole_step_from_which_the_run_continues_exactly(
    tmp_path: Path, hook: str, step: int, saved: int
) -> None:
    whole = fit(tmp_path / "whole", max_steps=10, accumulate_grad_batches=2)
    log = RecordingLogger()
    with pytest.raises(SystemExit):
        fit(tmp_path / "parts", Trip(hook, step, ctrl_c), max_steps=10, accumulate_grad_batches=2, logger=log)
    stopped = find_checkpoint(tmp_path / "parts")
    assert read_header(stopped).step == saved
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    parts = fit(tmp_path / "parts", ckpt_path=stopped, max_steps=10, accumulate_grad_batches=2, logger=log)
    assert parts.curve() == whole.curve()
    assert same(contents(tmp_path / "parts"), contents(tmp_path / "whole"))
    assert log.steps("train/loss") == list(range(10)), "each step is logged once, under its own number"


@pytest.mark.parametrize(
    ("hook", "step", "saved"),
    [("on_before_backward", 3, 4), ("on_before_backward", 2, 3), ("on_validation_start", 3, 3)],
)
def test_sigterm_saves_the_step_that_it_finishes_and_leaves_a_validation_for_later(
    tmp_path: Path, hook: str, step: int, saved: int
) -> None:
    whole, parts = RecordingLogger(), RecordingLogger()
    fit(tmp_path / "whole", max_steps=10, logger=whole)
    term = Trip(hook, step, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SIGTERMException):
        fit(tmp_path / "parts", term, max_steps=10, logger=parts)
    assert [read_header(file).step for file in checkpoint_files(tmp_path / "parts" / "checkpoints")] == [saved]
    fit(tmp_path / "parts", ckpt_path=find_checkpoint(tmp_path / "parts"), max_steps=10, logger=parts)
    for name in ("train/loss", "validation/loss"):
        logged = [[row for row in log.rows if name in row[1]] for log in (parts, whole)]
        assert logged[0] == logged[1] and logged[0], name
    assert same(contents(tmp_path / "parts"), contents(tmp_path / "whole"))


def test_the_scale_of_fp16_losses_continues_where_it_was(tmp_path: Path) -> None:
    """It grows every second step here, and one infinite gradient halves it and skips that step."""

    def run(folder: Path, *callbacks: Callback, **options: Any) -> torch.amp.GradScaler:  # pyright: ignore
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)  # pyright: ignore
        fit(folder, *callbacks, plugins=MixedPrecision("16-mixed", "cpu", scaler), **options)
        return scaler

    def spoil(trainer: Any, module: LanguageModel, *_: Any) -> None:
        if trainer.global_step == 3:
            module.model.head.bias.grad[0] = float("inf")  # pyright: ignore

    whole = run(tmp_path / "whole", LambdaCallback(on_after_backward=spoil), max_steps=10)
    run(tmp_path / "parts", LambdaCallback(on_after_backward=spoil), max_steps=5)
    parts = run(tmp_path / "parts", ckpt_path=find_checkpoint(tmp_path / "parts"), max_steps=10)
    assert parts.state_dict() == whole.state_dict() and whole.get_scale() == 2.0**13
    assert same(contents(tmp_path / "parts"), contents(tmp_path / "whole"))


def test_a_second_ctrl_c_does_not_wait_for_the_step(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        fit(tmp_path, Trip("on_before_backward", 3, lambda: [ctrl_c(), ctrl_c()]), max_steps=10)
    with pytest.raises(ValueError, match="No checkpoint in"):
        find_checkpoint(tmp_path)


def fail() -> None:
    raise RuntimeError("the disk is gone")


@pytest.mark.parametrize(("hook", "step"), [("on_validation_start", 3), ("on_validation_batch_start", 9)])
def test_a_validation_that_did_not_come_to_its_end_is_run_when_the_run_is_resumed(
    tmp_path: Path, hook: str, step: int
) -> None:
    """Of the third of nine steps the rest is there to train, of the ninth nothing is."""
    whole, parts = RecordingLogger(), RecordingLogger()
    fit(tmp_path / "whole", max_steps=9, logger=whole)
    always = Checkpoint(dirpath=tmp_path / "parts" / "checkpoints", every_n_train_steps=1)
    with pytest.raises(RuntimeError, match="the disk is gone"):
        fit(tmp_path / "parts", always, Trip(hook, step, fail), max_steps=9, logger=parts)
    assert read_header(find_checkpoint(tmp_path / "parts")).step == step
    fit(tmp_path / "parts", ckpt_path=find_checkpoint(tmp_path / "parts"), max_steps=9, logger=parts)
    validated = [row for row in whole.rows if "validation/loss" in row[1]]
    assert [row for row in parts.rows if "validation/loss" in row[1]] == validated and len(validated) == 3
    assert same(contents(tmp_path / "parts"), contents(tmp_path / "whole"))


@pytest.mark.parametrize(("hook", "saved"), [("on_before_backward", 2), ("on_validation_end", 3)])
def test_a_failure_keeps_the_last_whole_step_unless_it_came_from_inside_one(
    tmp_path: Path, hook: str, saved: int
) -> None:
    periodic = Checkpoint(dirpath=tmp_path / "checkpoints", every_n_train_steps=2)
    with pytest.raises(RuntimeError, match="the disk is gone"):
        fit(tmp_path, periodic, Trip(hook, 3, fail), max_steps=10)
    assert read_header(find_checkpoint(tmp_path)).step == saved
