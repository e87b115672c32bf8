"""What every launcher does: allocate, choose a launch, describe the operands, start the kernel on their device."""

import contextlib
import functools
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from flash_train.ops.choice import interpreting
from flash_train.ops.kernels.tables import Launch, lookup

HEADS_TOGETHER = 8
"""Heads whose keys and values share the L2 cache: 8 heads of 8k keys, D = 128, in bf16 are 32 MiB."""


def empty(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialised memory on `like`'s device. The launchers' one allocation: tests fill it with NaN."""
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)


def near_rows(x: Tensor) -> Tensor:
    """`x`, copied if an offset inside a tile, of 256 rows and columns at most, would need more than 32 bits."""
    return x if x.stride(2) + x.stride(3) < 2**23 else x.contiguous()


def block_size(size: int) -> int:
    """The tile's width for a head size: the power of two that holds it, 16 at least (`tl.dot`'s smallest)."""
    return max(16, triton.next_power_of_2(size))


def choose_launch(direction: str, q: Tensor, v: Tensor, override: Launch | None) -> Launch:
    """The launch table's row for these tensors."""
    size = max(block_size(q.shape[-1]), block_size(v.shape[-1]))
    return override or lookup(architecture(q.device), direction, q.element_size(), size)


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


def describe(tensors: list[Tensor], blocks: list[tuple[int, int]]) -> tuple[list[Any], bool]:
    """(kernel arguments, whether they are descriptors): all [B, H, T, D] tensors as descriptors, or all as they are.

    `blocks` are the (rows, width) in which each tensor is read. The copy engine wants 16-byte aligned addresses and
    strides and a unit last stride; broadcast dimensions are left to the pointers, and so is fp32, whose products on
    the ordinary cores spill hundreds of registers when they read from a descriptor's layout.
    """
    if not _has_copy_engine(tensors[0].device) or not all(_aligned(x) for x in tensors):
        return list(tensors), False
    return [
        TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, width])
        for x, (rows, width) in zip(tensors, blocks, strict=True)
    ], True


@functools.cache
def _has_copy_engine(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


def _aligned(x: Tensor) -> bool:
    size = x.element_size()
    return (
        size == 2
        and x.stride(-1) == 1
        and x.data_ptr() % 16 == 0
        and all(stride > 0 and stride * size % 16 == 0 for stride in x.stride()[:-1])
    )


def tile_constants(q: Tensor, v: Tensor, launch: Launch, *, causal: bool, descriptor: bool) -> dict[str, Any]:
    """What every kernel that walks over tiles is compiled for."""
    return dict(
        D=q.shape[-1],
        E=v.shape[-1],
        BLOCK_T=launch.block_t,
        BLOCK_S=launch.block_s,
        BLOCK_D=block_size(q.shape[-1]),
        BLOCK_E=block_size(v.shape[-1]),
        CAUSAL=causal,
        DESCRIPTOR=descriptor,
        PRECISION=matmul_precision(q.dtype, q.device),
        UPCAST=interpreting(),
        HEADS_TOGETHER=HEADS_TOGETHER,
        num_warps=launch.warps,
        num_stages=launch.stages,
    )


def run(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
    """Start `programs` programs on the device of the first tensor among the arguments, not on the current one."""
    device = next(x.device for x in args if isinstance(x, Tensor))
    guard = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with guard:
        # the default of enable_fp_fusion becomes off in Triton 3.10
        kernel[(programs,)](*args, **constants, enable_fp_fusion=True)
