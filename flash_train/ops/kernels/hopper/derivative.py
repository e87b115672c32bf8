"""The launcher of the Hopper backward."""

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flash_train.ops.features import Terms
from flash_train.ops.kernels.hopper.backward import hopper_backward_kernel
from flash_train.ops.kernels.hopper.backward_wide import hopper_wide_backward_kernel
from flash_train.ops.kernels.hopper.rows import begin, finish
from flash_train.ops.kernels.hopper.shim import describe
from flash_train.ops.kernels.hopper.tables import BACKWARD
from flash_train.ops.kernels.launch import block_size, blocks, compiled_features, empty, run
from flash_train.ops.kernels.operands import readable
from flash_train.ops.kernels.tables import Launch

LOG2_E = 1.4426950408889634
_ROW = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)


def _describe_row(x: Tensor, block: int) -> TensorDescriptor:
    """A contiguous fp32 tensor for the copy engine, flat, in blocks of this many elements."""
    y = TensorDescriptor.__new__(TensorDescriptor)  # as in `shim.describe`
    y.base, y.shape, y.strides, y.block_shape, y.layout = x, [x.numel()], [1], [block], _ROW
    return y


def hopper_backward(
    grad_output: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    lse: Tensor,
    terms: Terms,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dQ, dK, dV), contiguous [B, H, T, D], [B, G, S, D] and [B, G, S, E] in the inputs' dtype (fp16 or bf16).

    What it takes: `choice.hopper_backward_obstacle`. dQ is not the same to the bit on every run. `output` [B, H, T, E]
    and `lse` [B, H, T] are the forward's.
    """
    q, k, v, do = (readable(x) for x in (q, k, v, grad_output.to(q.dtype)))
    (B, H, T, D), (G, S, E) = q.shape, v.shape[1:]
    width = max(64, block_size(max(D, E)))
    row = BACKWARD[width]
    kernel, keys = (hopper_backward_kernel, 128) if width < 256 else (hopper_wide_backward_kernel, 64)
    padded = blocks(T, row.block_t) * row.block_t  # the copy engine reads whole blocks
    start_s, start_dp, dq_sum = begin(do, output, lse, grad_lse, D, padded, terms.scale)
    dq, dk, dv = empty(q, B, H, T, D), empty(k, B, G, S, D), empty(v, B, G, S, E)
    mask = compiled_features(terms, 0)[0]
    run(
        kernel, q.device, blocks(S, keys) * B * G, Launch(row.block_t, keys, 4, row.stages),
        ("hopper backward", q.device, q.dtype, width, mask),
        describe(q, row.block_t, width), describe(k, 64, width), describe(v, 64, width),
        describe(do, row.block_t, width), _describe_row(start_s, row.block_t), _describe_row(start_dp, row.block_t),
        describe(dq_sum, 64, 64), describe(dk, 64, width), describe(dv, 64, width), B * G, G, H // G, T, S, terms.left,
        terms.right, 0 if terms.top_left else S - T, terms.scale * LOG2_E, terms.scale, mask, row.block_t,
        width, row.stages, row.registers, row.few_registers,
    )  # fmt: skip
    finish(dq_sum, dq, terms.scale)
    return dq, dk, dv
