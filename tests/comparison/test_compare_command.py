"""The whole command on children that only pretend to train, and once on real ones."""

import csv
import json
import logging
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flash_train.commands import compare
from flash_train.commands.claim import alone_in
from flash_train.comparison import children, wandb_report
from tests.comparison.wandb_offline import OfflineRun, read_offline_run

ROOT = Path(__file__).parents[2]
SMALL = ("model=gpt_nano", "lengths=[37,74,148]", "steps=3", "micro_batch_tokens=148", "loggers=none")
Command = Callable[..., int]


@pytest.fixture
def flash_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """Calls the command in `tmp_path`, its output in `tmp_path`/out; the exit code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(children, "TRAIN", "tests.comparison.fake_child")
    monkeypatch.setattr(children, "GRADIENTS", "tests.comparison.fake_child")
    before, handlers = signal.getsignal(signal.SIGTERM), list(logging.root.handlers)

    def call(*overrides: str, **behaviour: str) -> int:
        monkeypatch.setenv("FAKE_CHILD", json.dumps({key.replace("_at_", "@"): how for key, how in behaviour.items()}))
        monkeypatch.setattr(sys, "argv", ["flash-compare", *overrides])
        with pytest.raises(SystemExit) as ending:
            compare.main()
        return int(ending.value.code or 0)

    yield call
    signal.signal(signal.SIGTERM, before)
    for handler in set(logging.root.handlers) - set(handlers):  # Hydra's log file
        logging.root.removeHandler(handler)
        handler.close()


def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())


def offline_runs(folder: Path) -> list[OfflineRun]:
    return [read_offline_run(run) for run in sorted(folder.glob("**/wandb/offline-run-*"))]


def test_one_command_leaves_numbers_charts_and_a_report(flash_compare: Command, tmp_path: Path, capsys: Any):
    assert flash_compare(*SMALL, "output=out", naive_at_148="oom") == 0
    found = results(tmp_path / "out")
    assert [(row["arm"], row["length"], row["status"]) for row in found["rows"][:3]] == [
        ("naive", 37, "ok"),
        ("sdpa", 37, "ok"),
        ("flash", 37, "ok"),
    ]
    statuses = {(row["arm"], row["length"]): row["status"] for row in found["rows"]}
    assert len(found["rows"]) == 9 and statuses[("naive", 148)] == "oom"
    assert [row["arm"] for row in found["floor_rows"]] == ["naive", "naive_reversed"] * 2
    assert found["command"].startswith("flash-compare model=gpt_nano 'lengths=[37,74,148]'")
    assert found["commit"] == "abc" and found["versions"]["torch"] == "2.13.0"
    assert [one["agrees"] for one in found["verdict"]["agreement"]] == [True] * 4
    assert len(list(csv.DictReader((tmp_path / "out" / "results.csv").read_text().splitlines()))) == 13
    for name in ("memory", "filling", "speed", "loss"):
        assert (tmp_path / "out" / f"{name}.png").stat().st_size > 10_000 and (
            tmp_path / "out" / f"{name}.svg"
        ).exists()
    printed = capsys.readouterr().out
    assert "OOM" in printed and found["verdict"]["sentence"] in printed
    assert "naive ran out of memory where flash used" in found["verdict"]["sentence"]
    assert "Peaks on the CPU are of the tensors alive in one step" in found["verdict"]["notes"][-3]
    assert "Each micro-batch held 148 tokens" in found["verdict"]["notes"][-2]
    assert found["verdict"]["notes"][-1].startswith("Peaks were predicted before the first step, as of an eager one; ")
    assert "What fills the peak at T=148" in printed and "Most of flash's peak at T=148 is score matrices" in printed
    for shown in (printed, (tmp_path / "out" / "report.html").read_text()):
        assert "predicted" in shown and "+1.00 %" in shown
    for row in (found["rows"][0], next(csv.DictReader((tmp_path / "out" / "results.csv").read_text().splitlines()))):
        assert float(row["prediction_error_percent"]) == 1.0 and int(row["predicted_peak_bytes"]) > 0


def test_children_share_everything_but_the_arm(flash_compare: Command, tmp_path: Path):
    flash_compare(*SMALL, "output=out", "lengths=[74]", "model.width=48", "schedule.warmup_steps=90")
    commands = {
        folder.name: json.loads((folder / "command.json").read_text())["command"]
        for folder in (tmp_path / "out" / "runs").iterdir()
    }
    naive, flash = ([part for part in commands[f"{arm}_T74_1"] if "run.dir" not in part] for arm in ("naive", "flash"))
    assert set(naive) ^ set(flash) == {"attention=naive", "attention=flash"}
    for part in ("model.width=48", "data.sequence_length=74", "data.batch_size=2", "trainer.max_steps=3"):
        assert part in flash
    assert "trainer.log_every_n_steps=1" in flash  # three steps would leave no curve at the recipe's interval
    assert flash.index("schedule.warmup_steps=1") > flash.index("schedule.warmup_steps=90")
    assert "lengths=[74]" not in flash and "lengths=[74]" in commands["gradients"]
    assert "callbacks.memory.predict=false" in commands["naive_reversed_T74_1"]  # a peak is predicted once
    assert "callbacks.memory.predict=false" not in flash


def test_an_arm_that_crashes_is_reported_and_the_others_go_on(flash_compare: Command, tmp_path: Path, capsys: Any):
    assert flash_compare(*SMALL, "output=out", sdpa="crash", flash_at_74="fallback") == 1
    problems = results(tmp_path / "out")["verdict"]["problems"]
    assert problems[0].startswith("sdpa at T=37 failed: ended with exit code 1 and no result: RuntimeError")
    assert "flash at T=74 invalid: flash was asked for and naive ran" in problems
    assert "the moon was full" in capsys.readouterr().out
    statuses = [row["status"] for row in results(tmp_path / "out")["rows"] if row["arm"] == "flash"]
    assert statuses == ["ok", "invalid", "ok"]


def test_an_arm_that_is_refused_is_tried_once_and_the_others_are_judged(
    flash_compare: Command, tmp_path: Path, capsys: Any
):
    assert flash_compare(*SMALL, "output=out", sdpa="refused") == 0
    found = results(tmp_path / "out")
    reason = "sdpa was refused and is left out: 'sdpa' does not take a window; use 'flash'."
    assert found["verdict"]["refusals"] == [reason] and found["verdict"]["problems"] == []
    assert [row["status"] for row in found["rows"] if row["arm"] == "sdpa"] == ["refused"] * 3
    assert len(list(tmp_path.glob("out/runs/sdpa_*"))) == 1
    assert [(one["arm"], one["agrees"]) for one in found["verdict"]["agreement"]] == [("flash", True)] * 2
    assert "the losses agree with naive's" in found["verdict"]["sentence"]
    printed = capsys.readouterr().out
    assert reason in printed and "sdpa at T=74: refused, as before" in printed
    assert "sdpa was refused and is left out" in (tmp_path / "out" / "report.html").read_text()
    assert flash_compare(*SMALL, "output=out", "arms=[sdpa]", "lengths=[37]", sdpa="refused") == 1
    assert results(tmp_path / "out")["verdict"]["problems"] == [
        "No arm takes what was asked of it, and nothing was measured."
    ]


def test_a_gradient_check_that_crashes_is_a_problem_and_leaves_the_agreement_open(
    flash_compare: Command, tmp_path: Path
):
    assert flash_compare(*SMALL, "output=out", "lengths=[37]", gradients="crash") == 1
    verdict = results(tmp_path / "out")["verdict"]
    assert verdict["problems"] == [
        "gradients against float64 failed: ended with exit code 1 and no result: RuntimeError: no float64 here"
    ]
    assert "whether the losses agree at T=37 is open (no gradient check at T=37)" in verdict["sentence"]


def test_what_fails_alike_for_two_arms_is_not_tried_again(flash_compare: Command, tmp_path: Path):
    assert flash_compare(*SMALL, "output=out", naive="crash", sdpa="crash", flash="crash", naive_reversed="crash") == 1
    assert [(row["arm"], row["length"]) for row in results(tmp_path / "out")["rows"]] == [("naive", 37), ("sdpa", 37)]


def test_different_initial_weights_are_called_an_invalid_comparison(flash_compare: Command, tmp_path: Path):
    assert flash_compare(*SMALL, "output=out", flash_at_37="other weights") == 1
    verdict = results(tmp_path / "out")["verdict"]
    assert verdict["valid"] is False and "did not have the same initial weights" in verdict["sentence"]


def test_a_second_call_goes_on_where_the_first_ended(flash_compare: Command, tmp_path: Path, capsys: Any):
    flash_compare(*SMALL, "output=out", flash_at_148="crash")
    started = {path.parent.name: path.stat().st_mtime_ns for path in tmp_path.glob("out/runs/*/started")}
    capsys.readouterr()
    assert flash_compare(*SMALL, "output=out") == 0
    again = {path.parent.name: path.stat().st_mtime_ns for path in tmp_path.glob("out/runs/*/started")}
    assert {name for name in again if again[name] != started[name]} == {"flash_T148_1"}
    assert capsys.readouterr().out.count("(ran before)") == 13


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("arms=[naive,nave]",), "got 'nave'"),
        (("lengths=[64,-1]",), "lengths must be made of positive integers, got -1"),
        (("lengths=[64,64]",), "got 64 twice"),
        (("judged_lengths=[65]",), "judged_lengths must be a list of some of the lengths"),
        (("micro_batch_tokens=100",), "micro_batch_tokens must be a multiple of every length"),
        (("batch_tokens=100",), "batch_tokens must be a multiple of the micro-batch at every length"),
        (("attention=naive",), "a comparison sets attention itself"),
        (("stepz=3",), "did you mean steps"),
        (("output=/proc/nowhere",), "/proc/nowhere"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    flash_compare: Command, capsys: Any, overrides: tuple[str, ...], message: str
):
    assert flash_compare("model=gpt_nano", "loggers=none", *overrides) == 2
    said = capsys.readouterr().err
    assert message in said and len(said.strip().splitlines()) == 1


def test_a_disk_that_cannot_be_written_is_one_sentence_and_the_way_on(
    flash_compare: Command, tmp_path: Path, capsys: Any
):
    (tmp_path / "so-so, [my] out").mkdir()
    (tmp_path / "so-so, [my] out" / "results.json").mkdir()
    assert flash_compare(*SMALL, "lengths=[37]", "output='so-so, [my] out'") == 2
    said = capsys.readouterr().err.strip()
    assert "cannot write" in said and "results.json: Is a directory; what has finished is kept" in said
    again = shlex.split(said.partition("this goes on: ")[2])
    (tmp_path / "so-so, [my] out" / "results.json").rmdir()
    assert flash_compare(*again[1:]) == 0
    assert capsys.readouterr().out.count("(ran before)") == 6


def test_a_second_comparison_in_the_same_folder_is_refused(flash_compare: Command, tmp_path: Path, capsys: Any):
    (tmp_path / "out").mkdir()
    with alone_in(tmp_path / "out", what="comparison", key="output"):
        assert flash_compare(*SMALL, "output=out") == 2
    assert "another comparison is at work in" in capsys.readouterr().err
    assert flash_compare(*SMALL, "lengths=[37]", "output=out") == 0


def test_wandb_gets_one_run_that_holds_the_comparison(flash_compare: Command, tmp_path: Path):
    assert flash_compare(*SMALL[:-1], "loggers=wandb", "output=out", naive_at_148="oom") == 0
    (run,) = offline_runs(tmp_path / "out")
    assert run.job_type == "comparison" and run.group.startswith("out-")
    assert run.patterns == []
    assert run.metrics["comparison/flash/peak_allocated_gib"] == "comparison/sequence_length"
    curve = [
        (line["comparison/sequence_length"], line.get("comparison/naive/out_of_memory")) for line in run.history[:3]
    ]
    assert curve == [(37, 0), (74, 0), (148, 1)]
    assert [line["comparison/flash/prediction_error_percent"] for line in run.history[:3]] == pytest.approx(
        [1] * 3, abs=0.01
    )
    assert run.metrics["comparison/naive/predicted_peak_gib"] == "comparison/sequence_length"
    assert run.summary["comparison/table.nrows"] == 9
    charts = {key.rpartition(".")[2] for key in run.config if key.startswith("_wandb.visualize.")}
    assert charts == {"comparison/peak_memory", "comparison/speed"}
    for file in ("results.json", "results.csv", "report.html", "memory.png", "memory.svg", "filling.png"):
        assert file in run.files


def test_children_in_wandb_are_grouped_with_the_comparison_and_the_floor_is_not(flash_compare: Command, tmp_path: Path):
    flash_compare(*SMALL[:-1], "loggers=wandb", "output=out", "lengths=[37]")
    (run,) = offline_runs(tmp_path / "out")

    def command(name: str) -> list[str]:
        return json.loads((tmp_path / "out" / "runs" / name / "command.json").read_text())["command"]

    assert {f"loggers.wandb.group='{run.group}'", "loggers.wandb.job_type=flash"} < set(command("flash_T37_1"))
    assert "loggers.wandb=null" in command("naive_reversed_T37_1")


@pytest.mark.parametrize("broken", ["why_unusable", "log_comparison"])
def test_without_wandb_nothing_is_lost(
    flash_compare: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, broken: str
):
    def fail(*_: Any) -> None:
        raise OSError("no disk")

    monkeypatch.setattr(wandb_report, broken, fail if broken == "log_comparison" else lambda: "ImportError: no wandb")
    assert flash_compare(*SMALL[:-1], "loggers=wandb", "output=out", "lengths=[37]") == 0
    assert (tmp_path / "out" / "report.html").exists() and len(results(tmp_path / "out")["rows"]) == 3
    assert "wandb" in capsys.readouterr().out


def test_a_run_without_the_wandb_logger_does_not_need_wandb():
    broken = "import sys; sys.modules['wandb'] = None; import flash_train.commands.run as run; run.judge(OSError())"
    assert subprocess.run((sys.executable, "-c", broken), cwd=ROOT).returncode == 0


def test_real_children_train_the_same_model_and_are_judged_without_an_arm_that_does_not_take_it(
    flash_compare: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    given = ("model=gpt_nano", "arms=[naive,sdpa,flash]", "lengths=[128]", "data.batch_size=3", "steps=8")
    given = (*given, "model.window=[29,null]", "model.sinks=true", "data.separate_documents=true")
    monkeypatch.setattr(sys, "argv", ["flash-compare", *given, "output=out"])
    with pytest.raises(SystemExit) as ending:
        compare.main()
    found = results(tmp_path / "out")
    assert ending.value.code == 0, found["verdict"]["problems"]
    naive, sdpa, flash = found["rows"]
    assert (sdpa["status"], sdpa["error"]) == (
        "refused",
        "implementation='sdpa' does not take a window; use 'flash' or 'naive'",
    )
    assert (naive["ran"], flash["ran"], flash["device"]) == ("naive", "tiled", "cpu")
    assert flash["peak_allocated_bytes"] < naive["peak_allocated_bytes"]
    for row in (naive, flash):
        assert row["tokens_per_second"] > 0 and len(row["loss_curve"]) == 8
        for phase in ("forward", "backward", "optimizer", "validation"):
            assert 0 < row[f"{phase}_peak_allocated_bytes"] <= row["peak_allocated_bytes"]
    (judged,) = found["verdict"]["agreement"]
    assert judged["arm"] == "flash"
    assert judged["agrees"] is not None and judged["gradient_ratio"] < 2 and 0 < judged["loss_floor"] < 1e-4
    assert judged["loss_difference"] < 1e-4
    runs = offline_runs(tmp_path / "out")
    assert sorted(run.job_type for run in runs) == ["comparison", "flash", "naive", "sdpa"]
    assert len({run.group for run in runs}) == 1
    assert found["data"] and found["environment"]["torch"]
    assert max(abs(row["prediction_error_percent"]) for row in (naive, flash)) < 1


def test_every_lever_is_every_arm_s_and_each_run_predicts_its_own_peak(
    flash_compare: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    given = ("model=gpt_nano", "arms=[naive,sdpa,flash]", "lengths=[128]", "steps=4", "loggers=none")
    levers = ("precision=bf16_mixed", "precision.residual=bf16", "checkpointing=selective", "vocabulary_multiple=100",
              "loss=chunked", "loss.chunk_rows=100", "loss.z_loss=1e-4", "optimizer=muon", "schedule=wsd")  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["flash-compare", *given, *levers, "judged_lengths=[]", "output=out"])
    with pytest.raises(SystemExit):
        compare.main()
    found = results(tmp_path / "out")
    assert {row["arm"] for row in found["rows"] if row["status"] == "ok"} == {"naive", "sdpa", "flash"}
    for row in found["rows"]:
        # oneDNN's products of bf16 matrices take some memory for themselves, of so small a model 2 %.
        assert abs(row["prediction_error_percent"]) < 3, row["arm"]
    said = (
        "bf16-mixed, bf16 residual, checkpointing of each block, attention's results kept, loss in chunks of 100 rows"
    )
    assert f"{said}, z-loss 0.0001, vocabulary padded to a multiple of 100" in found["setting"]
