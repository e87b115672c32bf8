"""What combines with what, by running it: `python -m tests.ops.combinations` prints the README's two tables."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_train.ops.attention import Mask, Score, flash_attention
from tests.ops.cases import Case, Inputs, inputs
from tests.ops.errors import attention, check, error_norm
from tests.ops.oracle import definition, exact
from tests.ops.sweep import start_in_the_interpreter

BASE = Case(2, 4, 4, 11, 11, 8, 8, lse_gradient=False)
SECOND_DERIVATIVE = "second derivative"
FEATURES: dict[str, dict[str, Any]] = {
    "causal": dict(causal=True),
    "window": dict(window=(4, 2)),
    "top-left alignment": dict(alignment="top_left"),
    "T ≠ S": dict(S=13),
    "document ids": dict(documents="ids"),
    "packed (cu_seqlens)": dict(documents="packed", B=1),
    "soft cap": dict(soft_cap=1.5),
    "ALiBi": dict(alibi=True),
    "bias and its gradient": dict(bias="1HTS"),
    "boolean mask": dict(allowed="B1TS"),
    "sinks": dict(sinks=True),
    "dropout": dict(dropout=0.3),
    "grouped heads": dict(G=2),
    "E ≠ D": dict(E=5),
    "LSE and its gradient": dict(lse_gradient=True),
    "output_dtype": dict(output_dtype=torch.float64),
    "deterministic": dict(deterministic=True),
    SECOND_DERIVATIVE: {},
}
COLUMNS = ("triton", "tiled", "naive", "sdpa_math")


def run(names: tuple[str, ...], implementation: str) -> str | None:
    """None where the features together give what float64 gives, with all gradients; else the refusal's text."""
    changes = {key: value for name in names for key, value in FEATURES[name].items()}
    triton_on_a_cpu = implementation == "triton" and not torch.cuda.is_available()
    device = "cuda" if implementation == "triton" and not triton_on_a_cpu else "cpu"
    dtype = torch.float64 if SECOND_DERIVATIVE in names and implementation != "triton" else torch.float32
    x = inputs(BASE._replace(**changes), dtype, device)
    if {"document ids", "packed (cu_seqlens)"} <= {*names}:
        x = x._replace(ids=torch.zeros(1, x.case.T, dtype=torch.int64))
    try:
        if SECOND_DERIVATIVE in names:
            _check_second_derivative(x, implementation)
        elif _has_lse(x, implementation):
            check(x, implementation=implementation)
        else:
            _check_output(x, implementation)
    except ValueError as refusal:
        return str(refusal)
    return None


def _has_lse(x: Inputs, implementation: str) -> bool:
    """Whether to ask for the log-sum-exp: where the implementation has one, and where a feature needs it."""
    case = x.case
    needed = case.lse_gradient or case.output_dtype is not None or case.documents == "packed"
    return needed or not implementation.startswith("sdpa")


