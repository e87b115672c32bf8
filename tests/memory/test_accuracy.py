"""The program that holds predictions against measurements: what it runs, how it shares a GPU, when it says no."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flash_train.memory.cards import GIB
from tests.memory import accuracy
from tests.memory.accuracy_output import Outcome, print_report, verdict
from tests.memory.foreign import FOREIGN
from tests.memory.packing import Task, run_packed
from tests.memory.points import ATTENTION, TINY_FOREIGN, Point, points

POINT = Point(factor="length", attention="naive", length=2048)
COMPILED = Point(factor="compile", attention="naive", length=2048, compile=True)


def test_on_a_cpu_the_tiny_points_are_measured_as_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--device", "cpu", "--tiny", "--seed", "3", "--processes", "0", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["accuracy", *arguments])
    assert accuracy.main() == 0
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["seed"] == 3 and [x["status"] for x in found["points"]] == ["measured"] * 5
    assert all(abs(x["error_percent"]) < 0.5 for x in found["points"])
    assert all(x["measured_phases"]["forward"] > 0 for x in found["points"])
    assert "all within bounds: -2 to +2 % eager, -5 to +100 % compiled" in capsys.readouterr().out
    table = (tmp_path / "table.md").read_text()
    assert "|  | naive, GiB | error | sdpa, GiB | error | flash, GiB | error |" in table
    assert len((tmp_path / "results.csv").read_text().splitlines()) == 6


def test_each_kind_of_attention_has_its_lengths_and_its_factors_and_a_seed_its_combinations() -> None:
    chosen = list(points(7))
    for attention in ATTENTION:
        own = [x for x in chosen if x.factor not in ("random", "foreign") and x.attention.startswith(attention)]
        assert sum(x.factor == "length" for x in own) == 6 and len(own) == 6 + 7 * 2
    assert sum(x.factor == "random" for x in chosen) == 20
    assert {x.model for x in chosen if x.factor == "foreign"} == {*FOREIGN} - {TINY_FOREIGN}
    assert list(points(7)) == chosen != list(points(8))
    assert [Point.from_json(x.to_json()) for x in chosen] == chosen and len(set(chosen)) == len(chosen)


@pytest.mark.parametrize(
    ("point", "percent", "right"),
    [(POINT, 1.9, True), (POINT, 2.1, False), (POINT, -2.1, False), (COMPILED, 40, True), (COMPILED, -6, False)],
)
def test_an_error_out_of_bounds_is_told_with_its_phases(
    point: Point, percent: float, right: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    predicted = round(3 * GIB * (1 + percent / 100))
    phases = {"forward": 2 * GIB, "backward": 3 * GIB}
    outcome = Outcome(point, "measured", predicted, 3 * GIB, None, {"backward": predicted, "forward": GIB}, phases)
    assert verdict([outcome], least=GIB) == right and verdict([outcome], least=4 * GIB)
    print_report([outcome], least=GIB)
    assert ("forward 1.00 predicted, 2.00 measured" in capsys.readouterr().out) == (not right)


@pytest.mark.parametrize("status", ["predicted", "out of memory", "failed"])
def test_what_was_not_measured_is_no_success_but_for_a_missing_library(
    status: str, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = Outcome(POINT, status, message="because")
    assert not verdict([outcome], least=GIB)
    assert verdict([replace(outcome, status="not run")], least=GIB)
    print_report([outcome], least=GIB)
    assert f"{status}: {POINT}: because\n    --point '{POINT.to_json()}'" in capsys.readouterr().out


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    outcome = accuracy.predict(Point(factor="foreign", model="transformers_gpt2_sdpa"), "cpu", None)
    assert outcome.status == "not run" and "transformers" in outcome.message


@pytest.mark.parametrize(
    ("script", "status", "message"),
    [
        ("print('Aborted: no luck'); raise SystemExit(3)", "failed", "died, exit code 3: Aborted: no luck"),
        ("""print('{"status": "measured", "message": "", "measured": 7}\\nbye')""", "measured", ""),
    ],
)
def test_what_a_process_has_said_is_its_outcome(script: str, status: str, message: str) -> None:
    (ended,) = run_packed([Task("x", (sys.executable, "-c", script), GIB)], budget=GIB, processes=1, seconds=30)
    found = accuracy.measured_there(Outcome(POINT, "predicted", GIB, message="not its turn"), ended)
    assert (found.status, found.message) == (status, message)
    assert found.measured == (7 if status == "measured" else None)


def test_out_of_memory_is_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(point: Point, device: str, ready: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nmore")

    monkeypatch.setattr(accuracy, "measure", dies)
    found = accuracy.measured_here(Outcome(POINT, "predicted", GIB), "cpu")
    assert (found.status, found.message) == ("out of memory", "CUDA out of memory.")


def test_processes_go_on_as_the_budget_allows_and_what_is_larger_goes_on_alone(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def task(name: str, size: int) -> Task:
        return Task(name, ("sh", "-c", f"read x; echo +{name} >> {log}; sleep 0.4; echo -{name} >> {log}"), size)

    sizes = {"a": 7, "b": 12, "c": 3, "d": 2}
    for ended in run_packed([task(*x) for x in sizes.items()], budget=10, processes=3, seconds=30):
        assert ended.code == 0
    held, most = [], 0
    for line in log.read_text().split():
        held.append(line[1:]) if line[0] == "+" else held.remove(line[1:])
        most = max(most, len(held))
        assert len(held) == 1 or sum(sizes[name] for name in held) <= 10
    assert most == 2


def test_a_process_that_hangs_is_stopped_and_so_are_all_when_nobody_listens(tmp_path: Path) -> None:
    (ended,) = run_packed([Task("x", ("sleep", "60"), 1)], budget=1, processes=1, seconds=0.3)
    assert ended.code is None
    pid = tmp_path / "pid"
    tasks = [Task("short", ("sh", "-c", f"until [ -s {pid} ]; do sleep 0.05; done"), 1),
             Task("long", ("sh", "-c", f"echo $$ > {pid}; exec sleep 60"), 1)]  # fmt: skip
    running = run_packed(tasks, budget=2, processes=2, seconds=30)
    assert next(running).name == "short"
    running.close()
    assert not Path(f"/proc/{pid.read_text().strip()}").exists()
