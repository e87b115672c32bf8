"""What others do with the 124M GPT-2, for `tests.training.benchmark`, which starts this module once for each run.

`nanogpt` is nanoGPT's architecture and loop in plain PyTorch: its forward returns the logits beside the loss, which
keeps them alive, and SDPA chooses its own back end; `nanogpt_flash` leaves SDPA the flash back end alone; and
`transformers` is its GPT2LMHeadModel. All begin with the weights that flash-train draws from the same seed, and take
its batches, which lie in pinned memory before the first step: they pay nothing for reading the data.
"""

import argparse
import importlib.util
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_train.commands.result import write_json
from flash_train.models.gpt import GPT
from flash_train.training.data import TextFiles
from flash_train.training.schedule import warmup_cosine
from tests.training.turns import StepClock, steps_of

PEERS = ("nanogpt", "nanogpt_flash", "transformers")
SEED = 1337  # flash-train's own default
LEARNING_RATE, WARM_UP_STEPS, LOG_EVERY = 6e-4, 5, 10
"""Of all arms, as is the cosine after the warm-up. Every tenth step is logged, by flash-train's default and nanoGPT's:
that reads the loss, which waits for the device."""


@dataclass(frozen=True)
class Run:
    """One training run of one arm, in a process of its own."""

    arm: str
    length: int
    turns: Sequence[int]
    """Timed steps of each."""
    tokens: int
    """A step: the batch has tokens / length rows."""
    text: str
    folder: str
    cache: str
    device: str
    width: int
    depth: int
    heads: int
    vocabulary: int
    compile: bool
    overrides: Sequence[str] = ()
    """Of flash-train, where it is one of its runs."""

    @property
    def steps(self) -> int:
        return steps_of(self.turns)

    @property
    def rows(self) -> int:
        return self.tokens // self.length


# nanoGPT's architecture; the names are those of GPT, whose weights it takes


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=2))
        return self.projection(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.expand = nn.Linear(width, 4 * width, bias=False)
        self.projection = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(F.gelu(self.expand(x)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(width, bias=False), Attention(width, heads)
        self.feed_forward_norm, self.feed_forward = nn.LayerNorm(width, bias=False), FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class PlainGPT(nn.Module):
    """Tokens and targets [B, T] to the logits [B, T, V] and the loss."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(run.vocabulary, run.width)
        self.position_embedding = nn.Embedding(run.length, run.width)
        self.blocks = nn.ModuleList(Block(run.width, run.heads) for _ in range(run.depth))
        self.final_norm = nn.LayerNorm(run.width, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.final_norm(x), self.token_embedding.weight)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# The arms


def first_weights(run: Run) -> dict[str, Tensor]:
    """Those that flash-train draws."""
    torch.manual_seed(SEED)
    model = GPT(
        vocabulary_size=run.vocabulary, context_length=run.length, width=run.width, depth=run.depth, heads=run.heads
    )
    return model.state_dict()


def transformers_gpt(run: Run) -> nn.Module:
    """GPT2LMHeadModel with the first weights; its biases, which the others lack, begin at 0."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sdpa: Any = {"attn_implementation": "sdpa"}  # a keyword that its signature does not name
    config = GPT2Config(
        vocab_size=run.vocabulary, n_positions=run.length, n_embd=run.width, n_layer=run.depth, n_head=run.heads,
        activation_function="gelu", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        bos_token_id=0, eos_token_id=0, **sdpa,
    )  # fmt: skip
    names = {
        "token_embedding": "wte", "position_embedding": "wpe", "final_norm": "ln_f", "attention_norm": "ln_1",
        "attention": "attn", "feed_forward_norm": "ln_2", "feed_forward": "mlp", "blocks": "h", "qkv": "c_attn",
        "expand": "c_fc", "projection": "c_proj",
    }  # fmt: skip
    found = {}
    for name, weight in first_weights(run).items():
        parts = [names.get(part, part) for part in name.split(".")]
        found[".".join(parts)] = weight.T if parts[-2].startswith("c_") else weight
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # its default, but a warning that it is would break the compiled graph
    missing, unknown = model.transformer.load_state_dict(found, strict=False)
    assert not unknown and all(name.endswith(".bias") for name in missing), (missing, unknown)
    return model


Forward = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def build(run: Run) -> tuple[nn.Module, Forward]:
    """The model on its device, and what gives its logits and its loss."""
    if run.arm == "transformers":
        model = transformers_gpt(run).to(run.device)
        called: Any = torch.compile(model) if run.compile else model

        def forward(tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            output = called(input_ids=tokens, labels=tokens)  # which it shifts itself: a row's last target is left out
            return output.logits, output.loss

        return model, forward
    model = PlainGPT(run)
    model.load_state_dict(first_weights(run))
    model.to(run.device)
    if run.arm == "nanogpt_flash":
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_math_sdp(False)
    return model, torch.compile(model) if run.compile else model


def batches(run: Run) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets on the device, copied without waiting; flash-train's, all read in advance."""
    data = TextFiles(
        paths=[run.text], sequence_length=run.length, batch_size=run.rows, seed=SEED, cache_dir=run.cache
    )  # fmt: skip
    data.prepare_data()
    data.setup("fit")
    pairs = [(batch["inputs"], batch["targets"]) for batch in islice(iter(data.train_dataloader()), run.steps)]
    if run.device == "cuda":
        pairs = [(inputs.pin_memory(), targets.pin_memory()) for inputs, targets in pairs]
    return (tuple(each.to(run.device, non_blocking=True) for each in pair) for pair in pairs)  # pyright: ignore


def train(run: Run, channel: int) -> dict[str, Any]:
    """Its losses, as nanoGPT's loop takes its steps; the benchmark gives turns through `channel`."""
    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision("high")
    model, forward = build(run)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=run.device == "cuda")
    schedule = warmup_cosine(optimizer, warmup_steps=WARM_UP_STEPS, total_steps=run.steps)
    taken, clock = batches(run), StepClock(run.turns, channel)
    losses: list[float] = []
    pending: list[Tensor] = []
    clock.begin(torch.device(run.device, 0) if run.device == "cuda" else torch.device(run.device))
    batch = next(taken)
    for step in range(1, run.steps + 1):
        with torch.autocast(run.device, torch.bfloat16):
            logits, loss = forward(*batch)  # noqa: F841  # the logits live until the next ones, as in nanoGPT's loop
        batch = next(taken, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        pending.append(loss.detach())
        if step % LOG_EVERY == 0 or step == run.steps:
            losses += read(pending)
            pending = []
        clock.step_ends()
    curve = [[step, loss] for step, loss in enumerate(losses)]
    return {"status": "ok", "error": None, "loss_curve": curve}


def read(losses: Iterable[Tensor]) -> list[float]:
    return torch.stack(list(losses)).tolist()


def missing(arm: str) -> str | None:
    """Why this machine cannot run it."""
    absent = arm == "transformers" and importlib.util.find_spec("transformers") is None
    return "transformers is not installed" if absent else None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.training.peers")
    parser.add_argument("run", type=lambda text: Run(**json.loads(text)), help="as JSON; the benchmark writes it")
    parser.add_argument("channel", type=int, help="a file descriptor; the benchmark is at its other end")
    given = parser.parse_args()
    Path(given.run.folder).mkdir(parents=True, exist_ok=True)
    write_json(Path(given.run.folder) / "result.json", train(given.run, given.channel))
