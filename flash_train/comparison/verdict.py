"""The comparison in plain sentences: what flash saved, whether the losses agree, and what cannot be relied on."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flash_train.comparison.agreement import GRADIENT_LIMIT, LOSS_LIMIT, Agreement
from flash_train.comparison.growth import growth_exponent
from flash_train.comparison.plan import REFERENCE
from flash_train.comparison.results import Cell, Row, unequal_starts
from flash_train.comparison.text import human_bytes, human_ratio

SUBJECT = "flash"
NOTICEABLE = 1.05


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """`sentence` opens the report. `notes` are further sentences; `problems` those that a reader must know first.

    `valid` is False if the runs did not start alike: then the sentence says that, and nothing else can be concluded.
    """

    sentence: str
    notes: tuple[str, ...]
    problems: tuple[str, ...]
    valid: bool
    agreements: tuple[Agreement, ...]
    growth_exponents: dict[str, float | None]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for results.json."""
        judged = [
            asdict(one) | {"gradient_ratio": one.gradient_ratio, "loss_ratio": one.loss_ratio}
            for one in self.agreements
        ]
        return {
            "sentence": self.sentence,
            "notes": list(self.notes),
            "problems": list(self.problems),
            "valid": self.valid,
            "agreement": judged,
            "limits": {"gradient_ratio": GRADIENT_LIMIT, "loss_ratio": LOSS_LIMIT},
            "growth_exponents": self.growth_exponents,
        }


def conclude(rows: Sequence[Row], cells: Sequence[Cell], agreements: Sequence[Agreement]) -> Verdict:
    """What the runs amount to, for the arm `flash` (or the last one) against `naive` (or the first one)."""
    arms = list(dict.fromkeys(cell.arm for cell in cells))
    reference = REFERENCE if REFERENCE in arms else arms[0]
    subject = SUBJECT if SUBJECT in arms else arms[-1]
    unequal = unequal_starts(rows)
    problems = unequal + [f"{row.name} {row.status}: {row.error}" for row in rows if _unusable(row)]
    sentence = _headline(cells, reference, subject) + _agreement_clause(agreements, subject)
    exponents = {arm: _exponent(cells, arm) for arm in arms}
    notes = [_judgement(one) for one in agreements] + _other_arms(cells, arms, reference, subject)
    commits = sorted({row.commit for row in rows if row.commit})
    if len(commits) > 1:
        notes.append(f"The runs were made at different commits: {', '.join(commits)}.")
    grown = [f"{arm} as T^{exponent:.1f}" for arm, exponent in exponents.items() if exponent is not None]
    if grown:
        notes.append(f"Beyond a fixed part, peak memory grew: {', '.join(grown)}.")
    return Verdict(
        sentence=unequal[0] if unequal else sentence,
        notes=tuple(notes),
        problems=tuple(problems),
        valid=not unequal,
        agreements=tuple(agreements),
        growth_exponents=exponents,
    )


def _unusable(row: Row) -> bool:
    return row.status in ("failed", "invalid")


def _exponent(cells: Sequence[Cell], arm: str) -> float | None:
    own = [(cell.length, cell.peak_allocated_bytes) for cell in cells if cell.arm == arm and cell.status == "ok"]
    measured = [(length, peak) for length, peak in own if peak]
    return growth_exponent([length for length, _ in measured], [peak for _, peak in measured])


def _headline(cells: Sequence[Cell], reference: str, subject: str) -> str:
    """At the longest length that tells it: what the subject saved, and where only the subject had enough memory."""
    by_key = {(cell.arm, cell.length): cell for cell in cells}
    lengths = sorted({cell.length for cell in cells}, reverse=True)
    pairs = [(by_key.get((reference, length)), by_key.get((subject, length))) for length in lengths]
    complete = [(one, other) for one, other in pairs if one and other and reference != subject]
    saved = next(filter(None, (_saved(one, other) for one, other in complete)), "")
    fitted = next(filter(None, (_fitted(one, other) for one, other in complete)), "")
    sentence = "; at ".join(filter(None, (saved, fitted)))
    return f"At {sentence}" if sentence else f"There is no length at which {reference} and {subject} were both measured"


def _saved(reference: Cell, subject: Cell) -> str:
    """What the subject saved against the reference; empty unless both ran."""
    if not (reference.peak_allocated_bytes and subject.peak_allocated_bytes):
        return ""
    told = f"T={subject.length} {subject.arm} used {_memory(reference, subject)} {reference.arm}"
    if reference.tokens_per_second and subject.tokens_per_second:
        told += f" and ran {human_ratio(subject.tokens_per_second / reference.tokens_per_second)} as fast"
    return told


def _memory(reference: Cell, subject: Cell) -> str:
    less = (reference.peak_allocated_bytes or 0) / (subject.peak_allocated_bytes or 1)
    if 1 / NOTICEABLE < less < NOTICEABLE:
        return "as much memory as"
    return f"{human_ratio(less)} less memory than" if less > 1 else f"{human_ratio(1 / less)} the memory of"


def _fitted(reference: Cell, subject: Cell) -> str:
    """That only the subject had enough memory; empty unless so."""
    if reference.status != "oom" or not subject.peak_allocated_bytes:
        return ""
    used = human_bytes(subject.peak_allocated_bytes)
    return f"T={subject.length} {reference.arm} ran out of memory where {subject.arm} used {used}"


def _agreement_clause(agreements: Sequence[Agreement], arm: str) -> str:
    own = [one for one in agreements if one.arm == arm]
    open_ones = [one.why for one in own if one.agrees is None]
    if not own or open_ones:
        return f"; whether the losses agree is open ({open_ones[0]})." if open_ones else "."
    worst = max(own, key=lambda one: one.loss_ratio or 0)
    gradient = max(one.gradient_ratio or 0 for one in own)
    agree = "the losses agree" if all(one.agrees for one in own) else "the losses do not agree"
    lengths = " and ".join(f"T={one.length}" for one in own)
    return (
        f"; {agree} within {worst.loss_difference:.2g} nats at {lengths}: {worst.loss_ratio:.1f} times the noise floor "
        f"({LOSS_LIMIT:g} allowed), with a gradient error {gradient:.2f} times {REFERENCE}'s "
        f"({GRADIENT_LIMIT:g} allowed)."
    )


def _judgement(one: Agreement) -> str:
    """Both numbers of one agreement, with what they are measured by."""
    if one.agrees is None:
        return f"{one.arm} at T={one.length}: not judged, {one.why}."
    return (
        f"{one.arm} at T={one.length} {'agrees' if one.agrees else 'does not agree'} with {REFERENCE}: "
        f"gradient error against float64 {one.gradient_error:.2g}, {REFERENCE} {one.reference_gradient_error:.2g} "
        f"({one.gradient_ratio:.2f} times, {GRADIENT_LIMIT:g} allowed); largest loss difference "
        f"{one.loss_difference:.2g} nats, noise floor {one.loss_floor:.2g} "
        f"({one.loss_ratio:.1f} times, {LOSS_LIMIT:g} allowed)."
    )


def _other_arms(cells: Sequence[Cell], arms: Sequence[str], reference: str, subject: str) -> list[str]:
    """The subject against each further arm, in one sentence each."""
    others = [arm for arm in arms if arm not in (reference, subject)]
    return [f"{_headline(cells, arm, subject)}." for arm in others]
