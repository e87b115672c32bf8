"""memory_advice: what to change so that a training step needs less, and how much less, predicted and not guessed."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from flash_train.memory.attribution import Breakdown
from flash_train.memory.cards import Card
from flash_train.memory.changes import MODELLED, RE_RUN, Advice, Lever, Search, Setup
from flash_train.memory.levers import checkpoint_blocks, first_rows, rows_of, shapes_of
from flash_train.memory.logits import CHUNK_ROWS
from flash_train.memory.predict import Predictor
from flash_train.memory.step import OptimizerMaker


@dataclass(frozen=True)
class Advisory:
    """What a step fills memory with, and what to change."""

    breakdown: Breakdown
    """Of the step as it is."""
    limit: int | None
    """Bytes that torch's allocator may have."""
    advice: tuple[Advice, ...]
    """Best first: what fits, by what it costs (nothing, time, other numbers) and by what it saves; then the rest by
    what it saves. Changes that fit together come before all, where what fits alone costs more, or nothing does."""
    left_out: tuple[str, ...]
    """What was not predicted, and why."""


def modelled_advice(breakdown: Breakdown, *, limit: int | None = None) -> Advisory:
    """What `memory_advice` can say of a step that was recorded already, without taking it again: flash attention and a
    chunked loss. With `limit` bytes for torch's allocator it says what fits.
    """
    base = Setup()

    def record(setup: Setup) -> Breakdown:
        return breakdown

    search = Search(record, base, limit=limit, phase=None, seconds=0.0)
    return Advisory(breakdown, limit, search.advice(_modelled(breakdown)), ())


def memory_advice(
    module: nn.Module,
    batch: Any,
    *,
    optimizer: OptimizerMaker | None = None,
    precision: str = "32-true",
    accumulate: int = 1,
    gradient_clip: float | None = None,
    device: str = "cuda",
    card: Card | None = None,
    limit: int | None = None,
    phase: str | None = None,
    seconds: float = 60.0,
) -> Advisory:
    """What to change so that a training step of `module` on `batch` needs less memory, best first, with the effect.

    The step is taken on fake tensors, as `predict_peak` does, and again for each change of batch, precision,
    checkpointing and optimizer. Flash attention and a chunked loss are modelled on its record: score matrices that were
    found by data flow are left out and log-sum-exps put in, the logits of all rows give way to those of a chunk.

    >>> import torch
    >>> class Model(torch.nn.Linear):
    ...     def training_step(self, batch):
    ...         return torch.nn.functional.cross_entropy(self(batch), torch.zeros(4096, dtype=torch.int64))
    >>> advisory = memory_advice(Model(16, 5000), torch.empty(4096, 16), device="cpu",
    ...                          optimizer=lambda module: torch.optim.AdamW(module.parameters()))
    >>> next(iter(advisory.breakdown.peak.culprits))
    'logits and their loss'
    >>> [(advice.change, advice.basis) for advice in advisory.advice][-1]
    ('cross-entropy over 2,048 rows at a time', 'modelled')

    Args:
        module, batch, optimizer, precision, accumulate, gradient_clip, device, card: as for `predict_peak`.
        limit: bytes that torch's allocator may have: what the card has less the CUDA context; None: none is known.
        phase: "forward", "backward" or "optimizer": what takes nothing off this one's peak is left out, since it is
            where memory ran out; "validation": speak of the module's `validation_step`. None: of the step's peak.
        seconds: no new change is tried after these.

    Raises:
        TypeError, ValueError: where `predict_peak` does, there is no `validation_step`, an unknown `phase`, a `limit`
            that is no number of bytes, or `seconds` that are none.
    """
    if phase not in (None, "forward", "backward", "optimizer", "validation"):
        raise ValueError(f"phase must be forward, backward, optimizer, validation or None, got {phase!r}")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 0):
        raise ValueError(f"limit must be a number of bytes or None, got {limit!r}: 24 * 2**30 are 24 GiB")
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not seconds >= 0:
        raise ValueError(f"seconds must be a number from 0 on, got {seconds!r}: 60 is usual")
    batch, validation = shapes_of(batch), phase == "validation"

    def record(setup: Setup) -> Breakdown:
        predictor = Predictor(
            module, optimizer=optimizer, precision=setup.precision, accumulate=setup.accumulate,
            gradient_clip=gradient_clip, device=device, card=card, fused=setup.fused,
            change=checkpoint_blocks if setup.checkpointed else None,
        )  # fmt: skip
        rows = batch if setup.rows is None else first_rows(batch, setup.rows)
        return predictor.breakdown(rows, validation=validation)

    search = Search(record, Setup(precision, accumulate), limit=limit, phase=phase, seconds=seconds)
    levers = [*_modelled(search.breakdown), *_fewer_rows(search, rows_of(batch), accumulate, validation=validation)]
    if not validation:
        levers += [_CHECKPOINTING, *([_FUSED] if "optimizer" in (phase, search.breakdown.phase) else [])]
    levers += _coarser(precision)
    return Advisory(search.breakdown, limit, search.advice(levers), tuple(search.left_out))


