"""`scaled_dot_product_attention` beside torch's own, in float64."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as of_torch

from flash_train.integrations.sdpa import scaled_dot_product_attention

D, E = 5, 3


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def agrees(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any) -> None:
    """Output and every gradient are those of torch's math back end."""
    leaves = [x for x in (q, k, v, mask) if x is not None and x.requires_grad]
    with sdpa_kernel(SDPBackend.MATH):
        expected = of_torch(q, k, v, mask, **options)
    output = scaled_dot_product_attention(q, k, v, mask, **options)
    assert output.shape == expected.shape
    weights = torch.randn_like(output)
    gradients = torch.autograd.grad((output * weights).sum(), leaves)
    expected_gradients = torch.autograd.grad((expected * weights).sum(), leaves)
    for mine, its in zip((output, *gradients), (expected, *expected_gradients), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-9, atol=1e-9)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_whatever_shapes_and_masks_broadcast_the_answer_is_torchs(data: st.DataObject) -> None:
    outer = tuple(data.draw(st.lists(st.integers(1, 3), max_size=4), label="outer"))
    T, S = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 9)), label="T, S")

    def narrowed(shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(data.draw(st.sampled_from([1, n])) for n in shape)

    shared = narrowed(outer)
    q, k, v = randn(*outer, T, D), randn(*shared, S, D), randn(*shared, S, E)
    kind = data.draw(st.sampled_from(["none", "causal", "boolean", "floating"]), label="mask")
    options: dict[str, Any] = {"scale": data.draw(st.sampled_from([None, 0.3, -0.7, 0.0]), label="scale")}
    mask = None
    if kind == "causal":
        options["is_causal"] = True
    elif kind != "none":
        shape = narrowed((*outer, T, S))
        shape = shape[data.draw(st.integers(0, len(outer))) :]
        mask = torch.rand(shape) < 0.6 if kind == "boolean" else randn(*shape)
    agrees(q, k, v, mask, **options)


@pytest.mark.parametrize("before", [(), (2,), (2, 3)])
@pytest.mark.parametrize("masked", [False, True])
def test_query_heads_share_key_heads_if_asked(before: tuple[int, ...], masked: bool) -> None:
    mask = torch.rand(*before, 6, 7, 9) < 0.6 if masked else None
    agrees(randn(*before, 6, 7, D), randn(*before, 2, 9, D), randn(*before, 2, 9, E), mask, enable_gqa=True)


def test_a_query_that_sees_nothing_gives_zero_and_zero_gradients() -> None:
    q, k, v = randn(2, 6, 7, D), randn(2, 6, 9, D), randn(2, 6, 9, E)
    allowed = torch.ones(7, 9, dtype=torch.bool)
    allowed[3] = False
    bias = torch.zeros(7, 9, dtype=torch.float64).masked_fill(~allowed, float("-inf"))
    for mask in (allowed, bias):
        output = scaled_dot_product_attention(q, k, v, mask)
        (gradient,) = torch.autograd.grad(output.sum(), q)
        assert not output[:, :, 3].any() and not gradient[:, :, 3].any() and not gradient.isnan().any()
        torch.testing.assert_close(output, of_torch(q, k, v, mask))


@pytest.mark.parametrize("T, S", [(5, 9), (9, 9), (9, 5)])
def test_torchs_causal_biases_are_taken_by_their_meaning(T: int, S: int) -> None:
    q, k, v = randn(2, 6, T, D), randn(2, 6, S, D), randn(2, 6, S, E)
    expected = of_torch(q, k, v, torch.ones(T, S, dtype=torch.bool).tril())
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, causal_upper_left(T, S)), expected)
    if T <= S:  # torch warns of NaN otherwise
        expected = of_torch(q, k, v, torch.ones(T, S, dtype=torch.bool).tril(S - T))
        torch.testing.assert_close(scaled_dot_product_attention(q, k, v, causal_lower_right(T, S)), expected)


@pytest.mark.parametrize("before", [(0,), (2, 0), (0, 6), (2, 0, 6), (2, 3, 0)])
@pytest.mark.parametrize("masked", [False, True])
def test_an_empty_batch_dimension_is_an_empty_result_wherever_it_stands(before: tuple[int, ...], masked: bool) -> None:
    mask = torch.ones(*before, 7, 9, dtype=torch.bool) if masked else None
    agrees(randn(*before, 7, D), randn(*before, 9, D), randn(*before, 9, E), mask)


