"""`torch.nn.functional.scaled_dot_product_attention` with its back end pinned, for comparisons."""

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import pad, scaled_dot_product_attention

_BACKENDS = {
    "sdpa": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_math": SDPBackend.MATH,
}


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, implementation: str) -> Tensor:
    """Shapes as `flash_attention`. Pinned, because torch falls back to its math back end without a word.

    Raises:
        ValueError: the back end does not exist on the device, or refuses these tensors.
    """
    if q.device.type == "cpu" and implementation in ("sdpa_cudnn", "sdpa_efficient"):
        raise ValueError(f"implementation={implementation!r} needs a GPU; on a CPU use 'sdpa' or 'sdpa_math'")
    T, S = q.shape[2], k.shape[2]
    if causal and T > S:  # the first T - S queries see nothing, which torch answers with NaN
        seeing = sdpa_attention(q[:, :, T - S :], k, v, causal=True, scale=scale, implementation=implementation)
        return pad(seeing, (0, 0, T - S, 0))
    bias, flag = None, False
    if causal and T == S:  # an `if`, because torch.compile's symbolic truth is no argument
        flag = True
    elif causal and T != 1:  # torch's own flag would align the first query with the first key
        bias = causal_lower_right(T, S)
    grouped = q.shape[1] != k.shape[1]
    with sdpa_kernel(_BACKENDS[implementation]):
        try:
            return scaled_dot_product_attention(
                q, k, v, attn_mask=bias, is_causal=flag, scale=scale, enable_gqa=grouped
            )
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
            raise ValueError(
                f"implementation={implementation!r}: torch's back end takes no q {list(q.shape)}, k {list(k.shape)} of "
                f"{q.dtype} on {q.device.type} (torch: {error}); use 'sdpa_math' or 'flash'"
            ) from error
