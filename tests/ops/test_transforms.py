"""`flash_attention` under `torch.func` and higher derivatives: the right answer or an error, never a wrong one."""

from functools import partial

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils import _pytree
from torch.utils.flop_counter import FlopCounterMode

from flash_train.ops.attention import Mask, Score, flash_attention, flash_attention_packed, flash_attention_with_lse
from tests.ops.tensors import packed, qkv


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


FEATURES = {  # shapes of (bias, allowed, sinks, ids), with a vmapped dimension of 3 in front or None
    "one of each for all": ((6, 7, 7), (7, 7), (6,), (2, 7)),
    "each its own": ((3, 6, 7, 7), (3, 7, 7), (3, 6), (3, 2, 7)),
    "a bias for the batch, rows broadcast": ((3, 1, 6, 1, 7), (3, 2, 1, 1, 7), (6,), (3, 2, 7)),
    "a bias for each batch row": ((2, 6, 7, 1), (3, 1, 7), (3, 6), (2, 7)),
}


@pytest.mark.filterwarnings("ignore:torch.searchsorted.*non-contiguous")  # vmap made it so
@pytest.mark.parametrize("shapes", FEATURES.values(), ids=FEATURES)
def test_vmap_over_masks_scores_and_documents_gives_what_a_loop_gives(shapes):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, *x.shape, generator=generator, dtype=x.dtype) for x in qkv(T=7, S=7))
    bias = torch.randn(shapes[0], generator=generator, dtype=torch.float64)
    allowed = torch.rand(shapes[1], generator=generator) < 0.8
    sinks = torch.randn(shapes[2], generator=generator, dtype=torch.float64)
    ids = torch.randint(0, 2, shapes[3], generator=generator).sort(-1).values
    args = (q, k, v, bias, allowed, sinks, ids)
    dims = (0, 0, 0, *(0 if shape[0] == 3 else None for shape in shapes))

    def gradients(q, k, v, bias, allowed, sinks, ids):
        def loss(q, k, v, bias, sinks):
            mask, score = Mask(causal=True, documents=ids, allowed=allowed), Score(bias=bias, sinks=sinks)
            output, lse = flash_attention_with_lse(q, k, v, mask=mask, score=score)
            return output.sin().sum() + lse.sin().sum()

        return torch.func.grad(loss, argnums=(0, 1, 2, 3, 4))(q, k, v, bias, sinks)

    ours = torch.func.vmap(gradients, in_dims=dims)(*args)
    loop = [gradients(*(x if d is None else x[n] for x, d in zip(args, dims, strict=True))) for n in range(3)]
    for a, b in zip(ours, zip(*loop, strict=True), strict=True):
        torch.testing.assert_close(a, torch.stack(b))


@pytest.mark.filterwarnings("ignore:torch.searchsorted.*non-contiguous")  # vmap made it so
def test_vmap_over_the_offsets_of_packed_documents_gives_what_a_loop_gives():
    leaves, (offsets, _) = packed((3, 4, 0), (3, 4, 0))
    offsets = torch.stack([offsets, torch.tensor([0, 0, 6, 7]), torch.tensor([0, 1, 2, 3])])
    q, k, v = (x.detach() for x in leaves)

    def run(x):
        return flash_attention_packed(q, k, v, x, x, causal=True)

    for ours, expected in zip(torch.func.vmap(run)(offsets), zip(*map(run, offsets), strict=True), strict=True):
        torch.testing.assert_close(ours, torch.stack(expected))


@pytest.mark.parametrize("scored", [False, True])
def test_second_derivatives_are_the_definitions(scored):
    q, k, v = leaves = qkv(B=1, T=3, S=11, D=2)
    score = Score()
    if scored:
        bias, sinks = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((6, 1, 11), (6,)))
        leaves = [*leaves, bias, sinks]
        score = Score(soft_cap=2.0, bias=bias, sinks=sinks)

    def second(name):
        output, lse = flash_attention_with_lse(q, k, v, causal=True, score=score, implementation=name)
        gradients = torch.autograd.grad(output.sin().sum() + lse.sin().sum(), leaves, create_graph=True)
        return torch.autograd.grad(torch.stack([x.square().sum() for x in gradients]).sum(), leaves)

    for ours, expected in zip(second("tiled"), second("naive"), strict=True):
        torch.testing.assert_close(ours, expected)


def test_gradgradcheck_passes_on_output_and_log_sum_exp():
    assert torch.autograd.gradgradcheck(
        lambda q, k, v: flash_attention_with_lse(q, k, v, causal=True), qkv(B=1, H=2, G=1, T=2, S=3, D=2)
    )


