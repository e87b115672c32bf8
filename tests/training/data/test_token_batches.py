from pathlib import Path

import numpy as np
import pytest
import torch

from flash_train.training.data.batches import IGNORED, Share, TrainingRows, ValidationRows
from flash_train.training.data.order import ShuffledWindows, WindowOrder
from flash_train.training.data.store import Tokens


def numbered(folder: Path, count: int) -> Tokens:
    """Tokens that say their own position."""
    np.arange(count, dtype=np.uint16).tofile(folder / "tokens.bin")
    return Tokens(folder / "tokens.bin", "uint16", 0, count)


def global_batches(tokens: Tokens, batch_size: int, ranks: int, count: int) -> list[torch.Tensor]:
    shuffled = ShuffledWindows(tokens, WindowOrder(len(tokens), sequence_length=5, seed=1))
    rows = [TrainingRows(shuffled, Share(batch_size, ranks, rank)) for rank in range(ranks)]
    step = batch_size * ranks
    return [torch.stack([row[first]["inputs"] for row in rows], 1).flatten(0, 1) for first in range(0, count, step)]


def test_targets_are_inputs_shifted_by_one_in_contiguous_int64(tmp_path: Path):
    tokens = numbered(tmp_path, 701)
    rows = ShuffledWindows(tokens, WindowOrder(701, sequence_length=11, seed=0))
    batch = TrainingRows(rows, Share(7))[14]
    for part in batch.values():
        assert part.shape == (7, 11) and part.dtype == torch.int64 and part.is_contiguous()
    assert torch.equal(batch["targets"], batch["inputs"] + 1)
    assert torch.equal(batch["inputs"], batch["inputs"][:, :1] + torch.arange(11))


def test_a_separator_ends_one_document_as_a_target_and_begins_the_next_as_an_input(tmp_path: Path):
    (np.arange(701, dtype=np.uint16) % 8).tofile(tmp_path / "tokens.bin")
    tokens = Tokens(tmp_path / "tokens.bin", "uint16", 0, 701)
    rows, share = ShuffledWindows(tokens, WindowOrder(701, sequence_length=19, seed=0)), Share(7)
    separated = (
        TrainingRows(rows, share, separator=5)[14],
        ValidationRows(tokens, sequence_length=19, share=share, separator=5)[0],
    )
    whole = TrainingRows(rows, share)[14], ValidationRows(tokens, sequence_length=19, share=share)[0]
    for batch, plain in zip(separated, whole, strict=True):
        assert torch.equal(batch["inputs"], plain["inputs"]) and torch.equal(batch["targets"], plain["targets"])
        assert "documents" not in plain and batch["documents"].shape == (7, 19)
        begins = batch["documents"].diff(dim=1) == 1
        assert torch.equal(begins, batch["inputs"][:, 1:] == 5) and torch.equal(begins, batch["targets"][:, :-1] == 5)


def test_batch_size_and_ranks_only_divide_the_same_rows(tmp_path: Path):
    tokens = numbered(tmp_path, 701)
    whole = torch.cat(global_batches(tokens, 12, 1, 48))
    for batch_size, ranks in [(6, 1), (4, 3), (3, 4), (1, 12)]:
        divided = torch.cat(global_batches(tokens, batch_size, ranks, 48))
        assert torch.equal(divided, whole), (batch_size, ranks)


@pytest.mark.parametrize("count", [8, 9, 15, 16, 71, 78, 79])
@pytest.mark.parametrize("ranks", [1, 3])
def test_validation_has_every_target_exactly_once_in_batches_of_one_shape(tmp_path: Path, count: int, ranks: int):
    tokens = numbered(tmp_path, count)
    targets, lengths = [], set()
    for rank in range(ranks):
        rows = ValidationRows(tokens, sequence_length=7, share=Share(2, ranks, rank))
        lengths.add(len(rows))
        for batch in (rows[index] for index in range(len(rows))):
            assert batch["inputs"].shape == batch["targets"].shape == (2, 7)
            valid = batch["targets"] != IGNORED
            assert torch.equal(batch["inputs"][valid] + 1, batch["targets"][valid])
            targets += batch["targets"][valid].tolist()
    assert sorted(targets) == list(range(1, count))
    assert len(lengths) == 1, "ranks with different numbers of batches wait for one another for ever"
