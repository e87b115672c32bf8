"""What a resumed run takes from its checkpoint's optimizer: the state. Rates, decays and all other options are those
that the run is given now; torch's `load_state_dict` would replace them without a word by the ones of then."""

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

__all__ = ["follow_rates", "keep_options"]


def keep_options(optimizer: Optimizer, module: nn.Module) -> None:
    """Let `optimizer` keep its groups' options when a state is loaded, and refuse one of other groups.

    What a schedule has made of a rate is kept too, as the same share of the peak. A state without names of parameters,
    as of an optimizer that this was not called for, is taken by their order.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])  # as a scheduler does
        group["param_names"] = [names[id(parameter)] for parameter in group["params"]]
    optimizer.register_load_state_dict_pre_hook(_with_own_options)


def follow_rates(scheduler: Any) -> None:
    """Give a scheduler that was loaded the peak rates that its optimizer kept."""
    for each in _with_parts(scheduler):
        if hasattr(each, "base_lrs"):
            each.base_lrs = [group["initial_lr"] for group in each.optimizer.param_groups]


def _with_own_options(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    own, saved = optimizer.param_groups, state_dict["param_groups"]
    _check_members(own, saved)
    if len(own) != len(saved):
        return state_dict  # torch refuses it
    groups = [
        {name: value for name, value in now.items() if name != "params"}
        | {"params": then["params"], "lr": _rate(now, then)}
        for now, then in zip(own, saved, strict=True)
    ]
    return state_dict | {"param_groups": groups}


def _check_members(own: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    now, then = _places(own), _places(saved)
    for name in now if then else ():
        if now[name] != then.get(name):
            before = f"in group {then[name]}" if name in then else "in none"
            raise ValueError(
                f"a run must resume with the groups of its optimizer, where {name} was {before}, and now it is in "
                f"group {now[name]}; leave optimizer.decay, no_decay and not_muon as they were, or start a new run "
                "with init_from"
            )


def _places(groups: list[dict[str, Any]]) -> dict[str, int]:
    return {name: index for index, group in enumerate(groups) for name in group.get("param_names", ())}


def _rate(now: dict[str, Any], then: dict[str, Any]) -> Any:
    peak, before = now["initial_lr"], then.get("initial_lr", then["lr"])
    if peak == before:
        return then["lr"]
    return then["lr"] / before * peak if before else peak


def _with_parts(scheduler: LRScheduler) -> Iterator[LRScheduler]:
    yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):  # of a SequentialLR, and its like
        yield from _with_parts(part)
