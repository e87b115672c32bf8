"""What is sent to wandb as the view, and that runs really log what it draws, with what stands on the axes.

The server here is one of our own, on this machine: nothing leaves it.
"""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flash_train.commands import train, workspace
from flash_train.commands.workspace_view import COMPARED, PLANNED, STEP, TOKENS, build_workspace
from flash_train.comparison.results import Cell
from flash_train.comparison.wandb_report import log_comparison
from flash_train.diagnostics.memory import MemoryMonitor
from flash_train.diagnostics.probe import MemoryProbe
from flash_train.planning.measured import beside, read_results
from flash_train.planning.wandb_plan import log_plan
from flash_train.training.data.corpus import Corpus, build_corpus
from tests.commands.conftest import SHORT, Command
from tests.comparison.wandb_offline import read_offline_run
from tests.planning.test_plan import RUN, compared, plans, settings

pytest.importorskip("wandb_workspaces")
# wandb-workspaces' own, when it is imported.
pytestmark = pytest.mark.filterwarnings("ignore:Pydantic V1 style `@validator` validators are deprecated")

LOGGERS = {"loggers": {"wandb": {"project": "flash_train", "offline": True}}}


class Server(ThreadingHTTPServer):
    """Answers as wandb does: who is logged in, and that a view was saved, which it keeps."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.saved: list[dict[str, Any]] = []
        self.code = 200


class Answering(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert isinstance(self.server, Server)
        data: dict[str, Any] = {"viewer": {"id": "1", "entity": "our-team", "username": "somebody"}}
        if b"upsertView" in body:
            variables = json.loads(body)["variables"]
            self.server.saved.append(variables)
            data = {"upsertView": {"view": {"id": "2", "name": variables["name"]}, "inserted": True}}
        answer = json.dumps({"data": data} if self.server.code == 200 else {"errors": ["no such key"]}).encode()
        self.send_response(self.server.code)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def flash_workspace(server: Server, folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: wandb keeps whom it knew first."""
    wandb = {"WANDB_BASE_URL": f"http://127.0.0.1:{server.server_port}", "WANDB_API_KEY": "a" * 40}
    return run_module(workspace.MODULE, folder, *overrides, **wandb)


def run_module(module: str, folder: Path, *overrides: str, **wandb: str) -> subprocess.CompletedProcess[str]:
    others = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    return subprocess.run(
        [sys.executable, "-m", module, *overrides],
        cwd=folder, env=others | wandb, capture_output=True, text=True, timeout=100,
    )  # fmt: skip


def spec() -> dict[str, Any]:
    """As `save` would send it."""
    view = build_workspace("our-team", "flash_train", "flash_train")
    return json.loads(view._to_model().spec.model_dump_json(by_alias=True, exclude_none=True))


def panels(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for section in spec["section"]["panelBankConfig"]["sections"] for panel in section["panels"]]


def drawn(spec: dict[str, Any]) -> list[tuple[str, str]]:
    """Each metric, or the pattern of it, with what it is drawn over; bars are over nothing."""
    pairs = []
    for panel in panels(spec):
        config = panel["config"]
        names = config["metricRegex"][2:-2].split("|") if config.get("useMetricRegex") else config["metrics"]
        assert names and (panel["viewType"] == "Bar Chart") == ("xAxis" not in config), panel
        pairs += [(name, config.get("xAxis", "")) for name in names]
    return pairs


def measured_cell(arm: str, length: int) -> Cell:
    known: dict[str, Any] = {field.name: 1.0 for field in fields(Cell)}
    return Cell(**known | {"arm": arm, "length": length, "status": "ok", "error": None})