# The levers

_CHECKPOINTING = Lever(
    "checkpointing of each block",
    "torch.utils.checkpoint around each block, or gradient_checkpointing_enable(); in flash-train checkpointing=block",
    1, RE_RUN, lambda setup: replace(setup, checkpointed=True),
)  # fmt: skip
_FUSED = Lever(
    "a fused optimizer step",
    "fused=True to the optimizer, which then needs no copies of the parameters' size",
    0, RE_RUN, lambda setup: replace(setup, fused=True),
)  # fmt: skip


def _modelled(breakdown: Breakdown) -> Iterable[Lever]:
    where = [scores.module for scores in breakdown.score_matrices]
    if where:
        yield Lever(
            f"flash attention in {several(where)}",
            "torch's scaled_dot_product_attention (in nn.MultiheadAttention need_weights=False, in transformers "
            'attn_implementation="sdpa") or flash_attention of flash_train; in flash-train attention=flash',
            0, MODELLED, lambda setup: replace(setup, flash=True),
        )  # fmt: skip
    if breakdown.logits:
        yield Lever(
            f"cross-entropy over {CHUNK_ROWS:,} rows at a time",
            "chunked_cross_entropy of flash_train on the last layer's input; in flash-train loss=chunked",
            0, MODELLED, lambda setup: replace(setup, chunked=True),
        )  # fmt: skip


def _coarser(precision: str) -> list[Lever]:
    coarser = {"32-true": "bf16-mixed", "bf16-mixed": "bf16-true", "16-mixed": "bf16-true"}.get(precision)
    if coarser is None:
        return []
    loses = "" if coarser == "bf16-mixed" else "; small updates of bf16 weights are lost, so watch the loss"
    return [
        Lever(
            f"precision {coarser}",
            f'Trainer(precision="{coarser}"){loses}',
            2,
            RE_RUN,
            lambda setup: replace(setup, precision=coarser),
        )  # fmt: skip
    ]


def _fewer_rows(search: Search, rows: int | None, accumulate: int, *, validation: bool) -> list[Lever]:
    """The largest share of the rows that fits, by a line through two predictions, confirmed; or half of them."""
    if rows is None or rows < 2:
        search.left_out.append(
            f"fewer rows: the batch has {'one' if rows else 'no number of rows that all tensors share'}"
        )
        return []
    shares = [share for share in range(2, rows + 1) if rows % share == 0]
    chosen = shares[0]
    try:
        if search.fits(0) is not None:
            chosen = _largest_share(search, rows, accumulate, shares)
    except Exception:  # advice() says it, when it asks again
        pass
    left, times = rows // chosen, accumulate * (1 if validation else chosen)
    what = f"{left} row{'s' if left > 1 else ''} instead of {rows}"
    return [
        Lever(
            f"validation on {what}" if validation else f"{what}, {times} accumulated",
            "the validation DataLoader's batch_size" if validation
            else "the DataLoader's batch_size, and Trainer(accumulate_grad_batches=...): the same rows an update",
            1, RE_RUN, lambda setup: replace(setup, rows=left, accumulate=times),
        )
    ]  # fmt: skip


def _largest_share(search: Search, rows: int, accumulate: int, shares: list[int]) -> int:
    def peak(share: int) -> int:
        setup = replace(search.base, rows=rows // share, accumulate=accumulate * share)
        return search.outcome(setup).peak

    whole, part = search.now.peak, peak(shares[0])
    slope = (whole - part) / (rows - rows // shares[0])
    for share in shares:
        if search.fits(int(whole - slope * (rows - rows // share))) and search.fits(peak(share)):
            return share
    return shares[-1]


def several(modules: list[str]) -> str:
    """The first by name, the others by number."""
    first = modules[0] or "the training step"
    return first if len(modules) == 1 else f"{first} and {len(modules) - 1} more"
