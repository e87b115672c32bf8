"""What two runs that should be one have left behind, and where it differs."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from flash_train.training.resume import find_checkpoint

OWN = {"run_config", "wandb_run_id"}  # entries of a checkpoint that differ by right: the command line, the run's name


def same(a: Any, b: Any) -> bool:
    """Whether two states are equal, tensors bit for bit."""
    return next(differing(a, b), None) is None


def differing(a: Any, b: Any, path: str = "") -> Iterator[str]:
    """The places where two states differ."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        # As bytes: NaN is equal to NaN then, and 0 is not equal to -0.
        if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(_bytes(a), _bytes(b)):
            yield path
    elif isinstance(a, dict) and isinstance(b, dict):
        for key in {**a, **b}:
            if key in a and key in b:
                yield from differing(a[key], b[key], f"{path}.{key}".lstrip("."))
            else:
                yield f"{path}.{key} (only in one)".lstrip(".")
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from differing(x, y, f"{path}[{index}]")
    elif type(a) is not type(b) or a != b:
        yield path


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.detach().cpu().contiguous().flatten().view(torch.uint8)


def last_checkpoint(folder: Path) -> dict[str, Any]:
    """All that the newest checkpoint of a run's folder holds, without what is its own."""
    checkpoint = torch.load(find_checkpoint(folder), map_location="cpu", weights_only=True)
    return {key: value for key, value in checkpoint.items() if key not in OWN}


Logged = dict[tuple[int, str], dict[str, str]]


def logged(folder: Path) -> list[Logged]:
    """The rows of each metrics.csv of a run, by step and kind: one file for each time that it was begun."""
    return [_rows(file) for file in sorted(folder.glob("csv/version_*/metrics.csv"))]


def _rows(file: Path) -> Logged:
    rows: Logged = {}
    with file.open(newline="") as lines:
        for row in csv.DictReader(lines):
            if None in row.values():  # the last line of a killed process can be cut
                continue
            kind = "validation" if row.get("validation/loss") else "train"
            rows[int(row["step"]), kind] = {name: value for name, value in row.items() if value and name != "epoch"}
    return rows


def differences(run: Path, unbroken: Path, *, checkpoint_every: int) -> list[str]:
    """Where a run that was broken off differs from one that was not, in words; nothing if it is the same.

    Compared are the whole last checkpoints, what the results say of losses, and every row that any part of the run has
    logged; together the parts must have logged every row. The one exception is the row of a step after which a
    checkpoint was written: Lightning hands it to the loggers a moment after that, and a kill may come in between.
    """
    found = [f"checkpoint: {place}" for place in differing(last_checkpoint(run), last_checkpoint(unbroken))]
    first, second = (json.loads((folder / "result.json").read_text()) for folder in (run, unbroken))
    for key in ("status", "steps", "loss_curve", "validation"):
        if first[key] != second[key]:
            found.append(f"result.json: {key}: {first[key]} and not {second[key]}")
    (expected,) = logged(unbroken)
    parts = logged(run)
    for number, part in enumerate(parts):
        for key, row in part.items():
            if row != expected.get(key):
                found.append(f"metrics.csv of part {number}: {key}: {row} and not {expected.get(key)}")
    lost = expected.keys() - {key for part in parts for key in part}
    if lost := sorted((step, kind) for step, kind in lost if kind != "train" or (step + 1) % checkpoint_every):
        found.append(f"metrics.csv: no part has {lost}")
    return found
