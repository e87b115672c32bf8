"""Prepared text: tokenized once into a memory-mapped file, in a folder named by content and settings."""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from filelock import FileLock

from flash_train.training.data.documents import BLOCK_BYTES, VALIDATION_SHARE, Document
from flash_train.training.data.order import Stream
from flash_train.training.data.tokenizers import (
    SEPARATOR,
    DocumentTokenizer,
    Tokenizer,
    smallest_dtype,
    tokenizer_from_documents,
    tokenizer_from_state,
)

# Raise it when the same documents and settings are to give other files.
FORMAT = 2
TOKENS, META = "tokens.bin", "meta.json"


@dataclass(frozen=True)
class Tokens:
    """A stretch of a token file; it is mapped where it is used, so that a worker receives a path and not a copy."""

    path: Path
    dtype: str
    start: int
    count: int

    def __len__(self) -> int:
        return self.count

    @property
    def array(self) -> np.ndarray:
        """The tokens [count], read-only and mapped."""
        return self._mapped

    @cached_property
    def _mapped(self) -> np.ndarray:
        return np.asarray(np.memmap(self.path, self.dtype, "r")[self.start : self.start + self.count])

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """The `length` tokens from each of `starts` [B] on, [B, length]; past the end the last one repeats."""
        return self.array[np.minimum(starts[:, None] + np.arange(length), self.count - 1)]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_mapped"}


@dataclass(frozen=True)
class PreparedText:
    """Two splits and the tokenizer that made them; `key` stands for their content and settings.

    `ambiguous` is the sha256 of a document that holds the SEPARATOR itself, None if none of several does.
    """

    key: str
    tokenizer: Tokenizer
    train: Stream
    validation: Stream
    validation_bytes: int | None
    ambiguous: str | None


def cache_folder(cache_dir: str | os.PathLike[str] | None) -> Path:
    """Where prepared text is kept: `cache_dir`, else XDG_CACHE_HOME or ~/.cache with flash_train/data below it."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser().absolute()
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        # The XDG specification has relative paths ignored.
        return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "flash_train" / "data"
    except RuntimeError as error:
        raise ValueError(f"the prepared data needs a cache folder, {error}; set data.cache_dir=<folder>") from None


def write_whole(path: Path, text: str) -> None:
    """Write the whole file or none of it, and not before it is on the disk."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def prepare(train: Sequence[Document], validation: Sequence[Document], *, tokenizer: str, folder: Path) -> PreparedText:
    """Tokenize the documents into `folder`, or open what was prepared there before.

    Without validation documents the last tenth of the tokens validates (training has int(0.9 n) of n, nanoGPT's
    split). Several processes may do this at once: one works, the others wait. Raises ValueError if the folder
    cannot be written.
    """
    hashes = [[document.sha256 for document in split] for split in (train, validation)]
    key = hashlib.sha256(json.dumps([FORMAT, tokenizer, *hashes]).encode()).hexdigest()[:32]
    try:
        # A cache that cannot be written is good enough for what it holds.
        prepared = _open(folder / key)
        if prepared is not None:
            return prepared
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f"{key}.lock"):
            # Another process may have done it while this one waited.
            prepared = _open(folder / key)
            if prepared is None:
                _build(folder / key, train, validation, tokenizer)
                prepared = _open(folder / key)
    except OSError as error:
        raise ValueError(
            f"the prepared data needs a cache folder that can be written, {folder} cannot ({error.strerror or error}); "
            "set data.cache_dir=<folder> or XDG_CACHE_HOME"
        ) from error
    assert prepared is not None
    return prepared


def _open(folder: Path) -> PreparedText | None:
    """What lies there, or None unless it is whole."""
    path = folder / TOKENS
    try:
        meta = json.loads((folder / META).read_text())
        size = path.stat().st_size
    except (FileNotFoundError, ValueError):
        return None
    train, validation, dtype = meta["train_tokens"], meta["validation_tokens"], meta["dtype"]
    if size != (train + validation) * np.dtype(dtype).itemsize:
        return None
    return PreparedText(
        key=folder.name,
        tokenizer=tokenizer_from_state(meta["tokenizer"]),
        train=Tokens(path, dtype, 0, train),
        validation=Tokens(path, dtype, train, validation),
        validation_bytes=meta["validation_bytes"],
        ambiguous=meta["ambiguous"],
    )


def _build(folder: Path, train: Sequence[Document], validation: Sequence[Document], tokenizer_kind: str) -> None:
    """Write beside the final name and rename: a killed preparation leaves nothing that is taken for whole."""
    temporary = folder.with_name(f".{folder.name}.partial")
    for stale in (folder, temporary):
        shutil.rmtree(stale, ignore_errors=True)
    temporary.mkdir()
    try:
        tokenizer = tokenizer_from_documents(tokenizer_kind, [*train, *validation])
        with (temporary / TOKENS).open("wb") as file:
            separator = tokenizer.encode(SEPARATOR) if validation else None
            appended = [_append(file, split, tokenizer, separator) for split in (train, validation)]
            file.flush()
            os.fsync(file.fileno())
        counts = [count for count, _ in appended]
        if not validation:
            head = int((1 - VALIDATION_SHARE) * counts[0])
            counts = [head, counts[0] - head]
        dtype = smallest_dtype(tokenizer.vocabulary_size).name
        meta = {
            "tokenizer": tokenizer.state(),
            "dtype": dtype,
            "train_tokens": counts[0],
            "validation_tokens": counts[1],
            "ambiguous": next((sha256 for _, sha256 in appended if sha256), None),
            "validation_bytes": _count_bytes(Tokens(temporary / TOKENS, dtype, *counts), tokenizer),
        }
        (temporary / META).write_text(json.dumps(meta))
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _append(
    file: BinaryIO, documents: Sequence[Document], tokenizer: DocumentTokenizer, separator: np.ndarray | None
) -> tuple[int, str | None]:
    """Write the documents' tokens, `separator` [1] after each; their number, and the sha256 of one that holds it."""
    count, ambiguous = 0, None
    for document in documents:
        for tokens in tokenizer.encode_document(document):
            file.write(tokens.data)
            count += len(tokens)
            if separator is not None and (tokens == separator).any():
                ambiguous = document.sha256
        if separator is not None:
            file.write(separator.data)
            count += 1
    return count, ambiguous


def _count_bytes(tokens: Tokens, tokenizer: DocumentTokenizer) -> int:
    sizes = tokenizer.bytes_per_id()
    # In blocks, for it takes eight bytes for each token.
    return sum(int(sizes[tokens.array[i : i + BLOCK_BYTES]].sum()) for i in range(0, len(tokens), BLOCK_BYTES))
