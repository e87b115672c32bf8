"""What a validation says of a model: loss, perplexity and bits per byte, of each source of text and of all together."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Score", "score_sources", "total_score"]


@dataclass(frozen=True, kw_only=True)
class Score:
    """Loss in nats per token, the mean over `tokens` targets; `bytes` is how much text they stand for, None unknown."""

    tokens: int
    loss: float
    bytes: float | None = None

    @property
    def perplexity(self) -> float:
        """e to the loss: per token, so that it compares models of one tokenizer only."""
        return math.inf if self.loss > 709 else math.exp(self.loss)  # where float64 ends

    @property
    def bits_per_byte(self) -> float | None:
        """The loss in bits over the bytes of the text, which compares models of any tokenizers."""
        return None if not self.bytes else self.loss * self.tokens / math.log(2.0) / self.bytes

    def metrics(self) -> dict[str, float]:
        """What is known, by name."""
        bits = {} if self.bits_per_byte is None else {"bits_per_byte": self.bits_per_byte}
        return {"loss": self.loss, "perplexity": self.perplexity, **bits}


def score_sources(sums: Sequence[Sequence[float]], bytes_per_token: Mapping[str, float | None]) -> dict[str, Score]:
    """The score of each source of which any token was seen.

    Args:
        sums: (sum of the token losses, number of tokens) of each source.
        bytes_per_token: of each source, by its name, in the order of `sums`; None where nobody knows.
    """
    scores = {}
    for (name, width), (loss_sum, tokens) in zip(bytes_per_token.items(), sums, strict=True):
        if tokens:
            size = None if width is None else width * tokens
            scores[name] = Score(tokens=int(tokens), loss=loss_sum / tokens, bytes=size)
    return scores


def total_score(scores: Sequence[Score]) -> Score:
    """All tokens of all sources together, not a number where there is none; bytes are known where all of theirs are."""
    tokens = sum(score.tokens for score in scores)
    sizes = [score.bytes for score in scores]
    return Score(
        tokens=tokens,
        loss=sum(score.loss * score.tokens for score in scores) / tokens if tokens else math.nan,
        bytes=None if None in sizes else sum(size for size in sizes if size is not None),
    )
