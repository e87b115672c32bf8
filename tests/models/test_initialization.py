import math

import pytest
import torch

from flash_train.models.gpt import GPT
from flash_train.models.initialization import STANDARD_DEVIATION

DEPTH = 5


@pytest.mark.parametrize("feed_forward", ["gelu", "swiglu"])
def test_weights_are_normal_and_residual_projections_smaller(feed_forward: str) -> None:
    torch.manual_seed(0)
    model = GPT(
        vocabulary_size=301,
        context_length=64,
        width=96,
        depth=DEPTH,
        heads=6,
        feed_forward=feed_forward,
        bias=True,
        qk_norm=True,
        tied_embeddings=False,
    )
    projections = 0
    for name, parameter in model.named_parameters():
        if name.endswith(".projection.weight"):
            projections += 1
            assert parameter.std().item() == pytest.approx(STANDARD_DEVIATION / math.sqrt(2 * DEPTH), rel=0.05)
        elif parameter.ndim == 2:
            assert parameter.std().item() == pytest.approx(STANDARD_DEVIATION, rel=0.05)
        else:
            assert (parameter == (0 if name.endswith("bias") else 1)).all()
    assert projections == 2 * DEPTH


def test_one_seed_gives_every_implementation_the_same_weights() -> None:
    def weights(implementation: str) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = GPT(vocabulary_size=13, context_length=7, width=12, depth=2, heads=2, implementation=implementation)
        return model.state_dict()

    naive, flash = weights("naive"), weights("flash")
    assert naive.keys() == flash.keys()
    assert all(torch.equal(naive[name], flash[name]) for name in naive)
