"""LightningModules whose models nobody here wrote, but for the convolutions, which are ResNet-50's in plain torch."""

from collections.abc import Callable
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

FOREIGN: dict[str, tuple[int, int]] = {
    "transformers_gpt2_eager": (8, 1024),
    "transformers_gpt2_sdpa": (8, 1024),
    "transformers_llama_eager": (8, 1024),
    "transformers_llama_sdpa": (8, 1024),
    "torch_encoder": (8, 1024),
    "convolutions": (128, 224),
    "tiny_encoder": (3, 64),
}
"""By name the rows, and the tokens or the pixels of a side."""
CLASSES = 1000


class Pretrained(LightningModule):
    """A language model of transformers, as its documentation trains it."""

    def __init__(self, config: str, attention: str, **sizes: Any) -> None:
        super().__init__()
        import transformers

        made = getattr(transformers, config)(**sizes)
        self.model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation=attention)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Classifier(LightningModule):
    """Classes of inputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = cross_entropy(self.model(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Encoder(nn.Module):
    """torch's, with its default dropout."""

    def __init__(self, width: int, heads: int, depth: int, vocabulary: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True)
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, CLASSES)
        self.body = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embed(tokens)).mean(1))


class Bottleneck(nn.Module):
    """Three convolutions around a shortcut (He et al., 2015)."""

    def __init__(self, width: int, inner: int, stride: int) -> None:
        super().__init__()
        out = 4 * inner
        self.body = nn.Sequential(
            *convolution(width, inner, 1), nn.ReLU(inplace=True),
            *convolution(inner, inner, 3, stride), nn.ReLU(inplace=True),
            *convolution(inner, out, 1),
        )  # fmt: skip
        changes = stride != 1 or width != out
        self.shortcut = nn.Sequential(*convolution(width, out, 1, stride)) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(self.body(x) + self.shortcut(x))


def convolution(width: int, out: int, size: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(width, out, size, stride, size // 2, bias=False), nn.BatchNorm2d(out)]


def resnet() -> nn.Module:
    parts: list[nn.Module] = [*convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    width = 64
    for inner, depth in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for number in range(depth):
            parts.append(Bottleneck(width, inner, 2 if number == 0 and inner > 64 else 1))
            width = 4 * inner
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))


_LLAMA: dict[str, Any] = {
    "hidden_size": 768, "intermediate_size": 2432, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 2048,
}  # fmt: skip
_MAKE: dict[str, Callable[[], LightningModule]] = {
    "transformers_gpt2_eager": lambda: Pretrained("GPT2Config", "eager"),
    "transformers_gpt2_sdpa": lambda: Pretrained("GPT2Config", "sdpa"),
    "transformers_llama_eager": lambda: Pretrained("LlamaConfig", "eager", **_LLAMA),
    "transformers_llama_sdpa": lambda: Pretrained("LlamaConfig", "sdpa", **_LLAMA),
    "torch_encoder": lambda: Classifier(Encoder(768, 12, 12, 32000)),
    "convolutions": lambda: Classifier(resnet()),
    "tiny_encoder": lambda: Classifier(Encoder(32, 4, 2, 503)),
}


def foreign_module(name: str) -> LightningModule:
    """One of `FOREIGN`. Raises ImportError where its library is not there."""
    return _MAKE[name]()


def foreign_batch(name: str, rows: int, length: int) -> Any:
    """On torch's default device."""
    labels = torch.randint(CLASSES, (rows,))
    if name == "convolutions":
        return torch.randn(rows, 3, length, length), labels
    tokens = torch.randint(503, (rows, length))
    return tokens if name.startswith("transformers") else (tokens, labels)
