"""What the kernels allocate for themselves: torch sees an operator's results only, a prediction of memory needs both.

`library.py` publishes each as the operator's plain attribute `workspace_bytes`, called with the compute capability of
the GPU that is meant and the operator's own arguments. Shapes only are read.
"""

from typing import Any

import torch
from torch import Tensor

from flash_train.ops.choice import HOPPER
from flash_train.ops.features import Terms


def backward_workspace(
    capability: tuple[int, int], grad_output: object, grad_lse: object, q: Tensor, *rest: Any
) -> int:
    """Bytes that `attention_backward` holds while it runs on an NVIDIA GPU, beside its results.

    Triton: one fp32 number for each row of scores, delta. Hopper: two, in whole tiles of at most 128 rows, and dQ's
    sums in fp32, [1, B H, T, D]; what it does not take runs on Triton, with less.
    """
    B, H, T, D = q.shape
    terms = Terms(*rest[5:])
    half = q.dtype in (torch.float16, torch.bfloat16)
    if capability == HOPPER and half and terms.implementation in ("flash", "hopper") and not terms.deterministic:
        return 4 * B * H * (T * D + 2 * (-(-T // 128) * 128))
    return 4 * B * H * T
