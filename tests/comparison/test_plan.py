import pytest

from flash_train.comparison.plan import check_arms, check_batch_tokens, check_lengths, plan_runs, rows_per_micro_batch
from flash_train.comparison.settings import passed_on

KNOWN = ("flash", "naive", "sdpa")


def test_every_second_round_visits_the_arms_backwards():
    runs = plan_runs(("naive", "flash"), (64, 32), repeats=2, judged=())
    assert [run.name for run in runs[:4]] == ["naive_T32_1", "flash_T32_1", "flash_T32_2", "naive_T32_2"]
    assert [run.length for run in runs] == [32] * 4 + [64] * 4


def test_the_noise_floor_adds_only_the_runs_that_are_missing():
    def floor(arms: tuple[str, ...], repeats: int) -> list[str]:
        runs = plan_runs(arms, (32, 64), repeats=repeats, judged=(32,))
        return [run.name for run in runs if not run.measured]

    assert floor(("naive", "flash"), 1) == ["naive_T32_2", "naive_reversed_T32_1"]
    assert floor(("naive", "flash"), 2) == ["naive_reversed_T32_1"]
    assert floor(("flash",), 1) == ["naive_T32_1", "naive_T32_2", "naive_reversed_T32_1"]


@pytest.mark.parametrize(
    ("arms", "message"),
    [
        (["naive", "nave"], "got 'nave'; known are flash, naive, sdpa"),
        (["naive", "naive"], "got 'naive' twice"),
        ([], r"must be a list of implementations, got \[\]"),
        ("flash", "must be a list of implementations, got 'flash'"),
    ],
)
def test_arms_that_make_no_comparison_are_refused(arms: list[str], message: str):
    with pytest.raises(ValueError, match=message):
        check_arms(arms, KNOWN)


@pytest.mark.parametrize("lengths", [[0], [-4], [2.5], ["x"], [True], [8, 8], 8])
def test_lengths_that_are_no_lengths_are_refused(lengths: list[int]):
    with pytest.raises(ValueError, match="lengths must"):
        check_lengths(lengths)


def test_a_micro_batch_of_so_many_tokens_has_fewer_rows_at_longer_lengths():
    rows = [rows_per_micro_batch(length, batch_size=5, micro_batch_tokens=96) for length in (16, 32, 96)]
    assert rows == [6, 3, 1]
    assert rows_per_micro_batch(96, batch_size=5, micro_batch_tokens=None) == 5
    with pytest.raises(ValueError, match="got 96 for T=36; 72 would do"):
        rows_per_micro_batch(36, batch_size=5, micro_batch_tokens=96)


def test_a_global_batch_that_a_length_does_not_divide_is_refused():
    check_batch_tokens(192, rows=3, length=32, devices=2)
    with pytest.raises(ValueError, match="got 192 for 144 tokens"):
        check_batch_tokens(192, rows=3, length=48, devices=1)


def test_children_get_the_users_overrides_without_those_of_the_comparison():
    given = ["recipes=demo", "arms=[naive]", "lengths=[8]", "model.depth=3", "+trainer.profiler=simple", "output=x"]
    assert passed_on(given) == ["recipes=demo", "model.depth=3", "+trainer.profiler=simple"]


@pytest.mark.parametrize(
    "override", ["attention=naive", "data.sequence_length=8", "trainer.max_steps=3", "validate_every=2"]
)
def test_what_a_comparison_varies_itself_cannot_be_given(override: str):
    with pytest.raises(ValueError, match="a comparison sets"):
        passed_on([override])
