"""A budget: refused where there is nothing to limit, and otherwise a smaller GPU."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flash_train.commands import compare, run, train
from flash_train.commands.budget import check_budget, limit_memory
from flash_train.memory.cards import GIB, MIB
from tests.commands.conftest import SHORT, Command

CONTEXT = 618 * MIB


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A GPU of 140 GiB, and the shares of it to which the process was limited."""
    shares: list[float] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 * GIB, 140 * GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: shares.append(share))
    return shares


def test_on_a_cpu_a_budget_is_refused_with_a_way_out(command: Command, tmp_path: Path) -> None:
    text = (
        "budget limits what a process takes of a GPU, got budget=24GiB with trainer=cpu; leave it out, choose "
        "trainer=cuda, or let flash-plan predict what fits\n"
    )
    answer = command(train.main, *SHORT, "budget=24GiB")
    assert answer.code == 2 and f"flash-train: {text}" in answer.err
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "failed"
    answer = command(compare.main, "recipes=demo", "budget=24GiB", "loggers=none", "output=compared")
    assert answer.code == 2 and f"flash-compare: {text}" in answer.err
    assert not (tmp_path / "compared" / "runs").exists()
    answer = command(train.main, *SHORT, "budget=24")
    assert "budget must be a size such as 24GiB, 80GB or a number of bytes, got 24" in answer.err


def test_the_allocator_gets_what_the_context_leaves(gpu: list[float]) -> None:
    size = check_budget({"budget": "24GiB", "trainer": {"accelerator": "cuda"}})
    facts = limit_memory(size, torch.device("cuda:0"))
    assert facts == {"budget_bytes": 24 * GIB, "allocator_limit_bytes": 24 * GIB - CONTEXT}
    assert gpu == [(24 * GIB - CONTEXT) / (140 * GIB)]


def test_without_a_budget_nothing_is_limited(gpu: list[float]) -> None:
    assert check_budget({"budget": None, "trainer": {"accelerator": "cpu"}}) is None
    assert limit_memory(None, torch.device("cuda:0")) == {"budget_bytes": None, "allocator_limit_bytes": None}
    assert gpu == []


@pytest.mark.parametrize("size", [CONTEXT, 141 * GIB])
def test_more_than_the_gpu_has_and_less_than_its_context_are_refused(gpu: list[float], size: int) -> None:
    text = r"budget must be from 618 MiB \(the CUDA context\) to what the GPU has, 140 GiB, got .*; leave it out to use"
    with pytest.raises(ValueError, match=text):
        limit_memory(size, torch.device("cuda:0"))
    assert gpu == []


def test_a_run_records_its_limit(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts: Any = {"budget_bytes": 24 * GIB, "allocator_limit_bytes": 23 * GIB}
    monkeypatch.setattr(run, "limit_memory", lambda budget, device: facts)
    assert command(train.main, *SHORT, "data.sequence_length=37").code == 0
    environment = json.loads((tmp_path / "run" / "result.json").read_text())["environment"]
    assert facts.items() <= environment.items()


@pytest.mark.gpu
def test_on_a_gpu_what_is_over_the_budget_runs_out_of_memory() -> None:
    device = torch.device("cuda:0")
    torch.cuda.empty_cache()
    try:
        limit_memory(3 * GIB, device)
        kept = torch.empty(2 * GIB, dtype=torch.uint8, device=device)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(GIB, dtype=torch.uint8, device=device)  # with the context more than 3 GiB
        del kept
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        torch.cuda.empty_cache()
