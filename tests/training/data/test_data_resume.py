"""What a trainer sees, with the prefetching and the ranks of a real one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from flash_train.training.data import TextFiles, TokenData

# torch forks its workers, and from 3.12 on Python warns of that in a process with threads.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Recorder(LightningModule):
    """One weight, and a list of the batches it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[Tensor] = []
        self.validated = 0

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        self.seen.append(batch["inputs"])
        return self.weight * batch["targets"].float().mean()

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        self.validated += int((batch["targets"] >= 0).sum())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveAt(Callback):
    """Save one checkpoint where ModelCheckpoint does."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self.step and not self.path.exists():
            trainer.save_checkpoint(self.path)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    (tmp_path / "text.bin").write_bytes(bytes(torch.randint(256, (3001,), generator=generator).tolist()))
    return tmp_path / "text.bin"


def data_of(text: Path, **options: Any) -> TextFiles:
    settings: dict[str, Any] = {"sequence_length": 13, "batch_size": 4, "seed": 7} | options
    return TextFiles(paths=str(text), cache_dir=text.parent / "cache", **settings)


def fit(data: TokenData, steps: int, *, ckpt_path: Path | None = None, **options: Any) -> Recorder:
    model = Recorder()
    Trainer(**QUIET, max_steps=steps, **options).fit(model, data, ckpt_path=ckpt_path)
    return model


def rows(model: Recorder) -> Tensor:
    return torch.cat(model.seen)


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate_grad_batches": 2}, {"overfit_batches": 1}, {"overfit_batches": 3}, {"overfit_batches": 1.0}],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_ten_steps_see_what_five_and_five_resumed_see(text: Path, tmp_path: Path, workers: int, options: Any):
    accumulation = options.get("accumulate_grad_batches", 1)
    whole = fit(data_of(text, workers=workers), 10, **options)
    # The loader is batches ahead when step 5 is saved, and the run goes on until it is killed after step 8.
    saved = tmp_path / "saved.ckpt"
    fit(data_of(text, workers=workers), 8, callbacks=[SaveAt(5, saved)], **options)
    resumed = fit(data_of(text, workers=workers), 10, ckpt_path=saved, **options)
    assert len(resumed.seen) == 5 * accumulation
    assert torch.equal(rows(resumed), rows(whole)[5 * accumulation * 4 :])
    assert torch.equal(resumed.weight, whole.weight)


def test_accumulation_divides_the_rows_of_a_step_and_resuming_may_change_it(text: Path, tmp_path: Path):
    whole = fit(data_of(text, batch_size=8), 6)
    halves = fit(data_of(text, batch_size=4), 6, accumulate_grad_batches=2)
    assert torch.equal(rows(whole), rows(halves))
    saved = tmp_path / "saved.ckpt"
    # Lightning counts micro-batches, so that a step boundary stays one where the new accumulation divides them: 4.
    fit(data_of(text, batch_size=8), 4, callbacks=[SaveAt(4, saved)])
    resumed = fit(data_of(text, batch_size=2), 6, ckpt_path=saved, accumulate_grad_batches=4)
    assert torch.equal(rows(resumed), rows(whole)[32:])


@pytest.mark.parametrize("workers", [0, 2])
def test_validation_and_short_lightning_epochs_do_not_move_the_order(text: Path, workers: int):
    plain = fit(data_of(text), 11)
    checked = fit(data_of(text, workers=workers), 11, val_check_interval=2, num_sanity_val_steps=1)
    assert torch.equal(rows(checked), rows(plain))
    assert checked.validated == 4 * 13 + 5 * 300, "a sanity batch and the whole split after every second step"
    epochs = fit(data_of(text, workers=workers), 11, limit_train_batches=3)
    assert torch.equal(rows(epochs), rows(plain))
    assert torch.equal(rows(fit(data_of(text), 6, overfit_batches=2)), rows(plain)[:8].repeat(3, 1))


class RankRecorder(Recorder):
    """Leaves what it saw in a file for each rank."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def on_train_end(self) -> None:
        torch.save((torch.stack(self.seen), self.validated), self.folder / f"{self.global_rank}.pt")


def test_two_ranks_share_the_rows_and_the_validation_split_of_one(text: Path, tmp_path: Path):
    plain = fit(data_of(text, batch_size=6), 5)
    trainer = Trainer(
        **QUIET, max_steps=5, val_check_interval=5, num_sanity_val_steps=0, devices=2, strategy="ddp_fork"
    )
    trainer.fit(RankRecorder(tmp_path), data_of(text, batch_size=3))
    (first, validated), (second, validated_too) = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert torch.equal(torch.stack([first, second], 2).reshape(30, 13), rows(plain))
    assert validated + validated_too == 300 and validated_too > 0


def test_one_object_begins_anew_with_every_trainer(text: Path):
    data = data_of(text)
    assert torch.equal(rows(fit(data, 3)), rows(fit(data, 3)))


def test_resuming_with_documents_that_see_each_other_is_refused(tmp_path: Path):
    for name, letters in (("a.txt", "one text "), ("b.txt", "another ")):
        (tmp_path / name).write_text(letters * 40)
    saved = tmp_path / "saved.ckpt"

    def data(separate_documents: bool) -> TextFiles:
        paths = str(tmp_path / "*.txt")
        return TextFiles(
            paths=paths, sequence_length=13, batch_size=4, separate_documents=separate_documents, cache_dir=tmp_path
        )

    fit(data(True), 2, callbacks=[SaveAt(2, saved)])
    with pytest.raises(ValueError, match=r"where separate_documents is True, and now it is False; .*start a new run"):
        fit(data(False), 4, ckpt_path=saved)


def test_resuming_in_another_order_is_refused_with_the_way_out(text: Path, tmp_path: Path):
    saved = tmp_path / "saved.ckpt"
    fit(data_of(text), 2, callbacks=[SaveAt(2, saved)])
    with pytest.raises(ValueError, match=r"seed is 7, and now it is 8; use the checkpoint's text and data\.seed"):
        fit(data_of(text, seed=8), 4, ckpt_path=saved)
    with pytest.raises(ValueError, match=r"tokenizer 'bytes', and this has another \('characters'\)"):
        (tmp_path / "other.txt").write_text("some other text " * 99)
        fit(data_of(tmp_path / "other.txt", tokenizer="characters"), 4, ckpt_path=saved)
    (tmp_path / "other.txt").write_text("yet another text to be evaluated on " * 99)
    Trainer(**QUIET).validate(Recorder(), data_of(tmp_path / "other.txt"), ckpt_path=saved, verbose=False)


def test_a_checkpoint_of_another_shuffle_is_refused_with_the_way_out(text: Path, tmp_path: Path, monkeypatch):
    saved = tmp_path / "saved.ckpt"
    fit(data_of(text), 2, callbacks=[SaveAt(2, saved)])
    monkeypatch.setattr("flash_train.training.data.module.ORDER", 99)
    with pytest.raises(ValueError, match="shuffled rows in another way; go on with that release, or start a new run"):
        fit(data_of(text), 4, ckpt_path=saved)
