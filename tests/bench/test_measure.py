"""Nothing wrong is timed, everybody is timed alike, and what is said of it adds up."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from flash_train.bench import clock
from flash_train.bench.cases import Case, Inputs, make_inputs, read_case
from flash_train.bench.contestants import CONTESTANTS, Contestant, heads_first, laid_out
from flash_train.bench.measure import Entry, measure
from flash_train.bench.output import print_case, write_files
from flash_train.bench.settings import Settings, read_settings
from flash_train.bench.truth import Truth
from flash_train.ops.attention import flash_attention

CPU = torch.device("cpu")
ELSEWHERE = torch.tensor([[0, 0, 0, 1, 0, 0], [0] * 6], dtype=torch.bool)[..., None, None]
"""A head that is not compared: the last key head's, in a row of the batch that is not the last one."""
CASE = {"B": 2, "H": 6, "G": 2, "T": 37, "S": 41, "D": 16, "E": 24, "causal": True}


def settings(**given: Any) -> Settings:
    config = {
        "preset": {"cases": [CASE]},
        "contestants": ["flash", "naive"],
        "directions": ["forward", "backward", "both"],
        "device": "cpu",
        "dtype": "fp32",
        "reference": "flash",
        "rounds": 2,
        "seconds": 1e-6,
        "graph": False,
        "compile": {"enabled": False, "mode": "default"},
        "seed": 3,
    }
    return read_settings(config | given)


def run(**given: Any) -> dict[str, Entry]:
    asked = settings(**given)
    return {entry.contestant: entry for entry in measure(asked.cases[0], asked)}


def spoiled(change: Any) -> Any:
    """A contestant that is naive attention, its output changed."""
    return lambda case, inputs: Contestant(
        lambda q, k, v: change(flash_attention(q, k, v, causal=case.causal, implementation="naive"))
    )


