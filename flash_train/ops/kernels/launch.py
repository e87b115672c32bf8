"""What every launcher does: allocate, choose a launch, start the kernel on its tensors' device."""

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

from flash_train.ops.choice import interpreting
from flash_train.ops.dropout import threshold
from flash_train.ops.features import UNBOUNDED, Terms
from flash_train.ops.kernels.again import note_allocation, note_start
from flash_train.ops.kernels.operands import as_numbers, descriptors, extras, large, vector
from flash_train.ops.kernels.tables import Launch, lookup, smaller
from flash_train.ops.kernels.tiles import HAS_ALLOWED, HAS_BIAS, HAS_SINKS, HAS_SLOPES, TOP_LEFT, Constants

_log = logging.getLogger(__name__)


def empty(like: Tensor, *shape: int, dtype: torch.dtype | None = None, before: int = 0) -> Tensor:
    """Uninitialised memory on `like`'s device, with so many elements `before` it that nobody uses. The launchers' one
    allocation: tests fill it with NaN."""
    x = torch.empty(before + math.prod(shape) if before else shape, dtype=dtype or like.dtype, device=like.device)
    if before:
        x = x[before:].view(shape)
    note_allocation(x, before=before)
    return x


def zeros(like: Tensor, *shape: int, dtype: torch.dtype) -> Tensor:
    """As `empty`, but zeros."""
    x = torch.zeros(shape, dtype=dtype, device=like.device)
    note_allocation(x, is_zero=True)
    return x


