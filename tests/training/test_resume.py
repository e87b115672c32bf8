from pathlib import Path
from typing import Any

import pytest
import torch

from flash_train.training.checkpoint import Checkpoint
from flash_train.training.history import LossHistory
from flash_train.training.resume import find_checkpoint, read_header
from toy_training import ToyData, language_model, trainer


def fit(folder: Path, *, max_steps: int, ckpt_path: Path | None = None, **options: Any) -> tuple[dict[str, Any], Any]:
    """Train to `max_steps`; what the checkpoint of the last step holds, and the loss curve."""
    history = LossHistory()
    options = {"check_val_every_n_epoch": None, "val_check_interval": 3, "num_sanity_val_steps": 1, **options}
    run = trainer(folder, history, max_steps=max_steps, **options)
    run.fit(language_model(), datamodule=ToyData(), ckpt_path=ckpt_path, weights_only=True)
    return torch.load(find_checkpoint(folder), weights_only=True), history.curve()


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("stop", [1, 4, 5, 7])
def test_ten_steps_equal_some_then_a_resumed_rest(tmp_path: Path, accumulate: int, stop: int) -> None:
    """Steps 4 (by two) and 7 (by one) end an epoch; validation, after every third batch, draws random numbers."""
    whole, whole_curve = fit(tmp_path / "whole", max_steps=10, accumulate_grad_batches=accumulate)
    fit(tmp_path / "parts", max_steps=stop, accumulate_grad_batches=accumulate)
    first = find_checkpoint(tmp_path / "parts")
    torch.manual_seed(9)
    parts, parts_curve = fit(tmp_path / "parts", max_steps=10, ckpt_path=first, accumulate_grad_batches=accumulate)
    assert parts_curve == whole_curve and [step for step, _ in whole_curve] == list(range(10))
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "tokens_seen", "random_states", "global_step"):
        assert same(parts[key], whole[key]), key
