"""What Lightning's own loop takes, by the allocator's own events, is what was predicted."""

from functools import partial
from typing import Any

import lightning
import pytest
import torch
from torch.utils.data import DataLoader

from flash_train.diagnostics.memory import MemoryMonitor
from flash_train.diagnostics.probe import probe_memory
from flash_train.memory.cards import CARDS
from flash_train.memory.predict import predict_peak
from flash_train.models.checkpointing import WHOLE_BLOCKS
from flash_train.models.gpt import GPT
from flash_train.training.module import LanguageModel
from flash_train.training.optimizer import adamw, muon

DEPTH = 3
SCALARS = 64  # bytes: what Lightning and the data loader keep
PACKED = 150_000  # bytes that oneDNN takes inside a product of bf16 matrices, where blocks' own have the peak
RANDOM_STATE = 5056  # bytes that torch.utils.checkpoint keeps for each block, of a CPU's generator


def language_model(implementation: str, *, chunk_rows: int | None = None, optimizer: Any = adamw,
                   **options: Any) -> LanguageModel:  # fmt: skip
    sizes = {"vocabulary_size": 211, "context_length": 256, "width": 64, "depth": DEPTH, "heads": 4}
    model = GPT(**{**sizes, **options}, implementation=implementation)
    return LanguageModel(model, optimizer=partial(optimizer, lr=1e-3), loss_chunk_rows=chunk_rows)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
@pytest.mark.parametrize("implementation", ["naive", "sdpa"])
@pytest.mark.parametrize(
    "precision, accumulate, options",
    [
        ("32-true", 1, {}), ("32-true", 2, {}), ("bf16-true", 1, {}), ("32-true", 1, {"chunk_rows": 128}),
        ("32-true", 1, {"checkpointing": "block"}), ("32-true", 1, {"checkpointing": "block", "checkpoint_every": 2}),
        ("32-true", 1, {"checkpointing": "selective"}), ("bf16-mixed", 1, {"half_residual": True}),
        ("32-true", 2, {"checkpointing": "activation", "bias": True}),
        ("bf16-true", 1, {"checkpointing": "activation", "checkpoint_every": 2, "feed_forward": "swiglu"}),
        ("bf16-mixed", 1, {"checkpointing": "block"}), ("bf16-mixed", 1, {"checkpointing": "selective"}),
        ("bf16-true", 1, {"optimizer": partial(adamw, master_weights=True)}),
        ("bf16-true", 2, {"optimizer": partial(adamw, master_weights=True, fp32_gradients=True)}),
    ],
)  # fmt: skip
def test_every_phase_of_a_run_is_predicted(
    implementation: str, precision: str, accumulate: int, options: dict[str, Any]
) -> None:
    rows = [{name: torch.randint(211, (256,)) for name in ("inputs", "targets")} for _ in range(32)]
    monitor = MemoryMonitor(probe_step=2)
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=4, accumulate_grad_batches=accumulate, precision=precision,  # pyright: ignore
        callbacks=[monitor], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    module = language_model(implementation, **options)
    trainer.fit(module, DataLoader(rows, batch_size=4))  # pyright: ignore[reportArgumentType]
    batch = {name: torch.stack([row[name] for row in rows[:4]]) for name in rows[0]}
    predicted = predict_peak(
        language_model(implementation, **options), batch, precision=precision, accumulate=accumulate, device="cpu"
    )  # fmt: skip
    whole = options.get("checkpointing") in WHOLE_BLOCKS
    checkpointed = len(range(0, DEPTH, options.get("checkpoint_every", 1))) if whole else 0
    kept = SCALARS + checkpointed * RANDOM_STATE + (PACKED if checkpointed and precision == "bf16-mixed" else 0)
    for phase, peak in predicted.phases.items():
        assert 0 <= monitor.result()["phases"][phase] - peak.size <= kept, phase


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
def test_what_a_step_returns_beside_its_loss_is_there_until_it_ends() -> None:
    class Returning(LanguageModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return {"loss": loss, "logits": self.model(batch["inputs"])}

    rows = [{name: torch.randint(211, (256,)) for name in ("inputs", "targets")} for _ in range(16)]
    module = Returning(language_model("sdpa").model, optimizer=partial(adamw, lr=1e-3))
    monitor = MemoryMonitor(probe_step=2)
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=4, callbacks=[monitor], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(rows, batch_size=4))  # pyright: ignore[reportArgumentType]
    batch = {name: torch.stack([row[name] for row in rows[:4]]) for name in rows[0]}
    predicted = predict_peak(module, batch, device="cpu")
    probed = probe_memory(
        module, batch, loss=lambda batch: module.training_step(batch, 0), optimizer=trainer.optimizers[0]
    )
    for phase, peak in predicted.phases.items():
        assert 0 <= monitor.result()["phases"][phase] - peak.size <= SCALARS, phase
        assert abs(probed.phases[phase].tracked - peak.size) <= SCALARS, phase


