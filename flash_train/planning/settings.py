"""What a plan is asked for, checked before the first prediction."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flash_train.comparison.plan import check_arms, check_lengths, check_positive
from flash_train.memory.cards import CARDS, Card, card_of
from flash_train.memory.sizes import parse_bytes


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The keys of conf/plan.yaml that flash-train does not have; what each means stands there."""

    arms: tuple[str, ...]
    card: Card
    """Its memory is the budget, where one was given."""
    rows: int
    length: int
    """data.sequence_length: where the largest batch is sought."""
    lengths: tuple[int, ...]
    """Of the table; empty: powers of two."""
    length_step: int
    allowance: float
    limit: int
    """No T and no batch is sought beyond."""


def read_settings(config: Mapping[str, Any], *, implementations: Sequence[str]) -> Settings:
    """The settings in a composed configuration. Raises ValueError, in one sentence, for what makes no plan."""
    check_arms(config["arms"], implementations)
    if config["lengths"] is not None:
        check_lengths(config["lengths"])
    for key in ("rows", "length_step", "limit"):
        check_positive(key, config[key])
    allowance = config["allowance"]
    if not isinstance(allowance, int | float) or isinstance(allowance, bool) or not 0 <= allowance < 1:
        raise ValueError(f"allowance must be a share of the peak from 0 to 1, got {allowance!r}; 0.04 is usual")
    card, length = _card(config["card"], config["budget"]), config["data"]["sequence_length"]
    _check_limit(config["limit"], rows=config["rows"], step=config["length_step"], length=length)
    if "hopper" in config["arms"] and card.capability != (9, 0):
        capability = ".".join(map(str, card.capability))
        raise ValueError(
            f"arms must run on the GPU that is planned for, and hopper needs compute capability 9.0, got {capability}; "
            "give card=h100 or card=h200, or leave it out"
        )
    return Settings(
        arms=tuple(config["arms"]),
        card=card,
        rows=config["rows"],
        length=length,
        lengths=tuple(sorted(config["lengths"] or ())),
        length_step=config["length_step"],
        allowance=float(allowance),
        limit=config["limit"],
    )


def _check_limit(limit: int, *, rows: int, step: int, length: Any) -> None:
    least = max(rows * step, length if isinstance(length, int) else 0)
    if least > limit:
        raise ValueError(
            f"limit must leave something to seek, rows={rows} of length_step={step} tokens and one row of "
            f"data.sequence_length={length}, got {limit}; give limit={least}, or less of these"
        )


def _card(name: Any, budget: Any) -> Card:
    if name is None and budget is None:
        raise ValueError("a plan must have a budget or a card; give budget=24GiB, or card=h200")
    if name is not None and name not in CARDS:
        raise ValueError(f"card must be one of {', '.join(CARDS)}, got {name!r}; for another give budget=24GiB")
    size = None if budget is None else parse_bytes(budget)
    if name is None:
        assert size is not None
        return card_of(size)
    card = CARDS[name]
    if size is not None and size > card.memory:
        raise ValueError(
            f"budget must be at most what the card has, got {budget} for {name}, which has "
            f"{card.memory / 2**30:.1f}GiB; leave out one of the two"
        )
    return card if size is None else replace(card, memory=size)
