from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from toy_training import B, RecordingLogger, T, ToyData, ToyModel, V, trainer

from flash_train.training.averaging import EMA
from flash_train.training.checkpoint import Checkpoint
from flash_train.training.data import TokenShards
from flash_train.training.guard import NonFiniteGuard
from flash_train.training.history import LossHistory
from flash_train.training.module import LanguageModel
from flash_train.training.optimizer import adamw
from flash_train.training.progress import ProgressBar
from flash_train.training.resume import find_checkpoint

pytestmark = pytest.mark.gpu


def fit(folder: Path, *callbacks: Callback, ckpt_path: Path | None = None, **options: Any) -> LanguageModel:
    torch.manual_seed(4)
    module = LanguageModel(ToyModel(), optimizer=partial(adamw, lr=0.01), gradient_clip=0.125)
    checkpoint = Checkpoint(dirpath=folder / "checkpoints")
    defaults = {"accelerator": "cuda", "devices": 1, "limit_val_batches": 0, "log_every_n_steps": 4, "max_steps": 12}
    run = trainer(folder, *callbacks, checkpoint, **{**defaults, **options})
    run.fit(module, ToyData(), ckpt_path=ckpt_path, weights_only=True)
    return module


class NoWaiting(Callback):
    """Makes a synchronisation an error in every step but log steps and the first, which sets things up."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step + 1
        torch.cuda.set_sync_debug_mode("default" if step < 3 or step % 4 == 0 or step == 12 else "error")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        torch.cuda.set_sync_debug_mode("default")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        torch.cuda.set_sync_debug_mode("default")


def test_between_log_steps_nothing_waits_for_the_device(tmp_path: Path) -> None:
    watchers = (ProgressBar(), LossHistory(), NonFiniteGuard(), EMA(), NoWaiting())
    fit(tmp_path, *watchers, precision="bf16-mixed", enable_progress_bar=True, logger=RecordingLogger())


@pytest.mark.filterwarnings("ignore:You have overridden `on_before_batch_transfer`")  # which is what is meant
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_are_copied_from_pinned_memory_and_nobody_waits_for_them(tmp_path: Path, workers: int) -> None:
    pinned: list[bool] = []

    class Look(LanguageModel):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            pinned.extend(tensor.is_pinned() for tensor in batch.values())
            return batch

    for name in ("train.bin", "val.bin"):
        (np.arange(2000) % V).astype("uint16").tofile(tmp_path / name)
    data = TokenShards(
        paths=str(tmp_path), vocabulary_size=V, sequence_length=T, batch_size=B, workers=workers, cache_dir=tmp_path
    )
    options: dict[str, Any] = {"accelerator": "cuda", "devices": 1, "limit_val_batches": 0, "log_every_n_steps": 4}
    run = trainer(tmp_path, NoWaiting(), max_steps=12, **options)
    run.fit(Look(ToyModel(), optimizer=partial(adamw, lr=0.01)), data)
    assert len(pinned) >= 24 and all(pinned)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_the_fused_optimizer_is_clipped_under_mixed_precision(tmp_path: Path, precision: str) -> None:
    class Norms(Callback):
        after: list[float] = []

        def on_train_batch_end(
            self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            assert trainer.optimizers[0].defaults["fused"]
            gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
            self.after.append(float(nn.utils.get_total_norm(gradients)))

    norms = Norms()
    fit(tmp_path, norms, precision=precision, max_steps=3)
    assert norms.after == pytest.approx([0.125] * 3, rel=1e-3)


def test_dropout_continues_where_it_was(tmp_path: Path) -> None:
    whole, parts = LossHistory(), LossHistory()
    fit(tmp_path / "whole", whole)
    fit(tmp_path / "parts", max_steps=5)
    torch.cuda.manual_seed(9)
    fit(tmp_path / "parts", parts, ckpt_path=find_checkpoint(tmp_path / "parts"))
    # Another draw of dropout moves these losses by a tenth; the order of atomic additions only by rounding.
    assert [loss for _, loss in parts.curve()] == pytest.approx([loss for _, loss in whole.curve()][5:], rel=1e-4)
