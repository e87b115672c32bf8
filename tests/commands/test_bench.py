"""`flash-bench` as a person types it."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from flash_train.bench.cases import read_case
from flash_train.bench.contestants import CONTESTANTS, Contestant
from flash_train.commands.bench import main
from flash_train.config import config_root
from tests.commands.conftest import Command

PRESETS = sorted((config_root() / "conf" / "preset").glob("*.yaml"))
QUICK = ("seconds=1e-6", "rounds=2", "hydra.run.dir=out", "contestants=[flash,sdpa,naive,flash_attn_2]")
SHAPES = "preset.cases=[{B:2,H:4,G:2,T:37,D:16,causal:true},{B:1,H:2,T:41,D:16,documents:[20,21]}]"


def test_one_command_leaves_numbers_a_chart_and_a_table(command: Command, tmp_path: Path) -> None:
    answer = command(main, *QUICK, SHAPES)
    assert answer.code == 0, answer.err
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [(row["name"], row["contestant"], row["status"], row.get("direction")) for row in found["rows"]] == [
        *(
            ("B2 H4 G2 T37 D16 causal", name, "ok", direction)
            for name in ("flash", "sdpa", "naive")
            for direction in ("forward", "backward", "both")
        ),
        ("B2 H4 G2 T37 D16 causal", "flash_attn_2", "refused", None),
        *(("B1 H2 T41 D16 full 2 documents of 20 to 21", "flash", "ok", d) for d in ("forward", "backward", "both")),
        ("B1 H2 T41 D16 full 2 documents of 20 to 21", "sdpa", "refused", None),
        *(("B1 H2 T41 D16 full 2 documents of 20 to 21", "naive", "ok", d) for d in ("forward", "backward", "both")),
        ("B1 H2 T41 D16 full 2 documents of 20 to 21", "flash_attn_2", "refused", None),
    ]
    flash = found["rows"][1]
    assert flash["ran"] == "tiled" and len(flash["rounds"]) == 2 and flash["peak_bytes"] > 0
    assert flash["flops_per_second"] == pytest.approx(flash["flops"] / flash["seconds"])
    matmul = found["matmul_flops_per_second"]
    assert flash["matmul_share"] == pytest.approx(flash["flops_per_second"] / matmul["median"])
    assert len(matmul["rounds"]) == 2 and found["environment"]["torch"] == torch.__version__
    assert found["command"].startswith("flash-bench seconds=1e-6") and "median over the rounds" in found["statistic"]
    assert all(row["errors"]["found"].keys() == {"output", "dq", "dk", "dv"} for row in found["rows"][:9])
    lines = list(csv.DictReader((tmp_path / "out" / "results.csv").read_text().splitlines()))
    assert [line["contestant"] for line in lines] == [row["contestant"] for row in found["rows"]]
    assert float(lines[1]["seconds"]) == flash["seconds"]
    assert (tmp_path / "out" / "speed.png").stat().st_size > 10_000
    assert "flash (tiled)" in answer.out and "B1 H2 T41 D16 full 2 documents of 20 to 21" in answer.out
    assert "sdpa: refused: implementation='sdpa' does not take documents" in answer.out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["results.csv", "results.json", "speed.png"]


def test_it_imports_neither_wandb_nor_lightning(tmp_path: Path) -> None:
    script = """
import sys
from flash_train.commands.bench import main
try:
    main()
except SystemExit as stop:
    assert not stop.code
for module in ("wandb", "lightning", "pytorch_lightning"):
    assert module not in sys.modules, module
assert "matplotlib" in sys.modules and "torch" in sys.modules
"""
    answer = subprocess.run(
        [sys.executable, "-c", script, *QUICK, SHAPES], cwd=tmp_path, capture_output=True, text=True
    )
    assert answer.returncode == 0, answer.stderr


def test_help_configuration_and_completion_come_without_torch() -> None:
    script = """
import sys
from flash_train.commands.bench import main
for arguments in (["--help"], ["--cfg", "job", "preset=peers"], ["-sc", "install=bash"], ["preset=gpt3"]):
    sys.argv[1:] = arguments
    try:
        main()
    except SystemExit as stop:
        assert not stop.code or arguments == ["preset=gpt3"], arguments
for module in ("torch", "triton", "matplotlib", "numpy"):
    assert module not in sys.modules, module
"""
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    assert "T: 16384" in answer.stdout and "Presets: fa3-paper" in answer.stdout


@pytest.mark.parametrize(("name", "code"), [("flash", 1), ("naive", 0)])
def test_the_exit_code_says_whether_our_own_answers_were_right(
    command: Command, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    monkeypatch.setitem(CONTESTANTS, name, lambda case, inputs: Contestant(lambda q, k, v: q + k + v))
    answer = command(main, *QUICK, "preset.cases=[{B:1,H:2,T:37,D:16}]")
    assert answer.code == code and f"{name}: wrong: output is off by" in answer.out


WRONG: dict[tuple[str, ...], str] = {
    ("preset=gpt3",): "preset has no 'gpt3'; did you mean gpt2?",
    ("contestants=[flesh]",): "contestants must be some of flash, hopper, triton,",
    ("contestants=flash",): "contestants must be a list of some of flash,",
    ("directions=[sideways]",): "directions must be some of forward, backward, both, got 'sideways'",
    ("preset.cases=[]",): "preset.cases must be a list of shapes like {B: 2,",
    ("preset.cases=[{B:1,H:2,T:3}]",): "preset.cases[0] must give B, H, T and D, and D is missing",
    ("rounds=0",): "rounds must be a whole number from 1 on, got 0",
    ("seconds=-1",): "seconds must be a positive number, got -1",
    ("dtype=fp8",): "dtype must be one of bf16, fp16, fp32, got 'fp8'",
    ("reference=best",): "reference must be one of flash,",
    ("device=auto",): "device must be cpu or cuda, got 'auto'",
    ("graph=true",): "graph=true replays a CUDA graph and needs device=cuda, got device=cpu",
    ("graph=maybe",): "graph must be true or false, got 'maybe'",
    ("roundz=3",): "there is no 'roundz'; did you mean rounds?",
}


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_a_wrong_command_line_is_answered_in_one_line(command: Command, arguments: tuple[str, ...]) -> None:
    answer = command(main, *arguments)
    assert answer.code == 2
    (line,) = [line for line in answer.err.splitlines() if line]
    assert line.startswith("flash-bench: ") and WRONG[arguments] in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_missing_gpu_is_said_in_one_line(command: Command) -> None:
    answer = command(main, "device=cuda")
    assert (answer.code, answer.err.strip()) == (
        2,
        "flash-bench: device=cuda needs a CUDA device and torch sees none; choose device=cpu",
    )


@pytest.mark.parametrize("file", PRESETS, ids=lambda file: file.stem)
def test_every_preset_is_made_of_problems_and_named_in_the_help(file: Path) -> None:
    cases = [read_case(node, key="cases") for node in yaml.safe_load(file.read_text())["cases"]]
    assert len(set(map(str, cases))) == len(cases), "two of its problems have one name"
    assert f" {file.stem}," in (config_root() / "conf" / "bench.yaml").read_text().replace("window.", "window,")
