"""Where the documents of a packed batch lie."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flash_train.ops.checks import check_tensor
from flash_train.ops.choice import triton_obstacle

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class Documents:
    """Where the documents of a packed batch lie. Made once, by one of the two constructors, and used by every layer."""

    bounds: Tensor
    """[N, 4] int32: a document's first query, its last one + 1, its first key, its last one + 1."""
    query_document: Tensor
    """[B, T] int32: the row of `bounds` that a query belongs to; it does not fall along T."""
    key_document: Tensor
    """[B, S] int32, likewise."""

    @classmethod
    def from_ids(cls, ids: Tensor) -> "Documents":
        """Documents of [B, T] sequences: each run of equal ids is one (an id that comes back later starts another).

        Nothing is read on the host.

        Raises:
            ValueError: `ids` is no [B, T] tensor of integers.
        """
        check_tensor("documents", ids)
        if ids.dim() != 2 or ids.dtype not in _INTEGERS:
            raise ValueError(
                f"documents must be [B, T] integer ids, got {list(ids.shape)} of {ids.dtype}; "
                "for [total, H, D] tensors use flash_attention_packed"
            )
        B, T = ids.shape
        # not ids[:, 1:] != ids[:, :-1], of which torch.export makes a program that refuses T = 2
        changes = (torch.arange(T, device=ids.device) == 0) | (ids != ids.roll(1, dims=1))
        number = changes.flatten().cumsum(0) - 1
        every = torch.ones_like(number).cumsum(0) - 1  # batched under vmap as `number` is: searchsorted warns of others
        first, end = torch.searchsorted(number, every), torch.searchsorted(number, every, right=True)
        row_start = torch.div((end - 1).clamp(min=0), max(T, 1), rounding_mode="floor") * T
        first, end = first - row_start, end - row_start
        bounds = torch.stack([first, end, first, end], dim=1).clamp(0, T).int()
        number = number.view(B, T).int()
        return cls(bounds, number, number)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, total_q: int, total_k: int) -> "Documents":
        """Documents of a packed batch of one: document n has queries cu_seqlens_q[n] to cu_seqlens_q[n + 1] - 1.

        What lies behind the last document belongs to none: its output is 0, its gradients are 0. On a GPU nothing is
        read on the host: the first offset is taken for 0, and offsets outside the tensors are cut to them.

        Raises:
            ValueError: the two are no [N + 1] int32 or int64 tensors of one length on one device, or, on a CPU, do not
                rise from 0 to at most the totals.
        """
        for name, x, total in (("cu_seqlens_q", cu_seqlens_q, total_q), ("cu_seqlens_k", cu_seqlens_k, total_k)):
            check_tensor(name, x)
            if x.dim() != 1 or x.shape[0] == 0 or x.dtype not in (torch.int32, torch.int64):
                raise ValueError(
                    f"{name} must be [N + 1] offsets, int32 or int64, got {list(x.shape)} of {x.dtype}; "
                    "of lengths, it is torch.nn.functional.pad(lengths.cumsum(0), (1, 0))"
                )
            if _is_there(x, "cpu") and not _rises_from_zero(x, total):
                raise ValueError(
                    f"{name} must rise from 0 to at most the number of rows, {total}, got {x.tolist()}; "
                    "of lengths, it is torch.nn.functional.pad(lengths.cumsum(0), (1, 0))"
                )
        if cu_seqlens_q.shape != cu_seqlens_k.shape or cu_seqlens_q.device != cu_seqlens_k.device:
            raise ValueError(
                "cu_seqlens_q and cu_seqlens_k must have one length and one device, got "
                f"{list(cu_seqlens_q.shape)} on {cu_seqlens_q.device} and {list(cu_seqlens_k.shape)} on "
                f"{cu_seqlens_k.device}; a document without keys (or queries) still has its entry"
            )
        if (
            _is_there(cu_seqlens_q, "cuda")
            and torch._C._len_torch_dispatch_stack() == 0
            and triton_obstacle(cu_seqlens_q.device) is None
        ):
            from flash_train.ops.kernels.documents import packed_documents

            return cls(*packed_documents(cu_seqlens_q, cu_seqlens_k, total_q, total_k))
        return cls(*_packed(cu_seqlens_q, cu_seqlens_k, total_q, total_k))


def _packed(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, total_q: int, total_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """(bounds, query_document, key_document) by torch's operators: on a CPU, compiled, under a transform."""
    N = cu_seqlens_q.shape[0] - 1
    zero = torch.zeros_like(cu_seqlens_q[:1])
    q, k = (
        torch.cat([zero.to(x.dtype), x[1:].clamp(0, total)])
        for x, total in ((cu_seqlens_q, total_q), (cu_seqlens_k, total_k))
    )
    bounds = torch.stack([q[:-1], q[1:], k[:-1], k[1:]], dim=1)
    # document N: the queries behind the last one, which see nothing; document N + 1: the keys, which nobody sees
    queries_left = torch.stack([q[-1:], zero + total_q, zero, zero], dim=1)
    keys_left = torch.stack([zero, zero, k[-1:], zero + total_k], dim=1)
    number_q = torch.searchsorted(q, torch.arange(total_q, device=q.device, dtype=q.dtype), right=True) - 1
    number_k = torch.searchsorted(k, torch.arange(total_k, device=k.device, dtype=k.dtype), right=True) - 1
    number_k = torch.where(number_k == N, N + 1, number_k)
    bounds = torch.cat([bounds, queries_left, keys_left]).int()
    return bounds, number_q.int().unsqueeze(0), number_k.int().unsqueeze(0)


def _is_there(x: Tensor, device: str) -> bool:
    """Whether its numbers lie on the device now: no meta, fake, traced or vmapped tensor's do."""
    return (
        x.device.type == device
        and type(x) is Tensor
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )


def _rises_from_zero(offsets: Tensor, total: int) -> bool:
    return bool(offsets[0] == 0 and offsets[-1] <= total and (offsets[1:] >= offsets[:-1]).all())
