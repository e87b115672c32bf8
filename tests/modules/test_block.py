import torch
from torch import nn

from flash_train.modules.attention import SelfAttention
from flash_train.modules.block import Block
from flash_train.modules.feed_forward import GeluFeedForward

BATCH, LENGTH, WIDTH, HEADS, HIDDEN = 2, 37, 42, 6, 62


def test_a_block_is_torch_s_pre_norm_encoder_layer() -> None:
    torch.manual_seed(0)
    theirs = nn.TransformerEncoderLayer(
        WIDTH, HEADS, HIDDEN, dropout=0.0, activation="gelu", batch_first=True, norm_first=True, bias=True
    ).double()
    attention = SelfAttention(WIDTH, HEADS, bias=True)
    ours = Block(attention, GeluFeedForward(WIDTH, hidden_size=HIDDEN, bias=True), width=WIDTH, bias=True).double()
    names = {
        "attention.qkv.weight": "self_attn.in_proj_weight",
        "attention.qkv.bias": "self_attn.in_proj_bias",
        "attention.projection": "self_attn.out_proj",
        "attention_norm": "norm1",
        "feed_forward_norm": "norm2",
        "feed_forward.expand": "linear1",
        "feed_forward.projection": "linear2",
    }
    source = {name: torch.randn_like(value) for name, value in theirs.state_dict().items()}
    theirs.load_state_dict(source)
    renamed = {}
    for our_name, their_name in names.items():
        renamed |= {
            our_name + name.removeprefix(their_name): v for name, v in source.items() if name.startswith(their_name)
        }
    ours.load_state_dict(renamed)
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x, src_mask=mask, is_causal=True))
