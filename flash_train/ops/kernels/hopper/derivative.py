"""The launcher of the Hopper backward."""

from torch import Tensor

from flash_train.ops.features import Terms
from flash_train.ops.kernels.hopper.backward import hopper_backward_kernel
from flash_train.ops.kernels.hopper.backward_wide import hopper_wide_backward_kernel
from flash_train.ops.kernels.hopper.copies import first_rows
from flash_train.ops.kernels.hopper.places import shift_of
from flash_train.ops.kernels.hopper.rows import begin
from flash_train.ops.kernels.hopper.shares import sum_shares
from flash_train.ops.kernels.hopper.shim import describe, describe_cut
from flash_train.ops.kernels.hopper.tables import BACKWARD, heads_together, programs_a_head, tile_width
from flash_train.ops.kernels.launch import blocks, empty, kind_of_bounds, kinds_of, run
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
    *,
    joint: bool = False,
) -> tuple[Tensor, ...]:
    """(dQ, dK, dV), contiguous [B, H, T, D], [B, G, S, D] and [B, G, S, E] in the inputs' dtype (fp16 or bf16); or,
    `joint`, one tensor [B, T, H + 2 G, D] that has all of them, where S is T and E is D.

    What it takes: `choice.choose_implementation`. dQ is the same to the bit on every run if `terms.deterministic`, dK
    and dV always. `output` [B, H, T, E] and `lse` [B, H, T] are the forward's.
    """
    q, k, v, do = (readable(x) for x in (q, k, v, grad_output.to(q.dtype)))
    (B, H, T, D), (G, S, E) = q.shape, v.shape[1:]
    width = tile_width(max(D, E))
    row = BACKWARD[width]
    kernel = hopper_backward_kernel if row.block_s == 128 else hopper_wide_backward_kernel
    padded = blocks(T, row.block_t) * row.block_t  # the copy engine reads whole blocks
    mask, cap, documents = kind_of_bounds(terms), terms.soft_cap, terms.bounds is not None
    unit = LOG2_E.value if cap else 1 / terms.scale  # a soft cap's scores are multiplied before
    split = programs_a_head(blocks(S, row.block_s) * B * G, H // G, terms)
    heads = G * split
    before = 64 if documents else 0
    sums = empty(lse, 1, B * H, blocks(T, OCTET) * OCTET, D, before=before * D)
    if joint:
        results = (empty(q, B, T, H + 2 * G, D, before=before * (H + 2 * G) * D),)
        dq, all_dk, all_dv = (x.transpose(1, 2) for x in results[0].split((H, G, G), dim=2))
    else:
        shapes = (B, H, T, D), (B, G, S, D), (B, G, S, E)
        results = dq, all_dk, all_dv = [empty(q, *shape, before=before * shape[3]) for shape in shapes]
    dk, dv = all_dk, all_dv
    if split > 1:
        dk, dv = (empty(q, B, heads, S, size, before=before * size) for size in (D, E))
    starts, counts = begin(do, output, lse, grad_lse, dq, padded, unit, documents=documents)
    inputs = (q, row.block_t, width), (k, 64, width), (v, 64, width), (do, row.block_t, width)
    made = (starts, row.block_t, 16), (sums, 64, 64), (dq, 64, 64), (dk, 64, width), (dv, 64, width)
    if documents:
        tables = terms.bounds.contiguous(), terms.key_document.contiguous()
        operands = [describe_cut(*x, rows_before=False) for x in inputs]
        first = first_rows(q, k, v, do, row.block_t, 64)
        near = [describe_cut(x, *tile, rows_before=True) for x, (_, *tile) in zip(first, inputs, strict=True)]
        written = [describe_cut(*x, rows_before=True) for x in made]
    else:
        tables, near = (counts, counts), (counts,) * 4  # which then are not read
        operands, written = [describe(*x) for x in inputs], [describe(*x) for x in made]
    run(
        kernel, q.device, blocks(S, row.block_s) * B * heads, Launch(row.block_t, row.block_s, 4, row.stages),
        ("hopper backward", q.device, q.dtype, width, mask, cap > 0, documents, kinds_of(tables)),
        *operands, *near, *written, counts, *tables, B * heads, heads, H // heads, T, S,
        terms.left, terms.right, shift_of(terms, T, S), (cap or terms.scale) * LOG2_E.value, terms.scale,
        terms.scale / (cap or 1.0), int(terms.deterministic), heads_together(T, width), split, mask, documents,
        row.block_t, width, row.stages, cap > 0, row.registers, row.few_registers,
    )  # fmt: skip
    if split > 1:
        sum_shares(dk, dv, all_dk, all_dv)
    return tuple(results)
