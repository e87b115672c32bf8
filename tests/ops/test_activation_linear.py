"""The activation with the linear layer behind it: the composed formula's numbers, and half of what it keeps."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from flash_train.diagnostics.cpu_peak import PeakProbe
from flash_train.ops.activation_linear import ACTIVATIONS, activation_linear
from tests.ops.errors import relative_error

# torch 2.13, when it compiles any autograd.Function.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

B, T, C, HIDDEN = 3, 7, 11, 26
NAMES = ("x", "weight", "bias")
every_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


def composed(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str) -> Tensor:
    if activation == "swiglu":
        gate, up = x.chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, weight, bias)
    return F.linear(F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none"), weight, bias)


def numbers(activation: str, *shape: int, hidden: int = HIDDEN) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    width = 2 * hidden if activation == "swiglu" else hidden
    sizes = (*(shape or (B, T)), width), (C, hidden), (C,)
    return tuple([torch.randn(size, generator=generator) for size in sizes])  # pyright: ignore[reportReturnType]


def results(
    function: Callable[..., Tensor], tensors: tuple[Tensor, ...], dtype: torch.dtype, wanted: str, activation: str
) -> dict[str, Tensor]:
    """The output, under "y", and the gradients of those of x, weight and bias whose first letters are `wanted`."""
    leaves = [x.detach().to(dtype).requires_grad_(name[0] in wanted) for x, name in zip(tensors, NAMES, strict=False)]
    y = function(*leaves, activation=activation)
    grad = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y).to(y)
    gradients = torch.autograd.grad(y, [x for x in leaves if x.requires_grad], grad)
    names = [name for x, name in zip(leaves, NAMES, strict=False) if x.requires_grad]
    return {"y": y.detach()} | dict(zip(names, gradients, strict=True))


@every_activation
@pytest.mark.parametrize("wanted", ["xwb", "xw", "x", "w", "b"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_on_a_cpu_results_and_gradients_are_the_composed_formulas_bit_for_bit(
    activation: str, dtype: torch.dtype, wanted: str
) -> None:
    for shape in ((T,), (B, T), ()):
        tensors = numbers(activation, *shape)
        tensors = tensors if "b" in wanted else tensors[:2]
        found = results(activation_linear, tensors, dtype, wanted, activation)
        expected = results(composed, tensors, dtype, wanted, activation)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], x) and found[name].dtype == x.dtype for name, x in expected.items())


@every_activation
def test_first_and_second_derivatives_are_the_functions_differences(activation: str) -> None:
    leaves = [x.double().requires_grad_() for x in numbers(activation, 2, hidden=3)]
    function = partial(activation_linear, activation=activation)
    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)
    [first] = torch.autograd.grad(function(*leaves).square().sum(), leaves[0], create_graph=True)
    [plain] = torch.autograd.grad(function(*leaves).square().sum(), leaves[0])
    torch.testing.assert_close(first, plain)


@every_activation
def test_only_the_activations_input_and_the_weight_are_kept(activation: str) -> None:
    def kept(function: Callable[..., Tensor]) -> int:
        leaves = [x.requires_grad_() for x in numbers(activation)]
        storages: dict[int, int] = {}

        def keep(x: Tensor) -> Tensor:
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            y = function(*leaves, activation=activation)
        assert y.requires_grad
        return sum(storages.values())

    x, weight, _ = numbers(activation)
    assert kept(activation_linear) == x.nbytes + weight.nbytes
    assert kept(composed) >= x.nbytes + weight.nbytes + 4 * B * T * HIDDEN * (2 if activation == "swiglu" else 1)


@every_activation
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_takes_it_as_it_takes_the_composed_formula(activation: str, dtype: torch.dtype) -> None:
    def under(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(x: Tensor, *rest: Tensor, activation: str) -> Tensor:
            with torch.autocast("cpu", dtype):
                return function(x.to(dtype), *rest, activation=activation)

        return call

    found, expected = (
        results(under(function), numbers(activation), torch.float32, "xwb", activation)
        for function in (activation_linear, composed)
    )
    assert found["y"].dtype == dtype
    assert all(torch.equal(found[name], x) and found[name].dtype == x.dtype for name, x in expected.items())


@every_activation
@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_decomp_partition"])
def test_it_compiles_into_one_graph_and_is_recomputed_by_checkpointing(activation: str, backend: str) -> None:
    torch.compiler.reset()

    def block(x: Tensor, weight: Tensor, bias: Tensor, activation: str) -> Tensor:
        return activation_linear(2 * x, weight, bias, activation=activation).sin()

    def checkpointed(*args: Tensor, activation: str) -> Tensor:
        return checkpoint(block, *args, activation=activation, use_reentrant=False)  # pyright: ignore[reportReturnType]

    expected = results(block, numbers(activation), torch.float32, "xwb", activation)
    compiled = torch.compile(checkpointed, backend=backend, fullgraph=True)
    for function in (checkpointed, compiled):
        torch.testing.assert_close(results(function, numbers(activation), torch.float32, "xwb", activation), expected)
    torch.library.opcheck(
        torch.ops.flash_train.activation_linear.default,
        (*[x.requires_grad_() for x in numbers(activation)], activation),
    )


@every_activation
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own, of forward mode
def test_torch_func_and_forward_mode_take_the_composed_formula(activation: str) -> None:
    x, weight, bias = (y.double() for y in numbers(activation))
    found, expected = [], []
    for function, to in ((activation_linear, found), (composed, expected)):

        def loss(x: Tensor, weight: Tensor, bias: Tensor, function: Callable[..., Tensor] = function) -> Tensor:
            return function(x, weight, bias, activation=activation).square().sum()

        to += torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)), (0, None, None))(x, weight, bias)
        with forward_ad.dual_level():
            to.append(forward_ad.unpack_dual(loss(forward_ad.make_dual(x, x), weight, bias)).tangent)
    torch.testing.assert_close(found, expected)


@every_activation
def test_its_products_are_counted_as_the_composed_formulas(activation: str) -> None:
    for wanted in ("xwb", "xw", "x", "w"):
        counts = []
        for function in (activation_linear, composed):
            with FlopCounterMode(display=False) as counter:
                results(function, numbers(activation), torch.float32, wanted, activation)
            counts.append(counter.get_total_flops())
        assert counts[0] == counts[1] > 0


@every_activation
@pytest.mark.parametrize("wanted", ["xw", "x", "w"])
def test_what_it_holds_inside_is_what_it_declares(activation: str, wanted: str) -> None:
    x, weight, _ = numbers(activation, 64, hidden=512)
    grad = torch.randn(64, C)
    forward: Any = torch.ops.flash_train.activation_linear.default
    backward: Any = torch.ops.flash_train.activation_linear_backward.default
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (forward, (x, weight, None, activation)),
        (backward, (grad, x, weight, activation, "x" in wanted, "w" in wanted, False)),
    ]
    for operator, arguments in calls:
        operator(*arguments)
        probe = PeakProbe()
        probe.start()
        probe.begin("", [])
        found = operator(*arguments)
        peak = probe.stop().overall
        made = [found] if isinstance(found, Tensor) else found
        assert operator.workspace_bytes(None, *arguments) == peak - sum(y.nbytes for y in made)
    activated = 2 * 64 * 512
    halves = [x.bfloat16() if isinstance(x, Tensor) else x for x in calls[1][1]]
    in_dx = activation != "swiglu" and wanted == "x"  # its gradient becomes that of x in its place
    assert backward.workspace_bytes((9, 0), *halves) == (0 if in_dx else activated)


def test_fake_tensors_have_the_shapes_and_dtypes_of_real_ones() -> None:
    tensors = [x.bfloat16().requires_grad_() for x in numbers("swiglu")]
    with FakeTensorMode() as mode:
        x, weight, bias = (mode.from_tensor(y) for y in tensors)
        y = activation_linear(x, weight, bias, activation="swiglu")
        gradients = torch.autograd.grad(y.sum(), [x, weight, bias])
    assert y.shape == (B, T, C) and y.dtype == torch.bfloat16
    assert [(g.shape, g.dtype) for g in gradients] == [(z.shape, z.dtype) for z in tensors]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"activation": "relu"}, "activation must be one of gelu, gelu_tanh, swiglu, got 'relu'"),
        ({"activation": "swiglu"}, r"x must be \[\.\.\., 2 F\] and weight \[C, F\], got \[3, 7, 26\] and \[11, 26\]"),
        ({"weight": torch.ones(C, HIDDEN + 1)}, r"got \[3, 7, 26\] and \[11, 27\]: give the weight of the linear"),
        ({"weight": torch.ones(C, HIDDEN).half()}, "one dtype outside of autocast, got torch.float32, torch.float16"),
        ({"bias": torch.ones(C + 1)}, r"bias must be \[11\], one number a row of weight, got \[12\]"),
        ({"bias": torch.ones(C, device="meta")}, "bias on meta and x on cpu: move it with"),
        ({"x": torch.ones(T, HIDDEN).long()}, "x must be fp16, bf16, fp32 or float64, got torch.int64: cast it"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_the_rule(change: dict[str, Any], text: str) -> None:
    arguments: dict[str, Any] = dict(zip(NAMES, numbers("gelu"), strict=True))
    with pytest.raises(ValueError, match=text):
        activation_linear(**arguments | change)
    with pytest.raises(TypeError, match="weight must be a torch.Tensor, got list"):
        activation_linear(arguments["x"], [1.0])  # pyright: ignore[reportArgumentType]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every_activation
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "hidden"), [(37, 26), (4096, 3072)])
def test_on_a_gpu_results_and_gradients_lose_at_most_twice_what_the_composed_formula_loses(
    activation: str, dtype: torch.dtype, rows: int, hidden: int
) -> None:
    tensors = tuple([x.cuda().to(dtype) for x in numbers(activation, rows, hidden=hidden)])
    exact = results(composed, tensors, torch.float64, "xwb", activation)
    plain, found = (results(f, tensors, dtype, "xwb", activation) for f in (composed, activation_linear))
    for name, x in exact.items():
        allowed = 2 * max(relative_error(plain[name], x), torch.finfo(dtype).eps / 2)
        assert found[name].dtype == dtype and relative_error(found[name], x) <= allowed, name
    for wanted in ("x", "w"):
        frozen = results(activation_linear, tensors, dtype, wanted, activation)
        assert all(torch.equal(frozen[name], found[name]) for name in frozen)
