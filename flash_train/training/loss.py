"""The loss of next-token training: a cross-entropy, and the z-loss that may be added to it."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["IGNORED", "check_z_loss", "cross_entropy", "cross_entropy_and_z_loss", "with_hidden"]

IGNORED = -100
"""A target that is left out."""


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """Of logits [B, T, V] of any precision, reduced in fp32, with targets [B, T] int64."""
    # What autocast does by itself; a model whose weights are bf16 would reduce over V in bf16.
    return functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), reduction=reduction, ignore_index=IGNORED
    )


def cross_entropy_and_z_loss(logits: Tensor, targets: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    """The mean cross-entropy, and `z_loss` times the mean square of the log-sum-exp, both over the targets that count
    (Chowdhery et al. 2022, arXiv 2204.02311, section 5), of logits [B, T, V] and targets [B, T] int64, in fp32."""
    x, flat = logits.flatten(0, 1).float(), targets.flatten()
    losses = functional.cross_entropy(x, flat, reduction="none", ignore_index=IGNORED)
    counts = flat != IGNORED
    own = x.gather(1, flat.where(counts, 0)[:, None])[:, 0]
    # What the cross-entropy has subtracted its logit from: a logsumexp() would make temporaries as large as the logits.
    lse = torch.where(counts, losses + own, 0.0)
    number = counts.sum()
    return losses.sum() / number, z_loss * lse.square().sum() / number


def with_hidden(hidden: Tensor, weight: Tensor, *, loss: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """A model's `head` that gives, with the loss of its hidden states and its weight, these themselves."""
    return loss(hidden, weight), hidden.detach(), weight


def check_z_loss(z_loss: Any) -> None:
    """Raise ValueError for what is no factor of a z-loss."""
    if not isinstance(z_loss, int | float) or isinstance(z_loss, bool) or not 0 <= z_loss < math.inf:
        raise ValueError(f"z_loss is a finite number from 0 on, not {z_loss!r}: 1e-4 is usual, 0 is none.")
