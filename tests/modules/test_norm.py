import pytest
import torch

from flash_train.modules.norm import make_norm


@pytest.mark.parametrize(
    ("kind", "bias", "names"),
    [("layer", False, ["weight"]), ("layer", True, ["weight", "bias"]), ("rms", True, ["weight"])],
)
def test_a_norm_has_the_parameters_its_kind_has(kind: str, bias: bool, names: list[str]) -> None:
    assert [name for name, _ in make_norm(kind, 11, bias=bias).named_parameters()] == names


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_both_add_the_same_epsilon_to_the_variance_in_every_dtype(kind: str, dtype: torch.dtype) -> None:
    x = torch.tensor([0.003, -0.003]).repeat(32).to(dtype)  # mean 0, variance 9e-6: about the epsilon
    expected = x.double() / (x.double().square().mean() + 1e-5).sqrt()
    normalized = make_norm(kind, 64).to(dtype)(x)
    torch.testing.assert_close(normalized, expected.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_an_unknown_norm_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="norm must be one of layer, rms, got 'batch'"):
        make_norm("batch", 11)
