"""The program that times the chunked loss beside others'."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flash_train.bench.contestants import Unavailable
from tests.training import loss_benchmark
from tests.training.loss_benchmark import TINY_CHECKED, TINY_SIZES, Entry


@pytest.fixture
def run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, dict[str, Any]]]:
    """The program in this process, with small tensors: its exit code, and results.json."""

    def run(*names: str, device: str = "cpu") -> tuple[int, dict[str, Any]]:
        arguments = ["--out", str(tmp_path / "out"), "--device", device, "--tiny", "--rounds", "2"]
        chosen = ["--seconds", "0.01", "--chunk-rows", "64", "--contestants", *names]
        monkeypatch.setattr(sys, "argv", ["loss_benchmark", *arguments, *chosen])
        code = loss_benchmark.main()
        return code, json.loads((tmp_path / "out" / "results.json").read_text())

    return run


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_our_loss_is_checked_and_timed_beside_the_plain_one(device: str, run_here: Any, tmp_path: Path) -> None:
    code, found = run_here("plain", "chunked", device=device)
    assert code == 0 and found["fault"] is None
    plain, chunked = found["checked"]
    assert (plain["name"], chunked["name"], chunked["size"]) == ("plain", "chunked", list(TINY_CHECKED))
    assert all(1e-4 < plain["errors"][what] < 1e-2 for what in ("d_hidden", "d_weight"))  # of bf16, relative
    assert 0 < chunked["ratios"]["d_hidden"] <= 2 and 0 < chunked["ratios"]["d_weight"] <= 2
    for entry in found["measured"]:
        assert entry["size"] == list(TINY_SIZES[0]) and len(entry["rounds_ms"]) == 2
        assert all(0 < ms < 1e4 for ms in entry["rounds_ms"])
    N, V, C = TINY_SIZES[0]
    plain, chunked = (entry["peak_bytes"] for entry in found["measured"])
    assert plain > (2 + 4 + 4) * N * V  # logits in bf16, in fp32, and their log-softmax
    assert chunked > 2 * V * C  # the weight's gradient
    assert chunked < plain or device == "cuda"  # where cuBLAS may take more for a product than these small tensors
    assert "chunked loses at most 2 times what plain loses" in (tmp_path / "out" / "results.md").read_text()


def test_a_gradient_that_is_off_is_a_fault_and_the_exit_code_says_so(
    run_here: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = loss_benchmark.chunked_cross_entropy
    monkeypatch.setattr(
        loss_benchmark, "chunked_cross_entropy", lambda h, w, *rest, **options: own(h, 1.02 * w, *rest, **options)
    )
    code, found = run_here("plain", "chunked")
    assert code == 1 and found["fault"].startswith("chunked: ") and f"DOES NOT HOLD: {found['fault']}" in (
        " ".join(capsys.readouterr().out.split())
    )  # fmt: skip


def test_what_is_not_there_or_breaks_is_listed_with_the_reason_and_the_others_go_on(
    run_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent() -> Any:
        raise Unavailable("no such library")

    def broken() -> Any:
        def loss(*_: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory.")

        return loss

    present = loss_benchmark.contestants(64)
    monkeypatch.setattr(loss_benchmark, "contestants", lambda rows: present | {"liger": absent, "compiled": broken})
    code, found = run_here("plain", "liger", "compiled", "chunked")
    assert code == 0
    assert [(entry["name"], entry["status"]) for entry in found["measured"]] == [
        ("plain", "ok"), ("liger", "refused"), ("compiled", "oom"), ("chunked", "ok")
    ]  # fmt: skip


def test_a_row_has_the_median_round_and_its_ratios_to_the_plain_loss() -> None:
    size = (8192, 50304, 768)
    plain = Entry("plain", size, peak_bytes=8 << 30, rounds_ms=[20.0, 40.0, 22.0])
    ours = Entry("chunked", size, peak_bytes=1 << 30, rounds_ms=[11.0, 11.0, 12.1])
    row = loss_benchmark.lines([plain, ours])[1]
    assert row == ["8,192", "50,304", "768", "chunked", "11.00", "10.0 %", "1.000", "0.500", "0.125"]
