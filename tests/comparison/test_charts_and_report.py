"""The pictures and the page, of invented results."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from flash_train.comparison.agreement import judge, noise_floor
from flash_train.comparison.charts import filling_chart, loss_chart, memory_chart, save_charts, speed_chart
from flash_train.comparison.filling import fillings
from flash_train.comparison.report import report_html
from flash_train.comparison.results import Row, cells
from flash_train.comparison.verdict import conclude
from tests.comparison.made_up import MIB, breakdown, judged_rows, row

CARD = 1000 * MIB
CURVES = {"naive": (5.0, 4.0), "naive_reversed": (5.0, 4.001), "sdpa": (5.0, 4.001), "flash": (5.0, 4.002)}


@pytest.fixture
def rows() -> list[Row]:
    longer = [row("naive", 74, status="oom", memory=None, speed=None), row("sdpa", 74), row("flash", 74)]
    return [*judged_rows(CURVES), *longer]


def charts(rows: list[Row]) -> dict[str, Figure]:
    measured = cells(rows)
    return {
        "memory": memory_chart(measured, setting="a model", device_memory=CARD, exponents={"naive": 1.9}),
        "filling": filling_chart(fillings(rows) or fillings([row("naive", 37)]), setting="a model"),
        "speed": speed_chart(measured, setting="a model"),
        "loss": loss_chart(rows, setting="a model", lengths=(37,), floors={37: 1e-3}),
    }


def points(line: Line2D) -> list[list[float]]:
    return np.asarray(line.get_xydata()).tolist()


def test_out_of_memory_is_a_cross_at_the_devices_memory_on_log_axes(rows: list[Row]):
    (axes,) = charts(rows)["memory"].axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    crosses = [points(line) for line in axes.lines if line.get_marker() == "x" and points(line)]
    assert crosses == [[[74, CARD]]]
    curves = {
        line.get_label(): [x for x, _ in points(line)] for line in axes.lines if line.get_marker() in ("o", "s", "^")
    }
    assert curves == {"naive, ~ T$^{1.9}$": [37], "sdpa": [37, 74], "flash": [37, 74]}


def test_the_prediction_is_a_line_that_goes_on_where_memory_ended():
    predicted = {"peak_allocated_bytes": None, "predicted_bytes": 4 * CARD}
    made = cells([row("naive", 37), row("naive", 74, status="oom", memory=predicted)])
    (axes,) = memory_chart(made, setting="a model", device_memory=CARD, exponents={}).axes
    assert [points(line) for line in axes.lines if line.get_linestyle() == ":" and points(line)] == [
        [[37, 101 * MIB], [74, 4 * CARD]]
    ]
    assert axes.get_ylim()[1] > 4 * CARD


def test_peaks_close_together_still_have_an_axis_that_can_be_read():
    near = cells([row("naive", 37, peak=25 * MIB), row("naive", 74, peak=26 * MIB)])
    figure = memory_chart(near, setting="a model", device_memory=CARD, exponents={})
    low, high = figure.axes[0].get_ylim()
    assert len([tick for tick in figure.axes[0].get_yticks() if low <= tick <= high]) >= 2


def test_the_loss_chart_shows_each_distance_from_naive_and_the_floor(rows: list[Row]):
    losses, distances = charts(rows)["loss"].axes
    assert [line.get_label() for line in losses.lines] == ["naive", "sdpa", "flash"]
    drawn = {line.get_label(): max(y for _, y in points(line)) for line in distances.lines}
    assert drawn == pytest.approx(
        {"sdpa": 1e-3, "flash": 2e-3, "naive, keys in reverse order": 1e-3, "3 x noise floor": 3e-3}
    )


def test_equal_results_are_equal_files(rows: list[Row], tmp_path: Path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        save_charts(tmp_path / name, charts(rows))
    for file in sorted((tmp_path / "one").iterdir()):
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes(), file.name


def test_charts_can_be_drawn_when_nothing_was_measured(tmp_path: Path):
    save_charts(tmp_path, charts([row("naive", 37, status="failed", error="x", memory=None, speed=None, losses=())]))


def test_losses_that_are_no_numbers_can_be_drawn(tmp_path: Path):
    lost = judged_rows({"naive": (5.0, math.nan), "naive_reversed": (5.0, math.nan), "flash": (5.0, math.inf)})
    floor = noise_floor(lost, 37)
    save_charts(tmp_path, {"loss": loss_chart(lost, setting="a model", lengths=(37,), floors={37: floor})})


def test_the_report_opens_with_the_verdict_and_needs_nothing_else(rows: list[Row], tmp_path: Path):
    save_charts(tmp_path, charts(rows))
    rows[-1] = row("flash", 74, memory={"peak_allocated_bytes": MIB, "alloc_retries": 1, "prediction": breakdown(MIB)})
    gradients = {37: {"naive": 1e-7, "sdpa": 1e-7, "flash": 1.2e-7}}
    verdict = conclude(rows, cells(rows), judge(rows, arms=("sdpa", "flash"), lengths=(37,), gradients=gradients))
    page = report_html(
        title="A <comparison>",
        setting="a model & a device",
        verdict=verdict,
        cells=cells(rows),
        rows=rows,
        charts={name: tmp_path / f"{name}.svg" for name in ("memory", "filling", "speed", "loss")},
        found=fillings(rows),
        facts={"torch": "2.13.0", "git_commit": "abc"},
        command="flash-compare 'arms=[naive,flash]'",
    )
    body = page[page.index("<body>") :]
    assert re.sub(r"<[^>]*>", "", body).strip().startswith(verdict.sentence.replace("'", "&#x27;"))
    for fact in ("What fills the peak at T=74", "By module", "What would take less", "<h2>Warnings</h2>"):
        assert fact in page
    for fact in ("2.13.0", "abc", "flash-compare &#x27;arms=[naive,flash]&#x27;", "A &lt;comparison&gt;"):
        assert fact in page
    assert "<script" not in page and not re.search(r'(src|href)="(?!#)', page) and "url(http" not in page
    identifiers = re.findall(r'\bid="([^"]*)"', page)
    assert len(identifiers) == len(set(identifiers)) and page.count("<svg") == 4
    assert set(re.findall(r'href="#([^"]*)"', page)) <= set(identifiers)
