"""Subwords, by the package `tokenizers`: BPE trained on the text at hand, or whatever a tokenizer file describes."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from flash_train.training.data.tokenizers import Tokenizer, smallest_dtype, tokenizer_from_state

END_OF_TEXT = "<|endoftext|>"
# Of a byte-level BPE: the bytes, and the token that ends a document.
LEAST_VOCABULARY = 257


class SubwordTokenizer:
    """A tokenizer of the package `tokenizers`; `separator` is the token that ends a document.

    What looks like a special token in a text is encoded as the text that it is, so that the separator stands between
    documents alone.

    Args:
        definition: the content of a tokenizer file (tokenizer.json).
        separator: its special token between documents; None: `<|endoftext|>`, or the only one that it has.

    Raises ValueError if `tokenizers` is not installed, does not read the definition, or knows no such special token.
    """

    def __init__(self, definition: str, separator: str | None = None) -> None:
        try:
            self._tokenizer = tokenizers_package().Tokenizer.from_str(definition)
        except ValueError:
            raise
        except Exception as error:  # the package raises nothing narrower
            raise ValueError(
                f"a tokenizer must be what the package tokenizers reads, and it says: {error}; give a tokenizer.json"
            ) from error
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.definition = definition
        special = {
            token.content: number for number, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
        }  # fmt: skip
        self.separator_text = _chosen(separator, list(special))
        self.separator = special[self.separator_text]
        self.vocabulary_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str) -> np.ndarray:
        numbers = self._tokenizer.encode(text, add_special_tokens=False).ids
        return np.array(numbers, smallest_dtype(self.vocabulary_size))

    def decode(self, tokens: Iterable[int]) -> str:
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False)

    def state(self) -> dict[str, Any]:
        return {"kind": "subwords", "definition": self.definition, "separator": self.separator_text}


def train_bpe(texts: Iterator[str], *, vocabulary_size: int) -> SubwordTokenizer:
    """Byte-level BPE with GPT-2's division into words and one special token, END_OF_TEXT, number 0.

    The vocabulary is smaller than asked for where the texts hold fewer pairs. Raises ValueError for a size below
    LEAST_VOCABULARY, and if `tokenizers` is not installed.
    """
    if vocabulary_size < LEAST_VOCABULARY:
        raise ValueError(
            f"vocabulary_size of a BPE must be at least {LEAST_VOCABULARY} (the bytes and {END_OF_TEXT}), "
            f"got {vocabulary_size}; set more, or tokenizer=bytes"
        )
    package = tokenizers_package()
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(package.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return SubwordTokenizer(tokenizer.to_str(), END_OF_TEXT)


def tokenizer_from_file(path: Path, separator: str | None = None) -> Tokenizer:
    """The tokenizer of a `tokenizer.json`, the package's own or one that flash-prepare wrote.

    Raises ValueError if the file cannot be read or holds no tokenizer.
    """
    try:
        text = path.read_text()
        content = json.loads(text)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"a tokenizer file must hold JSON, {path} does not ({reason}); check the path") from error
    if isinstance(content, dict) and "kind" in content:
        return tokenizer_from_state(content)
    return SubwordTokenizer(text, separator)


def _chosen(separator: str | None, special: list[str]) -> str:
    if separator is None and (END_OF_TEXT in special or len(special) == 1):
        return END_OF_TEXT if END_OF_TEXT in special else special[0]
    if separator not in special:
        raise ValueError(
            f"separator must be one of the tokenizer's special tokens, which are {', '.join(special) or 'none'}, "
            f"got {separator}; set separator=<one of them>"
        )
    return separator


def tokenizers_package() -> Any:
    """The package `tokenizers`; ValueError where it is not installed."""
    try:
        import tokenizers  # an extra: bytes and characters need it not
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as error:
        raise ValueError(
            f"subwords need the package tokenizers, which cannot be imported ({error}); "
            "pip install 'flash_train[bpe]', or use bytes or characters"
        ) from error
    return tokenizers
