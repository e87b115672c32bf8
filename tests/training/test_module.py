import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.nn import functional
from toy_training import BATCHES_PER_EPOCH, B, RecordingLogger, T, ToyData, ToyModel, V, batch, language_model, trainer

from flash_train.models.gpt import GPT
from flash_train.training.averaging import EMA
from flash_train.training.module import LanguageModel
from flash_train.training.optimizer import adamw


def without_dropout(**options: Any) -> LanguageModel:
    torch.manual_seed(4)
    module = LanguageModel(ToyModel(), optimizer=partial(torch_sgd, lr=0.5), **options)
    module.model.dropout.p = 0.0  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    return module


def torch_sgd(module: nn.Module, *, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=lr)


def loss_of(model: nn.Module, positions: list[int]) -> torch.Tensor:
    inputs = torch.cat([batch(position)["inputs"] for position in positions])
    targets = torch.cat([batch(position)["targets"] for position in positions])
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def test_accumulated_batches_learn_and_log_as_one_big_batch_also_when_the_last_of_an_epoch_are_few(
    tmp_path: Path,
) -> None:
    """7 batches by threes: the last step of the epoch has one, and must count it once, not a third."""
    module, log = without_dropout(gradient_clip=None), RecordingLogger()
    run = trainer(tmp_path, max_steps=3, accumulate_grad_batches=3, logger=log, limit_val_batches=0)
    run.fit(module, ToyData())
    model = without_dropout().model
    optimizer = torch_sgd(model, lr=0.5)
    losses = []
    for positions in ([0, 1, 2], [3, 4, 5], [6]):
        loss = loss_of(model, positions)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    torch.testing.assert_close(module.model.state_dict(), model.state_dict())
    assert [row["train/loss"] for _, row in log.rows if "train/loss" in row] == pytest.approx(losses, rel=1e-6)
    assert BATCHES_PER_EPOCH == 7


def test_one_step_has_one_row_with_one_number_and_only_on_log_steps(tmp_path: Path) -> None:
    log = RecordingLogger()
    run = trainer(
        tmp_path, max_steps=7, logger=log, log_every_n_steps=3, accumulate_grad_batches=2, limit_val_batches=0
    )
    run.fit(language_model(), ToyData())
    rows = [(step, set(row)) for step, row in log.rows if step is not None and any("/" in name for name in row)]
    names = {"train/loss", "train/gradient_norm", "train/learning_rate", "train/tokens", "epoch"}
    assert rows == [(2, names), (5, names)]
    # Seven batches by twos: the fourth step of the first epoch has a single batch.
    assert [row["train/tokens"] for _, row in log.rows if "train/tokens" in row] == [6 * B * T, (7 + 4) * B * T]


def test_tokens_are_counted_exactly_where_fp32_cannot(tmp_path: Path) -> None:
    module, log = language_model(), RecordingLogger()
    module.tokens_seen = 2**24
    trainer(tmp_path, max_steps=1, logger=log, limit_val_batches=0).fit(module, ToyData())
    assert log.rows[0][1]["train/tokens"] == 2**24 + B * T


