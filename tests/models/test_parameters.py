from pathlib import Path

import pytest
import torch
import yaml

from flash_train.models.gpt import GPT
from flash_train.models.parameters import parameter_count, parameter_table
from flash_train.ops.attention import IMPLEMENTATIONS

CONF = Path(__file__).parents[2] / "conf"
GPT2_VOCABULARY = 50_304  # 50,257 rounded up to a multiple of 64, as nanoGPT does


def build(name: str, vocabulary_size: int, context_length: int) -> GPT:
    arguments = yaml.safe_load((CONF / "model" / f"{name}.yaml").read_text())
    assert arguments.pop("_target_") == "flash_train.models.gpt.GPT"
    with torch.device("meta"):
        return GPT(vocabulary_size=vocabulary_size, context_length=context_length, **arguments)


@pytest.mark.parametrize(
    ("name", "vocabulary", "context", "millions"),
    [
        ("gpt2_124m", GPT2_VOCABULARY, 1024, 123.59),  # both printed by nanoGPT, which leaves positions out
        ("char_6l", 65, 256, 10.65),
        ("gpt2_350m", GPT2_VOCABULARY, 1024, 353.55),
        ("llama_124m", GPT2_VOCABULARY, 1024, 124.77),
        ("llama_360m", 49_152, 2048, 361.82),
        ("llama_1b", 32_000, 2048, 1100.05),
        ("llama_7b", 32_000, 4096, 6738.42),
        ("llama_8b", 128_256, 8192, 8030.26),
    ],
)
def test_models_have_the_published_size(name: str, vocabulary: int, context: int, millions: float) -> None:
    counts = parameter_count(build(name, vocabulary, context))
    counted = sum(counts.values()) - counts.get("position embedding", 0)
    assert round(counted / 1e6, 2) == millions


@pytest.mark.parametrize(
    ("name", "count"),
    [("gpt2", 124_439_808), ("gpt2_medium", 354_823_168), ("gpt2_large", 774_030_080), ("gpt2_xl", 1_557_611_200)],
)
def test_the_sizes_of_gpt2_are_those_of_its_published_weights(name: str, count: int) -> None:
    assert sum(parameter_count(build(name, 50_257, 1024)).values()) == count


@pytest.mark.parametrize("path", sorted((CONF / "model").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_model_of_the_configuration_can_be_built(path: Path) -> None:
    assert build(path.stem, 257, 128)(torch.zeros(1, 128, dtype=torch.int64, device="meta")).shape == (1, 128, 257)


def test_every_implementation_is_a_choice_of_the_configuration() -> None:
    choices = {path.stem: yaml.safe_load(path.read_text()) for path in (CONF / "attention").glob("*.yaml")}
    assert choices == {name: {"implementation": name} for name in IMPLEMENTATIONS}


def test_parts_add_up_and_tied_weights_count_once() -> None:
    model = build("gpt2_124m", GPT2_VOCABULARY, 1024)
    assert parameter_count(model) == {
        "token embedding": GPT2_VOCABULARY * 768,
        "position embedding": 1024 * 768,
        "norms": 25 * 768,
        "attention": 12 * 4 * 768**2,
        "feed-forward": 12 * 8 * 768**2,
    }
    assert sum(parameter_count(model).values()) == sum(parameter.numel() for parameter in model.parameters())


def test_the_table_reads_well() -> None:
    assert parameter_table({"token embedding": 38_633_472, "norms": 19_200}) == (
        "token embedding  38,633,472  100.0 %\n"
        "norms                19,200    0.0 %\n"
        "total            38,652,672  100.0 %"
    )
