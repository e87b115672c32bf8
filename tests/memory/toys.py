"""Modules that nobody here would write, and a training step that is really taken."""

from collections.abc import Callable
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flash_train.memory.live import LiveBytes
from flash_train.models.gpt import GPT

V, T, B = 101, 37, 3


class Language(nn.Module):
    """A GPT with a training step, and nothing of Lightning's."""

    def __init__(self, implementation: str, checkpointing: str = "none") -> None:
        super().__init__()
        self.model = GPT(vocabulary_size=V, context_length=4096, width=24, depth=2, heads=2,
                         implementation=implementation, checkpointing=checkpointing)  # fmt: skip

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        return cross_entropy(self.model(batch["inputs"]).flatten(0, 1).float(), batch["targets"].flatten())


class Foreign(lightning.LightningModule):
    """torch's own encoder with dropout, logging, a state of its own, a parameter that is never used, AdamW."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True)
        self.embed = nn.Embedding(V, 16)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, V)
        self.idle = nn.Parameter(torch.zeros(1000))
        self.losses: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> dict[str, Tensor]:
        tokens, targets = batch
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=self.device)
        loss = cross_entropy(
            self.head(self.body(self.embed(tokens), mask=mask, is_causal=True)).flatten(0, 1), targets.flatten()
        )
        self.losses.append(loss.detach())
        self.log("loss", loss, prog_bar=True)
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


def tokens(rows: int = B, length: int = T) -> dict[str, Tensor]:
    return {name: torch.randint(V, (rows, length)) for name in ("inputs", "targets")}


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters())


def take_real_steps(
    module: nn.Module,
    batch: Any,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    *,
    autocast: bool = False,
    accumulate: int = 1,
    clip: float | None = None,
) -> LiveBytes:
    """Two steps as Lightning takes them; the bytes of the second, on real tensors."""
    optimizer = make_optimizer(module)
    step: Any = module.training_step
    live = LiveBytes(module)
    for _ in range(2):
        live = LiveBytes(module)
        loss = None
        live.hold("parameters", module)
        live.hold("gradients", [p.grad for p in module.parameters() if p.grad is not None])
        live.hold("optimizer state", optimizer)
        live.hold("inputs", batch)
        with live:
            for micro_batch in range(accumulate):
                loss = None
                live.enter("forward")
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast, cache_enabled=False):
                    answer = step(batch, 0) if isinstance(module, lightning.LightningModule) else step(batch)
                loss = (answer["loss"] if isinstance(answer, dict) else answer) / accumulate
                del answer
                live.hold_activations()
                if micro_batch == 0:
                    optimizer.zero_grad()
                live.enter("backward")
                loss.backward()
                live.hold("gradients", [p.grad for p in module.parameters() if p.grad is not None])
            live.enter("optimizer")
            if clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()
    return live
