"""Normalization layers: torch's own, chosen by name."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_train.modules.checks import check_above_zero, check_choice

NORMS = ("layer", "rms")

# nn.LayerNorm's default, and Llama's; stated, because nn.RMSNorm's default follows the dtype.
EPSILON = 1e-5

Norm = nn.LayerNorm | nn.RMSNorm


def make_norm(kind: str, width: int, *, bias: bool = False, epsilon: float = EPSILON) -> Norm:
    """A normalization over the last dimension, of size ``width``.

    ``kind`` is ``"layer"`` (``nn.LayerNorm``, with a bias if asked) or ``"rms"`` (``nn.RMSNorm``, which has no bias).
    ``epsilon`` is added to the variance, or to the mean square. Raises ``ValueError`` for another name, and unless
    ``epsilon`` is positive.
    """
    check_choice("norm", kind, NORMS)
    check_above_zero("norm_epsilon", epsilon)
    if kind == "rms":
        return nn.RMSNorm(width, eps=epsilon)
    return nn.LayerNorm(width, eps=epsilon, bias=bias)


def normalize(norm: Norm, x: Tensor) -> Tensor:
    """``norm(x)``; for an ``x`` narrower than the gains in its own dtype, with statistics in fp32 as the kernels do.

    Autocast would cast such an ``x`` to fp32, and keep that for the backward: twice what the stream itself takes.
    """
    if x.dtype == norm.weight.dtype:
        return norm(x)
    with torch.autocast(x.device.type, enabled=False):
        weight = norm.weight.to(x.dtype)
        if isinstance(norm, nn.RMSNorm):
            return F.rms_norm(x, norm.normalized_shape, weight, norm.eps)
        bias = None if norm.bias is None else norm.bias.to(x.dtype)
        return F.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)
