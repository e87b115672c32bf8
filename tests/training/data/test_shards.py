"""The files themselves: what is written is read back, and what is wrong with a file is said before anything is read."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flash_train.training.data.shards import Shards, ShardWriter, check_tokens, open_shard

TOKENS = np.arange(1, 42)


def shard(path: Path, tokens: np.ndarray = TOKENS, *, vocabulary_size: int = 50) -> Path:
    writer = ShardWriter(path, vocabulary_size=vocabulary_size)
    for part in np.array_split(tokens, 3):
        writer.write(part)
    writer.close()
    return path


def llmc(path: Path, tokens: np.ndarray = TOKENS, *, magic: int = 20240520, version: int = 1, count: int = -1) -> Path:
    """A file as llm.c's and modded-nanogpt's preparation writes it."""
    header = np.zeros(256, np.int32)
    header[:3] = magic, version, len(tokens) if count < 0 else count
    path.write_bytes(header.tobytes() + tokens.astype(np.uint16 if magic == 20240520 else np.uint32).tobytes())
    return path


def plain(path: Path, tokens: np.ndarray = TOKENS, dtype: str = "uint16") -> Path:
    """A file as nanoGPT's preparation writes it."""
    tokens.astype(dtype).tofile(path)
    return path


def test_a_shard_says_what_it_holds_and_llmc_reads_it(tmp_path: Path):
    for size, dtype, magic, version in ((50, "uint16", 20240520, 1), (65537, "uint32", 20240801, 7)):
        path = shard(tmp_path / f"{size}.bin", vocabulary_size=size)
        opened = open_shard(path)
        assert (opened.tokens.dtype, opened.vocabulary_size) == (dtype, size) and opened.sha256
        assert np.array_equal(opened.tokens.array, TOKENS)
        header, body = np.fromfile(path, np.int32, 256), np.fromfile(path, dtype, offset=1024)
        assert header[:3].tolist() == [magic, version, 41] and np.array_equal(body, TOKENS)
    assert not list(tmp_path.glob(".*")), "nothing is left of the writing"


def test_files_of_others_are_read_and_their_type_found_out(tmp_path: Path):
    large = TOKENS + (1 << 16)
    for path, tokens, vocabulary_size in (
        (llmc(tmp_path / "a.bin"), TOKENS, 50),
        (llmc(tmp_path / "b.bin", large, magic=20240801, version=7), large, 65578),
        (plain(tmp_path / "c.bin"), TOKENS, 50),
        (plain(tmp_path / "d.bin", dtype="uint32"), TOKENS, 50),
        (plain(tmp_path / "e.bin", large, dtype="uint32"), large, 65578),
    ):
        opened = open_shard(path, vocabulary_size=vocabulary_size)
        assert np.array_equal(opened.tokens.array, tokens), path.name
    zeros = plain(tmp_path / "f.bin", np.zeros(600))
    assert len(open_shard(zeros, dtype="uint16").tokens) == 600, "told, it needs no header"


