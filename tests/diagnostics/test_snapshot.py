"""Memory snapshots: replayed to the byte, compared by allocation site, shown without a network, recorded on demand."""

import json
import pickle
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_training import TinyModule, batches, trainer

from flash_train.commands import snapshot as command
from flash_train.diagnostics import snapshot_page
from flash_train.diagnostics.snapshot import BEFORE, NO_STACK, compare, load_snapshot, pack, replay
from flash_train.diagnostics.snapshot_callback import MemorySnapshot
from flash_train.diagnostics.snapshot_page import write_snapshot_page

MIB = 2**20


def frame(filename: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": filename, "line": line, "name": name}


FUNCTIONAL = frame("/env/lib/python3.12/site-packages/torch/nn/functional.py", 2100, "softmax")
TRAINER = frame("/home/me/train.py", 9, "<module>")
SCORES = [FUNCTIONAL, frame("/home/me/model/attention.py", 31, "forward"), TRAINER]
LOSS = [frame("/home/me/model/gpt.py", 7, "loss"), TRAINER]
CPLUSPLUS = [frame("/build/c10/Engine.cpp", 1, "execute")]


class Recorded:
    """Builds a snapshot in the format of `torch.cuda.memory._snapshot()`: one block a MiB of addresses."""

    def __init__(self) -> None:
        self.trace: list[dict[str, Any]] = []
        self.blocks: list[dict[str, Any]] = []

    def event(self, action: str, address: int, size: int, frames: list[dict[str, Any]] | None = None) -> "Recorded":
        time = 1_700_000_000_000_000 + 1000 * len(self.trace)
        self.trace.append({"action": action, "addr": address * MIB, "size": size, "stream": 0, "time_us": time,
                           "frames": frames or []})  # fmt: skip
        return self

    def alloc(self, address: int, size: int, frames: list[dict[str, Any]]) -> "Recorded":
        return self.event("alloc", address, size, frames)

    def free(self, address: int, size: int) -> "Recorded":
        return self.event("free_requested", address, size).event("free_completed", address, size)

    def snapshot(self, **alive: int) -> dict[str, Any]:
        """`alive`: address -> requested bytes at the end, of blocks that a segment holds in a row."""
        blocks = [
            {"size": MIB, "requested_size": alive.get(f"at{address}", 0), "address": address * MIB, "frames": [],
             "state": "active_allocated" if f"at{address}" in alive else "inactive"}
            for address in range(16)
        ]  # fmt: skip
        segment = {"device": 0, "address": 0, "total_size": 16 * MIB, "stream": 0, "blocks": blocks}
        return {"segments": [segment], "device_traces": [self.trace, []], "allocator_settings": {}}


def naive() -> dict[str, Any]:
    """Two score matrices, one of them in the backward, beside weights of before and the loss."""
    recorded = Recorded().alloc(1, 1000, SCORES).alloc(2, 300, LOSS).event("segment_alloc", 9, MIB)
    recorded.alloc(3, 500, CPLUSPLUS).free(1, 1000).free(3, 500).free(5, 70).alloc(1, 200, SCORES)
    return recorded.snapshot(at0=5000, at1=200, at2=300)


def flash() -> dict[str, Any]:
    statistics = [frame("/home/me/model/flash.py", 12, "forward"), TRAINER]
    return Recorded().alloc(1, 10, statistics).alloc(2, 300, LOSS).free(1, 10).snapshot(at0=5000, at2=300)


def chart_data(page: Path) -> list[dict[str, Any]]:
    found = re.search(r"<script type=application/json id=data>(.*?)</script>", page.read_text(), re.DOTALL)
    assert found is not None
    return json.loads(found[1])["charts"]


def test_a_snapshot_is_replayed_to_the_byte() -> None:
    recording = replay(naive())
    assert (recording.device, recording.events) == (0, 10)
    assert recording.peak == 5000 + 70 + 1000 + 300 + 500
    sites = {site.name: (site.at_peak, site.most, site.count) for site in recording.sites}
    assert sites == {
        BEFORE: (5070, 5070, 0),
        "model/attention.py:31 forward": (1000, 1000, 2),
        NO_STACK: (500, 500, 1),
        "model/gpt.py:7 loss": (300, 300, 1),
    }
    assert recording.sites[1].stack[0].endswith("functional.py:2100 softmax")
    assert sum(recording.points[-1].values()) == 5000 + 300 + 200
    assert recording.times[-1] == pytest.approx(0.010)


def test_a_long_recording_keeps_its_peak_and_few_points() -> None:
    recorded = Recorded()
    for index in range(9000):
        recorded.alloc(1, 100 + (index == 4321), LOSS).event("free_completed", 1, 100)
    recording = replay(recorded.snapshot())
    assert recording.peak == 101 and len(recording.points) <= 1501
    assert max(sum(point.values()) for point in recording.points) == 101


def test_two_snapshots_name_the_sites_that_one_has_and_the_other_lacks() -> None:
    pairs = {pair.name: (pair.first, pair.second) for pair in compare(replay(naive()), replay(flash()))}
    assert pairs["model/attention.py:31 forward"] == (1000, 0) and pairs[NO_STACK] == (500, 0)
    assert pairs["model/flash.py:12 forward"] == (0, 10)
    assert pairs["model/gpt.py:7 loss"] == (300, 300)


def test_a_page_needs_no_network_and_holds_the_timeline(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    marks = [(1_700_000_000_000_000.0 + 2000, "step 7")]
    write_snapshot_page(page, naive(), names=["</script><b>"], marks=marks)
    text = page.read_text()
    assert not re.search(r"https?:|//[a-z]+\.|\bsrc=|\bhref=|url\(|@import|import\(", text)
    assert "<b></figcaption>" not in text and "&lt;/script&gt;&lt;b&gt;" in text
    (chart,) = chart_data(page)
    assert max(map(sum, chart["rows"])) == replay(naive()).peak
    assert chart["marks"] == [[pytest.approx(0.002), "step 7"]]
    assert "model/attention.py:31 forward" in chart["names"] and "train.py:9 &lt;module&gt;" in text
    assert all(len(row) == len(chart["names"]) == len(chart["colours"]) for row in chart["rows"])


def test_a_step_is_marked_that_began_before_the_first_event_that_is_left(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    marks = ((1_700_000_000_000_000.0 + time, f"step {step}") for step, time in enumerate((-9000, -30, 2000)))
    write_snapshot_page(page, naive(), flash(), marks=marks)
    for chart in chart_data(page):
        assert chart["marks"] == [[0, "step 1"], [pytest.approx(0.002), "step 2"]]


def test_a_file_name_cannot_end_the_data(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    write_snapshot_page(page, Recorded().alloc(1, 5, [frame("/x/a<!--</script><p.py", 1, "f")]).snapshot())
    assert chart_data(page)[0]["names"][0] == "a<!--</script><p.py:1 f"


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_pages_script_is_valid() -> None:
    script = Path(snapshot_page.__file__).with_suffix(".js")
    answer = subprocess.run(["node", "--check", str(script)], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr


def test_a_pickle_stays_under_its_limit_by_dropping_the_oldest_events() -> None:
    recorded = Recorded()
    for index in range(5000):
        recorded.alloc(index, 100 + index, [dict(each) for each in SCORES])
    snapshot = recorded.snapshot()
    whole = pack(snapshot, limit=10**9)
    assert pickle.loads(whole) == snapshot
    assert len(whole) < len(pickle.dumps(snapshot, protocol=4)) / 2  # a stack is written once
    data = pack(snapshot, limit=100_000)
    kept = pickle.loads(data)["device_traces"][0]
    assert len(data) <= 100_000 and 500 < len(kept) < 5000 and kept[-1] == recorded.trace[-1]
    with pytest.raises(ValueError, match="a snapshot must fit its limit, and takes .* without events: give more"):
        pack(snapshot, limit=10)


class Hostile:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("executed"),))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (pickle.dumps(Hostile()), "must be the pickle of a memory snapshot, and is not"),
        (b"not a pickle", "must be the pickle of a memory snapshot, and is not"),
        (pickle.dumps([1]), "must hold a snapshot with segments and device_traces, got list"),
        (pickle.dumps(Recorded().snapshot()), "must have recorded allocations, and has none: call torch.cuda.memory"),
        (pickle.dumps({"segments": [], "device_traces": 3}), "must hold a list of events for each device"),
        (None, "cannot be read"),
    ],
)
def test_what_is_no_snapshot_is_refused_and_never_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("file").write_bytes(content)
    with pytest.raises(ValueError, match=text):
        load_snapshot("file")
    assert not Path("executed").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"device_traces": [[3]]},
        {"device_traces": [[{"action": "alloc", "size": 3}]]},
        {"device_traces": [[{"action": "alloc", "size": 3, "addr": 1, "frames": [{"file": "a.py"}]}]]},
        {"segments": [{"total": 1}]},
    ],
)
def test_a_broken_entry_is_said_to_be(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a snapshot must be as torch writes it, and in this one an entry is broken"):
        replay({**naive(), **change})


def test_a_page_never_replaces_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "snapshot.html"
    file.write_bytes(pack(naive(), limit=MIB))
    monkeypatch.setattr("sys.argv", ["flash-snapshot", str(file)])
    with pytest.raises(SystemExit):
        command.main()
    assert "the page must be another file than the snapshots" in capsys.readouterr().err and load_snapshot(file)


def test_a_device_without_a_recording_is_refused() -> None:
    with pytest.raises(ValueError, match=r"device must be one with recorded allocations, got 1: there is \[0\]"):
        replay(naive(), device=1)


def test_the_command_prints_what_one_lacks_and_writes_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    files = [tmp_path / "naive.pickle", tmp_path / "flash.pickle"]
    for file, content in zip(files, (naive(), flash()), strict=True):
        file.write_bytes(pack(content, limit=MIB))
    monkeypatch.setattr("sys.argv", ["flash-snapshot", *map(str, files)])
    command.main()
    printed = capsys.readouterr().out
    assert f"{files[0]}: at most 6.71 KiB, 10 events" in printed
    assert f"only in {files[0]}, at most:\n     1000 B  model/attention.py:31 forward\n" in printed
    assert f"only in {files[1]}, at most:\n       10 B  model/flash.py:12 forward\n" in printed
    page = tmp_path / "naive.compared.html"
    assert f"Only in {files[0]}" in page.read_text() and len(chart_data(page)) == 2
    monkeypatch.setattr("sys.argv", ["flash-snapshot", str(tmp_path / "none")])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2 and "flash-snapshot: " in capsys.readouterr().err


class Played(MemorySnapshot):
    """A recorder on a CPU, which the test plays."""

    def __init__(self, *, foreign: bool = False, **settings: Any) -> None:
        self.calls: list[str] = []
        self.foreign = foreign
        super().__init__(**settings)

    def _records_on(self, device: torch.device) -> bool:
        return True

    def _begin(self) -> bool:
        self.calls.append("begin")
        return self.foreign

    def _take(self) -> dict[str, Any]:
        self.calls.append("take")
        return naive()

    def _end(self) -> None:
        self.calls.append("end")


def at(*steps: int, error: bool = False) -> Any:
    """Fails in the backward of a step, or notes what the callback has done by then."""

    def during(where: str) -> None:
        seen.append(where)
        if error and where == "backward" and seen.count(where) == steps[0] + 1:
            raise RuntimeError("the run dies")

    seen: list[str] = []
    return during


def test_the_steps_that_were_asked_for_are_recorded_and_no_others(tmp_path: Path) -> None:
    callback = Played(first=2, last=3, folder=tmp_path)
    recorded: list[list[str]] = []
    module = TinyModule(during=lambda where: recorded.append(list(callback.calls)) if where == "backward" else None)
    trainer(callback, max_steps=6, accumulate_grad_batches=2).fit(module, batches(12))
    begun = [["begin"]] * 4  # two micro-batches of two steps
    assert recorded == [[]] * 4 + begun + [["begin", "take", "end"]] * 4
    assert [step for step in range(6) if callback.disturbs_timing(step)] == [2, 3]
    page, file = callback.files
    assert [file.name for file in callback.files] == ["memory_snapshot.html", "memory_snapshot.pickle"]
    assert load_snapshot(file) == naive() and "steps 2 to 3" in page.read_text()
    assert [text for _, text in chart_data(page)[0]["marks"]] == ["step 2", "step 3"]
    assert callback.result() == {"files": [str(page), str(file)]}


def test_a_run_that_ends_or_dies_before_leaves_what_there_is(tmp_path: Path) -> None:
    short = Played(first=2, last=30, folder=tmp_path / "short")
    trainer(short, max_steps=4).fit(TinyModule(), batches(4))
    dead = Played(first=0, last=3, folder=tmp_path / "dead")
    with pytest.raises(RuntimeError, match="the run dies"):
        trainer(dead, max_steps=4).fit(TinyModule(during=at(1, error=True)), batches(4))
    for callback in (short, dead):
        assert callback.calls == ["begin", "take", "end"]
        assert all(file.exists() for file in callback.files) and len(callback.files) == 2


def test_somebody_elses_recording_goes_on(tmp_path: Path) -> None:
    callback = Played(first=0, last=1, folder=tmp_path, foreign=True)
    trainer(callback).fit(TinyModule(), batches(4))
    assert callback.calls == ["begin", "take"] and len(callback.files) == 2


def test_a_snapshot_that_cannot_be_written_does_not_end_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    callback = Played(first=0, last=1, folder=tmp_path / "file")
    run = trainer(callback)
    run.fit(TinyModule(), batches(4))
    assert run.global_step == 4 and callback.calls == ["begin", "take", "end"]
    assert "Played stopped measuring after this error" in caplog.text


def test_on_a_cpu_it_says_that_there_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback = MemorySnapshot(first=0, last=1, folder=tmp_path)
    trainer(callback).fit(TinyModule(), batches(4))
    assert "torch records allocations of CUDA devices alone: there will be no snapshot." in caplog.text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"first": 3, "last": 2}, "last must be a whole number from 3 on, got 2: leave it out"),
        ({"first": -1}, "first must be a whole number from 0 on, got -1: leave it out"),
        ({"limit": 5}, "limit must be a size such as 24GiB, 80GB or a number of bytes, got 5"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        MemorySnapshot(**wrong)


@pytest.mark.gpu
def test_on_a_gpu_the_snapshot_has_what_the_allocator_says(tmp_path: Path) -> None:
    callback = MemorySnapshot(first=2, last=3, folder=tmp_path)
    torch.cuda.reset_peak_memory_stats()
    trainer(callback, accelerator="cuda").fit(TinyModule(width=512), batches(4))
    page, file = callback.files
    recording = replay(load_snapshot(file))
    assert recording.peak == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.02)
    assert any("tiny_training.py" in site.name for site in recording.sites)
    (second, third), last = chart_data(page)[0]["marks"], recording.times[-1]
    assert (second[1], third[1]) == ("step 2", "step 3")
    # One clock: step 2 begins just before its first event (a millisecond for how torch converts its events' times).
    assert 0 <= second[0] < 1e-3 and second[0] < third[0] < last, (second, third, last)
    assert not torch._C._cuda_isHistoryEnabled()
