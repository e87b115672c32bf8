"""The tables of `Documents` for a packed batch, in one launch where torch's operators take twenty."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_train.ops.kernels.launch import blocks, empty, run
from flash_train.ops.kernels.tables import Launch

LAUNCH = Launch(block_t=256, block_s=256, warps=4, stages=1)
"""A program's queries, keys and documents."""


@triton.jit
def _document_of(cu_seqlens, rows, N, steps):
    """How many of cu_seqlens[1] to cu_seqlens[N] are at most `rows`: by bisection, elementwise."""
    low, high = rows * 0, rows * 0 + N
    for _ in tl.range(0, steps):
        middle = (low + high + 1) // 2
        below = tl.load(cu_seqlens + middle).to(tl.int32) <= rows
        low, high = tl.where(below, middle, low), tl.where(below, high, tl.maximum(middle - 1, low))
    return low


@triton.jit
def _bound(cu_seqlens, document, N, total, left_over):
    """(first, last + 1) row of the documents; document `left_over` has the rows behind the last one."""
    there = document < N
    first = tl.load(cu_seqlens + document, mask=there, other=0).to(tl.int32)
    end = tl.load(cu_seqlens + document + 1, mask=there, other=0).to(tl.int32)
    first = tl.where(document == left_over, tl.load(cu_seqlens + N).to(tl.int32), first)  # 0 if there is none at all
    first = tl.where(document == 0, 0, first)
    end = tl.where(document == left_over, total, end)
    first = tl.minimum(tl.maximum(first, 0), total)
    return first, tl.minimum(tl.maximum(end, first), total)


@triton.jit(do_not_specialize=["N", "T", "S", "steps"])
def documents_kernel(cu_seqlens_q, cu_seqlens_k, bounds, query_document, key_document, N, T, S, steps,
                     BLOCK: tl.constexpr):  # fmt: skip
    """One program: as many queries, keys and documents as BLOCK. The tables are those of `Documents`."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(query_document + rows, _document_of(cu_seqlens_q, rows, N, steps), mask=rows < T)
    document = _document_of(cu_seqlens_k, rows, N, steps)
    tl.store(key_document + rows, tl.where(document == N, N + 1, document), mask=rows < S)
    first_query, end_query = _bound(cu_seqlens_q, rows, N, T, N)
    first_key, end_key = _bound(cu_seqlens_k, rows, N, S, N + 1)
    row = bounds + rows * 4
    tl.store(row, first_query, mask=rows < N + 2)
    tl.store(row + 1, end_query, mask=rows < N + 2)
    tl.store(row + 2, first_key, mask=rows < N + 2)
    tl.store(row + 3, end_key, mask=rows < N + 2)


def packed_documents(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, T: int, S: int) -> tuple[Tensor, Tensor, Tensor]:
    """(bounds [N + 2, 4], query_document [1, T], key_document [1, S]) of N documents, whose offsets are [N + 1]."""
    N = cu_seqlens_q.shape[0] - 1
    tables = [empty(cu_seqlens_q, *shape, dtype=torch.int32) for shape in ((N + 2, 4), (1, T), (1, S))]
    offsets = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    key = "documents", cu_seqlens_q.device, *((x.dtype, x.data_ptr() % 16 == 0) for x in offsets)
    run(
        documents_kernel, cu_seqlens_q.device, blocks(max(T, S, N + 2), LAUNCH.block_t), LAUNCH, key,
        *offsets, *tables, N, T, S, N.bit_length(), LAUNCH.block_t,
    )  # fmt: skip
    bounds, query_document, key_document = tables
    return bounds, query_document, key_document
