"""Optimizers as functions of a module, so that a YAML `_partial_: true` gives a LanguageModel its optimizer."""

from collections.abc import Sequence

from torch import nn
from torch.optim import AdamW

__all__ = ["adamw"]


def adamw(
    module: nn.Module,
    *,
    lr: float,
    betas: Sequence[float] = (0.9, 0.95),
    weight_decay: float = 0.1,
    eps: float = 1e-8,
    fused: bool | None = None,
) -> AdamW:
    """AdamW over the trainable parameters of `module`, in two groups: matrices decay, gains and biases do not.

    A matrix is a parameter of two dimensions or more, embeddings included. A tied parameter is taken once.

    Args:
        lr: peak learning rate; a schedule multiplies it.
        betas: decay of the running mean of the gradient, and of its square.
        fused: one kernel for the whole update. The default is to fuse when every parameter is on a GPU.

    Raises:
        ValueError: nothing is trainable, `betas` are not two numbers, or `weight_decay` is negative.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError(f"{type(module).__name__} has no trainable parameter: set requires_grad on what is to learn.")
    if len(betas) != 2:
        raise ValueError(f"betas are two numbers, not {list(betas)}: (0.9, 0.95) is usual for language models.")
    if not weight_decay >= 0:  # torch looks at its own default only, not at a group's
        raise ValueError(f"weight_decay cannot be {weight_decay}: 0 means none, and 0.1 is usual for language models.")
    matrices = [p for p in parameters if p.dim() >= 2]
    vectors = [p for p in parameters if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return AdamW(
        [group for group in groups if group["params"]],
        lr=lr,
        # A list from a configuration would be kept in the optimizer's state, and a checkpoint holds plain values only.
        betas=(float(betas[0]), float(betas[1])),
        eps=eps,
        fused=all(p.is_cuda for p in parameters) if fused is None else fused,
    )
