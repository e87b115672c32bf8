"""What Lightning's own loop takes, by the allocator's own events, is what was predicted."""

from functools import partial

import lightning
import pytest
import torch
from torch.utils.data import DataLoader

from flash_train.diagnostics.memory import MemoryMonitor
from flash_train.memory.predict import predict_peak
from flash_train.models.gpt import GPT
from flash_train.training.module import LanguageModel
from flash_train.training.optimizer import adamw

DEPTH = 3
SCALARS = 64  # bytes: what Lightning and the data loader keep
RANDOM_STATE = 5056  # bytes that torch.utils.checkpoint keeps for each block, of a CPU's generator


def language_model(implementation: str, checkpointing: str) -> LanguageModel:
    model = GPT(vocabulary_size=211, context_length=256, width=64, depth=DEPTH, heads=4, implementation=implementation,
                checkpointing=checkpointing)  # fmt: skip
    return LanguageModel(model, optimizer=partial(adamw, lr=1e-3))


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
@pytest.mark.parametrize("implementation", ["naive", "sdpa"])
@pytest.mark.parametrize(
    "precision, accumulate, checkpointing",
    [("32-true", 1, "none"), ("32-true", 2, "none"), ("bf16-true", 1, "none"), ("32-true", 1, "block")],
)
def test_every_phase_of_a_run_is_predicted(
    implementation: str, precision: str, accumulate: int, checkpointing: str
) -> None:
    rows = [{name: torch.randint(211, (256,)) for name in ("inputs", "targets")} for _ in range(32)]
    monitor = MemoryMonitor(probe_step=2)
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=4, accumulate_grad_batches=accumulate, precision=precision,  # pyright: ignore
        callbacks=[monitor], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(language_model(implementation, checkpointing), DataLoader(rows, batch_size=4))  # pyright: ignore[reportArgumentType]
    batch = {name: torch.stack([row[name] for row in rows[:4]]) for name in rows[0]}
    predicted = predict_peak(
        language_model(implementation, checkpointing), batch, precision=precision, accumulate=accumulate, device="cpu"
    )
    kept = SCALARS + (DEPTH * RANDOM_STATE if checkpointing == "block" else 0)
    for phase, peak in predicted.phases.items():
        assert 0 <= monitor.result()["phases"][phase] - peak.size <= kept, phase
