"""`flash-traffic`: what ncu counts is read right, put to the right call, and what goes wrong is told in one line."""

import csv
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_train.bench import settings
from flash_train.bench.contestants import CONTESTANTS, Contestant
from flash_train.bench.formula import Tiles, hopper_bytes, naive_bytes, triton_bytes
from flash_train.bench.nsight import Kernel, passes, read_kernels
from flash_train.bench.observed import mark, run
from flash_train.bench.settings import Contest
from flash_train.bench.traffic import join
from flash_train.commands.traffic import main
from flash_train.ops.attention import flash_attention
from flash_train.ops.kernels.hopper.tables import BACKWARD, FORWARD
from tests.commands.conftest import Command

CASES = [{"B": 2, "H": 4, "G": 2, "T": 37, "D": 16, "causal": True}, {"B": 1, "H": 2, "T": 70, "D": 16}]

# as Nsight Compute 2025.3 writes it, with fewer columns
TABLE = """==PROF== Connected to process 41 (/usr/bin/python3.12)
==PROF== Profiling "forward_kernel" - 0: 0%....50%....100% - 1 pass
==PROF== Profiling "dq_kernel" - 1: 0%....50%....100% - 2 passes
"ID","Process ID","thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg",\
"Id:Domain:Start/Stop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg","Kernel Name","Grid Size",\
"dram__bytes_read.sum","dram__bytes_write.sum"
"","","","","","","byte","Kbyte"
"0","41","","1  ""<default domain>:traffic.0.flash.forward.call:none:none:none:none:none:none"" ","forward_kernel",\
"(64, 1, 1)","1,234,567","2.5"
"1","41","41  "<default domain>:outer:none" ","2  "<default domain>:traffic.0.flash.backward.call:none" ","dq_kernel",\
"(64, 1, 1)","96","0"
==PROF== Disconnected from process 41
"""


def contest(**given: Any) -> Contest:
    """As `read_traffic`, on a CPU."""
    config = {
        "preset": {"cases": CASES},
        "contestants": ["naive", "flash"],
        "directions": ["forward", "backward"],
        "dtype": "bf16",
        "compile": {"enabled": False, "mode": "default"},
        "seed": 3,
        "device": "cpu",
    }
    return settings._read_contest(config | given, ("forward", "backward"))


