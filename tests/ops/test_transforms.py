"""`flash_attention` under `torch.func` and higher derivatives: the right answer or an error, never a wrong one."""

from functools import partial

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils import _pytree

from flash_train.ops.attention import flash_attention, flash_attention_with_lse


def tensors() -> list[torch.Tensor]:
    """Three vmapped q, one k, three v vmapped along their second dimension."""
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64) for shape in [(3, 2, 6, 7, 5), (2, 2, 11, 5), (2, 3, 2, 11, 4)]]


def grad_of_vmap(op, q, k, v):
    def loss(q, k, v):
        return torch.stack([x.sin().sum() for x in torch.func.vmap(op, in_dims=(0, None, 1))(q, k, v)]).sum()

    return torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v)


def vmap_of_grad(op, q, k, v):
    gradient = torch.func.grad(lambda q, k, v: torch.cat([x.sin().flatten() for x in op(q, k, v)]).sum(), (0, 1, 2))
    return torch.func.vmap(gradient, in_dims=(0, None, 1))(q, k, v)


def jacobian(op, q, k, v):
    return torch.func.jacrev(lambda q: op(q, k, v[:, 0])[0][0, 0, :2])(q[0])


@pytest.mark.parametrize("transform", [grad_of_vmap, vmap_of_grad, jacobian])
def test_transforms_of_torch_func_give_what_they_give_of_the_definition(transform):
    ops = [partial(flash_attention_with_lse, causal=True, implementation=name) for name in ("flash", "naive")]
    ours_and_expected = [_pytree.tree_leaves(transform(op, *tensors())) for op in ops]
    for ours, expected in zip(*ours_and_expected, strict=True):
        torch.testing.assert_close(ours, expected)


def test_a_second_derivative_is_refused_though_the_first_enters_the_same_sum():
    q = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    loss = flash_attention(q, q, q).sum()
    (gradient,) = torch.autograd.grad(loss, q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative; use implementation='naive' or 'sdpa_math'"):
        (loss + gradient.square().sum()).backward()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # by torch's forward mode
def test_forward_mode_is_refused():
    q = torch.randn(1, 2, 3, 4)
    with forward_ad.dual_level(), pytest.raises((RuntimeError, NotImplementedError), match="jvp"):
        flash_attention(forward_ad.make_dual(q, q), q, q)
    with forward_ad.dual_level():
        assert flash_attention(q, q, q).shape == q.shape
