import math
from dataclasses import replace

import pytest

from flash_train.comparison.agreement import Agreement, judge, noise_floor
from flash_train.comparison.growth import growth_exponent
from flash_train.comparison.results import cells
from flash_train.comparison.verdict import conclude
from tests.comparison.made_up import MIB, judged_rows, row

NAIVE = (5.0, 4.0, 3.5)
OUT = {"status": "oom", "memory": None, "speed": None}


def verdict_of(*, loss: float = 0.0, floor: float = 1e-4, gradient: float = 1e-7) -> Agreement:
    curves = {"naive": NAIVE, "naive_reversed": (5.0, 4.0, 3.5 + floor), "flash": (5.0, 4.0 + loss, 3.5)}
    gradients = {37: {"naive": 1e-7, "flash": gradient}}
    (agreement,) = judge(judged_rows(curves), arms=("naive", "flash"), lengths=(37,), gradients=gradients)
    return agreement


def test_arms_agree_up_to_three_times_the_floor_and_twice_the_gradient_error():
    assert verdict_of(loss=2.9e-4, gradient=1.9e-7).agrees is True
    assert verdict_of(loss=3.1e-4, gradient=1.9e-7).agrees is False
    assert verdict_of(loss=2.9e-4, gradient=2.1e-7).agrees is False


def test_the_floor_is_the_larger_of_the_reordering_and_the_repeats():
    rows = judged_rows({"naive": NAIVE, "naive_reversed": (5.0, 4.0, 3.5 + 2e-4)})
    assert noise_floor(rows, 37) == pytest.approx(2e-4)
    noisy = [*rows[:-1], row("naive", 37, repeat=2, measured=False, losses=(5.0, 4.0 + 7e-4, 3.5))]
    assert noise_floor(noisy, 37) == pytest.approx(7e-4)


def test_the_floor_is_never_below_what_the_recorded_losses_can_tell():
    rows = judged_rows({"naive": NAIVE, "naive_reversed": NAIVE})
    assert noise_floor(rows, 37) == math.ulp(5.0) * 2**29  # fp32 has 29 bits fewer than float64


def test_what_is_missing_leaves_the_question_open():
    rows = judged_rows({"naive": NAIVE, "flash": NAIVE})
    (open_floor,) = judge(rows, arms=("flash",), lengths=(37,), gradients={})
    assert open_floor.agrees is None and "no noise floor at T=37" in (open_floor.why or "")
    lost = [row("flash", 37, status="oom")]
    (no_run,) = judge(lost, arms=("flash",), lengths=(37,), gradients={})
    assert no_run.agrees is None and "flash has no valid run at T=37" in (no_run.why or "")


def test_the_verdict_is_one_sentence_with_both_numbers():
    curves = {"naive": NAIVE, "naive_reversed": (5.0, 4.0, 3.5001), "flash": (5.0, 4.0, 3.5002)}
    rows = [
        *judged_rows(curves),
        row("naive", 74, peak=400 * MIB, speed=10),
        row("flash", 74, peak=100 * MIB, speed=24),
        row("naive", 148, status="oom", memory=None, speed=None),
        row("flash", 148, peak=200 * MIB),
    ]
    gradients = {37: {"naive": 1e-7, "flash": 1.3e-7}}
    agreements = judge(rows, arms=("naive", "flash"), lengths=(37,), gradients=gradients)
    verdict = conclude(rows, cells(rows), agreements)
    assert verdict.sentence == (
        "At T=74 flash used 4.0x less memory than naive and ran 2.4x as fast; at T=148 naive ran out of memory where "
        "flash used 200 MiB; the losses agree with naive's within 0.0002 nats at T=37: 2.0 times the noise floor "
        "(3 allowed), with a gradient error 1.30 times naive's (2 allowed)."
    )
    assert verdict.problems == ()


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (
            [("flash", 37)],
            "At T=37 flash used 100 MiB and trained on 1k tokens/s, with no other arm to compare it with.",
        ),
        ([("flash", 37), ("sdpa", 37)], "At T=37 flash used as much memory as sdpa and ran 1.0x as fast."),
        ([("sdpa", 37), ("naive", 37)], "At T=37 sdpa used as much memory as naive and ran 1.0x as fast."),
        (
            [("naive", 37), ("flash", 37, {"speed": 42.0, "peak": 250 * MIB})],
            "At T=37 flash used 2.5x the memory of naive and ran 0.042x as fast.",
        ),
        ([("naive", 37, {"memory": None}), ("flash", 37)], "At T=37 flash ran 1.0x as fast as naive."),
        (
            [("naive", 37), ("flash", 37, OUT)],
            "At T=37 flash ran out of memory where naive used 100 MiB.",
        ),
        ([("naive", 37, OUT), ("flash", 37, OUT)], "At T=37 both naive and flash ran out of memory."),
        ([("naive", 37, OUT)], "naive was measured at no length."),
    ],
)
def test_the_verdict_is_true_of_any_choice_of_arms_and_any_outcome(rows: list[tuple], sentence: str):
    made = [row(arm, length, **(changes[0] if changes else {})) for arm, length, *changes in rows]
    assert conclude(made, cells(made), []).sentence == sentence


