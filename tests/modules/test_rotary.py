import copy

import pytest
import torch
from torch import Tensor

from flash_train.modules.rotary import RotaryEmbedding

LENGTH, HEAD_SIZE = 37, 10


def turn_by_definition(x: Tensor, base: float) -> Tensor:
    """Rotation as multiplication by complex numbers, pair (i, i + D/2) as real and imaginary part, in float64."""
    first, second = x.double().chunk(2, dim=-1)
    positions = torch.arange(x.shape[-2], dtype=torch.float64)[:, None]
    frequencies = base ** (-2 * torch.arange(first.shape[-1], dtype=torch.float64) / x.shape[-1])
    angles = positions * frequencies
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=-1)


@pytest.mark.parametrize("base", [10_000.0, 500.0])
def test_rotation_is_multiplication_by_complex_numbers(base: float) -> None:
    x = torch.randn(2, 3, LENGTH, HEAD_SIZE, dtype=torch.float64)
    rotary = RotaryEmbedding(HEAD_SIZE, LENGTH + 4, base=base).double()
    torch.testing.assert_close(rotary(x), turn_by_definition(x, base))


def test_scores_depend_on_the_distance_alone() -> None:
    rotary = RotaryEmbedding(HEAD_SIZE, LENGTH).double()
    q, k = torch.randn(2, HEAD_SIZE, dtype=torch.float64)
    queries, keys = rotary(q.expand(1, 1, LENGTH, -1)), rotary(k.expand(1, 1, LENGTH, -1))
    scores = (queries @ keys.mT)[0, 0]
    for distance in (0, 5, -13):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_loses_one_rounding_even_far_out(dtype: torch.dtype) -> None:
    length = 20_000
    x = torch.randn(1, 1, length, HEAD_SIZE).to(dtype)
    turned = RotaryEmbedding(HEAD_SIZE, length).to(dtype)(x)
    assert turned.dtype == dtype
    torch.testing.assert_close(
        turned, turn_by_definition(x, 10_000.0).to(dtype), atol=1e-6, rtol=torch.finfo(dtype).eps
    )


def test_autocast_changes_nothing() -> None:
    rotary, x = RotaryEmbedding(HEAD_SIZE, LENGTH), torch.randn(2, 3, LENGTH, HEAD_SIZE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = rotary(x)
    assert torch.equal(inside, rotary(x))


def test_tables_survive_casts_copies_and_the_meta_device() -> None:
    expected = RotaryEmbedding(HEAD_SIZE, LENGTH).cosine
    with torch.device("meta"):
        empty = RotaryEmbedding(HEAD_SIZE, LENGTH)
    assert empty.cosine.is_meta
    for rotary in (
        empty.to_empty(device="cpu"),
        RotaryEmbedding(HEAD_SIZE, LENGTH).to(torch.bfloat16).float(),
        copy.deepcopy(empty),
    ):
        assert torch.equal(rotary.cosine, expected)
        assert not rotary.state_dict()


def test_an_odd_head_size_is_refused() -> None:
    with pytest.raises(ValueError, match="head_size must be even, got 5: choose another"):
        RotaryEmbedding(5, LENGTH)


def test_a_base_that_is_not_positive_is_refused() -> None:
    with pytest.raises(ValueError, match="base must be positive, got 0.0: 10000 is usual"):
        RotaryEmbedding(HEAD_SIZE, LENGTH, base=0.0)


def test_more_positions_than_the_table_holds_are_refused() -> None:
    with pytest.raises(ValueError, match="holds 37 positions, got a sequence of 38: shorten"):
        RotaryEmbedding(HEAD_SIZE, LENGTH)(torch.randn(1, 1, LENGTH + 1, HEAD_SIZE))


def test_another_head_size_is_refused() -> None:
    with pytest.raises(ValueError, match="heads of size 10, got 12"):
        RotaryEmbedding(HEAD_SIZE, LENGTH)(torch.randn(1, 1, LENGTH, 12))
