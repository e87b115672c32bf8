"""What a lever promises, by a GPU's own counters."""

from copy import deepcopy
from functools import partial
from typing import Any

import lightning
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from flash_train.diagnostics.memory import MemoryMonitor
from flash_train.models.gpt import GPT
from flash_train.training.averaging import EMA
from flash_train.training.master_weights import AdamWWithMasters
from flash_train.training.module import LanguageModel
from flash_train.training.optimizer import adamw, muon

pytestmark = pytest.mark.gpu
V, T, ROWS = 8192, 2048, 4


def fit(
    *callbacks: lightning.Callback, optimizer: Any = adamw, precision: Any = "bf16-mixed", **options: Any
) -> tuple[list[float], dict[str, Any]]:
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
        accelerator="cuda", devices=1, max_steps=5, precision=precision, callbacks=[monitor, Losses(), *callbacks],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(LanguageModel(model, optimizer=partial(optimizer, lr=1e-4)), DataLoader(rows, batch_size=ROWS))
    return losses, monitor.result()


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
@pytest.mark.parametrize(
    "options",
    [
        {"checkpointing": "block"}, {"checkpointing": "block", "checkpoint_every": 2}, {"checkpointing": "selective"},
        {"checkpointing": "activation"}, {"checkpointing": "activation", "feed_forward": "swiglu"},
        {"half_residual": True}, {"optimizer": muon},
    ],
    ids=lambda change: ",".join(f"{name}={getattr(value, '__name__', value)}" for name, value in change.items()),
)  # fmt: skip
@pytest.mark.parametrize("implementation", ["naive", "sdpa", "flash"])
def test_a_lever_takes_off_the_peak_what_was_predicted_and_leaves_the_losses(
    implementation: str, options: dict[str, Any]
) -> None:
    same = {name: x for name, x in options.items() if name == "feed_forward"}
    (plain, before), (losses, after) = (fit(implementation=implementation, **more) for more in (same, options))
    assert after["peak_allocated_bytes"] < before["peak_allocated_bytes"]
    assert abs(after["prediction_error_percent"]) < 2, (after["peak_allocated_bytes"], after["predicted_bytes"])
    assert losses == pytest.approx(plain, abs=0.02 if "optimizer" not in options else 0.5)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
def test_an_average_lies_on_the_gpu_and_takes_four_bytes_a_parameter() -> None:
    ema = EMA()
    _, plain = fit()
    _, averaged = fit(ema)
    sizes = [4 * each.numel() for each in ema.average.values()]
    assert all(each.is_cuda for each in ema.average.values())
    taken = averaged["peak_allocated_bytes"] - plain["peak_allocated_bytes"]
    rest = 2**20  # at most: what the allocator does not cut off a block of more than 1 MiB, and counts with it
    assert sum(sizes) <= taken <= sum(size + (rest if size > 2**20 else 512) for size in sizes)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
@pytest.mark.parametrize("fp32_gradients", [False, True])
def test_bf16_weights_over_masters_take_what_was_predicted_and_lose_as_mixed_precision(fp32_gradients: bool) -> None:
    masters = partial(adamw, master_weights=True, fp32_gradients=fp32_gradients)
    (plain, _), (losses, after) = fit(), fit(optimizer=masters, precision="bf16-true")
    assert abs(after["prediction_error_percent"]) < 2, (after["peak_allocated_bytes"], after["predicted_bytes"])
    assert losses == pytest.approx(plain, abs=0.05)


@pytest.mark.parametrize("way", [{}, {"foreach": True}], ids=["fused", "foreach"])
def test_masters_are_fp32_weights_with_the_same_gradients_in_a_few_kernels_that_nobody_waits_for(
    way: dict[str, Any],
) -> None:
    torch.manual_seed(0)
    wide = nn.Sequential(*(nn.Linear(128, 128) for _ in range(40))).cuda()
    half = deepcopy(wide).bfloat16()
    plain, ours = adamw(wide, lr=1e-3, **way), adamw(half, lr=1e-3, master_weights=True, **way)
    assert isinstance(ours, AdamWWithMasters)
    ours.begin_from(dict(zip(half.parameters(), wide.parameters(), strict=True)))
    for _ in range(3):
        for p, q in zip(half.parameters(), wide.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.float()
        plain.step()
        try:
            torch.cuda.set_sync_debug_mode("error")
            ours.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for p, q in zip(half.parameters(), wide.parameters(), strict=True):
        master = ours.master(p)
        assert master is not None and torch.equal(master, q) and torch.equal(p, q.bfloat16())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        ours.step()
        torch.cuda.synchronize()
    kernels = sum(event.count for event in profile.key_averages() if "multi_tensor" in event.key)
    others = sum(event.count for event in profile.key_averages() if "elementwise_kernel" in event.key)
    assert kernels >= 6 and others == 0, "of 80 tensors none is copied or updated alone"


@pytest.mark.parametrize("checkpointing", ["activation", "block", "selective"])
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
