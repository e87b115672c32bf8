"""Inputs and the documents in them: text files, JSON Lines, and Hugging Face datasets on disk."""

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from flash_train.training.data.documents import BLOCK_BYTES
from flash_train.training.data.text_files import find_files

KINDS = ("text", "jsonl", "dataset")
_LINES = {".jsonl", ".ndjson"}


@dataclass(frozen=True)
class Reading:
    """How documents are found in inputs.

    Attributes:
        kind: one of KINDS, None: by the name of the file.
        field: of JSON Lines and datasets, the one that holds the text.
        split: of a dataset that has several.
        document_end: in text files, what ends a document; None: a file is one.
    """

    kind: str | None = None
    field: str = "text"
    split: str | None = None
    document_end: str | None = None


@dataclass(frozen=True)
class Piece:
    """A stretch of an input: bytes (of a dataset, rows) from `start` to before `stop`, None for its end."""

    path: Path
    kind: str
    start: int
    stop: int | None
    size: int  # in bytes, roughly


def find_pieces(paths: Sequence[str], reading: Reading, *, most_bytes: int) -> list[Piece]:
    """The inputs that paths and globs name, those that can be divided in pieces of about `most_bytes`; empty ones not.

    Raises ValueError for one that is missing or no input, if all are empty, and for a dataset without its package.
    """
    pieces: list[Piece] = []
    for path in find_files(paths):
        kind = reading.kind or _kind(path)
        if kind == "dataset":
            pieces += _of_dataset(path, reading, most_bytes)
        elif not _is_empty(path):
            pieces += _of_file(path, kind, _delimiter(kind, reading), most_bytes)
    if not pieces:
        raise ValueError(f"inputs must hold text, all of {', '.join(paths)} are empty; name others")
    return pieces


def read_documents(piece: Piece, reading: Reading) -> Iterator[tuple[str, bytes]]:
    """Where each document stands, and its UTF-8 bytes (of a text file, whatever bytes there are); empty ones not.

    Raises ValueError where a line is no JSON, a field is missing or no text, or the file can no longer be read.
    """
    if piece.kind == "dataset":
        found = _rows(piece, reading)
    else:
        found = _records(piece, _delimiter(piece.kind, reading))
    for where, record in found:
        if piece.kind == "jsonl":
            if not record.strip():
                continue
            record = _text_of(_parsed(record, where), reading.field, where)
        if record:
            yield where, record


