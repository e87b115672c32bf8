"""Logits are found by what happens to them; what a chunked loss saves is what its step really saves."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flash_train.memory.attribution import Breakdown
from flash_train.memory.logits import CHUNK_ROWS
from flash_train.memory.predict import Predictor
from flash_train.models.gpt import GPT
from flash_train.ops.cross_entropy import chunked_cross_entropy
from tests.memory.toys import adam

V, C, B, T = 5003, 48, 4, 1024
SCORE = 3 * B * T * T
"""Numbers in one layer's score matrix."""


class Language(nn.Module):
    """A GPT whose loss is taken of all rows at once, or of a chunk at a time."""

    def __init__(self, implementation: str = "naive", *, chunked: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.chunked = chunked
        self.model = GPT(vocabulary_size=V, context_length=T, width=C, depth=2, heads=3, positions="rotary",
                         implementation=implementation, tied_embeddings=tied)  # fmt: skip

    def training_step(self, batch: Tensor) -> Tensor:
        if not self.chunked:
            return cross_entropy(self.model(batch).flatten(0, 1).float(), batch.flatten())
        x = self.model.token_embedding(batch)
        for block in self.model.blocks:
            x = block(x)
        weight = self.model.token_embedding.weight if self.model.head is None else self.model.head.weight
        return chunked_cross_entropy(self.model.final_norm(x), weight, batch)


class Classifier(nn.Module):
    """What a test says, between a layer and a loss."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.body, self.head, self.loss = nn.Linear(C, C), nn.Linear(C, V), loss

    def training_step(self, batch: Tensor) -> Tensor:
        return self.loss(self.head(torch.tanh(self.body(batch))))


def predicted(module: nn.Module, *, precision: str = "32-true", batch: Any = None) -> Breakdown:
    tokens = torch.empty(B, T, dtype=torch.int64, device="meta")
    return Predictor(module, optimizer=adam, precision=precision).breakdown(tokens if batch is None else batch)


def targets(rows: Tensor) -> Tensor:
    return torch.zeros(rows.shape[0], *rows.shape[2:], dtype=torch.int64)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("tied", [True, False])
def test_what_flash_and_a_chunked_loss_save_is_what_they_save(precision: str, tied: bool) -> None:
    naive = predicted(Language(tied=tied), precision=precision)
    for saving, module in (
        (naive.flash_saves, Language("flash", tied=tied)),
        (naive.chunked_loss_saves, Language(chunked=True, tied=tied)),
        (naive.both_save, Language("flash", chunked=True, tied=tied)),
    ):
        assert saving is not None
        really = naive.peak.measured - predicted(module, precision=precision).peak.measured
        assert saving.peak == pytest.approx(really, rel=0.1), (saving, really)


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: cross_entropy(x, targets(x)),
        lambda x: cross_entropy((30 * torch.tanh(x / 30)).double(), targets(x), label_smoothing=0.1),
        lambda x: cross_entropy(x[1:].contiguous(), targets(x)[1:]),
        lambda x: cross_entropy(x.reshape(2, -1, V).transpose(1, 2), targets(x).reshape(2, -1)),
        lambda x: nn.functional.nll_loss((x + 1).log_softmax(-1), targets(x), reduction="sum"),
    ],
    ids=["cross_entropy", "soft cap, cast, smoothing", "shifted", "classes in the middle", "by hand"],
)
def test_logits_are_found_however_the_loss_is_written(loss: Any) -> None:
    probed = predicted(Classifier(loss), batch=torch.empty(64, C))
    (logits,) = probed.logits
    assert logits.module == "head" and V in logits.shape and logits.most >= 3 * 4 * 63 * V
    assert "logits and their loss" in probed.peak.culprits


@pytest.mark.parametrize(
    "loss",
    [lambda x: x.square().mean(), lambda x: x.softmax(-1)[:, 0].mean(), lambda x: x.log_softmax(-1).exp().sum()],
    ids=["squares", "softmax", "log_softmax without a target"],
)
def test_other_outputs_are_no_logits(loss: Any) -> None:
    probed = predicted(Classifier(loss), batch=torch.empty(64, C))
    assert probed.logits == () and probed.chunked_loss_saves is None and probed.both_save is None


def test_the_chunk_is_the_one_that_our_loss_takes() -> None:
    assert (chunked_cross_entropy.__kwdefaults__ or {})["chunk_rows"] == CHUNK_ROWS


def test_every_byte_of_the_peak_has_a_culprit_and_the_change_names_the_next() -> None:
    naive = predicted(Language(), precision="bf16-mixed")
    for phase in naive.phases.values():
        assert sum(phase.culprits.values()) == phase.tracked
    assert naive.peak.culprits["score matrices"] == 2 * 6 * SCORE  # probabilities in fp32 and in bf16, two layers
    assert list(naive.peak.culprits)[:2] == ["logits and their loss", "score matrices"]  # largest first
    assert naive.chunked_loss_saves is not None and naive.chunked_loss_saves.then == "score matrices"
    assert naive.flash_saves is not None and naive.flash_saves.then == "logits and their loss"
