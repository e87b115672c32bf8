"""AdamW for half-precision weights that does its arithmetic on fp32 copies of them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.adamw import adamw as update

from flash_train.training.groups import Group

__all__ = ["AdamWWithMasters", "full_precision"]

_PORTION = 2**26
"""Elements of fp32 gradients that exist at a time, 256 MiB: launches stay few, and their memory small."""


class AdamWWithMasters(AdamW):
    """torch's AdamW, where each bf16 or fp16 parameter has an fp32 master, which is what is updated.

    A step turns the gradients into fp32, updates the masters with torch's own kernels, and rounds them into the
    parameters: each update is the one that fp32 weights with the same gradients would get, bit for bit. An update below
    a bf16 number's rounding (a 256th of it) is not lost, as it is to AdamW on bf16 weights. Parameters of other types
    are updated as ever. Nothing waits for the device.

    Master, running means and counter are in `state` from the beginning (12 bytes a parameter beside its own 2 and the
    gradient's 2), in fp32 whatever the parameters are, and so are those of a state that is loaded; one without masters,
    of an AdamW on fp32 weights, leaves them as they are. During a step there are fp32 gradients of 64 million elements,
    or of the largest parameter. Loss scaling is not for it: a GradScaler refuses fp16 gradients.

    Args:
        groups: as torch's optimizers take them; each may say `maximize`, too.
        lr, betas, eps, fused, foreach: torch's, for groups that say nothing else.
        fp32_gradients: let autograd add up gradients in fp32, 4 bytes a parameter in place of 2. What is added to a
            bf16 sum of micro-batches is rounded each time.

    Raises:
        ValueError: a group asks for amsgrad, capturable or differentiable.
    """

    def __init__(
        self,
        groups: Iterable[Group],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        fused: bool | None = None,
        foreach: bool | None = None,
        fp32_gradients: bool = False,
    ) -> None:
        self._fp32_gradients = fp32_gradients
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=fused, foreach=foreach)
        self._step_supports_amp_scaling = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for option in ("amsgrad", "capturable", "differentiable"):
            if group[option]:
                raise ValueError(f"{option}=True is not for fp32 masters: leave it out, or take torch's AdamW")
        for parameter in group["params"]:
            self.state[parameter] = _begin(parameter, fused=bool(group["fused"]))
            if self._fp32_gradients and _is_half(parameter):
                parameter.grad_dtype = torch.float32

    def master(self, parameter: nn.Parameter) -> Tensor | None:
        """Of a half-precision parameter of this optimizer, None of any other."""
        return self.state[parameter].get("master") if parameter in self.state else None

    @torch.no_grad()
    def begin_from(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        """Let masters begin with what their parameters were before they were rounded: such values as round to them."""
        for parameter, value in values.items():
            master, value = self.master(parameter), value.to(parameter.device)
            if master is not None and torch.equal(value.to(parameter.dtype), parameter):
                master.copy_(value)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameters in _portions(p for p in group["params"] if p.grad is not None):
                self._update(parameters, group)
        return loss

    def _update(self, parameters: Sequence[nn.Parameter], group: Group) -> None:
        states = [self.state[p] for p in parameters]
        weights = [state.get("master", p) for p, state in zip(parameters, states, strict=True)]
        update(
            weights,
            _fp32_gradients(parameters),
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            foreach=group["foreach"],
            fused=group["fused"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )
        halves = [(p, weight) for p, weight in zip(parameters, weights, strict=True) if weight is not p]
        _copy([p for p, _ in halves], [weight for _, weight in halves])

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        before = dict(self.state)
        super().load_state_dict(state_dict)
        loaded = state_dict["state"]
        for group, packed in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, index in zip(group["params"], packed["params"], strict=True):
                # torch has rounded all but the counter to the type of the parameter.
                own = before[parameter]
                exact = {
                    name: value.to(own[name]) if name in own and name != "step" else self.state[parameter][name]
                    for name, value in loaded.get(index, {}).items()
                }
                self.state[parameter] = own | exact


def full_precision(parameters: Mapping[str, nn.Parameter], optimizers: Iterable[Optimizer]) -> dict[str, Tensor]:
    """Of each parameter its master in one of the `optimizers`, or else the parameter itself, detached."""
    holders = [optimizer for optimizer in optimizers if isinstance(optimizer, AdamWWithMasters)]

    def widest(parameter: nn.Parameter) -> Tensor:
        masters = (holder.master(parameter) for holder in holders)
        return next((master for master in masters if master is not None), parameter.detach())

    return {name: widest(parameter) for name, parameter in parameters.items()}


def _is_half(x: Tensor) -> bool:
    return x.dtype in (torch.bfloat16, torch.float16)


def _begin(parameter: nn.Parameter, *, fused: bool) -> dict[str, Tensor]:
    weights = parameter.detach()
    masters = {"master": weights.float()} if _is_half(parameter) else {}
    like = masters.get("master", weights)
    return masters | {
        "step": torch.zeros((), device=parameter.device if fused else "cpu", dtype=torch.float32),
        "exp_avg": torch.zeros_like(like, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(like, memory_format=torch.preserve_format),
    }


def _portions(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Together `_PORTION` elements at most, or one parameter that has more."""
    portion: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if portion and size + parameter.numel() > _PORTION:
            yield portion
            portion, size = [], 0
        portion.append(parameter)
        size += parameter.numel()
    if portion:
        yield portion


def _fp32_gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    gradients = [p.grad for p in parameters if p.grad is not None]
    wide = [torch.empty_like(g, dtype=torch.float32) if _is_half(g) else g for g in gradients]
    halves = [(new, g) for new, g in zip(wide, gradients, strict=True) if new is not g]
    _copy([new for new, _ in halves], [g for _, g in halves])
    return wide


def _copy(to: list[Tensor], source: list[Tensor]) -> None:
    if to:
        torch._foreach_copy_(to, source)  # pyright: ignore[reportPrivateImportUsage]
