"""Documents: the pieces of text that are never divided between training and validation."""

import codecs
import hashlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

BLOCK_BYTES = 1 << 24
VALIDATION_SHARE = 0.1


@dataclass(frozen=True)
class Document:
    """One text, in memory or in a file, with the sha256 of its bytes."""

    name: str
    content: bytes | Path
    sha256: str

    @classmethod
    def from_bytes(cls, name: str, content: bytes) -> "Document":
        return cls(name, content, hashlib.sha256(content).hexdigest())

    @classmethod
    def from_file(cls, path: Path) -> "Document":
        """Read a file once for its hash; raise ValueError if it cannot be read (twice) or holds nothing."""
        if path.is_fifo() or path.is_char_device() or path.is_socket():  # to open a pipe waits for who writes to it
            raise ValueError(f"a text source must be a file that can be read again, {path} is not; save it to a file")
        try:
            with path.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            size = path.stat().st_size
        except IsADirectoryError:
            rule = f"a text source must be a file, {path} is a folder; name its files: '{path}/**/*.txt'"
            raise ValueError(rule) from None
        except FileNotFoundError:
            raise ValueError(f"a text source must exist, {path} does not; check the path") from None
        except OSError as error:
            rule = f"a text source must be readable, {path} is not ({error.strerror}); check its permissions"
            raise ValueError(rule) from error
        if size == 0:
            raise ValueError(f"a text source must hold text, {path} is empty; leave it out or name another")
        return cls(str(path), path, sha256)

    def blocks(self) -> Iterator[bytes]:
        """The content, block by block; raises ValueError if it is no longer what was hashed."""
        digest = hashlib.sha256()
        try:
            with io.BytesIO(self.content) if isinstance(self.content, bytes) else self.content.open("rb") as file:
                while block := file.read(BLOCK_BYTES):
                    digest.update(block)
                    yield block
        except OSError as error:
            rule = f"a text source must stay readable, {self.name} did not ({error.strerror}); run it again"
            raise ValueError(rule) from error
        if digest.hexdigest() != self.sha256:
            raise ValueError(f"a text source must not change while it is prepared, {self.name} did; run it again")

    def text_blocks(self) -> Iterator[str]:
        """The content as text, block by block; raises ValueError where it is not UTF-8."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        read = 0
        for block in chain(self.blocks(), [b""]):
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"characters must be UTF-8, {self.name} is not (byte {read - pending + error.start}: "
                    f"{error.reason}); convert it, or set data.tokenizer=bytes"
                ) from None
            read += len(block)
            yield text


def split_by_hash(documents: Sequence[Document], hashes: Sequence[str]) -> tuple[list[Document], list[Document]]:
    """Divide whole documents into training and validation, about a tenth of them, by one hex sha256 for each.

    Each document is judged by its own hash, so that one more never moves another; only where that leaves a side
    empty does the lowest (or highest) hash fill it.
    """
    ordered = sorted(hashes)
    count = sum(int(value[:8], 16) < VALIDATION_SHARE * 2**32 for value in ordered)
    chosen = set(ordered[: min(max(count, 1), len(ordered) - 1)])
    train = [document for document, value in zip(documents, hashes, strict=True) if value not in chosen]
    validation = [document for document, value in zip(documents, hashes, strict=True) if value in chosen]
    return train, validation
