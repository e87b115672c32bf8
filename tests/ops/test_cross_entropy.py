"""The chunked loss is the plain one, and never holds the logits."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional

from flash_train.diagnostics.cpu_peak import PeakProbe
from flash_train.ops.cross_entropy import chunked_cross_entropy
from tests.ops.errors import relative_error

# torch 2.13, when it compiles any autograd.Function.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

N, C, V = 101, 24, 211


def numbers(*rows: int, ignored: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a weight and targets: one in `ignored` is left out."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(*(rows or (N,)), C, generator=generator)
    weight = torch.randn(V, C, generator=generator)
    targets = torch.randint(V, hidden.shape[:-1], generator=generator)
    return hidden, weight, targets.masked_fill(torch.rand(targets.shape, generator=generator) < 1 / ignored, -100)


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, **options: str) -> Tensor:
    logits = functional.linear(hidden, weight).flatten(0, -2)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return functional.cross_entropy(logits, targets.flatten(), **options)  # pyright: ignore[reportArgumentType]


def results(
    loss: Callable[..., Tensor], hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    leaves = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight)]
    value = loss(*leaves, targets)
    # A loss scale, as fp16 needs it, and for all alike.
    gradients = torch.autograd.grad(value * 1024, leaves)
    return {"loss": value.detach(), "d_hidden": gradients[0], "d_weight": gradients[1]}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_loss_and_gradients_lose_at_most_twice_what_plain_pytorch_loses(dtype: torch.dtype, reduction: str) -> None:
    hidden, weight, targets = numbers()
    rounded = (hidden.to(dtype), weight.to(dtype), targets)
    chunked = partial(chunked_cross_entropy, chunk_rows=17, reduction=reduction)
    true = results(partial(plain, reduction=reduction), *rounded, torch.float64)
    reference = results(partial(plain, reduction=reduction), *rounded, dtype)
    ours = results(chunked, *rounded, dtype)
    for name, exact in true.items():
        assert ours[name].dtype == reference[name].dtype
        allowed = (
            2 * relative_error(reference[name], exact) + 4 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        )
        assert relative_error(ours[name], exact) <= allowed, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_takes_it_as_it_takes_the_plain_loss(dtype: torch.dtype) -> None:
    def under(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*arguments: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype):
                return loss(*arguments)

        return call

    true = results(plain, *numbers(), torch.float64)
    reference = results(under(plain), *numbers(), torch.float32)
    ours = results(under(partial(chunked_cross_entropy, chunk_rows=17)), *numbers(), torch.float32)
    for name, exact in true.items():
        assert ours[name].dtype == torch.float32
        assert relative_error(ours[name], exact) <= 2 * relative_error(reference[name], exact), name


def test_the_size_of_a_chunk_and_the_shape_of_the_rows_change_nothing() -> None:
    hidden, weight, targets = numbers(3, 5, 7)
    whole = results(partial(chunked_cross_entropy, chunk_rows=1000), hidden, weight, targets, torch.float64)
    for rows in (1, 2, 105):
        parts = results(partial(chunked_cross_entropy, chunk_rows=rows), hidden, weight, targets, torch.float64)
        torch.testing.assert_close(parts, whole)
    assert whole["d_hidden"].shape == hidden.shape


def test_a_loss_that_is_used_twice_and_a_backward_done_again_give_twice_the_gradient() -> None:
    hidden, weight, targets = numbers()
    once = results(partial(chunked_cross_entropy, chunk_rows=17), hidden, weight, targets, torch.float64)["d_weight"]
    leaf = weight.double().requires_grad_()
    loss = chunked_cross_entropy(hidden.double(), leaf, targets, chunk_rows=17)
    loss.backward(retain_graph=True)
    (2 * loss + loss.square() / (2 * loss.detach())).backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, 4 * once / 1024)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_factor_of_a_half_precision_gradient_is_not_rounded_to_a_half(dtype: torch.dtype) -> None:
    hidden, weight, targets = numbers()
    leaf = weight.to(dtype).requires_grad_()
    loss = partial(chunked_cross_entropy, hidden.to(dtype), leaf, targets, reduction="sum")
    [whole] = torch.autograd.grad(loss(), leaf)
    [third] = torch.autograd.grad(loss() / 3, leaf)
    assert torch.equal(third, (whole.float() * torch.tensor(1 / 3)).to(dtype))


def test_rows_that_are_all_ignored_have_the_plain_loss_and_no_gradient() -> None:
    hidden, weight, targets = numbers()
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    for rows in (len(hidden), 0):
        for reduction in ("sum", "mean"):
            loss = chunked_cross_entropy(
                hidden[:rows], weight, torch.full_like(targets, 7)[:rows], ignore_index=7, reduction=reduction
            )
            assert loss.isnan() if reduction == "mean" else loss == 0
            for gradient in torch.autograd.grad(loss, leaves):  # a micro-batch without targets spoils no sum
                assert not gradient.any()


def test_gradients_under_soft_cap_and_z_loss_and_with_padding_are_the_losses_differences() -> None:
    hidden, weight, targets = numbers(5)
    leaves = [x[:7, :3].double().requires_grad_() for x in (hidden, weight)]
    for classes in (None, 4):
        loss = partial(
            chunked_cross_entropy, targets=targets % 4, chunk_rows=2, ignore_index=3, classes=classes,
            soft_cap=3.0, z_loss=0.1,
        )  # fmt: skip
        assert torch.autograd.gradcheck(loss, leaves)


def test_a_second_derivative_is_refused_when_it_is_taken_and_no_sooner() -> None:
    hidden, weight, targets = numbers(5)
    leaf, scale = weight.requires_grad_(), torch.tensor(3.0, requires_grad=True)
    loss = chunked_cross_entropy(hidden, leaf, targets)
    [gradient] = torch.autograd.grad(scale * loss, leaf, create_graph=True)
    [by_scale] = torch.autograd.grad(gradient.sum(), scale, retain_graph=True)  # the loss has been derived once only
    torch.testing.assert_close(by_scale, gradient.detach().sum() / 3)
    with pytest.raises(RuntimeError, match="has one derivative, and a second was asked for .*: use cross_entropy of"):
        gradient.square().sum().backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own, of forward mode
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap takes the operator in a loop
def test_torch_func_gives_the_plain_losses_gradients_and_is_refused_what_there_is_not() -> None:
    hidden, weight, targets = (x.double() if x.is_floating_point() else x for x in numbers(3, 5))
    chunked = partial(chunked_cross_entropy, chunk_rows=2)
    both: list[Callable[..., Tensor]] = [chunked, plain]
    per_sample = [torch.func.vmap(torch.func.grad(f, argnums=(0, 1)), (0, None, 0)) for f in both]
    torch.testing.assert_close(*(f(hidden, weight, targets) for f in per_sample))
    losses = [torch.func.vmap(f, (0, None, 0)) for f in both]
    torch.testing.assert_close(*(torch.func.jacrev(f, 1)(hidden, weight, targets) for f in losses))
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="no forward-mode derivative.*: use reverse mode"):
        chunked(hidden, forward_ad.make_dual(weight, weight), targets)
    with pytest.raises(RuntimeError, match="a second was asked for"):
        torch.func.grad(lambda w: torch.func.grad(chunked, 1)(hidden, w, targets).square().sum())(weight)


@pytest.mark.parametrize("target", [-1, 3, V])
def test_a_target_that_is_no_class_is_an_index_error_on_a_cpu(target: int) -> None:
    hidden, weight, _ = numbers(4)
    with pytest.raises(IndexError, match=f"from 0 to 2 or ignore_index = -100, got {target}: mask what is no class"):
        chunked_cross_entropy(hidden, weight, torch.tensor([0, -100, target, 2]), classes=3)


def test_a_meta_device_gives_the_shapes() -> None:
    hidden, weight, targets = (x.to("meta") for x in numbers())
    with torch.autocast("cpu", torch.bfloat16):
        chunked_cross_entropy(hidden, weight.requires_grad_(), targets).backward()
    assert weight.grad is not None and weight.grad.shape == (V, C)


def peak_of(loss: Callable[..., Tensor], hidden: Tensor, weight: Tensor, targets: Tensor) -> int:
    """Bytes beyond the arguments and the weight's gradient, at most."""
    probe = PeakProbe()
    probe.start()
    probe.begin("", [])
    loss(hidden, weight, targets).backward()
    peak = probe.stop().overall
    weight.grad = hidden.grad = None
    return peak


