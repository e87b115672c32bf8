"""`merge`: attention over a set of keys that was split, put together again, is attention over the whole."""

import math

import pytest
import torch

from flash_train.ops.attention import Mask, Score, flash_attention_with_lse
from flash_train.ops.partials import merge
from tests.ops.tensors import finite, outputs_and_gradients, qkv

CUTS = {"uneven, one empty": (0, 4, 4, 11), "one": (0, 11), "single keys": tuple(range(12))}


def split(q, k, v, cuts, order=None, **options):
    """Attention over each part of the keys, merged."""
    parts = list(zip(cuts, cuts[1:], strict=False))
    parts = parts if order is None else [parts[i] for i in order]
    return merge(*zip(*(flash_attention_with_lse(q, k[:, :, a:b], v[:, :, a:b], **options) for a, b in parts),
                      strict=True))  # fmt: skip


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("name", ["tiled", "naive"])
def test_merged_parts_equal_the_whole_with_their_gradients(name, cuts):
    leaves = qkv()
    whole = outputs_and_gradients(lambda q, k, v: flash_attention_with_lse(q, k, v, implementation=name), leaves)
    merged = outputs_and_gradients(lambda q, k, v: split(q, k, v, cuts, implementation=name), leaves)
    for ours, expected in zip(merged, whole, strict=True):
        torch.testing.assert_close(ours, expected)


def test_a_causal_mask_and_a_bias_split_by_keys_and_the_sinks_go_with_one_part():
    q, k, v = leaves = qkv()
    bias, sinks = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((7, 11), (6,)))
    leaves = [q, k, v, bias, sinks]

    def whole(q, k, v, bias, sinks):
        return flash_attention_with_lse(q, k, v, causal=True, score=Score(bias=bias, sinks=sinks))

    def parts(q, k, v, bias, sinks):
        results = []
        for a, b in ((0, 3), (3, 9), (9, 11)):  # query t sees up to t + 4, so up to t + 4 - a in the part
            seen = torch.arange(7)[:, None] + 4 >= torch.arange(a, b)
            score = Score(bias=bias[:, a:b], sinks=sinks if a == 3 else None)
            results.append(
                flash_attention_with_lse(q, k[:, :, a:b], v[:, :, a:b], mask=Mask(allowed=seen), score=score)
            )
        return merge(*zip(*results, strict=True))

    for ours, expected in zip(outputs_and_gradients(parts, leaves), outputs_and_gradients(whole, leaves), strict=True):
        torch.testing.assert_close(ours, expected)


def test_gradcheck_passes_for_outputs_and_log_sum_exps():
    generator = torch.Generator().manual_seed(0)
    outputs = [torch.randn(3, 2, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    lses = [torch.randn(3, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    function = lambda *x: merge(x[:3], x[3:])  # noqa: E731
    assert torch.autograd.gradcheck(function, (*outputs, *lses))
    assert torch.autograd.gradgradcheck(function, (*outputs, *lses))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parts_kept_in_fp32_lose_less(dtype):
    q, k, v = (x.detach() for x in qkv(S=64, D=16, dtype=dtype))
    cuts = tuple(range(0, 65, 4))
    exact, _ = flash_attention_with_lse(*(x.double() for x in (q, k, v)))

    def error(output_dtype):
        output, lse = split(q, k, v, cuts, output_dtype=output_dtype)
        assert output.dtype == (output_dtype or dtype) and lse.dtype == torch.float32
        return ((output.double() - exact).norm() / exact.norm()).item()

    assert error(torch.float32) < 1e-6 and error(None) > 100 * error(torch.float32)


def test_rows_that_saw_nothing_anywhere_stay_empty_without_nan():
    outputs = [torch.zeros(2, 3, requires_grad=True), torch.tensor([[0.0] * 3, [1.0, 2.0, 3.0]], requires_grad=True)]
    lses = [
        torch.tensor([-math.inf, -math.inf], requires_grad=True),
        torch.tensor([-math.inf, 2.0], requires_grad=True),
    ]
    output, lse = merge(outputs, lses)
    assert output.tolist() == [[0.0, 0.0, 0.0], [1.0, 2.0, 3.0]] and lse.tolist() == [-math.inf, 2.0]
    gradients = torch.autograd.grad(output.sum() + finite(lse).sum(), outputs + lses)
    assert all(x.isfinite().all() for x in gradients)
    assert gradients[0].eq(0).all() and gradients[1].tolist() == [[0.0] * 3, [1.0] * 3]
    assert gradients[2].eq(0).all() and gradients[3].tolist() == [0.0, 1.0]


def test_parts_that_mask_whole_rows_give_the_wholes_gradients():
    leaves = qkv(T=11, S=7)  # causal: four rows see nothing, others nothing of the later parts

    def parts(q, k, v):
        results = []
        for a, b in ((0, 2), (2, 7)):
            seen = torch.arange(11)[:, None] - 4 >= torch.arange(a, b)
            results.append(flash_attention_with_lse(q, k[:, :, a:b], v[:, :, a:b], mask=Mask(allowed=seen)))
        return merge(*zip(*results, strict=True))

    whole = outputs_and_gradients(lambda q, k, v: flash_attention_with_lse(q, k, v, causal=True), leaves)
    for ours, expected in zip(outputs_and_gradients(parts, leaves), whole, strict=True):
        torch.testing.assert_close(ours, expected)


def test_the_order_of_the_parts_and_the_size_of_their_scores_do_not_matter():
    leaves = qkv()
    expected = outputs_and_gradients(lambda q, k, v: split(q * 1000, k, v, (0, 3, 5, 11)), leaves)
    for order in ((2, 1, 0), (1, 2, 0)):
        got = outputs_and_gradients(lambda q, k, v, o=order: split(q * 1000, k, v, (0, 3, 5, 11), o), leaves)
        for ours, other in zip(got, expected, strict=True):
            assert ours.isfinite().all()
            torch.testing.assert_close(ours, other)


def test_merge_compiles_whole():
    parts = [(torch.randn(2, 3, 4), torch.randn(2, 3)) for _ in range(3)]
    outputs, lses = zip(*parts, strict=True)
    compiled = torch.compile(merge, fullgraph=True, backend="aot_eager")
    for ours, expected in zip(compiled(outputs, lses), merge(outputs, lses), strict=True):
        torch.testing.assert_close(ours, expected)
