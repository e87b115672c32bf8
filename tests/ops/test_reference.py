"""The ladder: every rung gives the answer of the one before, in float64, and so do its gradients."""

import doctest
import math

import pytest
import torch

from flash_train.ops import reference
from flash_train.ops.features import UNBOUNDED, Terms
from flash_train.ops.reference import (
    State,
    finish,
    merge,
    naive_attention,
    online_attention,
    safe_attention,
    safe_softmax,
)
from flash_train.ops.tiled import tiled_attention, tiled_attention_backward
from tests.ops.cases import LAYOUTS, Case, inputs
from tests.ops.errors import error_norm, results
from tests.ops.oracle import exact

SHAPES = [(2, 6, 2, 37, 41, 24, 24), (1, 4, 4, 70, 33, 16, 9), (2, 3, 1, 1, 5, 8, 8), (1, 2, 2, 5, 1, 3, 3)]


def tensors(B, H, G, T, S, D, E):
    torch.manual_seed(0)
    shapes = [(B, H, T, D), (B, G, S, D), (B, G, S, E)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def test_worked_example_of_the_docstring():
    assert doctest.testmod(reference).failed == 0 and doctest.testmod(reference).attempted >= 5


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_each_rung_equals_the_one_before(shape, causal):
    (q, k, v), terms = tensors(*shape), Terms(0.3, right=0 if causal else UNBOUNDED)
    one = naive_attention(q, k, v, terms)
    two, lse = safe_attention(q, k, v, terms)
    three, lse_three = online_attention(q, k, v, terms, segment=7)
    four, lse_four = tiled_attention(q, k, v, terms, tile=16)
    reverse = naive_attention(q, k, v, terms, reverse_keys=True)
    for other in (two, three, four, reverse):
        torch.testing.assert_close(other, one)
    torch.testing.assert_close(lse_three, lse)
    torch.testing.assert_close(lse_four, lse)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_recomputed_backward_equals_autograd_through_the_definition(shape, causal):
    (q, k, v), terms = tensors(*shape), Terms(0.3, right=0 if causal else UNBOUNDED)
    output, lse = safe_attention(q, k, v, terms)
    do, dl = torch.randn_like(output), torch.randn_like(lse)
    finite = lse.masked_fill(lse == -math.inf, 0.0)
    expected = torch.autograd.grad([output, finite], [q, k, v], [do, dl.masked_fill(lse == -math.inf, 0.0)])
    with torch.no_grad():
        output, lse = tiled_attention(q, k, v, terms, tile=16)
        got = tiled_attention_backward(do, dl, q, k, v, output, lse, terms, tile=16)[:3]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


ODD, SQUARE, PACKED = Case(2, 6, 2, 37, 41, 9, 7), Case(2, 6, 2, 41, 41, 9, 7), Case(1, 6, 2, 67, 71, 9, 7)
FEATURES = {
    "top left": ODD._replace(causal=True, alignment="top_left"),
    "queries before the first key": Case(2, 6, 2, 41, 13, 9, 7, causal=True),
    "window": ODD._replace(window=(3, 2)),
    "window of one key": ODD._replace(window=(0, 0), causal=True),
    "window without an end": ODD._replace(window=(None, 1)),
    "causal window, top left": ODD._replace(window=(4, None), causal=True, alignment="top_left"),
    "documents": SQUARE._replace(documents="ids", window=(5, 3)),
    "causal documents, dropout": SQUARE._replace(documents="ids", causal=True, dropout=0.3),
    "packed": PACKED._replace(documents="packed", causal=True),
    "packed, everything": PACKED._replace(
        documents="packed", window=(7, 2), soft_cap=3.0, alibi=True, bias="HTS", allowed="1TS", sinks=True, dropout=0.2
    ),
    "soft cap": ODD._replace(soft_cap=1.5),
    "alibi": ODD._replace(alibi=True),
    "alibi, top left": ODD._replace(alibi=True, alignment="top_left"),
    "bias": ODD._replace(bias="BHTS"),
    "bias of one row": ODD._replace(bias="H1S"),
    "bias of one column": ODD._replace(bias="B1T1"),
    "bias of one number": ODD._replace(bias="1"),
    "bias with hidden pairs": ODD._replace(bias="1HTS", bias_infinite=True),
    "allowed": ODD._replace(allowed="B1TS"),
    "allowed, by row": ODD._replace(allowed="T1", sinks=True),
    "sinks": ODD._replace(sinks=True),
    "dropout": ODD._replace(dropout=0.4),
    "everything": SQUARE._replace(
        documents="ids", window=(9, 4), soft_cap=3.0, alibi=True, bias="BHTS", allowed="TS", sinks=True, dropout=0.2
    ),
    "no keys": ODD._replace(S=0, sinks=True, bias="T1"),
    "no queries": ODD._replace(T=0, sinks=True, alibi=True),
    "no batch": ODD._replace(B=0, bias="1HTS", dropout=0.1),
    "only the output's gradient": ODD._replace(lse_gradient=False, bias="11T1"),
} | {layout: ODD._replace(layout=layout, causal=True) for layout in LAYOUTS}


@pytest.mark.parametrize("implementation", ["naive", "tiled"])
@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_and_its_gradients_equal_an_oracle_written_apart(feature, implementation):
    x = inputs(FEATURES[feature], torch.float64, "cpu")
    got, expected = results(x, implementation=implementation), exact(x).results
    assert got.keys() == expected.keys()
    for name, y in expected.items():
        assert error_norm(got[name], y) <= 1e-12 * (1 + y[y.isfinite()].norm().item()), name


def test_softmax_survives_scores_that_overflow_the_exponential():
    p, lse = safe_softmax(torch.tensor([[1000.0, 1000.0], [-math.inf, -math.inf]]))
    assert p.tolist() == [[0.5, 0.5], [0.0, 0.0]]
    assert lse.tolist() == [pytest.approx(1000 + math.log(2)), -math.inf]


def test_merge_with_an_empty_state_changes_nothing_and_two_empty_ones_make_no_nan():
    empty = State(torch.tensor(-math.inf), torch.tensor(0.0), torch.zeros(3))
    state = State(torch.tensor(2.0), torch.tensor(1.5), torch.tensor([1.0, 2.0, 3.0]))
    for a, b in ((empty, state), (state, empty)):
        assert all(torch.equal(x, y) for x, y in zip(merge(a, b), state, strict=True))
    output, lse = finish(merge(empty, empty))
    assert output.tolist() == [0.0, 0.0, 0.0] and lse.item() == -math.inf


def test_merged_partial_results_equal_the_whole():
    q, k, v = (x.detach() for x in tensors(2, 3, 3, 5, 11, 8, 8))
    whole, whole_lse = safe_attention(q, k, v, Terms(0.3))
    parts = [safe_attention(q, k[:, :, part], v[:, :, part], Terms(0.3)) for part in (slice(0, 4), slice(4, 11))]
    output, lse = finish(merge(*(State(L, torch.ones_like(L), o) for o, L in parts)))
    torch.testing.assert_close(output, whole)
    torch.testing.assert_close(lse, whole_lse)
