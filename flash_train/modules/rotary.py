"""Rotary position embedding (Su et al., 2021, arXiv 2104.09864)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from flash_train.modules.checks import check_positive


class RotaryEmbedding(nn.Module):
    """Turns queries and keys by angles proportional to their positions.

    Element ``i`` of the first half of a head is paired with element ``i`` of the second half and turned by
    ``position * base ** (-2 i / D)``. This is the half-split convention of GPT-NeoX and Llama; the paper pairs
    neighbours, so weights trained in that convention need their rows permuted first.

    The tables of cosines and sines, ``[context_length, D / 2]``, are made once. One instance serves all the layers of
    a model. They are at least float32, whatever the model is cast to, and are no part of the state dict.

    Raises ``ValueError`` if ``head_size`` is odd.
    """

    cosine: Tensor
    sine: Tensor

    def __init__(self, head_size: int, context_length: int, *, base: float = 10_000.0) -> None:
        super().__init__()
        check_positive("head_size", head_size)
        check_positive("context_length", context_length)
        if head_size % 2:
            raise ValueError(
                f"a rotary embedding turns pairs, so head_size must be even, got {head_size}: "
                "choose another number of heads or another width"
            )
        if base <= 0:
            raise ValueError(f"base must be positive, got {base}: 10000 is usual")
        self.head_size = head_size
        self.context_length = context_length
        self.base = base
        shape = (context_length, head_size // 2)
        self.register_buffer("cosine", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.register_buffer("sine", torch.empty(shape, dtype=torch.float32), persistent=False)
        self._fill_tables()

    def _fill_tables(self) -> None:
        # Angles in float64: at position 100,000 a float32 angle is already wrong in the third decimal.
        exponents = torch.arange(0, self.head_size, 2, dtype=torch.float64, device="cpu") / self.head_size
        positions = torch.arange(self.context_length, dtype=torch.float64, device="cpu")
        angles = torch.outer(positions, self.base**-exponents)
        dtype = torch.promote_types(self.cosine.dtype, torch.float32)
        self.cosine = angles.cos().to(self.cosine.device, dtype)
        self.sine = angles.sin().to(self.sine.device, dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RotaryEmbedding":
        # module.to(bfloat16) would round the tables, and to_empty() leaves them unset, so they are made anew.
        super()._apply(fn, recurse)
        self._fill_tables()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Turn ``x`` ``[B, H, T, D]``, whose row ``t`` is position ``t``; the result has the same shape and dtype.

        Computed in float32 for half precision. Raises ``ValueError`` for another head size than the table's and for
        more positions than it holds.
        """
        length, head_size = x.shape[-2:]
        if head_size != self.head_size:
            raise ValueError(
                f"this rotary embedding turns heads of size {self.head_size}, got {head_size}: make them equal"
            )
        if length > self.context_length:
            raise ValueError(
                f"this rotary embedding holds {self.context_length} positions, got a sequence of {length}: "
                "shorten the sequence, or build the model with a larger context_length"
            )
        cosine, sine = self.cosine[:length], self.sine[:length]
        first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
        turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
        return turned.to(x.dtype)

    def extra_repr(self) -> str:
        return f"head_size={self.head_size}, context_length={self.context_length}, base={self.base:g}"
