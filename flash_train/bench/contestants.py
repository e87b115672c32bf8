"""Who takes part: the op's own implementations by name, FlexAttention, and flash-attention's three libraries."""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_train.bench.cases import Case, Inputs
from flash_train.ops.attention import IMPLEMENTATIONS, choose_implementation, flash_attention, flash_attention_packed
from flash_train.ops.features import NO_SCORE, Documents, Mask, flatten

LAYOUTS = ("BHTD", "BTHD", "packed")
"""How a contestant takes its tensors: [B, H, T, D], [B, T, H, D], or [B T, H, D] of documents."""


class Unavailable(Exception):
    """A contestant that cannot take part, and why."""


class Contestant(NamedTuple):
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    layout: str = "BHTD"
    ran: str | None = None
    """What runs under the name, where that is a matter of choice."""


Prepare = Callable[[Case, Inputs], Contestant]
"""Everything that is done once for many calls: masks are made here, as a model makes them once for all its layers.
Raises Unavailable for what is not installed, and for problems that the contestant has no words for."""


def laid_out(x: Tensor, layout: str) -> Tensor:
    """[B, H, T, D] as `layout` has it: a view if it is stored as [B, T, H, D]."""
    if layout == "BHTD":
        return x
    return x.transpose(1, 2) if layout == "BTHD" else x.transpose(1, 2).flatten(0, 1)


def heads_first(x: Tensor, layout: str, B: int) -> Tensor:
    """The reverse of `laid_out`."""
    if layout == "BHTD":
        return x
    return (x if layout == "BTHD" else x.unflatten(0, (B, -1))).transpose(1, 2)


def _offsets(case: Case, device: torch.device) -> Tensor:
    """[N + 1] int32: where the documents of all rows of the batch begin, the rows one behind the other."""
    assert case.documents is not None
    lengths = torch.tensor((0, *case.documents * case.B), device=device)
    return lengths.cumsum(0).to(torch.int32)


def _document_ids(case: Case, device: torch.device) -> Tensor:
    """[T]"""
    assert case.documents is not None
    lengths = torch.tensor(case.documents, device=device)
    return torch.arange(len(lengths), device=device).repeat_interleave(lengths)


def mask_of(case: Case, device: torch.device) -> Mask:
    """What the case's queries see, as `flash_attention` is told."""
    documents = None
    if case.documents is not None:
        documents = Documents.from_ids(_document_ids(case, device).expand(case.B, -1))
    return Mask(case.causal, case.window, documents=documents)


def _own(implementation: str) -> Prepare:
    def prepare(case: Case, inputs: Inputs) -> Contestant:
        q, k, v, _ = inputs
        if implementation == "triton" and q.device.type == "cpu":
            raise Unavailable("Triton needs a GPU; its interpreter's speed says nothing")
        mask = mask_of(case, q.device)
        terms = flatten(q, k, mask, NO_SCORE, scale=case.scale, dropout=0.0, implementation=implementation)
        return Contestant(
            lambda q, k, v: flash_attention(q, k, v, mask=mask, implementation=implementation),
            ran=choose_implementation(implementation, q, k, v, terms).name,
        )

    return prepare


def _packed(case: Case, inputs: Inputs) -> Contestant:
    if case.documents is None:
        raise Unavailable("flash_attention_packed is for documents")
    offsets, mask = _offsets(case, inputs.q.device), Mask(case.causal, case.window)
    return Contestant(lambda q, k, v: flash_attention_packed(q, k, v, offsets, offsets, mask=mask)[0], "packed")


def _flex(case: Case, inputs: Inputs) -> Contestant:
    """`flex_attention` under torch.compile, the mask as a block mask, spelled as its users spell it."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    device, shift = inputs.q.device, case.S - case.T
    left, right = case.window or (None, None)
    right = 0 if case.causal else right
    ids = None if case.documents is None else _document_ids(case, device)

    def visible(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        see = s >= 0
        if right is not None:
            see = see & (s <= t + shift + right)
        if left is not None:
            see = see & (s >= t + shift - left)
        return see if ids is None else see & (ids[t] == ids[s])

    block_mask = None
    if (left, right, ids) != (None, None, None):
        block_mask = create_block_mask(visible, None, None, case.T, case.S, device=device)
    compiled, grouped = torch.compile(flex_attention, dynamic=False), case.G != case.H

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output = compiled(q, k, v, block_mask=block_mask, enable_gqa=grouped)
        assert isinstance(output, Tensor)
        return output

    return Contestant(attend)


def _library(module: str, *, no_end: int | None) -> Prepare:
    """One of flash-attention's libraries; `no_end` is its word for a side of a window without an end."""

    def prepare(case: Case, inputs: Inputs) -> Contestant:
        device = inputs.q.device
        name = "flash_attn_func" if case.documents is None else "flash_attn_varlen_func"
        try:
            function = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise Unavailable(f"{module}.{name} is not installed ({str(error).splitlines()[0]})") from error
        if device.type != "cuda":
            raise Unavailable(f"{module} needs a GPU")
        left, right = (no_end if side is None else side for side in case.window or (None, None))
        options: dict[str, Any] = {"causal": case.causal, "window_size": (left, right)}
        if case.documents is not None:
            offsets, longest = _offsets(case, device), max(case.documents)
            options |= {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
            options |= {"max_seqlen_q": longest, "max_seqlen_k": longest}

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            answer = function(q, k, v, **options)
            return answer[0] if isinstance(answer, tuple) else answer  # some releases return the log-sum-exp, too

        return Contestant(attend, "BTHD" if case.documents is None else "packed")

    return prepare


OURS = ("flash", "flash_packed", "hopper", "triton", "tiled")
"""Names of this package's own; of them a wrong answer, or a crash, is a fault of the run."""
CONTESTANTS: dict[str, Prepare] = {
    # naive_reversed is naive in another order of summation
    **{name: _own(name) for name in IMPLEMENTATIONS if name != "naive_reversed"},
    "flash_packed": _packed,
    "flex": _flex,
    "flash_attn_2": _library("flash_attn", no_end=-1),
    "flash_attn_3": _library("flash_attn_interface", no_end=-1),
    "flash_attn_4": _library("flash_attn.cute", no_end=None),
}
