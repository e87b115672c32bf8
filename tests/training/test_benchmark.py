"""The program that times our training steps beside others'."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training import benchmark, peers
from tests.training.benchmark_report import REQUIRED, Outcome, Row, lines, remarks, summarise, verdict

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
def test_ours_and_nanogpt_take_the_same_steps_from_the_same_weights(device: str, run_here: Any) -> None:
    code, found = run_here("--arms", "ours", "nanogpt", "--rounds", "1", "--steps", "12", device=device)
    ours, nanogpt = found["runs"]
    assert code == 0 and ours["status"] == nanogpt["status"] == "measured", found["rows"]
    curves = [[loss for _, loss in run["loss_curve"]] for run in (ours, nanogpt)]
    assert len(curves[0]) == 12 and curves[0] == pytest.approx(curves[1], abs=2e-3)
    assert curves[0][0] == pytest.approx(torch.tensor(320.0).log().item(), abs=0.1) and curves[0][-1] < curves[0][0]
    for run in (ours, nanogpt):
        assert len(run["step_ms"]) == 8 and all(0 < step < 1e4 for step in run["step_ms"])
        assert 1e3 * run["first_step_seconds"] > min(run["step_ms"])
        assert (run["peak_bytes"] or 0) > 0 if device == "cuda" else run["peak_bytes"] is None
    assert 0 < ours["speed"]["tokens_per_second"]


def test_transformers_begins_with_nanogpts_logits(text: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run = peers.Run(
        "nanogpt", 64, steps=6, timed=4, text=str(text), folder=str(tmp_path), cache=str(tmp_path), device="cpu",
        **benchmark.TINY,
    )  # fmt: skip
    tokens = torch.arange(64)[None]
    ours, theirs = (peers.build(replace(run, arm=arm))[1](tokens, tokens)[0] for arm in ("nanogpt", "transformers"))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_arms_take_turns_and_every_second_round_goes_backwards() -> None:
    first, second = ("ours", "nanogpt", "transformers"), ("transformers", "nanogpt", "ours")
    found = benchmark.order([1024, 8192], first, 2)
    assert found == [(T, number, arm) for T in (1024, 8192) for number in (0, 1) for arm in (first, second)[number]]


def test_an_arm_that_dies_or_hangs_is_listed_with_its_error_and_the_others_go_on(
    run_here: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = {"step_ms": [5.0, 6.0, 7.0], "peak_allocated_bytes": 2**30, "first_step_seconds": 1.0}
    result = {"status": "ok", "clock": clock, "loss_curve": CURVE, "environment": {"device_name": "NVIDIA H200"}}
    does = {
        "ours": "print('so it begins'); raise SystemExit('no such kernel')",
        "ours_bf16": "import time; print('waiting', flush=True); time.sleep(60)",
        "nanogpt": f"import os; os.mkdir(FOLDER); open(FOLDER + '/result.json', 'w').write({json.dumps(result)!r})",
    }
    monkeypatch.setattr(
        benchmark, "command", lambda run: [sys.executable, "-c", f"FOLDER = {run.folder!r}\n{does[run.arm]}"]
    )
    code, found = run_here("--arms", *does, "--rounds", "1", "--timeout", "2")
    assert code == 1
    assert [run["message"] for run in found["runs"]] == [
        "exit code 1: no such kernel",
        "stopped after 2 s: waiting",
        "",
    ]
    row = found["rows"][-1]
    assert (row["arm"], row["step_ms"], row["peak_bytes"], row["tokens_per_second"]) == ("nanogpt", 6, 2**30, 256e3 / 6)
    assert "ours at T=64: failed: exit code 1: no such kernel" in capsys.readouterr().out


def test_a_library_that_is_missing_is_no_failure(run_here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    code, found = run_here("--arms", "transformers", "--rounds", "1")
    assert code == 0 and found["rows"][0]["problems"] == ["not run: transformers is not installed"]


def measured(arm: str, *step_ms: float, length: int = 1024, peak: float = 10e9) -> list[Outcome]:
    return [
        Outcome(arm, length, number, "measured", step_ms=(1.0, x, 1e3), peak_bytes=int(peak), loss_curve=CURVE)
        for number, x in enumerate(step_ms)
    ]


def figures(*outcomes: list[Outcome]) -> list[Row]:
    flat = [each for several in outcomes for each in several]
    return summarise(flat, tokens=32768, flops={1024: 8e8, 8192: 1.6e9}, device_name="NVIDIA H200")


def test_a_rows_figures_are_the_medians_of_its_rounds() -> None:
    row, reference = figures(measured("ours", 50, 60, 51), measured("nanogpt", 64))
    assert row.step_ms == 51 and row.spread_percent == pytest.approx(1000 / 51)
    assert row.tokens_per_second == pytest.approx(32768 / 0.051)
    assert row.mfu_percent == pytest.approx(100 * 32768 / 0.051 * 8e8 / 989e12)
    assert (row.last_loss, row.loss_apart, reference.loss_apart) == (4.0, 0.0, 0.0)
    assert lines([row, reference])[0][7:9] == [f"{64 / 51:.3f}", "1.000"]


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