def test_the_verdict_gives_the_worst_of_each_number_and_hides_no_disagreement():
    def at(length: int, difference: float, ratio: float, agrees: bool | None, why: str | None = None) -> Agreement:
        return Agreement(
            arm="flash",
            length=length,
            gradient_error=1e-7,
            reference_gradient_error=1e-7,
            loss_difference=difference,
            loss_floor=difference / ratio,
            agrees=agrees,
            why=why,
        )

    made = [row("flash", 37)]
    apart = conclude(made, cells(made), [at(37, 2e-4, 2.5, True), at(74, 5e-4, 0.5, True)]).sentence
    assert "the losses agree with naive's within 0.0005 nats at T=37 and T=74: 2.5 times the noise floor" in apart
    hidden = conclude(made, cells(made), [at(37, 0.4, 9.0, False), at(74, 5e-4, 0.5, None, "no naive")]).sentence
    assert (
        "training does not agree with naive's: the losses at T=37 are up to 0.4 nats apart, 9.0 times the noise floor"
        in hidden
    )
    assert hidden.endswith("; whether the losses agree at T=74 is open (no naive).")


def test_a_loss_that_is_no_number_and_a_floor_of_nothing_never_agree():
    assert verdict_of(loss=math.nan).agrees is False
    exact = replace(verdict_of(), reference_gradient_error=0.0)
    assert exact.gradient_ratio == math.inf


def test_crashes_and_substitutes_are_problems_that_stand_beside_the_verdict():
    rows = [row("naive", 37), row("flash", 37, ran="naive"), row("sdpa", 37, status="failed", error="no kernel")]
    verdict = conclude(rows, cells(rows), [])
    assert verdict.problems == (
        "flash at T=37 invalid: flash was asked for and naive ran",
        "sdpa at T=37 failed: no kernel",
    )
    assert verdict.sentence == "There is no length at which naive and flash were both measured."


def test_the_worst_prediction_is_told_and_each_reason_against_one_once():
    none = {"peak_allocated_bytes": 10, "prediction_refusal": "it asks for values"}
    rows = [row(arm, length, memory=none) for arm in ("naive", "sdpa") for length in (37, 74)]
    refused = row("triton", 37, status="refused", error="it asks for values", memory=none)
    off = row("flash", 37, memory={"peak_allocated_bytes": 100, "predicted_bytes": 93})
    made = [*rows, refused, row("flash", 74), off]
    notes = [note for note in conclude(made, cells(made), []).notes if "predicted" in note]
    assert notes[0].endswith("the furthest off is flash's at T=37, by -7.00 %.")
    assert notes[1:] == ["No peak is predicted for naive and sdpa: it asks for values."]


@pytest.mark.parametrize("exponent", [1.0, 2.0])
def test_the_growth_exponent_sees_through_a_fixed_part(exponent: float):
    lengths = (128, 256, 512)
    peaks = [3e4 + 700 * length**exponent for length in lengths]
    assert growth_exponent(lengths, peaks) == pytest.approx(exponent, abs=0.02)


def test_no_growth_exponent_from_two_lengths_or_a_level_peak():
    assert growth_exponent((128, 256), (1.0, 2.0)) is None
    assert growth_exponent((128, 256, 512), (5.0, 5.0, 5.0)) is None
