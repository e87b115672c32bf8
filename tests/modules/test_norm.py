import pytest
import torch

from flash_train.modules.norm import make_norm


@pytest.mark.parametrize(
    ("kind", "bias", "names"),
    [("layer", False, ["weight"]), ("layer", True, ["weight", "bias"]), ("rms", True, ["weight"])],
)
def test_a_norm_has_the_parameters_its_kind_has(kind: str, bias: bool, names: list[str]) -> None:
    assert [name for name, _ in make_norm(kind, 11, bias=bias).named_parameters()] == names


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_half_precision_keeps_the_epsilon(kind: str) -> None:
    torch.manual_seed(0)
    small = 0.03 * torch.randn(
        5, 64
    )  # so small that bfloat16's own epsilon, 7.8e-3, would shrink the result by a tenth
    exact = make_norm(kind, 64)(small)
    half = make_norm(kind, 64).to(torch.bfloat16)(small.to(torch.bfloat16)).float()
    torch.testing.assert_close(half, exact, atol=0.02, rtol=0.02)


def test_an_unknown_norm_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="norm must be one of layer, rms, got 'batch'"):
        make_norm("batch", 11)
