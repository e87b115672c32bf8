"""How a peak grows with the sequence length."""

from collections.abc import Sequence

import numpy as np


def growth_exponent(lengths: Sequence[int], peaks: Sequence[float]) -> float | None:
    """The exponent p of the best fit peak = fixed + slope * T^p, with fixed and slope not negative.

    What does not depend on T (weights, gradients, the optimizer's state) goes into `fixed`, so that a small model's
    attention is seen through it. None for fewer than three lengths, which cannot tell the three unknowns apart, and
    for a peak that does not grow.
    """
    t, peak = np.asarray(lengths, dtype=float), np.asarray(peaks, dtype=float)
    if len(t) < 3 or peak[np.argmax(t)] <= peak[np.argmin(t)] * 1.01:
        return None
    exponents = np.linspace(0.2, 3.0, 561)
    return float(exponents[np.argmin([_misfit(t / t.max(), peak, p) for p in exponents])])


def _misfit(t: np.ndarray, peak: np.ndarray, exponent: float) -> float:
    """The sum of squared relative errors of the best fit with this exponent."""
    basis = np.stack([np.ones_like(t), t**exponent], axis=1) / peak[:, None]
    solution = np.linalg.lstsq(basis, np.ones_like(t), rcond=None)[0]
    if solution[0] < 0:
        slope = basis[:, 1].sum() / (basis[:, 1] ** 2).sum()
        solution = np.array([0.0, slope])
    return float(((basis @ solution - 1) ** 2).sum())
