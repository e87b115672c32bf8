"""Which implementation runs for which tensors, and why: a pure function, asked by the operator and by anybody."""

import importlib.util
import os
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from flash_train.ops.features import Terms

IMPLEMENTATIONS = (
    "flash",
    "hopper",
    "triton",
    "tiled",
    "sdpa",
    "sdpa_cudnn",
    "sdpa_efficient",
    "sdpa_math",
    "naive",
    "naive_reversed",
)
"""The names that `flash_attention` takes; its docstring says what each one is."""

TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
TRITON_HEAD_SIZES = range(1, 257)
OLDEST_CAPABILITY = (8, 0)
HOPPER = (9, 0)
"""The compute capability that the Hopper kernels need."""
HOPPER_RAN_ON: frozenset[str] = frozenset({"3.6.0"})
"""The versions of Triton on which all GPU tests passed with the Hopper kernels as "flash": there it takes them."""


class Choice(NamedTuple):
    """What runs, and why it is not what was asked for (None where it is)."""

    name: str
    reason: str | None


def choose_implementation(
    implementation: str, q: Tensor, k: Tensor, v: Tensor, terms: "Terms | None" = None, *, backward: bool = False
) -> Choice:
    """What `flash_attention(q, k, v, implementation=implementation)` runs. Shapes as there; no data is read.

    Args:
        terms: the call's features, none if they are left out.
        backward: whether its backward is asked for. "hopper" and "flash" may run other kernels there.

    Raises:
        ValueError: "triton" or "hopper" was asked for by name and does not take these tensors, or these features.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}")
    if implementation == "sdpa":
        return Choice("sdpa_flash", None)
    if implementation not in ("flash", "hopper", "triton"):
        return Choice(implementation, None)
    if implementation == "hopper":
        obstacle = _triton_obstacle(q, v, asked_by_name=False) or _hopper_obstacle(q, v, terms)
        if obstacle is not None:
            raise ValueError(f"implementation='hopper': {obstacle}; implementation='flash' takes other kernels there")
        return _hopper_or_not(q, backward=backward)
    obstacle = _triton_obstacle(q, v, asked_by_name=implementation == "triton")
    if obstacle is None:
        if implementation == "triton" or not HOPPER_RAN_ON or _nvidia_capability(q.device) != HOPPER:
            return Choice("triton", None)
        obstacle = _hopper_obstacle(q, v, terms) or _not_run_yet()
        if obstacle is not None:
            return Choice("triton", obstacle)
        if not backward and not _hopper_forward_pays(q, v, terms):
            return Choice("triton", None)  # which is no step down
        return _hopper_or_not(q, backward=backward)
    if implementation == "triton":
        interpreter = (
            " (TRITON_INTERPRET=1 interprets them on a CPU)" if q.device.type == "cpu" and not interpreting() else ""
        )
        raise ValueError(
            f"implementation='triton': {obstacle}{interpreter}; implementation='flash' takes the tiled path there"
        )
    return Choice("tiled", obstacle)


def _triton_obstacle(q: Tensor, v: Tensor, *, asked_by_name: bool) -> str | None:
    """Why the Triton kernels do not take these tensors, or None if they do."""
    if q.device.type != "cuda" and not (q.device.type == "cpu" and asked_by_name and interpreting()):
        return f"the Triton kernels run on a GPU, and these tensors are on {q.device.type}"
    obstacle = triton_obstacle(q.device)
    if obstacle is not None:
        return obstacle
    if q.dtype not in TRITON_DTYPES:
        return f"the Triton kernels take fp16, bf16 and fp32, not {q.dtype}"
    for size in (q.shape[-1], v.shape[-1]):
        if size not in TRITON_HEAD_SIZES:
            return f"the Triton kernels take head sizes {TRITON_HEAD_SIZES[0]} to {TRITON_HEAD_SIZES[-1]}, not {size}"
    return None


def _hopper_obstacle(q: Tensor, v: Tensor, terms: "Terms | None") -> str | None:
    """Why the Hopper kernels do not take a call that the Triton kernels take, or None if they do."""
    capability = _nvidia_capability(q.device)
    if capability != HOPPER:
        return (
            f"the Hopper kernels need a GPU of compute capability 9.0, and this one has {capability[0]}.{capability[1]}"
        )
    if q.dtype == torch.float32:
        return "the Hopper kernels take fp16 and bf16, not torch.float32"
    if v.shape[3] % 8 != 0:
        return f"the Hopper kernels take value head sizes that are multiples of 8, not {v.shape[3]}"
    if terms is None:
        return None
    for name, asked in (
        ("a bias", terms.bias is not None),
        ("a boolean mask", terms.allowed is not None),
        ("ALiBi", terms.alibi_slopes is not None),
        ("sinks", terms.sinks is not None),
        ("dropout", terms.seed is not None),
        ("another output dtype", terms.output_dtype not in (None, q.dtype)),
    ):
        if asked:
            return f"the Hopper kernels do not take {name}"
    return None


def _hopper_forward_pays(q: Tensor, v: Tensor, terms: "Terms | None") -> bool:
    """Whether the Hopper forward is the faster one; with small heads and few keys a query it is not.

    On an NVIDIA H200 (torch 2.11.0+cu130, triton 3.6.0, 2026-11-30), bf16, it takes 0.79 times as long as the Triton
    kernel at B32 H16 T512 D128 and 0.95 at B8 H32 T2048 D64, both causal, and 0.88 at B64 H12 T512 D64 without a mask,
    but 1.13 at B32 H12 T1024 D64 and 1.23 at B32 H32 T512 D64, causal, and 1.26 for 16 documents of 1,024, B1 H32 D64.
    """
    if max(q.shape[3], v.shape[3]) > 64:
        return True
    if terms is not None and terms.bounds is not None:
        return False  # how long its documents are is not known here
    return q.shape[2] >= (2048 if terms is None or terms.is_bounded else 512)


def _hopper_or_not(q: Tensor, *, backward: bool) -> Choice:
    """Of a call whose forward the Hopper kernels take."""
    if backward and q.shape[3] % 8 != 0:
        return Choice("triton", f"the Hopper backward takes head sizes that are multiples of 8, not {q.shape[3]}")
    return Choice("hopper", None)


def _not_run_yet() -> str | None:
    import triton

    if triton.__version__ in HOPPER_RAN_ON:
        return None
    return (
        f"the Hopper kernels have run with Triton {', '.join(sorted(HOPPER_RAN_ON))}, not yet with {triton.__version__}"
    )


def triton_obstacle(device: torch.device) -> str | None:
    """Why Triton does not run on a GPU here, or None if it does."""
    if not triton_installed():
        return "Triton is not installed"
    capability = _nvidia_capability(device)
    if capability < OLDEST_CAPABILITY:
        needed, found = (".".join(map(str, x)) for x in (OLDEST_CAPABILITY, capability))
        return f"Triton needs a GPU of compute capability {needed} or later, and this one has {found}"
    return None


def interpreting() -> bool:
    """Whether Triton runs its kernels in its interpreter: the variable is read when Triton is first imported."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "on", "true", "y", "yes")  # what Triton takes for it


@cache
def _nvidia_capability(device: torch.device) -> tuple[int, int]:
    """The device's compute capability; the oldest that will do where it is no NVIDIA GPU, or is a fake one."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return OLDEST_CAPABILITY
    return torch.cuda.get_device_capability(device)


@cache
def triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None
