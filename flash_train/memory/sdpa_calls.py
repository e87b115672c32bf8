"""Which back end each call of torch's scaled_dot_product_attention took, and why it was not a fused one."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

_BACKENDS = ("flash", "efficient", "cudnn", "overrideable", "math")


@dataclass
class SdpaCall:
    """The first call in a module's forward that took this back end."""

    module: str
    backend: str
    """flash, efficient, cudnn, overrideable or math."""
    shape: tuple[int, ...]
    """Of the query."""
    dtype: torch.dtype
    reason: str = ""
    """For math: torch's own words, or that the others were switched off."""
    calls: int = 1


class SdpaCalls(TorchFunctionMode):
    """Inside, `found` collects them; `observe` must see the operators that run."""

    def __init__(self, module: Callable[[], str]) -> None:
        super().__init__()
        self._module = module
        self._backend: str | None = None
        self._found: dict[tuple[str, str], SdpaCall] = {}

    @property
    def found(self) -> list[SdpaCall]:
        return list(self._found.values())

    def observe(self, operator: Any) -> None:
        """`operator`, a torch.ops overload, has run."""
        name = operator._schema.name.removeprefix("aten::")
        if name.startswith("_scaled_dot_product"):
            self._backend = next((backend for backend in _BACKENDS if backend in name), None)
        elif name == "bmm" and self._backend is None:
            self._backend = "math"

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is scaled_dot_product_attention:
            return self._watched(*args, **(kwargs or {}))
        if function is functional.multi_head_attention_forward:  # in which no mode sees what it calls
            setattr(functional, "scaled_dot_product_attention", self._watched)  # noqa: B010
            try:
                return function(*args, **(kwargs or {}))
            finally:
                setattr(functional, "scaled_dot_product_attention", scaled_dot_product_attention)  # noqa: B010
        return function(*args, **(kwargs or {}))

    def _watched(self, *args: Any, **kwargs: Any) -> Tensor:
        self._backend = None
        result = scaled_dot_product_attention(*args, **kwargs)
        if self._backend is not None:
            self._note(self._backend, args, kwargs)
        return result

    def _note(self, backend: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        call = self._found.get((self._module(), backend))
        if call is not None:
            call.calls += 1
            return
        query: Tensor = args[0] if args else kwargs["query"]
        call = SdpaCall(self._module(), backend, tuple(query.shape), query.dtype)
        if backend == "math":
            call.reason = why_not_fused(*args, **kwargs)
        self._found[call.module, backend] = call


def why_not_fused(*args: Any, **kwargs: Any) -> str:
    """Torch's reasons against its fused back ends for a call of scaled_dot_product_attention with these arguments."""
    enabled = [
        backend
        for backend, on in (
            (SDPBackend.FLASH_ATTENTION, torch.backends.cuda.flash_sdp_enabled()),
            (SDPBackend.EFFICIENT_ATTENTION, torch.backends.cuda.mem_efficient_sdp_enabled()),
            (SDPBackend.CUDNN_ATTENTION, torch.backends.cuda.cudnn_sdp_enabled()),
        )
        if on
    ]
    if not enabled:
        return "the fused back ends are switched off (torch.nn.attention.sdpa_kernel, torch.backends.cuda.enable_*)"
    with warnings.catch_warnings(record=True) as said, sdpa_kernel(enabled):
        warnings.simplefilter("always")
        try:
            torch._fused_sdp_choice(*args, **kwargs)  # pyright: ignore[reportPrivateImportUsage]
        except RuntimeError as error:
            said_at_the_end = str(error).splitlines()[0]
        else:
            said_at_the_end = "torch gives none"
    reasons = [str(warning.message).partition(" (Triggered internally")[0] for warning in said]
    return " ".join(reasons) or said_at_the_end
