"""What every launcher does: allocate, choose a launch, describe the operands, start the kernel on their device."""

import contextlib
import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from flash_train.ops.choice import interpreting
from flash_train.ops.dropout import threshold
from flash_train.ops.features import TENSORS, UNBOUNDED, Terms
from flash_train.ops.kernels.tables import Launch, lookup, smaller
from flash_train.ops.kernels.tiles import HAS_ALLOWED, HAS_BIAS, HAS_SINKS, HAS_SLOPES, TOP_LEFT, Constants

_log = logging.getLogger(__name__)


def empty(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialised memory on `like`'s device. The launchers' one allocation: tests fill it with NaN."""
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)


@functools.cache
def row_width(D: int, E: int, itemsize: int) -> int:
    """How many elements of a row the kernels read at a time: as many as 16 bytes hold, if D and E are multiples."""
    return math.gcd(D, E, 16 // itemsize)


def readable(x: Tensor, width: int) -> Tensor:
    """`x` [B, H, T, D], copied if its rows are no runs of vectors of `width` elements, or too far apart for `_near`."""
    *strides, last = x.stride()
    return x if last == 1 and _near(x) and _aligned(x, strides, width) else x.clone(memory_format=_CONTIGUOUS)


_CONTIGUOUS = torch.contiguous_format


def _near(x: Tensor) -> bool:
    """Whether an offset inside a tile, of 256 rows and columns at most, needs no more than 32 bits."""
    return x.stride(2) + x.stride(3) < 2**23


def _aligned(x: Tensor, strides: list[int], width: int) -> bool:
    return x.data_ptr() % (width * x.element_size()) == 0 and all(stride % width == 0 for stride in strides)


def blocks(length: int, size: int) -> int:
    """How many blocks of `size` hold `length`; `triton.cdiv` takes 2 microseconds."""
    return -(-length // size)


@functools.cache
def block_size(size: int) -> int:
    """The tile's width for a head size: the power of two that holds it, 16 at least (`tl.dot`'s smallest)."""
    return max(16, triton.next_power_of_2(size))


def compiled_features(terms: Terms, dense: int) -> tuple[str, bool, bool, int, bool]:
    """`Constants`' MASK, MODIFIED, SOFT_CAP, DENSE and DROPOUT: the one place that decides what is compiled in.

    Plain scores have four kernels, one a kind of mask; modified ones (soft cap, ALiBi, bias, boolean mask, dropout)
    have two, for windows and for documents, times three choices: soft cap or none; no bias and boolean mask, or the
    three ways to read them (`dense_width`); dropout or none. ALiBi is in all of these, sinks are in every kernel. That
    makes 36. Lengths, strides, bounds, slopes, sinks, seeds and probabilities are read when a kernel runs.
    """
    modified = dense != 0 or terms.soft_cap > 0 or terms.alibi_slopes is not None or terms.seed is not None
    if terms.bounds is not None:
        mask = "documents"
    elif modified or terms.left < UNBOUNDED or 0 < terms.right < UNBOUNDED:
        mask = "window"
    else:
        mask = "causal" if terms.right == 0 else "full"
    return mask, modified, terms.soft_cap > 0, dense, terms.seed is not None


class Call:
    """One call of an operator as the kernels take it: constants, numbers and tensors beside q, k and v."""

    def __init__(self, q: Tensor, v: Tensor, terms: Terms, stand_in: Tensor) -> None:
        B, H, T, D = q.shape
        G, S, E = v.shape[1:]
        self.q = q
        self.widths = block_size(D), block_size(E)
        self._sizes = D, E
        self._precision = matmul_precision(q.dtype, q.device)
        head_stride = _head_stride(terms, H)
        self.extras, dense = _extras(terms, (B, H, T, S), stand_in, head_stride)
        self._features = compiled_features(terms, dense)
        self.numbers = (
            H, G, T, S, terms.left, terms.right, 0 if terms.top_left else S - T, head_stride,
            _flags(terms), terms.scale, terms.soft_cap, 1 / (1 - terms.dropout), threshold(terms.dropout),
        )  # fmt: skip
        """`tiles.Numbers` from H on."""

    def constants(self, launch: Launch, width: int) -> Constants:
        return _constants(self._sizes, self.widths, launch, self._features, width, self._precision)

    def start(self, direction: str, start: Callable[[Launch], None], override: Launch | None) -> None:
        """Start a kernel by the launch table's row, or by the next smaller one that the GPU's shared memory holds."""
        if override is not None:
            return start(override)
        key = direction, self.q.device, self.q.dtype, self._sizes, self._features
        launch = _FITTING.get(key)
        if launch is None:
            dense = self._features[3] != 0
            launch = lookup(
                architecture(self.q.device), direction, self.q.element_size(), max(self.widths), dense=dense
            )
        while True:
            try:
                start(launch)
                break
            except OutOfResources as error:
                less = smaller(launch)
                if less is None:
                    raise
                _log.warning(f"attention: the {direction} kernel takes {less} instead of {launch}: {error}")
                launch = less
        _FITTING[key] = launch


@functools.cache
def _constants(
    sizes: tuple[int, int],
    widths: tuple[int, int],
    launch: Launch,
    features: tuple[str, bool, bool, int, bool],
    width: int,
    precision: str,
) -> Constants:
    blocks = launch.block_t, launch.block_s
    return Constants(*sizes, *blocks, *widths, *features, width, precision, interpreting())


_FITTING: dict[tuple[Any, ...], Launch] = {}
"""What `Call.start` found to fit."""


def _extras(terms: Terms, whole: tuple[int, ...], stand_in: Tensor, head_stride: int) -> tuple[tuple[Any, ...], int]:
    """(`tiles.Extras`, `dense_width`); for a tensor that the call lacks, `stand_in` in the type it would have."""
    if all(x is None for x in terms[TENSORS]):
        return (stand_in, _NOWHERE, stand_in, _NOWHERE, *(stand_in,) * 6), 0
    bias, allowed = (x if x is None else near_pairs(x).expand(whole) for x in (terms.bias, terms.allowed))
    dense = dense_width([x for x in (bias, allowed) if x is not None])
    octets = stand_in if dense == 0 else stand_in.view(torch.uint8)
    slopes, sinks = (x if x is None or head_stride == 0 else x.contiguous() for x in (terms.alibi_slopes, terms.sinks))
    rest = slopes, sinks, *(x if x is None else x.contiguous() for x in terms[_SEED_TO_DOCUMENTS])
    return (
        *((stand_in, _NOWHERE) if bias is None else (bias, as_numbers(bias.stride()))),
        *((octets, _NOWHERE) if allowed is None else (allowed.view(torch.uint8), as_numbers(allowed.stride()))),
        *(stand_in if x is None else x for x in rest),
    ), dense


def dense_width(tensors: list[Tensor]) -> int:
    """How many keys of bias and boolean mask [B, H, T, S] are read at a time: 16, or 1, where each key stands beside
    the next; or -1: one at any stride, 0 where it is the same for all keys. 0 if there is none of them."""
    if not tensors:
        return 0
    if any(x.stride(3) != 1 for x in tensors):
        return -1
    return 16 if all(x.shape[3] % 16 == 0 and _aligned(x, list(x.stride()[:3]), 16) for x in tensors) else 1


def near_pairs(x: Tensor) -> Tensor:
    """A bias or boolean mask, copied if its rows are too far apart for `_near`."""
    return x if _near(x) else x.contiguous()


def as_numbers(strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides for `tiles.strides_of`. Triton compiles a kernel for each pattern of ones and of multiples of 16 in a
    tuple of integers; these are odd and more than 1, so that all strides have one kernel."""
    return tuple([2 * stride + 3 for stride in strides])


