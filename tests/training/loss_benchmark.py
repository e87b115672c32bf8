"""The loss of a linear layer's logits, ours and others': `python -m tests.training.loss_benchmark --help`.

A call is forward and backward: from the hidden states [N, C] and the weight [V, C] in bf16, and N targets, to the loss
and both gradients. First every answer is held against float64 at one size. Then, size by size, each contestant's peak
is the allocator's above the inputs, and all are timed in turns, every second round backwards. What is not installed,
or not in this torch, is listed with the reason. The exit code is 1 where a gradient or the loss of `chunked` is off by
more than twice what `plain` loses, or where it failed.
"""

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional

from flash_train.bench.clock import peak_bytes, sample
from flash_train.bench.contestants import Unavailable
from flash_train.commands.environment import describe_environment
from flash_train.comparison.table import print_lines
from flash_train.memory.cards import GIB
from flash_train.ops.cross_entropy import chunked_cross_entropy
from tests.training.new_folder import new_folder

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of hidden [N, C], weight [V, C] and targets [N], a mean in nats."""
Size = tuple[int, int, int]
"""(N, V, C)"""

SIZES: tuple[Size, ...] = (
    (8192, 50304, 768), (16384, 50304, 768), (32768, 50304, 768), (65536, 50304, 768),
    (16384, 128256, 768), (16384, 50304, 4096),
)  # fmt: skip
CHECKED: Size = (2048, 50304, 768)
TINY_SIZES: tuple[Size, ...] = ((192, 1009, 16),)
TINY_CHECKED: Size = (160, 1009, 16)
REFERENCE, OURS = "plain", "chunked"
ALLOWED = 2.0
"""Times the reference's error."""
LOGIT_DEVIATION = 3.0


# Contestants


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """What `loss=full` computes, under autocast too: logits in bf16, reduced in fp32."""
    return functional.cross_entropy(functional.linear(hidden, weight).float(), targets)


def _compiled(**options: Any) -> Loss:
    return torch.compile(plain, dynamic=False, options=options or None)


def _auto_chunker() -> Loss:
    from torch._inductor import config, metrics

    if not hasattr(config, "auto_chunker"):
        raise Unavailable(f"Inductor of torch {torch.__version__} has no auto_chunker")
    compiled = _compiled(**{"auto_chunker.enable": True, "fx_graph_cache": False})  # a hit would count no chunking
    before = metrics.num_auto_chunking

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        value = compiled(hidden, weight, targets)
        if metrics.num_auto_chunking == before:
            raise Unavailable("Inductor's auto_chunker found nothing that it could chunk")
        return value

    return loss


def _torch_chunked() -> Loss:
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        raise Unavailable(f"torch {torch.__version__} has no chunked linear_cross_entropy")
    options = torch.nn.LinearCrossEntropyOptions()
    return lambda h, w, targets: functional.linear_cross_entropy(h, w, targets, options=options)


def _liger(sums: torch.dtype | None) -> Loss:
    """`sums`: of the weight's gradient, over the chunks; None is the library's default, the weight's own."""
    try:
        library = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
    except ImportError as error:
        raise Unavailable(f"liger_kernel cannot be imported ({error})") from error
    function = library.LigerFusedLinearCrossEntropyFunction
    left = (None, None, -100, 0.0, 0.0, "mean", None, False)  # bias to return_z_loss, at their defaults

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        if hidden.device.type == "cpu":
            raise Unavailable("Liger's kernels need a GPU")
        return function.apply(hidden, weight, targets, *left, sums)[0]

    return loss


def contestants(chunk_rows: int) -> dict[str, Callable[[], Loss]]:
    return {
        REFERENCE: lambda: plain,
        "compiled": _compiled,
        "auto_chunker": _auto_chunker,
        "torch_chunked": _torch_chunked,
        "liger": lambda: _liger(None),
        "liger_fp32": lambda: _liger(torch.float32),
        OURS: lambda: lambda h, w, targets: chunked_cross_entropy(h, w, targets, chunk_rows=chunk_rows),
    }


NAMES = tuple(contestants(1))


# Measuring


@dataclass
class Entry:
    """What became of a contestant at one size. `status`: ok, refused (not there), oom or failed."""

    name: str
    size: Size
    status: str = "ok"
    why: str = ""
    peak_bytes: int | None = None
    """Above the inputs, in one call: the gradients are among it."""
    rounds_ms: list[float] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    """|x - exact| / |exact|, 2-norms, of the loss and the two gradients, where they were checked."""

    @property
    def ms(self) -> float | None:
        return median(self.rounds_ms) if self.rounds_ms else None

    @property
    def spread_percent(self) -> float | None:
        """(Slowest round - fastest) / `ms`."""
        return 100 * (max(self.rounds_ms) - min(self.rounds_ms)) / self.ms if self.ms else None


