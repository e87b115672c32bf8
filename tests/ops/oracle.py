"""Attention in float64, written from the definition of each feature, plainly, and once more than the package does.

Nothing of the package is used, so that a mistake in what its implementations share (positions, dropout's bits, the
order of the terms) shows. Gradients are autograd's. Beside the exact results stand the errors that rounding alone must
bring, from which `errors.check` makes its budget.
"""

import itertools
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tests.ops.cases import Case, Inputs

TORCH_SEED = 20_231
"""What torch's generators are seeded with before each call, so that the dropout's seed can be drawn once more."""


class Exact(NamedTuple):
    """Of each result by name: the exact one, and 2-norms of what rounding does to it."""

    results: dict[str, Tensor]
    operands: dict[str, float]
    """From rounding P and dS to the inputs' dtype, in which they are multiplied, the output, of which delta is made,
    and the result at the end."""
    terms: dict[str, float]
    """From the fp32 roundings of each sum and of its terms, before they cancel."""


def documents_of(case: Case, x: Inputs) -> list[tuple[int, int, range, range]]:
    """(batch row, number, queries, keys) of each document; a sequence without any is one."""
    if x.cu_seqlens is not None:
        q, k = (offsets.tolist() for offsets in x.cu_seqlens)
        return [(0, n, range(q[n], q[n + 1]), range(k[n], k[n + 1])) for n in range(len(q) - 1)]
    if x.ids is None:
        return [(b, b, range(case.T), range(case.S)) for b in range(case.B)]
    found = []
    for b, row in enumerate(x.ids.tolist()):
        for _, run in itertools.groupby(range(case.T), key=row.__getitem__):
            positions = list(run)
            own = range(positions[0], positions[-1] + 1)
            found.append((b, len(found), own, own))
    return found


def visible(case: Case, x: Inputs) -> tuple[Tensor, Tensor]:
    """[B, 1, T, S]: whether the query sees the key, and their distance after alignment (0 where unseen)."""
    see = torch.zeros(case.B, case.T, case.S, dtype=torch.bool)
    distance = torch.zeros(case.B, case.T, case.S, dtype=torch.float64)
    left, right = case.window or (None, None)
    for b, _, queries, keys in documents_of(case, x):
        shift = len(keys) - len(queries) if case.alignment == "bottom_right" else 0
        behind = torch.arange(len(queries)).unsqueeze(1) + shift - torch.arange(len(keys))  # how far the key lies back
        seen = torch.ones_like(behind, dtype=torch.bool)
        if case.causal:
            seen &= behind >= 0
        if left is not None:
            seen &= behind <= left
        if right is not None:
            seen &= -behind <= right
        part = (b, slice(queries.start, queries.stop), slice(keys.start, keys.stop))
        see[part], distance[part] = seen, behind.abs().double()
    return see.unsqueeze(1).to(x.q.device), distance.unsqueeze(1).to(x.q.device)


def kept(case: Case, x: Inputs) -> Tensor:
    """[B, H, T, S]: 1 / (1 - dropout) where a probability stays, 0 where it is dropped."""
    torch.manual_seed(TORCH_SEED)
    drawn = torch.randint(-(2**63), 2**63 - 1, (1,), device=x.q.device, dtype=torch.int64).item()
    keep = np.zeros((case.B, case.H, case.T, case.S))
    for b, number, queries, keys in documents_of(case, x):
        seed = (int(drawn) + number * 0x9E3779B97F4A7C15) % 2**64
        for h in range(case.H):
            base = _lowbias32(_lowbias32(_u32(seed % 2**32 ^ (h * 0x9E3779B1) % 2**32)) ^ _u32(seed >> 32))
            t, s = (np.arange(len(positions), dtype=np.uint32) for positions in (queries, keys))
            q, k = (_lowbias32(_lowbias32(base ^ _u32(x)) + y * _u32(x)) for x, y in ((0x85EBCA77, t), (0xC2B2AE3D, s)))
            stays = _lowbias32(q[:, None] ^ k[None, :]) >> 1 >= round(case.dropout * 2**31)
            keep[b, h, queries.start : queries.stop, keys.start : keys.stop] = stays / (1 - case.dropout)
    return torch.from_numpy(keep).to(x.q.device)


def _u32(x: int) -> np.ndarray:
    return np.array([x], dtype=np.uint32)  # an array, because numpy warns when a scalar wraps


