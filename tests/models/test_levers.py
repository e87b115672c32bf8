"""What takes memory off a step and leaves the mathematics: checkpointing, a half-precision stream, padding."""

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._python_dispatch import TorchDispatchMode

from flash_train.models.checkpointing import ATTENTION
from flash_train.models.gpt import GPT
from flash_train.modules.feed_forward import GeluFeedForward, SwigluFeedForward
from flash_train.ops.cross_entropy import chunked_cross_entropy

V, T, C, DEPTH = 59, 29, 48, 3
TOKENS = torch.randint(V, (2, T), generator=torch.Generator().manual_seed(1))


def make(**options: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(**{"vocabulary_size": V, "context_length": T, "width": C, "depth": DEPTH, "heads": 6, **options})


def step(model: GPT) -> dict[str, Tensor]:
    """The loss, under "", and the gradient of each parameter."""
    logits = model(TOKENS)[:, :-1].float()
    loss = F.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten())
    loss.backward()
    return {"": loss.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


class Calls(TorchDispatchMode):
    """How often attention is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += function in ATTENTION
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("implementation", ["flash", "sdpa", "naive"])
@pytest.mark.parametrize("options", [{}, {"checkpoint_every": 2, "positions": "rotary", "dropout": 0.3}])
def test_selective_checkpointing_changes_nothing_and_computes_attention_once(
    implementation: str, options: dict[str, Any]
) -> None:
    results, calls = [], {}
    for checkpointing in ("none", "block", "selective"):
        torch.manual_seed(3)
        model = make(implementation=implementation, checkpointing=checkpointing, **options)
        with Calls() as counted:
            results.append(step(model))
        calls[checkpointing] = counted.number
    for other in results[1:]:
        assert all(torch.equal(other[name], x) for name, x in results[0].items())
    again = len(range(0, DEPTH, options.get("checkpoint_every", 1)))
    expected = {"none": DEPTH, "block": DEPTH + again, "selective": DEPTH}
    assert calls == (dict.fromkeys(expected, 0) if implementation == "naive" else expected)


@pytest.mark.parametrize("options", [{}, {"feed_forward": "swiglu", "checkpoint_every": 2, "dropout": 0.3}])
def test_activation_checkpointing_changes_no_bit_and_acts_in_each_so_many_th_block(options: dict[str, Any]) -> None:
    results = []
    for checkpointing in ("none", "activation"):
        torch.manual_seed(3)
        model = make(checkpointing=checkpointing, **options)
        results.append(step(model))
    assert all(torch.equal(results[1][name], x) for name, x in results[0].items())
    every = options.get("checkpoint_every", 1)
    again = [part.recompute for part in model.modules() if isinstance(part, GeluFeedForward | SwigluFeedForward)]
    assert again == [number % every == 0 for number in range(DEPTH)]


def test_a_compiler_keeps_attention_s_results_as_well() -> None:
    found = {}
    for checkpointing in ("block", "selective"):
        torch.compiler.reset()
        operators: Counter[Any] = Counter()

        def count(graph: torch.fx.GraphModule, inputs: Any, operators: Counter[Any] = operators) -> Any:
            operators.update(node.target for node in graph.graph.nodes)
            return make_boxed_func(graph)

        backend = aot_autograd(
            fw_compiler=lambda graph, inputs: make_boxed_func(graph), bw_compiler=count,
            partition_fn=partial(min_cut_rematerialization_partition),
        )  # fmt: skip
        model = make(checkpointing=checkpointing, depth=1)
        model.compile(backend=backend, fullgraph=True)
        step(model)
        found[checkpointing] = sum(operators[operator] for operator in ATTENTION)
    assert found == {"block": 1, "selective": 0}


def test_each_so_many_th_block_is_checkpointed_from_the_first_on() -> None:
    ran: list[int] = []
    model = make(checkpointing="block", checkpoint_every=2)
    for number, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, number=number: ran.append(number))
    model(TOKENS).sum().backward()
    assert ran == [0, 1, 2, 2, 0]


def relative_error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    parts = [(found[name].double() - x).square().sum() / x.square().sum() for name, x in exact.items() if name]
    return torch.stack(parts).mean().sqrt().item()


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_a_half_precision_stream_is_one_under_autocast_alone_and_costs_little_exactness(norm: str) -> None:
    exact = step(make(norm=norm, half_residual=True).double())
    errors = {}
    for half in (False, True):
        model = make(norm=norm, half_residual=half)
        seen: list[torch.dtype] = []

        def see(block: torch.nn.Module, inputs: tuple[Tensor, ...], seen: list[torch.dtype] = seen) -> None:
            seen.append(inputs[0].dtype)

        model.blocks[1].register_forward_pre_hook(see)
        with torch.autocast("cpu", torch.bfloat16):
            errors[half] = relative_error(step(model), exact)
        model(TOKENS)
        assert seen == [torch.bfloat16 if half else torch.float32, torch.float32]
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters() if p.grad is not None)
    assert 0 < errors[False] < errors[True] < 2 * errors[False] < 0.05


@pytest.mark.parametrize("tied", [True, False])
def test_a_padded_vocabulary_is_the_same_model(tied: bool) -> None:
    plain, padded = (make(tied_embeddings=tied, vocabulary_multiple=multiple) for multiple in (1, 16))
    assert padded.token_embedding.weight.shape == (64, C) and padded(TOKENS).shape == (2, T, V)
    for model in (plain, padded):
        torch.manual_seed(5)
        model.reset_parameters()
    exact, found = step(plain), step(padded)
    for name, x in exact.items():
        rows = len(x) if x.dim() == 2 and len(x) == V else None
        torch.testing.assert_close(found[name][:rows] if rows else found[name], x)
        assert rows is None or not found[name][rows:].any(), "no gradient reaches the padding"
    assert padded.flops_per_token(T) == plain.flops_per_token(T)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_chunked_loss_leaves_padding_out_exactly(autocast: bool) -> None:
    plain, padded = make(), make(vocabulary_multiple=16)
    with torch.no_grad():
        padded.load_state_dict(plain.state_dict() | {"token_embedding.weight": torch.full((64, C), 7.0)})
        padded.token_embedding.weight[:V] = plain.token_embedding.weight  # beyond V are 7s, which would be seen
    head = partial(chunked_cross_entropy, targets=TOKENS.roll(-1, 1), chunk_rows=16, classes=V)
    found = []
    for model in (plain, padded):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(TOKENS, head=head)
        [gradient] = torch.autograd.grad(loss, model.token_embedding.weight)
        found.append((loss.detach(), gradient))
    (loss, gradient), (padded_loss, padded_gradient) = found
    rtol, atol = (2e-2, 2e-4) if autocast else (1.3e-6, 1e-5)
    torch.testing.assert_close(padded_loss, loss, rtol=rtol, atol=atol)
    torch.testing.assert_close(padded_gradient[:V], gradient, rtol=rtol, atol=atol)
    assert not padded_gradient[V:].any()


def test_classes_that_the_weight_has_not_are_refused() -> None:
    hidden, weight, targets = torch.randn(3, 5), torch.randn(7, 5), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="classes must be a number of the weight's rows, from 1 to 7, got 8"):
        chunked_cross_entropy(hidden, weight, targets, classes=8)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"checkpoint_every": 0}, "checkpoint_every must be a positive integer, got 0"),
        ({"vocabulary_multiple": 0}, "vocabulary_multiple must be a positive integer, got 0"),
    ],
)
def test_numbers_that_count_nothing_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make(**options)
