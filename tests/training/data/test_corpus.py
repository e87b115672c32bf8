"""flash-prepare's work: which documents there are, that none is lost or doubled, and that it goes on after a kill."""

import gzip
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flash_train.training.data.corpus import Corpus, WorkerDied, build_corpus, processes, work
from flash_train.training.data.corpus.inputs import Reading, find_pieces, read_documents
from flash_train.training.data.corpus.processes import work_through
from flash_train.training.data.shards import open_shard
from flash_train.training.data.subwords import END_OF_TEXT, SubwordTokenizer, tokenizer_from_file

# Forked, for a new interpreter would take seconds to import torch; the children touch neither torch nor threads.
FORK = multiprocessing.get_context("fork")
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

WORDS = ["Füße", "数", "🙂", "to be", "or", "not", "\r\n", "  ", "x" * 50]


def texts(count: int) -> list[str]:
    random = np.random.RandomState(0)
    return [f"{number}: " + " ".join(random.choice(WORDS, random.randint(1, 40))) for number in range(count)]


def jsonl(path: Path, count: int = 60) -> str:
    lines = [json.dumps({"id": number, "text": text}) for number, text in enumerate(texts(count))]
    path.write_text("\n".join([*lines[:7], "", *lines[7:]]) + "\n")
    return str(path)


def documents_in(folder: Path, split: str) -> list[str]:
    """What the shards of a split hold, divided at the separators."""
    dataset = json.loads((folder / "dataset.json").read_text())
    tokenizer = tokenizer_from_file(folder / "tokenizer.json")
    found = []
    for part in dataset["splits"][split]:
        tokens = open_shard(folder / part["file"]).tokens.array
        ends = np.flatnonzero(tokens == tokenizer.separator)
        pieces = [tokenizer.decode(piece.tolist()) for piece in np.split(tokens, ends + 1)]
        found += [piece.removesuffix("\0").removesuffix(END_OF_TEXT) for piece in pieces if piece]
        assert (part["documents"], part["tokens"]) == (len(ends), len(tokens))
    return found


def read(pieces: list[Any], reading: Reading) -> list[str]:
    return [content.decode() for piece in pieces for _, content in read_documents(piece, reading)]


@pytest.mark.parametrize("tokenizer", ["bytes", "characters", "bpe"])
def test_every_document_comes_back_once_in_training_or_validation(tmp_path: Path, tokenizer: str):
    size = 300 if tokenizer == "bpe" else None
    corpus = Corpus([jsonl(tmp_path / "a.jsonl")], 0.3, tokenizer, size, shard_bytes=999)
    dataset = build_corpus(corpus, tmp_path / "out")
    splits = [documents_in(tmp_path / "out", split) for split in ("train", "validation")]
    assert sorted(splits[0] + splits[1]) == sorted(texts(60)) and 5 < len(splits[1]) < 30
    assert len(dataset["splits"]["train"]) > 4
    for split, found in zip(("train", "validation"), splits, strict=True):
        assert sum(part["bytes"] for part in dataset["splits"][split]) == sum(len(text.encode()) + 1 for text in found)


@pytest.mark.parametrize("most_bytes", [1, 50, 997, 10**6])
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.jsonl.gz"])
def test_documents_are_the_same_however_a_file_is_cut(tmp_path: Path, most_bytes: int, name: str):
    file, reading = tmp_path / name, Reading(document_end="<|end|>")
    jsonl(tmp_path / "lines")
    content = (tmp_path / "lines").read_bytes() if "jsonl" in name else "<|end|>".join(texts(60)).encode()
    file.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    pieces = find_pieces([str(file)], reading, most_bytes=most_bytes)
    assert read(pieces, reading) == texts(60)
    assert (len(pieces) > 3) == (most_bytes < 10**6 and not name.endswith("gz"))