@pytest.mark.parametrize(
    ("backend", "options"),
    [(None, {}), (None, {"soft_cap": 5.0, "z_loss": 1e-3}), ("aot_eager_decomp_partition", {})],
    ids=["", "capped", "compiled"],
)
def test_no_more_logits_than_a_chunks_exist_at_a_time_compiled_or_not(
    backend: str | None, options: dict[str, Any]
) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(rows, 8, generator=generator).requires_grad_() for rows in (1024, 1000))
    targets = torch.randint(1000, (1024,), generator=generator)
    loss = partial(chunked_cross_entropy, chunk_rows=64, **options)
    if backend is not None:
        loss = torch.compile(loss, backend=backend, fullgraph=True)  # as Inductor parts forward and backward
        loss(hidden, weight, targets).backward()
        hidden.grad = weight.grad = None
    logits, chunk = 4 * 1024 * 1000, 4 * 64 * 1000
    assert peak_of(plain, hidden, weight, targets) > 2 * logits
    most = 2.5 * chunk if backend is None else 4 * chunk
    assert peak_of(loss, hidden, weight, targets) < most < logits / 3


def test_a_compiled_model_takes_a_new_batch_without_compiling_again() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(numbers()[1])

        def forward(self, hidden: Tensor, head: Callable[..., Tensor]) -> Tensor:
            return head(hidden, self.weight)

    model, counter = Model(), torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    model.compile(backend=counter, fullgraph=True)
    hidden, weight, targets = numbers()
    for shift in (0, 1, 2):
        other = torch.where(targets >= 0, (targets + shift) % V, targets)
        loss = model(hidden, partial(chunked_cross_entropy, targets=other, chunk_rows=17))
        loss.backward()
        torch.testing.assert_close(loss.detach(), plain(hidden, weight, other))
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    "change, text",
    [
        ({"weight": torch.ones(V, C + 1)}, r"got \[101, 24\] and \[211, 25\]: give the linear layer's own weight"),
        ({"targets": torch.ones(N - 1).long()}, r"each of the rows \[101\] of hidden one, got \[100\]: reshape them"),
        ({"targets": torch.ones(N)}, r"targets must be int64 indices, got torch.float32: use targets.long\(\)"),
        ({"weight": torch.ones(V, C).half()}, "got torch.float32 and torch.float16: cast one of them"),
        ({"chunk_rows": 0}, "chunk_rows must be a number of rows from 1 on, got 0: 2048 is usual"),
        ({"reduction": "none"}, "reduction must be one of mean, sum, got 'none'"),
        ({"weight": torch.ones(V, C, device="meta")}, "weight on meta and hidden on cpu: move it with"),
        ({"targets": torch.ones(N, device="meta").long()}, "targets on meta and hidden on cpu: move it with"),
        ({"weight": torch.ones(V, C).long()}, "weight must be fp16, bf16, fp32 or float64, got torch.int64: cast it"),
        ({"ignore_index": None}, "ignore_index must be an integer, got None: -100 is usual"),
        ({"z_loss": -1.0}, "z_loss must be a finite number from 0 on, got -1.0: 0 leaves it out"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_rule(change: dict[str, Any], text: str) -> None:
    arguments: dict[str, Any] = dict(zip(("hidden", "weight", "targets"), numbers(), strict=True))
    with pytest.raises(ValueError, match=text):
        chunked_cross_entropy(**arguments | change)
    with pytest.raises(TypeError, match=r"soft_cap must be a number, got Tensor .*; make one with float"):
        chunked_cross_entropy(**arguments, soft_cap=torch.tensor(3.0))  # pyright: ignore[reportArgumentType]