def test_a_fused_optimizer_is_clipped_under_mixed_precision(tmp_path: Path) -> None:
    class Norms(Callback):
        before: list[float] = []
        after: list[float] = []

        def on_train_batch_end(
            self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
            self.after.append(float(nn.utils.get_total_norm(gradients)))
            self.before.append(float(pl_module.gradient_norm))  # pyright: ignore[reportArgumentType]

    norms = Norms()
    module = LanguageModel(ToyModel(), optimizer=partial(adamw, lr=0.01, fused=True), gradient_clip=0.125)
    run = trainer(tmp_path, norms, max_steps=2, precision="bf16-mixed", limit_val_batches=0, log_every_n_steps=50)
    run.fit(module, ToyData())
    assert min(norms.before) > 0.125 and norms.after == pytest.approx([0.125, 0.125], rel=1e-4)


def test_clipping_by_the_trainer_is_answered_with_where_it_is_set(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"give LanguageModel\(gradient_clip=...\) instead"):
        trainer(tmp_path, max_steps=1, gradient_clip_val=1.0).fit(language_model(), ToyData())
    with pytest.raises(ValueError, match="gradient_clip is a positive norm or None"):
        language_model(gradient_clip=0.0)


def test_validation_loss_is_the_mean_over_tokens_not_over_batches(tmp_path: Path) -> None:
    module = language_model(bytes_per_token=1.5)
    [logged] = trainer(tmp_path).validate(module, ToyData(), verbose=False)
    sums, tokens = 0.0, 0
    for each in ToyData().val_dataloader():
        logits = module.model.eval()(each["inputs"]).flatten(0, 1)
        sums += float(functional.cross_entropy(logits, each["targets"].flatten(), reduction="sum").detach())
        tokens += int((each["targets"] != -100).sum())
    assert tokens == B * T + T
    assert logged["validation/loss"] == pytest.approx(sums / tokens, rel=1e-6)
    assert logged["validation/bits_per_byte"] == pytest.approx(sums / tokens / math.log(2) / 1.5, rel=1e-6)


def test_documents_of_a_batch_have_the_loss_that_each_has_alone() -> None:
    torch.manual_seed(4)
    module = language_model()
    module.model = GPT(vocabulary_size=11, context_length=T, width=12, depth=2, heads=3)
    whole = batch(0)
    inputs, targets = whole["inputs"], whole["targets"]
    ids = torch.tensor([2, 2, 2, 7, 7]).expand(B, T)
    alone = [module.model(inputs[:, part]) for part in (slice(0, 3), slice(3, T))]
    expected = functional.cross_entropy(torch.cat(alone, 1).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(module._cross_entropy(whole | {"documents": ids}, "mean"), expected)
    assert not torch.isclose(module._cross_entropy(whole, "mean"), expected, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:.*use of fork\\(\\) may lead to deadlocks:DeprecationWarning")
@pytest.mark.parametrize("options", [{}, {"devices": 2, "strategy": "ddp_fork"}], ids=["alone", "data-parallel"])
def test_a_loss_in_chunks_trains_and_validates_as_the_whole_one(tmp_path: Path, options: dict[str, Any]) -> None:
    found = []
    for chunk_rows in (None, 7):
        torch.manual_seed(4)
        model = GPT(vocabulary_size=11, context_length=T, width=12, depth=2, heads=3, logit_soft_cap=0.1)
        module = LanguageModel(model, optimizer=partial(torch_sgd, lr=0.5), loss_chunk_rows=chunk_rows)
        trainer(tmp_path, max_steps=3, **options).fit(module, ToyData())
        [logged] = trainer(tmp_path).validate(module, ToyData(), verbose=False)
        found.append((module.state_dict(), logged["validation/loss"]))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("chunk_rows", [None, 7])
def test_a_z_loss_is_trained_on_logged_apart_and_never_validated(tmp_path: Path, chunk_rows: int | None) -> None:
    class Masked(ToyData):
        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            return {**batch, "targets": torch.where(batch["inputs"] == 3, -100, batch["targets"])}

    def make() -> GPT:
        torch.manual_seed(4)
        return GPT(
            vocabulary_size=V, context_length=T, width=12, depth=2, heads=3, vocabulary_multiple=8, logit_soft_cap=0.1
        )  # fmt: skip

    module, log = LanguageModel(
        make(), optimizer=partial(torch_sgd, lr=0.5), gradient_clip=None, z_loss=0.1, loss_chunk_rows=chunk_rows
    ), RecordingLogger()  # fmt: skip
    often: dict[str, Any] = {"accumulate_grad_batches": 2, "log_every_n_steps": 2, "limit_val_batches": 0}
    trainer(tmp_path, max_steps=4, logger=log, **often).fit(module, Masked())

    model, expected = make(), []
    optimizer = torch_sgd(model, lr=0.5)
    for positions in ([0, 1], [2, 3], [4, 5], [6]):
        optimizer.zero_grad()
        entropies, losses = [], []
        for position in positions:
            inputs, targets = batch(position)["inputs"], batch(position)["targets"]
            logits, counts = model(inputs)[inputs != 3], targets[inputs != 3]
            entropies.append(functional.cross_entropy(logits, counts))
            losses.append(entropies[-1] + 0.1 * logits.logsumexp(1).square().mean())
        loss, entropy = torch.stack(losses).mean(), torch.stack(entropies).mean()
        loss.backward()
        optimizer.step()
        expected.append((float(loss.detach()), float(entropy.detach())))
    torch.testing.assert_close(module.state_dict(), {f"model.{k}": v for k, v in model.state_dict().items()})
    rows = [(row["train/loss"], row["train/cross_entropy"]) for _, row in log.rows if "train/loss" in row]
    assert rows == [pytest.approx(expected[step], rel=1e-5) for step in (1, 3)]
    [logged] = trainer(tmp_path).validate(module, ToyData(), verbose=False)
    module.z_loss = 0.0
    assert trainer(tmp_path).validate(module, ToyData(), verbose=False) == [logged]


@pytest.mark.parametrize("chunk_rows", [None, 7])
def test_a_z_loss_of_a_batch_without_targets_gives_no_gradient(chunk_rows: int | None, tmp_path: Path) -> None:
    model = GPT(vocabulary_size=V, context_length=T, width=12, depth=1, heads=3)
    module = LanguageModel(model, optimizer=partial(torch_sgd, lr=0.5), z_loss=0.1, loss_chunk_rows=chunk_rows)
    module.trainer = trainer(tmp_path)
    loss = module.training_step({"inputs": batch(0)["inputs"], "targets": torch.full((B, T), -100)}, 0)
    loss.backward()
    assert loss.isnan() and not any(p.grad.any() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("z_loss", [-1e-4, math.inf, math.nan, "much", True])
def test_a_z_loss_that_is_no_factor_is_refused(z_loss: Any) -> None:
    with pytest.raises(ValueError, match=f"z_loss is a finite number from 0 on, not {z_loss!r}: 1e-4 is usual"):
        language_model(z_loss=z_loss)


def test_a_model_that_keeps_its_head_to_itself_is_told_what_the_chunks_need() -> None:
    with pytest.raises(ValueError, match=r"loss_chunk_rows=7 needs a model whose forward takes head=, and ToyModel's"):
        language_model(loss_chunk_rows=7)
    with pytest.raises(ValueError, match="loss_chunk_rows is a number of rows from 1 on, or None .*, not 0"):
        language_model(loss_chunk_rows=0)


def test_bf16_weights_have_an_fp32_loss() -> None:
    module = language_model().bfloat16()
    assert module._cross_entropy(batch(0), "mean").dtype == torch.float32


def test_a_compiled_model_keeps_the_names_of_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = torch._dynamo.testing.CompileCounter()  # Inductor would take half a minute here
    monkeypatch.setattr(torch, "compile", lambda function, **_: torch._dynamo.optimize(graphs)(function))
    plain, compiled = without_dropout(), without_dropout(compile=True)
    for module in (plain, compiled):
        trainer(tmp_path, max_steps=2, limit_val_batches=0).fit(module, ToyData())
    assert graphs.frame_count == 1
    torch.testing.assert_close(compiled.state_dict(), plain.state_dict())


@pytest.mark.parametrize("z_loss", [0.0, 1e-4])
def test_a_run_compiles_one_graph_to_train_and_one_to_validate_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, z_loss: float
) -> None:
    """With new documents in each batch, accumulation, an average and a loss in chunks; a graph break is an error."""
    torch.compiler.reset()
    graphs = torch._dynamo.testing.CompileCounter()
    monkeypatch.setattr(torch, "compile", lambda f, **_: torch._dynamo.optimize(graphs, nopython=True)(f))

    class Packed(ToyData):
        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            return {**batch, "documents": (batch["inputs"] < 3).cumsum(1)}

    sizes: dict[str, Any] = {"vocabulary_size": V, "context_length": T, "width": 8, "depth": 2, "heads": 2}
    model = GPT(**sizes, dropout=0.1, attention_dropout=0.1, checkpointing="selective", checkpoint_every=2)
    module = LanguageModel(model, optimizer=partial(adamw, lr=0.01), compile=True, loss_chunk_rows=4, z_loss=z_loss)
    often: dict[str, Any] = {"val_check_interval": 3, "check_val_every_n_epoch": None, "accumulate_grad_batches": 2}
    often["log_every_n_steps"] = 2
    trainer(tmp_path, EMA(), max_steps=9, precision="bf16-mixed", **often).fit(module, Packed())
    assert module.scores and graphs.frame_count == 2


def test_the_norm_of_bf16_gradients_is_measured_in_fp32_and_clips_them(tmp_path: Path) -> None:
    """In bf16 a norm has three digits."""

    class Look(Callback):
        def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
            self.before = norm(pl_module)

    def norm(module: nn.Module) -> float:
        gradients = [p.grad.double().flatten() for p in module.parameters() if p.grad is not None]
        return float(torch.cat(gradients).norm())

    look, module = Look(), without_dropout(gradient_clip=0.01)
    trainer(tmp_path, look, max_steps=1, precision="bf16-true", limit_val_batches=0).fit(module, ToyData())
    assert module.gradient_norm is not None and module.gradient_norm.dtype == torch.float32
    assert float(module.gradient_norm) == pytest.approx(look.before, rel=1e-6)
    assert norm(module) == pytest.approx(0.01, rel=0.01)