def everything_logged(folder: Path) -> list[set[str]]:
    """The names of each record that a run with every monitor, a comparison and a plan leave."""
    for name in ("web", "code"):
        (folder / f"{name}.txt").write_text(f"It was a bright cold day in April, and {name} was striking. " * 200)
        build_corpus(Corpus([str(folder / f"{name}.txt")], 0.3), folder / name)
    answer = run_module(
        train.__name__, folder, *SHORT, "loggers=wandb", "data=tokens", "data.paths=[web,code]",
        "trainer.overfit_batches=0", "trainer.limit_val_batches=2", "validate_every=10", "trainer.max_steps=20",
        "callbacks=[default,probe,leaks]", "callbacks.probe.advice=false", "callbacks.leaks.every_n_steps=1",
        "callbacks.leaks.warmup_steps=0", "callbacks.speed.device_peak_flops=1e12", WANDB_MODE="offline",
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    for name in ("comparison", "plan"):
        (folder / name).mkdir()
    comparison: Any = SimpleNamespace(
        cells=[measured_cell("naive", 64), measured_cell("flash", 64)],
        verdict=SimpleNamespace(sentence="", warnings=[]),
    )
    children: Any = SimpleNamespace(group=lambda: "group", folder=folder / "comparison", config=LOGGERS)
    log_comparison(comparison, children, [])
    found = plans(settings(rows=2))
    measured = beside(found, read_results(compared(folder), RUN))
    log_plan(folder / "plan", found, settings(rows=2), [], config={"name": "tiny"} | LOGGERS, measured=measured)
    runs = [read_offline_run(path) for path in sorted(folder.glob("*/wandb/offline-run-*"))]
    assert sorted(run.job_type for run in runs) == ["comparison", "plan", "train"]
    return [set(record) for run in runs for record in run.history]


def test_what_the_view_draws_is_logged_together_with_what_it_is_drawn_over(tmp_path: Path) -> None:
    records = everything_logged(tmp_path)
    monitor = MemoryMonitor()  # some of whose numbers only several GPUs have
    records.append({STEP, *monitor._combine({name: [1.0, 2.0] for name in monitor.numbers})})
    for metric, over in drawn(spec()):
        assert any(
            (not over or over in record) and any(re.fullmatch(metric, name) for name in record) for record in records
        ), f"nothing logs {metric} with {over or 'anything'}"


def test_each_kind_of_metric_has_its_axis_and_its_panel(server: Server, tmp_path: Path) -> None:
    answer = flash_workspace(server, tmp_path, "project=ours", "name='a view'")
    (saved,) = server.saved
    assert answer.returncode == 0, answer.stderr
    url = f"http://127.0.0.1:{server.server_port}/our-team/ours?nw={saved['name'][3:-2]}"
    assert answer.stdout == f"{url}\n" and list(tmp_path.iterdir()) == []
    assert [saved[name] for name in ("entityName", "projectName", "displayName")] == ["our-team", "ours", "a view"]
    sent = json.loads(saved["spec"])
    names = [section["name"] for section in sent["section"]["panelBankConfig"]["sections"]]
    assert names == ["Memory by sequence length", "Memory by step", "Speed", "Training"]
    assert drawn(sent) == drawn(spec())

    def over(name: str) -> set[str]:
        return {x for metric, x in drawn(sent) if re.fullmatch(metric, name)}

    assert over("train/loss") == {TOKENS}
    for metric in ("validation/loss", "validation/web/loss", "speed/tokens_per_second", "speed/mfu_percent"):
        assert over(metric) == {STEP}
    for metric in ("memory/peak_allocated_gib", "memory/backward/peak_allocated_gib", "memory/predicted_gib"):
        assert over(metric) == {STEP}
    for metric in ("peak_allocated_gib", "peak_reserved_gib", "predicted_peak_gib", "tokens_per_second"):
        assert over(f"comparison/flash/{metric}") == {COMPARED}
    for metric in ("needed_gib", "predicted_peak_gib", "measured_peak_gib"):
        assert over(f"plan/flash/{metric}") == {PLANNED}
    for part in set(MemoryProbe.numbers) - {"peak"}:
        assert over(f"memory/probe/{part}_gib") == {""}


def test_a_key_that_wandb_refuses_is_wandb_s_own_sentence(server: Server, tmp_path: Path) -> None:
    server.code = 401
    answer = flash_workspace(server, tmp_path, "entity=our-team")
    assert answer.returncode == 1 and server.saved == [] and answer.stdout == ""
    (sentence,) = (line for line in answer.stderr.splitlines() if line.startswith("flash-workspace"))
    assert sentence.startswith("flash-workspace: wandb saved no view: Failed to verify credentials")
    assert "Traceback" not in answer.stderr


def test_without_the_package_a_sentence_says_what_to_install(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces.workspaces", None)
    answer = command(workspace.main, "entity=our-team")
    assert answer.code == 2 and answer.err.count("\n") == 1
    assert answer.err.startswith("flash-workspace: a view needs wandb-workspaces, which cannot be imported")
    assert answer.err.endswith("pip install 'flash_train[workspaces]'\n")


@pytest.mark.parametrize(
    ("override", "text"),
    {
        "project=": "project must be a name, and not empty or a path, got ''",
        "project=us/ours": "as in entity=my-team project=flash_train",
        "entity=3": "entity must be str | None, got 3",
        "name='\"\N{SNOWMAN}\"'": "name must be one that wandb takes, got",
    }.items(),
)
def test_what_is_no_place_for_a_view_is_refused(command: Command, override: str, text: str) -> None:
    answer = command(workspace.main, override)
    assert answer.code == 2 and text in answer.err and answer.err.count("\n") == 1