def _leaves(x: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
    tensors = {"q": x.q, "k": x.k, "v": x.v, "bias": x.bias, "sinks": x.sinks}
    return {name: y.detach().to(dtype).requires_grad_() for name, y in tensors.items() if y is not None}


def _output(x: Inputs, leaves: dict[str, Tensor], implementation: str) -> Tensor:
    case = x.case
    return flash_attention(
        leaves["q"], leaves["k"], leaves["v"],
        mask=Mask(case.causal, case.window, case.alignment, x.ids, x.allowed),
        score=Score(case.soft_cap, x.alibi_slopes, leaves.get("bias"), leaves.get("sinks")),
        dropout=case.dropout, deterministic=case.deterministic, implementation=implementation,
    )  # fmt: skip


def _check_output(x: Inputs, implementation: str) -> None:
    """Of an implementation without a log-sum-exp. Its dropout strikes elements of its own choice."""
    leaves = _leaves(x, x.q.dtype)
    output = _output(x, leaves, implementation)
    gradients = torch.autograd.grad(output, list(leaves.values()), x.do)
    found = {"output": output} | {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}
    for name, y in found.items():
        assert y.isfinite().all() if x.case.dropout else _close(y, exact(x).results[name], 1e-5), name


def _check_second_derivative(x: Inputs, implementation: str) -> None:
    def by_implementation(leaves: dict[str, Tensor]) -> tuple[Tensor, ...]:
        if _has_lse(x, implementation):
            return attention(x, leaves, implementation)
        return (_output(x, leaves, implementation),)

    def by_definition(leaves: dict[str, Tensor]) -> tuple[Tensor, ...]:
        steps = definition(x, leaves)
        return steps.output, steps.lse

    found = _second(x, _leaves(x, x.q.dtype), by_implementation)
    expected = _second(x, _leaves(x, torch.float64), by_definition)
    if x.case.dropout and not _has_lse(x, implementation):
        assert all(y.isfinite().all() for y in found)
    else:
        limit = 1e-10 if x.q.dtype == torch.float64 else 1e-4
        assert all(_close(a, b, limit) for a, b in zip(found, expected, strict=True))


def _second(
    x: Inputs, leaves: dict[str, Tensor], function: Callable[[dict[str, Tensor]], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """The gradients of a curved function of the first gradients."""
    outputs = function(leaves)[: 2 if x.case.lse_gradient else 1]
    weights = [y.to(output.dtype) for y, output in zip((x.do, x.dl), outputs, strict=False)]
    first = torch.autograd.grad(outputs, list(leaves.values()), weights, create_graph=True)
    return torch.autograd.grad(torch.cat([g.sin().flatten() for g in first]).sum(), list(leaves.values()))


def _close(x: Tensor, y: Tensor, limit: float) -> bool:
    return error_norm(x, y) <= limit * (1 + y.norm().item())


class _Notes:
    """Refusals, each told once below a table under its letter."""

    def __init__(self) -> None:
        self._letters: dict[str, str] = {}

    def cell(self, refusal: str | None) -> str:
        return "✓" if refusal is None else self._letters.setdefault(refusal, chr(ord("a") + len(self._letters)))

    def lines(self) -> list[str]:
        return [f"- {letter}: `{refusal}`" for refusal, letter in self._letters.items()]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def pairs() -> str:
    names, notes = list(FEATURES), _Notes()
    rows = [_row("", *(str(n) for n in range(1, len(names) + 1))), _row("---", *(":-:" for _ in names))]
    for i, name in enumerate(names):
        cells = [notes.cell(run((name,) if i == j else (names[j], name), "tiled")) for j in range(i + 1)]
        rows.append(_row(f"{i + 1} {name}", *cells, *("" for _ in names[i + 1 :])))
    return "\n".join([*rows, "", *notes.lines()])


def implementations() -> str:
    notes = _Notes()
    rows = [_row("", *(f"`{name}`" for name in COLUMNS)), _row("---", *(":-:" for _ in COLUMNS))]
    for feature in FEATURES:
        rows.append(_row(feature, *(notes.cell(run((feature,), name)) for name in COLUMNS)))
    return "\n".join([*rows, "", *notes.lines()])


def text() -> str:
    return f"""Each pair of features was run (on the tiled path; one alone on the diagonal), and its output, log-sum-exp
and gradients agree with a float64 oracle written apart: ✓. A letter is a refusal, in the words of its `ValueError`.

{pairs()}

The same, one feature at a time, by implementation. `flash` is `triton`, or `hopper`, on a GPU and `tiled` elsewhere;
the second derivative of all is tiled. `sdpa`, `sdpa_cudnn` and `sdpa_efficient` take at most what `sdpa_math` takes,
and what torch's back end does not take is refused by name. SDPA's dropout strikes elements of its own choice.

{implementations()}"""


if __name__ == "__main__":
    if not torch.cuda.is_available():
        start_in_the_interpreter()
    print(text())
