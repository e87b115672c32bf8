"""What CUDA does otherwise, so that fake tensors on a CPU allocate what the same step allocates on a GPU.

Fake tensors that say they are on a GPU run forward without one, but not backward: autograd asks their device for its
streams. So a step is taken on fake CPU tensors, and here, in one place, stands where torch's CUDA code parts from its
CPU code: which types autocast chooses, which composite operators are one kernel, which attention SDPA takes, and what
kernels allocate for themselves. Everything else is the same graph of operators with the same results.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.backends import cuda as backends
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten

# Autocast. The names are torch's registrations; FP32 is every CUDA name that is in none of the other three.
LOWER = frozenset(
    "_convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input "
    "conv_transpose3d.input convolution cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr matmul "
    "einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell "
    "_thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention "
    "scaled_dot_product_attention".split()
)
PROMOTED = frozenset(
    "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put scatter_add tensordot".split()
)
FP32_UNLESS_TOLD = frozenset(
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm "
    "linalg_matrix_norm.str_ord sum sum.dim_IntList norm.Scalar norm.ScalarOpt_dim".split()
)
"""They have an argument `dtype`, or compute in fp32 what is given in half."""
_HALVES = (torch.float16, torch.bfloat16)
_EFFICIENT_TAKES_GROUPS = torch.__version__ >= "2.14"
"""Whether SDPA's efficient back end takes grouped heads, which went to the math back end before."""


@contextmanager
def cuda_rules(capability: tuple[int, int]) -> Iterator[None]:
    """Inside, operators on (fake) CPU tensors are taken apart as on an NVIDIA GPU of that compute capability.

    The rules are kernels in torch's dispatcher, and hold for the whole process while they are there: compute nothing
    else meanwhile.
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel replaces another
            _autocast_as_cuda(library)
            library.impl("dropout", _dropout, "AutogradCPU")
            library.impl("rms_norm", _rms_norm, "AutogradCPU")
            library.impl("_fused_rms_norm", _fused_rms_norm, "CPU")
            library.impl("_fused_rms_norm_backward", _fused_rms_norm_backward, "CPU")
            library.impl("scaled_dot_product_attention", _sdpa(capability), "AutogradCPU")
        yield
    finally:
        library._destroy()


def _autocast_as_cuda(library: torch.library.Library) -> None:
    on_cuda, on_cpu = _registered("AutocastCUDA"), _registered("AutocastCPU")
    for name in on_cpu - on_cuda:
        library.impl(name, torch.library.fallthrough_kernel, "AutocastCPU")
    for name in on_cuda - on_cpu:
        library.impl(name, _casting(name), "AutocastCPU")


def _registered(key: str) -> set[str]:
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


def _casting(name: str) -> Callable[..., Any]:
    base, _, overload = name.partition(".")
    operator = getattr(getattr(aten, base), overload or "default")
    takes_dtype = any(argument.name == "dtype" for argument in operator._schema.arguments)
    below = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(below):
            if name in FP32_UNLESS_TOLD and takes_dtype:
                at = [argument.name for argument in operator._schema.arguments].index("dtype")
                told = args[at] if at < len(args) else kwargs.get("dtype")
                if told is not None or not _floating(args[0]):
                    return operator(*args, **kwargs)
                return operator(*args[:at], **{**kwargs, "dtype": torch.float32})
            dtype = torch.float32
            if name in LOWER:
                dtype = torch.get_autocast_dtype("cpu")
            elif name in PROMOTED and not any(x.dtype == torch.float32 for x in _all_floating((args, kwargs))):
                return operator(*args, **kwargs)
            return operator(*_cast(args, dtype), **_cast(kwargs, dtype))

    return kernel


def _floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64


def _all_floating(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if _floating(x)]


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda x: x.to(dtype) if _floating(x) else x, tree)


# Composite operators that are one kernel on a GPU


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """With a mask of one byte an element."""
    if train and 0 < p < 1 and x.numel():
        return aten.native_dropout(x, p, train)[0]
    return x * 0 if train and p == 1 else x


def _rms_norm(x: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    if weight is not None and weight.dtype != x.dtype:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + (eps or torch.finfo(x.dtype).eps))
        return normed.to(x.dtype) * weight
    return aten._fused_rms_norm(x, normalized_shape, weight, eps)[0]


def _fused_rms_norm(
    x: Tensor, normalized_shape: list[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    """Of fake tensors: the result and, in fp32, one number a row. A CPU's operator is a composite, which keeps more."""
    rows = x.shape[: x.dim() - len(normalized_shape)]
    return torch.empty_like(x), x.new_empty(*rows, *[1] * len(normalized_shape), dtype=torch.float32)