def blocks(length: int, size: int) -> int:
    """How many blocks of `size` hold `length`; `triton.cdiv` takes 2 microseconds."""
    return -(-length // size)


@functools.cache
def block_size(size: int) -> int:
    """The tile's width for a head size: the power of two that holds it, 16 at least (`tl.dot`'s smallest)."""
    return max(16, triton.next_power_of_2(size))


def tile_widths(D: int, E: int) -> tuple[int, int]:
    """The widths of the tiles of q and k, and of v and dO: alike, or at least 64 both, which swizzles them alike.

    ptxas 12.8.93 (that of Triton 3.6 and 3.7) computes addresses from a register that nothing was written into where
    two tiles that are swizzled differently lie, one after the other, at the same place in shared memory, as K and V do
    in a loop that is not pipelined.
    """
    d, e = block_size(D), block_size(E)
    least = min(64, max(d, e))
    return max(d, least), max(e, least)


def compiled_features(terms: Terms, dense: int) -> tuple[str, bool, bool, int, bool]:
    """`Constants`' MASK, MODIFIED, SOFT_CAP, DENSE and DROPOUT: the one place that decides what is compiled in.

    Plain scores have four kernels, one a kind of mask; modified ones (soft cap, ALiBi, bias, boolean mask, dropout)
    have two, for windows and for documents, times three choices: soft cap or none; no bias and boolean mask, or the
    three ways to read them (`operands.dense_width`); dropout or none. ALiBi is in all of these, sinks are in every
    kernel. That makes 36. Lengths, strides, bounds, slopes, sinks, seeds and probabilities are read when a kernel runs.
    """
    modified = dense != 0 or terms.soft_cap > 0 or terms.alibi_slopes is not None or terms.seed is not None
    mask = kind_of_mask(terms)
    if modified and mask != "documents":
        mask = "window"
    return mask, modified, terms.soft_cap > 0, dense, terms.seed is not None


def kind_of_mask(terms: Terms) -> str:
    """The narrowest of full, causal, window and documents that it is."""
    return kind_of_bounds(terms) if terms.bounds is None else "documents"


def kind_of_bounds(terms: Terms) -> str:
    """The narrowest of full, causal and window, in each document if there are any."""
    if terms.left < UNBOUNDED or 0 < terms.right < UNBOUNDED:
        return "window"
    return "causal" if terms.right == 0 else "full"


def kinds_of(tensors: tuple[Tensor, ...]) -> tuple[tuple[torch.dtype, bool], ...]:
    """What of them Triton compiles a kernel for: for the key of `run`."""
    return tuple([(x.dtype, x.data_ptr() % 16 == 0) for x in tensors])


class Call:
    """One call of an operator as the kernels take it: constants, numbers and tensors beside q, k and v."""

    def __init__(self, q: Tensor, v: Tensor, terms: Terms, stand_in: Tensor) -> None:
        B, H, T, D = q.shape
        G, S, E = v.shape[1:]
        self._device = q.device
        self._itemsize = q.element_size()
        self._sizes = D, E
        self._widths = tile_widths(D, E)
        head_stride = _head_stride(terms, H)
        self._numbers = (
            H, G, T, S, terms.left, terms.right, 0 if terms.top_left else S - T, head_stride,
            _flags(terms), terms.scale, terms.soft_cap, 1 / (1 - terms.dropout), threshold(terms.dropout),
        )  # fmt: skip
        self._extras, dense, kinds = extras(terms, (B, H, T, S), stand_in, head_stride)
        self._features = compiled_features(terms, dense)
        self._precision = matmul_precision(q.dtype, q.device)
        self._key = q.device, q.dtype, terms.output_dtype, self._sizes, self._features, self._precision, kinds

    def start(
        self,
        direction: str,
        kernel: Any,
        inputs: list[Tensor],
        heads: int,
        rest: Callable[[Launch], tuple[int, tuple[Tensor, ...], tuple[int, ...]]],
        *,
        flags: tuple[bool, ...] = (),
        by_copy_engine: bool = True,
        override: Launch | None = None,
    ) -> None:
        """Start a kernel by the launch table's row, or by the next smaller one that the GPU's shared memory holds.

        Args:
            direction: the row's name in the table.
            inputs: q, k, v and, if the kernel reads it, dO: `operands.readable`.
            heads: `tiles.Numbers.heads`
            rest: for a launch, how many programs to start, the tensors behind `inputs`, and the numbers behind
                `tiles.Numbers`.
            flags: the constants behind `tiles.Constants`.
            by_copy_engine: whether tiles come through descriptors where there is one. For fp32 it is left alone:
                products on the ordinary cores spill hundreds of registers when they read from a descriptor's layout.
            override: in place of the table's launch, for tuning.
        """
        by_copy_engine &= self._itemsize == 2 and _has_copy_engine(self._device)
        strides = [None if by_copy_engine else as_numbers(x.stride()) for x in inputs]
        key = kernel.__name__, self._key, flags, *(large(x) for x in strides if x is not None)

        def begin(launch: Launch, constants: Constants) -> None:
            t, s, d, e = launch.block_t, launch.block_s, *self._widths
            roles = [(t, d), (s, d), (s, e), (t, e)]  # the tiles of q, k, v and dO
            operands = descriptors(inputs, roles[: len(inputs)]) if by_copy_engine else inputs
            programs, tensors, more = rest(launch)
            run(
                kernel, self._device, programs, launch, key,
                *operands, *tensors, *strides, *self._extras, heads, *self._numbers, *more, *constants, *flags,
            )  # fmt: skip

        fitting = _FITTING.get(key)
        if fitting is not None and override is None:
            return begin(*fitting)
        launch = override or lookup(
            architecture(self._device), direction, self._itemsize, max(self._widths), dense=self._features[3] != 0
        )
        while True:
            tiles, width = (launch.block_t, launch.block_s), 0 if by_copy_engine else vector(self._itemsize)
            constants = Constants(
                *self._sizes, *tiles, *self._widths, *self._features, width, self._precision, interpreting()
            )
            try:
                begin(launch, constants)
                break
            except OutOfResources as error:
                less = None if override else smaller(launch)
                if less is None:
                    raise
                _log.warning(f"attention: the {direction} kernel takes {less} instead of {launch}: {error}")
                launch = less
        if override is None:
            _FITTING[key] = launch, constants


_FITTING: dict[Any, tuple[Launch, Constants]] = {}
"""What `Call.start` found to fit."""


def run(kernel: Any, device: torch.device, programs: int, launch: Launch, key: Any, *args: Any) -> None:
    """Start `programs` programs.

    `key` stands for all that Triton compiles the kernel for: constants, types, which addresses are multiples of 16.
    Started again without Triton's search for it, a compiled kernel takes half the host's time.
    """
    with _current(device):
        compiled = _COMPILED.get((key, launch))
        if compiled is not None:
            compiled[programs, 1, 1](*args)
        else:
            # the default of enable_fp_fusion becomes off in Triton 3.10
            options = dict(num_warps=launch.warps, num_stages=launch.stages, enable_fp_fusion=True)
            compiled = kernel[(programs,)](*args, **options)
            if compiled is not None:  # the interpreter's answer
                _COMPILED[key, launch] = compiled
    note_start(compiled, programs, args)


_COMPILED: dict[Any, Any] = {}


def _current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Inside, the device is the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)


_NOTHING = contextlib.nullcontext()


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


@functools.cache
def _has_copy_engine(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10)
