"""Shards out of texts: planned, done by several processes, and taken up where a killed run stopped."""

import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from flash_train.training.data.corpus.inputs import KINDS, Piece, Reading, find_pieces, stamp
from flash_train.training.data.corpus.processes import work_through
from flash_train.training.data.corpus.work import (
    NOTES,
    SPLITS,
    TOKENIZER,
    Job,
    Unit,
    characters_of,
    encode_unit,
    finished,
    read_texts,
)
from flash_train.training.data.store import write_whole
from flash_train.training.data.subwords import tokenizer_from_file, train_bpe
from flash_train.training.data.tokenizers import SEPARATOR, ByteTokenizer, CharacterTokenizer

# Raise it when the same texts and settings are to give other shards.
FORMAT = 1
DATASET, PLAN = "dataset.json", "plan.json"
# Of text that a BPE learns from: beyond it no pair changes places, and its words no longer fit in memory.
LEARNED_BYTES = 1 << 30

Report = Callable[[str, int, int], None]
"""Called with what is being done, and how many of how many bytes of text are."""


@dataclass(frozen=True)
class Corpus:
    """Which texts become which tokens.

    Attributes:
        paths: text files, JSON Lines (`.jsonl`, `.ndjson`, also with `.gz`) and dataset folders, or globs of them.
        validation: the share of documents that validate, chosen by the hash of their content, or files of their own.
            Of a single document without an end inside, the last tenth of its tokens validates.
        tokenizer: "bytes", "characters", "bpe" (trained on the training texts), or a tokenizer file.
        vocabulary_size: of a BPE to be trained.
        separator: the special token between documents, of a tokenizer file with several.
        reading: how documents are found in the inputs.
        shard_bytes: of text that become one shard: what a process repeats at most after a kill.

    Raises ValueError for a share that is not between 0 and 1, an unknown kind, or a number that is not positive.
    """

    paths: Sequence[str]
    validation: float | Sequence[str] = 0.01
    tokenizer: str = "bytes"
    vocabulary_size: int | None = None
    separator: str | None = None
    reading: Reading = field(default_factory=Reading)
    shard_bytes: int = 1 << 27

    def __post_init__(self) -> None:
        if isinstance(self.validation, float) and not 0 < self.validation < 1:
            raise ValueError(f"validation must be a share between 0 and 1, or files, got {self.validation}; "
                             "set validation=0.01")  # fmt: skip
        if self.reading.kind not in (None, *KINDS):
            raise ValueError(f"format must be {', '.join(KINDS)} or null, got {self.reading.kind}; set format=null")
        if self.shard_bytes < 1:
            raise ValueError(f"shard_bytes must be positive, got {self.shard_bytes}; set shard_bytes={1 << 27}")
        if (self.tokenizer == "bpe") == (self.vocabulary_size is None):
            raise ValueError(
                f"vocabulary_size is for tokenizer=bpe and needed there, got {self.vocabulary_size} with "
                f"tokenizer={self.tokenizer}; set tokenizer=bpe vocabulary_size=8192, or leave it out"
            )


def build_corpus(
    corpus: Corpus, folder: Path, *, processes: int = 1, report: Report = lambda *_: None
) -> dict[str, Any]:
    """Write the shards of `corpus` into `folder` and return what its dataset.json says.

    What an earlier run on the same inputs with the same settings has finished is kept; the rest, and the dataset.json
    that makes it a dataset, is written now. The files are the same with any number of processes.

    Raises ValueError if an input or setting is wrong, the folder holds something else, or a split would be empty;
    WorkerDied if a process is killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    units = _units(corpus)
    _claim(folder, corpus, units)
    if (folder / DATASET).exists():
        return json.loads((folder / DATASET).read_text())
    for partial_file in (*folder.glob(".*.partial"), *(folder / NOTES).glob(".*.partial")):
        partial_file.unlink()
    share = corpus.validation if isinstance(corpus.validation, float) else 0.0
    (folder / NOTES).mkdir(exist_ok=True)
    job = Job(folder, corpus.reading, share, corpus.separator)
    if not (folder / TOKENIZER).exists():
        write_whole(folder / TOKENIZER, _make_tokenizer(corpus, units, job, processes, report))
    notes = {unit.number: note for unit in units if (note := finished(unit, folder))}
    total, done = sum(unit.size for unit in units), sum(unit.size for unit in units if unit.number in notes)
    report("shards", done, total)
    todo = [unit for unit in units if unit.number not in notes]
    for number, size, note in work_through(partial(_encode, job=job), todo, processes=processes):
        notes[number], done = note, done + size
        report("shards", done, total)
    return _conclude(job, [notes[unit.number] for unit in units], lone=units[0].split == "tenth")


def _encode(unit: Unit, job: Job) -> tuple[int, int, dict[str, Any]]:
    return unit.number, unit.size, encode_unit(unit, job)


def _units(corpus: Corpus) -> list[Unit]:
    """Neighbouring pieces together until they are a shard's worth."""
    sources = [("hash", corpus.paths)]
    if not isinstance(corpus.validation, float):
        sources = [("train", corpus.paths), ("validation", corpus.validation)]
    units: list[Unit] = []
    for split, paths in sources:
        pieces = find_pieces(paths, corpus.reading, most_bytes=corpus.shard_bytes)
        if split == "hash" and len(pieces) == 1 and pieces[0].kind == "text" and not corpus.reading.document_end:
            split = "tenth"
        together: list[Piece] = []
        for piece in pieces:
            if together and sum(each.size for each in together) + piece.size > corpus.shard_bytes:
                units.append(Unit(len(units), tuple(together), split))
                together = []
            together.append(piece)
        units.append(Unit(len(units), tuple(together), split))
    return units


