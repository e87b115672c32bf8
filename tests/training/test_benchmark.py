"""The program that times our training steps beside others'."""

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.training import benchmark, benchmark_report, peers, turns
from tests.training.benchmark_report import (
    BURST,
    REQUIRED,
    SUSTAINED,
    Outcome,
    Row,
    Turn,
    lines,
    remarks,
    summarise,
    verdict,
)

CURVE = [[0, 5.0], [1, 4.0]]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("the cat sat on the mat and the dog did not.\n" * 1000)
    return file


@pytest.fixture
def run_here(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, dict[str, Any]]]:
    """The program in this process, with a tiny model: its exit code, and results.json."""

    def run(*arguments: str, device: str = "cpu") -> tuple[int, dict[str, Any]]:
        out = tmp_path / "out"
        fixed = ["--device", device, "--tiny", "--lengths", "64", "--text", str(text), "--out", str(out)]
        monkeypatch.setattr(sys, "argv", ["benchmark", *fixed, *arguments])
        code = benchmark.main()
        return code, json.loads((out / "results.json").read_text())

    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return run


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_ours_and_nanogpt_take_turns_at_the_same_steps_from_the_same_weights(device: str, run_here: Any) -> None:
    code, found = run_here(
        "--arms", "ours", "nanogpt", "--also", "noisy=gradient_clip=null,optimizer.betas=[0.9,0.99]", "--rounds", "2",
        "--steps", "6", "--burst-steps", "3", "--pause", "0.1", device=device,
    )  # fmt: skip
    ours, nanogpt, _ = found["runs"]
    assert code == 0 and [run["status"] for run in found["runs"]] == ["measured"] * 3, found["rows"]
    took = [(turn["began"], turn["ended"], run["arm"], turn) for run in found["runs"] for turn in run["turns"]]
    took.sort(key=lambda each: each[0])
    assert all(ended <= began for (_, ended, *_), (began, *_) in zip(took, took[1:], strict=False))
    arms = ["ours", "nanogpt", "noisy"]
    assert [arm for *_, arm, _ in took] == [*arms, *reversed(arms), *arms]
    assert [(turn["regime"], turn["round"]) for turn in ours["turns"]] == [(SUSTAINED, 0), (SUSTAINED, 1), (BURST, 0)]
    for began, ended, _, turn in took:
        assert len(turn["step_ms"]) == (3 if turn["regime"] == BURST else 6)
        assert 0 < min(turn["step_ms"]) and sum(turn["step_ms"]) < 1e3 * (ended - began)
        assert (turn["peak_bytes"] or 0) > 0 if device == "cuda" else turn["peak_bytes"] is None
    pauses = [began - ended for (_, ended, *_), (began, *_) in zip(took[5:], took[6:], strict=False)]
    assert min(pauses) >= 0.1
    curves = [[loss for _, loss in run["loss_curve"]] for run in (ours, nanogpt)]
    assert len(curves[0]) == turns.steps_of([6, 6, 3]) and curves[0] == pytest.approx(curves[1], abs=2e-3)
    assert curves[0][0] == pytest.approx(torch.tensor(320.0).log().item(), abs=0.1) and curves[0][-1] < curves[0][0]
    assert 0 < ours["speed"]["tokens_per_second"]


def test_the_first_steps_of_a_turn_are_neither_timed_nor_the_speed_monitors() -> None:
    here, theirs = Pipe()
    clock = turns.StepClock([3, 2], os.dup(theirs.fileno()))
    for _ in range(3):
        here.send(None)
    clock.begin(torch.device("cpu"))
    left_out = []
    for step in range(turns.steps_of([3, 2])):
        left_out += [step] if clock.disturbs_timing(step) else []
        clock.step_ends()
    assert left_out == [8, 9, 13, 14]
    assert [len(here.recv().get("step_ms", ())) for _ in range(3)] == [0, 3, 2] and not here.poll()


