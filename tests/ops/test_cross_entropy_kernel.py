"""The Triton kernel of the chunked loss, interpreted, against torch's operators."""

import pytest
import torch
from torch.nn import functional

from flash_train.ops.choice import interpreting
from flash_train.ops.cross_entropy import chunked_cross_entropy
from flash_train.ops.kernels.cross_entropy import LAUNCH, cross_entropy_rows

runs = interpreting() or torch.cuda.is_available()
needs_kernel = pytest.mark.skipif(not runs, reason="needs a GPU or TRITON_INTERPRET=1")
device = "cuda" if torch.cuda.is_available() and not interpreting() else "cpu"


def logits_and_targets(V: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(9, V, generator=generator)
    logits[1, 0], logits[2, V - 1] = 60.0, 60.0  # the first and the last column of a row far above the others
    targets = torch.randint(V - 1, (9,), generator=generator)
    targets[3] = -100
    return logits.to(device, dtype), targets.to(device)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("V", [1, 37, LAUNCH.block_s, LAUNCH.block_s + 16])
@pytest.mark.parametrize(("soft_cap", "z_loss"), [(0.0, 0.0), (15.0, 0.01)])
def test_a_rows_loss_and_gradient_are_those_of_torchs_operators(V, dtype, soft_cap, z_loss):
    logits, targets = logits_and_targets(max(V, 2), dtype)
    for classes in {len(logits[0]), len(logits[0]) - 1}:
        raw = logits.double().requires_grad_()
        x = soft_cap * torch.tanh(raw / soft_cap) if soft_cap else raw
        x = x[:, :classes]
        losses = functional.cross_entropy(x, targets, reduction="none")
        losses = losses + z_loss * x.logsumexp(1) ** 2 * (targets != -100)
        [gradient] = torch.autograd.grad(losses.sum(), raw)
        found = logits.clone()
        kept = cross_entropy_rows(found, targets, -100, classes, soft_cap, z_loss, gradient=True)
        torch.testing.assert_close(kept.double(), losses, rtol=1e-5, atol=1e-5)
        error = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
        torch.testing.assert_close(found.double(), gradient, rtol=error, atol=1e-5)
        assert not found[3].any() and kept[3] == 0
        found = logits.clone()
        again = cross_entropy_rows(found, targets, -100, classes, soft_cap, z_loss, gradient=False)
        assert torch.equal(again, kept) and torch.equal(found, logits)


@needs_kernel
def test_a_target_that_is_no_class_has_a_loss_that_is_not_a_number():
    logits, targets = logits_and_targets(37, torch.float32)
    targets[:3] = torch.tensor([37, -1, 36])
    losses = cross_entropy_rows(logits, targets, -100, 36, 0.0, 0.0, gradient=True)
    assert losses[:3].isnan().all() and losses[3:].isfinite().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_on_a_gpu_the_chunked_loss_loses_at_most_twice_what_the_plain_one_loses(dtype):
    torch.manual_seed(2)
    hidden, weight = torch.randn(1000, 64, device="cuda"), torch.randn(5003, 64, device="cuda")
    targets = torch.randint(5003, (1000,), device="cuda")

    def results(loss, compute):
        leaves = [x.to(dtype).to(compute).requires_grad_() for x in (hidden, weight)]
        value = loss(*leaves)
        return value.detach(), *torch.autograd.grad(1024 * value, leaves)

    def plain(h, w):
        return functional.cross_entropy(
            functional.linear(h, w).to(torch.promote_types(h.dtype, torch.float32)), targets
        )

    def chunked(h, w):
        return chunked_cross_entropy(h, w, targets, chunk_rows=300)

    exact, reference = results(plain, torch.float64), results(plain, dtype)
    for a, b, c, d in zip(exact, reference, results(chunked, dtype), results(chunked, dtype), strict=True):
        allowed = 2 * (b.double() - a).norm() + 1e-6 * a.norm()
        assert (c.double() - a).norm() <= allowed and torch.equal(c, d)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])  # by the kernel, and by torch's operators
def test_on_a_gpu_no_target_gives_a_gradient_of_0_and_no_class_a_loss_that_is_not_a_number(dtype):
    hidden = torch.randn(9, 16, device="cuda", dtype=dtype)
    weight = torch.randn(37, 16, device="cuda", dtype=dtype, requires_grad=True)
    targets = torch.full((9,), -100, device="cuda")
    loss = chunked_cross_entropy(hidden, weight, targets, chunk_rows=4)
    [gradient] = torch.autograd.grad(loss, weight)
    assert loss.isnan() and not gradient.any()
    for target in (-1, 36, 37):
        targets[5] = target
        assert chunked_cross_entropy(hidden, weight, targets, chunk_rows=4, classes=36).isnan()
