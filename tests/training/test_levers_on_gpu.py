"""What a lever promises, by a GPU's own counters."""

from functools import partial
from typing import Any

import lightning
import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader

from flash_train.diagnostics.memory import MemoryMonitor
from flash_train.models.gpt import GPT
from flash_train.training.averaging import EMA
from flash_train.training.module import LanguageModel
from flash_train.training.optimizer import adamw, muon

pytestmark = pytest.mark.gpu
V, T, ROWS = 8192, 2048, 4


def fit(*callbacks: lightning.Callback, optimizer: Any = adamw, **options: Any) -> tuple[list[float], dict[str, Any]]:
    """The losses of five steps, and what was measured of their memory."""
    torch.manual_seed(0)
    rows: Any = [{name: torch.randint(V, (T,)) for name in ("inputs", "targets")} for _ in range(6 * ROWS)]
    sizes: dict[str, Any] = {"vocabulary_size": V, "context_length": T, "width": 512, "depth": 6, "heads": 8}
    model = GPT(**sizes, **options)
    monitor = MemoryMonitor(predict=True)
    losses: list[float] = []

    class Losses(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            losses.append(float(pl_module.step_loss))

    trainer = lightning.Trainer(
        accelerator="cuda", devices=1, max_steps=5, precision="bf16-mixed", callbacks=[monitor, Losses(), *callbacks],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(LanguageModel(model, optimizer=partial(optimizer, lr=1e-4)), DataLoader(rows, batch_size=ROWS))
    return losses, monitor.result()


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
@pytest.mark.parametrize(
    "options",
    [
        {"checkpointing": "block"}, {"checkpointing": "block", "checkpoint_every": 2}, {"checkpointing": "selective"},
        {"half_residual": True}, {"optimizer": muon},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("implementation", ["naive", "sdpa", "flash"])
def test_a_lever_takes_off_the_peak_what_was_predicted_and_leaves_the_losses(
    implementation: str, options: dict[str, Any]
) -> None:
    (plain, before), (losses, after) = (fit(implementation=implementation, **more) for more in ({}, options))
    assert after["peak_allocated_bytes"] < before["peak_allocated_bytes"]
    assert abs(after["prediction_error_percent"]) < 2, (after["peak_allocated_bytes"], after["predicted_bytes"])
    assert losses == pytest.approx(plain, abs=0.02 if "optimizer" not in options else 0.5)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
def test_an_average_lies_on_the_gpu_and_takes_four_bytes_a_parameter() -> None:
    ema = EMA()
    _, plain = fit()
    _, averaged = fit(ema)
    size = sum(4 * each.numel() for each in ema.average.values())
    assert all(each.is_cuda for each in ema.average.values())
    taken = averaged["peak_allocated_bytes"] - plain["peak_allocated_bytes"]
    assert taken == pytest.approx(size, rel=0.02)


@pytest.mark.parametrize("checkpointing", ["block", "selective"])
def test_a_checkpointed_model_that_is_compiled_has_the_gradients_of_the_plain_one(checkpointing: str) -> None:
    tokens = torch.randint(V, (2, T), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    found = []
    for kind in ("none", checkpointing):
        torch.manual_seed(0)
        model = GPT(vocabulary_size=V, context_length=T, width=256, depth=2, heads=4, checkpointing=kind).cuda()
        model.compile(fullgraph=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.roll(-1, 1).flatten())
        found.append(torch.autograd.grad(loss, list(model.parameters())))
    for ours, plain in zip(found[1], found[0], strict=True):
        assert (ours - plain).norm() < 0.01 * plain.norm()
