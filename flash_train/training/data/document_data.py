"""Documents that are tokenized when a run begins, and kept in the cache."""

from typing import Any

from flash_train.training.data.documents import Document
from flash_train.training.data.module import TokenData
from flash_train.training.data.store import PreparedText, cache_folder, prepare


class DocumentData(TokenData):
    """TokenData of documents that a subclass names; their tokens lie in the cache under the documents' hashes.

    Raises ValueError in `setup` if documents are to be separated and there is one, or one holds the NUL that
    separates them (as UTF-16 does).
    """

    tokenizer_kind = "bytes"
    _sources: dict[str, Any] = {}

    def documents(self) -> tuple[list[Document], list[Document]]:
        """Training and validation documents; without any of the latter, the last tenth of the text validates."""
        raise NotImplementedError

    def origin(self) -> dict[str, Any]:
        """What a result should say of where the documents came from, in plain values."""
        raise NotImplementedError

    def load(self) -> PreparedText:
        train, validation = self.documents()
        if self.separate_documents and not validation:
            raise ValueError(
                "separate_documents needs several documents, and the text is one; "
                "give it as several files, or set data.separate_documents=false"
            )
        folder = cache_folder(self.cache_dir)
        text = prepare(train, validation, tokenizer=self.tokenizer_kind, folder=folder)
        if self.separate_documents and text.ambiguous:
            name = next(document.name for document in (*train, *validation) if document.sha256 == text.ambiguous)
            raise ValueError(
                f"separate_documents needs texts without a NUL, which stands between documents, and {name} holds one; "
                "take it out (of UTF-16 by converting it to UTF-8), or set data.separate_documents=false"
            )
        self._sources = {
            "sources_sha256": {document.name: document.sha256 for document in (*train, *validation)},
            "validation_sources": [document.name for document in validation] or "the last tenth",
        }
        return text

    def source(self) -> dict[str, Any]:
        return {**self.origin(), **self._sources}
