"""What fills the memory, and what a reader is warned of, from invented results."""

import io
import re
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from flash_train.chart_style import UNTRACKED
from flash_train.comparison.cautions import cautions
from flash_train.comparison.charts import filling_chart
from flash_train.comparison.filling import advice, by_category, by_module, fillings
from flash_train.comparison.results import cells
from flash_train.comparison.table import print_lines
from tests.comparison.made_up import MIB, breakdown, row

LOST = {"predicted_bytes": 400 * MIB, "prediction": breakdown(400 * MIB)}
SETTLED = {"forward": 50 * MIB, "backward": 100 * MIB, "optimizer": 33 * MIB, "validation": None}


def test_the_longest_length_that_an_arm_trained_at_is_shown_and_who_ran_out_as_predicted():
    rows = [row(arm, length) for length in (37, 74) for arm in ("naive", "flash") if (arm, length) != ("naive", 74)]
    found = fillings([*rows, row("naive", 74, status="oom", memory=LOST), row("flash", 148, status="oom", memory=LOST)])
    assert {(one.arm, one.length, one.title) for one in found} == {
        ("flash", 74, "flash"), ("naive", 74, "naive (predicted)"),
    }  # fmt: skip
    naive = next(one for one in found if one.arm == "naive")
    assert naive.peak.measured == 400 * MIB and naive.peak.untracked == 0
    assert fillings([row("naive", 37, memory={"peak_allocated_bytes": MIB})]) == []


def test_what_was_predicted_is_reconciled_with_what_was_measured():
    [one] = fillings([row("naive", 37, peak=100 * MIB)])
    assert (one.phase, one.peak.measured) == ("backward", 100 * MIB)
    assert one.peak.untracked == -MIB and sum(one.peak.categories.values()) == 101 * MIB
    probed = breakdown(90 * MIB, source="allocator")
    probed["phases"]["backward"]["measured"] = 95 * MIB
    [one] = fillings([row("naive", 37, probe=probed)])
    assert one.probed and one.peak.untracked == 5 * MIB


def test_the_tables_have_a_column_for_each_arm_and_add_up():
    found = fillings([row("naive", 37, peak=100 * MIB), row("flash", 37, peak=40 * MIB)])
    headings, lines = by_category(found)
    assert headings == ["", "naive", "flash"]
    assert lines[1] == ["parameters", "10.1 MiB  10 %", "4.04 MiB  10 %"]
    assert [line[0] for line in lines] == ["the peak is in the", "parameters", "activations", UNTRACKED, "peak"]
    assert by_module(found) == (
        ["module", "naive", "flash"],
        [["model.blocks.0", "101 MiB", "40.4 MiB"], ["(inputs)", "7 B", "7 B"]],
    )
    file = io.StringIO()
    print_lines(headings, lines, Console(file=file, width=30), title="What fills the peak")
    assert "4.04 MiB  10 %" in file.getvalue() and "\u2026" not in file.getvalue()


def test_each_arm_is_told_its_culprit_and_the_best_advice():
    assert advice(fillings([row("naive", 37), row("flash", 37)])) == [
        "Most of naive's peak at T=37 is score matrices (101%); flash attention would save 60.0 MiB of it, and leave "
        "41.0 MiB (modelled).",
        "Most of flash's peak at T=37 is score matrices (101%).",
    ]


def test_the_chart_stacks_what_it_shows_and_marks_what_was_measured():
    figure = filling_chart(fillings([row("naive", 37, peak=100 * MIB), row("flash", 37)]), setting="a model")
    axes = figure.axes[0]
    heights = {container.get_label(): [bar.get_height() for bar in container] for container in axes.containers}
    assert heights["parameters"] == pytest.approx([10.1] * 3) and heights[UNTRACKED][1] == pytest.approx(-1.0)
    [lines] = axes.collections
    assert [np.asarray(path.vertices)[0, 1] for path in lines.get_paths()] == pytest.approx([50, 100, 100 / 3])


@pytest.mark.parametrize(
    "memory, text",
    [
        ({"alloc_retries": 3}, "the allocator emptied its cache and tried again, 3 times"),
        ({"peak_reserved_bytes": 125 * MIB}, "fragmentation, 20% of the 125 MiB reserved were never allocated"),
        ({"outside_resets": 2}, "somebody else reset the allocator's peaks 2 times"),
        ({"predicted_bytes": 80 * MIB}, "the predicted peak is off by -20.00 %"),
        ({"prediction": breakdown(9, sdpa=[{"backend": "math", "reason": "dropout"}])}, "math back end, .*: dropout"),
    ],
)
def test_what_makes_a_number_doubtful_is_a_warning_and_alone(memory: dict[str, Any], text: str):
    settled = {"peak_allocated_bytes": 100 * MIB, "peak_reserved_bytes": 104 * MIB, "phases": SETTLED}
    rows = [row("sdpa", 37, memory=settled), row("sdpa", 74, memory=settled | memory)]
    [warning] = cautions(rows, cells(rows))
    assert warning.startswith("sdpa") and re.search(text, warning)


def test_repeats_apart_by_more_than_a_hundredth_are_unstable():
    rows = [row("naive", 37, repeat=1), row("naive", 37, repeat=2, peak=102 * MIB), row("flash", 37)]
    assert cautions(rows, cells(rows)) == ["naive at T=37: unstable, its repeats peaked from 100 MiB to 102 MiB."]
