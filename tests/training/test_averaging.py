from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from test_resume import Trip, ctrl_c, same
from toy_training import ToyData, language_model, trainer

from flash_train.training.averaging import EMA
from flash_train.training.module import LanguageModel
from flash_train.training.resume import find_checkpoint, load_weights

VALIDATION = {"check_val_every_n_epoch": None, "val_check_interval": 3}


class Watch(Callback):
    """The weights after each optimizer step, and those that validation saw."""

    def __init__(self) -> None:
        self.trained: list[torch.Tensor] = []
        self.validated: list[torch.Tensor] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.trained.append(flat(pl_module))

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.validated.append(flat(pl_module))


def flat(module: LightningModule) -> torch.Tensor:
    return torch.cat([p.detach().flatten().double() for p in module.parameters()])


def fit(folder: Path, *callbacks: Callback, ckpt_path: Path | None = None, **options: Any) -> LanguageModel:
    module = language_model()
    run = trainer(folder, *callbacks, num_sanity_val_steps=0, **VALIDATION, **options)
    run.fit(module, datamodule=ToyData(), ckpt_path=ckpt_path, weights_only=True)
    return module


def averages(weights: list[torch.Tensor], first: torch.Tensor, *, start: int = 0, every: int = 1) -> list[torch.Tensor]:
    found = [first]
    for step, each in enumerate(weights, 1):
        due = (step - start) % every == 0
        found.append(each if step <= start else 0.5 * (found[-1] + each) if due else found[-1])
    return found[1:]


@pytest.mark.parametrize(("start", "every"), [(0, 1), (2, 1), (1, 2)])
def test_validation_and_the_end_see_the_average_and_training_does_not(tmp_path: Path, start: int, every: int) -> None:
    plain, watch = Watch(), Watch()
    fit(tmp_path / "plain", plain, max_steps=7)
    module = fit(tmp_path / "ema", EMA(decay=0.5, start_step=start, every_n_steps=every), watch, max_steps=7)
    assert same(watch.trained, plain.trained), "the average changes nothing in training"
    expected = averages(watch.trained, flat(language_model()), start=start, every=every)
    for seen, step in zip(watch.validated[::2], (3, 6), strict=True):
        torch.testing.assert_close(seen, expected[step - 1], rtol=0, atol=1e-6)
    torch.testing.assert_close(flat(module), expected[-1], rtol=0, atol=1e-6)


def test_a_checkpoint_holds_the_average_for_others_and_continues_with_the_weights(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", EMA(decay=0.5), max_steps=8)
    fit(tmp_path / "parts", EMA(decay=0.5), max_steps=5)
    stopped = find_checkpoint(tmp_path / "parts")
    other = language_model()
    load_weights(stopped, other)
    watch = Watch()
    fit(tmp_path / "again", EMA(decay=0.5), watch, max_steps=5)
    torch.testing.assert_close(flat(other), averages(watch.trained, flat(language_model()))[-1], rtol=0, atol=1e-6)
    parts = fit(tmp_path / "parts", EMA(decay=0.5), max_steps=8, ckpt_path=stopped)
    assert same(parts.state_dict(), whole.state_dict())
    keys = ("state_dict", "training_weights", "optimizer_states")
    saved = [torch.load(find_checkpoint(tmp_path / name), weights_only=True) for name in ("parts", "whole")]
    assert all(same(saved[0][key], saved[1][key]) for key in keys)
    assert not same(saved[0]["training_weights"], dict(saved[0]["state_dict"]))


def test_ctrl_c_in_validation_does_not_take_the_average_for_the_weights(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", EMA(decay=0.5), max_steps=8)
    with pytest.raises(SystemExit):
        fit(tmp_path / "parts", EMA(decay=0.5), Trip("on_validation_batch_start", 3, ctrl_c), max_steps=8)
    parts = fit(tmp_path / "parts", EMA(decay=0.5), max_steps=8, ckpt_path=find_checkpoint(tmp_path / "parts"))
    assert same(parts.state_dict(), whole.state_dict())


def test_the_best_checkpoint_is_of_the_average_that_was_validated(tmp_path: Path) -> None:
    watch = Watch()
    best = ModelCheckpoint(dirpath=tmp_path, filename="best", monitor="validation/loss")
    fit(tmp_path, EMA(decay=0.5), watch, best, max_steps=3)
    module = language_model()
    load_weights(tmp_path / "best.ckpt", module)
    assert torch.equal(flat(module), watch.validated[0])


def test_an_average_of_bf16_weights_is_kept_in_fp32_through_validations(tmp_path: Path) -> None:
    """A thousandth of a change is below the rounding of a bf16 number."""
    ema, watch, module = EMA(decay=0.999), Watch(), language_model()
    run = trainer(tmp_path, ema, watch, max_steps=3, precision="bf16-true", **VALIDATION)
    run.fit(module, datamodule=ToyData())
    expected = flat(language_model().bfloat16())
    for weights in watch.trained:
        expected = 0.999 * expected + 0.001 * weights
    average = torch.cat([each.flatten() for each in ema.average.values()])
    torch.testing.assert_close(average.double(), expected, rtol=1e-6, atol=1e-8)
    assert len(watch.validated) == 4 and not torch.equal(average, average.bfloat16().float())
    assert torch.equal(flat(module), average.bfloat16().double())


def test_a_run_that_averages_is_not_resumed_without(tmp_path: Path) -> None:
    fit(tmp_path, EMA(), max_steps=2)
    with pytest.raises(ValueError, match=r"resume it with the callback EMA, in flash-train callbacks=\[default,ema\]"):
        fit(tmp_path, max_steps=4, ckpt_path=find_checkpoint(tmp_path))


@pytest.mark.parametrize("options", [{"decay": 1.0}, {"decay": -0.1}, {"start_step": -1}, {"every_n_steps": 0}])
def test_an_average_that_cannot_be_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="decay is the average's share|count optimizer steps"):
        partial(EMA, **options)()
