"""How many bytes of UTF-8 text tokens stand for, where a tokenizer tells."""

import json

import numpy as np

from flash_train.training.data.documents import BLOCK_BYTES
from flash_train.training.data.shards import Shards
from flash_train.training.data.subwords import SubwordTokenizer
from flash_train.training.data.tokenizers import ByteTokenizer, CharacterTokenizer, Tokenizer


def count_bytes(tokens: Shards, tokenizer: Tokenizer) -> int | None:
    """Bytes of the text of all tokens, which are read once; None where the tokenizer does not tell."""
    sizes = bytes_per_id(tokenizer)
    if sizes is None:
        return None
    blocks = (part.array[i : i + BLOCK_BYTES] for part in tokens.parts for i in range(0, len(part), BLOCK_BYTES))
    return sum(int(sizes[block].sum()) for block in blocks)


def bytes_per_id(tokenizer: Tokenizer) -> np.ndarray | None:
    """Bytes [V] of each token's text, one of the separator's (as flash-prepare counts it), none of other special
    tokens; None unless a token stands for the same bytes everywhere, as bytes, characters and byte-level BPE do."""
    if isinstance(tokenizer, ByteTokenizer | CharacterTokenizer):
        return tokenizer.bytes_per_id()
    if not isinstance(tokenizer, SubwordTokenizer):
        return None
    definition = json.loads(tokenizer.definition)
    decoder, vocabulary = definition.get("decoder") or {}, definition["model"].get("vocab")
    if decoder.get("type") != "ByteLevel" or not isinstance(vocabulary, dict):
        return None
    sizes = np.zeros(tokenizer.vocabulary_size, np.int64)
    for token, number in vocabulary.items():
        sizes[number] = len(token)  # byte-level BPE writes each byte as one character
    for added in definition.get("added_tokens") or ():
        sizes[added["id"]] = 0 if added["special"] else len(added["content"].encode())
    sizes[tokenizer.separator] = 1
    return sizes
