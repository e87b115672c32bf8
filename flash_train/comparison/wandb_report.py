"""The comparison in wandb: one run that holds its table, charts and files. The arms are runs of their own."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console

from flash_train.comparison.children import Children
from flash_train.comparison.conduct import Comparison
from flash_train.comparison.results import Cell

_GIB = 2**30
_COLUMNS = tuple(field.name for field in fields(Cell))
_LENGTH = "comparison/sequence_length"
_METRICS = (
    "peak_allocated_gib", "peak_reserved_gib", "predicted_peak_gib", "prediction_error_percent", "tokens_per_second",
)  # fmt: skip


def why_unusable() -> str | None:
    """Why wandb cannot be imported here; None if it can."""
    try:
        import wandb  # noqa: F401
    except Exception as error:  # a broken installation raises anything
        return f"{type(error).__name__}: {error}"
    return None


def try_to_log(comparison: Comparison, children: Children, files: Sequence[Path], console: Console) -> None:
    """`log_comparison`, or one line that says why not."""
    attempt(lambda: log_comparison(comparison, children, files), console)


def attempt(log: Callable[[], None], console: Console) -> None:
    """`log`, or one line that says why not: whatever wandb does, the results are there already."""
    try:
        log()
    except Exception as error:
        console.print(f"wandb failed ({type(error).__name__}: {error}); no result depends on it", markup=False)


def log_comparison(comparison: Comparison, children: Children, files: Sequence[Path]) -> None:
    """Log one run with `job_type=comparison` into the group of the arms' runs: table, line charts, pictures, files.

    Offline (the default of loggers.wandb) it lies in the comparison's folder and needs no login. Every metric is
    defined by its exact name: a pattern would compete with the one that Lightning's logger defines.
    """
    import wandb

    cells, group = comparison.cells, children.group()
    own = {"group": group, "job_type": "comparison", "id": group, "name": f"{group} comparison"}
    with start_run(children.folder, children.config, **own) as run:
        _log_curves(run, cells)
        lines = wandb.Table(columns=[*_COLUMNS], data=[[getattr(cell, name) for name in _COLUMNS] for cell in cells])
        pictures = {f"comparison/{file.stem}_chart": wandb.Image(str(file)) for file in files if file.suffix == ".png"}
        run.log({"comparison/table": lines, **_line_charts(cells), **pictures})
        run.summary["comparison/verdict"] = comparison.verdict.sentence
        for number, warning in enumerate(comparison.verdict.warnings, start=1):
            run.summary[f"comparison/warning_{number}"] = warning
        keep_files(run, files)


def start_run(folder: Path, config: Mapping[str, Any], **own: Any) -> Any:
    """A run in `folder` as loggers.wandb of `config` has it, which it keeps whole; `own` are wandb.init's arguments."""
    import wandb

    logger = config["loggers"]["wandb"]
    return wandb.init(
        dir=folder,
        project=logger.get("project"),
        entity=logger.get("entity"),
        mode="offline" if logger.get("offline") else "online",
        config=dict(config),
        settings=wandb.Settings(silent=True, x_disable_stats=True),
        **own,
    )


def keep_files(run: Any, files: Sequence[Path]) -> None:
    """Save `files` with the run: copies, since one that lies elsewhere would be a link, with a warning."""
    for file in files:
        run.save(shutil.copy(file, run.dir), base_path=run.dir, policy="now")


def _log_curves(run: Any, cells: Sequence[Cell]) -> None:
    """Each arm's numbers as metrics over the sequence length, so that wandb's own line charts can draw them."""
    arms = list(dict.fromkeys(cell.arm for cell in cells))
    run.define_metric(_LENGTH)
    for arm in arms:
        for metric in ("out_of_memory", *_METRICS):
            run.define_metric(f"comparison/{arm}/{metric}", step_metric=_LENGTH)
    for length in sorted({cell.length for cell in cells}):
        values: dict[str, float] = {_LENGTH: length}
        for cell in cells:
            if cell.length == length:
                values |= _metrics(cell)
        run.log(values)


def _metrics(cell: Cell) -> dict[str, float]:
    values = (
        cell.peak_allocated_bytes and cell.peak_allocated_bytes / _GIB,
        cell.peak_reserved_bytes and cell.peak_reserved_bytes / _GIB,
        cell.predicted_peak_bytes and cell.predicted_peak_bytes / _GIB,
        cell.prediction_error_percent,
        cell.tokens_per_second,
    )
    named = zip(_METRICS, values, strict=True)
    measured = {f"comparison/{cell.arm}/{name}": value for name, value in named if value is not None}
    return {f"comparison/{cell.arm}/out_of_memory": int(cell.status == "oom"), **measured}


def _line_charts(cells: Sequence[Cell]) -> dict[str, Any]:
    """wandb's own charts of what was measured; they have no log axes and no crosses, so the pictures go with them."""
    peaks = [(cell.arm, cell.length, cell.peak_allocated_bytes / _GIB) for cell in cells if cell.peak_allocated_bytes]
    peaks += [
        (f"{cell.arm}, predicted", cell.length, cell.predicted_peak_bytes / _GIB)
        for cell in cells
        if cell.predicted_peak_bytes
    ]
    speeds = [(cell.arm, cell.length, cell.tokens_per_second) for cell in cells if cell.tokens_per_second]
    charts = {}
    if peaks:
        charts["comparison/peak_memory"] = line_chart(peaks, title="Peak allocated memory (GiB) by sequence length")
    if speeds:
        charts["comparison/speed"] = line_chart(speeds, title="Tokens per second by sequence length")
    return charts


def line_chart(points: Sequence[tuple[str, int, float]], *, title: str) -> Any:
    """One line per arm through its (length, value) points."""
    from wandb import plot

    arms = list(dict.fromkeys(arm for arm, _, _ in points))
    return plot.line_series(
        xs=[[length for name, length, _ in points if name == arm] for arm in arms],
        ys=[[value for name, _, value in points if name == arm] for arm in arms],
        keys=arms,
        title=title,
        xname="sequence length",
    )
