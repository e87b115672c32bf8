"""What a comparison is asked to do, checked before the first run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from flash_train.comparison.plan import JUDGED_LENGTHS, check_arms, check_lengths, check_positive

# What a comparison varies or fixes itself, and the key that says how.
_DECIDED_ELSEWHERE = {
    "attention": "arms",
    "attention.implementation": "arms",
    "data.sequence_length": "lengths",
    "trainer.max_steps": "steps",
    "trainer.limit_val_batches": "validation_batches",
    "validate_every": "steps",
    "resume_from": "output",
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The keys of conf/compare.yaml that flash-train does not have; what each means stands there."""

    arms: tuple[str, ...]
    lengths: tuple[int, ...]
    steps: int
    repeats: int
    judged_lengths: tuple[int, ...]
    micro_batch_tokens: int | None
    validation_batches: int
    output: str


def read_settings(config: Mapping[str, Any], *, implementations: Sequence[str]) -> Settings:
    """The settings in a composed configuration. Raises ValueError, in one sentence, for what makes no comparison."""
    check_arms(config["arms"], implementations)
    check_lengths(config["lengths"])
    lengths = sorted(config["lengths"])
    for key in ("steps", "repeats", "validation_batches"):
        check_positive(key, config[key])
    if config["micro_batch_tokens"] is not None:
        check_positive("micro_batch_tokens", config["micro_batch_tokens"])
    judged = lengths[:JUDGED_LENGTHS] if config["judged_lengths"] is None else config["judged_lengths"]
    if not isinstance(judged, list) or any(length not in lengths for length in judged):
        raise ValueError(f"judged_lengths must be a list of some of the lengths {lengths}, got {judged!r}")
    return Settings(
        arms=tuple(config["arms"]),
        lengths=tuple(lengths),
        steps=config["steps"],
        repeats=config["repeats"],
        judged_lengths=tuple(sorted(judged)),
        micro_batch_tokens=config["micro_batch_tokens"],
        validation_batches=config["validation_batches"],
        output=config["output"],
    )


def passed_on(overrides: Sequence[str]) -> list[str]:
    """The overrides that are meant for flash-train. Raises ValueError for those that a comparison decides itself."""
    own = {field.name for field in fields(Settings)}
    kept = []
    for override in overrides:
        key = override.partition("=")[0].lstrip("+~")
        if key in _DECIDED_ELSEWHERE:
            raise ValueError(
                f"a comparison sets {key} itself, so {override!r} cannot be given; see {_DECIDED_ELSEWHERE[key]}"
            )
        if key not in own:
            kept.append(override)
    return kept
