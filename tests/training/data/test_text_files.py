import os
from pathlib import Path
from typing import Any

import pytest

from flash_train.training.data import TextFiles, tokenizer_from_state
from flash_train.training.data.documents import BLOCK_BYTES
from flash_train.training.data.text_files import find_files

POEM = "Füße, 数 and 🙂: ünïcode in one, two, three and four bytes.\r\n" * 41


def text_files(paths: Any, cache_dir: Path, **options: Any) -> TextFiles:
    settings: dict[str, Any] = {"sequence_length": 17, "batch_size": 3} | options
    data = TextFiles(paths=paths, cache_dir=cache_dir, **settings)
    data.prepare_data()
    data.setup()
    return data


def written(path: Path, content: str | bytes = POEM) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def test_characters_are_the_sorted_set_of_both_splits_and_count_their_bytes(tmp_path: Path):
    text = POEM + "only the last tenth has a Z"
    data = text_files(written(tmp_path / "poem.txt", text), tmp_path, tokenizer="characters")
    assert data.tokenizer.decode(range(data.vocabulary_size)) == "".join(sorted(set(text)))
    head, tail = (data.tokenizer.decode(split.array) for split in (data.text.train, data.text.validation))
    assert head + tail == text and len(head) == int(0.9 * len(text))
    assert data.bytes_per_token == len(tail.encode()) / len(tail)
    assert text_files(str(tmp_path / "poem.txt"), tmp_path).bytes_per_token == 1.0


def test_a_character_may_straddle_two_blocks(tmp_path: Path):
    text = "x" + "é" * (BLOCK_BYTES // 2 + 5)
    data = text_files(written(tmp_path / "long.txt", text), tmp_path, tokenizer="characters")
    assert data.tokenizer.decode(data.text.train.array[:4]) == "xééé"
    assert len(data.text.train) + len(data.text.validation) == len(text)


def test_a_tokenizer_comes_back_from_the_checkpoint_state(tmp_path: Path):
    path = written(tmp_path / "poem.txt")
    for kind in ("bytes", "characters"):
        data = text_files(path, tmp_path, tokenizer=kind)
        tokenizer = tokenizer_from_state(data.state_dict()["tokenizer"])
        assert tokenizer.decode(tokenizer.encode("Füße 数 🙂")) == "Füße 数 🙂"
        assert tokenizer.vocabulary_size == data.vocabulary_size
    with pytest.raises(ValueError, match="'Q' is not among them; leave it out"):
        tokenizer.encode("Q")


def test_several_files_validate_as_a_whole_wherever_they_lie(tmp_path: Path):
    texts = [f"file {number} says {POEM}" for number in range(30)]
    splits = []
    for folder in ("a", "b"):
        paths = [written(tmp_path / folder / f"{folder}{number}.txt", text) for number, text in enumerate(texts)]
        data = text_files(paths, tmp_path)
        splits.append([bytes(data.text.train.array), bytes(data.text.validation.array)])
        found = [bytes(split).decode().removesuffix("\0").split("\0") for split in splits[-1]]
        assert sorted(found[0] + found[1]) == sorted(texts) and 1 <= len(found[1]) <= 7
    assert splits[0] == splits[1]
    assert text_files(paths[:2], tmp_path).provenance["validation_sources"], "two files leave one to validate"


@pytest.mark.parametrize("tokenizer", ["bytes", "characters"])
def test_separated_documents_are_the_files_that_a_row_cuts(tmp_path: Path, tokenizer: str):
    texts = [f"{number}: a short one" for number in range(70)]
    paths = [written(tmp_path / f"{number}.txt", text) for number, text in enumerate(texts)]
    data = text_files(paths, tmp_path, tokenizer=tokenizer, separate_documents=True, sequence_length=53)
    pieces = []
    for batch in (next(iter(data.train_dataloader())), next(iter(data.val_dataloader()))):
        for tokens, ids in zip(batch["inputs"], batch["documents"], strict=True):
            pieces += [data.tokenizer.decode(tokens[ids == document].tolist()) for document in ids.unique()]
    assert len(pieces) > 12 and all(any(piece.strip("\0") in text for text in texts) for piece in pieces)
    assert {piece.removeprefix("\0") for piece in pieces} & set(texts), "some are whole"
    assert data.provenance["separate_documents"] is True


@pytest.mark.parametrize("tokenizer", ["bytes", "characters"])
def test_a_file_that_holds_the_separator_cannot_be_separated_and_says_so_from_the_cache_too(
    tmp_path: Path, tokenizer: str
):
    paths = [written(tmp_path / f"{name}.txt", f"{name} {POEM}") for name in ("one", "two")]
    paths.append(written(tmp_path / "wide.txt", POEM.encode("utf-16-le") if tokenizer == "bytes" else POEM + "\0end"))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"without a NUL, .* and .*wide\.txt holds one; take it out .*=false"):
            text_files(paths, tmp_path, tokenizer=tokenizer, separate_documents=True)
    assert text_files(paths, tmp_path, tokenizer=tokenizer).text.ambiguous
    assert not text_files(paths[:2], tmp_path, tokenizer=tokenizer, separate_documents=True).text.ambiguous


