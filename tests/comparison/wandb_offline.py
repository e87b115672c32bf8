"""Reads what wandb wrote offline: LevelDB's log format (blocks of 32 KiB, records of several pieces) of protobufs."""

import contextlib
import json
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from wandb.proto import wandb_internal_pb2 as protobuf

_BLOCK = 32 * 1024
_PIECE = struct.Struct("<IHB")  # checksum, length, kind: 1 whole, 2 first, 3 middle, 4 last
_FILE_HEADER = 7


@dataclass
class OfflineRun:
    """One run: its group and kind, the exact names of its metrics, what it logged, its files."""

    group: str = ""
    job_type: str = ""
    name: str = ""
    metrics: dict[str, str] = field(default_factory=dict)
    patterns: list[str] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    complete: bool = False


def read_offline_run(folder: Path) -> OfflineRun:
    """The run in an `offline-run-...` folder, once wandb's own process, which outlives the run, has written it all."""
    (log,) = folder.glob("*.wandb")
    deadline = time.monotonic() + 30
    while True:
        with contextlib.suppress(DecodeError):  # of a record that is being written
            if (run := _read(log)).complete:
                return run
        assert time.monotonic() < deadline, f"{log} was never finished"
        time.sleep(0.05)


def _read(log: Path) -> OfflineRun:
    run = OfflineRun()
    for piece in _records(log.read_bytes()):
        record = protobuf.Record()  # pyright: ignore[reportAttributeAccessIssue] made when the module is imported
        record.ParseFromString(piece)
        _take(record, run)
    return run


def _take(record: Any, run: OfflineRun) -> None:
    kind = record.WhichOneof("record_type")
    if kind == "run":
        run.group, run.job_type, run.name = record.run.run_group, record.run.job_type, record.run.display_name
        run.config |= _items(record.run.config.update)
    elif kind == "metric":
        run.metrics[record.metric.name] = record.metric.step_metric
        run.patterns += [record.metric.glob_name] if record.metric.glob_name else []
    elif kind == "history":
        run.history.append(_items(record.history.item))
    elif kind == "summary":
        run.summary |= _items(record.summary.update)
    elif kind == "config":
        run.config |= _items(record.config.update)
    elif kind == "exit":
        run.complete = True
    elif kind == "files":
        run.files += [file.path for file in record.files.files]


def _items(items: Any) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def _records(log: bytes) -> Iterator[bytes]:
    position, parts = _FILE_HEADER, b""
    while position + _PIECE.size <= len(log):
        room = _BLOCK - position % _BLOCK
        if room < _PIECE.size:  # the end of a block that is too short for a piece is filled up
            position += room
            continue
        _, length, kind = _PIECE.unpack_from(log, position)
        position += _PIECE.size
        parts += log[position : position + length]
        position += length
        if kind in (1, 4):
            yield parts
            parts = b""