def test_without_heads_the_output_is_contiguous_as_torchs_is() -> None:
    output = scaled_dot_product_attention(randn(4, 7, D), randn(4, 9, D), randn(4, 9, E), randn(4, 7, 1))
    assert output.view(4 * 7, E).shape == (4 * 7, E)


def test_dropout_strikes_the_asked_share_and_keeps_the_mean() -> None:
    q, k, v = torch.zeros(2, 3, 40, D), torch.zeros(2, 3, 50, D), torch.eye(50).expand(2, 3, 50, 50)
    probabilities = scaled_dot_product_attention(q, k, v, dropout_p=0.25)
    assert abs((probabilities == 0).double().mean() - 0.25) < 0.02
    torch.testing.assert_close(probabilities.max(), torch.tensor(1 / 50 / 0.75))


q, k, v = randn(2, 6, 7, D), randn(2, 6, 9, D), randn(2, 6, 9, E)
some = torch.ones(7, 9, dtype=torch.bool)
CASES: list[tuple[dict[str, Any], str]] = [
    (
        {"attn_mask": some, "is_causal": True},
        "attn_mask must be None beside is_causal=True, as in torch; use flash_att",
    ),
    ({"attn_mask": some.int()}, r"attn_mask must be boolean or floating, got torch.int32; cast it with .bool\(\)"),
    ({"attn_mask": some[:3]}, r"attn_mask must broadcast to .* = \[2, 6, 7, 9\], got \[3, 9\]; put the missing"),
    ({"attn_mask": some[None, None, None]}, r"attn_mask must broadcast to .* got \[1, 1, 1, 7, 9\]"),
    (
        {"query": q[0], "key": k[0], "value": v[0], "attn_mask": some.expand(2, 7, 9)},
        r"attn_mask must broadcast to .* = \[6, 7, 9\], got \[2, 7, 9\]; put",
    ),
    (
        {"attn_mask": causal_upper_left(7, 8)},
        r"attn_mask must be made for T, S = \(7, 9\), got \(7, 8\); make",
    ),
    (
        {"key": k[:, :3]},
        r"query, key and value must broadcast .* got \[\[2, 6\], \[2, 3\], \[2, 6\]\]; enable_gqa=True",
    ),
    ({"query": q[0, 0], "enable_gqa": True}, "query must have at least 3 dimensions, H, T and D, got 2; add"),
    ({"query": q[0, 0, 0]}, "query must have at least 2 dimensions, T and D, got 1; add the missing ones with"),
    ({"dropout_p": 1.0}, r"dropout_p must be in \[0, 1\), got 1.0; dropping everything"),
    ({"scale": float("nan")}, r"scale must be finite, got nan; None is 1 / sqrt\(D\)"),
    ({"value": v[:, :, 1:]}, r"key and value must have one length S, .* value \[2, 6, 8, 3\]; cut"),
    ({"query": q[..., 1:]}, r"query and key must have one head size D, got query \[2, 6, 7, 4\], key"),
    (
        {"key": k[:, :4], "value": v[:, :4], "enable_gqa": True},
        r"of which query's is a multiple, got query \[2, 6, 7, 5\], key \[2, 4, 9, 5\] .* repeat_interleave",
    ),
]


@pytest.mark.parametrize("changed, message", CASES)
def test_what_is_not_taken_is_refused_by_name(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scaled_dot_product_attention(**{"query": q, "key": k, "value": v, **changed})


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"query": [1.0]}, "query must be a torch.Tensor, got list"),
        ({"attn_mask": [True]}, "attn_mask must be a torch.Tensor, got list"),
        ({"dropout_p": None}, "dropout_p must be a number, got NoneType None"),
        ({"scale": "1"}, "scale must be a number, got str 1"),
        ({"is_causal": 1}, "is_causal must be True or False, got int 1"),
    ],
)
def test_what_is_of_another_class_is_refused_by_name(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        scaled_dot_product_attention(**{"query": q, "key": k, "value": v, **changed})


def test_a_nested_tensor_is_refused() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(6, 7, D)] * 2, layout=torch.jagged)
    with pytest.raises(ValueError, match="query must be dense, got a nested tensor; use flash_attention_packed"):
        scaled_dot_product_attention(nested, k, v)
