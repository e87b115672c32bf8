"""A GPT: GPT-2 or a Llama-like model, by its arguments."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_train.models.checkpointing import CHECKPOINTING, WHOLE_BLOCKS, run_checkpointed
from flash_train.models.flops import flops_per_token
from flash_train.models.initialization import initialize
from flash_train.models.parameters import parameter_count
from flash_train.modules.attention import SelfAttention, resolve_heads
from flash_train.modules.block import Block
from flash_train.modules.checks import check_above_zero, check_choice, check_dropout, check_positive
from flash_train.modules.feed_forward import make_feed_forward
from flash_train.modules.norm import EPSILON, make_norm, normalize
from flash_train.modules.rotary import RotaryEmbedding
from flash_train.ops.checks import check_flag
from flash_train.ops.features import UNBOUNDED, Documents

POSITIONS = ("learned", "rotary", "alibi")


class GPT(nn.Module):
    """A decoder-only language model: tokens ``[B, T]`` to logits ``[B, T, V]``.

    The defaults are GPT-2 as nanoGPT trains it (learned positions, LayerNorm, exact GELU, tied embeddings, no biases);
    ``positions="rotary"``, ``norm="rms"``, ``feed_forward="swiglu"`` and fewer ``kv_heads`` make it Llama-like.

    Arguments:
        vocabulary_size: V.
        vocabulary_multiple: embedding and head have rows up to a multiple of it, for products of matrices whose sizes
            a GPU likes (64 for GPT-2's V of 50,257). The rows from V on are never read, and drawn as nothing else.
        context_length: the longest sequence that it takes.
        width, depth, heads: C, the number of blocks, and H, a divisor of C.
        kv_heads: G, a divisor of H (default H).
        positions: ``"learned"``, ``"rotary"`` (which needs an even head size) or ``"alibi"``.
        rotary_base: of rotary positions; Llama 3's is 500,000.
        window: the number of positions before its own that a position sees, in every layer; or a list of such numbers
            and None (all of them), repeated over the depth: ``[127, None]`` is gpt-oss's, whose ``sliding_window`` of
            128 counts the position itself.
        soft_cap: of the attention scores (50 in Gemma 2).
        logit_soft_cap: the logits are ``logit_soft_cap * tanh(logits / logit_soft_cap)`` (30 in Gemma 2).
        sinks: whether each head learns an attention sink.
        norm: ``"layer"`` or ``"rms"``; ``norm_epsilon`` is what it adds to the variance.
        feed_forward: ``"gelu"``, ``"gelu_tanh"`` (its approximation, which GPT-2's published weights were trained with)
            or ``"swiglu"``; ``hidden_size`` is its inner width (default 4 C, or 8/3 C).
        qk_norm: normalize queries and keys.
        tied_embeddings: whether the output head is the token embedding.
        bias: whether linear layers and LayerNorms have biases.
        dropout: of the embeddings and of each residual branch.
        attention_dropout: of the attention's probabilities.
        implementation: of attention, a name from ``flash_train.ops.attention.IMPLEMENTATIONS``.
        checkpointing: ``"block"`` stores only the input of a block and computes it again in the backward,
            ``"selective"`` stores the output and log-sum-exp of its attention as well. ``"activation"`` stores all but
            the output of the feed-forward network's activation, 4 C numbers a token for ``"gelu"``, twice 8/3 C for
            ``"swiglu"``, and computes it again in the backward.
        checkpoint_every: of the blocks each so many-th is checkpointed, the first among them.
        half_residual: under autocast the residual stream has autocast's dtype, bf16 say, in place of the weights'.

    Raises ``ValueError`` for sizes that do not fit together, numbers out of range and unknown names, and ``TypeError``
    for arguments of another class.

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
        rotary_base: float = 10_000.0,
        window: int | Sequence[int | None] | None = None,
        soft_cap: float | None = None,
        logit_soft_cap: float | None = None,
        sinks: bool = False,
        norm: str = "layer",
        norm_epsilon: float = EPSILON,
        feed_forward: str = "gelu",
        hidden_size: int | None = None,
        qk_norm: bool = False,
        tied_embeddings: bool = True,
        bias: bool = False,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        implementation: str = "flash",
        checkpointing: str = "none",
        checkpoint_every: int = 1,
        half_residual: bool = False,
        vocabulary_multiple: int = 1,
    ) -> None:
        super().__init__()
        check_positive("vocabulary_size", vocabulary_size)
        check_positive("vocabulary_multiple", vocabulary_multiple)
        check_positive("context_length", context_length)
        check_positive("depth", depth)
        check_dropout("dropout", dropout)
        check_flag("tied_embeddings", tied_embeddings)
        check_choice("positions", positions, POSITIONS)
        check_above_zero("rotary_base", rotary_base)
        if logit_soft_cap is not None:
            check_above_zero("logit_soft_cap", logit_soft_cap)
        check_choice("checkpointing", checkpointing, CHECKPOINTING)
        check_positive("checkpoint_every", checkpoint_every)
        check_flag("half_residual", half_residual)
        self.vocabulary_size = vocabulary_size
        self.context_length = context_length
        self.width = width
        self.depth = depth
        self.windows = windows_by_layer(window, depth)
        self.logit_soft_cap = logit_soft_cap
        self.implementation = implementation
        self.checkpointing = checkpointing
        self.checkpoint_every = checkpoint_every
        self.half_residual = half_residual

        rows = -(-vocabulary_size // vocabulary_multiple) * vocabulary_multiple
        _, _, head_size = resolve_heads(width, heads, kv_heads, None)
        rotary = RotaryEmbedding(head_size, context_length, base=rotary_base) if positions == "rotary" else None
        self.token_embedding = nn.Embedding(rows, width)
        self.position_embedding = nn.Embedding(context_length, width) if positions == "learned" else None
        self.embedding_dropout = nn.Dropout(dropout)

        def make_block(number: int, window: int | None) -> Block:
            attention = SelfAttention(
                width, heads, kv_heads=kv_heads, window=None if window is None else (window, 0), rotary=rotary,
                alibi=positions == "alibi", qk_norm=qk_norm, soft_cap=soft_cap, sinks=sinks, bias=bias, dropout=dropout,
                attention_dropout=attention_dropout, implementation=implementation,
            )  # fmt: skip
            network = make_feed_forward(
                feed_forward, width, hidden_size=hidden_size, bias=bias, dropout=dropout,
                recompute=checkpointing == "activation" and number % checkpoint_every == 0,
            )  # fmt: skip
            return Block(attention, network, width=width, norm=norm, bias=bias, epsilon=norm_epsilon)

        self.blocks = nn.ModuleList(make_block(number, window) for number, window in enumerate(self.windows))
        self.final_norm = make_norm(norm, width, bias=bias, epsilon=norm_epsilon)
        # A tied head is no module of its own: two modules that share a weight are parted by to_empty().
        self.head = None if tied_embeddings else nn.Linear(width, rows, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights anew, in place (see ``initialize``)."""
        initialize(self, depth=self.depth, vocabulary_size=self.vocabulary_size)

    def forward(
        self,
        tokens: Tensor,
        documents: Tensor | Documents | None = None,
        *,
        head: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """The logits ``[B, T, V]`` of the token that follows each of ``tokens`` ``[B, T]`` (int64).

        ``documents`` are integer ids ``[B, T]``: each run of equal ids is a document, whose logits are those of the
        document alone. Learned positions begin anew in each; rotary and ALiBi ones run on through the row, which is
        the same, for they act by differences. ``Documents``, made of such ids, will do as well.

        ``head`` makes what is returned, of the last hidden states ``[B, T, C]`` and the head's weight ``[V, C]``: the
        logits, or whatever a function of yours makes (a loss that never holds all logits,
        ``partial(chunked_cross_entropy, targets=targets, classes=model.vocabulary_size)``). Where the vocabulary is
        padded, the weight that it gets has rows from V on that are no tokens; ``logit_soft_cap`` is its to apply
        (``soft_cap=model.logit_soft_cap``, or ``model.cap``).

        Raises ``ValueError`` unless T is at most ``context_length`` and there is an id for each token, and
        ``TypeError`` for documents of another class.
        """
        if tokens.ndim != 2:
            raise ValueError(f"tokens must be [B, T], got shape {tuple(tokens.shape)}: add a batch dimension of 1")
        length = tokens.shape[1]
        if length > self.context_length:
            raise ValueError(
                f"the sequence must be no longer than context_length={self.context_length}, got {length} tokens: "
                "shorten it, or build the model with a larger context_length"
            )
        if documents is not None:
            documents = _prepare(documents, tokens)  # once, for all layers
        x = self.token_embedding(tokens)
        if self.position_embedding is not None:
            x = x + _learned_positions(self.position_embedding, length, documents)
        if self.half_residual and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        x = self.embedding_dropout(x)
        for number, block in enumerate(self.blocks):
            again = self.checkpointing in WHOLE_BLOCKS and number % self.checkpoint_every == 0
            if again and torch.is_grad_enabled():
                x = run_checkpointed(self.checkpointing, block, x, documents=documents)
            else:
                x = block(x, documents=documents)
        x = normalize(self.final_norm, x)
        weight = self.token_embedding.weight if self.head is None else self.head.weight
        if head is not None:
            return head(x, weight)
        logits = F.linear(x, weight)
        return self.cap(logits if len(weight) == self.vocabulary_size else logits[..., : self.vocabulary_size])

    def cap(self, logits: Tensor) -> Tensor:
        """``logits`` of the head's weight as the model means them: under ``logit_soft_cap``."""
        cap = self.logit_soft_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def flops_per_token(self, sequence_length: int) -> int:
        """Floating-point operations per token of a training step at T = ``sequence_length``, by ``flops.py``'s formula.

        It is ``6 N + 12 L C T`` without windows.
        """
        counts = parameter_count(self)
        padding = len(self.token_embedding.weight) - self.vocabulary_size  # of the head too, where it is another
        parameters = sum(counts.values()) - counts.get("position embedding", 0)
        parameters -= padding * self.width * (1 if self.head is None else 2)
        return flops_per_token(
            parameters, windows=self.windows, attention_width=self.width, sequence_length=sequence_length
        )


def windows_by_layer(window: int | Sequence[int | None] | None, depth: int) -> list[int | None]:
    """``window`` as the GPT takes it, spelled out for each layer; ``ValueError`` for what is no such pattern."""
    pattern = window if isinstance(window, Sequence) else [window]
    whole = [x for x in pattern if isinstance(x, int) and not isinstance(x, bool)]
    if not pattern or len(whole) < sum(x is not None for x in pattern) or any(not 0 <= x < UNBOUNDED for x in whole):
        raise ValueError(
            f"window must be a whole number from 0 to {UNBOUNDED - 1}, None, or a list of them, got {window!r}: "
            "[1023, None] alternates a window of 1024 positions, the own among them, with layers that see all"
        )
    return [pattern[layer % len(pattern)] for layer in range(depth)]


def _prepare(documents: Tensor | Documents, tokens: Tensor) -> Documents:
    if not isinstance(documents, Tensor | Documents):
        raise TypeError(
            f"documents must be a [B, T] tensor of ids or Documents, got {type(documents).__name__}: "
            "make one with torch.as_tensor"
        )
    ids = documents if isinstance(documents, Tensor) else documents.query_document
    if ids.shape != tokens.shape or ids.device != tokens.device:
        raise ValueError(
            f"documents must give each of the tokens {list(tokens.shape)} on {tokens.device} an id, got "
            f"{list(ids.shape)} on {ids.device}: make them as (tokens == separator).cumsum(1)"
        )
    return Documents.from_ids(documents) if isinstance(documents, Tensor) else documents


def _learned_positions(embedding: nn.Embedding, length: int, documents: Documents | None) -> Tensor:
    """``[T, C]``, or ``[B, T, C]`` where positions begin anew in each document."""
    if documents is None:
        return embedding.weight[:length]
    first = documents.bounds[:, 0][documents.query_document.long()]
    return embedding(torch.arange(length, device=first.device) - first)
