import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_train.modules.alibi import alibi_slopes
from flash_train.modules.attention import SelfAttention
from flash_train.ops.attention import flash_attention
from flash_train.ops.features import Documents

BATCH, LENGTH, WIDTH, HEADS, KV_HEADS, HEAD_SIZE = 2, 37, 42, 6, 2, 10
DISTANCE = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
IDS = torch.tensor([11, 0, 5]).repeat_interleave(torch.tensor([9, 1, 27])).repeat(BATCH, 1)
ALLOWED = DISTANCE % 5 != 3
BIAS = torch.randn(HEADS, 1, LENGTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "window": ({"window": (4, 0)}, {}),
    "two-sided window": ({"window": (4, 7), "causal": False}, {}),
    "scale": ({"scale": 0.7}, {}),
    "soft cap": ({"soft_cap": 0.5}, {}),
    "alibi": ({"alibi": True}, {}),
    "alibi both ways": ({"alibi": [0.5, 0.4, 0.3, 0.2, 0.1, 0.0], "causal": False}, {}),
    "sinks": ({"sinks": True}, {}),
    "documents": ({}, {"documents": IDS}),
    "allowed": ({}, {"allowed": ALLOWED}),
    "bias": ({}, {"bias": BIAS}),
    "all": (
        {"window": (9, None), "scale": 0.7, "soft_cap": 0.5, "alibi": True, "sinks": True},
        {"documents": IDS, "allowed": ALLOWED, "bias": BIAS},
    ),
}


def make(**arguments: Any) -> SelfAttention:
    torch.manual_seed(0)
    module = SelfAttention(WIDTH, HEADS, kv_heads=KV_HEADS, head_size=HEAD_SIZE, **arguments)
    if module.sinks is not None:
        torch.nn.init.normal_(module.sinks)  # the initial ones are all but 0
    return module


def make_input() -> Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def by_definition(module: SelfAttention, x: Tensor, given: dict[str, Any]) -> Tensor:
    """Every feature as one line on the T x T scores."""
    q, k, v = module.qkv(x).unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    k, v = (y.repeat_interleave(HEADS // KV_HEADS, dim=1) for y in (k, v))
    scores = q @ k.mT * (HEAD_SIZE**-0.5 if module.scale is None else module.scale)
    if module.soft_cap is not None:
        scores = module.soft_cap * torch.tanh(scores / module.soft_cap)
    if module.alibi_slopes is not None:
        scores = scores - module.alibi_slopes[:, None, None] * DISTANCE.abs()
    scores = scores + given.get("bias", 0)
    left, right = (LENGTH if side is None else side for side in module.window or (None, None))
    visible = (left >= DISTANCE) & (-(0 if module.causal else right) <= DISTANCE) & given.get("allowed", True)
    if "documents" in given:
        visible = visible & (IDS[:, None, :, None] == IDS[:, None, None, :])
    weights = scores.masked_fill(~visible, float("-inf")).exp()
    sinks = 0 if module.sinks is None else module.sinks.exp()[:, None, None]
    output = weights / (weights.sum(-1, keepdim=True) + sinks) @ v
    return module.projection(output.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("implementation", ["flash", "naive"])
@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature_is_reached_by_its_argument_and_learns(feature: str, implementation: str) -> None:
    arguments, given = FEATURES[feature]
    module, x = make(**arguments, implementation=implementation).double(), make_input()
    bias = BIAS.clone().requires_grad_()
    given = given | ({"bias": bias} if "bias" in given else {})
    learned = [*module.parameters(), *([bias] if "bias" in given else [])]
    output, expected = module(x, **given), by_definition(module, x, given)
    torch.testing.assert_close(output, expected)
    gradients, exact = (torch.autograd.grad(y.square().sum(), learned) for y in (output, expected))
    torch.testing.assert_close(gradients, exact)
    assert not torch.isclose(output, make(causal=module.causal).double()(x)).all()


def test_documents_may_be_prepared_once_for_all_layers() -> None:
    module, x = make().double(), make_input()
    assert torch.equal(module(x, documents=Documents.from_ids(IDS)), module(x, documents=IDS))


def test_alibi_slopes_are_the_paper_s_for_powers_of_two_and_the_authors_between() -> None:
    assert alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(1) == [2.0**-8]
    assert alibi_slopes(12) == [*alibi_slopes(8), *(2.0 ** -(i + 0.5) for i in range(4))]


@pytest.mark.parametrize("alibi", [True, [0.3, 0.25, 0.2, 0.15, 0.1, 0.05]])
def test_slopes_are_no_state_and_survive_casts_copies_and_the_meta_device(alibi: bool | list[float]) -> None:
    expected = torch.tensor(alibi_slopes(HEADS) if alibi is True else alibi)
    with torch.device("meta"):
        module = make(alibi=alibi, sinks=True)
    assert module.alibi_slopes is not None and module.alibi_slopes.is_meta
    module = copy.deepcopy(module.to_empty(device="cpu")).bfloat16()
    assert module.alibi_slopes is not None and torch.equal(module.alibi_slopes, expected)
    assert "alibi_slopes" not in module.state_dict() and module.state_dict()["sinks"].dtype == torch.bfloat16
    module.reset_parameters()
    assert module.sinks is not None and 0 < module.sinks.abs().max() < 0.1


def test_attention_dropout_is_the_op_s_and_acts_in_training_alone() -> None:
    module, x = make(attention_dropout=0.4).double(), make_input()
    heads = module.qkv(x).unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2)
    q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    torch.manual_seed(7)
    expected = flash_attention(q, k, v, causal=True, dropout=0.4).transpose(1, 2).flatten(2)
    torch.manual_seed(7)
    assert torch.equal(module(x), module.projection(expected))
    assert not torch.equal(module(x), module(x))
    assert torch.equal(module.eval()(x), make().double()(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_features_work_under_autocast(dtype: torch.dtype) -> None:
    arguments, given = FEATURES["all"]
    module, x = make(**arguments), make_input().float()
    exact = module(x, **given)
    with torch.autocast("cpu", dtype=dtype):
        output = module(x, **given)
    output.sum().backward()
    assert output.dtype == dtype and module.sinks is not None and module.sinks.grad is not None
    assert (output - exact).norm() < 4 * torch.finfo(dtype).eps * exact.norm()


def test_all_features_compile_into_one_graph_whatever_the_length() -> None:
    torch.compiler.reset()
    arguments, _ = FEATURES["all"]
    module = make(**arguments).double()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")

    def run(attention: Any, length: int) -> list[Tensor]:
        x, ids, allowed = make_input()[:, :length], IDS[:, :length], ALLOWED[:length, :length]
        output = attention(x, documents=ids, allowed=allowed, bias=BIAS[..., :length])
        return [output, *torch.autograd.grad(output.square().sum(), list(module.parameters()))]

    for length in (37, 29):
        torch.testing.assert_close(run(compiled, length), run(module, length))
    with torch.compiler.set_stance("fail_on_recompile"):
        run(compiled, 31)


def test_a_module_prints_what_it_was_asked_for() -> None:
    assert "causal=True, implementation='flash'" in repr(make())
    chosen = "window=(4, 0), alibi=True, scale=0.7, soft_cap=0.5, sinks=True, attention_dropout=0.1"
    assert chosen in repr(make(window=(4, 0), alibi=True, scale=0.7, soft_cap=0.5, sinks=True, attention_dropout=0.1))
