"""A GPT: GPT-2 or a Llama-like model, by its arguments."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flash_train.models.flops import flops_per_token
from flash_train.models.initialization import initialize
from flash_train.models.parameters import parameter_count
from flash_train.modules.attention import SelfAttention, resolve_heads
from flash_train.modules.block import Block
from flash_train.modules.checks import check_choice, check_positive
from flash_train.modules.feed_forward import make_feed_forward
from flash_train.modules.norm import make_norm
from flash_train.modules.rotary import RotaryEmbedding

POSITIONS = ("learned", "rotary")
CHECKPOINTING = ("none", "block")


class GPT(nn.Module):
    """A decoder-only language model: tokens ``[B, T]`` to logits ``[B, T, V]``.

    The defaults are GPT-2 as nanoGPT trains it (learned positions, LayerNorm, exact GELU, tied embeddings, no biases);
    ``positions="rotary"``, ``norm="rms"``, ``feed_forward="swiglu"`` and fewer ``kv_heads`` make it Llama-like.

    Arguments:
        vocabulary_size: V.
        context_length: the longest sequence that it takes.
        width, depth, heads: C, the number of blocks, and H, a divisor of C.
        kv_heads: G, a divisor of H (default H).
        positions: ``"learned"`` or ``"rotary"`` (which needs an even head size).
        norm: ``"layer"`` or ``"rms"``.
        feed_forward: ``"gelu"`` or ``"swiglu"``; ``hidden_size`` is its inner width (default 4 C, or 8/3 C).
        qk_norm: normalize queries and keys.
        tied_embeddings: whether the output head is the token embedding.
        bias: whether linear layers and LayerNorms have biases.
        dropout: of the embeddings and of each residual branch.
        implementation: of attention, a name from ``flash_train.ops.attention.IMPLEMENTATIONS``.
        checkpointing: ``"block"`` stores only the input of each block and computes it again in the backward.

    Raises ``ValueError`` for sizes that do not fit together and for unknown names.

    On the meta device, ``to_empty(device=...)`` and ``reset_parameters()`` complete the model.
    """

    def __init__(
        self,
        *,
        vocabulary_size: int,
        context_length: int,
        width: int,
        depth: int,
        heads: int,
        kv_heads: int | None = None,
        positions: str = "learned",
        norm: str = "layer",
        feed_forward: str = "gelu",
        hidden_size: int | None = None,
        qk_norm: bool = False,
        tied_embeddings: bool = True,
        bias: bool = False,
        dropout: float = 0.0,
        implementation: str = "flash",
        checkpointing: str = "none",
    ) -> None:
        super().__init__()
        check_positive("vocabulary_size", vocabulary_size)
        check_positive("context_length", context_length)
        check_positive("depth", depth)
        check_choice("positions", positions, POSITIONS)
        check_choice("checkpointing", checkpointing, CHECKPOINTING)
        self.context_length = context_length
        self.width = width
        self.depth = depth
        self.implementation = implementation
        self.checkpointing = checkpointing

        _, _, head_size = resolve_heads(width, heads, kv_heads, None)
        rotary = RotaryEmbedding(head_size, context_length) if positions == "rotary" else None
        self.token_embedding = nn.Embedding(vocabulary_size, width)
        self.position_embedding = nn.Embedding(context_length, width) if positions == "learned" else None
        self.embedding_dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(
                SelfAttention(
                    width,
                    heads,
                    kv_heads=kv_heads,
                    rotary=rotary,
                    qk_norm=qk_norm,
                    bias=bias,
                    dropout=dropout,
                    implementation=implementation,
                ),
                make_feed_forward(feed_forward, width, hidden_size=hidden_size, bias=bias, dropout=dropout),
                width=width,
                norm=norm,
                bias=bias,
            )
            for _ in range(depth)
        )
        self.final_norm = make_norm(norm, width, bias=bias)
        # A tied head is no module of its own: two modules that share a weight are parted by to_empty().
        self.head = None if tied_embeddings else nn.Linear(width, vocabulary_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights anew, in place (see ``initialize``)."""
        initialize(self, depth=self.depth)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits ``[B, T, V]`` of the token that follows each of ``tokens`` ``[B, T]`` (int64).

        Raises ``ValueError`` unless T is at most ``context_length``.
        """
        if tokens.ndim != 2:
            raise ValueError(f"tokens must be [B, T], got shape {tuple(tokens.shape)}: add a batch dimension of 1")
        length = tokens.shape[1]
        if length > self.context_length:
            raise ValueError(
                f"the sequence must be no longer than context_length={self.context_length}, got {length} tokens: "
                "shorten it, or build the model with a larger context_length"
            )
        x = self.token_embedding(tokens)
        if self.position_embedding is not None:
            x = x + self.position_embedding.weight[:length]
        x = self.embedding_dropout(x)
        for block in self.blocks:
            x = self._run(block, x)
        weight = self.token_embedding.weight if self.head is None else self.head.weight
        return F.linear(self.final_norm(x), weight)

    def _run(self, block: nn.Module, x: Tensor) -> Tensor:
        if self.checkpointing == "block" and torch.is_grad_enabled():
            return checkpoint(block, x, use_reentrant=False)
        return block(x)

    def flops_per_token(self, sequence_length: int) -> int:
        """Floating-point operations per token of a training step at T = ``sequence_length``: ``6 N + 12 L C T``."""
        counts = parameter_count(self)
        parameters = sum(counts.values()) - counts.get("position embedding", 0)
        return flops_per_token(
            parameters, depth=self.depth, attention_width=self.width, sequence_length=sequence_length
        )