def test_a_single_text_has_no_documents_to_separate(tmp_path: Path):
    with pytest.raises(ValueError, match="needs several documents, and the text is one; give it as several files"):
        text_files(written(tmp_path / "poem.txt"), tmp_path, separate_documents=True)


def test_globs_are_sorted_and_each_file_is_read_once(tmp_path: Path):
    for name in ("b.txt", "a.txt", "deep/c.txt", "x[1].txt", "other.md"):
        written(tmp_path / name)
    names = [path.name for path in find_files([f"{tmp_path}/b*.txt", f"{tmp_path}/**/*.txt"])]
    assert names == ["b.txt", "a.txt", "c.txt", "x[1].txt"]
    assert [path.name for path in find_files([f"{tmp_path}/x[1].txt"])] == ["x[1].txt"]


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("", {}, r"must hold text, .*poem\.txt is empty; leave it out"),
        (b"caf\xe9 " * 99, {"tokenizer": "characters"}, r"UTF-8, .*poem\.txt is not \(byte 3: .*data\.tokenizer=bytes"),
        (
            "0123456789" * 17,
            {},
            r"validation text must hold at least .* = 18 tokens, it holds 17; .*sequence_length=16",
        ),
        ("01234567", {}, r"training text must hold at least .* = 18 tokens, it holds 7; .*sequence_length=6 or less"),
        (POEM, {"tokenizer": "words"}, r"one of bytes, characters, got 'words'"),
        (POEM, {"sequence_length": 0}, r"sequence_length must be an integer from 1 on, got 0; set data\.s"),
        (POEM, {"sequence_length": 64.5}, r"integer from 1 on, got 64\.5"),
        (POEM, {"seed": None}, r"seed must be an integer from 0 on, got None"),
        (POEM, {"batch_size": -3}, r"batch_size must be an integer from 1 on, got -3; set data\.batch_size=1"),
        (POEM, {"workers": -1}, r"workers must be an integer from 0 on, got -1"),
    ],
)
def test_an_unusable_text_or_setting_is_refused_in_one_sentence(tmp_path: Path, content, options, message):
    path = tmp_path / "poem.txt"
    with pytest.raises(ValueError, match=message):
        text_files(written(path, content), tmp_path, **options)


def test_paths_that_lead_to_no_file_are_refused_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for paths, message in [
        ([], r"at least one file or glob, got none; set data\.paths="),
        (f"{tmp_path}/none.txt", r"must exist, .*none\.txt does not; check the path"),
        (f"{tmp_path}/*.txt", r"glob must match at least one file, .*\*\.txt' matches none"),
        (str(tmp_path), r"must be a file, .* is a folder; name its files: '.*/\*\*/\*\.txt'"),
    ]:
        with pytest.raises(ValueError, match=message):
            text_files(paths, tmp_path)

    def forbidden(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = written(tmp_path / "secret.txt")
    monkeypatch.setattr(Path, "open", forbidden)
    with pytest.raises(
        ValueError, match=r"readable, .*secret\.txt is not \(Permission denied\); check its permissions"
    ):
        text_files(path, tmp_path)


def test_copies_of_a_file_are_one_file(tmp_path: Path):
    once = text_files(written(tmp_path / "a.txt"), tmp_path)
    twice = text_files([str(tmp_path / "a.txt"), written(tmp_path / "b.txt")], tmp_path)
    assert twice.text.key == once.text.key and len(twice.text.train) == int(0.9 * len(POEM.encode()))


def test_a_pipe_is_refused_without_waiting_for_it(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="must be a file that can be read again, .*pipe is not; save it to a file"):
        text_files(str(tmp_path / "pipe"), tmp_path)