def _lowbias32(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint32(16))) * _u32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * _u32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


class Steps(NamedTuple):
    """What the definition computes on its way, all float64."""

    v: Tensor
    """And k: with a head for each query head."""
    k: Tensor
    product: Tensor
    """scale q k^T, [B, H, T, S]"""
    s: Tensor
    """The finished scores, minus infinity where unseen."""
    p: Tensor
    """The probabilities, [B, H, T, S + 1]: the last one is the sink's."""
    keep: Tensor
    output: Tensor
    lse: Tensor


def definition(x: Inputs, leaves: dict[str, Tensor]) -> Steps:
    """Attention of the float64 `leaves` (q, k, v and, where the case has them, bias and sinks)."""
    case, q = x.case, leaves["q"]
    head = torch.arange(case.H, device=q.device) // (case.H // case.G)
    k, v = leaves["k"][:, head], leaves["v"][:, head]
    see, distance = visible(case, x)
    product = q @ k.transpose(-1, -2) / math.sqrt(case.D)
    s = product if case.soft_cap is None else case.soft_cap * torch.tanh(product / case.soft_cap)
    if x.alibi_slopes is not None:
        s = s - x.alibi_slopes.double()[:, None, None] * distance
    if x.bias is not None:
        s = s + leaves["bias"]
    s = s.masked_fill(~see if x.allowed is None else ~(see & x.allowed), -math.inf)
    sink = s.new_full((case.H,), -math.inf) if x.sinks is None else leaves["sinks"]
    logits = torch.cat([s, sink[:, None, None].expand(case.B, case.H, case.T, 1)], dim=-1)
    nothing = (logits == -math.inf).all(-1, keepdim=True)
    logits = logits.masked_fill(nothing, 0.0)
    p = torch.softmax(logits, -1).masked_fill(nothing, 0.0)
    lse = torch.logsumexp(logits, -1).masked_fill(nothing.squeeze(-1), -math.inf)
    keep = kept(case, x) if case.dropout else torch.ones_like(s)
    return Steps(v, k, product, s, p, keep, (p[..., :-1] * keep) @ v, lse)


def exact(x: Inputs) -> Exact:
    """The results of the case, named as by `errors.results`."""
    case = x.case
    tensors = {"q": x.q, "k": x.k, "v": x.v, "bias": x.bias, "sinks": x.sinks}
    leaves = {name: y.detach().double().requires_grad_() for name, y in tensors.items() if y is not None}
    steps = definition(x, leaves)
    wanted = [name for name in leaves if name != "bias" or case.bias_gradient]
    pairs = [(steps.output, x.do.double()), (steps.lse, x.dl.double())][: 2 if case.lse_gradient else 1]
    outputs, weights = zip(*pairs, strict=True)
    gradients = torch.autograd.grad(outputs, [leaves[name] for name in wanted], weights)
    results = {"output": steps.output.detach(), "lse": steps.lse.detach()}
    results |= {f"d{name}": g for name, g in zip(wanted, gradients, strict=True)}
    with torch.no_grad():
        return Exact(results, *_Rounding(x, leaves["q"], steps, results).norms())


