"""The search asks little, and its answer is right."""

import math

import pytest

from flash_train.memory.curve import Curve

CURVES = {
    "linear": lambda x: 2 * 10**9 + 330_000 * x,
    "quadratic": lambda x: 2 * 10**9 + 330_000 * x + 700 * x**2,
    "two pieces": lambda x: max(9 * 10**9 + 100_000 * x, 2 * 10**9 + 330_000 * x + 70 * x**2),
    "three pieces": lambda x: max(9 * 10**9, 8 * 10**9 + 900_000 * x, 10**9 + 1000 * x**2),
    "rounded": lambda x: -(-(2 * 10**9 + 331_777 * x + 700 * x**2) // 2**21) * 2**21,
    "flat": lambda x: 5,
    "steep": lambda x: 10**9 * x,
}


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("budget", [10**9, 9 * 10**9, 24 * 2**30, 140 * 2**30])
@pytest.mark.parametrize("step", [1, 64])
def test_the_answer_fits_and_the_next_does_not_and_both_were_asked(name: str, budget: int, step: int) -> None:
    evaluate, limit = CURVES[name], 2**24
    curve = Curve(evaluate)
    found = curve.largest(budget, step=step, first=1024, limit=limit)
    if found is None:
        assert curve.points[step] > budget
    else:
        assert curve.points[found] <= budget and found % step == 0
        assert found == limit or curve.points[found + step] > budget
    assert all(size == evaluate(at) for at, size in curve.points.items())


@pytest.mark.parametrize("budget", [9 * 10**9, 24 * 2**30])
def test_what_counts_beside_the_curve_decides_and_costs_few_questions_more(budget: int) -> None:
    counted: dict[int, int] = {}

    def count(size: int) -> int:
        """From 2 to 8 % more, and not in order."""
        counted[size] = round(CURVES["quadratic"](size) * (1.02 + 0.06 * (size // 64 * 37 % 10) / 10))
        return counted[size]

    curve = Curve(CURVES["quadratic"], count=count)
    found = curve.largest(budget, step=64, first=1024, limit=2**24)
    assert found is not None and counted[found] <= budget < counted[found + 64]
    assert len(curve.points) == len(counted) <= 7
    assert all(size == CURVES["quadratic"](at) for at, size in curve.points.items())


@pytest.mark.parametrize("segment", [20 * 2**20, 200 * 2**20, 1000 * 2**20])
@pytest.mark.parametrize("each", [90_000, 330_000, 770_000])
@pytest.mark.parametrize("budget", [8 * 2**30, 24 * 2**30])
def test_what_counts_in_steps_that_are_wide_is_found_by_halving(segment: int, each: int, budget: int) -> None:
    curve = Curve(lambda x: 10**9 + each * x, count=lambda x: -(-round(1.2 * curve(x)) // segment) * segment)
    found = curve.largest(budget, step=1, first=1, limit=2**14)
    assert found is not None and len(curve.points) <= 24


@pytest.mark.parametrize("name", ["linear", "quadratic", "two pieces", "rounded"])
def test_it_asks_at_most_six_times(name: str) -> None:
    curve = Curve(CURVES[name])
    curve.largest(24 * 2**30, step=64, first=1024, limit=2**24)
    assert len(curve.points) <= 6


def test_an_estimate_is_exact_on_a_polynomial_and_says_so_elsewhere() -> None:
    curve = Curve(CURVES["quadratic"])
    with pytest.raises(ValueError, match="needs a point"):
        curve.estimate(7)
    for size in (1000, 2000, 5000):
        curve(size)
    assert math.isclose(curve.estimate(3333), CURVES["quadratic"](3333))
    assert 3333 not in curve.points


@pytest.mark.parametrize("size", [512, 4096, 8192, 16384])
def test_after_a_search_which_asks_neighbours_rounding_does_not_spoil_an_estimate(size: int) -> None:
    def evaluate(x: int) -> int:
        return 2**20 * round((2 * 10**9 + 900_000 * x) / 2**20 + x % 7)

    curve = Curve(evaluate)
    curve.largest(24 * 2**30, step=64, first=1024, limit=2**24)
    assert size not in curve.points and curve.estimate(size) == pytest.approx(evaluate(size), rel=0.005)
