"""A few of the kills that `python -m tests.training.kills` does by the hundred."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.endings import differing

REPOSITORY = Path(__file__).parents[2]


def kills(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "tests.training.kills", "--seed", "3", f"--folder={folder}"]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    answer = subprocess.run([*command, *arguments], cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


def test_runs_that_are_killed_at_random_instants_end_as_one_that_was_not(tmp_path: Path) -> None:
    printed = kills(tmp_path, "--kills", "5", "--new", "0")
    assert re.search(r"^5 kills: ", printed, re.MULTILINE) and " 0 ended otherwise" in printed


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16_mixed", "fp16_mixed"])
def test_on_a_gpu_with_deterministic_kernels_too(tmp_path: Path, precision: str) -> None:
    assert " 0 ended otherwise" in kills(tmp_path, "--kills", "3", "--device", "cuda", f"precision={precision}")


def test_a_bit_that_differs_is_found_wherever_it_is() -> None:
    def state() -> dict[str, Any]:
        return {"a": [torch.tensor([1.0, float("nan")]), {"b": 3}], "c": (1, 2.0)}

    assert list(differing(state(), state())) == []
    for place, change in (
        ("a[0]", lambda x: x["a"][0].view(torch.int32)[1].bitwise_xor_(1)),
        ("a[1].b", lambda x: x["a"][1].update(b=3.0)),
        ("d (only in one)", lambda x: x.update(d=0)),
    ):
        changed = state()
        change(changed)
        assert list(differing(changed, state())) == [place]
