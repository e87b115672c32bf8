"""A folder of token files, whoever made it: its splits, its tokenizer, and what it says of its text."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flash_train.training.data.corpus.build import DATASET, PLAN
from flash_train.training.data.corpus.work import TOKENIZER
from flash_train.training.data.shards import Shard, Shards, check_tokens, open_shard
from flash_train.training.data.subwords import tokenizer_from_file
from flash_train.training.data.text_bytes import count_bytes
from flash_train.training.data.tokenizers import Tokenizer, UnknownTokenizer

# As nanoGPT (train.bin, val.bin), llm.c (tiny_shakespeare_val.bin) and modded-nanogpt name their files.
PATTERNS = {"training": ("*train*.bin",), "validation": ("*val*.bin",)}


@dataclass(frozen=True)
class Told:
    """What the files of others do not say; of a folder that flash-prepare made, nothing has to be told."""

    tokenizer: str | None = None
    vocabulary_size: int | None = None
    separator: int | None = None
    dtype: str | None = None


@dataclass(frozen=True)
class TokenFolder:
    """An opened folder. `separator` is None where no documents can be told apart, and `holds_separator` names a
    document in which it stands; `key` stands for all tokens and what they mean."""

    path: Path
    key: str
    tokenizer: Tokenizer
    train: Shards
    validation: Shards
    validation_bytes: int | None
    separator: int | None
    holds_separator: str | None
    prepared: bool  # by flash-prepare


def open_folder(path: Path, told: Told, *, cache: Path) -> TokenFolder:
    """Open what flash-prepare made, or the `.bin` files of nanoGPT, llm.c and their like.

    Raises ValueError if there is none, a preparation was broken off, a split is empty, a file is damaged or another
    one than the folder says, or a token lies outside the vocabulary.
    """
    if not path.is_dir():
        raise ValueError(f"paths must be folders of token files, {path} is none; make one with flash-prepare")
    if (path / DATASET).is_file():
        return _prepared(path, cache)
    if (path / PLAN).is_file():
        raise ValueError(f"{path} is half prepared: the preparation was broken off; run flash-prepare again, "
                         "it goes on where it stopped")  # fmt: skip
    return _foreign(path, told, cache)


def _prepared(path: Path, cache: Path) -> TokenFolder:
    try:
        dataset: dict[str, Any] = json.loads((path / DATASET).read_text())
        tokenizer = tokenizer_from_file(path / TOKENIZER, dataset["separator_name"])
        size, splits = dataset["vocabulary_size"], dataset["splits"]
        files = {split: [(path / part["file"], part["sha256"]) for part in splits[split]] for split in splits}
    except (KeyError, TypeError, OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path / DATASET} must be what flash-prepare wrote, and is not ({error!r}); "
                         "prepare it again") from error  # fmt: skip
    streams = {}
    for split, parts in files.items():
        shards = [open_shard(file, vocabulary_size=size) for file, _ in parts]
        for (file, sha256), shard in zip(parts, shards, strict=True):
            if shard.sha256 != sha256:
                raise ValueError(f"a shard must be the one that {DATASET} names, {file} is another; prepare it again")
            check_tokens(shard, vocabulary_size=size, folder=cache)
        streams[split] = Shards(tuple(shard.tokens for shard in shards), size)
    hashes = {split: [sha256 for _, sha256 in parts] for split, parts in files.items()}
    return TokenFolder(
        path=path,
        key=_key(tokenizer, hashes),
        tokenizer=tokenizer,
        train=streams["train"],
        validation=streams["validation"],
        validation_bytes=sum(part["bytes"] for part in splits["validation"]),
        separator=dataset["separator"],
        holds_separator=dataset["holds_separator"],
        prepared=True,
    )


def _foreign(path: Path, told: Told, cache: Path) -> TokenFolder:
    tokenizer = _told_tokenizer(path, told)
    size = tokenizer.vocabulary_size
    checked: dict[str, list[Shard]] = {}
    for split, patterns in PATTERNS.items():
        files = sorted(file for pattern in patterns for file in path.glob(pattern) if not file.name.startswith("."))
        if not files:
            raise ValueError(
                f"both splits must have files, in {path} the {split} split has none (named {' or '.join(patterns)}); "
                "make them with flash-prepare, or rename them"
            )
        shards = [open_shard(file, vocabulary_size=size, dtype=told.dtype) for file in files]
        checked[split] = [check_tokens(shard, vocabulary_size=size, folder=cache) for shard in shards]
    hashes = {split: [str(shard.sha256) for shard in shards] for split, shards in checked.items()}
    train, validation = (Shards(tuple(shard.tokens for shard in shards), size) for shards in checked.values())
    return TokenFolder(
        path=path,
        key=_key(tokenizer, hashes),
        tokenizer=tokenizer,
        train=train,
        validation=validation,
        validation_bytes=count_bytes(validation, tokenizer),
        separator=tokenizer.separator,
        holds_separator=None,
        prepared=False,
    )


def _told_tokenizer(path: Path, told: Told) -> Tokenizer:
    if told.tokenizer is not None:
        tokenizer = tokenizer_from_file(Path(told.tokenizer).expanduser())
        if told.vocabulary_size not in (None, tokenizer.vocabulary_size):
            raise ValueError(f"vocabulary_size must be that of the tokenizer, {tokenizer.vocabulary_size}, "
                             f"got {told.vocabulary_size}; leave it out")  # fmt: skip
        return tokenizer
    if told.vocabulary_size is None:
        raise ValueError(
            f"the vocabulary's size must be known, and the files in {path} do not say it; "
            "set data.vocabulary_size (GPT-2's is 50257) or data.tokenizer=<tokenizer.json>"
        )
    if told.separator is not None and not 0 <= told.separator < told.vocabulary_size:
        raise ValueError(f"separator must be a token below {told.vocabulary_size}, got {told.separator}; "
                         "GPT-2's is 50256")  # fmt: skip
    return UnknownTokenizer(told.vocabulary_size, told.separator)


def _key(tokenizer: Tokenizer, hashes: dict[str, list[str]]) -> str:
    return hashlib.sha256(json.dumps([tokenizer.state(), list(hashes.values())]).encode()).hexdigest()[:32]