def test_a_file_is_a_document_and_of_a_lone_one_the_last_tenth_validates(tmp_path: Path):
    (tmp_path / "a.txt").write_text("é" * 100)
    (tmp_path / "empty.txt").touch()
    for tokenizer, cut in (("characters", 90), ("bytes", 180)):
        out = tmp_path / tokenizer
        dataset = build_corpus(Corpus([str(tmp_path / "*.txt")], tokenizer=tokenizer), out)
        counts = [dataset["splits"][split][0]["tokens"] for split in ("train", "validation")]
        assert counts == [cut, cut // 9] and dataset["separator"] is None
        assert dataset["splits"]["validation"][0]["bytes"] == 20
    assert dataset["vocabulary_size"] == 256
    assert json.loads((tmp_path / "characters" / "dataset.json").read_text())["vocabulary_size"] == 1


def test_a_hugging_face_dataset_is_read_from_its_folder(tmp_path: Path):
    datasets = pytest.importorskip("datasets", reason="an extra")
    rows = datasets.Dataset.from_dict({"body": texts(60), "id": list(range(60))})
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "two")
    for folder, reading in (("one", Reading(field="body")), ("two", Reading(field="body", split="test"))):
        pieces = find_pieces([str(tmp_path / folder)], reading, most_bytes=999)
        assert len(pieces) > 3 and read(pieces, reading) == texts(60)
    with pytest.raises(ValueError, match="column 'text', .*one has body, id; set field="):
        find_pieces([str(tmp_path / "one")], Reading(), most_bytes=999)
    with pytest.raises(ValueError, match="split must be one of train, test, .* got None; set split="):
        find_pieces([str(tmp_path / "two")], Reading(), most_bytes=999)


def test_files_of_their_own_validate_and_more_processes_make_the_same_files(tmp_path: Path):
    train, validation = jsonl(tmp_path / "a.jsonl"), tmp_path / "b.txt"
    validation.write_text("one that validates")
    corpus = Corpus([train], [str(validation)], "bpe", 270, shard_bytes=999)
    done = []
    for number in (1, 2):
        folder = tmp_path / f"{number}"
        build_corpus(corpus, folder, processes=number, report=lambda *now: done.append(now))
        assert documents_in(folder, "validation") == ["one that validates"]
        assert sorted(documents_in(folder, "train")) == sorted(texts(60))
        assert done[-1][1] == done[-1][2] > 0, "progress ends at the end"
    one, two = ({file.name: file.read_bytes() for file in (tmp_path / n).iterdir()} for n in ("1", "2"))
    assert one == two and not [name for name in one if name.startswith(".")]


def test_what_looks_like_the_separator_in_a_text_is_text(tmp_path: Path):
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(json.dumps({"text": text}) for text in (f"a{END_OF_TEXT}b", "c", "d", "e\0f")))
    dataset = build_corpus(Corpus([str(file)], 0.5, "bpe", 257), tmp_path / "bpe")
    found = documents_in(tmp_path / "bpe", "train") + documents_in(tmp_path / "bpe", "validation")
    assert dataset["holds_separator"] is None and sorted(found) == sorted([f"a{END_OF_TEXT}b", "c", "d", "e\0f"])
    dataset = build_corpus(Corpus([str(file)], 0.5, "bytes"), tmp_path / "bytes")
    assert dataset["holds_separator"] == f"{file}, byte {file.read_text().index('{', 50)}"


def kill_in(stop: str, corpus: Corpus, folder: Path) -> None:
    """Prepare, and die in the fourth unit: with its shards begun (`_split_of`), or done and without a note."""
    original = getattr(work, stop)

    def die(*arguments: Any) -> Any:
        shards, begun = len(list(folder.glob("train_*.bin"))), list(folder.glob(".train_*.partial"))
        if (shards == 3 and begun) or (shards == 4 and stop == "write_whole"):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments)

    setattr(work, stop, die)
    build_corpus(corpus, folder)


@pytest.mark.parametrize("stop", ["_split_of", "write_whole"])
def test_a_killed_run_goes_on_where_it_stopped_and_takes_nothing_half_written(tmp_path: Path, stop: str):
    corpus = Corpus([jsonl(tmp_path / "a.jsonl")], 0.3, "characters", shard_bytes=999)
    build_corpus(corpus, tmp_path / "whole")
    folder = tmp_path / "killed"
    process = FORK.Process(target=kill_in, args=(stop, corpus, folder))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL and not (folder / "dataset.json").exists()
    assert bool(list(folder.glob(".*.partial"))) == (stop == "_split_of"), "it died elsewhere than meant"
    encoded = []
    original = work._encoded

    def counted(unit: work.Unit, *others: Any) -> Iterator[Any]:
        encoded.append(unit.number)
        return original(unit, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work, "_encoded", counted)
        build_corpus(corpus, folder)
    assert encoded[0] == 3 and encoded == list(range(3, len(list(folder.glob("train_*.bin")))))
    one, two = ({f.name: f.read_bytes() for f in place.iterdir()} for place in (tmp_path / "whole", folder))
    assert one == two


