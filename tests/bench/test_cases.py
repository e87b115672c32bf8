"""What a problem is: who sees whom, how many FLOPs that takes, and what is no problem."""

import pytest
import torch

from flash_train.bench.cases import make_inputs, read_case
from flash_train.ops.attention import Documents, Mask, flash_attention

SIZES = {"B": 2, "H": 6, "G": 2, "T": 37, "D": 16}
MASKED = [
    {},
    {"causal": True},
    {"S": 41, "E": 24},
    {"S": 41, "causal": True},
    {"T": 41, "S": 37, "causal": True},
    {"S": 41, "window": [5, 3]},
    {"S": 41, "window": [None, 3]},
    {"causal": True, "window": [5, 9]},
    {"documents": [20, 1, 16]},
    {"documents": [20, 1, 16], "causal": True, "window": [4, None]},
]


@pytest.mark.parametrize("given", MASKED, ids=str)
def test_pairs_are_those_that_the_op_lets_see_each_other(given: dict) -> None:
    case = read_case(SIZES | given, key="case")
    documents = None
    if case.documents is not None:
        ids = torch.arange(len(case.documents)).repeat_interleave(torch.tensor(case.documents))
        documents = Documents.from_ids(ids[None])
    # with scores of 0 and the unit matrix as values, each row of the output is 1 / n at the n keys that are seen
    zeros, values = torch.zeros(1, 1, case.T, 1), torch.eye(case.S)[None, None]
    mask = Mask(case.causal, case.window, documents=documents)
    seen = flash_attention(zeros, torch.zeros(1, 1, case.S, 1), values, mask=mask, implementation="naive") > 0
    assert case.pairs() == seen.sum()


def test_flops_are_four_times_b_h_t_s_d_and_half_of_it_for_long_causal_rows() -> None:
    full = read_case({"B": 2, "H": 6, "T": 4096, "D": 64}, key="case")
    causal = read_case({"B": 2, "H": 6, "T": 4096, "D": 64, "causal": True}, key="case")
    assert full.flops("forward") == 4 * 2 * 6 * 4096 * 4096 * 64
    assert causal.flops("forward") / full.flops("forward") == pytest.approx(0.5, rel=1e-3)
    assert full.flops("backward") == 2.5 * full.flops("forward")
    assert full.flops("both") == full.flops("forward") + full.flops("backward")


def test_inputs_lie_as_projections_leave_them_and_the_seed_decides_them() -> None:
    case = read_case(SIZES | {"S": 41, "E": 24}, key="case")
    first, again, other = (
        make_inputs(case, device=torch.device("cpu"), dtype=torch.float32, seed=seed) for seed in (1, 1, 2)
    )
    assert [tuple(x.shape) for x in first] == [(2, 6, 37, 16), (2, 2, 41, 16), (2, 2, 41, 24), (2, 6, 37, 24)]
    assert all(x.transpose(1, 2).is_contiguous() for x in first)
    assert torch.equal(first.k, again.k) and not torch.equal(first.k, other.k)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"L": 3}, "case takes no 'L'; choose among B, H, G, T, S, D, E, causal, window, documents"),
        ({"T": 0}, "case.T must be a positive whole number, got 0"),
        ({"G": 4}, "H must be a multiple of G, got H=6 and G=4"),
        ({"causal": 1}, "case.causal must be true or false, got 1"),
        ({"window": 5}, r"case.window must be \[left, right\], null where it has no end, got 5"),
        ({"window": [-1, 0]}, r"case.window must be \[left, right\]"),
        ({"documents": [20, 16]}, "case.documents must be T=37 tokens together, and as many keys, got 36 and S=37"),
        ({"documents": [37, 0]}, "case.documents must be a list of lengths"),
    ],
    ids=str,
)
def test_what_is_no_problem_is_refused_by_its_key(given: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_case(SIZES | given, key="case")


def test_sizes_that_cannot_be_left_out_are_named() -> None:
    with pytest.raises(ValueError, match="case must give B, H, T and D, and D is missing"):
        read_case({"B": 1, "H": 2, "T": 3}, key="case")
