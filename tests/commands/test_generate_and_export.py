"""From a run to text and to transformers' folder, and from such a folder to text and to a run."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from flash_train.commands import evaluate, export, generate, prepare, train, tune
from flash_train.commands.checkpoints import open_run, read_text
from flash_train.commands.result import weights_sha256
from flash_train.training.data.subwords import train_bpe
from tests.commands.conftest import SHORT, Command

TEXT = "It was a bright cold day in April, and the clocks were striking thirteen.\n" * 60
CHARACTERS = ("data=text", "data.paths=text.txt", "data.tokenizer=characters")
LLAMA = ("model.positions=rotary", "model.norm=rms", "model.feed_forward=swiglu", "model.heads=4", "model.kv_heads=2")
SAME = (*CHARACTERS, *LLAMA, "vocabulary_multiple=64", "model.rotary_base=100.0")
FEW = ("max_new_tokens=12", "temperature=1.5")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trained") / "kept"


@pytest.fixture
def trained(command: Command, tmp_path: Path, kept: Path) -> Command:
    """`command`, in a folder in which a run of two steps lies, of characters; the first test has trained it."""
    if not kept.exists():
        (tmp_path / "text.txt").write_text(TEXT)
        answer = command(train.main, *SHORT, *SAME)
        assert answer.code == 0, answer.err
        shutil.copytree(tmp_path, kept)
    shutil.copytree(kept, tmp_path, dirs_exist_ok=True)
    return command


def text(command: Command, *arguments: str) -> str:
    answer = command(generate.main, *arguments)
    assert answer.code == 0, answer.err
    return answer.out


def started_with(folder: Path) -> str:
    return json.loads((folder / "result.json").read_text())["initial_weights_sha256"]


def test_one_seed_gives_one_text_that_begins_with_the_prompt(trained: Command, tmp_path: Path) -> None:
    once = text(trained, "checkpoint=run", "prompt=It was", "seed=7", *FEW)
    assert once.startswith("It was") and len(once) == len("It was") + 12 + 1
    assert text(trained, "checkpoint=run", "prompt=It was", "seed=7", *FEW) == once
    assert text(trained, "checkpoint=run", "prompt=It was", "seed=8", *FEW) != once
    (tmp_path / "prompt.txt").write_text("It was")
    file = next((tmp_path / "run" / "checkpoints").iterdir())
    assert text(trained, f"checkpoint={file}", "prompt_file=prompt.txt", "seed=7", *FEW) == once
    several = text(trained, "checkpoint=run", "prompt=It was", "seed=7", "num_samples=3", *FEW)
    samples = several.removesuffix("\n").split(f"\n{generate.SEPARATOR}\n")
    assert len(samples) == len(set(samples)) == 3 and all(sample.startswith("It was") for sample in samples)
    half = text(trained, "checkpoint=run", "prompt=It was", "max_new_tokens=40", "dtype=bf16", "top_k=1")
    assert half == text(trained, "checkpoint=run", "prompt=It was", "max_new_tokens=40", "dtype=bf16", "temperature=0")


def test_an_exported_run_is_the_same_model_in_transformers_and_in_every_command(
    trained: Command, tmp_path: Path
) -> None:
    answer = trained(export.main, "checkpoint=run", "output=exported")
    assert answer.code == 0, answer.err
    assert answer.out == f"exported: step 2 of {Path('run/checkpoints/step_00000002.ckpt')}\n"
    ours = open_run("run").model
    tokens = torch.randint(ours.vocabulary_size, (2, 32))
    with torch.inference_mode():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")(tokens).logits
        torch.testing.assert_close(theirs, ours(tokens), rtol=0, atol=1e-6)
    assert text(trained, "checkpoint=exported", "prompt=April", *FEW) == text(
        trained, "checkpoint=run", "prompt=April", *FEW
    )
    for source in ("exported", "run"):
        answer = trained(train.main, *SHORT, *SAME, f"init_from={source}", f"hydra.run.dir=from_{source}")
        assert answer.code == 0, answer.err
        assert started_with(tmp_path / f"from_{source}") == weights_sha256(ours) != started_with(tmp_path / "run")
    assert {path.name for path in tmp_path.iterdir()} == {
        "run", "text.txt", "exported", "from_exported", "from_run"
    }  # fmt: skip


def test_a_run_that_began_with_weights_resumes_without_them(trained: Command, tmp_path: Path) -> None:
    assert trained(train.main, *SHORT, *SAME, "init_from=run", "hydra.run.dir=second").code == 0
    (tmp_path / "run").rename(tmp_path / "gone")
    answer = trained(train.main, "resume_from=second", "trainer.max_steps=3")
    assert answer.code == 0, answer.err
    answer = trained(train.main, "resume_from=second", "trainer.max_steps=4", "init_from=gone")
    assert answer.code == 2 and "a run resumes with its own weights; leave out init_from" in answer.err
    assert trained(evaluate.main, "checkpoint=second", "data.batch_size=33").code == 0
    answer = trained(tune.main, *SHORT, *SAME[:-1], "find=learning_rate", "init_from=gone", "model.rotary_base=1.0")
    assert answer.code == 2 and "where model.rotary_base is 100.0, and now it is 1.0" in answer.err


OTHERS = {
    ("init_from=run", "model.depth=3"): "where model.depth is 2, and now it is 3; set model.depth=2",
    ("init_from=run", "model.bias=true"): "where model.bias is False, and now it is True; set model.bias=False",
    ("init_from=run", "data.tokenizer=bytes"): "this text has another vocabulary; use the same tokenizer",
    ("init_from=nowhere",): "nowhere does not exist",
    ("init_from=exported", "model.depth=3"): "got depth=3: give it depth=2 (model.NAME=VALUE; vocabulary_size and",
    ("init_from=exported", "vocabulary_size=70"): "got vocabulary_size=70: give it vocabulary_size=2",
    ("init_from=3",): "init_from must be str | None, got 3",
}


def test_a_run_begins_with_weights_of_its_own_model_and_text_alone(trained: Command) -> None:
    assert trained(export.main, "checkpoint=run", "output=exported").code == 0
    for arguments, said in OTHERS.items():
        answer = trained(train.main, *SHORT, *SAME, "hydra.run.dir=other", *arguments)
        assert answer.code == 2 and said in answer.err and len(answer.err.splitlines()) == 1, answer.err


WRONG = {
    ('prompt="Ölberg"',): "'Ö' is not among them; leave it out, or train with data.tokenizer=bytes",
    ("prompt=''",): "the prompt must hold at least one token, got none; give prompt=",
    (): "a text to go on from must be given, and once; give prompt=TEXT or prompt_file=FILE",
    ("prompt=It", "prompt_file=text.txt"): "must be given, and once",
    ("prompt=1984",): "prompt must be a text, got 1984; put it in quotes twice: 'prompt=\"1984\"'",
    ("prompt_file=nowhere.txt",): "prompt_file cannot be read, nowhere.txt: No such file or directory; check the path",
    ("prompt=It", "temperature=-1"): "temperature must be a number from 0 on, got -1",
    ("prompt=It", "top_p=2"): "top_p must be a probability above 0 and up to 1, got 2",
    ("prompt=It", "top_k=0"): "top_k must be a positive integer, got 0",
    ("prompt=It", "num_samples=0"): "num_samples must be a positive number, got 0",
    ("prompt=It", "dtype=fp8"): "dtype must be fp32, bf16 or fp16, got 'fp8'",
    ("prompt=It", "temprature=1"): "there is no 'temprature'; did you mean temperature",
    ("prompt=It", "tokenizer=nowhere.json"): "nowhere.json cannot be read (No such file or directory); give tokenizer=",
    ("prompt=It", "checkpoint=text.txt"): "The checkpoint text.txt is damaged",
    ("prompt=It", "checkpoint=nowhere"): "nowhere does not exist",
}


def test_what_cannot_be_generated_is_said_in_one_line(trained: Command) -> None:
    for arguments, said in WRONG.items():
        answer = trained(generate.main, "checkpoint=run", *arguments)
        assert (answer.code, answer.out) == (2, ""), arguments
        lines = [line for line in answer.err.splitlines() if line and not line.startswith("attention: ")]
        assert len(lines) == 1 and lines[0].startswith("flash-generate: ") and said in lines[0], answer.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_missing_gpu_is_said(trained: Command) -> None:
    answer = trained(generate.main, "checkpoint=run", "prompt=It", "device=cuda")
    assert answer.err == "flash-generate: device=cuda needs a CUDA device and torch sees none; choose device=cpu\n"


@pytest.mark.gpu
def test_a_gpu_generates_what_the_cpu_does(trained: Command) -> None:
    likeliest = ("checkpoint=run", "prompt=It was", "temperature=0", "max_new_tokens=40")
    assert text(trained, *likeliest, "device=cuda") == text(trained, *likeliest)
    seeded = ("checkpoint=run", "prompt=It was", "device=cuda", "dtype=bf16")
    assert text(trained, *seeded) == text(trained, *seeded)


def test_an_export_is_whole_or_not_there(trained: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    answer = trained(export.main, "checkpoint=run", "output=taken")
    assert answer.err == "flash-export: output must be a new or empty folder, taken is not; give another output=\n"

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "write_tokenizer", full)
    answer = trained(export.main, "checkpoint=run", "output=exported")
    assert answer.code == 2
    assert answer.err == "flash-export: cannot write exported: No space left on device; give another output=\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "taken", "text.txt"]


def test_what_transformers_lacks_and_what_it_has_already_are_not_exported(command: Command, tmp_path: Path) -> None:
    assert command(train.main, *SHORT, "model.sinks=true").code == 0
    answer = command(export.main, "checkpoint=run", "output=exported")
    assert answer.code == 2 and "transformers' gpt2 has no sinks, got sinks=True" in answer.err
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text("{}")
    answer = command(export.main, "checkpoint=theirs", "output=exported")
    assert answer.code == 2 and "theirs is a transformers folder already; copy it" in answer.err
    assert not (tmp_path / "exported").exists()


def test_subwords_are_exported_as_transformers_reads_them(command: Command, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(30):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"Text {number} says what texts say. " * 9)
    settings = ("tokenizer=bpe", "vocabulary_size=300", "validation=0.3", "processes=1")
    assert command(prepare.main, "paths=[texts/*.txt]", "output=prepared", *settings).code == 0
    assert command(train.main, *SHORT, "data=tokens", "data.paths=prepared").code == 0
    answer = command(export.main, "checkpoint=run", "output=exported", "dtype=bf16")
    assert answer.code == 0, answer.err
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path / "exported"), open_run("run").tokenizer
    assert theirs("Text 7 says").input_ids == ours.encode("Text 7 says").tolist()
    assert theirs.eos_token_id == ours.separator == AutoModelForCausalLM.from_pretrained("exported").config.eos_token_id
    assert AutoModelForCausalLM.from_pretrained("exported").dtype == torch.bfloat16
    same = ("prompt=Text", "max_new_tokens=6", "dtype=bf16")
    assert text(command, "checkpoint=exported", *same) == text(command, "checkpoint=run", *same)


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with a tokenizer that puts a token before each text, as Llama's do, and ends texts with two tokens."""
    folder = tmp_path_factory.mktemp("llama")
    tokenizer = tokenizers.Tokenizer.from_str(train_bpe(iter([TEXT]), vocabulary_size=280).definition)
    tokenizer.add_special_tokens(["<s>"])
    start = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>").save_pretrained(folder)
    torch.manual_seed(4)
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.5, eos_token_id=299, pad_token_id=0,
        bos_token_id=start,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_the_likeliest_text_is_the_one_that_transformers_generates_up_to_its_end(
    command: Command, llama_folder: Path
) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(llama_folder)
    model: Any = AutoModelForCausalLM.from_pretrained(llama_folder)
    inputs = tokenizer("It was a bright", return_tensors="pt")
    model.generation_config.eos_token_id = None
    beyond = list(range(len(tokenizer), 300))  # where the model has rows, and the tokenizer nothing
    settings: dict[str, Any] = {"do_sample": False, "suppress_tokens": beyond, "pad_token_id": 0}
    tokens = model.generate(**inputs, max_new_tokens=20, **settings)[0].tolist()
    assert len(set(tokens[-20:])) > 3
    drawn = (f"checkpoint={llama_folder}", "prompt=It was a bright", "temperature=0", "max_new_tokens=20")
    assert text(command, *drawn) == tokenizer.decode(tokens, skip_special_tokens=True) + "\n"
    (llama_folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [299, tokens[-9]]}))
    until = tokens.index(tokens[-9], len(tokens) - 20)
    assert text(command, *drawn) == tokenizer.decode(tokens[:until], skip_special_tokens=True) + "\n"
    assert text(command, *drawn, "stop=false") == tokenizer.decode(tokens, skip_special_tokens=True) + "\n"


def test_a_prompt_that_spells_a_special_token_means_it(llama_folder: Path) -> None:
    found = read_text(llama_folder / "tokenizer.json")
    assert found.encode("a<|endoftext|>")[-1] == 0 and len(found.encode("a<|endoftext|>")) == 3
