"""Errors against float64, and the budget for them: what plain PyTorch loses at the same precision."""

import math

import torch
from torch import Tensor

from flash_train.ops.attention import Mask, Score, flash_attention_packed, flash_attention_with_lse
from tests.ops.cases import Case, Inputs, inputs
from tests.ops.oracle import TORCH_SEED, exact

__all__ = ["Case", "Inputs", "attention", "check", "error_norm", "inputs", "relative_error", "results"]


def results(x: Inputs, *, implementation: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The output, "lse" and those of "dq", "dk", "dv", "dbias", "dsinks" that the case has, computed in `dtype`."""
    case = x.case
    leaves = {
        name: y.detach() if dtype is None else y.detach().to(dtype)
        for name, y in (("q", x.q), ("k", x.k), ("v", x.v), ("bias", x.bias), ("sinks", x.sinks))
        if y is not None
    }
    wanted = [leaves[name].requires_grad_() for name in leaves if name != "bias" or case.bias_gradient]
    output, lse = attention(x, leaves, implementation)
    pairs = [(output, x.do.to(output.dtype)), (lse, x.dl.to(lse.dtype))][: 2 if case.lse_gradient else 1]
    outputs, weights = zip(*pairs, strict=True)
    gradients = torch.autograd.grad(outputs, wanted, weights)
    names = [f"d{name}" for name, y in leaves.items() if y.requires_grad]
    return {"output": output.detach(), "lse": lse.detach()} | dict(zip(names, gradients, strict=True))


def attention(x: Inputs, leaves: dict[str, Tensor], implementation: str) -> tuple[Tensor, Tensor]:
    """(output [B, H, T, E], log-sum-exp [B, H, T]), by the public function that takes the case's documents."""
    case = x.case
    mask = Mask(case.causal, case.window, case.alignment, x.ids, x.allowed)
    score = Score(case.soft_cap, x.alibi_slopes, leaves.get("bias"), leaves.get("sinks"))
    q, k, v = (leaves[name] for name in "qkv")
    torch.manual_seed(TORCH_SEED)
    if x.cu_seqlens is None:
        return flash_attention_with_lse(
            q, k, v, mask=mask, score=score, dropout=case.dropout, deterministic=case.deterministic,
            output_dtype=case.output_dtype, implementation=implementation,
        )  # fmt: skip
    q, k, v = (y.squeeze(0).transpose(0, 1) for y in (q, k, v))
    output, lse = flash_attention_packed(
        q, k, v, *x.cu_seqlens, mask=mask, score=score, dropout=case.dropout, deterministic=case.deterministic,
        output_dtype=case.output_dtype, implementation=implementation,
    )  # fmt: skip
    return output.transpose(0, 1).unsqueeze(0), lse.unsqueeze(0)


def error_norm(x: Tensor, exact: Tensor) -> float:
    """|x - exact|, the 2-norm over everything; equal infinities are no error, NaN is an infinite one."""
    difference = (x.double() - exact.double()).masked_fill(x.double() == exact, 0.0)
    error = torch.linalg.vector_norm(difference).item()
    return math.inf if math.isnan(error) else error


def relative_error(x: Tensor, exact: Tensor) -> float:
    """|x - exact| / |exact|, 2-norms over everything; NaN counts as infinite."""
    return error_norm(x, exact) / max(torch.linalg.vector_norm(exact.double()).item(), 1e-30)


def check(x: Inputs, *, implementation: str, budget: float = 2.0) -> dict[str, float]:
    """Each result's error, as a share of what it may be; an AssertionError names those above 1.

    An error may be `budget` times plain PyTorch's at the same precision, or times what rounding the factors of a
    product and the result must bring, if that is more (of a few numbers plain PyTorch may lose nothing, by chance);
    and some fp32 roundings of each sum's terms, which show where they cancel. The log-sum-exp is fp32, so plain
    PyTorch's is computed in fp32, too.
    """
    true = exact(x)
    plain = results(x, implementation="naive")
    if x.q.dtype in (torch.float16, torch.bfloat16):
        plain["lse"] = results(x, implementation="naive", dtype=torch.float32)["lse"]
    ours = results(x, implementation=implementation)
    assert ours.keys() == plain.keys() == true.results.keys()
    shares, faults = {}, []
    for name, c in true.results.items():
        a, b = ours[name], plain[name]
        assert a.shape == c.shape and a.dtype == b.dtype, f"{name}: {a.shape} of {a.dtype}, not {c.shape} of {b.dtype}"
        error, allowed = error_norm(a, c), budget * max(error_norm(b, c), true.operands.get(name, 0.0))
        allowed += true.terms[name]
        shares[name] = error / allowed if error else 0.0
        if error > allowed:
            faults.append(f"{name}: error {error:.2e}, allowed {allowed:.2e}, of {torch.linalg.vector_norm(c):.2e}")
    assert not faults, "; ".join(faults)
    return shares
