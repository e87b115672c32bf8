"""A sweep (`-m`): one process per job, whichever launcher starts it, and one table of what the jobs left.

Each job leaves a record below the sweep's folder, so that the table can be made of jobs that ran elsewhere. Nothing
here imports torch.
"""

import csv
import io
import json
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from flash_train.commands.child import run_child
from flash_train.comparison.runner import how_it_ended, out_of_memory_kills
from flash_train.comparison.text import human_bytes, human_count, quoted

RECORDS = ".jobs"
RUNNING = "running"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One job. Memory in bytes, times in seconds, losses in nats per token; None where nothing was measured.

    `status`: running (or lost with its machine), ok, oom, refused, failed, interrupted, as in result.json; `error` says
    why. `sweep` tells the records of one sweep from those of an earlier one in the same folder.
    """

    sweep: str
    number: int
    overrides: tuple[str, ...]
    folder: str
    status: str = RUNNING
    exit_code: int | None = None
    error: str | None = None
    seconds: float | None = None
    steps: int | None = None
    train_loss: float | None = None
    validation_loss: float | None = None
    bits_per_byte: float | None = None
    tokens_per_second: float | None = None
    peak_allocated_bytes: int | None = None

    @property
    def changes(self) -> dict[str, str]:
        """The overrides by their keys."""
        return {key: value for key, _, value in (override.partition("=") for override in self.overrides)}


class SweepFolder(Callback):
    """Hydra tells it where a sweep writes, which nothing else knows before its jobs run."""

    found: Path | None = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        SweepFolder.found = Path(config.hydra.sweep.dir).absolute()


def check_started_once(environment: Mapping[str, str]) -> None:
    """Raise ValueError where something has started a process per device, each of which would begin the sweep."""
    for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        if int(environment.get(name) or 1) > 1:
            raise ValueError(
                f"a sweep is started once and starts the processes of each job itself, and {name} says that "
                f"{environment[name]} were started; leave out torchrun or srun"
            )


def check_tasks(config: Mapping[str, Any], launcher: Mapping[str, Any]) -> None:
    """Raise ValueError where submitit would not start what a job's devices need.

    A job starts a process for each of its devices itself, except under Slurm, where Lightning takes the tasks that
    Slurm has started: there they must be as many.
    """
    tasks, nodes = int(launcher.get("tasks_per_node") or 1), int(launcher.get("nodes") or 1)
    slurm, trainer = "Slurm" in str(launcher.get("_target_")), config.get("trainer") or {}
    devices = trainer.get("devices", 1)
    devices = len(devices) if isinstance(devices, list) else devices
    wanted = (devices, trainer.get("num_nodes", 1)) if slurm else (1, 1)
    if (tasks, nodes) != wanted:
        where = "Slurm starts a task for each device" if slurm else "a job starts a process for each device itself"
        raise ValueError(
            f"{where}: hydra.launcher.tasks_per_node and nodes must be {wanted[0]} and {wanted[1]} with "
            f"trainer.devices={devices}, got {tasks} and {nodes}; set them so"
        )


def run_job(command: Sequence[str], row: Row, *, sweep_folder: Path) -> Row:
    """Run one job of a sweep to its end in a process of its own, and leave its record.

    A scheduler that starts the same job again (after a preemption) has it go on at its last checkpoint. Raises what
    interrupts it, once the process has ended and the record says so.
    """
    command, result = list(command), Path(row.folder) / "result.json"
    if _started_before(row, sweep_folder) and any(Path(row.folder, "checkpoints").glob("*.ckpt")):
        command.append(f"resume_from={quoted(row.folder)}")
    elif _first_rank():
        result.unlink(missing_ok=True)  # another sweep's, in the same folder
    write_record(row, sweep_folder)
    kills, start, code = out_of_memory_kills(), time.monotonic(), None
    try:
        code = run_child(command)
    finally:
        killed = out_of_memory_kills() > kills
        left = _read(result) or _unreported(code, killed_for_memory=killed)
        row = finished(row, left, exit_code=code, seconds=time.monotonic() - start)
        write_record(row, sweep_folder)
    return row


def finished(row: Row, left: Mapping[str, Any], *, exit_code: int | None, seconds: float) -> Row:
    """The row with what flash-train's result.json says, and of another command how it ended."""
    validation, curve = left.get("validation") or {}, left.get("loss_curve") or []
    status, error = left["status"], left.get("error")
    if status == "ok" and exit_code:  # what it had measured by then stands
        status, error = "failed", f"ended with exit code {exit_code}"
    return replace(
        row,
        status=status,
        exit_code=exit_code,
        error=error,
        seconds=seconds,
        steps=left.get("steps"),
        train_loss=curve[-1][1] if curve else None,
        validation_loss=validation.get("loss"),
        bits_per_byte=validation.get("bits_per_byte"),
        tokens_per_second=(left.get("speed") or {}).get("tokens_per_second"),
        peak_allocated_bytes=(left.get("memory") or {}).get("peak_allocated_bytes"),
    )


