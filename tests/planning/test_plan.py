"""What a plan answers, on curves that are known."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from rich.console import Console

from flash_train.memory.cards import CARDS, GIB, MIB
from flash_train.memory.live import CATEGORIES, Block, Peak
from flash_train.memory.predict import Prediction
from flash_train.memory.sizes import parse_bytes
from flash_train.planning import charts
from flash_train.planning.measured import beside, read_results
from flash_train.planning.output import parts_of, print_plan, verdict, write_files
from flash_train.planning.plan import SPARE, ArmPlan, ladder
from flash_train.planning.settings import Settings, read_settings
from flash_train.planning.wandb_plan import log_plan
from tests.comparison.wandb_offline import read_offline_run

ASKED: dict[str, Any] = {
    "arms": ["naive", "flash"], "card": None, "budget": "24GiB", "rows": 2, "lengths": None, "length_step": 64,
    "allowance": 0.04, "limit": 2**24, "data": {"sequence_length": 1024},
}  # fmt: skip


def settings(**changes: Any) -> Settings:
    return read_settings({**ASKED, **changes}, implementations=("naive", "sdpa", "flash", "hopper"))


def made_up(arm: str):
    """Parameters, and activations: the square of T for naive."""

    def predict(rows: int, length: int) -> Prediction:
        size = rows * length * (330_000 + (700 * length if arm == "naive" else 0))
        categories = dict.fromkeys(CATEGORIES, 0) | {"parameters": 2 * GIB, "activations": size}
        block = Block(
            size, (rows, length, 7), torch.bfloat16, "aten.mm.default", "model.head", "forward", "activations"
        )
        peak = Peak(2 * GIB + size, categories, (block, block))
        return Prediction({"forward": peak}, peak.size, cublas=16 * MIB, context=618 * MIB)

    return predict


def refuses(rows: int, length: int) -> Prediction:
    raise ValueError("it does not take this model; use another")


def plans(asked: Settings) -> list[ArmPlan]:
    return [ArmPlan(arm, made_up(arm), asked) for arm in asked.arms]


@pytest.mark.parametrize("arm", ["naive", "flash"])
def test_the_longest_t_and_the_largest_batch_fit_and_the_next_do_not(arm: str) -> None:
    asked = settings()
    plan, predict = ArmPlan(arm, made_up(arm), asked), made_up(arm)
    assert plan.longest and plan.largest_batch and plan.longest % 64 == 0

    def fits(rows: int, length: int) -> bool:
        return predict(rows, length).needed(0.04) <= 24 * GIB

    assert fits(2, plan.longest) and not fits(2, plan.longest + 64)
    assert fits(plan.largest_batch, 1024) and not fits(plan.largest_batch + 1, 1024)
    assert plan.questions <= 9, "a fake step each, and nothing for (2, 1024), where both searches begin"


def test_near_the_budget_what_the_allocator_takes_decides_and_stands_for_the_allowance() -> None:
    asked, limits, made = settings(), set(), made_up("flash")

    class Replay:
        def __init__(self, peak: int) -> None:
            self.allocated = {"forward": peak + 30 * MIB}

        def reserved(self, limit: int) -> int:
            limits.add(limit)
            return round(1.1 * self.allocated["forward"])

    def predict(rows: int, length: int) -> Prediction:
        prediction, replay = made(rows, length), cast(Any, Replay(made(rows, length).peak))
        return replace(prediction, replay=replay)

    def fits(length: int) -> bool:
        return round(1.1 * predict(2, length).peak) + 618 * MIB + SPARE <= 24 * GIB

    plan = ArmPlan("flash", predict, asked)
    assert plan.longest and fits(plan.longest) and not fits(plan.longest + 64)
    assert limits == {24 * GIB - 618 * MIB - SPARE}
    top = plan.top()
    assert top.replayed and top.prediction and not plan.point("length", 1024).replayed
    assert parts_of(top)["uncut"] == 30 * MIB
    assert parts_of(top)["allowance"] == round(1.1 * top.prediction.peak) - top.prediction.peak + SPARE
    assert sum(parts_of(top).values()) == top.needed


def test_a_point_that_was_not_predicted_says_so_and_lies_on_the_curve() -> None:
    asked = settings()
    plan = ArmPlan("naive", made_up("naive"), asked)
    point = plan.point("length", 3000)
    assert point.prediction is None and parts_of(point) == {}
    assert point.needed == pytest.approx(made_up("naive")(2, 3000).needed(0.04), rel=1e-6)
    assert plan.top().prediction is not None and plan.top().fits


def test_the_parts_add_up_to_what_is_needed() -> None:
    top = ArmPlan("naive", made_up("naive"), settings()).top()
    assert sum(parts_of(top).values()) == top.needed


def test_the_table_ends_where_no_arm_fits_any_more() -> None:
    asked = settings()
    both = plans(asked)
    sizes = ladder(both, asked, "length")
    longest = max(plan.longest or 0 for plan in both)
    assert sizes[0] == 512 and sizes[-2] <= longest < sizes[-1]
    assert ladder(both, settings(lengths=[100, 7]), "length") == [7, 100]


def test_a_refusal_is_an_answer() -> None:
    asked = settings()
    found = [ArmPlan("naive", refuses, asked), ArmPlan("flash", made_up("flash"), asked)]
    assert found[0].refusal == "it does not take this model; use another"
    assert verdict(found, asked).startswith("flash fits T = ")
    assert verdict(found[:1], asked) == "every arm refuses this model"


def test_nothing_fits_is_an_answer() -> None:
    asked = settings(budget="2GiB")
    plan = ArmPlan("naive", made_up("naive"), asked)
    assert plan.longest is None and plan.largest_batch is None
    assert verdict([plan], asked) == "nothing fits 2.00 GiB: even T = 64 needs more"


def test_the_files_hold_every_point_and_the_terminal_the_answers(tmp_path: Path) -> None:
    asked = settings(card="h200")
    found = [*plans(asked), ArmPlan("sdpa", refuses, asked)]
    console = Console(record=True, width=200, file=(tmp_path / "terminal").open("w"))
    print_plan(found, asked, console, setting="a model")
    files = write_files(tmp_path, found, asked, setting="a model", facts={"command": "flash-plan"})
    console.file.close()
    assert [file.name for file in files] == ["results.json", "results.csv", "memory.png"]
    document = json.loads(files[0].read_text())
    assert document["budget_bytes"] == 24 * GIB and document["capability"] == [9, 0]
    naive = document["arms"]["naive"]
    assert naive["longest_length"] == found[0].longest and document["arms"]["sdpa"]["refusal"]
    assert naive["largest_tensors"][0]["module"] == "model.head"
    rows = list(csv.DictReader(files[1].read_text().splitlines()))
    assert len(rows) == sum(len(arm["points"]) for arm in document["arms"].values())
    predicted = [row for row in rows if row["predicted"] == "True"]
    assert len(predicted) == sum(plan.questions for plan in found)
    for row in predicted:
        parts = sum(
            int(row[name]) for name in row if name.endswith("_bytes") and name not in ("needed_bytes", "peak_bytes")
        )
        assert parts == int(row["needed_bytes"])
    assert files[2].read_bytes().startswith(b"\x89PNG")
    printed = (tmp_path / "terminal").read_text()
    assert f"{found[1].longest:,}" in printed and "sdpa: refused: it does not take" in printed
    assert "naive, largest tensors: 2 x" in printed and "~" in printed


@pytest.mark.parametrize(
    "size, number",
    [("24GiB", 24 * GIB), ("80GB", 80 * 10**9), ("1.5 GiB", 3 * GIB // 2), ("512MiB", 512 * MIB), (10**9, 10**9)],
)
def test_sizes_are_read_with_their_units(size: Any, number: int) -> None:
    assert parse_bytes(size) == number


def test_a_card_with_a_budget_keeps_its_kernels() -> None:
    card = settings(card="h200", budget="24GiB").card
    assert (card.memory, card.capability, card.cublas) == (24 * GIB, (9, 0), CARDS["h200"].cublas)
    assert settings(card="h200", budget=None).card == CARDS["h200"]


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"budget": None}, "a plan must have a budget or a card; give budget=24GiB, or card=h200"),
        ({"budget": 24}, "budget must be a size such as 24GiB, .*, got 24: below a million give the unit"),
        ({"budget": "24Gib"}, "budget must be a size such as 24GiB, .*, got '24Gib'"),
        ({"budget": True}, "budget must be a size such as 24GiB, .*, got True"),
        ({"card": "h300"}, "card must be one of b200, h200, .*, got 'h300'; for another give budget=24GiB"),
        (
            {"card": "l4", "budget": "80GiB"},
            "budget must be at most what the card has, got 80GiB for l4, which has 22.0GiB",
        ),
        ({"arms": ["foo"]}, "arms must name known implementations, got 'foo'"),
        ({"rows": 0}, "rows must be made of positive integers, got 0"),
        ({"length_step": 1.5}, "length_step must be made of positive integers, got 1.5"),
        ({"lengths": []}, r"lengths must be a list of sequence lengths, got \[\]"),
        ({"allowance": 1}, "allowance must be a share of the peak from 0 to 1, got 1; 0.04 is usual"),
        ({"limit": 100}, "limit must leave something to seek, .*sequence_length=1024, got 100; give limit=1024"),
        ({"rows": 10**8}, "rows=100000000 of length_step=64 tokens .*, got 16777216; give limit=6400000000"),
        ({"arms": ["hopper"]}, "hopper needs compute capability 9.0, got 8.0; give card=h100 or card=h200"),
    ],
)
def test_what_makes_no_plan_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        settings(**changes)


RUN = {"model": {"width": 12}, "vocabulary_size": None, "precision": {"lightning": "bf16-mixed"},
       "checkpointing": {"granularity": "none"}, "loss": {"chunk_rows": None}}  # fmt: skip


def compared(folder: Path, *, device: str = "cuda", **changes: Any) -> Path:
    """A comparison's results, each training peak 2 % above the prediction, and validation's far above."""
    rows = [
        {"arm": arm, "length": length, "status": "ok", "device": device, "peak_allocated_bytes": 9 * peak,
         "forward_peak_allocated_bytes": 5, "backward_peak_allocated_bytes": peak, "optimizer_peak_allocated_bytes": 7}
        for arm in ("naive", "flash", "sdpa")
        for length in (512, 2048)
        for peak in [made_up(arm)(4096 // length, length).peak * 102 // 100]
    ]  # fmt: skip
    lost = {"arm": "naive", "length": 4096, "status": "oom", "device": device}
    config = {**RUN, "data": {"batch_size": 1}, "micro_batch_tokens": 4096, **changes}
    (folder / "results.json").write_text(json.dumps({"rows": [*rows, lost], "config": config}))
    return folder


def test_measured_peaks_stand_beside_predictions_of_just_their_size(tmp_path: Path) -> None:
    (tmp_path / "compared").mkdir()
    asked = settings()
    found = plans(asked)
    measured = beside(found, read_results(compared(tmp_path / "compared"), RUN))
    assert [(x.arm, x.rows, x.length) for x in measured] == [
        ("naive", 8, 512), ("flash", 8, 512), ("naive", 2, 2048), ("flash", 2, 2048),
    ]  # fmt: skip
    assert [x.error_percent for x in measured] == pytest.approx([-1.96] * 4, abs=0.01)
    console = Console(record=True, width=200, file=(tmp_path / "terminal").open("w"))
    print_plan(found, asked, console, setting="a model", measured=measured)
    console.file.close()
    printed = (tmp_path / "terminal").read_text()
    assert printed.count("-1.96 %") == 4 and "the chart is of rows" not in printed
    files = write_files(tmp_path, found, asked, setting="a model", facts={}, measured=measured)
    document = json.loads(files[0].read_text())
    assert document["measured"][3]["error_percent"] == pytest.approx(-1.96, abs=0.01)


def test_rings_are_drawn_where_the_rows_are_the_plans(tmp_path: Path) -> None:
    asked = settings(rows=2)
    found = plans(asked)
    figure = Figure()
    measured = beside(found, read_results(compared(tmp_path), RUN))
    charts._draw_needs(axes := figure.subplots(), found, asked, [x for x in measured if x.rows == 2])
    rings = {
        line.get_color(): np.asarray(line.get_xydata()) for line in axes.lines if line.get_markerfacecolor() == "none"
    }
    [[T, needed]] = rings["#D55E00"].tolist()
    assert T == 2048 and needed == pytest.approx(measured[2].peak * 1.04 + asked.card.context)


@pytest.mark.parametrize(
    "changes, text",
    [
        (
            {"model": {"width": 16}},
            "must be of the same setting, got .*, where model.width is 16, and here 12",
        ),
        ({"vocabulary_size": 7}, "where vocabulary_size is 7, and here None: give the overrides of that comparison"),
        ({"device": "cpu"}, "measured must be of runs on a GPU, which a plan is for, got .*, whose ran on a CPU"),
        ({"data": None}, "measured must be the results.json of a flash-compare, or its folder, got "),
    ],
)
def test_what_was_measured_of_something_else_is_refused(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        read_results(compared(tmp_path, **changes), RUN)


def test_no_results_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="measured must be the results.json of a flash-compare, or its folder, got "):
        read_results(tmp_path, RUN)


def test_wandb_gets_the_curves_with_what_was_measured(tmp_path: Path) -> None:
    asked = settings(rows=2)
    found = plans(asked)
    measured = beside(found, read_results(compared(tmp_path), RUN))
    files = write_files(tmp_path, found, asked, setting="a model", facts={}, measured=measured)
    config = {"name": "tiny", "loggers": {"wandb": {"project": "flash_train", "offline": True}}}
    log_plan(tmp_path, found, asked, files, config=config, measured=measured)
    [folder] = tmp_path.glob("wandb/offline-run-*")
    run = read_offline_run(folder)
    assert run.job_type == "plan" and run.metrics["plan/naive/needed_gib"] == "plan/sequence_length"
    lines = {line["plan/sequence_length"]: line for line in run.history if "plan/sequence_length" in line}
    assert list(lines) == sorted(lines)
    assert lines[2048]["plan/naive/measured_peak_gib"] == pytest.approx(measured[2].peak / GIB)
    assert lines[2048]["plan/naive/predicted_peak_gib"] == pytest.approx(measured[2].predicted / GIB)
    assert run.summary["plan/naive/longest_length"] == found[0].longest
    assert {"results.json", "results.csv", "memory.png"} <= set(run.files)
