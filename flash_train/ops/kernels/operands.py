"""How a kernel's operands are described to it: rows in vectors, strides as numbers, tensors that a call may lack."""

from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from flash_train.ops.features import TENSORS, Terms


def vector(itemsize: int) -> int:
    """How many elements of a row the kernels read at a time: 16 bytes."""
    return 16 // itemsize


def readable(x: Tensor) -> Tensor:
    """`x` [B, H, T, D] if its rows are whole vectors, and not too far apart for a tile; else a copy whose rows are.

    Zeros fill a row's last vector (as in FlashAttention-2, which pads odd head sizes in the same way).
    """
    b, h, t, d = x.stride()
    size = vector(x.element_size())
    missing = -x.shape[3] % size
    if missing == 0 and d == 1 and t + d < FAR and (b | h | t) % size == 0 and x.data_ptr() % 16 == 0:
        return x
    if missing == 0:
        return x.clone(memory_format=torch.contiguous_format)
    padded = x.new_zeros(*x.shape[:3], x.shape[3] + missing)  # `pad` may answer in the channels-last format
    padded[..., : x.shape[3]] = x
    return padded


FAR = 2**23
"""An offset inside a tile, of 256 rows and columns at most, needs no more than 32 bits if the two strides are less."""


def descriptors(tensors: list[Tensor], blocks: list[tuple[int, int]]) -> list[TensorDescriptor]:
    """`readable` tensors for the copy engine, each with the (rows, columns) in which it is read."""
    described = []
    for x, (rows, columns) in zip(tensors, blocks, strict=True):
        # without its constructor's checks, which take longer than all the rest: `readable` has made them
        y = TensorDescriptor.__new__(TensorDescriptor)
        y.base, y.shape, y.strides, y.block_shape = x, list(x.shape), list(x.stride()), [1, 1, rows, columns]
        described.append(y)
    return described


def as_numbers(strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides for `tiles.strides_of`. Triton compiles a kernel for each pattern of ones and of multiples of 16 in a
    tuple of integers; these are odd and more than 1, so that all strides have one kernel."""
    return tuple([2 * stride + 3 for stride in strides])


_NOWHERE = as_numbers((0, 0, 0, 0))


def extras(
    terms: Terms, whole: tuple[int, ...], stand_in: Tensor, head_stride: int
) -> tuple[tuple[Any, ...], int, tuple[Any, ...]]:
    """(`tiles.Extras`, `dense_width`, what Triton compiles a kernel for) of a call with scores of shape `whole`.

    For a tensor that the call lacks, `stand_in` stands in the type that it would have.
    """
    if all(x is None for x in terms[TENSORS]):
        return (stand_in, _NOWHERE, stand_in, _NOWHERE, *(stand_in,) * 6), 0, ()
    bias, allowed = (x if x is None else near_pairs(x).expand(whole) for x in (terms.bias, terms.allowed))
    dense = dense_width([x for x in (bias, allowed) if x is not None])
    octets = stand_in if dense == 0 else stand_in.view(torch.uint8)
    slopes, sinks = (x if x is None or head_stride == 0 else x.contiguous() for x in (terms.alibi_slopes, terms.sinks))
    rest = slopes, sinks, *(x if x is None else x.contiguous() for x in terms[_SEED_TO_DOCUMENTS])
    bias_strides, allowed_strides = (_NOWHERE if x is None else as_numbers(x.stride()) for x in (bias, allowed))
    tensors = (
        stand_in if bias is None else bias,
        octets if allowed is None else allowed.view(torch.uint8),
        *(stand_in if x is None else x for x in rest),
    )
    kinds = *((x.dtype, x.data_ptr() % 16 == 0) for x in tensors), *large(bias_strides), *large(allowed_strides)
    return (tensors[0], bias_strides, tensors[1], allowed_strides, *tensors[2:]), dense, kinds


def large(numbers: tuple[int, ...]) -> tuple[int, ...]:
    """0 for each number that fits into 32 bits: another kernel takes those that do not."""
    return tuple([number >> 31 for number in numbers])


_SEED_TO_DOCUMENTS = slice(Terms._fields.index("seed"), Terms._fields.index("key_document") + 1)


def near_pairs(x: Tensor) -> Tensor:
    """A bias or boolean mask, copied if its elements are too far apart for a tile."""
    return x if x.stride(2) + x.stride(3) < FAR else x.contiguous()


def dense_width(tensors: list[Tensor]) -> int:
    """How many keys of bias and boolean mask [B, H, T, S] are read at a time: 16, or 1, where each key stands beside
    the next; or -1: one at any stride, 0 where it is the same for all keys. 0 if there is none of them."""
    if not tensors:
        return 0
    if any(x.stride(3) != 1 for x in tensors):
        return -1
    return 16 if all(_in_sixteens(x) for x in tensors) else 1


def _in_sixteens(x: Tensor) -> bool:
    b, h, t, _ = x.stride()
    return (b | h | t | x.shape[3]) % 16 == 0 and x.data_ptr() % 16 == 0
