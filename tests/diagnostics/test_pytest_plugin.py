"""The gate: what is over its limit or its baseline fails, and nobody else notices that it is there."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from flash_train.diagnostics.peak import measured_peak
from flash_train.diagnostics.pytest_plugin import Gate

PLUGIN = "flash_train.diagnostics.pytest_plugin"
ROOT = Path(__file__).parents[2]
KIB = 1024

LIMITS = """
import pytest, torch

@pytest.mark.peak_memory("300 KiB")
def test_within():
    torch.ones(256, 256)  # 256 KiB

@pytest.mark.peak_memory("500 KiB")
def test_over():
    x = torch.ones(256, 256)
    x @ x

@pytest.mark.peak_memory("1 KiB")
def test_its_own_failure():
    torch.ones(256, 256)
    assert False, "its own reason"

@pytest.mark.peak_memory("1 KiB")
def test_skipped():
    torch.ones(256, 256)
    pytest.skip("not here")

def test_parts(peak_memory):
    x = torch.ones(256, 256)  # before
    with peak_memory("sum", limit="256KiB") as peak:
        x + x
    assert peak.size == 256 * 1024
    with peak_memory("product", limit="300 KiB"):
        x @ x + x

class Model(torch.nn.Linear):
    def training_step(self, batch):
        return self(batch).square().mean()

def predict(peak_memory):
    with torch.device("meta"):
        model, batch = Model(65536, 65536), torch.empty(1024, 65536)
    optimizer = lambda module: torch.optim.AdamW(module.parameters())
    assert peak_memory.predict(model, batch, optimizer=optimizer, precision="bf16-mixed").peak > 4 * 4 * 2**32

@pytest.mark.peak_memory("100GiB")
def test_it_fits(peak_memory):
    predict(peak_memory)

@pytest.mark.peak_memory("64GiB")
def test_it_does_not_fit(peak_memory):
    predict(peak_memory)
"""
NO_GATES = {
    "with peak_memory(limit='40'): pass": "limit must be a size such as 24GiB, 80GB or a number of bytes, got '40'",
    "with peak_memory(tolerance=3): pass": "tolerance must be a share of the baseline from 0 to 1, got 3: 0.01 is 1 %",
    "with peak_memory(device='meta'): pass": "device must be cpu or cuda, got meta",
    "with peak_memory(device='tpu'): pass": "device must be cpu or cuda, got 'tpu': torch knows no such",
    "with peak_memory(limit=1000): pass": "or a number of bytes, got 1000: below a million give the unit",
    "with peak_memory(limit='1GiB'): pass": "measured nothing: no tensor was made on cpu",
    "for _ in 1, 2:\n        with peak_memory(limit='1GiB'): torch.ones(3)": "names of their own, got '' twice",
    "with peak_memory(limit='1GiB'): peak_memory.predict(0, 0)": "call predict outside of what is measured",
}
BASELINE = """
import pytest, torch

@pytest.mark.peak_memory
def test_whole():
    torch.ones(1000) + 1

@pytest.mark.peak_memory(tolerance=0.01)
def test_tolerant():
    torch.ones(1000)

def test_part(peak_memory):
    with peak_memory("part"):
        torch.ones(500)

@pytest.mark.peak_memory
def test_new():
    torch.ones(10)