def test_a_shard_that_is_cut_short_is_made_again_and_a_finished_run_is_left_alone(tmp_path: Path):
    corpus = Corpus([jsonl(tmp_path / "a.jsonl")], 0.3, shard_bytes=999)
    folder = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flash_train.training.data.corpus.build._conclude", lambda *_, **__: {})
        build_corpus(corpus, folder)
    shard = folder / "train_000002.bin"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-2])
    dataset = build_corpus(corpus, folder)
    assert shard.read_bytes() == whole
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work, "_encoded", lambda *_: pytest.fail("worked again"))
        assert build_corpus(corpus, folder) == dataset


def test_another_corpus_does_not_go_on_in_the_folder(tmp_path: Path):
    path = jsonl(tmp_path / "a.jsonl")
    build_corpus(Corpus([path], 0.3), tmp_path / "out")
    with pytest.raises(ValueError, match=r"out tokenizer was bytes and is characters; give another output="):
        build_corpus(Corpus([path], 0.3, "characters"), tmp_path / "out")
    jsonl(tmp_path / "a.jsonl", 61)
    with pytest.raises(ValueError, match=r"out inputs are others or have changed; give another output="):
        build_corpus(Corpus([path], 0.3), tmp_path / "out")
    (tmp_path / "out" / "plan.json").unlink()
    with pytest.raises(ValueError, match="output must be a new folder .*out holds other .bin files"):
        build_corpus(Corpus([path], 0.3), tmp_path / "out")


def test_what_went_wrong_at_once_can_be_set_right_in_the_same_folder(tmp_path: Path):
    path = jsonl(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match="must have the field 'body'"):
        build_corpus(Corpus([path], 0.3, reading=Reading(field="body")), tmp_path / "out")
    with pytest.raises(ValueError, match="must have the field 'body'"):
        build_corpus(Corpus([path], 0.3, "characters", reading=Reading(field="body")), tmp_path / "out")
    assert build_corpus(Corpus([path], 0.3, "bpe", 300), tmp_path / "out")["vocabulary_size"] == 300


