"""Tokenizers that need nothing but the text, its bytes or its characters, and what every tokenizer is."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from flash_train.training.data.documents import Document

# Stands after each document where there are several. Files may hold it too, and are refused where it has to tell
# documents apart.
SEPARATOR = "\0"
CODE_POINTS = 0x110000


def smallest_dtype(vocabulary_size: int) -> np.dtype:
    """The narrowest unsigned type that holds every token."""
    return np.min_scalar_type(vocabulary_size - 1)


class Tokenizer(Protocol):
    """Text to tokens below `vocabulary_size` and back; `separator` stands between documents, where there is one."""

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def separator(self) -> int | None: ...

    def encode(self, text: str) -> np.ndarray:
        """Tokens [N], in an unsigned type."""
        ...

    def decode(self, tokens: Iterable[int]) -> str: ...

    def state(self) -> dict[str, Any]:
        """Plain values from which `tokenizer_from_state` makes it again."""
        ...


class ByteTokenizer:
    """UTF-8 bytes: 256 tokens, for any text and any file."""

    vocabulary_size = 256
    separator = 0

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8)

    def encode_document(self, document: Document) -> Iterator[np.ndarray]:
        return (np.frombuffer(block, np.uint8) for block in document.blocks())

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of the tokens; bytes that are not UTF-8 become U+FFFD, for a sample may end within a character."""
        return bytes(tokens).decode(errors="replace")

    def bytes_per_id(self) -> np.ndarray:
        return np.ones(self.vocabulary_size, np.int64)

    def state(self) -> dict[str, Any]:
        return {"kind": "bytes"}


class CharacterTokenizer:
    """One token for each distinct character, numbered in the order of their code points (as in nanoGPT)."""

    def __init__(self, characters: str) -> None:
        self.characters = "".join(sorted(set(characters)))
        self.vocabulary_size = len(self.characters)
        self._ids = np.full(CODE_POINTS, -1, np.int64)
        self._ids[_code_points(self.characters)] = np.arange(self.vocabulary_size)
        self.separator = self.characters.index(SEPARATOR) if SEPARATOR in self.characters else None

    @classmethod
    def from_documents(cls, documents: Sequence[Document]) -> "CharacterTokenizer":
        seen = np.zeros(CODE_POINTS, bool)
        for document in documents:
            for text in document.text_blocks():
                seen[_code_points(text)] = True
        separator = SEPARATOR if len(documents) > 1 else ""
        return cls(separator + "".join(map(chr, np.flatnonzero(seen))))

    def encode(self, text: str) -> np.ndarray:
        """Tokens of a text, in the narrowest unsigned type; raises ValueError for a character outside."""
        ids = self._ids[_code_points(text)]
        if (ids < 0).any():
            character = text[int(np.argmin(ids))]
            raise ValueError(
                f"a text must use the {self.vocabulary_size} characters of the training text, {character!r} is not "
                "among them; leave it out, or train with data.tokenizer=bytes"
            )
        return ids.astype(smallest_dtype(self.vocabulary_size))

    def encode_document(self, document: Document) -> Iterator[np.ndarray]:
        return (self.encode(text) for text in document.text_blocks())

    def decode(self, tokens: Iterable[int]) -> str:
        return "".join(self.characters[token] for token in tokens)

    def bytes_per_id(self) -> np.ndarray:
        return np.array([len(character.encode()) for character in self.characters], np.int64)

    def state(self) -> dict[str, Any]:
        return {"kind": "characters", "characters": self.characters}


class UnknownTokenizer:
    """What stands for the tokenizer of tokens that came without one: nothing can be encoded or decoded."""

    def __init__(self, vocabulary_size: int, separator: int | None = None) -> None:
        self.vocabulary_size = vocabulary_size
        self.separator = separator

    def encode(self, text: str) -> np.ndarray:
        """Raises ValueError."""
        raise self._error()

    def decode(self, tokens: Iterable[int]) -> str:
        """Raises ValueError."""
        raise self._error()

    def state(self) -> dict[str, Any]:
        return {"kind": "unknown", "vocabulary_size": self.vocabulary_size, "separator": self.separator}

    def _error(self) -> ValueError:
        return ValueError(
            "text needs a tokenizer, and these tokens came without theirs; give it as data.tokenizer=<tokenizer.json>"
        )


DocumentTokenizer = ByteTokenizer | CharacterTokenizer
KINDS = ("bytes", "characters")


def tokenizer_from_documents(kind: str, documents: Sequence[Document]) -> DocumentTokenizer:
    """The tokenizer of this kind (one of KINDS) for these documents."""
    return ByteTokenizer() if kind == "bytes" else CharacterTokenizer.from_documents(documents)


def tokenizer_from_state(state: dict[str, Any]) -> Tokenizer:
    """The tokenizer that was saved with `state()`: in a checkpoint it lies under the data module's name."""
    if state["kind"] == "subwords":
        from flash_train.training.data.subwords import SubwordTokenizer  # it imports this module

        return SubwordTokenizer(state["definition"], state["separator"])
    if state["kind"] == "unknown":
        return UnknownTokenizer(state["vocabulary_size"], state["separator"])
    return ByteTokenizer() if state["kind"] == "bytes" else CharacterTokenizer(state["characters"])


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), np.dtype("<u4"))
