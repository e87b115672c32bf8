"""Is the answer right? Errors against float64, and how large they may be: twice what plain PyTorch loses."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flash_train.bench.cases import Case, Inputs

BUDGET = 2.0
_RESULTS = ("output", "lse", "dq", "dk", "dv")
_ELEMENTS = {"cuda": 2**27, "cpu": 2**22}
"""Of a matrix of scores at once: what is larger is computed some queries at a time."""


class Errors(NamedTuple):
    """By result, relative: |x - exact| / |exact|, 2-norms."""

    found: dict[str, float]
    allowed: dict[str, float]

    @property
    def fault(self) -> str | None:
        """What is wrong, in words; None if nothing is."""
        faults = [
            f"{name} is off by {error:.1e} of its norm, {self.allowed[name]:.1e} allowed"
            for name, error in self.found.items()
            if not error <= self.allowed[name]
        ]
        return "; ".join(faults) or None


class Truth:
    """The exact results for the inputs that are timed, of the first, a middle and the last key head.

    Their query heads take part with all T queries and S keys; other heads and rows of the batch do the same work.
    `allowed` is `BUDGET` times the error of plain PyTorch (scores, `masked_fill`, softmax, product) in the inputs'
    dtype. `bias` [H, T, S] is added to the scores.
    """

    def __init__(self, case: Case, inputs: Inputs, bias: Tensor | None = None) -> None:
        self._bias = bias
        self._group = case.H // case.G
        self._heads = sorted({(0, 0), (case.B // 2, case.G // 2), (case.B - 1, case.G - 1)})
        self._exact = self._compute(case, inputs, torch.float64)
        rounded = self._compute(case, inputs, inputs.q.dtype)
        # of a few numbers plain PyTorch may lose nothing, by chance
        least = torch.finfo(inputs.q.dtype).eps / 8
        least_lse = max(least, torch.finfo(torch.float32).eps)  # fp32, by way of powers of two and back
        self.allowed = {
            name: BUDGET * max(least_lse if name == "lse" else least, _distance(rounded[name], exact))
            for name, exact in self._exact.items()
        }

    def errors(self, results: dict[str, Tensor]) -> Errors:
        """Of some of output, lse, dq, dk and dv, whole and as [B, H, T, D] or [B, G, S, D].

        lse is the log-sum-exp [B, H, T, 1], 0 where a query sees nothing. One number anywhere in a result that is not
        finite makes its error infinite.
        """
        found = {
            name: _distance(self._cut(name, x), self._exact[name]) if x.isfinite().all() else math.inf
            for name, x in results.items()
        }
        return Errors(found, {name: self.allowed[name] for name in results})

    def _cut(self, name: str, x: Tensor) -> Tensor:
        """[heads, R, T, D] of what belongs to queries, [heads, 1, S, D] of the rest."""
        R = self._group if name in ("output", "lse", "dq") else 1
        return torch.stack([x[b, g * R : (g + 1) * R] for b, g in self._heads])

    def _compute(self, case: Case, inputs: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
        R, device = self._group, inputs.q.device
        first, end = case.bounds(device)
        keys = torch.arange(case.S, device=device)
        rows = max(1, _ELEMENTS[device.type] // (R * case.S))
        results: dict[str, list[Tensor]] = {name: [] for name in _RESULTS}
        for b, g in self._heads:
            q, do = (x[b, g * R : (g + 1) * R].to(dtype) for x in (inputs.q, inputs.do))
            k, v = (x[b, g].to(dtype).requires_grad_() for x in (inputs.k, inputs.v))
            parts = []
            for t in range(0, case.T, rows):
                part = slice(t, t + rows)
                hidden = (keys < first[part, None]) | (keys >= end[part, None])
                bias = None if self._bias is None else self._bias[g * R : (g + 1) * R, part].to(dtype)
                parts.append(_attend(q[:, part], k, v, do[:, part], hidden, bias, case.scale))
            outputs, lses, dqs, dks, dvs = zip(*parts, strict=True)
            wide = torch.promote_types(dtype, torch.float32)
            results["output"].append(torch.cat(outputs, 1))
            results["lse"].append(torch.cat(lses, 1))
            results["dq"].append(torch.cat(dqs, 1))
            results["dk"].append(torch.stack([x.to(wide) for x in dks]).sum(0).to(dtype)[None])
            results["dv"].append(torch.stack([x.to(wide) for x in dvs]).sum(0).to(dtype)[None])
        return {name: torch.stack(x) for name, x in results.items()}


def _attend(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, hidden: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, ...]:
    """(output, log-sum-exp, dQ, dK, dV) of R heads of queries [R, t, D] over one head of keys [S, D].

    `hidden` is [t, S], `bias` [R, t, S].
    """
    q = q.detach().requires_grad_()
    R, nothing = q.shape[0], hidden.all(-1, keepdim=True)
    s = q @ k.expand(R, -1, -1).transpose(1, 2) * scale
    s = s if bias is None else s + bias
    s = s.masked_fill(hidden, -math.inf)
    lse = torch.logsumexp(s.detach(), -1, keepdim=True).masked_fill(nothing, 0.0)
    p = torch.softmax(s, dim=-1).masked_fill(nothing, 0.0)
    output = p @ v.expand(R, -1, -1)
    return output.detach(), lse, *torch.autograd.grad(output, (q, k, v), do)


def _distance(x: Tensor, exact: Tensor) -> float:
    """Relative; infinite where it is NaN."""
    norm = torch.linalg.vector_norm
    error = (norm(x.double() - exact.double()) / norm(exact.double()).clamp(min=1e-30)).item()
    return math.inf if math.isnan(error) else error
