"""`torch.nn.functional.scaled_dot_product_attention` with its back end pinned, for comparisons."""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from flash_train.ops.features import UNBOUNDED, Terms

_BACKENDS = {
    "sdpa": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_math": SDPBackend.MATH,
}


class Unsupported(ValueError):
    """Torch's function does not take what is asked: another implementation may."""


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> Tensor:
    """Shapes as `flash_attention`. Pinned, because torch falls back to its math back end without a word.

    Dropout is torch's own: it strikes other elements than this package's.

    Raises:
        Unsupported: the back end does not exist on the device, or refuses these tensors, or torch has no such feature.
    """
    implementation = terms.implementation
    causal = terms.right == 0
    # A fake tensor that says it is on a CPU may stand for one on a GPU, as in a prediction: there torch decides.
    on_cpu = q.device.type == "cpu" and (torch.compiler.is_compiling() or not is_fake(q))
    if on_cpu and implementation in ("sdpa_cudnn", "sdpa_efficient"):
        raise Unsupported(f"implementation={implementation!r} needs a GPU; on a CPU use 'sdpa' or 'sdpa_math'")
    _refuse(terms, implementation, on_cpu=on_cpu)
    T, S = q.shape[2], k.shape[2]
    if causal and T > S:  # the first T - S queries see nothing, which torch answers with NaN
        seeing = sdpa_attention(q[:, :, T - S :], k, v, terms)
        return pad(seeing, (0, 0, T - S, 0))
    bias, flag = terms.bias if terms.allowed is None else terms.allowed, False
    if causal and T == S:  # an `if`, because torch.compile's symbolic truth is no argument
        flag = True
    elif causal and T != 1:  # torch's own flag would align the first query with the first key
        from torch.nn.attention.bias import causal_lower_right  # which imports all of dynamo: 1.1 s

        bias = causal_lower_right(T, S)
    grouped = q.shape[1] != k.shape[1]
    with sdpa_kernel(_BACKENDS[implementation]):
        try:
            return scaled_dot_product_attention(
                q, k, v, attn_mask=bias, dropout_p=terms.dropout, is_causal=flag, scale=terms.scale, enable_gqa=grouped
            )
        except RuntimeError as error:
            if not str(error).startswith(("No available kernel", "No viable backend")):
                raise
            raise Unsupported(
                f"implementation={implementation!r}: torch's back end takes no q {list(q.shape)}, k {list(k.shape)} of "
                f"{q.dtype} on {q.device.type} (torch: {error}); use 'sdpa_math' or 'flash'"
            ) from error


def _refuse(terms: Terms, implementation: str, *, on_cpu: bool) -> None:
    """What torch's function has no argument for, or takes alone, or not from this back end."""
    missing = {
        "a window": terms.left < UNBOUNDED or 0 < terms.right < UNBOUNDED,
        "top-left alignment": terms.top_left,
        "documents": terms.bounds is not None,
        "a soft cap": terms.soft_cap > 0,
        "ALiBi": terms.alibi_slopes is not None,
        "sinks": terms.sinks is not None,
        "a causal mask together with a bias or allowed": terms.right == 0
        and (terms.bias is not None or terms.allowed is not None),
        "a bias together with allowed": terms.bias is not None and terms.allowed is not None,
        "dropout on a CPU": terms.dropout > 0 and implementation == "sdpa" and on_cpu,
    }
    for name, asked in missing.items():
        if asked:
            raise Unsupported(f"implementation={implementation!r} does not take {name}; use 'flash' or 'naive'")
