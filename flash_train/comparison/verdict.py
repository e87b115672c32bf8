"""The comparison in plain sentences: what flash saved, whether the losses agree, and what cannot be relied on."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flash_train.comparison.agreement import GRADIENT_LIMIT, LOSS_LIMIT, Agreement
from flash_train.comparison.cautions import cautions
from flash_train.comparison.growth import growth_exponent
from flash_train.comparison.plan import REFERENCE
from flash_train.comparison.results import Cell, Row, unequal_starts
from flash_train.comparison.text import human_bytes, human_count, human_ratio
from flash_train.memory.sizes import human_error

SUBJECT = "flash"
NOTICEABLE = 1.05
_NOTHING = ["No arm takes what was asked of it, and nothing was measured."]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """`sentence` opens the report. `notes` are further sentences; `problems` those that a reader must know first;
    `refusals` say which arms were left out, and why; `warnings` what makes a number about memory doubtful.

    `valid` is False if the runs did not start alike: then the sentence says that, and nothing else can be concluded.
    """

    sentence: str
    notes: tuple[str, ...]
    problems: tuple[str, ...]
    refusals: tuple[str, ...]
    warnings: tuple[str, ...]
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
            "refusals": list(self.refusals),
            "warnings": list(self.warnings),
            "valid": self.valid,
            "agreement": judged,
            "limits": {"gradient_ratio": GRADIENT_LIMIT, "loss_ratio": LOSS_LIMIT},
            "growth_exponents": self.growth_exponents,
        }


def conclude(
    rows: Sequence[Row],
    cells: Sequence[Cell],
    agreements: Sequence[Agreement],
    *,
    micro_batch_tokens: int | None = None,
    failures: Sequence[str] = (),
) -> Verdict:
    """What the runs amount to, for the arm `flash` (or the last one) against `naive` (or the first other one).

    `micro_batch_tokens`: as many at every length, or None for as many rows. `failures`: problems beside the rows'.
    """
    refused = {cell.arm: cell.error for cell in cells if cell.status == "refused"}
    every = list(dict.fromkeys(cell.arm for cell in cells))
    arms = [arm for arm in every if arm not in refused] or every
    subject, reference = _roles(arms)
    unequal = unequal_starts(rows)
    problems = unequal + [f"{row.name} {row.status}: {row.error}" for row in rows if _unusable(row)] + [*failures]
    problems += _NOTHING if refused and len(refused) == len(every) else []
    sentence = _headline(cells, reference, subject) + _agreement_clause(agreements, subject)
    exponents = {arm: _exponent(cells, arm) for arm in arms}
    notes = [_judgement(one) for one in agreements]
    notes += [f"{_headline(cells, arm, subject)}." for arm in arms if arm not in (reference, subject)]
    commits = sorted({row.commit for row in rows if row.commit})
    if len(commits) > 1:
        notes.append(f"The runs were made at different commits: {', '.join(commits)}.")
    if any(row.memory_source == "profiler" for row in rows):
        notes.append(
            "Peaks on the CPU are of the tensors alive in one step, from the allocator's events as torch.profiler "
            "records them; that step does not count for the speed."
        )
    notes += _growth(exponents, micro_batch_tokens)
    notes += _predictions(rows, cells)
    return Verdict(
        sentence=unequal[0] if unequal else sentence,
        notes=tuple(notes),
        problems=tuple(problems),
        refusals=tuple(f"{arm} was refused and is left out: {why}." for arm, why in refused.items()),
        warnings=tuple(cautions(rows, cells)),
        valid=not unequal,
        agreements=tuple(agreements),
        growth_exponents=exponents,
    )


def _roles(arms: Sequence[str]) -> tuple[str, str | None]:
    """The arm that the sentence is about, and the one it is held against; None if there is no other."""
    others = [arm for arm in arms if arm != REFERENCE] or list(arms)
    subject = SUBJECT if SUBJECT in arms else others[-1]
    rest = [arm for arm in arms if arm != subject]
    return subject, REFERENCE if REFERENCE in rest else next(iter(rest), None)


def _unusable(row: Row) -> bool:
    return row.status in ("failed", "invalid")


def _exponent(cells: Sequence[Cell], arm: str) -> float | None:
    own = [(cell.length, cell.peak_allocated_bytes) for cell in cells if cell.arm == arm and cell.status == "ok"]
    measured = [(length, peak) for length, peak in own if peak]
    return growth_exponent([length for length, _ in measured], [peak for _, peak in measured])


def _growth(exponents: dict[str, float | None], micro_batch_tokens: int | None) -> list[str]:
    grown = [f"{arm} as T^{exponent:.1f}" for arm, exponent in exponents.items() if exponent is not None]
    if not grown:
        return []
    told = f"Beyond a fixed part, peak memory grew: {', '.join(grown)}."
    if micro_batch_tokens is not None:
        told += (
            f" Each micro-batch held {micro_batch_tokens:,} tokens, so that sequences twice as long came in half as "
            "many rows: what grows as T^2 in a row grows as T here, and what grows as T stays level."
        )
    return [told]


def _predictions(rows: Sequence[Row], cells: Sequence[Cell]) -> list[str]:
    """How far the predicted peaks are off at most, and what was not predicted, each reason once."""
    known = [cell for cell in cells if cell.prediction_error_percent is not None]
    told = []
    if known:
        worst = max(known, key=lambda cell: abs(cell.prediction_error_percent or 0))
        told.append(
            f"Peaks were predicted before the first step, as of an eager one; the furthest off is {worst.arm}'s at "
            f"T={worst.length}, by {human_error(worst.prediction_error_percent or 0)}."
        )
    reasons: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.prediction_refusal and row.status != "refused":  # for the same reason
            reasons.setdefault(row.prediction_refusal, {})[row.arm] = None
    return told + [f"No peak is predicted for {' and '.join(arms)}: {why}." for why, arms in reasons.items()]


def _headline(cells: Sequence[Cell], reference: str | None, subject: str) -> str:
    """At the longest length that tells it: what the subject saved, and where one of the two was out of memory."""
    by_key = {(cell.arm, cell.length): cell for cell in cells}
    lengths = sorted({cell.length for cell in cells}, reverse=True)
    if reference is None:
        told = (_alone(by_key[subject, length]) for length in lengths)
        return next(filter(None, told), f"{subject} was measured at no length")
    pairs = [(by_key.get((reference, length)), by_key.get((subject, length))) for length in lengths]
    complete = [(one, other) for one, other in pairs if one and other]
    kinds = (_saved, _subject_fitted, _reference_fitted, _neither_fitted)
    clauses = [next(filter(None, (kind(one, other) for one, other in complete)), "") for kind in kinds]
    sentence = "; at ".join(filter(None, clauses))
    return f"At {sentence}" if sentence else f"There is no length at which {reference} and {subject} were both measured"


def _alone(cell: Cell) -> str:
    """What an arm needed that is compared with none; empty unless it ran."""
    memory = f"used {human_bytes(cell.peak_allocated_bytes)}" if cell.peak_allocated_bytes else ""
    speed = f"trained on {human_count(cell.tokens_per_second)} tokens/s" if cell.tokens_per_second else ""
    told = " and ".join(filter(None, (memory, speed)))
    return f"At T={cell.length} {cell.arm} {told}, with no other arm to compare it with" if told else ""


def _saved(reference: Cell, subject: Cell) -> str:
    """What the subject saved against the reference; empty unless both ran."""
    memory = speed = ""
    if reference.peak_allocated_bytes and subject.peak_allocated_bytes:
        memory = f"used {_memory(reference, subject)} {reference.arm}"
    if reference.tokens_per_second and subject.tokens_per_second:
        speed = f"ran {human_ratio(subject.tokens_per_second / reference.tokens_per_second)} as fast"
        speed += "" if memory else f" as {reference.arm}"
    told = " and ".join(filter(None, (memory, speed)))
    return f"T={subject.length} {subject.arm} {told}" if told else ""


def _memory(reference: Cell, subject: Cell) -> str:
    less = (reference.peak_allocated_bytes or 0) / (subject.peak_allocated_bytes or 1)
    if 1 / NOTICEABLE < less < NOTICEABLE:
        return "as much memory as"
    return f"{human_ratio(less)} less memory than" if less > 1 else f"{human_ratio(1 / less)} the memory of"


def _subject_fitted(reference: Cell, subject: Cell) -> str:
    """That only the subject had enough memory; empty unless so."""
    if reference.status != "oom" or subject.status != "ok":
        return ""
    used = f"used {human_bytes(subject.peak_allocated_bytes)}" if subject.peak_allocated_bytes else "did not"
    return f"T={subject.length} {reference.arm} ran out of memory where {subject.arm} {used}"


def _reference_fitted(reference: Cell, subject: Cell) -> str:
    return _subject_fitted(subject, reference)


def _neither_fitted(reference: Cell, subject: Cell) -> str:
    both = reference.status == subject.status == "oom"
    return f"T={subject.length} both {reference.arm} and {subject.arm} ran out of memory" if both else ""


def _agreement_clause(agreements: Sequence[Agreement], arm: str) -> str:
    """Whether the arm trains as the reference does, by the worst of its numbers; what was not judged stays open."""
    own = [one for one in agreements if one.arm == arm]
    judged = [one for one in own if one.agrees is not None]
    unknown = [f"whether the losses agree at T={one.length} is open ({one.why})" for one in own if one.agrees is None]
    return "".join(f"; {clause}" for clause in [*_judged_clause(judged), *unknown[:1]]) + "."


def _judged_clause(judged: Sequence[Agreement]) -> list[str]:
    if not judged:
        return []
    apart = max(one.loss_difference or 0 for one in judged)
    loss, gradient = (max(getattr(one, name) or 0 for one in judged) for name in ("loss_ratio", "gradient_ratio"))
    where = " and ".join(f"T={one.length}" for one in judged)
    if all(one.agrees for one in judged):
        told = f"the losses agree with {REFERENCE}'s within {apart:.2g} nats at {where}:"
    else:
        told = f"training does not agree with {REFERENCE}'s: the losses at {where} are up to {apart:.2g} nats apart,"
    return [
        f"{told} {loss:.1f} times the noise floor ({LOSS_LIMIT:g} allowed), with a gradient error {gradient:.2f} times "
        f"{REFERENCE}'s ({GRADIENT_LIMIT:g} allowed)"
    ]


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
