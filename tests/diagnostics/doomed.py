"""A LightningModule that runs out of memory when and where it is told to, or says so."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from flash_train.memory.cards import MIB

V, C, H, B, T = 503, 48, 3, 4, 128
SCORES = 4 * B * H * T * T
"""Bytes of one layer's probabilities."""


def say(size: int) -> torch.OutOfMemoryError:
    """What torch would raise."""
    return torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size / MIB:.2f} MiB. GPU 0 has a total")


class Attention(nn.Module):
    def __init__(self, doom: Any) -> None:
        super().__init__()
        self.qkv, self.doom = nn.Linear(C, 3 * C, bias=False), doom

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, C // H)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / 4
        self.doom("forward" if self.training else "validation", x)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class Block(nn.Module):
    def __init__(self, doom: Any) -> None:
        super().__init__()
        self.attention, self.mix = Attention(doom), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(self.attention(x))


class Doom:
    """An optimizer's, at the first that its step does after the closure, which is forward and backward."""

    doom: Any = None

    def _init_group(self, *args: Any, **kwargs: Any) -> Any:
        if self.doom is not None:
            self.doom("optimizer")
        return super()._init_group(*args, **kwargs)  # pyright: ignore


class AdamW(Doom, torch.optim.AdamW):  # pyright: ignore
    pass


class SGD(Doom, torch.optim.SGD):  # pyright: ignore
    pass


class Doomed(pl.LightningModule):
    """`error` is raised in `phase` (forward, backward, optimizer, validation, or "") of the second step; a number of
    bytes is really asked for instead, in the first and on fake tensors too."""

    def __init__(self, phase: str = "", error: BaseException | int = 0, optimizer: Any = AdamW) -> None:
        super().__init__()
        self.phase, self.error, self.optimizer = phase, error, optimizer
        self.embed, self.head = nn.Embedding(V, C), nn.Linear(C, V)
        self.blocks = nn.ModuleList([Block(lambda phase, x: None), Block(self.perish)])

    def perish(self, phase: str, x: Any = None) -> None:
        if phase != self.phase:
            return
        if isinstance(self.error, int):
            torch.empty(self.error, dtype=torch.uint8, device=self.device)
        elif not isinstance(x, FakeTensor) and (self.trainer.global_step == 1 or phase == "validation"):
            raise self.error

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(x).flatten(0, 1), batch.flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if not isinstance(loss, FakeTensor):
            loss.register_hook(lambda gradient: self.perish("backward", gradient))
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        _ = self.trainer.estimated_stepping_batches  # as many do, and only a running trainer knows it
        optimizer = self.optimizer(self.parameters())
        optimizer.doom = self.perish
        return optimizer


def tokens(rows: int = B, length: int = T) -> Any:
    return DataLoader(torch.randint(V, (4 * rows, length)), batch_size=rows)  # pyright: ignore[reportArgumentType]