def test_muon_s_state_is_half_of_adamw_s_for_the_matrices_it_takes() -> None:
    batch = {name: torch.empty(2, 64, dtype=torch.int64, device="meta") for name in ("inputs", "targets")}
    states = []
    for optimizer in (adamw, muon):
        prediction = predict_peak(language_model("flash", optimizer=optimizer), batch)
        states.append(prediction.phases["backward"].categories["optimizer state"])
    matrices = sum(p.numel() for p in language_model("flash").model.blocks.parameters() if p.dim() == 2)  # pyright: ignore
    counters = 512 * 4 * DEPTH  # AdamW counts the steps of each parameter, in a block of its own
    assert states[0] - states[1] == 4 * matrices + counters


@pytest.mark.parametrize("fp32_gradients", [False, True])
def test_masters_are_predicted_with_twelve_bytes_a_parameter_beside_two_and_two_or_four(fp32_gradients: bool) -> None:
    batch = {name: torch.empty(2, 64, dtype=torch.int64, device="meta") for name in ("inputs", "targets")}
    optimizer = partial(adamw, master_weights=True, fp32_gradients=fp32_gradients)
    module = language_model("flash", optimizer=optimizer)
    phases = predict_peak(module, batch, precision="bf16-true", device="cpu").phases
    sizes = [p.numel() for p in module.parameters()]
    held = phases["optimizer"].categories
    assert held["optimizer state"] == 12 * sum(sizes) + 4 * len(sizes), "and a counter for each"
    assert held["gradients"] == (4 if fp32_gradients else 2) * sum(sizes)
    weights = [block for block in phases["optimizer"].blocks if block.category == "parameters"]
    assert sum(block.size for block in weights if block.dtype == torch.bfloat16) == 2 * sum(sizes)


@pytest.mark.parametrize("implementation", ["naive", "sdpa", "flash"])
def test_each_lever_takes_off_the_peak_that_is_predicted_for_a_gpu(implementation: str) -> None:
    batch = {name: torch.empty(8, 256, dtype=torch.int64, device="meta") for name in ("inputs", "targets")}

    def peak(**options: Any) -> int:
        return predict_peak(language_model(implementation, depth=6, **options), batch, precision="bf16-mixed").peak

    plain, some, selective, block = (
        peak(checkpointing=kind, checkpoint_every=every)
        for kind, every in (("none", 1), ("block", 2), ("selective", 1), ("block", 1))
    )
    assert plain > some > block and plain > selective >= block
    assert (selective > block) == (implementation != "naive"), "naive attention has no results to keep"
    activation, hidden = peak(checkpointing="activation"), 2 * 8 * 256 * 4 * 64
    again = 2 * hidden  # in the backward, where the peak may be, one layer's act(x) and its gradient are there
    assert 6 * hidden - again <= plain - activation <= 6 * hidden
    saved = plain - peak(half_residual=True)
    assert saved > 6 * 2 * 2 * 8 * 256 * 64, "two bytes of each of the twelve norms' inputs"


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_prediction_for_a_gpu_sees_that_the_logits_never_exist(precision: str) -> None:
    batch = {name: torch.empty(8, 256, dtype=torch.int64, device="meta") for name in ("inputs", "targets")}
    peaks = {}
    for chunk_rows in (None, 128):
        module = LanguageModel(GPT(vocabulary_size=20_000, context_length=256, width=64, depth=1, heads=4),
                               optimizer=partial(adamw, lr=1e-3), loss_chunk_rows=chunk_rows)  # fmt: skip
        peaks[chunk_rows] = predict_peak(module, batch, precision=precision)
    rows = 8 * 256
    held = peaks[None].peak - peaks[128].peak
    assert held > 0.9 * (rows - 128) * 20_000 * (8 if precision == "32-true" else 10)
    assert not any(block.shape == (rows, 20_000) for block in peaks[128].blocks)


@pytest.mark.parametrize(
    ("implementation", "precision", "options"),
    [("sdpa", "bf16-mixed", {"attention_dropout": 0.1}), ("sdpa_cudnn", "bf16-mixed", {"attention_dropout": 0.1}),
     ("sdpa_efficient", "32-true", {})],
)  # fmt: skip
def test_what_only_a_gpu_s_back_ends_take_is_predicted_for_a_gpu_and_refused_for_a_cpu(
    implementation: str, precision: str, options: dict[str, Any]
) -> None:
    batch = {name: torch.empty(4, 256, dtype=torch.int64, device="meta") for name in ("inputs", "targets")}
    module = language_model(implementation, **options)
    modules = {"naive": language_model("naive"), "flash": language_model("flash"), "of a GPU": module}
    peaks = {
        name: predict_peak(each, batch, precision=precision, card=CARDS["h200"]).requested
        for name, each in modules.items()
    }
    assert peaks["flash"] * 0.99 < peaks["of a GPU"] < peaks["naive"]
    with pytest.raises(ValueError, match=f"'{implementation}': torch's back end takes no q"):
        predict_peak(module, batch, precision=precision, device="cpu")