def test_a_hessian_vector_product_by_torch_func_is_the_definitions():
    q, k, v = (x.detach() for x in qkv(B=1, H=2, G=1, T=3, S=4, D=2))

    def product(name):
        gradient = torch.func.grad(lambda q: flash_attention(q, k, v, implementation=name).sin().sum())
        return torch.func.grad(lambda q: (gradient(q) * q).sum())(q)

    torch.testing.assert_close(product("tiled"), product("naive"))


def test_second_derivatives_can_be_counted_and_watched():
    q, k, v = qkv()
    (gradient,) = torch.autograd.grad(flash_attention(q, k, v).sin().sum(), q, create_graph=True)
    expected = torch.autograd.grad(gradient.sum(), v, retain_graph=True)
    with FlopCounterMode(display=False):  # a dispatch mode, below which torch.func's keys are switched off
        torch.testing.assert_close(torch.autograd.grad(gradient.sum(), v), expected)


def test_the_second_derivatives_memory_is_linear_in_the_length():
    def peak(T):
        q = qkv(B=1, H=1, G=1, T=T, S=T, D=4, dtype=torch.float32)[0]
        (gradient,) = torch.autograd.grad(flash_attention(q, q, q).sin().sum(), q, create_graph=True)
        with torch.profiler.profile(profile_memory=True) as profile:
            torch.autograd.grad(gradient.sum(), q)
        return max(event.cpu_memory_usage for event in profile.events() or ())

    assert peak(2048) <= 2.2 * peak(1024)


def test_a_third_derivative_is_refused():
    q = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(flash_attention(q, q, q).sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no third derivative; use implementation='naive' or 'sdpa_math'"):
        second.sum().backward()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # by torch's forward mode
def test_forward_mode_is_refused():
    q = torch.randn(1, 2, 3, 4)
    with forward_ad.dual_level(), pytest.raises((RuntimeError, NotImplementedError), match="jvp"):
        flash_attention(forward_ad.make_dual(q, q), q, q)
    with forward_ad.dual_level():
        assert flash_attention(q, q, q).shape == q.shape


@pytest.mark.parametrize("name", ["tiled", "triton"])
@pytest.mark.parametrize("in_dims", [(None, 0), (0, None)])
def test_a_batch_of_one_may_have_many_cotangents(name, in_dims):
    """Then the saved tensors are expanded, log-sum-exp and all."""
    x = torch.randn(1, 2, 5, 8)

    def gradients(implementation):
        bias = torch.linspace(-1, 1, 25).view(5, 5)

        def of(shift, cotangent):
            def loss(q, bias):
                output = flash_attention(q, x, x, score=Score(bias=bias), implementation=implementation)
                return (output * cotangent).sum()

            return torch.func.grad(loss, (0, 1))(x + shift, bias)

        many, one = torch.randn(3, 1, 2, 5, 8, generator=torch.Generator().manual_seed(0)), x.sin()
        return torch.func.vmap(of, in_dims)(*((0.0, many) if in_dims[0] is None else (many, one)))

    for ours, expected in zip(gradients(name), gradients("naive"), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["tiled", "triton"])
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # torch's own fallback for batches
def test_a_batch_of_gradients_is_taken_at_once(name):
    q = torch.randn(1, 2, 3, 8, requires_grad=True)
    cotangents = torch.randn(4, 1, 2, 3, 8)
    results = []
    for implementation in (name, "naive"):
        output = flash_attention(q, q, q, implementation=implementation)
        results.append(torch.autograd.grad(output, q, cotangents, is_grads_batched=True)[0])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_documents_of_their_own_drop_under_vmap_what_they_drop_alone():
    x = torch.randn(3, 2, 2, 6, 4, dtype=torch.float64)
    ids = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1], [5, 5, 5, 5, 5, 5]]).unsqueeze(1).expand(3, 2, 6)

    def attention(x, ids):
        return flash_attention(x, x, x, mask=Mask(documents=ids), dropout=0.5)

    torch.manual_seed(3)
    together = torch.func.vmap(attention, randomness="same")(x, ids)
    for i in range(3):
        torch.manual_seed(3)
        torch.testing.assert_close(together[i], attention(x[i], ids[i]))


def test_transforms_inside_a_compiled_function_are_refused_with_a_way_out():
    x = torch.randn(1, 2, 3, 8)
    gradient = torch.func.grad(lambda q: flash_attention(q, x, x).sum())
    with pytest.raises(Exception, match="transforms in eager mode only"):
        torch.compile(lambda q: gradient(q), backend="aot_eager", fullgraph=True)(x)
