"""One unit of the work: some documents in, a training and a validation shard out, and a note that says so."""

import functools
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flash_train.training.data.corpus.inputs import Piece, Reading, read_documents
from flash_train.training.data.documents import VALIDATION_SHARE
from flash_train.training.data.shards import ShardWriter, open_shard
from flash_train.training.data.store import write_whole
from flash_train.training.data.subwords import tokenizer_from_file
from flash_train.training.data.tokenizers import ByteTokenizer, Tokenizer

TOKENIZER, NOTES = "tokenizer.json", ".units"
SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Unit:
    """Pieces whose documents become a pair of shards. `split`: "train", "validation", "tenth" (the last tenth of the
    tokens of the only document validates), or "hash" (each document by the hash of its content)."""

    number: int
    pieces: tuple[Piece, ...]
    split: str

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)


@dataclass(frozen=True)
class Job:
    """What is the same for all units."""

    folder: Path
    reading: Reading
    validation_share: float
    separator: str | None  # the tokenizer file's, where it has to be named


@dataclass
class _Side:
    """A shard on its way, and what is counted of it."""

    writer: ShardWriter
    documents: int = 0
    bytes: int = 0
    holds_separator: str | None = None

    def note(self) -> dict[str, Any]:
        sha256 = self.writer.close()
        return {
            "file": self.writer.path.name,
            "tokens": self.writer.count,
            "bytes": self.bytes,
            "documents": self.documents,
            "sha256": sha256,
            "holds_separator": self.holds_separator,
        }


def encode_unit(unit: Unit, job: Job) -> dict[str, Any]:
    """Write the shards of a unit, then its note, by split; a split without documents gets neither.

    Raises ValueError for a document that cannot be read or encoded; it leaves nothing behind then.
    """
    tokenizer = _tokenizer(job.folder / TOKENIZER, job.separator)
    sides: dict[str, _Side] = {}
    try:
        for split, content, tokens, where in _encoded(unit, job, tokenizer):
            if split not in sides:
                path = job.folder / f"{split}_{unit.number:06d}.bin"
                sides[split] = _Side(ShardWriter(path, vocabulary_size=tokenizer.vocabulary_size))
            side = sides[split]
            if unit.split != "tenth":
                if (tokens == tokenizer.separator).any():
                    side.holds_separator = side.holds_separator or where
                tokens = np.append(tokens, tokens.dtype.type(tokenizer.separator))
                content += 1  # the separator stands for a byte, as the NUL between texts of bytes is one
            side.writer.write(tokens)
            side.documents += 1
            side.bytes += content
        note = {split: side.note() for split, side in sides.items()}
    except BaseException:
        for side in sides.values():
            side.writer.abandon()
        raise
    write_whole(job.folder / NOTES / f"{unit.number:06d}.json", json.dumps(note))
    return note


def finished(unit: Unit, folder: Path) -> dict[str, Any] | None:
    """The note of a unit whose shards are there and whole, else None."""
    try:
        note = json.loads((folder / NOTES / f"{unit.number:06d}.json").read_text())
        for part in note.values():
            if open_shard(folder / part["file"]).sha256 != part["sha256"]:
                return None
    except (OSError, ValueError):
        return None
    return note


def read_texts(unit: Unit, job: Job) -> Iterator[str]:
    """The documents of a unit as text. Raises ValueError where one is not UTF-8."""
    for piece in unit.pieces:
        for where, content in read_documents(piece, job.reading):
            yield _decoded(content, where)


def characters_of(unit: Unit, job: Job) -> str:
    """The distinct characters of a unit's documents."""
    found: set[str] = set()
    for text in read_texts(unit, job):
        found.update(text)
    return "".join(sorted(found))


def _encoded(unit: Unit, job: Job, tokenizer: Tokenizer) -> Iterator[tuple[str, int, np.ndarray, str]]:
    """For each document its split, size in bytes, tokens and place; of a lone one in two parts."""
    for piece in unit.pieces:
        for where, content in read_documents(piece, job.reading):
            raw = isinstance(tokenizer, ByteTokenizer)
            tokens = np.frombuffer(content, np.uint8) if raw else tokenizer.encode(_decoded(content, where))
            if unit.split == "tenth":
                head = int((1 - VALIDATION_SHARE) * len(tokens))
                # In the middle of a character the count is off by its bytes.
                cut = head if raw else len(tokenizer.decode(tokens[:head].tolist()).encode())
                yield "train", cut, tokens[:head], where
                yield "validation", len(content) - cut, tokens[head:], where
            else:
                yield _split_of(content, job) if unit.split == "hash" else unit.split, len(content), tokens, where


def _split_of(content: bytes, job: Job) -> str:
    number = int.from_bytes(hashlib.sha256(content).digest()[:4], "big")
    return "validation" if number < job.validation_share * 2**32 else "train"


def _decoded(content: bytes, where: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"a text must be UTF-8, {where} is not ({error.reason} at its byte {error.start}); "
            "convert it, or set tokenizer=bytes"
        ) from None


@functools.cache  # a process does many units
def _tokenizer(path: Path, separator: str | None) -> Tokenizer:
    return tokenizer_from_file(path, separator)
