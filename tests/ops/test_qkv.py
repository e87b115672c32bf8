"""Attention of one tensor that holds queries, keys and values."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

from flash_train import Mask, Score, flash_attention, flash_attention_qkv
from flash_train.ops import library
from flash_train.ops.documents import Documents
from flash_train.ops.features import flatten, join_heads, split_heads

B, T, H, G, D = 2, 4, 2, 1, 3


def made(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(B, T, H + 2 * G, D, generator=torch.Generator().manual_seed(0), dtype=dtype).requires_grad_()


def features() -> dict[str, Any]:
    ids = torch.tensor([[0, 0, 1, 2], [3] * T])
    bias, sinks = torch.randn(H, T, T, dtype=torch.float64), torch.randn(H, dtype=torch.float64)
    return {
        "mask": Mask(True, (2, 0), documents=Documents.from_ids(ids)),
        "score": Score(5.0, sinks.exp(), bias.requires_grad_(), sinks.requires_grad_()),
        "scale": 0.4,
    }


@pytest.mark.parametrize("implementation", ["flash", "tiled", "naive", "naive_reversed", "sdpa_math"])
@pytest.mark.parametrize("given", ["causal", "features"])
def test_it_is_flash_attention_of_the_three_views(implementation, given):
    options: dict[str, Any] = {"causal": True}
    qkv, more = made(), []
    if given == "features" and implementation != "sdpa_math":  # which refuses most of them
        options = features()
        more = [options["score"].bias, options["score"].sinks]
    joint = flash_attention_qkv(qkv, H, implementation=implementation, **options)
    apart = flash_attention(*split_heads(qkv, H), implementation=implementation, **options)
    assert torch.equal(joint, apart) and joint.stride() == apart.stride()
    weights = torch.randn_like(joint)
    ours, theirs = (torch.autograd.grad((x * weights).sum(), [qkv, *more], retain_graph=True) for x in (joint, apart))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_its_gradient_is_one_tensor_which_a_compiled_backward_does_not_put_together():
    graphs = []

    def keep(graph, inputs):
        graphs.append([node.target for node in graph.graph.nodes])
        return make_boxed_func(graph)

    def loss(projection: Tensor) -> Tensor:
        return flash_attention_qkv(projection.unflatten(-1, (-1, D)), H, causal=True).sin().sum()

    projection = made(torch.float32).detach().flatten(2).requires_grad_()
    torch.compile(loss, fullgraph=True, backend=aot_autograd(fw_compiler=keep))(projection).backward()
    targets = [target for graph in graphs for target in graph]
    assert targets.count(library.qkv_attention) == targets.count(library.qkv_attention_backward) == 1
    assert not any("cat" in str(target) for target in targets)
    (expected,) = torch.autograd.grad(loss(projection), projection)
    assert projection.grad is not None and torch.equal(projection.grad, expected)


@pytest.mark.parametrize("given", ["causal", "features"])
def test_it_has_a_second_derivative(given):
    options: dict[str, Any] = {"causal": True} if given == "causal" else features()
    qkv = made()
    assert torch.autograd.gradgradcheck(lambda x: flash_attention_qkv(x, H, **options), qkv)


def test_torch_func_takes_it_as_three_tensors():
    qkv = made().detach()

    def loss(x: Tensor) -> Tensor:
        return flash_attention_qkv(x[None], H, causal=True).sin().sum()

    each = torch.func.vmap(torch.func.grad(loss))(qkv)
    for x, gradient in zip(qkv, each, strict=True):
        leaf = x.clone().requires_grad_()
        torch.testing.assert_close(torch.autograd.grad(loss(leaf), leaf)[0], gradient)


@pytest.mark.parametrize("present", [False, True], ids=["absent", "present"])
@pytest.mark.parametrize("operator", ["qkv_attention", "qkv_attention_backward"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck asks views for it
def test_opcheck_passes(operator, present):
    qkv = made()
    options: dict[str, Any] = features() if present else {"mask": Mask(), "score": Score(), "scale": 0.3}
    terms = flatten(*split_heads(qkv.detach(), H)[:2], **options, dropout=0.0, implementation="tiled")
    if present:
        terms = terms._replace(**{name: getattr(terms, name).detach().requires_grad_() for name in ("bias", "sinks")})
    output, lse = (x.detach() for x in library.qkv_attention(qkv, H, *terms))
    do, dl = torch.randn_like(output), torch.randn_like(lse) if present else None
    args = (qkv, H, *terms) if operator == "qkv_attention" else (do, dl, qkv, output, lse, H, present, *terms)
    torch.library.opcheck(getattr(library, operator), args)


def test_the_flops_counted_are_those_of_three_tensors():
    from torch.utils.flop_counter import FlopCounterMode

    counts = []
    for function in (
        lambda x: flash_attention_qkv(x, H, causal=True),
        lambda x: flash_attention(*split_heads(x, H), causal=True),
    ):
        with FlopCounterMode(display=False) as counter:
            function(made(torch.float32)).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_heads_are_split_as_they_are_joined():
    qkv = made().detach()
    assert torch.equal(join_heads(*split_heads(qkv, H)), qkv)


@pytest.mark.parametrize(
    ("shape", "heads", "says"),
    [
        ((2, 7, 50), 6, "[2, 7, 50]"),
        ((2, 7, 10, 5), 10, "heads=10"),
        ((2, 7, 9, 5), 6, "[2, 7, 9, 5]"),
        ((2, 7, 10, 5), 0, "heads=0"),
        ((2, 7, 10, 5), "6", "heads=6"),
    ],
)  # fmt: skip
def test_what_is_no_such_tensor_is_refused_with_the_rule(shape, heads, says):
    with pytest.raises(ValueError, match=r"must be \[B, T, H \+ 2 G, D\]") as error:
        flash_attention_qkv(torch.zeros(shape), heads)
    assert says in str(error.value)


def test_heads_that_the_key_heads_do_not_divide_are_refused_as_ever():
    with pytest.raises(ValueError, match="multiple"):
        flash_attention_qkv(torch.zeros(1, 4, 5 + 2 * 2, 8), 5)


def test_a_sparse_or_nested_tensor_is_refused_with_a_way_out():
    for x in (
        torch.zeros(1, 4, 4, 8).to_sparse(),
        torch.nested.nested_tensor([torch.zeros(4, 4, 8)], layout=torch.jagged),
    ):
        with pytest.raises(ValueError, match="qkv must be dense"):
            flash_attention_qkv(x, H)
