"""Train GPT models with a Triton FlashAttention op, and see what it saves."""

__version__ = "0.1.0"