def stamp(path: Path) -> list[Any]:
    """What tells that an input is still the same: its path, size and time (of a folder, of the files in it)."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    status = [file.stat() for file in files if file.is_file()]
    return [str(path.resolve()), sum(s.st_size for s in status), max((s.st_mtime_ns for s in status), default=0)]


def _kind(path: Path) -> str:
    if path.is_dir():
        return "dataset"
    return "jsonl" if {path.suffix, Path(path.stem).suffix if path.suffix == ".gz" else ""} & _LINES else "text"


def _delimiter(kind: str, reading: Reading) -> bytes | None:
    if kind == "jsonl":
        return b"\n"
    return reading.document_end.encode() if reading.document_end else None


def _is_empty(path: Path) -> bool:
    if path.exists() and not path.is_file():
        raise ValueError(f"an input must be a file or a dataset's folder, {path} is neither; name a file")
    try:
        with path.open("rb") as file:
            return not file.read(1)
    except OSError as error:
        raise ValueError(f"an input must be readable, {path} is not ({error.strerror}); check the path") from error


def _of_file(path: Path, kind: str, delimiter: bytes | None, most_bytes: int) -> list[Piece]:
    size = path.stat().st_size
    if delimiter is None or path.suffix == ".gz":
        return [Piece(path, kind, 0, None, size)]
    cuts = [0]
    with path.open("rb") as file:
        while cuts[-1] < size:
            cuts.append(_after(file, delimiter, cuts[-1] + most_bytes, size))
    return [Piece(path, kind, start, stop, stop - start) for start, stop in zip(cuts, cuts[1:], strict=False)]


def _after(file: IO[bytes], delimiter: bytes, position: int, size: int) -> int:
    """Where the first delimiter ends that begins at `position` or later; `size` where there is none."""
    file.seek(position)
    seen = b""  # from `position` on
    while block := file.read(1 << 16):
        seen += block
        found = seen.find(delimiter)
        if found >= 0:
            return position + found + len(delimiter)
        kept = seen[len(seen) - len(delimiter) + 1 :]
        position, seen = position + len(seen) - len(kept), kept
    return size


def _records(piece: Piece, delimiter: bytes | None) -> Iterator[tuple[str, bytes]]:
    """What lies between delimiters; a block is in memory, and a record."""
    position, rest = piece.start, b""
    left = None if piece.stop is None else piece.stop - piece.start
    try:
        with cast(IO[bytes], gzip.open(piece.path) if piece.path.suffix == ".gz" else piece.path.open("rb")) as file:
            file.seek(piece.start)
            while block := file.read(BLOCK_BYTES if left is None else min(BLOCK_BYTES, left)):
                left = None if left is None else left - len(block)
                *whole, rest = (rest + block).split(delimiter) if delimiter else [rest + block]
                for record in whole:
                    yield f"{piece.path}, byte {position}", record
                    position += len(record) + len(delimiter or b"")
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"an input must stay readable, {piece.path} did not ({reason}); run it again") from error
    yield f"{piece.path}, byte {position}" if delimiter else str(piece.path), rest


def _parsed(line: bytes, where: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"a line must be JSON, {where} is not ({error}); mend it, or set format=text") from error


def _text_of(row: Any, field: str, where: str) -> bytes:
    if not isinstance(row, dict) or field not in row:
        fields = ", ".join(map(str, row)) if isinstance(row, dict) else f"none, it is a {type(row).__name__}"
        raise ValueError(f"a row must have the field {field!r}, {where} has {fields}; set field=<name>")
    text = row[field]
    if not isinstance(text, str):
        raise ValueError(f"the field {field!r} must be text, {where} has a {type(text).__name__}; set field=<name>")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a text must be Unicode, {where} has half a surrogate pair; take it out") from error


def _of_dataset(path: Path, reading: Reading, most_bytes: int) -> list[Piece]:
    dataset = _open_dataset(path, reading)
    if reading.field not in dataset.column_names:
        raise ValueError(
            f"a dataset must have the column {reading.field!r}, {path} has {', '.join(dataset.column_names)}; "
            "set field=<name>"
        )
    rows = len(dataset)
    size = max(1, dataset.data.nbytes // max(1, rows))
    step = max(1, most_bytes // size)
    return [
        Piece(path, "dataset", start, min(start + step, rows), size * (min(start + step, rows) - start))
        for start in range(0, rows, step)
    ]


def _rows(piece: Piece, reading: Reading) -> Iterator[tuple[str, bytes]]:
    dataset = _open_dataset(piece.path, reading).select_columns([reading.field])
    for number in range(piece.start, piece.stop or 0):
        where = f"{piece.path}, row {number}"
        yield where, _text_of(dataset[number], reading.field, where)


def _open_dataset(path: Path, reading: Reading) -> Any:
    try:
        import datasets  # pyright: ignore[reportMissingImports] (an extra)
    except ImportError as error:
        raise ValueError(
            f"{path} is a folder, and to read it as a dataset needs the package datasets, which cannot be imported "
            f"({error}); pip install 'flash_train[datasets]', or name its files: '{path}/*'"
        ) from error
    try:
        dataset = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"a folder must hold a dataset that was saved with save_to_disk, {path} does not; "
            f"save it so, or name its files: '{path}/*'"
        ) from error
    if isinstance(dataset, datasets.DatasetDict):
        if reading.split not in dataset:
            raise ValueError(f"split must be one of {', '.join(map(str, dataset))}, of {path}, got {reading.split}; "
                             "set split=<one of them>")  # fmt: skip
        return dataset[reading.split]
    return dataset