"""
WRITTEN = {
    "test_it.py::test_new": {"cpu": 40},
    "test_it.py::test_part part": {"cpu": 2000},
    "test_it.py::test_tolerant": {"cpu": 4000},
    "test_it.py::test_whole": {"cpu": 8000},
}


def outcomes(folder: Path, source: str, *arguments: str) -> tuple[dict[str, str], str]:
    """What became of each test ("" where it passed), and all that was printed. In a process of its own."""
    (folder / "test_it.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-p", PLUGIN, "-p", "no:cacheprovider", "--strict-markers", *arguments]
    answer = subprocess.run(
        [*command, "--junitxml=report.xml"],
        cwd=folder, env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    report = ElementTree.parse(folder / "report.xml")
    found = {}
    for case in report.iter("testcase"):
        faults = [fault for kind in ("failure", "error", "skipped") for fault in case.iter(kind)]
        found[case.attrib["name"]] = "".join(f"{fault.attrib['message']}\n{fault.text}" for fault in faults)
    return found, answer.stdout


def test_what_is_over_its_limit_fails_and_says_what_filled_it(tmp_path: Path) -> None:
    found, _ = outcomes(tmp_path, LIMITS)
    assert found["test_within"] == found["test_it_fits"] == ""
    assert (
        "peak memory is 512 KiB (524288 bytes, cpu), over the limit of 500 KiB; "
        "largest then: 256 KiB [256, 256] float32 (ones); 256 KiB [256, 256] float32 (mm)"
    ) in found["test_over"]
    assert "peak memory of product is 512 KiB (524288 bytes, cpu), over the limit of 300 KiB" in found["test_parts"]
    assert "bytes, predicted), over the limit of 64.0 GiB; largest then: 16.0 GiB" in found["test_it_does_not_fit"]
    # A test that ends otherwise keeps its own reason.
    assert "its own reason" in found["test_its_own_failure"] and "not here" in found["test_skipped"]
    assert "over the limit" not in found["test_its_own_failure"] + found["test_skipped"]


def test_what_gates_nothing_fails(tmp_path: Path) -> None:
    tests = [f"def test_{index}(peak_memory):\n    {body}\n" for index, body in enumerate(NO_GATES)]
    found, _ = outcomes(tmp_path, "import torch\n" + "".join(tests))
    for answer, text in zip(found.values(), NO_GATES.values(), strict=True):
        assert text in answer


MARKS = {
    "@pytest.mark.peak_memory('1GiB')\ndef test_0(peak_memory): pass": "has the mark and the fixture, and did",
    "@pytest.mark.peak_memory(limt='1GiB')\ndef test_1(): pass": "limit, device= and tolerance=, and got an un",
    "@pytest.mark.peak_memory('1GiB', '2GiB')\ndef test_2(): pass": "device= and tolerance=, and takes from 0 to",
    "@pytest.mark.peak_memory('1 PiB')\ndef test_3(): pass": "the unit is one of B, KB, KiB",
}


def test_a_mark_that_gates_nothing_fails(tmp_path: Path) -> None:
    found, _ = outcomes(tmp_path, "import pytest, torch\n" + "\n".join(MARKS))
    for answer, text in zip(found.values(), MARKS.values(), strict=True):
        assert text in answer


@pytest.mark.parametrize("broken", ["[1]", '{"test_it.py::test_new": 3}', '{"test_it.py::test_new": {"cpu": 0}}', "["])
def test_a_baseline_file_that_is_none_is_said_to_be(tmp_path: Path, broken: str) -> None:
    (tmp_path / "baseline.json").write_text(broken)
    config: Any = SimpleNamespace(rootpath=tmp_path, getini=lambda _: "baseline.json", getoption=lambda _: False)
    with pytest.raises(ValueError, match=r"baseline.json must hold \{test: \{source: bytes\}\} as JSON, and does not"):
        Gate(config).baseline  # noqa: B018


def test_a_baseline_that_cannot_be_written_fails_the_run_in_a_sentence(tmp_path: Path) -> None:
    option = "memory_baseline=test_it.py/baseline.json"
    found, printed = outcomes(tmp_path, BASELINE, "-k", "new", "--update-memory-baseline", "-o", option)
    assert found == {"test_new": ""} and "no peaks were written to" in printed and "1 passed" in printed


def test_a_baseline_is_written_on_demand_and_then_holds_to_the_byte(tmp_path: Path) -> None:
    file = tmp_path / "memory-baseline.json"
    kept = {"test_other.py::test_kept": {"cpu": 5}, "test_it.py::test_part part": {"cuda, a GPU": 7}}
    file.write_text(json.dumps(kept | {"test_it.py::test_whole": {"cpu": 5}}))
    found, printed = outcomes(tmp_path, BASELINE, "--update-memory-baseline")
    assert set(found.values()) == {""} and "memory-baseline.json: 4 peaks written" in printed
    whole = json.loads(file.read_text())
    assert whole == WRITTEN | kept | {"test_it.py::test_part part": {"cpu": 2000, "cuda, a GPU": 7}}

    for name, change in {"whole": -1, "tolerant": -1, "part part": 2000}.items():
        whole[f"test_it.py::test_{name}"]["cpu"] += change
    del whole["test_it.py::test_new"]
    file.write_text(json.dumps(whole))
    found, printed = outcomes(tmp_path, BASELINE)
    assert "is 7.81 KiB (8000 bytes, cpu), 0.013 % over its baseline of 7.81 KiB (7999 bytes)" in found["test_whole"]
    assert "if it should be, run pytest --update-memory-baseline" in found["test_whole"]
    assert found["test_tolerant"] == found["test_part"] == ""
    assert "test_it.py::test_part part: peak memory is 1.95 KiB instead of 3.91 KiB; pytest --update-memory" in printed
    assert "memory-baseline.json knows no such peak: run pytest --update-memory-baseline" in found["test_new"]
    assert json.loads(file.read_text()) == whole


def test_several_processes_write_one_baseline(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    outcomes(tmp_path, BASELINE, "-p", "xdist.plugin", "-n", "2", "--update-memory-baseline")
    assert json.loads((tmp_path / "memory-baseline.json").read_text()) == WRITTEN


def test_who_does_not_use_it_imports_no_torch_and_gets_no_file(tmp_path: Path) -> None:
    source = """
import sys

def test_it():
    assert not {"torch", "numpy", "lightning"} & set(sys.modules)
    assert len([name for name in sys.modules if name.startswith("flash_train")]) == 5
"""
    found, _ = outcomes(tmp_path, source, "--update-memory-baseline")
    assert found == {"test_it": ""}
    assert {file.name for file in tmp_path.iterdir()} <= {"test_it.py", "report.xml", "__pycache__"}


def test_pytest_finds_it_by_its_entry_point() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"flash_train": PLUGIN}


def test_a_stretch_counts_what_is_made_in_it_and_not_what_was_there() -> None:
    model, x = nn.Linear(64, 64, bias=False), torch.ones(64, 64)
    model(x).sum().backward()
    with measured_peak() as peak, torch.no_grad():
        torch._foreach_add_([model.weight, model.weight.grad], 1)  # pyright: ignore
        y = model.weight.t() @ x.view(-1, 64)
        y.view(-1).add_(1)
    assert peak.size == y.untyped_storage().nbytes() == 16 * KIB and len(peak.blocks) == 1


def test_a_compiled_module_is_measured_as_it_is_written() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.ones(64, 64)
    peaks = []
    for each in (model, torch.compile(model, backend="eager")):
        each(x).sum().backward()
        with measured_peak() as peak:
            each(x).sum().backward()
        peaks.append(peak.size)
    assert peaks[0] == peaks[1] > 0


@pytest.mark.gpu
def test_on_a_gpu_it_is_the_allocators_peak_above_what_was_there() -> None:
    kept = torch.ones(2**20, device="cuda")
    for _ in range(2):  # cuBLAS's workspaces are not the first one's
        with measured_peak("cuda") as peak:
            x = kept.view(1024, 1024)
            x = x @ x
            torch.empty(2**20, device="cuda")
        assert peak.size == 2 * 4 * 2**20 and peak.source.startswith("cuda, NVIDIA")
        del x
