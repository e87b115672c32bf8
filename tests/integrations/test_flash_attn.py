"""flash-attention's functions: its signatures, its layouts, and `flash_attention`'s meaning."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_train.integrations import flash_attn
from flash_train.integrations.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flash_train.ops.attention import Mask, Score, flash_attention_with_lse

B, H, G, T, S, D, E = 3, 6, 2, 11, 17, 5, 7
REST = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"
DEFAULTS = (0.0, None, False, (-1, -1), 0.0, None, False, False)
SIGNATURES = {
    "flash_attn_func": "q k v",
    "flash_attn_qkvpacked_func": "qkv",
    "flash_attn_kvpacked_func": "q kv",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
    "flash_attn_varlen_qkvpacked_func": "qkv cu_seqlens max_seqlen",
    "flash_attn_varlen_kvpacked_func": "q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
}
CU_Q, CU_K = torch.tensor([0, 4, 4, 11], dtype=torch.int32), torch.tensor([0, 9, 12, 17], dtype=torch.int32)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def definition(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp) of flash-attention's layout, by rung 1."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = flash_attention_with_lse(q, k, v, implementation="naive", **options)
    return out.transpose(1, 2), lse


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_have_the_names_order_and_defaults_of_flash_attention(name: str) -> None:
    expected = [(x, inspect.Parameter.empty) for x in SIGNATURES[name].split()]
    expected += list(zip(REST.split(), DEFAULTS, strict=True))
    expected += [("block_table", None)] if name == "flash_attn_varlen_func" else []
    parameters = inspect.signature(getattr(flash_attn, name)).parameters.values()
    assert [(x.name, x.default) for x in parameters] == expected
    assert all(x.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for x in parameters)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (4, 0), (-1, 2), (0, -1)])
def test_every_option_means_what_it_means_there(causal: bool, window: tuple[int, int]) -> None:
    q, k, v, slopes = randn(B, T, H, D), randn(B, S, G, D), randn(B, S, G, E), torch.rand(H)
    out, lse, s_dmask = flash_attn_func(q, k, v, 0.0, 0.3, causal, window, 2.5, slopes, True, True)
    left, right = (None if x == -1 else x for x in window)
    expected, expected_lse = definition(
        q,
        k,
        v,
        mask=Mask(causal=causal, window=(left, right)),
        score=Score(soft_cap=2.5, alibi_slopes=slopes),
        scale=0.3,
    )
    assert out.shape == (B, T, H, E) and lse.shape == (B, H, T) and s_dmask is None
    same(out, expected)
    same(lse, expected_lse)
    weights = torch.randn_like(out)
    for mine, theirs in zip(
        torch.autograd.grad((out * weights).sum(), (q, k, v)),
        torch.autograd.grad((expected * weights).sum(), (q, k, v)),
        strict=True,
    ):
        same(mine, theirs)


def test_alibi_slopes_may_differ_by_row() -> None:
    q, k, v, slopes = randn(B, T, H, D), randn(B, S, G, D), randn(B, S, G, E), torch.rand(B, H)
    out, lse, _ = flash_attn_func(q, k, v, alibi_slopes=slopes, causal=True, return_attn_probs=True)
    for b in range(B):
        row = slice(b, b + 1)
        expected = flash_attn_func(q[row], k[row], v[row], alibi_slopes=slopes[b], causal=True, return_attn_probs=True)
        same(out[row], expected[0])
        same(lse[row], expected[1])


def test_packed_tensors_give_what_their_parts_give() -> None:
    qkv, kv, q = randn(B, S, 3, H, D), randn(B, S, 2, G, D), randn(B, T, H, D)
    same(
        flash_attn_qkvpacked_func(qkv, causal=True),
        flash_attn_func(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], causal=True),
    )
    same(flash_attn_kvpacked_func(q, kv, causal=True), flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], causal=True))
    (gradient,) = torch.autograd.grad(flash_attn_qkvpacked_func(qkv).sum(), qkv)
    assert gradient.shape == qkv.shape and bool(gradient.any())


def test_each_sequence_of_a_varlen_call_is_attended_alone() -> None:
    q, k, v = randn(T, H, D), randn(S, G, D), randn(S, G, E)
    out, lse, s_dmask = flash_attn_varlen_func(
        q, k, v, CU_Q, CU_K, 7, 9, causal=True, window_size=(3, -1), softcap=2.0, return_attn_probs=True
    )
    assert out.shape == (T, H, E) and lse.shape == (H, T) and s_dmask is None
    for n in range(3):
        rows, keys = slice(*CU_Q[n : n + 2].tolist()), slice(*CU_K[n : n + 2].tolist())
        expected = flash_attn_func(
            q[None, rows], k[None, keys], v[None, keys], causal=True, window_size=(3, -1), softcap=2.0
        )
        same(out[rows], expected[0])
    kv = randn(S, 2, G, D)
    same(
        flash_attn_varlen_kvpacked_func(q, kv, CU_Q, CU_K, 7, 9, causal=True),
        flash_attn_varlen_func(q, kv[:, 0], kv[:, 1], CU_Q, CU_K, 7, 9, causal=True),
    )
    qkv = randn(T, 3, H, D)
    same(
        flash_attn_varlen_qkvpacked_func(qkv, CU_Q, torch.tensor(7), causal=True),
        flash_attn_varlen_func(qkv[:, 0], qkv[:, 1], qkv[:, 2], CU_Q, CU_Q, 7, 7, causal=True),
    )


def test_dropout_and_determinism_reach_the_operator() -> None:
    q, k, v = randn(B, T, H, D), randn(B, S, G, D), randn(B, S, G, E)
    torch.manual_seed(5)
    dropped = flash_attn_func(q, k, v, 0.4, deterministic=True)
    torch.manual_seed(5)
    expected, _ = definition(q, k, v, dropout=0.4)
    same(dropped, expected)


q, k, v, packed = randn(B, T, H, D), randn(B, S, G, D), randn(B, S, G, E), randn(T, H, D)
CASES: list[tuple[Callable[[], Any], str]] = [
    (lambda: flash_attn_varlen_func(packed, packed, packed, CU_Q, CU_Q, 7, 7, block_table=CU_Q), "gather the pages"),
    (lambda: flash_attn_varlen_func(packed, packed, packed, CU_Q, CU_Q, 7, CU_Q), "max_seqlen_k must be a number"),
    (lambda: flash_attn_varlen_qkvpacked_func(randn(T, 3, H, D), CU_Q, None), "max_seqlen must be a number"),  # type: ignore
    (
        lambda: flash_attn_varlen_func(packed, packed, packed, CU_Q, CU_Q, 7, 7, alibi_slopes=torch.rand(3, H)),
        r"alibi_slopes must be \[H\] in the varlen functions, got \[3, 6\]; .* take a call each",
    ),
    (lambda: flash_attn_func(q, k, v, window_size=(-2, 0)), r"window_size .* got \(-2, 0\); -1 is unbounded"),
    (lambda: flash_attn_func(q, k, v, softcap=-1.0), "softcap must not be negative, got -1.0; 0.0 leaves"),
    (lambda: flash_attn_func(packed, k, v), r"q must be \[B, length, heads, head size\], got \[11, 6, 5\]; unsqueeze"),
    (lambda: flash_attn_qkvpacked_func(q), r"qkv must be \[B, T, 3, H, D\], got \[3, 11, 6, 5\]; torch.stack"),
    (lambda: flash_attn_kvpacked_func(q, randn(B, S, 3, G, D)), r"kv must be \[B, S, 2, G, D\], got"),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_what_is_not_taken_is_refused_by_name(case: int) -> None:
    call, message = CASES[case]
    with pytest.raises(ValueError, match=message):
        call()
