"""Shards: memory-mapped token files with a header that is checked, and files of nanoGPT and llm.c that are read too.

A shard is llm.c's file: 256 little-endian int32, then the tokens. llm.c reads magic, version and the number of tokens;
ours also says, where llm.c has zeros, the vocabulary's size and the tokens' sha256. nanoGPT's files are tokens alone.
"""

import hashlib
import json
import logging
import os
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from flash_train.training.data.documents import BLOCK_BYTES
from flash_train.training.data.store import Tokens, write_whole

log = logging.getLogger(__name__)

HEADER_BYTES = 1024
VERSIONS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}  # by magic
_MAGICS = {dtype: (magic, version) for magic, (version, dtype) in VERSIONS.items()}
# Of the header's int32; the sha256 takes eight.
_MARK, _VOCABULARY, _SHA256 = 3, 4, 8
_MARKED = int.from_bytes(b"FLSH", "little")
_MOST_TOKENS = 2**31 - 1  # llm.c counts in int32
_LONG = 2**30  # bytes; to read more takes so long that it is said


def shard_dtype(vocabulary_size: int) -> str:
    """The narrower of the two types that holds every token."""
    return "uint16" if vocabulary_size <= 1 << 16 else "uint32"


class ShardWriter:
    """Writes a shard that appears under its name only once it is wholly on the disk (`close`)."""

    def __init__(self, path: Path, *, vocabulary_size: int) -> None:
        self.path = path
        self.vocabulary_size = vocabulary_size
        self.count = 0
        self.dtype = np.dtype(shard_dtype(vocabulary_size)).newbyteorder("<")
        self._digest = hashlib.sha256()
        self._partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        self._file = self._partial.open("wb")
        self._file.write(bytes(HEADER_BYTES))

    def write(self, tokens: np.ndarray) -> None:
        """Append tokens [N] of any integer type, each below the vocabulary's size."""
        content = tokens.astype(self.dtype).tobytes()
        self._digest.update(content)
        self._file.write(content)
        self.count += len(tokens)

    def close(self) -> str:
        """Complete the file and return the sha256 of its tokens. Raises ValueError for more than a shard can count."""
        if self.count > _MOST_TOKENS:
            raise ValueError(f"a shard holds at most {_MOST_TOKENS} tokens, {self.path} has {self.count}; set fewer "
                             "shard_bytes, or divide the document that is so long")  # fmt: skip
        header = np.zeros(HEADER_BYTES // 4, "<i4")
        header[:3] = *_MAGICS[self.dtype.name], self.count
        header[_MARK], header[_VOCABULARY] = _MARKED, self.vocabulary_size
        header[_SHA256 : _SHA256 + 8] = np.frombuffer(self._digest.digest(), "<i4")
        self._file.seek(0)
        self._file.write(header.tobytes())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._partial, self.path)
        return self._digest.hexdigest()

    def abandon(self) -> None:
        """Leave nothing behind."""
        self._file.close()
        self._partial.unlink(missing_ok=True)


@dataclass(frozen=True)
class Shard:
    """A file's tokens; `vocabulary_size` and `sha256` are what its header says of them, None where it does not."""

    tokens: Tokens
    vocabulary_size: int | None = None
    sha256: str | None = None