def make_inputs(size: Size, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states as a last norm leaves them, logits with a deviation of `LOGIT_DEVIATION`, any targets."""
    N, V, C = size
    generator = torch.Generator(device).manual_seed(1)
    hidden = torch.randn(N, C, device=device, generator=generator)
    weight = torch.randn(V, C, device=device, generator=generator) * (LOGIT_DEVIATION / C**0.5)
    targets = torch.randint(V, (N,), device=device, generator=generator)
    return hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_(), targets


def derive(loss: Loss, hidden: Tensor, weight: Tensor, targets: Tensor) -> dict[str, Tensor]:
    value = loss(hidden, weight, targets)
    d_hidden, d_weight = torch.autograd.grad(value, (hidden, weight))
    return {"loss": value.detach(), "d_hidden": d_hidden, "d_weight": d_weight}


@contextmanager
def noted(entry: Entry) -> Iterator[None]:
    """An exception becomes the entry's status: one contestant's failure is no end of the others' contest."""
    try:
        yield
    except Unavailable as error:
        entry.status, entry.why = "refused", str(error)
    except torch.OutOfMemoryError as error:
        entry.status, entry.why = "oom", str(error).splitlines()[0]
    except Exception as error:
        entry.status, entry.why = "failed", f"{type(error).__name__}: {(str(error) or '-').splitlines()[0]}"[:300]


def check(size: Size, names: Sequence[str], *, chunk_rows: int, device: torch.device) -> list[Entry]:
    """An entry for each name with its errors against float64 on the same numbers."""
    torch.compiler.reset()  # what was compiled for another size counts as a recompilation
    hidden, weight, targets = make_inputs(size, device)
    h64, w64 = (x.detach().double().requires_grad_() for x in (hidden, weight))
    exact = derive(lambda h, w, t: functional.cross_entropy(functional.linear(h, w), t), h64, w64, targets)
    entries = [Entry(name, size) for name in names]
    for entry in entries:
        with noted(entry):
            found = derive(contestants(chunk_rows)[entry.name](), hidden, weight, targets)
            for name, x in found.items():
                error = torch.linalg.vector_norm(x.double() - exact[name]) / torch.linalg.vector_norm(exact[name])
                entry.errors[name] = error.item()
    return entries


def measure(
    size: Size, names: Sequence[str], *, chunk_rows: int, rounds: int, seconds: float, device: torch.device
) -> list[Entry]:
    """An entry for each name with its peak and its time in each round, of a call after those that compile."""
    torch.compiler.reset()
    inputs = make_inputs(size, device)
    entries, calls = [Entry(name, size) for name in names], {}
    for entry in entries:
        with noted(entry):
            loss = contestants(chunk_rows)[entry.name]()
            call = calls[entry.name] = lambda loss=loss: derive(loss, *inputs)
            entry.peak_bytes = peak_bytes(lambda call=call: call, device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    for index in range(rounds):
        for entry in entries[:: -1 if index % 2 else 1]:
            if entry.status == "ok":
                with noted(entry):
                    entry.rounds_ms.append(1e3 * median(sample(calls[entry.name], seconds=seconds, device=device)))
    return entries


# Verdict, tables and files


def ratios(checked: Sequence[Entry], name: str) -> dict[str, float]:
    """How many times the reference's error each result of `name` has; empty where one of the two has none."""
    errors = {entry.name: entry.errors for entry in checked}
    reference, own = errors.get(REFERENCE, {}), errors.get(name, {})
    return {what: own[what] / reference[what] for what in own if reference.get(what)}


def fault(checked: Sequence[Entry], measured: Sequence[Entry]) -> str | None:
    """What is wrong with our own loss, None if nothing is. A loss is one number, which plain PyTorch may hit by chance:
    an fp32's rounding is no fault."""
    for entry in (*checked, *measured):
        if entry.name == OURS and entry.status != "ok":
            return f"{OURS} at {entry.size}: {entry.status}: {entry.why}"
    errors = {entry.name: entry.errors for entry in checked}
    for what, error in errors.get(OURS, {}).items():
        reference = errors.get(REFERENCE, {}).get(what)
        if reference is not None and not error <= ALLOWED * reference + 1e-6:
            return f"{OURS}: {what} is off by {error:.2e} of its norm, {REFERENCE}'s by {reference:.2e}"
    return None


HEADINGS = ["N", "V", "C", "loss", "ms", "spread", "peak GiB", f"ms / {REFERENCE}", f"peak / {REFERENCE}"]


def lines(measured: Sequence[Entry]) -> list[list[str]]:
    references = {entry.size: entry for entry in measured if entry.name == REFERENCE}
    return [_line(entry, references.get(entry.size)) for entry in measured]


def _line(entry: Entry, reference: Entry | None) -> list[str]:
    start = [*(f"{number:,}" for number in entry.size), entry.name]
    if entry.ms is None or entry.peak_bytes is None:
        return [*start, entry.status, *["-"] * (len(HEADINGS) - 5)]
    own = [f"{entry.ms:.2f}", f"{entry.spread_percent:.1f} %", f"{entry.peak_bytes / GIB:.3f}"]
    if reference is None or reference.ms is None or not reference.peak_bytes:
        return [*start, *own, "-", "-"]
    return [*start, *own, f"{entry.ms / reference.ms:.3f}", f"{entry.peak_bytes / reference.peak_bytes:.3f}"]


def error_lines(checked: Sequence[Entry]) -> list[list[str]]:
    return [
        [entry.name, *(f"{entry.errors[x]:.2e}" if x in entry.errors else entry.status for x in _RESULTS),
         *(f"{found[x]:.2f}" if x in found else "-" for x in _RESULTS)]
        for entry in checked for found in [ratios(checked, entry.name)]
    ]  # fmt: skip


_RESULTS = ("loss", "d_hidden", "d_weight")
ERROR_HEADINGS = ["loss", *(f"{x}'s error" for x in _RESULTS), *(f"{x} / {REFERENCE}" for x in _RESULTS)]


def remarks(checked: Sequence[Entry], measured: Sequence[Entry]) -> list[str]:
    """Who gave no figures and why, each once, and the verdict."""
    why = dict.fromkeys(f"{e.name}: {e.status}: {e.why}" for e in (*checked, *measured) if e.status != "ok")
    wrong = fault(checked, measured)
    verdict = f"DOES NOT HOLD: {wrong}" if wrong else f"{OURS} loses at most {ALLOWED:g} times what {REFERENCE} loses"
    return [*why, verdict if ratios(checked, OURS) or wrong else f"{OURS} was not checked against {REFERENCE}"]


def write_files(folder: Path, checked: Sequence[Entry], measured: Sequence[Entry], facts: dict[str, Any]) -> None:
    """results.json with every figure, results.md with the tables; either whole or as it was."""
    content = {**facts, "checked": [asdict(x) | {"ratios": ratios(checked, x.name)} for x in checked],
               "measured": [asdict(x) | {"ms": x.ms} for x in measured], "fault": fault(checked, measured)}  # fmt: skip
    tables = [(HEADINGS, lines(measured)), (ERROR_HEADINGS, error_lines(checked))]
    text = "".join(
        "".join(f"| {' | '.join(row)} |\n" for row in [headings, ["---"] * len(headings), *body]) + "\n"
        for headings, body in tables
    )
    text += "".join(f"- {remark}\n" for remark in remarks(checked, measured))
    for name, written in (("results.json", json.dumps(content, indent=1) + "\n"), ("results.md", text)):
        unfinished = folder / f".{name}"
        unfinished.write_text(written)
        os.replace(unfinished, folder / name)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.training.loss_benchmark", description=(__doc__ or "").split(":")[0]
    )
    parser.add_argument("--out", type=new_folder, required=True, help="a new folder, for results.json and results.md")
    parser.add_argument("--contestants", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--rounds", type=int, default=5, help="each visits all contestants")
    parser.add_argument("--seconds", type=float, default=0.2, help="of each contestant in a round")
    parser.add_argument("--chunk-rows", type=int, default=2048, help=f"of {OURS}")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="small tensors, as for a CPU")
    given = parser.parse_args(arguments)
    if given.rounds < 1 or given.chunk_rows < 1 or given.seconds <= 0:
        parser.error("--rounds and --chunk-rows begin at 1, and --seconds above 0")
    return given


def main() -> int:
    given = parse()
    given.out.mkdir(parents=True, exist_ok=True)
    device = torch.device(given.device, 0) if given.device == "cuda" else torch.device(given.device)
    facts = {"command": " ".join(["python", *sys.orig_argv[1:]]), "date": date.today().isoformat(),
             "environment": describe_environment(device)}  # fmt: skip
    checked = check(
        TINY_CHECKED if given.tiny else CHECKED, given.contestants, chunk_rows=given.chunk_rows, device=device
    )
    measured: list[Entry] = []
    for size in TINY_SIZES if given.tiny else SIZES:
        measured += measure(
            size, given.contestants, chunk_rows=given.chunk_rows, rounds=given.rounds, seconds=given.seconds,
            device=device,
        )  # fmt: skip
        write_files(given.out, checked, measured, facts)
        print(*(f"{row[3]} {row[4]}" for row in lines(measured[-len(given.contestants) :])), sep=", ", flush=True)
    console = Console()
    print_lines(HEADINGS, lines(measured), console, title="Loss of a linear layer's logits, forward and backward")
    print_lines(ERROR_HEADINGS, error_lines(checked), console, title="Errors against float64")
    for remark in remarks(checked, measured):
        console.print(remark, markup=False, highlight=False, soft_wrap=True)
    return 1 if fault(checked, measured) else 0


if __name__ == "__main__":
    sys.exit(main())
