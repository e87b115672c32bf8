import pytest
import torch
from torch.nn.utils import prune
from torch.testing._internal.two_tensor import TwoTensor

from flash_train.modules import feed_forward
from flash_train.modules.feed_forward import FEED_FORWARDS, GeluFeedForward, SwigluFeedForward, make_feed_forward

WIDTH, HIDDEN = 11, 26


def test_gelu_is_the_exact_one() -> None:
    torch.manual_seed(0)
    module = GeluFeedForward(WIDTH, hidden_size=HIDDEN).double()
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    hidden = x @ module.expand.weight.T
    expected = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5)) @ module.projection.weight.T
    torch.testing.assert_close(module(x), expected)


def test_gelu_tanh_is_the_approximation_that_gpt_2_was_trained_with() -> None:
    torch.manual_seed(0)
    module = make_feed_forward("gelu_tanh", WIDTH, hidden_size=HIDDEN).double()
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    hidden = x @ module.get_parameter("expand.weight").T
    gate = 1 + torch.tanh((2 / torch.pi) ** 0.5 * (hidden + 0.044715 * hidden**3))
    torch.testing.assert_close(module(x), hidden * 0.5 * gate @ module.get_parameter("projection.weight").T)


def test_swiglu_gates_the_second_half_with_the_first() -> None:
    torch.manual_seed(0)
    module = SwigluFeedForward(WIDTH, hidden_size=HIDDEN).double()
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    gate, up = x @ module.expand.weight[:HIDDEN].T, x @ module.expand.weight[HIDDEN:].T
    expected = gate * torch.sigmoid(gate) * up @ module.projection.weight.T
    torch.testing.assert_close(module(x), expected)


def test_both_weigh_the_same_by_default() -> None:
    gelu, swiglu = (
        sum(parameter.numel() for parameter in make_feed_forward(kind, 768).parameters()) for kind in ("gelu", "swiglu")
    )
    assert gelu == swiglu == 8 * 768 * 768


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", FEED_FORWARDS)
def test_an_activation_that_is_computed_again_changes_no_bit_and_is_not_kept(kind: str, bias: bool) -> None:
    results, kept = [], []
    for recompute in (False, True):
        torch.manual_seed(0)
        module = make_feed_forward(kind, WIDTH, bias=bias, dropout=0.3, recompute=recompute)
        x, sizes = torch.randn(5, 7, WIDTH, requires_grad=True), {}

        def keep(y: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            sizes[y.untyped_storage().data_ptr()] = y.untyped_storage().nbytes()
            return y

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda y: y):
            y = module(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])])
        kept.append(sum(sizes.values()))
        hidden = 4 * 5 * 7 * module.get_parameter("projection.weight").shape[1]
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert kept[0] - kept[1] == (2 if kind == "swiglu" else 1) * hidden


@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
def test_residual_dropout_acts_in_training_alone(kind: str) -> None:
    torch.manual_seed(0)
    module = make_feed_forward(kind, WIDTH, dropout=0.5)
    x = torch.randn(7, 13, WIDTH)
    assert 0.4 < (module(x) == 0).double().mean().item() < 0.6
    assert not (module.eval()(x) == 0).any()


def test_an_unknown_network_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="feed_forward must be one of gelu, gelu_tanh, swiglu, got 'relu'"):
        make_feed_forward("relu", WIDTH)


def test_a_hidden_size_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="hidden_size must be a positive integer, got 0"):
        make_feed_forward("gelu", WIDTH, hidden_size=0)


class Adapted(torch.nn.Linear):
    """A linear layer with something added, as adapters do it."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + input.sum(-1, keepdim=True)


@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
def test_a_module_in_the_projections_place_is_called_and_the_activation_is_kept(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    feed_forward._log_once.cache_clear()
    modules = []
    for recompute in (False, True):
        torch.manual_seed(0)
        module = make_feed_forward(kind, WIDTH, hidden_size=HIDDEN, recompute=recompute)
        module.projection = Adapted(HIDDEN, WIDTH)
        modules.append(module)
    x = torch.randn(3, WIDTH)
    assert torch.equal(*(module(x) for module in modules))
    assert "keeps its activation: its projection is a Adapted" in caplog.text


def _double(projection: torch.nn.Module) -> None:
    plain = projection.forward
    projection.forward = lambda x: 2 * plain(x)


CHANGES = {
    "hook": lambda projection: projection.register_forward_hook(lambda module, inputs, output: 2 * output),
    "pruning": lambda projection: prune.l1_unstructured(projection, "weight", amount=0.3),
    "spectral norm": torch.nn.utils.spectral_norm,
    "weight norm": torch.nn.utils.parametrizations.weight_norm,
    "own forward": _double,
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_projection_does_beside_its_weight_is_done_with_recompute_too(change: str) -> None:
    results = []
    for recompute in (False, True):
        torch.manual_seed(0)
        module = make_feed_forward("gelu", WIDTH, hidden_size=HIDDEN, recompute=recompute)
        CHANGES[change](module.projection)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(1.5)
        y = module(torch.randn(3, WIDTH))
        results.append([y, *torch.autograd.grad(y.square().sum(), list(module.parameters()))])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_a_weight_that_wraps_other_tensors_is_left_to_the_projection() -> None:
    module = GeluFeedForward(WIDTH, hidden_size=HIDDEN, recompute=True).requires_grad_(False)
    x = torch.randn(3, WIDTH)
    expected, weight = module(x), module.projection.weight
    wrapped = TwoTensor(weight, weight)  # as quantized weights and DTensors are; none knows our operator
    module.projection.weight = torch.nn.Parameter(wrapped, requires_grad=False)
    y = module(x)
    assert isinstance(y, TwoTensor) and torch.equal(y.a, expected)
