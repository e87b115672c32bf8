"""`flash-bench tune=true`: nothing wrong wins, nothing is replaced by chance, and what is written is what is read."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import getoutput
from typing import Any

import pytest
import torch
import triton
from rich.console import Console
from rich.progress import Progress

from flash_train.bench.candidates import candidates
from flash_train.bench.cases import make_inputs, read_case
from flash_train.bench.portable import Built, Job, Kernels, in_processes
from flash_train.bench.search import Search
from flash_train.bench.settings import Tuning, read_tuning
from flash_train.bench.truth import Truth
from flash_train.bench.tune import tune
from flash_train.bench.tune_output import print_search, write_tuning
from flash_train.bench.work import Call
from flash_train.commands.bench import main
from flash_train.ops.attention import Mask, Score, flash_attention_with_lse
from flash_train.ops.choice import interpreting
from flash_train.ops.kernels import tables
from flash_train.ops.kernels.tables import DIRECTIONS, Launch, Place, lookup
from tests.commands.conftest import Command

INTERPRETED = pytest.mark.skipif(
    not interpreting() or triton.__version__.startswith("3.6."),
    reason="needs Triton's interpreter (TRITON_INTERPRET=1); 3.6's reads loop bounds in a way that NumPy 2.4 refuses",
)
PRESENT = lookup("interpreter", "forward", 4, 16)
FAST, FASTER, SLOW = Launch(16, 32, 4, 1), Launch(16, 16, 4, 1), Launch(32, 32, 4, 1)
CASE = {"B": 1, "H": 2, "G": 1, "T": 37, "S": 41, "D": 16, "E": 8, "causal": True}
FACTS = {
    "command": "flash-bench tune=true",
    "date": "2026-12-01",
    "environment": {"device_name": "NVIDIA Abacus", "torch": "2.11", "triton": "3.6"},
}


def settings(*launches: Launch, **given: Any) -> Tuning:
    config = {
        "preset": {"cases": [CASE]},
        "launches": [vars(launch) for launch in launches] or None,
        "tune": True,
        "contestants": None,
        "directions": ["forward"],
        "device": "cpu",
        "dtype": "fp32",
        "reference": "flash",
        "rounds": 3,
        "seconds": 1e-6,
        "graph": False,
        "compile": {"enabled": False, "mode": "default"},
        "seed": 3,
    }
    found = read_tuning(config | given)
    assert found is not None
    return found


def search(
    asked: Tuning,
    seconds: dict[Launch, list[float]],
    built: dict[Launch, Built] | None = None,
    turns: list[Launch] | None = None,
) -> list[Search]:
    """The finished searches, where each launch takes `seconds` by round, the last of them for all that follow; `turns`
    gets who was timed, in order."""
    rounds: dict[Launch, int] = {}

    def clock(launch: Launch, call: Call) -> tuple[float, ...]:
        index = rounds[launch] = rounds.get(launch, -1) + 1
        if turns is not None:
            turns.append(launch)
        return (seconds[launch][min(index, len(seconds[launch]) - 1)],)

    def build(jobs: Sequence[Job], ready: Callable[[], object]) -> dict[Job, Built]:
        return {job: (built or {}).get(job.launch, Built(100, 0, 1024)) for job in jobs}

    groups = tune(asked, progress=Progress(console=Console(quiet=True)), build=build, clock=clock)
    return [found for group in groups for found in group]


def statuses(found: Search) -> dict[Launch, str]:
    return {trial.launch: trial.status for trial in found.trials}


@INTERPRETED
def test_a_wrong_candidate_never_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    spoiled = {
        ("forward", FASTER): "output",
        ("forward", FAST): "found_lse",
        ("dkdv", FASTER): "dk",
        ("dkdv", FAST): "dv",
        ("dq", FASTER): "dq",
    }
    start = Kernels.start

    def spoil(self: Kernels, direction: str, launch: Launch) -> None:
        start(self, direction, launch)
        if (direction, launch) in spoiled:
            getattr(self, f"_{spoiled[direction, launch]}").mul_(1.001)

    monkeypatch.setattr(Kernels, "start", spoil)
    found = search(settings(FASTER, FAST, directions=["both"]), {FASTER: [1.0], FAST: [1.1], PRESENT: [1.2]})
    assert [(x.direction, x.replacement) for x in found] == 2 * [("forward", None), ("dkdv", None), ("dq", FAST)]
    for x in found:
        for trial in x.trials:
            name = spoiled.get((x.direction, trial.launch))
            assert (trial.status, trial.timed) == (("ok", True) if name is None else ("wrong", False))
            assert name is None or f"{name.removeprefix('found_')} is off by 1.0e-03 of its norm" in str(trial.why)


@INTERPRETED
def test_a_wrong_present_launch_is_replaced_and_told(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    start = Kernels.start

    def spoil(self: Kernels, kernel: str, launch: Launch) -> Any:
        start(self, kernel, launch)
        if launch == PRESENT:
            self._output.mul_(1.001)

    monkeypatch.setattr(Kernels, "start", spoil)
    launch = ",".join(f"{name}:{number}" for name, number in vars(FAST).items())
    answer = command(
        main, "tune=true", "preset.cases=[{B:1,H:1,T:37,D:16,causal:true}]", f"launches=[{{{launch}}}]",
        "directions=[forward]", "seconds=1e-6", "rounds=2", "hydra.run.dir=out",
    )  # fmt: skip
    assert answer.code == 1, answer.err
    assert "32x16 warps 4 stages 1 (present): wrong: output is off by 1.0e-03" in answer.out
    assert "forward 16 of interpreter, 4 bytes: now 16x32 warps 4 stages 1" in answer.out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["launch_table.json", "tune.json"]
    found = tables.read_table(tmp_path / "out" / "launch_table.json")
    assert found[Place("interpreter", 4, "forward", 16)].launch == FAST
    assert found[Place("interpreter", 4, "forward_dense", 16)].launch == FAST


@INTERPRETED
def test_what_does_not_fit_or_spills_is_skipped_with_its_reason(capsys: pytest.CaptureFixture) -> None:
    large, spilling, broken = Launch(128, 128, 4, 4), Launch(64, 64, 4, 1), Launch(128, 16, 8, 1)
    built = {
        PRESENT: Built(255, 8, 1024),
        FAST: Built(255, 8, 2048),
        spilling: Built(255, 9, 1024),
        large: Built(status="too large", why="it takes 300000 of shared memory, 232448 there are"),
        broken: Built(status="failed", why="RuntimeError: PassManager::run failed"),
    }
    (found, _) = search(settings(large, spilling, broken, FAST), {PRESENT: [1.2], FAST: [1.1]}, built)
    assert {trial.launch: (trial.status, trial.why) for trial in found.trials} == {
        PRESENT: ("ok", None),
        FAST: ("ok", None),
        large: ("too large", "it takes 300000 of shared memory, 232448 there are"),
        spilling: ("spills", "9 numbers of a thread lie in memory, 8 of the present launch's"),
        broken: ("failed", "RuntimeError: PassManager::run failed"),
    }
    print_search(found, Console(width=200))
    printed = capsys.readouterr().out
    assert "too large: 128x128 warps 4 stages 4\n" in printed and "spills: 64x64 warps 4 stages 1\n" in printed
    assert "128x16 warps 8 stages 1: failed: RuntimeError: PassManager::run failed" in printed
    (line,) = [line.split() for line in printed.splitlines() if line.strip().startswith("16x32")]
    assert line == "16x32 warps 4 stages 1 1.10 s 0.0 % 100.0 % 255 8 2.00 KiB new".split()
    (line,) = [line.split() for line in printed.splitlines() if line.strip().startswith("32x16")]
    assert line == "32x16 warps 4 stages 1 1.20 s 0.0 % 91.7 % 255 8 1.00 KiB present".split()


@INTERPRETED
def test_where_the_present_launch_does_not_fit_the_next_smaller_one_is_what_others_are_measured_by() -> None:
    small = tables.smaller(PRESENT)
    assert small is not None
    too_large = Built(status="too large", why="x")
    (found, _) = search(settings(FAST), {small: [1.0], FAST: [1.1]}, {PRESENT: too_large})
    assert (found.present, found.replacement, found.gain) == (small, None, 0.0)
    (found, _) = search(settings(FAST), {FAST: [1.1]}, {PRESENT: too_large, small: too_large})
    assert (found.present, found.replacement, found.gain) == (None, FAST, None)


@INTERPRETED
@pytest.mark.parametrize(
    ("fast", "present", "replaced"),
    [
        ([1.0], [1.009], False),
        ([1.0], [1.02], True),
        ([1.0, 1.04, 1.0], [1.03], False),
        ([1.0], [1.05, 1.05, 1.12], False),
        ([1.0, 1.02, 1.0], [1.04, 1.06, 1.04], True),
    ],
    ids=["less than a percent", "more", "inside its spread", "inside the present one's", "beyond both"],
)
def test_the_present_launch_stays_unless_the_gain_exceeds_the_spread(
    fast: list[float], present: list[float], replaced: bool
) -> None:
    (found, dense) = search(settings(FAST), {FAST: fast + fast[-1:] * 2, PRESENT: present + present[-1:] * 2})
    assert found.fastest is found.trial(FAST)
    assert found.replacement == (FAST if replaced else None)


@INTERPRETED
def test_rounds_go_in_turns_and_who_is_far_behind_is_timed_once() -> None:
    turns: list[Launch] = []
    plain, dense = search(settings(FAST, SLOW), {PRESENT: [1.0], FAST: [1.1], SLOW: [2.0]}, turns=turns)
    assert turns == [PRESENT, FAST, SLOW, FAST, PRESENT, PRESENT, FAST] * 2
    assert statuses(plain) == statuses(dense) == {PRESENT: "ok", FAST: "ok", SLOW: "slow"}


@INTERPRETED
def test_problems_of_one_width_are_timed_together_and_one_that_is_out_of_memory_takes_no_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cases = [CASE, CASE | {"T": 39}, CASE | {"D": 33, "T": 3}]
    asked = settings(FAST, preset={"cases": cases})
    plain, dense, *wider = search(asked, {FAST: [1.0], PRESENT: [3.0]})
    assert [str(case) for case in plain.cases] == ["B1 H2 G1 T39 S41 D16 E8 causal", "B1 H2 G1 T37 S41 D16 E8 causal"]
    assert (plain.place.width, dense.place.direction, wider[0].place.width) == (16, "forward_dense", 64)
    trial = plain.trial(FAST)
    assert trial is not None and trial.by_round() == [2.0, 2.0, 2.0] and plain.gain == pytest.approx(2 / 3)

    def exhaust(case: Any, inputs: Any, bias: Any) -> Truth:
        if case.T == 39:
            raise torch.OutOfMemoryError("no more")
        return Truth(case, inputs, bias)

    monkeypatch.setattr("flash_train.bench.tune.Truth", exhaust)
    plain, *_ = search(asked, {FAST: [1.0], PRESENT: [3.0]})
    assert plain.left_out == {"B1 H2 G1 T39 S41 D16 E8 causal": "OutOfMemoryError: no more"}
    trial = plain.trial(FAST)
    assert trial is not None and trial.by_round() == [1.0, 1.0, 1.0]


@INTERPRETED
def test_what_is_written_is_what_lookup_then_answers_with_its_provenance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = settings(FAST)
    (found, dense) = search(asked, {FAST: [1.0], PRESENT: [1.2]})
    files = write_tuning(tmp_path, [found], asked, facts=FACTS)
    assert [file.name for file in files] == ["tune.json", "launch_table.json"]
    monkeypatch.setenv("FLASH_TRAIN_LAUNCH_TABLE", str(files[1]))
    monkeypatch.setattr(tables, "TABLE", tables.load())
    assert lookup("interpreter", "forward", 4, 16) == FAST
    assert lookup("interpreter", "forward", 4, 32) == lookup("interpreter", "dq", 4, 16) == PRESENT
    assert lookup("interpreter", "forward", 4, 16, dense=True) == FAST, "there is no row of its own"
    assert tables.TABLE[found.place].provenance == tables.Provenance(
        how="by time, each checked against float64: float32, B1 H2 G1 T37 S41 D16 E8 causal",
        device="NVIDIA Abacus",
        torch="2.11",
        triton="3.6",
        date="2026-12-01",
        command="flash-bench tune=true",
    )
    (row,) = json.loads(files[0].read_text())["rows"]
    assert row["gain"] == pytest.approx(1 / 6) and row["replacement"] == vars(FAST)
    present, fast = row["launches"]
    assert fast | vars(FAST) == fast and (fast["status"], fast["registers"], fast["shared_bytes"]) == ("ok", 100, 1024)
    assert present["rounds"] == {"B1 H2 G1 T37 S41 D16 E8 causal": [[1.2]] * 3}


def test_the_packages_own_table_is_whole_and_as_it_would_be_written(tmp_path: Path) -> None:
    table = tables.read_table(tables.FILE)
    tables.write_table(tmp_path / "table.json", table)
    assert (tmp_path / "table.json").read_text() == tables.FILE.read_text()
    for architecture in ("sm_80", "sm_86", "sm_90", "sm_100", "gfx942", "interpreter"):
        for itemsize in (2, 4):
            for direction in DIRECTIONS:
                assert Place(architecture, itemsize, direction, 256) in table


GROUP = {"architecture": "sm_90", "bytes": 2, "provenance": {"how": "guessed"}}
ROW = {"block_t": 64, "block_s": 64, "warps": 4, "stages": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be JSON, and is not: Expecting property name"),
        ("{}", "it must be a list of groups of rows, got dict"),
        ([{"rows": {}}], "group 0 must give architecture, bytes, provenance, rows, got {'rows': {}}"),
        (
            [GROUP | {"bytes": 3, "rows": {}}],
            "group 0 must have a name for architecture, and 2 or 4 bytes, got 'sm_90'",
        ),
        ([GROUP | {"provenance": {}, "rows": {}}], "group 0: provenance must be texts for how and for some of device,"),
        ([GROUP | {"rows": {"up": {}}}], "group 0: rows must be for some of forward, dkdv, dq, forward_dense, "),
        ([GROUP | {"rows": {"dq": {"48": ROW}}}], "group 0: dq must be for some of 16, 32, 64, 128, 256, got '48'"),
        ([GROUP | {"rows": {"dq": {"64": [64]}}}], "dq 64 of sm_90, 2 bytes must give block_t, block_s, warps, stages"),
        (
            [GROUP | {"rows": {"dq": {"64": ROW | {"warps": 5}}}}],
            "dq 64 of sm_90, 2 bytes: warps must be one of 1, 2, 4, 8, 16, got 5",
        ),
        ([GROUP | {"rows": {"dq": {"64": ROW}}}] * 2, "dq 64 of sm_90, 2 bytes stands there twice"),
    ],
    ids=str,
)
def test_what_is_no_launch_table_is_refused_by_its_file(
    text: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "own.json"
    file.write_text(text if isinstance(text, str) else json.dumps(text))
    monkeypatch.setenv("FLASH_TRAIN_LAUNCH_TABLE", str(file))
    with pytest.raises(ValueError) as refusal:
        tables.load()
    assert str(refusal.value).startswith(f"the launch table {file}") and message in str(refusal.value)
    assert str(refusal.value).endswith("; flash-bench tune=true writes files that are right")


def test_a_table_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="nowhere.json cannot be read: No such file .*; unset FLASH_TRAIN_LAUNCH_TABLE"
    ):
        tables.read_table(tmp_path / "nowhere.json")


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_grid_leaves_out_what_cannot_fit_where_that_is_certain(direction: str) -> None:
    found = candidates("sm_86", direction, (128, 128), 2, shared_bytes=99 * 1024)
    assert found[Launch(64, 64, 4, 2)] is None
    assert "registers of a thread, 232 there are" in str(found[Launch(128, 128, 4, 1)])
    assert 20 < sum(reason is None for reason in found.values()) < 60
    elsewhere = candidates("sm_100", direction, (128, 128), 2, shared_bytes=99 * 1024)
    assert elsewhere[Launch(128, 128, 4, 1)] is None
    assert elsewhere[Launch(128, 128, 4, 4)] == "its waiting tiles take 196608 bytes of shared memory, 101376 there are"


def test_a_truth_with_a_bias_is_that_of_the_op() -> None:
    case = read_case(CASE | {"T": 43}, key="case")  # more queries than keys: some see nothing
    inputs = make_inputs(case, device=torch.device("cpu"), dtype=torch.float64, seed=5)
    bias = torch.randn(case.H, case.T, case.S, dtype=torch.float64)
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    output, lse = flash_attention_with_lse(
        *leaves, mask=Mask(causal=True), score=Score(bias=bias), implementation="tiled"
    )
    gradients = torch.autograd.grad(output, leaves, inputs.do)
    lse = lse.detach().masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)
    dq, dk, dv = gradients
    results = {"output": output.detach(), "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    errors = Truth(case, inputs, bias).errors(results)
    assert errors.found.keys() == results.keys() and max(errors.found.values()) < 1e-14


def test_a_process_that_dies_takes_its_own_job_with_it_and_no_other() -> None:
    jobs = ["echo 1", "kill -9 $PPID", "echo 2"]
    assert dict(in_processes(getoutput, jobs, 1)) == {"echo 1": "1", "kill -9 $PPID": None, "echo 2": "2"}


WRONG: dict[tuple[str, ...], str] = {
    ("tune=perhaps",): "tune must be true or false, got 'perhaps'",
    ("tune=true", "contestants=[flash]"): (
        "tune=true times this package's Triton kernels against themselves, got contestants=['flash']; leave contestants"
    ),
    ("tune=true", "compile=on"): "tune=true times kernels by themselves, got compile=on; leave compile out",
    ("tune=true", "rounds=1"): "rounds must be 2 or more with tune=true, to tell a gain from the spread, got 1",
    ("tune=true", "launches=[]"): "launches must be null for a grid, or a list of launches like {block_t: 64,",
    ("tune=true", "launches=[{block_t:64,warps:4}]"): "launches[0] must give block_t, block_s, warps, stages, got {",
    ("tune=true", "launches=[{block_t:48,block_s:64,warps:4,stages:1}]"): (
        "launches[0]: block_t must be one of 16, 32, 64, 128, 256, got 48"
    ),
    ("launches=[{block_t:64}]",): "launches are what tune=true tries, got launches=[{'block_t': 64}] without it; add",
    ("tune=true", "preset.cases=[{B:1,H:1,T:9,D:257}]"): "the Triton kernels take head sizes 1 to 256, not 257",
}


@INTERPRETED
@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_what_is_no_search_is_refused_in_one_line(command: Command, arguments: tuple[str, ...]) -> None:
    answer = command(main, *arguments)
    (line,) = [line for line in answer.err.splitlines() if line]
    assert (answer.code, line.startswith("flash-bench: ")) == (2, True) and WRONG[arguments] in line


def test_without_a_gpu_or_the_interpreter_nothing_is_timed(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    answer = command(main, "tune=true")
    assert answer.code == 2 and answer.err.strip() == (
        "flash-bench: tune=true times launches on a GPU, got device=cpu; add device=cuda, or try it out with "
        "TRITON_INTERPRET=1, whose times say nothing"
    )


@pytest.mark.gpu
def test_on_a_gpu_two_launches_are_compiled_in_processes_checked_and_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from triton import knobs

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    hits: list[bool] = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda *, cache_hit, **_: hits.append(cache_hit))
    tried = Launch(32, 32, 4, 1), Launch(64, 128, 4, 8)
    case = {"B": 2, "H": 4, "G": 2, "T": 500, "D": 64, "causal": True}
    how: dict[str, Any] = {"device": "cuda", "dtype": "bf16", "seconds": 0.01, "graph": True}
    asked = settings(*tried, preset={"cases": [case]}, **how)
    (plain, dense) = [found for group in tune(asked, progress=Progress()) for found in group]
    for found in (plain, dense):
        present, fits, large = (found.trial(launch) for launch in (found.present, *tried))
        assert present is not None and fits is not None and large is not None
        assert large.status == "too large" and "shared memory" in str(large.why)
        for trial in (present, fits):
            assert trial.status in ("ok", "slow", "spills"), trial.why
            assert 0 < (trial.built.registers or 0) < 256 and (trial.built.shared or 0) > 0
        assert present.timed and 0 < present.seconds < 0.01 and found.replacement in (None, fits.launch)
    assert hits and all(hits), "what the processes compiled was compiled again"