def _fused_rms_norm_backward(
    grad: Tensor, x: Tensor, normalized_shape: list[int], rstd: Tensor, weight: Tensor | None, mask: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


def _sdpa(capability: tuple[int, int]) -> Callable[..., Tensor]:
    """torch's choice among the back ends that are enabled (`torch.nn.attention.sdpa_kernel`), in its order."""

    def kernel(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
               is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False) -> Tensor:  # fmt: skip
        half, sizes = q.dtype in _HALVES, {q.shape[-1], v.shape[-1]}
        flash = half and attn_mask is None and len(sizes) == 1 and max(sizes) <= 256
        cudnn = flash and max(sizes) <= 128 and max(sizes) % 8 == 0 and capability in ((9, 0), (10, 0))
        if cudnn and backends.cudnn_sdp_enabled():
            return aten._scaled_dot_product_cudnn_attention(q, *_expanded(q, k, v), None, q.requires_grad, dropout_p,
                                                            is_causal, scale=scale)[0]  # fmt: skip
        if flash and capability >= (8, 0) and backends.flash_sdp_enabled():
            return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
        if backends.mem_efficient_sdp_enabled() and (q.shape[-3] == k.shape[-3] or _EFFICIENT_TAKES_GROUPS):
            bias = None if attn_mask is None else _additive(attn_mask, q, k)
            return aten._scaled_dot_product_efficient_attention(q, *_expanded(q, k, v), bias, q.requires_grad,
                                                                dropout_p, is_causal, scale=scale)[0]  # fmt: skip
        if backends.math_sdp_enabled():
            return aten._scaled_dot_product_attention_math(q, k, v, attn_mask, dropout_p, is_causal, None, scale=scale,
                                                           enable_gqa=enable_gqa)[0]  # fmt: skip
        raise RuntimeError("No available kernel. Aborting execution.")  # torch's own words

    return kernel


def _expanded(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    times = q.shape[1] // k.shape[1] if q.dim() == 4 else 1
    return [x if times == 1 else x.repeat_interleave(times, dim=1) for x in (k, v)]


def _additive(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
    return mask.expand(*q.shape[:3], k.shape[2])


# What kernels allocate for themselves


def inside(capability: tuple[int, int] | None) -> Callable[[Any, tuple[Any, ...], Mapping[str, Any], Any], int]:
    """`LiveBytes`'s `inside` for a GPU of that compute capability; None: for a CPU.

    An operator of anybody's may declare its own: a plain attribute `workspace_bytes` of the torch.ops overload, called
    with (capability, *arguments).
    """

    def bytes_inside(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], results: Any) -> int:
        rule = None if capability is None else _INSIDE.get(operator)
        declared = rule or getattr(operator, "workspace_bytes", None)
        return 0 if declared is None else declared(capability, *args, **kwargs)

    return bytes_inside


def _softmax_backward(capability: Any, grad: Tensor, *rest: Any, **more: Any) -> int:
    """grad * output, a tensor of its own before the row sums are taken."""
    return grad.numel() * grad.element_size()


def _flash_backward(capability: Any, grad: Tensor, q: Tensor, k: Tensor, *rest: Any, **more: Any) -> int:
    """FlashAttention 2's: dQ's fp32 sums, the rows' deltas; dK and dV of each query head where heads are grouped."""
    (B, H, T, D), (G, S) = q.shape, k.shape[1:3]
    rows, width = -(-T // 128) * 128, 256 if D > 192 else -(-D // 32) * 32
    grouped = 0 if H == G else 2 * B * S * H * D * q.element_size()
    return 4 * B * H * rows * (width + 1) + grouped


def _embedding_backward(capability: Any, grad: Tensor, indices: Tensor, *rest: Any, **more: Any) -> int:
    """The indices sorted, and where each came from."""
    return 4 * indices.numel() * indices.element_size()


_INSIDE: dict[Any, Callable[..., int]] = {
    aten._softmax_backward_data.default: _softmax_backward,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten.embedding_dense_backward.default: _embedding_backward,
}
