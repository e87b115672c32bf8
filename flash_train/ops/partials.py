"""`merge`: the results of attention over parts of the keys, put together."""

import math
from collections.abc import Sequence

from torch import Tensor

from flash_train.ops import reference
from flash_train.ops.checks import check_tensors
from flash_train.ops.reference import State, finish


def merge(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over a set of keys, from its results over disjoint parts of the set: exact, and differentiable.

    What ring attention, split keys and prefix caches need. Sinks belong to one part only: each part's log-sum-exp
    counts what it was given.

    Args:
        outputs: of each part, [..., E], as `flash_attention_with_lse` returns them. `output_dtype=torch.float32` there
            keeps the parts from being rounded before they are summed.
        lses: of each part, [...]; minus infinity where a row saw nothing.

    Returns:
        (output [..., E] in the parts' dtype, log-sum-exp [...]).

    Raises:
        ValueError: no parts, not as many outputs as lses, shapes, dtypes or devices that differ, or whole numbers.
    """
    outputs, lses = check_tensors("outputs", outputs), check_tensors("lses", lses)
    if len(outputs) == 0 or len(outputs) != len(lses):
        raise ValueError(
            f"merge needs an lse for each of at least one output, got {len(lses)} lses and {len(outputs)} outputs; "
            "flash_attention_with_lse returns one of each"
        )
    for output, lse in zip(outputs, lses, strict=True):
        if output.shape != outputs[0].shape or lse.shape != output.shape[:-1]:
            raise ValueError(
                f"merge needs outputs [..., E] of one shape and lses [...], got {list(output.shape)} and "
                f"{list(lse.shape)} beside {list(outputs[0].shape)}; pad rows that a part lacks with 0 and -inf"
            )
        if not output.is_floating_point() or not lse.is_floating_point():
            raise ValueError(
                f"merge needs floating outputs and lses, got {output.dtype} and {lse.dtype}; cast them with .float()"
            )
        if output.dtype != outputs[0].dtype or not output.device == lse.device == outputs[0].device:
            raise ValueError(
                f"merge needs outputs of one dtype, and all on one device, got {output.dtype} on {output.device} and "
                f"an lse on {lse.device} beside {outputs[0].dtype} on {outputs[0].device}; cast or move them with .to"
            )
    parts = [State(lse, (lse > -math.inf).to(lse.dtype), output) for output, lse in zip(outputs, lses, strict=True)]
    state = parts[0]
    for part in parts[1:]:
        state = reference.merge(state, part)
    output, lse = finish(state)
    return output.to(outputs[0].dtype), lse
