"""The files of a comparison: results.json, results.csv, the charts and report.html."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from flash_train.comparison import filling
from flash_train.comparison.charts import filling_chart, loss_chart, memory_chart, save_charts, speed_chart
from flash_train.comparison.children import Children
from flash_train.comparison.conduct import Comparison
from flash_train.comparison.report import report_html
from flash_train.comparison.results import Row, write_csv, write_json
from flash_train.comparison.table import print_lines, print_table
from flash_train.comparison.text import human_count, levers

CHARTS = {
    "memory": "Peak allocated memory by sequence length",
    "filling": "What fills the memory at each phase's peak, by category",
    "speed": "Training tokens per second by sequence length",
    "loss": "Loss curves, and their distance from naive",
}
_VERSIONS = ("flash_train", "torch", "triton", "lightning", "python", "cuda")


def write_files(comparison: Comparison, children: Children, *, command: Sequence[str]) -> list[Path]:
    """Write everything into the comparison's folder; numbers first, so that no chart can lose them. The files."""
    folder, line = children.folder, shlex.join(command)
    found = filling.fillings(comparison.rows)
    documents = [folder / "results.json", folder / "results.csv", folder / "report.html"]
    write_json(documents[0], _document(comparison, children, line))
    write_csv(documents[1], comparison.rows)
    setting = describe_setting(comparison, children)
    drawn = _draw(comparison, children, setting, found)
    page = report_html(
        title=f"Attention compared: {children.config['name']}",
        setting=setting,
        verdict=comparison.verdict,
        cells=comparison.cells,
        rows=comparison.rows,
        charts={CHARTS[name]: folder / f"{name}.svg" for name in drawn},
        found=found,
        facts={**comparison.environment, "git_commit": comparison.environment.get("git_commit") or "not known"},
        command=line,
    )
    documents[2].write_text(page)
    return [*documents, *(folder / f"{name}.{kind}" for name in drawn for kind in ("png", "svg"))]


def print_summary(comparison: Comparison, files: Sequence[Path], console: Console) -> None:
    """The end of the command: the tables, the verdict, what a reader must know, and where the files are."""
    print_table(comparison.cells, console)
    verdict, found = comparison.verdict, filling.fillings(comparison.rows)
    if found:
        print_lines(*filling.by_category(found), console, title=f"What fills the peak at T={found[0].length:,}")
    for sentence in (*filling.advice(found), *verdict.warnings):
        console.print(sentence, markup=False)
    for sentence in (verdict.sentence, *verdict.refusals, *verdict.problems):
        console.print(sentence, markup=False)
    console.print(f"\n{files[0].parent}: {', '.join(file.name for file in files)}", markup=False)


def describe_setting(comparison: Comparison, children: Children) -> str:
    """One line that says what was measured: model, precision, batch and device."""
    config, settings = children.config, children.settings
    parameters = next((row.parameters for row in comparison.rows if row.parameters), None)
    size = [f"{human_count(parameters)} parameters"] if parameters else []
    rows, tokens = config["data"]["batch_size"], settings.micro_batch_tokens
    batch = f"{tokens:,} tokens" if tokens else f"{rows} {'row' if rows == 1 else 'rows'}"
    parts = [config["name"], *size, *levers(config), f"{batch} a micro-batch"]
    return f"{', '.join(parts)}; {_device(comparison)}"


def _device(comparison: Comparison) -> str:
    environment = comparison.environment
    name = environment.get("device_name") or "unknown device"
    on_cpu = any(row.device == "cpu" for row in comparison.rows)
    return f"CPU ({name}, {environment.get('threads')} threads)" if on_cpu else name


def _memory_of_this_machine() -> int:
    """Bytes: what a run on the CPU has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _document(comparison: Comparison, children: Children, command: str) -> dict[str, Any]:
    environment = comparison.environment
    measured = [row for row in comparison.rows if row.measured]
    return {
        "verdict": comparison.verdict.as_dict(),
        "setting": describe_setting(comparison, children),
        "command": command,
        "commit": environment.get("git_commit"),
        "versions": {name: environment.get(name) for name in _VERSIONS},
        "environment": environment,
        "data": comparison.data,
        "config": children.config,
        "rows": [_plain_row(row) for row in measured],
        "floor_rows": [_plain_row(row) for row in comparison.rows if not row.measured],
    }


def _plain_row(row: Row) -> dict[str, Any]:
    plain = asdict(row)
    del plain["measured"]
    return plain


def _draw(comparison: Comparison, children: Children, setting: str, found: Sequence[filling.Filling]) -> list[str]:
    """Save the charts; their names."""
    floors = {one.length: one.loss_floor for one in comparison.verdict.agreements}
    cells = [cell for cell in comparison.cells if cell.status != "refused"]
    filled = {"filling": filling_chart(found, setting=setting)} if found else {}
    charts = {
        "memory": memory_chart(
            cells,
            setting=setting,
            device_memory=comparison.environment.get("total_memory_bytes") or _memory_of_this_machine(),
            exponents=comparison.verdict.growth_exponents,
            profiled=any(row.memory_source == "profiler" for row in comparison.rows),
        ),
        **filled,
        "speed": speed_chart(cells, setting=setting),
        "loss": loss_chart(
            comparison.rows,
            setting=setting,
            lengths=children.settings.judged_lengths or children.settings.lengths[:1],
            floors=floors,
        ),
    }
    save_charts(children.folder, charts)
    return list(charts)
