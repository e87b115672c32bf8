"""The program that weighs the monitors."""

import json
import sys
from pathlib import Path

import pytest

from tests.memory import overhead


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
def test_both_arms_take_real_steps_in_turns() -> None:
    begun = []
    with pytest.MonkeyPatch.context() as patch:
        made = overhead.monitors
        patch.setattr(overhead, "monitors", lambda folder: begun.append(made(folder)) or begun[-1])
        pairs = overhead.compare(overhead.TINY, "cpu", 1)
    assert len(pairs) == 1 and all(0 < seconds < 10 for pair in pairs for seconds in pair)
    memory, speed, _, leaks = begun[1]
    assert memory.result()["peak_allocated_bytes"] > 0 and speed.result()["tokens_per_second"] > 0
    assert leaks.result()["source"] is not None


@pytest.mark.parametrize(("cost", "code"), [(0.4, 0), (0.6, 1)])
def test_what_costs_more_than_the_bound_is_told_by_the_exit_code(
    cost: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = [(0.05, 0.05 * (1 + percent / 100)) for percent in (cost - 0.2, cost, cost, cost + 3)]
    monkeypatch.setattr(overhead, "compare", lambda setting, device, count: pairs)
    out = tmp_path / "overhead.json"
    monkeypatch.setattr(sys, "argv", ["overhead", "--device", "cpu", "--out", str(out)])
    assert overhead.main() == code
    assert f"the monitors cost +{cost:.2f} % of a 50.00 ms step, the median of 4 pairs" in capsys.readouterr().out
    assert json.loads(out.read_text())["cost_percent"] == pytest.approx(cost)