def test_the_table_is_read_by_its_headings_in_its_units_with_its_ranges() -> None:
    first, second = read_kernels(TABLE)
    assert (first.name, first.read, first.written) == ("forward_kernel", 1234567, 2500)
    assert (second.name, second.read, second.written) == ("dq_kernel", 96, 0)
    assert "traffic.0.flash.forward.call" in first.ranges and "traffic.0.flash.backward.call" in second.ranges
    assert passes(TABLE) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("dram__bytes_write.sum", "other"), "ncu wrote no table with Kernel Name, dram__bytes_read.sum"),
        (('"1,234,567"', '"n/a"'), "ncu gave no number of dram__bytes_read.sum, but 'n/a'"),
        (
            ('"byte"', '"sector"'),
            "ncu's unit of dram__bytes_read.sum must be byte or a multiple like Mbyte, got 'sector'",
        ),
        ((TABLE, "==WARNING== No kernels were profiled."), "==WARNING== No kernels were profiled."),
    ],
    ids=["metric", "number", "unit", "nothing"],
)
def test_a_table_that_says_nothing_is_refused(change: tuple[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_kernels(TABLE.replace(*change))


class Notes:
    """An observer that writes down what happens."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def sweep(self) -> None:
        self.events.append("sweep")

    @contextmanager
    def stretch(self, name: str) -> Iterator[None]:
        self.events.append(f"[ {name}")
        yield
        self.events.append("]")


def test_each_call_is_made_once_between_its_marks_with_the_cache_swept_around_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notes = Notes()

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            notes.events.append("forward")
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            notes.events.append("backward")
            return gradients[0]

    def prepare(case: Any, inputs: Any) -> Contestant:
        return Contestant(lambda q, k, v: Noting.apply(flash_attention(q, k, v, implementation="naive")))

    monkeypatch.setitem(CONTESTANTS, "naive", prepare)
    asked = contest(contestants=["naive", "flash_packed"], preset={"cases": CASES[1:]})
    found = run(asked, notes)
    begin = notes.events.index("sweep")
    assert set(notes.events[:begin]) == {"forward", "backward"}  # when it was compiled and checked
    assert notes.events[begin:] == [
        "sweep", "[ traffic.0.naive.forward.call", "forward", "]", "[ traffic.0.naive.forward.rest", "sweep",
        "]", "forward", "sweep", "[ traffic.0.naive.backward.call", "backward", "]",
        "[ traffic.0.naive.backward.rest", "sweep", "]",
    ]  # fmt: skip
    assert [(entry["contestant"], entry["status"]) for entry in found] == [("naive", "ok"), ("flash_packed", "refused")]


def counted(name: str, direction: str, *kernels: str) -> Iterator[Kernel]:
    """Of case 1: 100 bytes read and 10 written by each kernel, then 5,000 read and 3 written by what sweeps."""
    for kernel in kernels:
        yield Kernel(kernel, f"1 <default domain>:{mark(1, name, direction, 'call')}:none", 100, 10)
    yield Kernel("reduce_kernel", f"2 <default domain>:{mark(1, name, direction, 'rest')}:none", 5000, 3)


def test_a_call_has_its_kernels_bytes_and_what_it_left_in_the_cache_to_be_written() -> None:
    asked = contest()
    entry = {"case": 1, "ran": None, "status": "ok", "why": None}
    kernels = [
        *counted("naive", "forward", "gemm", "softmax", "gemm"),
        *counted("naive", "backward", *["gemm"] * 4),
        *counted("flash", "forward", "forward_kernel"),
        *counted("flash", "backward", "delta_kernel", "dkdv_kernel", "dq_kernel"),
        Kernel("unmarked", "", 10**9, 10**9),
    ]
    found = [entry | {"contestant": name} for name in ("naive", "flash")]
    rows = list(join(asked, found, kernels))
    assert [(row.contestant, row.direction, row.read, row.written, row.total) for row in rows] == [
        ("naive", "forward", 300, 33, 333),
        ("naive", "backward", 400, 43, 443),
        ("flash", "forward", 100, 13, 113),
        ("flash", "backward", 300, 33, 333),
    ]
    tiles: dict[str, Tiles] = dict.fromkeys(
        ("forward", "dkdv", "dq"), Tiles(32, 16)
    )  # the launch table's for the interpreter
    assert [row.formula for row in rows] == [
        *(naive_bytes(asked.cases[1], direction, 2) for direction in asked.directions),
        *(triton_bytes(asked.cases[1], direction, 2, tiles) for direction in asked.directions),
    ]
    with pytest.raises(ValueError, match="ncu counted no kernel of flash's backward at B1 H2 T70 D16 full"):
        list(join(asked, found, kernels[:11]))


@pytest.mark.parametrize(
    ("D", "width", "wide", "keys"), [(16, 64, "", 128), (200, 256, "wide_", 64)], ids=["64", "256"]
)
def test_the_formula_is_that_of_the_kernels_that_ran(
    monkeypatch: pytest.MonkeyPatch, D: int, width: int, wide: str, keys: int
) -> None:
    monkeypatch.setitem(FORWARD, width, FORWARD[width]._replace(consumers=1, block_s=32))
    monkeypatch.setitem(BACKWARD, width, BACKWARD[width]._replace(block_t=32))
    asked = contest(contestants=["flash", "flash_attn_3"], preset={"cases": [CASES[0], CASES[1] | {"D": D}]})
    found = [{"case": 1, "contestant": name, "ran": None, "status": "ok", "why": None} for name in asked.contestants]
    kernels = [
        *counted("flash", "forward", "hopper_forward_kernel"),
        *counted("flash", "backward", "rows_kernel", f"hopper_{wide}backward_kernel", "finish_kernel"),
        *counted("flash_attn_3", "forward", "forward_kernel"),
        *counted("flash_attn_3", "backward", "backward_kernel"),
    ]
    assert [row.formula for row in join(asked, found, kernels)] == [
        hopper_bytes(asked.cases[1], "forward", 2, Tiles(64, 32)),
        hopper_bytes(asked.cases[1], "backward", 2, Tiles(32, keys)),
        None,
        None,
    ]


FAKE = """#!{python}
# In the place of ncu: runs the command's calls on a CPU, and writes the table of a kernel for each stretch.
import csv, json, sys
from contextlib import contextmanager
from flash_train.bench import observed, settings

arguments = sys.argv[1:]
assert arguments[arguments.index("--clock-control") + 1] == "none", arguments
config, report = arguments[arguments.index("flash_train.bench.observed") + 1 :]
rows = []

class Observer:
    def sweep(self):
        pass

    @contextmanager
    def stretch(self, name):
        yield
        kernel = dict(forward="forward_kernel", backward="dkdv_kernel")[name.split(".")[3]]
        rows.append([len(rows), f'1  "<default domain>:{{name}}:none:none" ', kernel, "2", "1"])

contest = settings._read_contest({{**json.loads(config), "device": "cpu"}}, ("forward", "backward"))
open(report, "w").write(json.dumps(observed.run(contest, Observer())))
with open(arguments[arguments.index("--log-file") + 1], "w") as file:
    print("==PROF== Connected to process 1", file=file)
    writer = csv.writer(file, quoting=csv.QUOTE_ALL)
    writer.writerow(["ID", "Id:Domain:Start/Stop_Range:PL_Type", "Kernel Name", "dram__bytes_read.sum",
                     "dram__bytes_write.sum"])
    writer.writerow(["", "", "", "Mbyte", "byte"])
    writer.writerows(rows)
"""


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """`flash-traffic` believes that this is a GPU."""
    read = settings._read_contest
    monkeypatch.setattr(
        settings, "read_traffic", lambda config: read({**config, "device": "cpu"}, ("forward", "backward"))
    )


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.mark.usefixtures("on_a_cpu")
def test_one_command_leaves_numbers_a_chart_and_a_table(command: Command, tmp_path: Path) -> None:
    ncu = program(tmp_path / "fake ncu", FAKE.format(python=sys.executable))
    shapes = "preset.cases=[{B:2,H:4,T:37,D:16,causal:true},{B:1,H:2,T:64,D:16,documents:[20,44]}]"
    answer = command(main, f"ncu='{ncu}'", shapes, "contestants=[sdpa,naive,flash]", "hydra.run.dir=out")
    assert answer.code == 0, answer.err
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [(row["name"], row["contestant"], row["status"], row["direction"]) for row in found["rows"]] == [
        (name, contestant, status, direction)
        for name, sdpa in (("B2 H4 T37 D16 causal", "ok"), ("B1 H2 T64 D16 full 2 documents of 20 to 44", "refused"))
        for contestant, status in (("flash", "ok"), ("sdpa", sdpa), ("naive", "ok"))
        for direction in ("forward", "backward")
    ]
    flash, refused = found["rows"][0], found["rows"][8]
    assert (flash["read_bytes"], flash["written_bytes"], flash["total_bytes"]) == (2_000_000, 2, 2_000_002)
    assert flash["kernels"] == ["forward_kernel"] and flash["formula_bytes"] > flash["least_bytes"]
    assert refused["total_bytes"] is None and "does not take documents" in refused["why"]
    assert (found["passes"], found["dtype"], found["environment"]["torch"]) == (1, "bfloat16", torch.__version__)
    lines = list(csv.DictReader((tmp_path / "out" / "results.csv").read_text().splitlines()))
    assert [line["total_bytes"] for line in lines] == [str(row["total_bytes"] or "") for row in found["rows"]]
    assert (tmp_path / "out" / "traffic.png").stat().st_size > 10_000
    assert "1.91 MiB" in answer.out and "sdpa: refused: implementation='sdpa' does not take documents" in answer.out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "ncu.csv", "results.csv", "results.json", "traffic.png",
    ]  # fmt: skip


WRITES = '#!/bin/sh\nwhile [ "$1" != --log-file ]; do shift; done\necho "{text}" > "$2"\nexit {code}\n'


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user has no permission", 1, "may not read this GPU's counters"),
        ("==ERROR== LibraryNotLoaded", 9, "ended with exit code 9; ncu says: LibraryNotLoaded"),
        ("==PROF== Disconnected", 1, "the process that ncu observed ended with exit code 1"),
    ],
    ids=["permission", "ncu", "the process"],
)
def test_what_ncu_cannot_do_is_said_in_one_line(
    command: Command, tmp_path: Path, text: str, code: int, message: str
) -> None:
    ncu = program(tmp_path / "ncu", WRITES.format(text=text, code=code))
    answer = command(main, f"ncu={ncu}")
    assert answer.code == (2 if "NVGPUCTRPERM" in text else 1)
    (line,) = answer.err.splitlines()
    assert line.startswith("flash-traffic: ") and message in line


@pytest.mark.usefixtures("on_a_cpu")
def test_a_missing_ncu_is_said_in_one_line(command: Command) -> None:
    answer = command(main, "ncu=ncu-of-nobody")
    assert answer.code == 2 and answer.err.startswith("flash-traffic: ncu=ncu-of-nobody is no program on the PATH; ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_missing_gpu_is_said_in_one_line(command: Command) -> None:
    answer = command(main)
    assert answer.code == 2
    (line,) = answer.err.splitlines()
    assert line.startswith("flash-traffic: ") and "torch sees no CUDA device; run it where there is one" in line


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"preset": {"cases": [CASES[0], CASES[0] | {"B": 1}]}}, r"must differ in T, by .*, got T=\[37, 37\]"),
        ({"directions": ["both"]}, "directions must be some of forward, backward, got 'both'"),
    ],
    ids=["T", "directions"],
)
def test_what_cannot_be_drawn_is_refused(given: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(settings, "_device", lambda name: torch.device("cpu"))
    rest = {"contestants": None, "directions": ["forward"], "dtype": "bf16", "seed": 1, "preset": {"cases": CASES}}
    with pytest.raises(ValueError, match=message):
        settings.read_traffic(rest | {"compile": {"enabled": False}} | given)


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("ncu") is None, reason="needs ncu")
def test_on_a_gpu_naive_moves_the_matrices_and_flash_does_not(command: Command, tmp_path: Path) -> None:
    shapes = "preset.cases=[{B:16,H:16,T:1024,D:64,causal:true}]"
    answer = command(main, shapes, "hydra.run.dir=out")
    assert answer.code == 0, answer.err
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["passes"] == 1
    matrix = 16 * 16 * 1024 * 1024 * 2  # 512 MiB, more than any cache
    for row in found["rows"]:
        least = row["least_bytes"]
        if row["contestant"] == "naive":
            assert row["total_bytes"] > 4 * matrix
        else:
            # the inputs must come in and the results go out; a cache then saves some of what is read again
            assert 0.9 * least < row["total_bytes"] < 1.1 * row["formula_bytes"] < matrix * 4
