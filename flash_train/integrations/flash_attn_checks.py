"""What flash-attention's functions take, checked by the names and in the layouts that they have there."""

import torch
from torch import Tensor

from flash_train.ops.checks import LARGEST, check_number, check_tensor, whole_number
from flash_train.ops.features import UNBOUNDED, Mask, Score

LAYOUTS = {
    4: ("[B, T, H, D], [B, S, G, D] and [B, S, G, E]", "a single sequence is .unsqueeze(0)"),
    3: ("[total_q, H, D], [total_k, G, D] and [total_k, G, E]", "a padded batch goes to flash_attn_func"),
}
"""How q, k and v lie by their number of dimensions, and a way there."""


def check_q_k_v(q: Tensor, k: Tensor, v: Tensor, dimensions: int) -> None:
    """Dtypes and devices are the operator's to check: it has the same names for them."""
    layout, hint = LAYOUTS[dimensions]
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
    got = f"got q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == dimensions:
        raise ValueError(f"q, k and v must be {layout}, {got}; {hint}")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"k and v must be of one length and have the same heads, as in {layout}, {got}; cut the longer one, or "
            "repeat_interleave the fewer heads"
        )
    if q.shape[:-3] != k.shape[:-3]:
        raise ValueError(
            f"q, k and v must share B, as in {layout}, {got}; x.expand(B, -1, -1, -1) repeats a single row"
        )
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q and k must have one head size D, as in {layout}, {got}; pad the smaller one with zeros")
    if 0 in (*q.shape[-2:], *v.shape[-2:]):
        raise ValueError(f"heads and head sizes must not be empty, {got}; batch and lengths may be")
    if q.shape[-2] % k.shape[-2] != 0:
        raise ValueError(
            f"H must be a multiple of G in {layout}, {got}; where heads stand before lengths, pass .transpose(-3, -2)"
        )


def check_alibi_slopes(alibi_slopes: Tensor | None, B: int | None, H: int) -> None:
    """[H], or where there is a batch [B, H]."""
    if alibi_slopes is None:
        return
    check_tensor("alibi_slopes", alibi_slopes)
    shape = list(alibi_slopes.shape)
    if B is None and alibi_slopes.dim() == 2:
        raise ValueError(
            f"alibi_slopes must be [H] in the varlen functions, got {shape}; sequences with slopes of their own are "
            "padded for flash_attn_func, or take a call each"
        )
    if shape not in ([H], [B, H]):
        rule = f"[H] = [{H}]" if B is None else f"[H] = [{H}] or [B, H] = [{B}, {H}]"
        raise ValueError(f"alibi_slopes must be {rule}, got {shape}; one for all heads is x.expand({H})")


def mask_of(causal: bool, window_size: tuple[int, int]) -> Mask:
    if not isinstance(window_size, (tuple, list)):
        raise TypeError(
            f"window_size must be (left, right), got {type(window_size).__name__} {window_size}; -1 is unbounded"
        )
    if len(window_size) != 2:
        raise ValueError(f"window_size must be (left, right), got {window_size}; -1 is unbounded")
    sides: list[int | None] = []
    for side in window_size:
        number = whole_number(side)
        if number is None:
            raise TypeError(
                f"window_size must hold whole numbers of keys, got {window_size}; -1 is unbounded, not None"
            )
        if number < -1:
            raise ValueError(f"window_size must hold numbers of keys, got {window_size}; -1 is unbounded")
        sides.append(None if number == -1 or number >= UNBOUNDED else number)
    return Mask(causal=causal, window=(sides[0], sides[1]))


def score_of(softcap: float, alibi_slopes: Tensor | None) -> Score:
    check_number("softcap", softcap)
    if not 0 <= softcap <= LARGEST:
        raise ValueError(f"softcap must be from 0 to {LARGEST:g}, got {softcap}; 0.0 leaves the scores alone")
    return Score(soft_cap=softcap or None, alibi_slopes=alibi_slopes)


def unpacked(name: str, x: Tensor, count: int, dimensions: int, layout: str) -> tuple[Tensor, ...]:
    """The `count` tensors that lie along the third dimension from the end."""
    check_tensor(name, x)
    if x.dim() != dimensions or x.shape[-3] != count:
        raise ValueError(f"{name} must be {layout}, got {list(x.shape)}; torch.stack(..., dim=-3) makes it")
    return x.unbind(-3)


def check_max_seqlen(name: str, x: int | Tensor) -> None:
    number = x.numel() == 1 if isinstance(x, Tensor) else isinstance(x, (int, float, torch.SymInt))
    if not number:
        raise ValueError(f"{name} must be a number, got {x!r}; nothing here depends on it, so any will do")
