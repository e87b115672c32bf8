import platform
import re
from pathlib import Path

import pytest

from flash_train.training.data import PythonDocs, python_docs


def prepared(cache_dir: Path) -> PythonDocs:
    data = PythonDocs(sequence_length=65, batch_size=3, cache_dir=cache_dir)
    data.prepare_data()
    data.setup()
    return data


def test_every_python_gives_megabytes_and_validates_whole_topics_and_files(tmp_path: Path):
    data = prepared(tmp_path)
    sources, validation = data.provenance["sources_sha256"], data.provenance["validation_sources"]
    train_size, validation_size = len(data.text.train), len(data.text.validation)
    assert 2_000_000 < train_size < 4_000_000 and 0.04 < validation_size / train_size < 0.15
    assert {"topic lambda", "argparse", "zipfile"} <= sources.keys() and data.provenance["missing"] == []
    assert {"topic import", "dataclasses"} <= set(validation), "which side a name falls on must never change"
    assert data.text.validation.array.tobytes().count(0) == len(validation)
    assert data.text.train.array.tobytes().count(0) == len(sources) - len(validation)
    assert (data.vocabulary_size, data.bytes_per_token) == (256, 1.0)
    assert data.provenance["python"] == platform.python_version()
    assert all(re.fullmatch("[0-9a-f]{64}", value) for value in sources.values())


def test_a_missing_module_is_named_and_a_missing_library_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    find = python_docs.find_source
    monkeypatch.setattr(python_docs, "find_source", lambda name: None if name == "argparse" else find(name))
    assert prepared(tmp_path).provenance["missing"] == ["argparse"]
    monkeypatch.setattr(python_docs, "find_source", lambda name: None)
    with pytest.raises(ValueError, match=r"at least 1000000 bytes .* use a complete CPython, or data=text"):
        prepared(tmp_path)


def test_equal_data_orders_have_equal_hashes_whatever_the_batch_size(tmp_path: Path):
    def first_batches(*, sequence_length: int = 65, batch_size: int = 3, seed: int = 0, workers: int = 0) -> str:
        data = PythonDocs(
            sequence_length=sequence_length, batch_size=batch_size, seed=seed, workers=workers, cache_dir=tmp_path
        )
        data.setup()
        return data.provenance["first_batches_sha256"]

    assert first_batches() == first_batches(batch_size=8, workers=2)
    assert len({first_batches(), first_batches(seed=1), first_batches(sequence_length=64)}) == 3
