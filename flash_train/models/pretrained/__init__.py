"""Weights of GPT-2 and Llama in transformers' folders: config.json beside model.safetensors, whole or in shards.

One table says which rows of which of our parameters a tensor of transformers is; reading and writing both follow it, a
tensor at a time.
"""

from flash_train.models.pretrained.reading import is_pretrained, load_pretrained, load_pretrained_into
from flash_train.models.pretrained.writing import save_pretrained

__all__ = ["is_pretrained", "load_pretrained", "load_pretrained_into", "save_pretrained"]