class Backwards(torch.autograd.Function):
    """The right output, with a gradient that is a little too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 1.0001


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda x: x * 1.0001, "output is off by 1.0e-04 of its norm"),
        (Backwards.apply, "dq is off by 1.0e-04 of its norm"),
        (lambda x: x.masked_fill(ELSEWHERE, math.nan), "output is off by inf"),
    ],
    ids=["forward", "backward", "a NaN in a head that is not compared"],
)
def test_a_wrong_answer_gets_no_speed(
    change: Any, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.setitem(CONTESTANTS, "naive", spoiled(change))
    asked = settings()
    entries = measure(asked.cases[0], asked)
    wrong = entries[1]
    assert (wrong.contestant, wrong.status, wrong.rounds, wrong.peak_bytes) == ("naive", "wrong", {}, {})
    assert wrong.why is not None and why in wrong.why
    print_case(entries, asked, [1e12], Console(width=200), said=set())
    assert [line.split() for line in capsys.readouterr().out.splitlines() if line.strip().startswith("naive ")] == [
        ["naive", direction, "wrong"] for direction in ("forward", "backward", "both")
    ]
    files = write_files(tmp_path, entries, asked, matmul=[1e12], facts={"environment": {"device_name": "x"}})
    rows = json.loads(files[0].read_text())["rows"]
    assert [(row["contestant"], row["status"], "seconds" in row) for row in rows[-2:]] == [
        ("flash", "ok", True),
        ("naive", "wrong", False),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({}, ["flash", "sdpa_math", "naive"]),
        ({"S": 37, "documents": [20, 1, 16]}, ["flash", "flash_packed", "naive"]),
        ({"window": [5, None]}, ["flash", "naive"]),
        ({"T": 41, "S": 37, "E": 16}, ["flash", "sdpa_math", "naive"]),
    ],
    ids=str,
)
def test_the_right_answer_is_found_right_in_every_layout(given: dict, names: list[str], dtype: torch.dtype) -> None:
    case = read_case(CASE | given, key="case")
    inputs = make_inputs(case, device=CPU, dtype=dtype, seed=5)
    truth = Truth(case, inputs)
    for name in names:
        contestant = CONTESTANTS[name](case, inputs)
        leaves = [laid_out(x, contestant.layout).detach().requires_grad_() for x in inputs[:3]]
        output = contestant.attend(*leaves)
        gradients = torch.autograd.grad(output, leaves, laid_out(inputs.do, contestant.layout))
        results = dict(zip(("output", "dq", "dk", "dv"), (output.detach(), *gradients), strict=True))
        errors = truth.errors({n: heads_first(x, contestant.layout, case.B) for n, x in results.items()})
        assert errors.fault is None and errors.found.keys() == {"output", "dq", "dk", "dv"}, (name, errors)


def test_a_problem_that_is_cut_has_the_same_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    case = read_case(CASE, key="case")
    inputs = make_inputs(case, device=CPU, dtype=torch.float64, seed=5)
    monkeypatch.setattr("flash_train.bench.truth._ELEMENTS", {"cpu": 3 * 41 * 5})  # five queries at a time
    truth = Truth(case, inputs)
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    output = flash_attention(*leaves, causal=True, implementation="sdpa_math")
    gradients = torch.autograd.grad(output, leaves, inputs.do)
    found = truth.errors(dict(zip(("output", "dq", "dk", "dv"), (output.detach(), *gradients), strict=True))).found
    assert max(found.values()) < 1e-14


def test_rounds_visit_everybody_in_turns_and_every_second_one_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    visits: list[str] = []

    def noting(name: str) -> Any:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            visits.append(name)
            return flash_attention(q, k, v, causal=True, implementation="naive")

        return lambda case, inputs: Contestant(attend)

    names = ["tiled", "sdpa_math", "naive"]
    for name in names:
        monkeypatch.setitem(CONTESTANTS, name, noting(name))
    found = run(contestants=names, rounds=3, directions=["forward"])
    turns = [name for name, before in zip(visits, [None, *visits], strict=False) if name != before]
    # once to be checked, then three rounds; who ends a round begins the next
    assert turns == [*names, *names, *names[-2::-1], *names[1:]]
    assert all(len(entry.rounds["forward"]) == 3 for entry in found.values())


def test_who_is_not_installed_or_refuses_is_told_with_its_reason_once(capsys: Any) -> None:
    window = {"preset": {"cases": [CASE | {"window": [5, None]}]}}
    names = ["flash", "sdpa_math", "flash_packed", "triton", "flash_attn_2", "flash_attn_3"]
    asked = settings(contestants=names, **window)
    entries = measure(asked.cases[0], asked)
    assert {entry.contestant: entry.status for entry in entries} == {
        "flash": "ok", "sdpa_math": "refused", "flash_packed": "refused", "triton": "refused",
        "flash_attn_2": "refused", "flash_attn_3": "refused",
    }  # fmt: skip
    said: set[str] = set()
    print_case(entries, asked, [1e12], Console(width=200), said=said)
    printed = capsys.readouterr().out
    assert "sdpa_math: refused: implementation='sdpa_math' does not take a window" in printed
    assert "flash_attn_3: refused: flash_attn_interface.flash_attn_func is not installed" in printed
    print_case(entries, asked, [1e12], Console(width=200), said=said)
    again = capsys.readouterr().out
    assert "refused" not in again and "as before: triton, sdpa_math, flash_packed, flash_attn_2, flash_attn_3" in again


def test_a_crash_ends_one_contestant_and_not_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(case: Case, inputs: Inputs) -> Contestant:
        raise RuntimeError("the moon was full\nand more")

    def exhaust(case: Case, inputs: Inputs) -> Contestant:
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setitem(CONTESTANTS, "sdpa_math", crash)
    monkeypatch.setitem(CONTESTANTS, "naive", exhaust)
    found = run(contestants=["flash", "sdpa_math", "naive"])
    assert [(entry.status, entry.why) for entry in found.values()] == [
        ("ok", None),
        ("failed", "RuntimeError: the moon was full"),
        ("oom", "no more"),
    ]


def test_naive_holds_the_scores_and_tiles_do_not() -> None:
    long = {"preset": {"cases": [{"B": 1, "H": 3, "T": 1024, "D": 16}]}}
    found, scores = run(contestants=["tiled", "naive"], rounds=1, **long), 3 * 1024 * 1024 * 4
    assert found["naive"].peak_bytes["forward"] >= 2 * scores > scores / 2 > found["tiled"].peak_bytes["forward"]
    # beyond what its forward left behind
    assert scores <= found["naive"].peak_bytes["backward"] < found["naive"].peak_bytes["both"]


def test_compiled_contestants_give_the_same_answers() -> None:
    found = run(contestants=["flash", "naive"], rounds=1, compile={"enabled": True, "mode": "default"})
    assert [(entry.status, entry.why) for entry in found.values()] == [("ok", None)] * 2


def test_a_sample_is_the_mean_of_calls_behind_one_that_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = 0.0, 0

    def call() -> None:
        nonlocal now, calls
        now, calls = now + 0.25, calls + 1

    monkeypatch.setattr(clock.time, "perf_counter", lambda: now)
    assert clock.sample(call, seconds=10.0, device=CPU) == (0.25,) * clock.SAMPLES
    assert calls == 2 + clock.SAMPLES * (1 + 8)
    assert clock.sample(call, seconds=0.01, device=CPU) == (0.25,)
    assert clock.sample(call, seconds=0.01, device=CPU, each=5) == (0.05,)


def test_medians_spread_and_ratios_are_those_of_the_rounds() -> None:
    case = read_case({"B": 1, "H": 1, "T": 100, "D": 25}, key="case")
    own = Entry(case=case, contestant="naive", rounds={"forward": [(1.0, 2.0, 9.0), (4.0,), (3.0, 3.0)]})
    other = Entry(case=case, contestant="flash", rounds={"forward": [(1.0,), (1.0,), (6.0,)]})
    assert own.by_round("forward") == [2.0, 4.0, 3.0] and own.seconds("forward") == 3.0
    assert own.spread("forward") == pytest.approx(2 / 3)
    assert own.flops_per_second("forward") == pytest.approx(4 * 100 * 100 * 25 / 3)
    assert own.times_as_slow(other, "forward") == 2.0  # of 2, 4 and a half


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("compiled", [False, True], ids=["as it is", "compiled"])
def test_on_a_gpu_the_peers_are_right_and_timed(graph: bool, compiled: bool) -> None:
    names = ["flash", "triton", "sdpa", "sdpa_cudnn", "sdpa_efficient", "sdpa_math", "naive", "flex"]
    shape = {"preset": {"cases": [{"B": 2, "H": 4, "G": 4, "T": 512, "D": 64, "causal": True}]}}
    how: dict[str, Any] = {"graph": graph, "compile": {"enabled": compiled, "mode": "default"}}
    found = run(contestants=names, device="cuda", dtype="bf16", seconds=0.01, **how, **shape)
    if compiled and torch.__version__.startswith("2.11."):  # cuDNN's gradients are wrong there, and are not timed
        wrong = found.pop("sdpa_cudnn")
        assert wrong.status == "wrong" and "dq is off" in (wrong.why or "") and not wrong.rounds
        names.remove("sdpa_cudnn")
    assert {name: (entry.status, entry.why) for name, entry in found.items()} == dict.fromkeys(names, ("ok", None))
    scores = 2 * 4 * 512 * 512 * 2
    assert found["naive"].peak_bytes["forward"] > scores > found["flash"].peak_bytes["forward"]
    for entry in found.values():
        assert all(0 < entry.seconds(direction) < 0.1 for direction in ("forward", "backward", "both"))