class _Rounding:
    """First-order error propagation: independent roundings add in squares."""

    def __init__(self, x: Inputs, q: Tensor, steps: Steps, results: dict[str, Tensor]) -> None:
        self.x, self.q, self.k, self.v, self.keep, self.results = x, q, steps.k, steps.v, steps.keep, results
        self.p, self.sink = steps.p[..., :-1], steps.p[..., -1]
        self.do, self.scale = x.do.double(), 1 / math.sqrt(x.case.D)
        cap = x.case.soft_cap
        self.slope = torch.ones_like(steps.s) if cap is None else 1 - torch.tanh(steps.product / cap) ** 2
        dl = x.dl.double() if x.case.lse_gradient else torch.zeros_like(steps.lse)
        self.delta = (self.do * steps.output).sum(-1) - dl
        self.dp = self.keep * (self.do @ self.v.transpose(-1, -2))
        self.ds = self.p * (self.dp - self.delta.unsqueeze(-1))
        finite = steps.s.masked_fill(steps.s == -math.inf, 0.0).abs()
        self.s_noise = self.scale * self.slope * _squares(q, self.k.transpose(-1, -2)) + finite  # of s, one rounding's
        self.delta_noise = (self.do * steps.output).square().sum(-1).sqrt() + dl.abs()

    def norms(self) -> tuple[dict[str, float], dict[str, float]]:
        case, dtype = self.x.case, self.x.q.dtype
        single = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        operand = torch.finfo(dtype).eps / math.sqrt(12)  # of a rounding, in the root mean square
        in_delta = operand * (self.p * self.dp).square().sum(-1).sqrt()  # made of the output, and that of rounded P
        ds_noise = self.ds.abs() * operand + self.p * in_delta.unsqueeze(-1)
        operands, output = self.spread(self.p * operand, ds_noise, self.sink * in_delta), self.stored_output()
        for name, y in self.results.items():
            stored = (case.output_dtype or dtype) if name == "output" else self.stored(name)
            at_the_end = _norm(y.to(stored).double() - y)
            scatter = 1 + 1 / math.sqrt(max(1, y.numel()))  # of the norm of a few random numbers
            operands[name] = scatter * math.hypot(operands.get(name, 0.0), output.get(name, 0.0), at_the_end)
        dp_noise = self.keep * _squares(self.do, self.v.transpose(-1, -2)) + self.delta_noise.unsqueeze(-1)
        p_noise, ds_noise = self.p * self.s_noise, self.p * dp_noise + self.ds.abs() * self.s_noise
        sink_noise = self.sink * (self.delta_noise + self.delta.abs())
        terms = self.spread(p_noise, ds_noise, sink_noise)
        terms["lse"] = _norm(1 + p_noise.square().sum(-1).sqrt())  # ln l is rounded, however near to 0
        longest = max(case.B * case.T, case.T * case.H // case.G, case.S)
        roundings = single * (2 + longest**0.25)  # of the terms, and of a sum of sums, each of sqrt(longest) terms
        return operands, {name: roundings * (terms[name] + _norm(y)) for name, y in self.results.items()}

    def stored(self, name: str) -> torch.dtype:
        own = getattr(self.x, name.removeprefix("d"), None)
        return torch.promote_types(self.x.q.dtype, torch.float32) if own is None else own.dtype

    def stored_output(self) -> dict[str, float]:
        """delta = rowsum(dO * O) is made of the output as it was stored: what that alone does to the gradients."""
        output = self.results["output"]
        error = (self.do * (output.to(self.x.case.output_dtype or self.x.q.dtype).double() - output)).sum(-1)
        pushed = self.push(self.p * error.unsqueeze(-1), self.q, self.k, self.slope, self.scale)
        return {n: _norm(y) for n, y in pushed.items()} | {"dsinks": _norm((self.sink * error).sum((0, 2)))}

    def spread(self, p_noise: Tensor, ds_noise: Tensor, sink_noise: Tensor) -> dict[str, float]:
        """The norms of the results' errors from independent errors of P, of dS and of the sink's share."""
        kept = (p_noise * self.keep).square()
        pushed = self.push(ds_noise**2, self.q**2, self.k**2, self.slope**2, self.scale**2)
        pushed |= {
            "output": kept @ self.v**2,
            "dv": self.groups(kept.transpose(-1, -2) @ self.do**2),
            "dsinks": sink_noise.square().sum((0, 2)),
        }
        return {name: math.sqrt(y.sum().item()) for name, y in pushed.items()}

    def push(self, ds: Tensor, q: Tensor, k: Tensor, slope: Tensor, scale: float) -> dict[str, Tensor]:
        """What `ds` becomes in the gradients: linear in it."""
        raw = ds * slope * scale
        pushed = {"dq": raw @ k, "dk": self.groups(raw.transpose(-1, -2) @ q)}
        if self.x.bias is not None:
            pushed["dbias"] = ds.sum_to_size(self.x.bias.shape)
        return pushed

    def groups(self, x: Tensor) -> Tensor:
        """[B, H, S, D] -> [B, G, S, D]"""
        case = self.x.case
        return x.unflatten(1, (case.G, case.H // case.G)).sum(2)


def _squares(a: Tensor, b: Tensor) -> Tensor:
    return (a**2 @ b**2).sqrt()


def _norm(x: Tensor) -> float:
    return torch.linalg.vector_norm(x.masked_fill(x.isinf() | x.isnan(), 0.0)).item()
