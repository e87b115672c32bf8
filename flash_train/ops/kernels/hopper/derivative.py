"""The launcher of the Hopper backward."""

from torch import Tensor

from flash_train.ops.features import Terms
from flash_train.ops.kernels.hopper.backward import hopper_backward_kernel
from flash_train.ops.kernels.hopper.backward_wide import hopper_wide_backward_kernel
from flash_train.ops.kernels.hopper.rows import begin
from flash_train.ops.kernels.hopper.shim import describe
from flash_train.ops.kernels.hopper.tables import BACKWARD, heads_together, tile_width
from flash_train.ops.kernels.launch import blocks, empty, kind_of_mask, run
from flash_train.ops.kernels.operands import readable
from flash_train.ops.kernels.tables import Launch
from flash_train.ops.kernels.tiles import LOG2_E

OCTET = 8
"""Rows of dQ's sums that are kept together: `backward_deliver.spread`."""


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

    What it takes: `choice.choose_implementation`. dQ is the same to the bit on every run if `terms.deterministic`, dK
    and dV always. `output` [B, H, T, E] and `lse` [B, H, T] are the forward's.
    """
    q, k, v, do = (readable(x) for x in (q, k, v, grad_output.to(q.dtype)))
    (B, H, T, D), (G, S, E) = q.shape, v.shape[1:]
    width = tile_width(max(D, E))
    row = BACKWARD[width]
    kernel = hopper_backward_kernel if row.block_s == 128 else hopper_wide_backward_kernel
    padded = blocks(T, row.block_t) * row.block_t  # the copy engine reads whole blocks
    mask, cap = kind_of_mask(terms), terms.soft_cap
    unit = LOG2_E.value if cap else 1 / terms.scale  # a soft cap's scores are multiplied before
    dq, dk, dv = empty(q, B, H, T, D), empty(k, B, G, S, D), empty(v, B, G, S, E)
    starts, counts = begin(do, output, lse, grad_lse, dq, padded, unit)
    sums = empty(lse, 1, B * H, blocks(T, OCTET) * OCTET, D)
    run(
        kernel, q.device, blocks(S, row.block_s) * B * G, Launch(row.block_t, row.block_s, 4, row.stages),
        ("hopper backward", q.device, q.dtype, width, mask, cap > 0),
        describe(q, row.block_t, width), describe(k, 64, width), describe(v, 64, width),
        describe(do, row.block_t, width), describe(starts, row.block_t, 16),
        describe(sums, 64, 64), describe(dq, 64, 64), describe(dk, 64, width), describe(dv, 64, width),
        counts, B * G, G, H // G, T, S,
        terms.left, terms.right, 0 if terms.top_left else S - T, (cap or terms.scale) * LOG2_E.value, terms.scale,
        terms.scale / (cap or 1.0), int(terms.deterministic), heads_together(T, width), mask, row.block_t, width,
        row.stages, cap > 0, row.registers, row.few_registers,
    )  # fmt: skip
    return dq, dk, dv