def write_record(row: Row, sweep_folder: Path) -> None:
    """Write the whole record or none of it; of several processes of one job, the first does."""
    if _first_rank():
        file = _record_file(row, sweep_folder)
        file.parent.mkdir(parents=True, exist_ok=True)
        _write_whole(file, json.dumps(asdict(row)) + "\n")


def read_records(sweep_folder: Path, sweep: str) -> list[Row]:
    """The rows of this sweep's jobs that have begun, in their order."""
    found = (_read(file) for file in (sweep_folder / RECORDS).glob("[0-9]*.json"))
    rows = [Row(**{**record, "overrides": tuple(record["overrides"])}) for record in found if record is not None]
    return sorted((row for row in rows if row.sweep == sweep), key=lambda row: row.number)


def conclude_sweep(sweep_folder: Path, sweep: str) -> int:
    """Print and write the table of this sweep's jobs; the exit code, 0 if all of them are ok."""
    rows = read_records(sweep_folder, sweep)
    if not rows:
        print(f"no job has left a record in {sweep_folder / RECORDS}")
        return 1
    print_table(rows, sweep_folder)
    write_table(rows, sweep_folder)
    return 0 if all(row.status == "ok" for row in rows) else 1


def write_table(rows: Sequence[Row], sweep_folder: Path) -> None:
    """Write results.json and results.csv, the overrides in columns under their keys."""
    names = [field.name for field in fields(Row) if field.name not in ("sweep", "overrides")]
    documents = [{name: getattr(row, name) for name in names} | {"overrides": row.changes} for row in rows]
    _write_whole(sweep_folder / "results.json", json.dumps({"jobs": documents}, indent=2) + "\n")
    keys = list(dict.fromkeys(key for row in rows for key in row.changes))
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow([names[0], *keys, *names[1:]])
    for row in rows:
        first, *rest = (getattr(row, name) for name in names)
        writer.writerow([first, *(row.changes.get(key) for key in keys), *rest])
    _write_whole(sweep_folder / "results.csv", table.getvalue())


def print_table(rows: Sequence[Row], sweep_folder: Path) -> None:
    """What differs from job to job against what they measured, and in a line each what went wrong."""
    from rich.console import Console

    from flash_train.comparison.table import print_lines

    keys = list(dict.fromkeys(key for row in rows for key in row.changes))
    varied = [key for key in keys if len({row.changes.get(key) for row in rows}) > 1]
    columns = {"job": [str(row.number) for row in rows]}
    columns |= {key: [row.changes.get(key, "") for row in rows] for key in varied}
    columns["status"] = [row.status if row.status != "oom" else "OOM" for row in rows]
    columns |= {name: texts for name, texts in _measured(rows).items() if any(texts)}
    console = Console(highlight=False)
    lines = list(zip(*columns.values(), strict=True))
    print_lines(list(columns), lines, console, title="Jobs of the sweep")
    counts = Counter(sorted((row.status for row in rows), key="ok".__ne__))
    summary = ", ".join(f"{count} {status}" for status, count in counts.items())
    console.print(f"{len(rows)} jobs: {summary}; {sweep_folder / 'results.csv'}", markup=False, soft_wrap=True)
    for row in rows:
        if row.status != "ok":
            code = "" if row.exit_code is None else f", exit {row.exit_code}"
            why = row.error or "no end of it is known"
            console.print(f"  job {row.number}{code}: {why}", markup=False, soft_wrap=True)


def _measured(rows: Sequence[Row]) -> dict[str, list[str]]:
    def texts(name: str, style: Any) -> list[str]:
        values = [getattr(row, name) for row in rows]
        return ["" if value is None else style(value) for value in values]

    return {
        "train loss": texts("train_loss", "{:.4f}".format),
        "validation loss": texts("validation_loss", "{:.4f}".format),
        "bits per byte": texts("bits_per_byte", "{:.4f}".format),
        "tokens/s": texts("tokens_per_second", human_count),
        "peak": texts("peak_allocated_bytes", human_bytes),
    }


def _first_rank() -> bool:
    """Whether this process speaks for its job, of which Slurm may start one per device."""
    return int(os.environ.get("SLURM_PROCID") or 0) == 0


def _record_file(row: Row, sweep_folder: Path) -> Path:
    return sweep_folder / RECORDS / f"{row.number}.json"


def _started_before(row: Row, sweep_folder: Path) -> bool:
    record = _read(_record_file(row, sweep_folder))
    return record is not None and record.get("sweep") == row.sweep


def _write_whole(file: Path, text: str) -> None:
    """Several jobs may write one table at once."""
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        unfinished.write_text(text)
        os.replace(unfinished, file)
    finally:
        unfinished.unlink(missing_ok=True)


def _unreported(code: int | None, *, killed_for_memory: bool) -> dict[str, Any]:
    """The result of a process that left none; None: of one that was interrupted."""
    if code is None:
        return {"status": "interrupted", "error": "interrupted"}
    if code == 0:
        return {"status": "ok"}
    return how_it_ended(code, killed_for_memory=killed_for_memory)


def _read(file: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
