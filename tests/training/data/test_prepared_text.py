import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from flash_train.training.data.documents import Document
from flash_train.training.data.store import PreparedText, cache_folder, prepare
from flash_train.training.data.tokenizers import ByteTokenizer

TEXT = bytes(range(32, 127)) * 11
# Forked, for a new interpreter would take seconds to import torch; the children touch neither torch nor threads.
FORK = multiprocessing.get_context("fork")
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def prepared(folder: Path, text: bytes = TEXT) -> PreparedText:
    return prepare([Document.from_bytes("text", text)], [], tokenizer="bytes", folder=folder)


def content(text: PreparedText) -> bytes:
    return text.train.array.tobytes() + text.validation.array.tobytes()


def prepare_slowly(folder: Path, start, reports) -> None:
    written = []

    def encode(self: ByteTokenizer, document: Document) -> Iterator[np.ndarray]:
        written.append(document.name)
        time.sleep(0.3)
        yield np.frombuffer(TEXT, np.uint8)

    ByteTokenizer.encode_document = encode
    start.wait()
    text = content(prepared(folder))
    reports.put((text, len(written)))


def prepare_and_die_halfway(folder: Path) -> None:
    def encode(self: ByteTokenizer, document: Document) -> Iterator[np.ndarray]:
        yield np.frombuffer(TEXT[:100], np.uint8)
        os.kill(os.getpid(), signal.SIGKILL)

    ByteTokenizer.encode_document = encode
    prepared(folder)


def test_of_three_processes_at_once_one_prepares_and_all_read_the_whole(tmp_path: Path):
    start, reports = FORK.Barrier(3), FORK.SimpleQueue()
    processes = [FORK.Process(target=prepare_slowly, args=(tmp_path, start, reports)) for _ in range(3)]
    for process in processes:
        process.start()
    results = [reports.get() for _ in processes]
    for process in processes:
        process.join()
    assert [text for text, _ in results] == [TEXT] * 3
    assert sorted(written for _, written in results) == [0, 0, 1]


def test_a_killed_preparation_is_not_taken_for_whole_and_leaves_nothing_behind(tmp_path: Path):
    process = FORK.Process(target=prepare_and_die_halfway, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert list(tmp_path.glob(".*.partial/tokens.bin")), "it died before it wrote, which shows nothing"
    text = prepared(tmp_path)
    assert content(text) == TEXT
    assert sorted(path.name for path in tmp_path.iterdir()) == [text.key, f"{text.key}.lock"]


@pytest.mark.parametrize("damaged", ["tokens.bin", "meta.json"])
def test_a_damaged_file_is_prepared_again(tmp_path: Path, damaged: str):
    path = tmp_path / prepared(tmp_path).key / damaged
    path.write_bytes(path.read_bytes()[:-1])
    assert content(prepared(tmp_path)) == TEXT


def test_other_content_or_tokenizer_goes_to_another_folder(tmp_path: Path):
    document = Document.from_bytes("text", TEXT)
    keys = {prepared(tmp_path).key, prepared(tmp_path, TEXT + b"!").key}
    keys.add(prepare([document], [], tokenizer="characters", folder=tmp_path).key)
    keys.add(prepare([document], [document], tokenizer="bytes", folder=tmp_path).key)
    assert len(keys) == 4


def test_a_single_document_trains_with_the_first_int_of_nine_tenths(tmp_path: Path):
    for count in (10, 19, 1045):
        text = prepared(tmp_path, TEXT[:count])
        assert (len(text.train), len(text.validation)) == (int(0.9 * count), count - int(0.9 * count))
        assert content(text) == TEXT[:count]


def test_several_documents_are_each_followed_by_a_nul(tmp_path: Path):
    documents = [Document.from_bytes(name, name.encode()) for name in ("one", "two", "three")]
    for tokenizer in ("bytes", "characters"):
        text = prepare(documents[:2], documents[2:], tokenizer=tokenizer, folder=tmp_path)
        assert text.tokenizer.decode(text.train.array) == "one\0two\0"
        assert text.tokenizer.decode(text.validation.array) == "three\0"


def test_a_worker_receives_a_path_and_not_a_copy_of_the_tokens(tmp_path: Path):
    tokens = prepared(tmp_path, TEXT * 50).train
    assert tokens.array.size > 40_000
    assert len(pickle.dumps(tokens)) < 1000
    assert np.array_equal(pickle.loads(pickle.dumps(tokens)).array, tokens.array)


def test_a_cache_that_cannot_be_written_is_named_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=r"cache folder that can be written, .*file.* set data\.cache_dir="):
            prepared(folder)
    text = prepared(tmp_path)
    with monkeypatch.context() as read_only:
        read_only.setattr(Path, "mkdir", lambda *_, **__: pytest.fail("wrote where it had only to read"))
        assert content(prepared(tmp_path)) == content(text)


def test_the_cache_folder_follows_the_argument_then_xdg_then_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    assert cache_folder(tmp_path) == tmp_path
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder(None) == tmp_path / "xdg" / "flash_train" / "data"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder(None) == tmp_path / ".cache" / "flash_train" / "data"

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(ValueError, match=r"home directory.*set data\.cache_dir="):
        cache_folder(None)


def test_a_file_that_changes_while_it_is_prepared_is_refused(tmp_path: Path):
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT)
    document = Document.from_file(path)
    path.write_bytes(TEXT[::-1])
    with pytest.raises(ValueError, match=r"must not change .*text\.txt did; run it again"):
        prepare([document], [], tokenizer="bytes", folder=tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*/*"))
