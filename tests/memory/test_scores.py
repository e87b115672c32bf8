"""Score matrices are found by what happens to them, in anybody's attention, and nowhere else."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from flash_train.memory.attribution import Breakdown, Recorder
from flash_train.models.gpt import GPT

B, H, T, D = 2, 3, 37, 8
C = H * D
FP32 = 4
ONE = FP32 * B * H * T * T
"""Bytes of one score matrix."""


class Attention(nn.Module):
    """Projections around what a test says."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.qkv, self.out, self.attend = nn.Linear(C, 3 * C), nn.Linear(C, C), attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) / math.sqrt(D)).softmax(-1) @ v


def odd_order(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Dropout before the softmax, the mask by adding and by multiplying, the scale last, casts in between."""
    s = F.dropout(torch.einsum("bhtd,bhsd->bhts", q, k), 0.25)
    s = torch.tanh(s.double() / 20) * 20 + torch.full((T, T), -1e4, dtype=torch.float64).triu(1)
    p = s.softmax(-1).float() * torch.ones(T, T).tril()
    return torch.einsum("bhts,bhsd->bhtd", F.dropout(p * 0.5, 0.25), v)


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The softmax by exp, divided by its sum after the product with v."""
    s = q @ k.mT
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return e @ v / e.sum(-1, keepdim=True)


def with_sinks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.cat([q @ k.mT, torch.zeros(B, H, T, 1)], dim=-1)
    return s.softmax(-1)[..., :-1] @ v


def again_in_the_backward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return checkpoint(plain, q, k, v, use_reentrant=False)  # pyright: ignore[reportReturnType]


def keys_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhst,bhsd->bhtd", torch.einsum("bhsd,bhtd->bhst", k, q).softmax(-2), v)


def math_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def sdpa_with_dropout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.25)


class WithWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(C, H, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.full((T, T), -torch.inf).triu(1)
        return self.attention(x, x, x, attn_mask=mask, need_weights=True)[0]


class Contrastive(nn.Module):
    """Every example against every other: a square product of activations, and a softmax, but no second product."""

    def __init__(self, softmax: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.softmax = nn.Linear(C, C), softmax

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x.mean(1))
        return self.softmax(y @ y.t()).diagonal()


class Relations(nn.Module):
    """Every example against every other again, read by a layer: its weight's gradient is a product of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.reader = nn.Linear(C, C), nn.Linear(B, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x.mean(1))
        return self.reader((y @ y.t()).softmax(-1))


class Mixture(nn.Module):
    """A router's softmax, times the experts' outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(C, 5), nn.Linear(C, 5 * C)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        return torch.einsum("bte,btec->btc", shares, self.experts(x).unflatten(-1, (5, C)))


class TiedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(T, C)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(torch.arange(T))
        return F.log_softmax(hidden @ self.embedding.weight.t(), -1).exp() @ x


def gpt(implementation: str) -> nn.Module:
    model = GPT(vocabulary_size=11, context_length=T, width=C, depth=2, heads=H, implementation=implementation)
    return nn.Sequential(Tokens(), model)


class Tokens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros(x.shape[:2], dtype=torch.long)


def probed(module: nn.Module, *, autocast: bool = False) -> Breakdown:
    x = torch.randn(B, T, C, requires_grad=True)
    recorder = Recorder(module, device="cpu")
    recorder.hold("parameters", module)
    recorder.hold("inputs", x)
    with recorder:
        recorder.enter("forward")
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = module(x).square().mean()
        recorder.hold_activations()
        recorder.enter("backward")
        loss.backward()
    assert recorder.error is None
    return recorder.breakdown({}, step=0, source="tracker")


FOUND: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: Attention(plain),
    "odd order": lambda: Attention(odd_order),
    "softmax by hand": lambda: Attention(by_hand),
    "sinks": lambda: Attention(with_sinks),
    "checkpointed": lambda: Attention(again_in_the_backward),
    "keys first": lambda: Attention(keys_first),
    "math SDPA": lambda: Attention(math_sdpa),
    "SDPA with dropout": lambda: Attention(sdpa_with_dropout),
    "nn.MultiheadAttention with weights": WithWeights,
    "nn.TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(C, H, 2 * C, batch_first=True),  # with dropout
}
NOT_FOUND: dict[str, Callable[[], nn.Module]] = {
    "SDPA": lambda: Attention(F.scaled_dot_product_attention),
    "GPT with SDPA": lambda: gpt("sdpa"),
    "GPT with flash": lambda: gpt("flash"),
    "square hidden layer": lambda: nn.Sequential(nn.Linear(C, T), nn.ReLU(), nn.Linear(T, C)),
    "softmax between layers": lambda: nn.Sequential(nn.Linear(C, T), nn.Softmax(-1), nn.Linear(T, C)),
    "router": Mixture,
    "tied head": TiedHead,
    "contrastive": lambda: Contrastive(lambda s: s.softmax(-1)),
    "contrastive by exp": lambda: Contrastive(lambda s: s.exp() / s.exp().sum(-1, keepdim=True)),
    "relations read by a layer": Relations,
    "causal average": lambda: Attention(lambda q, k, v: torch.zeros(T, T).softmax(-1) @ v),
    "linear attention": lambda: Attention(lambda q, k, v: q.softmax(-1) @ (k.softmax(-2).mT @ v)),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", FOUND)
def test_found(name: str, autocast: bool) -> None:
    assert len(probed(FOUND[name](), autocast=autocast).score_matrices) == 1


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", NOT_FOUND)
def test_not_found(name: str, autocast: bool) -> None:
    breakdown = probed(NOT_FOUND[name](), autocast=autocast)
    assert breakdown.score_matrices == () and breakdown.flash_saves is None


def test_our_naive_model_has_one_in_each_block_named_and_counted() -> None:
    found = probed(gpt("naive")).score_matrices
    assert [each.module for each in found] == ["1.blocks.0.attention", "1.blocks.1.attention"]
    # The probabilities are saved; and with them lie, in the backward, their gradient and that of the scores.
    assert {(each.shape, each.dtype, each.saved, each.most) for each in found} == {
        ((B, H, T, T), "float32", ONE, 3 * ONE)
    }
    assert {each.flash_keeps for each in found} == {FP32 * B * H * T}


def test_what_flash_saves_is_the_step_without_the_scores_and_with_the_log_sum_exp() -> None:
    breakdown = probed(Attention(plain))
    saves, lse = breakdown.flash_saves, FP32 * B * H * T
    assert saves is not None
    assert saves.saved == ONE - lse
    # At the peak of the naive forward lie the products, the scaled scores and the log-sum-exp's place, the softmax's.
    without = probed(Attention(F.scaled_dot_product_attention))
    sdpa_keeps = without.phases["backward"].tracked
    assert breakdown.phases["backward"].tracked - saves.phases["backward"] == pytest.approx(sdpa_keeps, rel=0.1)
    assert saves.peak <= max(phase.tracked for phase in breakdown.phases.values()) - ONE


def test_a_checkpointed_attention_saves_no_scores_and_still_has_them_at_its_peak() -> None:
    (scores,) = probed(Attention(again_in_the_backward)).score_matrices
    assert scores.saved == 0 and scores.most >= 3 * ONE


def test_dropouts_masks_count_as_score_matrices() -> None:
    (scores,) = probed(Attention(sdpa_with_dropout)).score_matrices
    assert scores.saved == 3 * ONE  # probabilities, the mask (on a CPU of the same dtype), what is left of them


@pytest.mark.parametrize(
    ("attend", "reason"),
    [(sdpa_with_dropout, "do not support non-zero dropout"), (math_sdpa, "switched off")],
)
def test_math_sdpa_is_named_with_torchs_reason(attend: Any, reason: str) -> None:
    (use,) = probed(nn.Sequential(Attention(attend))).sdpa
    assert (use.module, use.backend, use.calls, use.shape) == ("0", "math", 1, (B, H, T, D))
    assert reason in use.reason and "Triggered" not in use.reason


def test_math_sdpa_inside_of_torchs_own_layer_is_named() -> None:
    layer = nn.TransformerEncoderLayer(C, H, 2 * C, batch_first=True)
    without_dropout = nn.TransformerEncoderLayer(C, H, 2 * C, dropout=0.0, batch_first=True)
    uses = (*probed(layer).sdpa, *probed(without_dropout).sdpa)
    assert [(use.module, use.backend) for use in uses] == [
        ("self_attn", "math"),
        ("self_attn", "flash"),
    ]


def test_fused_sdpa_is_named_and_needs_no_reason() -> None:
    (use,) = probed(Attention(F.scaled_dot_product_attention)).sdpa
    assert (use.backend, use.reason) == ("flash", "")
