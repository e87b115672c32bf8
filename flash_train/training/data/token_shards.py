"""Token files as training data: those of flash-prepare, nanoGPT and llm.c, one folder or several mixed by weight."""

import hashlib
import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from flash_train.training.data.module import TokenData
from flash_train.training.data.order import BLOCK_ROWS, Mixture, Rows, Stream, block_shares
from flash_train.training.data.shards import concatenate
from flash_train.training.data.store import PreparedText, cache_folder
from flash_train.training.data.token_folders import TokenFolder, Told, open_folder


class TokenShards(TokenData):
    """Memory-mapped token files, read where they lie.

    Rows are cut from the files of a folder one behind the other, a separator after each document. Of several folders
    each gets its share of every 1000 rows, and begins again at its own end; validation is all of their validation
    splits, each a source of its own with the name of its folder.

    Args:
        paths: folders that flash-prepare made, or of nanoGPT's or llm.c's `.bin` files (`*train*.bin`, `*val*.bin`).
        weights: of the folders, in their order; None: by their training tokens.
        tokenizer: a tokenizer.json, for files that came without.
        vocabulary_size: of such files, where no tokenizer is given.
        separator: the token between documents of such files, to separate them.
        dtype: of files without a header; None: found out (see `shards.open_shard`).
        separate_documents: keep attention inside documents (see `TokenData`).

    Raises ValueError in `setup` for folders and files as `open_folder` does, for folders of different tokenizers, for
    weights that are not one positive number for each, and for documents that cannot be told apart but should.
    """

    def __init__(
        self,
        *,
        paths: str | Sequence[str],
        sequence_length: int,
        batch_size: int,
        weights: Sequence[float] | None = None,
        tokenizer: str | None = None,
        vocabulary_size: int | None = None,
        separator: int | None = None,
        dtype: Literal["uint16", "uint32"] | None = None,
        separate_documents: bool = False,
        seed: int = 0,
        workers: int = 0,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(
            sequence_length=sequence_length,
            batch_size=batch_size,
            separate_documents=separate_documents,
            seed=seed,
            workers=workers,
            cache_dir=cache_dir,
        )
        self.paths = [paths] if isinstance(paths, str) else [str(path) for path in paths]
        self.weights = None if weights is None else [float(weight) for weight in weights]
        self._told = Told(tokenizer, vocabulary_size, separator, dtype)
        self._folders: list[TokenFolder] = []
        _check_mixture(self.paths, self.weights)

    def load(self) -> PreparedText:
        cache = cache_folder(self.cache_dir)
        folders = [open_folder(Path(path).expanduser(), self._told, cache=cache) for path in self.paths]
        _check_told(self._told, folders)
        for folder in folders:
            if folder.tokenizer.state() != folders[0].tokenizer.state():
                raise ValueError(
                    f"all paths must have the same tokenizer, {folder.path} has another than {folders[0].path}; "
                    f"prepare it with flash-prepare tokenizer={folders[0].path / 'tokenizer.json'}"
                )
            if len(folder.train) <= self.sequence_length:
                raise ValueError(
                    f"a training split must hold at least sequence_length + 1 = {self.sequence_length + 1} tokens, "
                    f"{folder.path} has {len(folder.train)}; give more text, or set a smaller data.sequence_length"
                )
            if self.separate_documents:
                _check_documents(folder)
        self._folders = folders
        sizes = [folder.validation_bytes for folder in folders]
        keys = [folder.key for folder in folders]
        return PreparedText(
            key=keys[0] if len(keys) == 1 else hashlib.sha256(json.dumps(keys).encode()).hexdigest()[:32],
            tokenizer=folders[0].tokenizer,
            train=concatenate([folder.train for folder in folders]),
            validation=concatenate([folder.validation for folder in folders]),
            validation_bytes=None if None in sizes else sum(size for size in sizes if size is not None),
            ambiguous=None,
        )

    def shares(self) -> list[int]:
        """Rows of every 1000 that are of each folder."""
        return block_shares(self.weights or [float(len(folder.train)) for folder in self._folders])

    @property
    def source_bytes_per_token(self) -> dict[str, float | None]:
        if len(self._folders) == 1:
            return {}
        widths = [
            None if folder.validation_bytes is None else folder.validation_bytes / len(folder.validation)
            for folder in self._folders
        ]
        return dict(zip(source_names([folder.path for folder in self._folders]), widths, strict=True))

    def validation_streams(self) -> list[Stream]:
        return [folder.validation for folder in self._folders]

    def training_rows(self) -> Rows:
        rows = [self.shuffled(folder.train) for folder in self._folders]
        return rows[0] if len(rows) == 1 else Mixture(rows, self.shares(), seed=self.seed)

    def order_key(self) -> dict[str, Any]:
        return {**super().order_key(), "weights": self.shares()}

    def source(self) -> dict[str, Any]:
        names = source_names([folder.path for folder in self._folders])
        parts = zip(names, self._folders, self.shares(), strict=True)
        return {
            "source": "tokens",
            "folders": [
                {
                    "name": name,
                    "path": str(folder.path),
                    "key": folder.key,
                    "share": share / BLOCK_ROWS,
                    "train_tokens": len(folder.train),
                    "validation_tokens": len(folder.validation),
                    "validation_bytes": folder.validation_bytes,
                }
                for name, folder, share in parts
            ],
        }


def source_names(paths: Sequence[Path]) -> list[str]:
    """A name for each folder that the name of a metric can hold: its own, or as much of its path as tells it from the
    others (web, b_web); what is the same folder twice gets numbers."""
    parts = [[re.sub(r"[^\w.-]+", "_", part) for part in path.absolute().parts[1:]] for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["_".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{'_'.join(each[-1:])}_{number}" for number, each in enumerate(parts, start=1)]


def _check_mixture(paths: list[str], weights: list[float] | None) -> None:
    if not paths:
        raise ValueError("paths must name at least one folder of token files, got none; set data.paths=<folder>")
    if len(paths) > BLOCK_ROWS:
        raise ValueError(f"paths must name at most {BLOCK_ROWS} folders, got {len(paths)}; prepare some together")
    if weights is None:
        return
    if len(weights) != len(paths) or not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise ValueError(f"weights must be a positive number for each of {len(paths)} paths, got {weights}; "
                         "leave out what is not to be read, or set data.weights=null")  # fmt: skip


def _check_told(told: Told, folders: list[TokenFolder]) -> None:
    given = [f"data.{name}" for name, value in vars(told).items() if value is not None]
    if given and all(folder.prepared for folder in folders):
        raise ValueError(
            f"{', '.join(given)} are for token files of others, and all of data.paths are of flash-prepare and say it "
            "themselves; leave them out"
        )


def _check_documents(folder: TokenFolder) -> None:
    if folder.separator is None:
        raise ValueError(
            f"separate_documents needs a token between documents, and none is known of {folder.path}; "
            "set data.separator (GPT-2's is 50256), or data.separate_documents=false"
        )
    if folder.holds_separator is not None:
        raise ValueError(
            f"separate_documents needs texts without the token that stands between them, and {folder.holds_separator} "
            "holds it; take it out, or set data.separate_documents=false"
        )
