"""Local text files as training data."""

import glob
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flash_train.training.data.document_data import DocumentData
from flash_train.training.data.documents import Document, split_by_hash
from flash_train.training.data.tokenizers import KINDS


class TextFiles(DocumentData):
    """Any local files, as bytes or characters.

    `paths` names files or globs (`**` goes into folders), one or a list. A single file validates with its last tenth
    (training has int(0.9 n) of n tokens: nanoGPT's split); of several, whole files validate, about a tenth, chosen by
    the hash of their content, and a NUL stands after each; copies of a file count once. `tokenizer` is "bytes" (any
    file) or "characters" (UTF-8 text; the vocabulary is the sorted set of all characters in both splits). Raises
    ValueError for a path that matches nothing, is a folder or a pipe, is empty, or cannot be read or decoded.
    """

    def __init__(
        self,
        *,
        paths: str | Sequence[str],
        sequence_length: int,
        batch_size: int,
        tokenizer: str = "bytes",
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
        if tokenizer not in KINDS:
            raise ValueError(
                f"tokenizer must be one of {', '.join(KINDS)}, got {tokenizer!r}; set data.tokenizer=bytes"
            )
        self.tokenizer_kind = tokenizer
        self.paths = [paths] if isinstance(paths, str) else [str(path) for path in paths]

    def documents(self) -> tuple[list[Document], list[Document]]:
        found = [Document.from_file(path) for path in find_files(self.paths)]
        documents = list({document.sha256: document for document in found}.values())
        if len(documents) == 1:
            return documents, []
        return split_by_hash(documents, [document.sha256 for document in documents])

    def origin(self) -> dict[str, Any]:
        return {"source": "text", "paths": self.paths}


def find_files(paths: Sequence[str]) -> list[Path]:
    """The files that paths and globs name, in their order, each once; raises ValueError where one names nothing."""
    if not paths:
        raise ValueError(
            "paths must name at least one file or glob, got none; "
            "set data.paths=book.txt or 'data.paths=[a.txt,b/*.md]'"
        )
    found: dict[Path, Path] = {}
    for pattern in paths:
        path = Path(pattern).expanduser()
        # A name that exists is meant as it stands, brackets and all.
        matches = [path] if path.exists() or not glob.has_magic(pattern) else _files_of_glob(path)
        if not matches:
            raise ValueError(f"a glob must match at least one file, {pattern!r} matches none; check the path")
        found.update((match.resolve(), match) for match in matches if match.resolve() not in found)
    return list(found.values())


def _files_of_glob(path: Path) -> list[Path]:
    return [Path(match) for match in sorted(glob.glob(str(path), recursive=True)) if not os.path.isdir(match)]
