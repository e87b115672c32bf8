"""Text from a GPT, token by token: a plain loop that runs the whole context for each."""

from collections.abc import Collection

import torch
from torch import Tensor

from flash_train.models.gpt import GPT
from flash_train.modules.checks import check_positive


@torch.inference_mode()
def generate(
    model: GPT,
    prompt: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    end: Collection[int] = (),
    vocabulary_size: int | None = None,
    generator: torch.Generator | None = None,
) -> list[Tensor]:
    """What follows ``prompt`` ``[B, T]`` (int64) in each row: new tokens, at most ``max_new_tokens`` of them.

    The model sees the last ``context_length`` tokens, from position 0 on, and is left in the mode, training or
    evaluation, that it was in. The same ``generator`` seed gives the same tokens on the same device and versions.

    Arguments:
        temperature: divides the logits; 0 takes the likeliest token always.
        top_k: draw from the k likeliest tokens only.
        top_p: draw from the fewest likeliest tokens whose probabilities, after ``top_k``, sum to at least p.
        end: tokens at which a row ends; they are no part of what is returned.
        vocabulary_size: tokens from it on are never drawn (default: the model's), for a tokenizer that has fewer.
        generator: of the draws, on the model's device (default: torch's own).

    Raises ``ValueError`` for an empty prompt, tokens that the model does not have, numbers out of range, and logits
    that are not finite.
    """
    check_sampling(max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p)
    size = model.vocabulary_size if vocabulary_size is None else vocabulary_size
    if prompt.ndim != 2 or prompt.shape[1] == 0:
        raise ValueError(f"prompt must be [B, T] with at least one token, got {list(prompt.shape)}: begin with one")
    if prompt.numel() and not 0 <= prompt.min() <= prompt.max() < model.vocabulary_size:
        raise ValueError(
            f"prompt must hold tokens from 0 to {model.vocabulary_size - 1}, got {prompt.min()} to {prompt.max()}: "
            "use the tokenizer that the model was trained with"
        )
    mode = model.training
    model.eval()
    try:
        tokens = prompt
        ends = torch.tensor(sorted(end), dtype=prompt.dtype, device=prompt.device)
        ended = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
        for _ in range(max_new_tokens):
            logits = model.cap(model(tokens[:, -model.context_length :], head=_last)[:, :size])
            new = sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
            tokens = torch.cat((tokens, new[:, None]), dim=1)
            ended |= torch.isin(new, ends)
            if ended.all():
                break
    finally:
        model.train(mode)
    return [_until(row, ends) for row in tokens[:, prompt.shape[1] :]]


def _last(hidden: Tensor, weight: Tensor) -> Tensor:
    """Logits ``[B, V]`` of the last position alone: V is the largest size here."""
    return hidden[:, -1] @ weight.to(hidden.dtype).T


def _until(row: Tensor, ends: Tensor) -> Tensor:
    found = torch.isin(row, ends).nonzero()
    return row[: int(found[0])] if len(found) else row


def sample(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """A token ``[B]`` for each row of ``logits`` ``[B, V]``, drawn as ``generate`` says.

    Raises ``ValueError`` for logits that are not finite.
    """
    if not logits.isfinite().all():
        raise ValueError(
            "logits must be finite, and these are not: the weights are broken (take an earlier checkpoint), or the "
            "dtype has too small a range (fp16)"
        )
    if temperature == 0:
        return logits.argmax(-1)
    # float64, and the largest at 0: no temperature is so small that it divides to infinity.
    logits, order = logits.double().sort(dim=-1, descending=True, stable=True)
    probabilities = ((logits - logits[:, :1]) / temperature).softmax(-1)
    if top_k is not None:
        probabilities[:, top_k:] = 0
        probabilities /= probabilities.sum(-1, keepdim=True)
    if top_p is not None:
        likelier = probabilities.cumsum(-1) - probabilities
        probabilities[:, 1:].masked_fill_(likelier[:, 1:] >= top_p, 0)
    return order.gather(-1, torch.multinomial(probabilities, 1, generator=generator))[:, 0]


def check_sampling(*, max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raise ``ValueError`` for numbers that ``generate`` does not take."""
    check_positive("max_new_tokens", max_new_tokens)
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be a number from 0 on, got {temperature}: 0 takes the likeliest token")
    if top_k is not None:
        check_positive("top_k", top_k)
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be a probability above 0 and up to 1, got {top_p}: None leaves it out")
