import csv
import json
from pathlib import Path

import pytest

from flash_train.comparison.results import cells, unequal_starts, write_csv, write_json
from tests.comparison.made_up import MIB, row


@pytest.mark.parametrize(
    ("arm", "device", "ran", "valid"),
    [
        ("flash", "cpu", "tiled", True),
        ("flash", "cuda:0", "triton", True),
        ("flash", "cuda:0", "tiled", False),
        ("flash", "cuda:0", "naive", False),
        ("flash", "cpu", "sdpa_flash", False),
        ("sdpa", "cuda:0", "sdpa_flash", True),
        ("sdpa", "cuda:0", "sdpa_math", False),
        ("naive", "cpu", "naive", True),
        ("naive", "cpu", "sdpa_flash", False),
    ],
)
def test_an_arm_that_ran_as_another_method_is_invalid(arm: str, device: str, ran: str, valid: bool):
    judged = row(arm, 37, device=device, ran=ran)
    assert judged.status == ("ok" if valid else "invalid")
    assert valid or judged.error == f"{arm} was asked for and {ran} ran"


def test_an_arm_that_the_compiler_rewrote_is_invalid():
    judged = row("naive", 37, rewritten_by_compiler=2)
    assert judged.status == "invalid" and "rewrote the attention into SDPA in 2 places" in (judged.error or "")


def test_runs_that_did_not_start_alike_make_the_comparison_invalid():
    fair = [row("naive", 37), row("flash", 37), row("naive", 41, initial_weights_sha256="longer table")]
    assert unequal_starts(fair) == []
    other_weights = [row("naive", 37), row("flash", 37, initial_weights_sha256="other")]
    assert unequal_starts(other_weights) == [
        "The comparison is invalid: at T=37, naive at T=37 and flash at T=37 did not have the same initial weights."
    ]
    other_data = [row("naive", 37), row("flash", 37, data={"source": "elsewhere"})]
    assert "did not have the same data" in unequal_starts(other_data)[0]


def test_repeats_become_one_cell_with_the_largest_peak_and_the_median_speed():
    runs = [row("flash", 37, repeat=i + 1, speed=s, peak=p * MIB) for i, (s, p) in enumerate([(5, 3), (9, 4), (6, 3)])]
    (cell,) = cells([*runs, row("naive_reversed", 37, measured=False)])
    assert (cell.tokens_per_second, cell.slowest, cell.fastest) == (6, 5, 9)
    assert cell.peak_allocated_bytes == 4 * MIB


def test_the_error_of_a_prediction_is_that_of_the_largest_training_peak_and_validation_is_none():
    runs = [row("naive", 37, repeat=1, peak=100 * MIB), row("naive", 37, repeat=2, peak=104 * MIB)]
    (cell,) = cells(runs)
    assert cell.predicted_peak_bytes == 101 * MIB and cell.prediction_error_percent == pytest.approx(-100 * 3 / 104)
    phases = {"forward": 40 * MIB, "backward": 50 * MIB, "optimizer": 30 * MIB, "validation": 90 * MIB}
    memory = {"peak_allocated_bytes": 90 * MIB, "predicted_bytes": 51 * MIB, "phases": phases}
    (cell,) = cells([row("naive", 37, memory=memory)])
    assert cell.peak_allocated_bytes == 90 * MIB and cell.prediction_error_percent == pytest.approx(2.0)
    (cell,) = cells([row("naive", 37, status="oom", memory={"predicted_bytes": 51 * MIB})])
    assert cell.predicted_peak_bytes == 51 * MIB and cell.prediction_error_percent is None


def test_one_repeat_that_ran_out_of_memory_decides_for_the_cell():
    (cell,) = cells([row("naive", 37), row("naive", 37, repeat=2, status="oom")])
    assert cell.status == "oom" and cell.peak_allocated_bytes is None


def test_results_json_holds_null_where_a_number_is_not_finite(tmp_path: Path):
    write_json(tmp_path / "results.json", {"loss": float("nan"), "curve": ((1, float("inf")),), "bytes": 41})
    assert json.loads((tmp_path / "results.json").read_text()) == {"loss": None, "curve": [[1, None]], "bytes": 41}


def test_results_csv_has_one_line_per_row(tmp_path: Path):
    write_csv(tmp_path / "results.csv", [row("naive", 37), row("flash", 37, status="oom", memory=None)])
    lines = list(csv.DictReader((tmp_path / "results.csv").read_text().splitlines()))
    assert [(line["arm"], line["status"], line["last_loss"]) for line in lines] == [
        ("naive", "ok", "3.5"),
        ("flash", "oom", "3.5"),
    ]
    assert lines[0]["backward_peak_allocated_bytes"] == str(100 * MIB) and lines[1]["peak_allocated_bytes"] == ""