@pytest.mark.parametrize(
    ("path", "options", "words"),
    [
        (lambda f: shard(f), {"cut": 1}, "long as its header says, .*41 uint16 tokens .1106 bytes. and has 1105.*cut"),
        (lambda f: llmc(f, count=40), {}, "40 uint16 tokens .1104 bytes. and has 1106 bytes; it was cut short"),
        (lambda f: llmc(f, TOKENS[:0]), {}, "must hold tokens, .* has none; leave it out"),
        (lambda f: llmc(f, magic=20240522), {}, "begin with 20240520 or 20240801, .* begins with 20240522; prepare"),
        (lambda f: llmc(f, version=2), {}, "must have version 1, .* has 2"),
        (lambda f: plain(f), {"cut": 1}, "uint16 tokens must have a multiple of 2 bytes, .* has 81; .*set data.dtype"),
        (lambda f: plain(f), {"dtype": "uint32"}, "uint32 tokens must have a multiple of 4 bytes, .* has 82"),
        (lambda f: plain(f, TOKENS[:0]), {}, "must hold tokens, .* is empty"),
        (lambda f: f, {}, r"must be readable, .* is not \(No such file or directory\); check the path"),
        (lambda f: shard(f), {"dtype": "uint32"}, "what the header says, .*uint16, got uint32; leave data.dtype"),
        (lambda f: shard(f), {"vocabulary_size": 99}, "vocabulary_size must be what the header says, .* 50, got 99"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_said_with_the_way_out(tmp_path: Path, path: Any, options: Any, words: str):
    file = path(tmp_path / "file.bin")
    if cut := options.pop("cut", 0):
        file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(ValueError, match=words):
        open_shard(file, **options)


def test_a_token_outside_the_vocabulary_is_found_before_training_and_a_file_read_once(tmp_path: Path, monkeypatch: Any):
    file, cache = plain(tmp_path / "train.bin"), tmp_path / "cache"
    with pytest.raises(ValueError, match=r"vocabulary's size 40, .*train\.bin holds token 40 at position 39; set"):
        check_tokens(open_shard(file), vocabulary_size=40, folder=cache)
    found = check_tokens(open_shard(file), vocabulary_size=42, folder=cache)
    with monkeypatch.context() as forgetful:
        forgetful.setattr("flash_train.training.data.shards._read_through", lambda tokens: pytest.fail("read again"))
        assert check_tokens(open_shard(file), vocabulary_size=42, folder=cache) == found
    plain(file, TOKENS[:-1])
    assert check_tokens(open_shard(file), vocabulary_size=42, folder=cache).sha256 != found.sha256, "another file"
    with pytest.raises(ValueError, match="size 40, .* says that it is of a larger one"):
        check_tokens(open_shard(shard(tmp_path / "own.bin", TOKENS[:9])), vocabulary_size=40, folder=cache)


def test_a_shard_with_another_token_than_it_was_written_with_is_refused_before_training(tmp_path: Path):
    file, cache = shard(tmp_path / "own.bin"), tmp_path / "cache"
    check_tokens(open_shard(file), vocabulary_size=50, folder=cache)
    content = bytearray(file.read_bytes())
    content[1024 + 2 * 30] ^= 1  # a token of the vocabulary, too
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"the sha256 of its header, .*own\.bin has another: .* prepare it again"):
        check_tokens(open_shard(file), vocabulary_size=50, folder=cache)


def test_several_files_are_one_stream(tmp_path: Path):
    parts = [shard(tmp_path / f"{n}.bin", part) for n, part in enumerate(np.array_split(TOKENS, 5))]
    stream = Shards(tuple(open_shard(part).tokens for part in parts), 50)
    assert len(stream) == 41 and np.array_equal(stream.array, TOKENS)
    for length in (1, 7, 23):
        starts = np.arange(41)
        expected = TOKENS[np.minimum(starts[:, None] + np.arange(length), 40)]
        assert np.array_equal(stream.windows(starts, length), expected)
    assert stream.windows(np.array([99]), 3).tolist() == [[41, 41, 41]]
    assert len(pickle.dumps(stream)) < 2000


def test_a_file_that_is_damaged_while_it_is_read_is_named(tmp_path: Path):
    file = shard(tmp_path / "own.bin")
    stream = Shards((open_shard(file).tokens,), 50)
    content = bytearray(file.read_bytes())
    content[1024 + 2 * 30 + 1] = 255
    with file.open("r+b") as same:
        same.write(content)
    assert stream.windows(np.array([0]), 30).max() == 30
    with pytest.raises(ValueError, match=r"size 50, .*own\.bin holds token 65311 at position 30; .*copy the file"):
        stream.windows(np.array([0]), 31)


def test_a_shard_that_is_abandoned_leaves_nothing(tmp_path: Path):
    writer = ShardWriter(tmp_path / "own.bin", vocabulary_size=50)
    writer.write(TOKENS)
    writer.abandon()
    assert not list(tmp_path.iterdir())