def _claim(folder: Path, corpus: Corpus, units: Sequence[Unit]) -> None:
    """Say in `folder` what is prepared there. Raises ValueError if it is something else."""
    files = {piece.path: None for unit in units for piece in unit.pieces}
    settings = asdict(corpus)
    plan = {"version": FORMAT, "inputs": [stamp(path) for path in files], **settings.pop("reading"), **settings}
    del plan["paths"]  # which from another folder may be others, and mean the same inputs
    plan["tokenizer"] = corpus.tokenizer if corpus.tokenizer in _OWN else stamp(_tokenizer_path(corpus))
    plan = json.loads(json.dumps(plan))
    try:
        saved = json.loads((folder / PLAN).read_text())
    except (FileNotFoundError, ValueError):
        saved = None
    if saved == plan:
        return
    if not any(folder.glob("*.bin")):  # nothing was done yet, or it went wrong at once and is now set right
        (folder / TOKENIZER).unlink(missing_ok=True)
        write_whole(folder / PLAN, json.dumps(plan, indent=1))
        return
    if saved is None:
        raise ValueError(
            f"output must be a new folder or one of a preparation that was broken off, {folder} holds other .bin "
            "files; give another output=<folder>"
        )
    name = next(name for name in plan if saved.get(name) != plan[name])
    said = "are others or have changed" if name == "inputs" else f"was {saved.get(name)} and is {plan[name]}"
    raise ValueError(
        f"a preparation goes on with the inputs and settings that it began with, and in {folder} {name} {said}; "
        "give another output=<folder>, or delete this one"
    )


_OWN = ("bytes", "characters", "bpe")


def _tokenizer_path(corpus: Corpus) -> Path:
    path = Path(corpus.tokenizer).expanduser()
    if not path.is_file():
        raise ValueError(
            f"tokenizer must be {', '.join(_OWN)} or a tokenizer file, got {corpus.tokenizer}, which is none; "
            "set tokenizer=bytes, or the path of a tokenizer.json"
        )
    return path


def _make_tokenizer(corpus: Corpus, units: Sequence[Unit], job: Job, processes: int, report: Report) -> str:
    """The content of the folder's tokenizer file: of subwords, what the package `tokenizers` writes and reads."""
    total = sum(unit.size for unit in units)
    if corpus.tokenizer == "bytes":
        return json.dumps(ByteTokenizer().state())
    if corpus.tokenizer == "characters":
        found, done = set("" if units[0].split == "tenth" else SEPARATOR), 0
        report("characters", done, total)
        for size, characters in work_through(partial(_characters, job=job), units, processes=processes):
            found.update(characters)
            done += size
            report("characters", done, total)
        return json.dumps(CharacterTokenizer("".join(found)).state())
    if corpus.tokenizer == "bpe":
        assert corpus.vocabulary_size is not None
        training = [unit for unit in units if unit.split != "validation"]
        return train_bpe(_to_learn_from(training, job, report), vocabulary_size=corpus.vocabulary_size).definition
    path = _tokenizer_path(corpus)
    tokenizer_from_file(path, corpus.separator)  # whatever is wrong with it is said before the work begins
    return path.read_text()


def _characters(unit: Unit, job: Job) -> tuple[int, str]:
    return unit.size, characters_of(unit, job)


def _to_learn_from(units: Sequence[Unit], job: Job, report: Report) -> Iterator[str]:
    """Texts of every n-th unit, so that they are from everywhere and not too many."""
    chosen = units[:: math.ceil(sum(unit.size for unit in units) / LEARNED_BYTES)]
    total, done = sum(unit.size for unit in chosen), 0
    for unit in chosen:
        report("vocabulary", done, total)
        yield from read_texts(unit, job)
        done += unit.size
    report("vocabulary", done, total)


def _conclude(job: Job, notes: Sequence[dict[str, Any]], *, lone: bool) -> dict[str, Any]:
    """Write dataset.json, which makes the folder a dataset, and clean up. Raises ValueError for an empty split."""
    folder, tokenizer = job.folder, tokenizer_from_file(job.folder / TOKENIZER, job.separator)
    splits = {split: [note[split] for note in notes if split in note] for split in SPLITS}
    for split, parts in splits.items():
        if not parts:
            count = sum(part["documents"] for note in notes for part in note.values())
            raise ValueError(
                f"both splits must hold documents, of {count} none is for {split}; set validation=<another share> or "
                "validation=<files>, and another output"
            )
    holders = [part["holds_separator"] for parts in splits.values() for part in parts if part["holds_separator"]]
    dataset = {
        "version": FORMAT,
        "tokenizer": tokenizer.state()["kind"],
        "vocabulary_size": tokenizer.vocabulary_size,
        "separator": None if lone else tokenizer.separator,
        "separator_name": job.separator,
        "holds_separator": holders[0] if holders else None,
        "splits": splits,
    }
    write_whole(folder / DATASET, json.dumps(dataset, indent=1))
    shutil.rmtree(folder / NOTES, ignore_errors=True)
    return dataset
