"""What a training step costs, by formula: the numerator of model FLOPs utilization."""

from collections.abc import Sequence


def flops_per_token(
    parameters: int, *, windows: Sequence[int | None], attention_width: int, sequence_length: int
) -> int:
    """Floating-point operations per token, forward and backward: ``6 N + 12 L C T`` where every layer sees all.

    ``parameters`` is N, all parameters but learned positions, which are added and never multiplied (a tied embedding
    is multiplied, as the output head); ``attention_width`` is C = heads * head_size; ``sequence_length`` is T;
    ``windows`` has one entry for each of the L layers, the number of positions before its own that a position sees,
    None for all of them. A layer with a window w costs ``12 C min(T, w + 1)``.

    Every multiply-add counts 2, the backward twice the forward. It is the convention of PaLM (Chowdhery et al., 2022,
    appendix B) and nanoGPT: causal attention is not halved and recomputation adds nothing, so that one number serves
    every attention implementation and figures compare across systems. Windows are counted as in nanochat
    (``estimate_flops``), the first positions of a row with a whole window. Packed documents are not counted, for where
    they end is known to the data alone: with them the number is that of whole rows, and too high.
    """
    keys = sum(sequence_length if window is None else min(sequence_length, window + 1) for window in windows)
    return 6 * parameters + 12 * attention_width * keys