_NOWHERE = as_numbers((0, 0, 0, 0))


_SEED_TO_DOCUMENTS = slice(Terms._fields.index("seed"), Terms._fields.index("key_document") + 1)


def _flags(terms: Terms) -> int:
    """`tiles.Numbers.flags`."""
    flags = TOP_LEFT.value if terms.top_left else 0
    for flag, tensor in (
        (HAS_BIAS, terms.bias), (HAS_ALLOWED, terms.allowed), (HAS_SLOPES, terms.alibi_slopes), (HAS_SINKS, terms.sinks)
    ):  # fmt: skip
        if tensor is not None:
            flags |= flag.value
    return flags


def _head_stride(terms: Terms, H: int) -> int:
    """0 if one row of slopes and sinks [B, H] is the whole batch's, as it is but under vmap."""
    for x in (terms.alibi_slopes, terms.sinks):
        if x is not None and x.stride() != (0, 1):
            return H
    return 0


@functools.cache
def architecture(device: torch.device) -> str:
    """The launch table's name for a device."""
    if device.type == "cpu":
        return "interpreter"
    if torch.version.hip:
        return "gfx942"
    major, minor = torch.cuda.get_device_capability(device)
    if major == 9:
        return "sm_90"
    if major == 10:
        return "sm_100"
    return "sm_80" if (major, minor) == (8, 0) else "sm_86"  # consumer cards: 99 KiB of shared memory


def matmul_precision(dtype: torch.dtype, device: torch.device) -> str:
    """`tl.dot`'s input precision: IEEE fp32 unless torch was told that its own fp32 products may use TF32."""
    if dtype != torch.float32 or device.type != "cuda":
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def describe(
    tensors: list[Tensor], width: int, blocks: list[tuple[int, int]] | None = None
) -> tuple[list[Any], list[tuple[int, ...] | None], int]:
    """(kernel arguments, their strides, `Constants.WIDTH`) of [B, H, T, D] tensors that are `readable`.

    They are described to the copy engine where there is one and `blocks`, the (rows, width) in which each of them is
    read, is given. It takes rows of whole 16 bytes; and for fp32 it is left alone: its products, on the ordinary cores,
    spill hundreds of registers when they read from a descriptor's layout.
    """
    if blocks is None or width != 8 or tensors[0].element_size() != 2 or not _has_copy_engine(tensors[0].device):
        return list(tensors), [as_numbers(x.stride()) for x in tensors], width
    descriptors = [
        TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, columns])
        for x, (rows, columns) in zip(tensors, blocks, strict=True)
    ]
    return descriptors, [None] * len(tensors), 0


@functools.cache
def _has_copy_engine(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


def run(kernel: Any, programs: int, launch: Launch, *args: Any) -> None:
    """Start `programs` programs on the device of the first tensor among the arguments, not on the current one."""
    device = next(x.device for x in args if isinstance(x, Tensor))
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    with torch.cuda.device(device) if elsewhere else contextlib.nullcontext():
        # the default of enable_fp_fusion becomes off in Triton 3.10
        kernel[(programs,)](*args, num_warps=launch.warps, num_stages=launch.stages, enable_fp_fusion=True)