@pytest.mark.parametrize(
    ("line", "options", "words"),
    [
        ('{"text": "a"}\n{"text": ', {}, r"a line must be JSON, .*a\.jsonl, byte 14 is not \(.*mend it, or set format"),
        ('{"body": "a", "id": 1}', {}, r"must have the field 'text', .*byte 0 has body, id; set field="),
        ('{"text": 3}', {}, r"field 'text' must be text, .*byte 0 has a int; set field="),
        ('["a"]', {}, r"must have the field 'text', .*byte 0 has none, it is a list"),
        (b'{"text": "\xff"}', {}, r"a line must be JSON, .*'utf-8' codec"),
        ('{"text": "\\ud83d"}', {}, r"must be Unicode, .*byte 0 has half a surrogate pair"),
        ('{"text": "a"}', {}, r"both splits must hold documents, of 1 none is for (train|validation); set validation="),
        ("", {}, r"inputs must hold text, all of .*a\.jsonl are empty; name others"),
        (b"\xff", {"kind": "text"}, r"must be UTF-8, .*a\.jsonl is not \(invalid start byte at its byte 0\); .*=bytes"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_an_input_is_said_with_its_place(tmp_path: Path, line: Any, options: Any, words: str):
    file = tmp_path / "a.jsonl"
    file.write_bytes(line if isinstance(line, bytes) else line.encode())
    with pytest.raises(ValueError, match=words):
        build_corpus(Corpus([str(file)], 0.5, "characters", reading=Reading(**options)), tmp_path / "out")
    assert not list((tmp_path / "out").glob(".*.partial")) + list((tmp_path / "out").glob("dataset.json"))


def test_a_missing_package_or_tokenizer_is_named_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = jsonl(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match="bytes, characters, bpe or a tokenizer file, got words, which is none"):
        build_corpus(Corpus([path], 0.3, "words"), tmp_path / "out")
    with pytest.raises(ValueError, match="at least 257 .*got 256; set more"):
        build_corpus(Corpus([path], 0.3, "bpe", 256), tmp_path / "bpe")
    with pytest.raises(ValueError, match="vocabulary_size is for tokenizer=bpe and needed there, got None"):
        Corpus([path], 0.3, "bpe")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"need the package tokenizers, .* pip install 'flash_train\[bpe\]'"):
        build_corpus(Corpus([path], 0.3, "bpe", 300), tmp_path / "none")
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=r"needs the package datasets, .*pip install 'flash_train\[datasets\]'"):
        find_pieces([str(tmp_path / "folder")], Reading(), most_bytes=999)


def test_a_tokenizer_file_serves_other_texts_and_its_separator_is_chosen_by_name(tmp_path: Path):
    build_corpus(Corpus([jsonl(tmp_path / "a.jsonl")], 0.3, "bpe", 300), tmp_path / "first")
    file = tmp_path / "first" / "tokenizer.json"
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"text": f"{n} bytes Ω"}) for n in range(30)))
    build_corpus(Corpus([str(tmp_path / "b.jsonl")], 0.3, str(file)), tmp_path / "second")
    assert (tmp_path / "second" / "tokenizer.json").read_bytes() == file.read_bytes()
    assert "7 bytes Ω" in documents_in(tmp_path / "second", "train") + documents_in(tmp_path / "second", "validation")
    definition = json.loads(file.read_text())
    definition["added_tokens"] = [dict(definition["added_tokens"][0], id=300 + n, content=f"<{n}>") for n in range(2)]
    (tmp_path / "two.json").write_text(json.dumps(definition))
    with pytest.raises(ValueError, match="which are <0>, <1>, got None; set separator="):
        tokenizer_from_file(tmp_path / "two.json")
    tokenizer = tokenizer_from_file(tmp_path / "two.json", "<1>")
    assert isinstance(tokenizer, SubwordTokenizer) and tokenizer.decode([tokenizer.separator]) == "<1>"


def square_or_die(number: int) -> int:
    if number == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    if number == -1:
        raise ValueError("a bad number")
    return number**2


# Loaded by its path, for to import the package takes seconds, in each of three processes.
PARENT = """
import importlib.util, os, sys, time
spec = importlib.util.spec_from_file_location("processes", PATH)
sys.modules["processes"] = processes = importlib.util.module_from_spec(spec)
spec.loader.exec_module(processes)

def note_and_sleep(path):
    with open(path, "w") as file:
        file.write(str(os.getpid()))
    time.sleep(60)

if __name__ == "__main__":
    next(processes.work_through(note_and_sleep, sys.argv[1:], processes=2))
"""


def test_the_death_of_a_worker_is_an_error_at_once_and_so_is_its_exception():
    assert sorted(work_through(square_or_die, [1, 2, 3], processes=2)) == [1, 4, 9]
    with pytest.raises(WorkerDied, match="a worker process died .*goes on where it stopped, .* less than processes=2"):
        list(work_through(square_or_die, [1, 5, 2, 3], processes=2))
    with pytest.raises(ValueError, match="a bad number"):
        list(work_through(square_or_die, [1, -1, 2, 3], processes=2))


def test_workers_end_with_the_process_that_started_them(tmp_path: Path):
    (tmp_path / "parent.py").write_text(PARENT.replace("PATH", repr(processes.__file__)))
    notes = [tmp_path / "a", tmp_path / "b"]
    parent = subprocess.Popen([sys.executable, tmp_path / "parent.py", *notes])
    deadline = time.monotonic() + 30
    while not all(note.exists() and note.read_text() for note in notes) and time.monotonic() < deadline:
        time.sleep(0.02)
    pids = [int(note.read_text()) for note in notes]
    parent.kill()
    parent.wait()
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(alive, pids))


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and that nobody has asked for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
