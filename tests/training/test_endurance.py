"""A run that is cut into parts is held to one that is not."""

import json
import subprocess
import sys
from math import cos, pi
from pathlib import Path
from typing import Any

import pytest

from tests.training.endurance import CUT, ENDED, REPOSITORY, by_fifths, problems

CONFIG: dict[str, Any] = {
    "schedule": {"warmup_steps": 2, "floor": 0.1}, "trainer": {"max_steps": 10}, "optimizer": {"lr": 1.0},
    "batch_tokens": 8,
}  # fmt: skip
FIRST: dict[str, Any] = {"steps": 2, "loss_curve": [[0, 5.0], [1, 4.0]]}
SECOND: dict[str, Any] = {"steps": 4, "loss_curve": [[0, 5.0], [1, 4.0], [2, 3.0], [3, 2.0]]}


def test_parts_of_a_run_go_on_as_if_nobody_had_cut_it(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "tests.training.endurance", "--tiny", "--device", "cpu", "--parts", "2", "--minutes",
        "0.25", "--steps", "100000", "--out", str(tmp_path / "out"),
    ]  # fmt: skip
    answer = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    first, second = found["parts"]
    assert first["code"] == second["code"] == CUT and 0 < first["steps"] < second["steps"] == len(found["loss_curve"])
    assert found["sizes"]["train"]["documents"] > 50 and "tokens/s by fifths" in answer.stdout


ROW = {"step": 3.0, "train/learning_rate": 0.1 + 0.45 * (1 + cos(pi / 8)), "train/tokens": 32.0}


def test_a_run_that_goes_on_as_it_should_has_no_problem() -> None:
    assert list(problems(CUT, SECOND, FIRST, [ROW], CONFIG)) == list(problems(ENDED, FIRST, None, [], CONFIG)) == []


@pytest.mark.parametrize(
    ("code", "curve", "row", "says"),
    [
        (1, [], {}, "exit code 1: no"),
        (CUT, [], {}, "before its first step"),
        (CUT, FIRST["loss_curve"], {}, "took no step"),
        (CUT, [[0, 5.0], [1, 4.1], [2, 3.0]], {}, "not those that they had"),
        (CUT, [[0, 5.0], [1, 4.0], [3, 2.0]], {}, "each step, once"),
        (CUT, SECOND["loss_curve"], {"train/learning_rate": 0.9}, "step 3 has the learning rate 9.000e-01, and 9.657e"),
        (CUT, SECOND["loss_curve"], {"train/tokens": 24.0}, "step 3 counts 24 tokens for 32"),
    ],
)
def test_what_differs_from_a_run_that_was_not_cut_is_found(
    code: int, curve: list[list[float]], row: dict[str, float], says: str
) -> None:
    result = {"steps": len(curve), "loss_curve": curve, "error": "no"}
    (found,) = problems(code, result, FIRST, [ROW | row], CONFIG)
    assert says in found


def test_medians_of_fifths_are_of_all_where_there_are_few() -> None:
    assert by_fifths(list(range(10))) == [0.5, 2.5, 4.5, 6.5, 8.5] and by_fifths([3.0, 1.0]) == [2.0]
