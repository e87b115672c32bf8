"""How exact one step's gradients are: each implementation against float64."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional

# Lightning's names of precisions: what the weights are, and what autocast computes in.
_PRECISIONS: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "64-true": (torch.float64, None),
    "32-true": (torch.float32, None),
    "bf16-true": (torch.bfloat16, None),
    "16-true": (torch.float16, None),
    "bf16-mixed": (torch.float32, torch.bfloat16),
    "16-mixed": (torch.float32, torch.float16),
}
# fp16 loses gradients below 6e-8; a power of two shifts them up and back without rounding.
_FP16_LOSS_SCALE = 2.0**12

ModelMaker = Callable[[str], nn.Module]


def gradient_errors(
    make_model: ModelMaker,
    inputs: Tensor,
    targets: Tensor,
    *,
    implementations: Sequence[str],
    precision: str,
    documents: Tensor | None = None,
) -> dict[str, float]:
    """The relative L2 error, over all parameters, of the gradient of the mean cross-entropy.

    The truth is computed in float64 by the tiled algorithm, whose memory is linear in T. An implementation that does
    not take the model (a ValueError where the truth has none) is left out: its training run says why.

    Args:
        make_model: makes a model [B, T] -> [B, T, V] with the named attention implementation and always the same
            fp32 weights, on the CPU.
        inputs: tokens [B, T] int64, on the device to compute on.
        targets: tokens [B, T] int64; -100 is left out.
        precision: one of Lightning's names, as in conf/precision.
        documents: ids [B, T] on the same device, the model's second argument where there are any.

    Raises:
        ValueError: `precision` is not known here.
    """
    if precision not in _PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(_PRECISIONS)} to be checked, got {precision!r}")
    truth = _gradient(make_model("tiled"), inputs, targets, documents, precision="64-true")
    norm = _norm(truth)
    errors = {}
    for name in implementations:
        try:
            gradient = _gradient(make_model(name), inputs, targets, documents, precision=precision)
        except ValueError:
            continue
        errors[name] = _norm([one - other for one, other in zip(gradient, truth, strict=True)]) / norm
    return errors


def _gradient(
    model: nn.Module, inputs: Tensor, targets: Tensor, documents: Tensor | None, *, precision: str
) -> list[Tensor]:
    """The gradient of each parameter, in float64. Dropout is off: its masks differ from one precision to another."""
    weights, autocast = _PRECISIONS[precision]
    scale = _FP16_LOSS_SCALE if torch.float16 in (weights, autocast) else 1.0
    model = model.to(inputs.device, weights).eval()
    context: AbstractContextManager = nullcontext()
    if autocast is not None:
        context = torch.autocast(inputs.device.type, autocast)
    with context:
        logits = (model(inputs) if documents is None else model(inputs, documents)).flatten(0, 1)
        reduced_in = torch.promote_types(logits.dtype, torch.float32)
        loss = functional.cross_entropy(logits.to(reduced_in), targets.flatten())
    gradients = torch.autograd.grad(loss * scale, list(model.parameters()))
    return [gradient.double() / scale for gradient in gradients]


def _norm(tensors: Sequence[Tensor]) -> float:
    return torch.stack([tensor.square().sum() for tensor in tensors]).sum().sqrt().item()
