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


@pytest.mark.parametrize("slopes", [(), (H,), (B, H)])
def test_results_are_contiguous_as_they_are_there(slopes: tuple[int, ...]) -> None:
    q, k, v = randn(B, T, H, D), randn(B, S, G, D), randn(B, S, G, E)
    out, lse, _ = flash_attn_func(q, k, v, alibi_slopes=torch.rand(slopes) if slopes else None, return_attn_probs=True)
    assert out.view(B * T, H * E).shape == (B * T, H * E) and lse.is_contiguous()


def test_dropout_and_determinism_reach_the_operator() -> None:
    q, k, v = randn(B, T, H, D), randn(B, S, G, D), randn(B, S, G, E)
    torch.manual_seed(5)
    dropped = flash_attn_func(q, k, v, 0.4, deterministic=True)
    torch.manual_seed(5)
    expected, _ = definition(q, k, v, dropout=0.4)
    same(dropped, expected)


def test_an_empty_batch_gives_an_empty_output_whatever_the_slopes() -> None:
    q, k, v = randn(0, T, H, D), randn(0, S, G, D), randn(0, S, G, E)
    for slopes in (None, torch.rand(H), torch.rand(0, H)):
        out, lse, _ = flash_attn_func(q, k, v, alibi_slopes=slopes, causal=True, return_attn_probs=True)
        assert out.shape == (0, T, H, E) and lse.shape == (0, H, T)
        assert torch.autograd.grad(out.sum(), k)[0].shape == k.shape


def test_a_window_beyond_every_length_is_unbounded() -> None:
    q, k, v = randn(B, T, H, D), randn(B, S, G, D), randn(B, S, G, E)
    expected = flash_attn_func(q, k, v, window_size=(-1, 2))
    same(flash_attn_func(q, k, v, window_size=(2**31 - 1, 2)), expected)


q, k, v, packed = randn(B, T, H, D), randn(B, S, G, D), randn(B, S, G, E), randn(T, H, D)
heads_first = q.transpose(1, 2)


def refused(message: str, *tensors: Any, error: type[Exception] = ValueError, **options: Any) -> Any:
    return pytest.param(flash_attn_func, tensors or (q, k, v), options, error, message)


def refused_packed(message: str, *tensors: Any, error: type[Exception] = ValueError, **options: Any) -> Any:
    rest = {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_Q, "max_seqlen_q": 7, "max_seqlen_k": 7, **options}
    return pytest.param(flash_attn_varlen_func, tensors or (packed, packed, packed), rest, error, message)


@pytest.mark.parametrize(
    "function, tensors, options, error, message",
    [
        refused_packed("block_table must be None: .* gather the pages", block_table=CU_Q),
        refused_packed("max_seqlen_k must be a number", max_seqlen_k=CU_Q),
        refused_packed(
            r"alibi_slopes must be \[H\] in the varlen functions, got \[3, 6\]; .* take a call each",
            alibi_slopes=torch.rand(3, H),
        ),
        refused_packed(r"alibi_slopes must be \[H\] = \[6\], got \[5\]", alibi_slopes=torch.rand(5)),
        refused_packed(r"q, k and v must be \[total_q, H, D\].*; a padded batch goes to flash_attn_func", q, k, v),
        refused_packed(r"dropout_p must be in \[0, 1\), got 1.0", dropout_p=1.0),
        refused_packed(r"softmax_scale must be positive and at most 1e\+38, got 0", softmax_scale=0),
        refused(r"window_size .* got \(-2, 0\); -1 is unbounded", window_size=(-2, 0)),
        refused(r"window_size must be \(left, right\), got \(1, 2, 3\)", window_size=(1, 2, 3)),
        refused(r"window_size must be \(left, right\), got int 3", window_size=3, error=TypeError),
        refused(r"got \(3, None\); -1 is unbounded", window_size=(3, None), error=TypeError),
        refused(r"softcap must be from 0 to 1e\+38, got -1.0; 0.0 leaves", softcap=-1.0),
        refused(r"softcap must be from 0 to 1e\+38, got inf", softcap=float("inf")),
        refused("softcap must be a number, got NoneType None", softcap=None, error=TypeError),
        refused("alibi_slopes must be a torch.Tensor, got list", alibi_slopes=[1.0] * H, error=TypeError),
        refused(r"must be \[H\] = \[6\] or \[B, H\] = \[3, 6\], got \[6, 3\]", alibi_slopes=torch.rand(H, B)),
        refused(r"dropout_p must be in \[0, 1\), got -0.1", dropout_p=-0.1),
        refused("causal must be True or False, got str no; make one with bool", causal="no", error=TypeError),
        refused_packed("causal must be True or False, got NoneType", causal=None, error=TypeError),
        refused("dropout_p must be a number, got str 0", dropout_p="0", error=TypeError),
        refused(r"softmax_scale must be positive and at most 1e\+38, got -1.0; scale q instead", softmax_scale=-1.0),
        refused("softmax_scale must be a number, got Tensor", softmax_scale=torch.ones(()), error=TypeError),
        refused("q must be a torch.Tensor, got list", [1.0], k, v, error=TypeError),
        refused(r"must be \[B, T, H, D\], .* got q \[11, 6, 5\], .* \.unsqueeze\(0\)", packed, k, v),
        refused(r"q, k and v must share B, .* got q \[2, 11, 6, 5\], k \[3, 17, 2, 5\] and v", q[:2], k, v),
        refused(r"k and v must be of one length .* k \[3, 16, 2, 5\] and v \[3, 17, 2, 7\]; cut", q, k[:, 1:], v),
        refused(r"one head size D, .* got q \[3, 11, 6, 4\], k \[3, 17, 2, 5\]", q[..., :4], k, v),
        refused(r"H must be a multiple of G in \[B, T, H, D\].* q \[3, 6, 11, 5\], .* pass", heads_first, k, v),
        refused("heads and head sizes must not be empty, got q", q[:, :, :0], k, v),
        pytest.param(
            flash_attn_varlen_qkvpacked_func,
            (randn(T, 3, H, D), CU_Q, None),
            {},
            ValueError,
            "max_seqlen must be a numb",
        ),
        pytest.param(
            flash_attn_qkvpacked_func, (q,), {}, ValueError, r"qkv must be \[B, T, 3, H, D\], got .*torch.stack"
        ),
        pytest.param(flash_attn_qkvpacked_func, ([q, k, v],), {}, TypeError, "qkv must be a torch.Tensor, got list"),
        pytest.param(
            flash_attn_kvpacked_func, (q, randn(B, S, 3, G, D)), {}, ValueError, r"kv must be \[B, S, 2, G, D\], got"
        ),
    ],
)
def test_what_is_not_taken_is_refused_by_the_names_of_this_interface(
    function: Callable[..., Any],
    tensors: tuple[Any, ...],
    options: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        function(*tensors, **options)
