"""Attention with linear biases: the slopes (Press et al., 2021, arXiv 2108.12409)."""


def alibi_slopes(heads: int) -> list[float]:
    """The paper's slopes for H = ``heads`` heads, a geometric series that starts at its own ratio.

    With n the largest power of two up to H, the first n heads have ``2 ** (-8 i / n)``, i from 1 to n; the others
    have every second one of the series for 2 n heads, from its first on, as the authors' code does.
    """
    n = 1 << (heads.bit_length() - 1)
    between = range(1, 2 * (heads - n), 2)
    return [2.0 ** (-8 * i / n) for i in range(1, n + 1)] + [2.0 ** (-4 * i / n) for i in between]
