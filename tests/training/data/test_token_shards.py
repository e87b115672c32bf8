"""`data=tokens` as a trainer sees it: several folders mixed by weight, resumed, separated, and refused where wrong."""

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from flash_train.commands.run import judge
from flash_train.training.data import TokenShards, tokenizer_from_state
from flash_train.training.data.corpus import Corpus, build_corpus
from flash_train.training.data.token_shards import source_names
from tests.training.data.test_data_resume import Recorder, SaveAt, fit, rows

# torch forks its workers, and from 3.12 on Python warns of that in a process with threads.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two prepared folders of several shards each, whose documents are of one letter, of the first a small one."""
    made = []
    for name, letters, count in (("small", "abcdefghijklm", 300), ("large", "NOPQRSTUVWXYZ", 900)):
        folder = tmp_path_factory.mktemp(name)
        random = np.random.RandomState(0)
        texts = [letters[n % 13] * random.randint(3, 30) for n in range(count)]
        (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
        build_corpus(Corpus([str(folder / "texts.jsonl")], 0.2, shard_bytes=3000), folder / "shards")
        made.append(folder / "shards")
    return made[0], made[1]


def data_of(*folders: Path, **options: Any) -> TokenShards:
    settings: dict[str, Any] = {"sequence_length": 13, "batch_size": 4, "seed": 7} | options
    cache = folders[0].parent / "cache"
    return TokenShards(paths=[str(folder) for folder in folders], cache_dir=cache, **settings)


def prepared(*folders: Path, **options: Any) -> TokenShards:
    data = data_of(*folders, **options)
    data.prepare_data()
    data.setup()
    return data


@pytest.mark.parametrize("workers", [0, 2])
def test_ten_steps_on_mixed_shards_see_what_five_and_five_resumed_see(folders: Any, tmp_path: Path, workers: int):
    options: dict[str, Any] = {"workers": workers, "weights": [1, 2], "separate_documents": True}
    whole = fit(data_of(*folders, **options), 10)
    saved = tmp_path / "saved.ckpt"
    fit(data_of(*folders, **options), 8, callbacks=[SaveAt(5, saved)])
    resumed = fit(data_of(*folders, **options), 10, ckpt_path=saved)
    assert torch.equal(rows(resumed), rows(whole)[20:]) and torch.equal(resumed.weight, whole.weight)
    with pytest.raises(ValueError, match=r"weights is \[333, 667\], and now it is \[500, 500\]; use the checkpoint's"):
        fit(data_of(*folders, **options | {"weights": [1, 1]}), 10, ckpt_path=saved)


def test_weights_divide_the_rows_and_without_them_the_tokens_do(folders: Any):
    sizes = [len(prepared(folder).text.train) for folder in folders]
    for weights, share in ((None, sizes[0] / sum(sizes)), ([3, 1], 0.75)):
        data = prepared(*folders, weights=weights, batch_size=1000)
        tokens = next(iter(data.train_dataloader()))["inputs"]
        small = (tokens > ord("Z")).any(1)
        assert small.float().mean().item() == pytest.approx(share, abs=0.001)
        assert not (small & ((tokens >= ord("A")) & (tokens <= ord("Z"))).any(1)).any(), "no row is of two folders"
        assert [part["share"] for part in data.provenance["folders"]] == pytest.approx([share, 1 - share], abs=0.001)
        assert len(data.text.validation) == sum(len(prepared(folder).text.validation) for folder in folders)
        assert data.bytes_per_token == 1.0


def test_separated_documents_reach_the_model_as_ids_across_shards(folders: Any):
    data = prepared(folders[1], separate_documents=True, sequence_length=47)
    assert len(list(folders[1].glob("train_*.bin"))) > 3
    seen = 0
    for batch in (next(iter(data.train_dataloader())), next(iter(data.val_dataloader()))):
        for tokens, ids in zip(batch["inputs"], batch["documents"], strict=True):
            for document in ids.unique():
                letters = set(tokens[ids == document].tolist()) - {0}
                seen += len(letters)
                assert len(letters) <= 1, "a document is of one letter"
    assert seen > 12


def test_a_checkpoint_carries_the_tokenizer_of_subwords(tmp_path: Path):
    (tmp_path / "a.txt").write_text("the cat and the hat and the bat " * 99)
    build_corpus(Corpus([str(tmp_path / "a.txt")], 0.1, "bpe", 270), tmp_path / "shards")
    state = prepared(tmp_path / "shards").state_dict()
    torch.save(state, tmp_path / "state.pt")
    tokenizer = tokenizer_from_state(torch.load(tmp_path / "state.pt", weights_only=True)["tokenizer"])
    assert tokenizer.decode(tokenizer.encode("the hat, Ω")) == "the hat, Ω" and len(tokenizer.encode("the ")) < 4


def nanogpt(folder: Path, dtype: str = "uint16") -> Path:
    folder.mkdir()
    for name, count in (("train.bin", 900), ("val.bin", 90)):
        (np.arange(count) % 97).astype(dtype).tofile(folder / name)
    return folder


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_the_files_of_nanogpt_are_trained_on_where_they_lie(tmp_path: Path, dtype: str):
    folder = nanogpt(tmp_path / "gpt", dtype)
    data = prepared(folder, vocabulary_size=97, separator=96, separate_documents=True)
    assert np.array_equal(data.text.train.array, np.arange(900) % 97) and len(data.text.validation) == 90
    assert data.bytes_per_token is None and data.vocabulary_size == 97
    batch = next(iter(data.train_dataloader()))
    assert torch.equal(batch["targets"], (batch["inputs"] + 1) % 97)
    assert torch.equal(batch["documents"].diff() == 1, batch["inputs"][:, 1:] == 96)
    with pytest.raises(ValueError, match=r"these tokens came without theirs; give it as data\.tokenizer="):
        data.tokenizer.decode([1])


def test_a_tokenizer_tells_the_bytes_of_files_that_came_without_theirs(tmp_path: Path):
    texts = ["the cat and the hat, Ω and ß, and the bat " * n for n in range(1, 40)]
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    build_corpus(Corpus([str(tmp_path / "texts.jsonl")], 0.3, "bpe", 290), tmp_path / "shards")
    data = prepared(tmp_path / "shards")
    known = data.bytes_per_token
    for name in ("dataset.json", "plan.json"):
        (tmp_path / "shards" / name).unlink()
    tokenizer = str(tmp_path / "shards" / "tokenizer.json")
    assert known is not None and known > 1.5
    assert prepared(tmp_path / "shards", tokenizer=tokenizer).bytes_per_token == known
    assert prepared(tmp_path / "shards", vocabulary_size=data.vocabulary_size).bytes_per_token is None
    definition = json.loads(Path(tokenizer).read_text())
    definition["decoder"] = None  # then nobody knows what its tokens stand for
    (tmp_path / "words.json").write_text(json.dumps(definition))
    assert prepared(tmp_path / "shards", tokenizer=str(tmp_path / "words.json")).bytes_per_token is None


def test_validation_cuts_each_source_apart_and_begins_with_a_batch_of_each(folders: Any):
    data = prepared(*folders, weights=[1, 9])
    batches = list(data.val_dataloader())
    numbers = [int(batch["source"]) for batch in batches]
    assert numbers[:2] == [0, 1] and numbers.count(1) > 2 * numbers.count(0)
    for number, folder in enumerate(folders):
        alone = list(prepared(folder).val_dataloader())
        mine = [batch for batch in batches if int(batch["source"]) == number]
        assert all(torch.equal(a["targets"], b["targets"]) for a, b in zip(alone, mine, strict=True))
    assert list(data.source_bytes_per_token.values()) == [1.0, 1.0]
    assert prepared(folders[0]).source_bytes_per_token == {}


def test_sources_are_named_by_as_much_of_their_paths_as_tells_them_apart():
    assert source_names([Path("/a/web"), Path("/b/my code")]) == ["web", "my_code"]
    assert source_names([Path("/a/web/shards"), Path("/a/code/shards")]) == ["web_shards", "code_shards"]
    assert source_names([Path("/a/web"), Path("/a/web")]) == ["web_1", "web_2"]


def test_what_is_wrong_with_folders_is_said_with_the_way_out(folders: Any, tmp_path: Path):
    gpt = nanogpt(tmp_path / "gpt")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "plan.json").touch()
    half = nanogpt(tmp_path / "half")
    (half / "val.bin").unlink()
    for paths, options, words in (
        ([gpt], {}, r"size must be known, .*gpt do not say it; set data\.vocabulary_size"),
        ([gpt], {"vocabulary_size": 96}, r"size 96, .*train\.bin holds token 96 at position 96; set"),
        ([gpt], {"vocabulary_size": 97, "separator": 97}, "separator must be a token below 97, got 97"),
        ([gpt], {"vocabulary_size": 97, "separate_documents": True}, r"none is known of .*gpt; set data\.separator"),
        ([half], {"vocabulary_size": 97}, r"in .*half the validation split has none \(named \*val\*\.bin\); make"),
        ([tmp_path / "none"], {}, "must be folders of token files, .*none is none; make one with flash-prepare"),
        ([broken], {}, "broken is half prepared: .* run flash-prepare again, it goes on where it stopped"),
        ([folders[0], gpt], {"vocabulary_size": 97}, r"all paths must have the same tokenizer, .*gpt has another"),
        ([folders[0]], {"dtype": "uint16"}, r"data\.dtype are for token files of others, .* leave them out"),
        ([folders[0]], {"sequence_length": 9999}, r"at least sequence_length \+ 1 = 10000 tokens, .* has \d+; give"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            prepared(*paths, **options)
    with pytest.raises(ValueError, match=r"positive number for each of 2 paths, got \[1.0\]"):
        data_of(*folders, weights=[1.0])
    with pytest.raises(ValueError, match=r"paths must name at least one folder .* set data\.paths=<folder>"):
        TokenShards(paths=[], sequence_length=3, batch_size=1)


def test_a_shard_that_is_missing_cut_short_or_another_is_named(folders: Any, tmp_path: Path):
    for damage, words in (
        (lambda file, other: file.unlink(), r"readable, .*train_000000\.bin is not \(No such file"),
        (lambda file, other: os.truncate(file, file.stat().st_size - 2), r"train_000000\.bin is of .* was cut short"),
        (lambda file, other: file.write_bytes(other.read_bytes()), r"that dataset\.json names, .*0\.bin is another"),
        (
            lambda file, other: file.write_bytes(file.read_bytes()[:-2] + b"\1\0"),
            r"header, .*0\.bin has another: it was",
        ),
    ):
        copy = tmp_path / words[-9:]
        copy.mkdir()
        for file in folders[0].glob("*.*"):
            (copy / file.name).write_bytes(file.read_bytes())
        damage(copy / "train_000000.bin", copy / "train_000001.bin")
        with pytest.raises(ValueError, match=words):
            prepared(copy)


class KillAWorker(Callback):
    """Kills one of the processes that read the data, as the kernel does when memory runs out."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        time.sleep(self.seconds)
        for worker in multiprocessing.active_children()[:1]:
            os.kill(worker.pid or 0, signal.SIGKILL)


@pytest.mark.parametrize("seconds", [0.0, 0.3])  # while it hands over a batch, and while it waits to
@pytest.mark.parametrize("workers", [1, 2])
def test_the_death_of_a_worker_ends_the_run_with_a_clear_error(folders: Any, workers: int, seconds: float):
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as death:
        fit(data_of(folders[0], workers=workers), 10_000, callbacks=[KillAWorker(seconds)])
    assert time.monotonic() - begin < 30, "it is noticed, not waited for"
    ending = judge(death.value)
    assert (ending.status, int(ending.code), ending.surprising) == ("failed", 1, False)
    assert ending.error is not None
    assert ending.error.startswith("a process that reads the data died (DataLoader worker ")
    assert "resume_from=<its folder> goes on at its last checkpoint" in ending.error


class SignalWorkers(Callback):
    """Does to the processes that read the data what a terminal and a scheduler do to all processes of a run."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 2:
            for worker in multiprocessing.active_children():
                os.kill(worker.pid or 0, signal.SIGINT)
                os.kill(worker.pid or 0, signal.SIGTERM)


def test_the_signals_that_end_a_run_leave_its_workers_to_it(folders: Any):
    """Otherwise their death would be the run's, in the middle of the step that it was about to finish."""
    signalled = fit(data_of(folders[0], workers=2), 20, callbacks=[SignalWorkers()])
    assert torch.equal(rows(signalled), rows(fit(data_of(folders[0]), 20)))


def test_a_shard_that_is_truncated_under_a_worker_ends_the_run_with_a_clear_error(tmp_path: Path):
    gpt = nanogpt(tmp_path / "gpt")
    data = prepared(gpt, vocabulary_size=97, workers=1)
    os.truncate(gpt / "train.bin", 0)
    with pytest.raises(RuntimeError) as death:
        fit(data, 5)
    assert (judge(death.value).error or "").startswith("a process that reads the data died (DataLoader worker ")


def test_a_damaged_token_in_a_worker_is_told_in_one_sentence(tmp_path: Path):
    gpt = nanogpt(tmp_path / "gpt")
    data = prepared(gpt, vocabulary_size=97, workers=1)
    np.full(900, 500, np.uint16).tofile(gpt / "train.bin")
    with pytest.raises(ValueError) as error:
        Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, max_steps=1).fit(Recorder(), data)
    assert (judge(error.value).error or "").startswith("tokens must be below the vocabulary's size 97, ")
