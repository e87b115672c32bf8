"""TokenData: prepared text as a LightningDataModule whose place in the training order is saved and restored."""

import hashlib
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn

from flash_train.training.data.batches import (
    Share,
    TrainingBatches,
    TrainingRows,
    ValidationBatches,
    ValidationRows,
    ValidationSources,
)
from flash_train.training.data.order import Rows, ShuffledWindows, Stream, WindowOrder
from flash_train.training.data.store import PreparedText
from flash_train.training.data.tokenizers import Tokenizer

# Rows whose hash tells two runs with the same data order from others, whatever their batch size.
HASHED_ROWS = 64
# Raise it when the same text, length and seed are to give other rows.
ORDER = 2


class TokenData(LightningDataModule):
    """Batches {"inputs", "targets"} of int64 [B, T] tokens; targets are the inputs shifted by one, -100 is ignored.

    A subclass says where the text is (`load`) and what is known of it (`source`). `batch_size` counts rows per device
    and micro-batch. The rows are a function of (text, sequence_length, seed) and their number alone:
    batch size, accumulation, ranks and workers only divide them. Training goes on without end, so that a trainer
    needs `max_steps`. With `separate_documents` a batch says which document each token belongs to ("documents", see
    `TrainingRows`), so that none is predicted from another one; the rows stay the same, and need no padding.

    A run resumes with the data of its checkpoint: another text, tokenizer, sequence_length, seed or
    separate_documents is refused, for the run would go on with another order, or another model of its documents.

    Raises ValueError in `setup` if a split is shorter than one window, and on resuming, as said.
    """

    def __init__(
        self,
        *,
        sequence_length: int,
        batch_size: int,
        separate_documents: bool = False,
        seed: int = 0,
        workers: int = 0,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("sequence_length", sequence_length, 1),
            ("batch_size", batch_size, 1),
            ("seed", seed, 0),
            ("workers", workers, 0),
        ):
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an integer from {least} on, got {value!r}; set data.{name}={least}")
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.separate_documents = separate_documents
        self.seed = seed
        self.workers = workers
        self.cache_dir = cache_dir
        self._text: PreparedText | None = None
        self._provenance: dict[str, Any] = {}
        # Training stood at `_anchor_row` when the trainer had processed `_anchor_batches`. Where some batches are
        # repeated, they begin there.
        self._anchor_row = 0
        self._anchor_batches = 0
        self._loaded: tuple[int, int] | None = None  # the next row, and the first of the repeated ones

    def load(self) -> PreparedText:
        """The prepared splits, made or opened. Several processes may call it at once."""
        raise NotImplementedError

    def source(self) -> dict[str, Any]:
        """What a result should say of where the text came from, in plain values; asked after `load`."""
        raise NotImplementedError

    def prepare_data(self) -> None:
        self.setup()

    def setup(self, stage: str | None = None) -> None:
        # The command needs the vocabulary before it has a trainer, which calls this again.
        if self._text is not None:
            return
        text = self.load()
        least = self.sequence_length + 1
        for name, tokens in (("training", text.train), ("validation", text.validation)):
            if len(tokens) < least:
                raise ValueError(
                    f"the {name} text must hold at least sequence_length + 1 = {least} tokens, it holds {len(tokens)}; "
                    f"give more text, or set data.sequence_length={max(1, len(tokens) - 1)} or less"
                )
        self._text = text
        self._provenance = self._describe()

    @property
    def text(self) -> PreparedText:
        """The prepared splits; there after `setup`."""
        if self._text is None:
            raise RuntimeError("the data must be prepared before it is used; call prepare_data() and setup()")
        return self._text

    @property
    def tokenizer(self) -> Tokenizer:
        return self.text.tokenizer

    @property
    def vocabulary_size(self) -> int:
        return self.text.tokenizer.vocabulary_size

    @property
    def bytes_per_token(self) -> float | None:
        """UTF-8 bytes per token of the validation split, for bits per byte; None where nothing tells."""
        size = self.text.validation_bytes
        return None if size is None else size / len(self.text.validation)

    @property
    def source_bytes_per_token(self) -> Mapping[str, float | None]:
        """`bytes_per_token` of each source by its name, where validation is of several; empty where it is of one."""
        return {}

    @property
    def provenance(self) -> dict[str, Any]:
        """Where the text came from, what became of it, and a hash of the first rows, in plain values."""
        assert self.text
        return self._provenance

    def train_dataloader(self) -> TrainingBatches:
        """Batches without end from where the trainer stands, also when it asks for an iterator again."""
        consumed = self._consumed_batches()
        # A trainer that has done nothing and loaded nothing begins, whatever another one did with this object.
        row, first = (0, 0) if self._loaded is None and consumed == 0 else self._rows()
        self._anchor_row, self._loaded = first, None
        self._anchor_batches = consumed - (row - first) // self._share().global_rows
        rows = TrainingRows(self.training_rows(), self._share(), separator=self.separator())
        return TrainingBatches(rows, lambda: self._rows()[0], self.workers, self._pin_memory())

    def val_dataloader(self) -> ValidationBatches:
        """The whole validation split, divided over the ranks, in batches of one shape."""
        rows = [
            ValidationRows(
                stream, sequence_length=self.sequence_length, share=self._share(), separator=self.separator()
            )
            for stream in self.validation_streams()
        ]
        return ValidationBatches(rows[0] if len(rows) == 1 else ValidationSources(rows), self._pin_memory())

    def state_dict(self) -> dict[str, Any]:
        """The place in the training order, what defines that order, and the tokenizer, in plain values."""
        row, first = self._rows()
        tokenizer = self.tokenizer.state()
        return {"row": row, "first_row": first, "order": self.order_key(), "tokenizer": tokenizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at the saved row; raises ValueError where the tokens, their order or what separates them is another."""
        saved, own = state_dict["tokenizer"], self.tokenizer.state()
        if saved != own:
            raise ValueError(
                f"the data must have the checkpoint's vocabulary, tokenizer {saved['kind']!r}, and "
                f"this has another ({own['kind']!r}); name the text and tokenizer it was trained with"
            )
        if self.trainer is not None and self.trainer.state.fn != TrainerFn.FITTING:
            return
        for name, now in self.order_key().items():
            saved = state_dict["order"].get(name)
            if saved != now and name == "order":
                raise ValueError(
                    "the checkpoint is of a release that shuffled rows in another way; go on with that release, or "
                    "start a new run"
                )
            if saved != now:
                raise ValueError(
                    f"a run must resume with the data of its checkpoint, where {name} is {saved}, and now it is {now}; "
                    f"use the checkpoint's text and data.{name}, or start a new run"
                )
        self._loaded = state_dict["row"], state_dict["first_row"]

    def order_key(self) -> dict[str, Any]:
        """What says which row is which, in plain values: a checkpoint of another one is refused."""
        return {
            "order": ORDER,
            "text": self.text.key,
            "sequence_length": self.sequence_length,
            "seed": self.seed,
            "separate_documents": self.separate_documents,
        }

    def training_rows(self) -> Rows:
        """The rows of training, a function of `order_key()` and their number."""
        return self.shuffled(self.text.train)

    def validation_streams(self) -> list[Stream]:
        """The text of each source of validation, in the order of `source_bytes_per_token`."""
        return [self.text.validation]

    def shuffled(self, stream: Stream) -> ShuffledWindows:
        """One text's rows, in the order of this sequence length and seed."""
        order = WindowOrder(len(stream), sequence_length=self.sequence_length, seed=self.seed)
        return ShuffledWindows(stream, order)

    def separator(self) -> int | None:
        """The token that begins a document, where documents are to be separated."""
        return self.tokenizer.separator if self.separate_documents else None

    def _share(self) -> Share:
        # Under tensor parallelism only the strategy knows which ranks share their data.
        kwargs = self.trainer.distributed_sampler_kwargs if self.trainer is not None else None
        if kwargs is None:
            return Share(self.batch_size)
        return Share(self.batch_size, ranks=kwargs["num_replicas"], rank=kwargs["rank"])

    def _pin_memory(self) -> bool:
        return self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"

    def _consumed_batches(self) -> int:
        """Micro-batches that the trainer has trained on; what it or a worker fetched ahead does not count."""
        if self.trainer is None:
            return 0
        return self.trainer.fit_loop.epoch_loop.batch_progress.total.processed  # pyright: ignore[reportAttributeAccessIssue]

    def _rows(self) -> tuple[int, int]:
        """The row to go on with, and the first of those that are repeated (itself where none are)."""
        if self._loaded is not None:
            return self._loaded
        consumed, rows = self._consumed_batches() - self._anchor_batches, self._share().global_rows
        repeated = getattr(self.trainer, "overfit_batches", 0)
        if isinstance(repeated, int) and repeated:  # always the same n batches; 1.0, all of them, has no end here
            return self._anchor_row + consumed % repeated * rows, self._anchor_row
        return self._anchor_row + consumed * rows, self._anchor_row + consumed * rows

    def _describe(self) -> dict[str, Any]:
        text = self.text
        return {
            **self.source(),
            "prepared_as": text.key,
            "tokenizer": text.tokenizer.state()["kind"],
            "vocabulary_size": self.vocabulary_size,
            "train_tokens": len(text.train),
            "validation_tokens": len(text.validation),
            "validation_bytes_per_token": self.bytes_per_token,
            "sequence_length": self.sequence_length,
            "separate_documents": self.separate_documents,
            "seed": self.seed,
            "first_batches_sha256": self._first_rows_sha256(),
        }

    def _first_rows_sha256(self) -> str:
        windows = self.training_rows().windows(np.arange(HASHED_ROWS))
        return hashlib.sha256(windows.astype("<i8").tobytes()).hexdigest()