def test_transformers_begins_with_nanogpts_logits(text: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run = peers.Run(
        "nanogpt", 64, turns=[4], text=str(text), folder=str(tmp_path), cache=str(tmp_path), device="cpu",
        **benchmark.TINY,
    )  # fmt: skip
    tokens = torch.arange(64)[None]
    ours, theirs = (peers.build(replace(run, arm=arm))[1](tokens, tokens)[0] for arm in ("nanogpt", "transformers"))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


TURN = {"step_ms": [5.0, 6.0, 7.0], "began": 0.0, "ended": 0.1, "peak_bytes": 2**30, "joules_per_step": 40.0}
TAKES_TURNS = f"""
from multiprocessing.connection import Connection
channel, turn = Connection(CHANNEL), {TURN}
def take(turns):
    channel.send({{"first_step_seconds": 1.0, "environment": {{"device_name": "NVIDIA H200"}}}})
    for _ in range(turns):
        channel.recv()
        channel.send(turn)
    channel.recv()
def end():
    import json, os
    os.mkdir(FOLDER)
    json.dump({{"status": "ok", "loss_curve": {CURVE}}}, open(FOLDER + "/result.json", "w"))
"""
"""An arm that computes nothing."""


def test_an_arm_that_dies_or_hangs_is_listed_with_its_error_and_the_others_go_on(
    run_here: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hangs = "import time; print('waiting', flush=True); time.sleep(60)"
    does = {
        "ours": "print('so it begins'); raise SystemExit('no such kernel')",
        "ours_bf16": f"take(1); {hangs}",
        "ours_memory": "take(1); raise SystemExit('out of memory')",
        "ours_sdpa": hangs,
        "ours_cudnn": "take(2)",
        "nanogpt": "take(2); end()",
    }

    def command(run: peers.Run, channel: int) -> list[str]:
        given = f"FOLDER, CHANNEL = {run.folder!r}, {channel}\n"
        return [sys.executable, "-c", given + TAKES_TURNS + does[run.arm]]

    monkeypatch.setattr(benchmark, "command", command)
    code, found = run_here("--arms", *does, "--rounds", "2", "--burst-rounds", "0", "--timeout", "4")
    assert code == 1
    assert [(run["arm"], run["message"], len(run["turns"])) for run in found["runs"]] == [
        ("ours", "exit code 1: no such kernel", 0),
        ("ours_bf16", "stopped after 4 s: waiting", 1),
        ("ours_memory", "exit code 1: out of memory", 1),
        ("ours_sdpa", "stopped after 4 s: waiting", 0),
        ("ours_cudnn", "exit code 0: it said nothing", 2),
        ("nanogpt", "", 2),
    ]
    row = found["rows"][-1]
    assert (row["arm"], row["step_ms"], row["peak_bytes"], row["tokens_per_second"]) == ("nanogpt", 6, 2**30, 256e3 / 6)
    assert row["joules_per_step"] == 40 and row["last_loss"] == 4
    assert "ours at T=64: failed: exit code 1: no such kernel" in capsys.readouterr().out


def test_arms_that_hold_still_end_with_the_benchmark(tmp_path: Path) -> None:
    def command(channel: int) -> list[str]:
        return [sys.executable, "-c", f"CHANNEL = {channel}{TAKES_TURNS}take(1)"]

    with turns.Arm(command, tmp_path / "run", {}, timeout=10) as arm:
        assert arm.ready() is not None
        arm._channel.close()  # as the end of this process would
        assert arm._child.wait(10) == 1
    assert "EOFError" in (tmp_path / "run.log").read_text()


def test_an_arm_of_the_command_line_overrules_what_the_benchmark_sets() -> None:
    name, overrides = benchmark.another_arm("mine=attention=sdpa,optimizer.betas=[0.9,0.99]")
    run = peers.Run(name, 64, [4], text="t", folder="f", cache="c", device="cpu", overrides=overrides, **benchmark.TINY)
    found = benchmark.command(run, 3)
    assert {"attention=sdpa", "optimizer.betas=[0.9,0.99]"} < set(found) and "attention=flash" not in found
    with pytest.raises(argparse.ArgumentTypeError, match="needs a new name and an override, got 'ours=loss=full'"):
        benchmark.another_arm("ours=loss=full")


def test_a_board_gives_joules_and_megahertz_of_the_device_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nvml:
        NVML_CLOCK_SM, NVMLError = 1, ValueError
        nvmlInit = staticmethod(lambda: None)
        nvmlDeviceGetHandleByUUID = staticmethod(lambda uuid: uuid)
        nvmlDeviceGetTotalEnergyConsumption = staticmethod({"GPU-of-it": 2500}.__getitem__)

        @staticmethod
        def nvmlDeviceGetClockInfo(handle: str, kind: int) -> int:
            raise ValueError("not supported")

    monkeypatch.setitem(sys.modules, "pynvml", Nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="of-it"))
    board = turns.Board(torch.device("cuda", 0))
    assert (board.joules(), board.megahertz()) == (2.5, None)
    assert turns.Board(torch.device("cpu")).joules() is None


def test_a_library_that_is_missing_is_no_failure(run_here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    code, found = run_here("--arms", "transformers", "--rounds", "1")
    assert code == 0 and found["rows"][0]["problem"] == "not run: transformers is not installed"


def measured(
    arm: str, *step_ms: float, length: int = 1024, peak: float = 10e9, burst: float | None = None
) -> list[Outcome]:
    took = [Turn(SUSTAINED, number, (1.0, x, 1e3), 0.0, 1.0, int(peak)) for number, x in enumerate(step_ms)]
    took += [] if burst is None else [Turn(BURST, 0, (burst,), 0.0, 1.0, int(peak))]
    return [Outcome(arm, length, "measured", turns=took, loss_curve=CURVE)]


def figures(*outcomes: list[Outcome]) -> list[Row]:
    flat = [each for several in outcomes for each in several]
    return summarise(flat, tokens=32768, flops={1024: 8e8, 8192: 1.6e9}, device_name="NVIDIA H200")


def test_a_rows_figures_are_the_medians_of_its_rounds() -> None:
    row, reference = figures(measured("ours", 50, 60, 51), measured("nanogpt", 64, 66, 60))
    assert row.step_ms == 51 and row.spread_percent == pytest.approx(1000 / 51)
    assert row.tokens_per_second == pytest.approx(32768 / 0.051)
    assert row.mfu_percent == pytest.approx(100 * 32768 / 0.051 * 8e8 / 989e12)
    assert (row.last_loss, row.loss_apart, reference.loss_apart) == (4.0, 0.0, 0.0)


def test_a_ratio_is_the_median_of_those_of_the_rounds_that_both_have() -> None:
    rows = figures(measured("ours", 50, 60, 51, burst=40), measured("nanogpt", 64, 66, 60, burst=50))
    speed = benchmark_report.HEADINGS.index("speed / nanogpt")
    assert [line[speed] for line in lines(rows)] == [f"{60 / 51:.3f}", "1.000", "1.250", "1.000"]
    assert "ours, speed at T=1,024: at least 1.04 times nanogpt's: it is 1.176 (burst: 1.250): holds" in remarks(rows)
    died = figures(measured("ours", 50), measured("nanogpt", 64, 66, 60))
    assert REQUIRED[5].ratio(died) == 64 / 50


def test_required_ratios_are_decided_by_the_bounds_of_each_length() -> None:
    peers_there = [measured("nanogpt", 108, peak=20e9), measured("nanogpt", 110, length=8192, peak=20e9)]
    flash = measured("nanogpt_flash", 135, length=8192)
    good = figures(*peers_there, flash, measured("ours_bf16", 100), measured("ours_bf16", 99.9, length=8192))
    assert verdict(good) and [each.holds(good) for each in REQUIRED] == [True] * 5 + [None] * 2
    bad = figures(*peers_there, flash, measured("ours_bf16", 100.1, peak=10.1e9), measured("ours", 104, length=8192))
    assert not verdict(bad)
    assert [each.holds(bad) for each in REQUIRED] == [False, None, None, False, None, None, False]
    said = remarks(bad)
    assert "ours_bf16, speed at T=1,024: at least 1.08 times nanogpt's: it is 1.079: DOES NOT HOLD" in said
    assert "ours_bf16, speed at T=8,192: at least 1.35 times nanogpt_flash's: not measured" in said
    assert verdict(figures(measured("ours", 100)))  # nothing to compare with
