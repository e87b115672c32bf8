"""What a training step costs, by formula: the numerator of model FLOPs utilization."""


def flops_per_token(parameters: int, *, depth: int, attention_width: int, sequence_length: int) -> int:
    """Floating-point operations per token, forward and backward: ``6 N + 12 L C T``.

    ``parameters`` is N, all parameters but learned positions, which are added and never multiplied (a tied embedding
    is multiplied, as the output head); ``attention_width`` is C = heads * head_size; ``sequence_length`` is T.
    Every multiply-add counts 2, the backward twice the forward. It is the convention of PaLM (Chowdhery et al., 2022,
    appendix B) and nanoGPT: causal attention is not halved and recomputation adds nothing, so that one number serves
    every attention implementation and figures compare across systems.
    """
    return 6 * parameters + 12 * depth * attention_width * sequence_length
