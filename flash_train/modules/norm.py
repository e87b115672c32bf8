"""Normalization layers: torch's own, chosen by name."""

from torch import nn

from flash_train.modules.checks import check_choice

NORMS = ("layer", "rms")

# nn.LayerNorm's default, and Llama's; stated, because nn.RMSNorm's default follows the dtype.
EPSILON = 1e-5

Norm = nn.LayerNorm | nn.RMSNorm


def make_norm(kind: str, width: int, *, bias: bool = False) -> Norm:
    """A normalization over the last dimension, of size ``width``.

    ``kind`` is ``"layer"`` (``nn.LayerNorm``, with a bias if asked) or ``"rms"`` (``nn.RMSNorm``, which has no bias).
    Raises ``ValueError`` for another name.
    """
    check_choice("norm", kind, NORMS)
    if kind == "rms":
        return nn.RMSNorm(width, eps=EPSILON)
    return nn.LayerNorm(width, eps=EPSILON, bias=bias)
