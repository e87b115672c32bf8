"""Text as batches of tokens: what to train on, in which order, and where a run stands in it."""

from flash_train.training.data.module import TokenData
from flash_train.training.data.python_docs import PythonDocs
from flash_train.training.data.text_files import TextFiles
from flash_train.training.data.token_shards import TokenShards
from flash_train.training.data.tokenizers import ByteTokenizer, CharacterTokenizer, tokenizer_from_state

__all__ = [
    "ByteTokenizer",
    "CharacterTokenizer",
    "PythonDocs",
    "TextFiles",
    "TokenData",
    "TokenShards",
    "tokenizer_from_state",
]
