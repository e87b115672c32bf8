import gc
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback
from toy_training import ToyData, language_model, trainer

from flash_train.training.garbage import GarbageFreeze


def fit(folder: Path, *callbacks: Callback) -> None:
    trainer(folder, *callbacks, limit_val_batches=0).fit(language_model(), ToyData())


def test_what_was_made_before_the_second_step_is_not_searched_for_garbage_until_training_ends(tmp_path: Path) -> None:
    searched: list[int] = []

    def count(*_: Any) -> None:
        searched.append(len(gc.get_objects()))

    fit(tmp_path, GarbageFreeze(), LambdaCallback(on_train_batch_start=count))
    assert all(each < searched[0] / 10 for each in searched[1:]) and len(searched) == 10
    assert gc.get_freeze_count() == 0


def fail(*_: Any) -> None:
    raise RuntimeError("no more")


def test_a_run_that_fails_leaves_nothing_frozen_and_one_that_found_it_frozen_leaves_it_so(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no more"):
        fit(tmp_path, GarbageFreeze(), LambdaCallback(on_validation_start=fail, on_train_batch_end=fail))
    assert gc.get_freeze_count() == 0
    gc.freeze()
    try:
        fit(tmp_path, GarbageFreeze())
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
