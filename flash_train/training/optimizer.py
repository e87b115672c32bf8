"""Optimizers as functions of a module, so that a YAML `_partial_: true` gives a LanguageModel its optimizer."""

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from flash_train.training.groups import Group, decay_groups, trainable
from flash_train.training.master_weights import AdamWWithMasters

__all__ = ["MuonWithAdamW", "adamw", "muon"]


def adamw(
    module: nn.Module,
    *,
    lr: float,
    betas: Sequence[float] = (0.9, 0.95),
    weight_decay: float = 0.1,
    eps: float = 1e-8,
    decay: Sequence[str] = (),
    no_decay: Sequence[str] = (),
    fused: bool | None = None,
    foreach: bool | None = None,
    master_weights: bool = False,
    fp32_gradients: bool = False,
) -> AdamW:
    """AdamW over the trainable parameters of `module`, in two groups: matrices decay, gains and biases do not.

    A matrix is a parameter of two dimensions or more, embeddings included. A tied parameter is taken once.

    Args:
        lr: peak learning rate; a schedule multiplies it.
        betas: decay of the running mean of the gradient, and of its square.
        decay, no_decay: patterns of names ("token_embedding.*") of parameters that do, or do not, whatever their shape.
        fused: one kernel for the whole update. The default is to fuse when every parameter is on a GPU.
        foreach: a few kernels for all parameters at once, which need copies as large as they are. The default is
            torch's: on a GPU, where nothing is fused. False with fused=False updates one parameter after the other.
        master_weights: keep fp32 copies of bf16 and fp16 parameters, and update those (see `AdamWWithMasters`).
        fp32_gradients: with masters, add up the gradients of micro-batches in fp32.

    Raises:
        ValueError: nothing is trainable, a parameter is to be in both groups, a pattern names none, `betas` are not two
            numbers, `weight_decay` is negative, the update is to be both fused and foreach, or fp32 gradients have no
            masters.
    """
    parameters = trainable(module)
    groups = decay_groups(parameters, weight_decay=weight_decay, decay=decay, no_decay=no_decay)
    options = _adamw_options(parameters.values(), lr, betas, eps, fused, foreach)
    if master_weights:
        return AdamWWithMasters(groups, **options, fp32_gradients=fp32_gradients)
    if fp32_gradients:
        raise ValueError(
            "fp32_gradients=True needs master_weights=True: torch's AdamW takes gradients of the weights' own type."
        )
    return AdamW(groups, **options)


def muon(
    module: nn.Module,
    *,
    lr: float,
    adamw_lr: float | None = None,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    adjust_lr: str = "match_rms_adamw",
    weight_decay: float = 0.1,
    betas: Sequence[float] = (0.9, 0.95),
    eps: float = 1e-8,
    decay: Sequence[str] = (),
    no_decay: Sequence[str] = (),
    not_muon: Sequence[str] = ("head.*", "lm_head.*"),
    fused: bool | None = None,
    foreach: bool | None = None,
) -> "MuonWithAdamW":
    """Muon (Jordan et al., 2024) for the matrices inside the network, AdamW for all else, as one optimizer.

    Muon is torch's own. It takes the parameters of exactly two dimensions, but no embedding (a tied head is one) and
    none that `not_muon` names; a fused projection of queries, keys and values is one matrix to it. Its state is the
    momentum alone, half of AdamW's.

    Args:
        lr, adamw_lr: peak learning rate of either; `adamw_lr` None: the same.
        momentum, nesterov, ns_steps: Muon's; `ns_steps` counts its Newton-Schulz iterations, three products each.
        adjust_lr: "match_rms_adamw" scales Muon's update to the size of AdamW's, so that `lr` and `weight_decay` suit
            both (Liu et al., 2025, arXiv 2502.16982); "original" by sqrt(max(1, rows / columns)).
        not_muon: patterns of names; here one may name nothing.
        weight_decay, betas, eps, decay, no_decay, fused, foreach: as for `adamw`, the decay for both.

    Raises:
        ValueError: as `adamw` does; there is no matrix for Muon; or torch's Muon does not take a value.
    """
    parameters = trainable(module)
    chosen = _matrices(module, parameters, not_muon)
    groups = decay_groups(parameters, weight_decay=weight_decay, decay=decay, no_decay=no_decay)
    for_muon = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr}
    for_adamw = _adamw_options(
        parameters.values(), lr if adamw_lr is None else adamw_lr, betas, eps, fused, foreach
    )  # fmt: skip
    split: list[Group] = []
    for kind, options in ((True, for_muon), (False, for_adamw)):
        for group in groups:
            members = [p for p in group["params"] if (id(p) in chosen) is kind]
            if members:
                split.append({**group, **options, "params": members, "muon": kind})
    return MuonWithAdamW(split)


class MuonWithAdamW(Optimizer):
    """torch's Muon for the groups with "muon": True and its AdamW for the others, in one step with one state.

    One optimizer is what a scheduler, a gradient scaler and Lightning's automatic optimization take.
    """

    def __init__(self, groups: Iterable[Group]) -> None:
        groups = [dict(group) for group in groups]
        parts = {kind: [group for group in groups if group["muon"] is kind] for kind in (True, False)}
        makers: dict[bool, Callable[[list[Group]], Optimizer]] = {True: Muon, False: AdamW}
        self._parts = {kind: makers[kind](part) for kind, part in parts.items() if part}
        super().__init__([group for part in self._parts.values() for group in part.param_groups], {})
        self._share()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts.values():
            part.step()
        return loss

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()  # a state that is loaded comes in new dictionaries

    def _share(self) -> None:
        for kind, part in self._parts.items():
            part.state = self.state
            part.param_groups = [group for group in self.param_groups if group["muon"] is kind]


def _matrices(module: nn.Module, parameters: dict[str, nn.Parameter], not_muon: Sequence[str]) -> set[int]:
    """The ids of those that Muon takes."""
    embeddings = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)}
    chosen = {
        id(parameter)
        for name, parameter in parameters.items()
        if parameter.dim() == 2 and id(parameter) not in embeddings
        and not any(fnmatchcase(name, pattern) for pattern in not_muon)
    }  # fmt: skip
    if not chosen:
        raise ValueError(
            f"{type(module).__name__} has no matrix for Muon, which takes no embedding and none that not_muon names: "
            "use optimizer=adamw."
        )
    return chosen


def _adamw_options(
    parameters: Iterable[nn.Parameter],
    lr: float,
    betas: Sequence[float],
    eps: float,
    fused: bool | None,
    foreach: bool | None,
) -> dict[str, Any]:
    if len(betas) != 2:
        raise ValueError(f"betas are two numbers, not {list(betas)}: (0.9, 0.95) is usual for language models.")
    if fused and foreach:
        raise ValueError("fused=True and foreach=True are two ways to make one update: choose one, fused is faster.")
    return {
        "lr": lr,
        # A list from a configuration would be kept in the optimizer's state, and a checkpoint holds plain values only.
        "betas": (float(betas[0]), float(betas[1])),
        "eps": eps,
        "fused": all(p.is_cuda for p in parameters) and not foreach if fused is None else fused,
        "foreach": foreach,
    }
