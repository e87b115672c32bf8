"""The initial weights of a model, all in one function."""

import math

from torch import nn

from flash_train.modules.attention import SelfAttention

# GPT-2's; about 1 / sqrt(C) at its width of 768 to 1600.
STANDARD_DEVIATION = 0.02


def initialize(model: nn.Module, *, depth: int, vocabulary_size: int) -> None:
    """Draw every weight of ``model`` anew, in place, from torch's global generator.

    Matrices, embeddings and sinks come from N(0, 0.02), biases are 0 and gains 1. Modules called ``projection`` end a
    residual branch; their deviation is divided by ``sqrt(2 depth)``, because the stream adds up two branches a layer
    (Radford et al., 2019, section 2.3). The draws do not depend on the attention implementation, so that one seed
    gives every arm of a comparison the same weights; nor on rows of ``token_embedding`` and ``head`` from
    ``vocabulary_size`` on, which are padding and 0.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            ends_branch = name.endswith(".projection")
            deviation = STANDARD_DEVIATION / math.sqrt(2 * depth) if ends_branch else STANDARD_DEVIATION
            rows = vocabulary_size if name in ("token_embedding", "head") else len(module.weight)
            nn.init.normal_(module.weight.detach()[:rows], std=deviation)
            nn.init.zeros_(module.weight.detach()[rows:])
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm | SelfAttention):
            module.reset_parameters()