def open_shard(path: Path, *, vocabulary_size: int | None = None, dtype: str | None = None) -> Shard:
    """Look at a file's size and header. No token is read but a few where the type is to be found out.

    Args:
        path: a shard of ours or llm.c's, or tokens without a header.
        vocabulary_size: of the tokens, where the caller knows.
        dtype: "uint16" or "uint32", of tokens without a header; None: uint32 where the vocabulary needs it, or where
            every other 16 bits at the file's beginning are zero.

    Raises ValueError if the file is missing, cut short, empty, of no such format, or of another type or vocabulary.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            beginning = file.read(HEADER_BYTES)
    except OSError as error:
        raise ValueError(f"a token file must be readable, {path} is not ({error.strerror}); check the path") from error
    header = np.frombuffer(beginning, "<i4") if len(beginning) == HEADER_BYTES else np.zeros(1, "<i4")
    if int(header[0]) in VERSIONS:
        shard = _described(path, size, header)
        told = (("dtype", dtype, shard.tokens.dtype), ("vocabulary_size", vocabulary_size, shard.vocabulary_size))
        for name, given, own in told:
            if given is not None and own is not None and given != own:
                raise ValueError(f"{name} must be what the header says, {path} has {own}, got {given}; "
                                 f"leave data.{name} out")  # fmt: skip
        return shard
    if dtype is None and len(header) > 1 and not header[4:].any():  # no text is a thousand times token 0
        raise ValueError(
            f"a token file's header must begin with {' or '.join(map(str, VERSIONS))}, {path} begins with {header[0]}; "
            "prepare it again with flash-prepare, or, if it has no header, set data.dtype=uint16 (or uint32)"
        )
    dtype = dtype or _found_out(beginning, vocabulary_size)
    width = np.dtype(dtype).itemsize
    if size == 0:
        raise ValueError(f"a token file must hold tokens, {path} is empty; leave it out or prepare it again")
    if size % width:
        raise ValueError(f"a file of {dtype} tokens must have a multiple of {width} bytes, {path} has {size}; "
                         "it was cut short (copy it again), or is of another type (set data.dtype)")  # fmt: skip
    return Shard(Tokens(path, dtype, 0, size // width))


def _described(path: Path, size: int, header: np.ndarray) -> Shard:
    version, dtype = VERSIONS[int(header[0])]
    if header[1] != version:
        raise ValueError(f"a token file of magic {header[0]} must have version {version}, {path} has {header[1]}; "
                         "prepare it again with flash-prepare")  # fmt: skip
    width, count = np.dtype(dtype).itemsize, int(header[2])
    if size != HEADER_BYTES + count * width:
        raise ValueError(
            f"a token file must be as long as its header says, {path} is of {count} {dtype} tokens "
            f"({HEADER_BYTES + count * width} bytes) and has {size} bytes; it was cut short: copy or prepare it again"
        )
    if count == 0:
        raise ValueError(f"a token file must hold tokens, {path} has none; leave it out or prepare it again")
    tokens = Tokens(path, dtype, HEADER_BYTES // width, count)
    if header[_MARK] != _MARKED:
        return Shard(tokens)
    return Shard(tokens, int(header[_VOCABULARY]), header[_SHA256 : _SHA256 + 8].tobytes().hex())


def _found_out(beginning: bytes, vocabulary_size: int | None) -> str:
    if vocabulary_size is not None and vocabulary_size > 1 << 16:
        return "uint32"
    halves = np.frombuffer(beginning[: len(beginning) // 4 * 4], "<u2")
    return "uint32" if len(halves) >= 16 and halves[0::2].any() and not halves[1::2].any() else "uint16"


def check_tokens(shard: Shard, *, vocabulary_size: int, folder: Path) -> Shard:
    """The shard with the sha256 of its tokens, all of which are below `vocabulary_size`.

    The file is read once, and what was found is remembered in `folder` for as long as its size and time stay the same.
    Raises ValueError for a token that is too large, and for other tokens than those of the header's sha256.
    """
    tokens = shard.tokens
    if (shard.vocabulary_size or 0) > vocabulary_size:
        raise _too_large(tokens, vocabulary_size)
    status = tokens.path.stat()
    seen = f"{tokens.path.resolve()} {status.st_size} {status.st_mtime_ns} {tokens.dtype} {tokens.start}"
    memory = folder / f"seen_{hashlib.sha256(seen.encode()).hexdigest()[:32]}.json"
    try:
        found = json.loads(memory.read_text())
    except (OSError, ValueError):
        found = _read_through(tokens)
        with suppress(OSError):  # what cannot be remembered is read again
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(memory, json.dumps(found))
    if shard.sha256 not in (None, found["sha256"]):
        raise ValueError(f"the tokens of a file must have the sha256 of its header, {tokens.path} has another: it was "
                         "damaged; copy or prepare it again")  # fmt: skip
    if found["largest"] >= vocabulary_size:
        raise _too_large(tokens, vocabulary_size)
    return Shard(tokens, vocabulary_size, found["sha256"])


def _read_through(tokens: Tokens) -> dict[str, Any]:
    digest, largest, size = hashlib.sha256(), 0, tokens.array.nbytes
    if size > _LONG:
        log.warning("reads %s (%.1f GiB) through once, to check it", tokens.path, size / 2**30)
    for first in range(0, len(tokens), BLOCK_BYTES):
        block = tokens.array[first : first + BLOCK_BYTES]
        largest = max(largest, int(block.max()))
        digest.update(block.data)
    return {"sha256": digest.hexdigest(), "largest": largest}


def _too_large(tokens: Tokens, vocabulary_size: int) -> ValueError:
    for first in range(0, len(tokens), BLOCK_BYTES):
        over = np.flatnonzero(tokens.array[first : first + BLOCK_BYTES] >= vocabulary_size)
        if len(over):
            place = first + int(over[0])
            found = f"holds token {tokens.array[place]} at position {place}"
            break
    else:
        found = "says that it is of a larger one"
    return ValueError(f"tokens must be below the vocabulary's size {vocabulary_size}, {tokens.path} {found}; "
                      "set data.vocabulary_size to that of its tokenizer, or copy the file again")  # fmt: skip


@dataclass(frozen=True)
class Shards:
    """Several files as one stream of tokens, all below `vocabulary_size`; a worker receives their paths."""

    parts: tuple[Tokens, ...]
    vocabulary_size: int

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(map(len, self.parts)))

    def __len__(self) -> int:
        return self._ends[-1] if self.parts else 0

    @property
    def array(self) -> np.ndarray:
        """All tokens in one array; of several files it is a copy."""
        return self.parts[0].array if len(self.parts) == 1 else np.concatenate([part.array for part in self.parts])

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """The `length` tokens from each of `starts` [B] on, [B, length]; past the end the last one repeats.

        Raises ValueError for a token outside the vocabulary: a file was damaged after it had been checked.
        """
        windows = np.empty((len(starts), length), np.int64)
        for window, start in zip(windows, np.minimum(starts, len(self) - 1).tolist(), strict=True):
            self._read(window, start)
        if windows.max(initial=0) >= self.vocabulary_size:
            raise next(_too_large(part, self.vocabulary_size) for part in self.parts if self._damaged(part))
        return windows

    def _read(self, window: np.ndarray, start: int) -> None:
        part, filled = bisect_right(self._ends, start), 0
        while filled < len(window) and part < len(self.parts):
            first = start + filled - (self._ends[part] - len(self.parts[part]))
            piece = self.parts[part].array[first : first + len(window) - filled]
            window[filled : filled + len(piece)] = piece
            filled, part = filled + len(piece), part + 1
        window[filled:] = window[filled - 1]

    def _damaged(self, part: Tokens) -> bool:
        return bool((part.array >= self.vocabulary_size).any())


def concatenate(streams: Sequence[Shards]) -> Shards:
    """One stream of several with one vocabulary."""
    return Shards(tuple(part for stream in streams for part in stream.parts), streams[0].vocabulary_size)
