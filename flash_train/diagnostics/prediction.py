"""The predicted peak of the step that a Trainer is about to take, beside which the measured one is shown."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from flash_train.memory.advice import Advisory, modelled_advice
from flash_train.memory.cards import Card
from flash_train.memory.predict import Predictor


def predict_step(trainer: Trainer, module: LightningModule, batch: Any) -> Advisory:
    """What one step of `module` on `batch` will fill memory with as `trainer` takes it, on its device, and what flash
    attention and a chunked loss would save of it; nothing is disturbed. A compiled step is predicted as an eager one.

    Raises:
        ValueError: it cannot be predicted; the text says why.
    """
    device = trainer.strategy.root_device
    if trainer.world_size > 1:
        raise ValueError(
            f"a prediction is for one device, and this run has {trainer.world_size}: each rank needs that of its own "
            "batch, and the buckets of its strategy"
        )
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"a prediction is for CUDA devices and CPUs, and this run is on {device.type!r}")
    card = card_at(device) if device.type == "cuda" else None
    predictor = Predictor(
        module,
        precision=str(trainer.precision),
        accumulate=min(trainer.accumulate_grad_batches, 2),  # more do not raise the peak
        gradient_clip=trainer.gradient_clip_val or None,
        device=device.type,
        card=card,
    )
    breakdown = predictor.breakdown(batch)
    return modelled_advice(breakdown, limit=None if card is None else card.memory - card.context)


def card_at(device: torch.device) -> Card:
    """The GPU there."""
    properties = torch.cuda.get_device_properties(device)
    return Card(properties.name, properties.total_memory, (properties.major, properties.minor))
