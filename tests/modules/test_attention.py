from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_train.modules import attention
from flash_train.modules.attention import SelfAttention
from flash_train.modules.rotary import RotaryEmbedding
from flash_train.ops.features import split_heads

BATCH, LENGTH, WIDTH, HEADS, KV_HEADS, HEAD_SIZE = 2, 37, 42, 6, 2, 10
ON_CPU = ("flash", "tiled", "sdpa", "sdpa_math", "naive", "naive_reversed")


def attend_by_definition(module: SelfAttention, x: Tensor) -> Tensor:
    """What the module computes, spelled with torch's own attention on copied, repeated heads."""
    q, k, v = module.qkv(x).split([HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE], dim=-1)
    q = q.reshape(BATCH, LENGTH, HEADS, HEAD_SIZE)
    k, v = (x.reshape(BATCH, LENGTH, KV_HEADS, HEAD_SIZE) for x in (k, v))
    if module.query_norm is not None and module.key_norm is not None:
        q, k = module.query_norm(q), module.key_norm(k)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if module.rotary is not None:
        q, k = module.rotary(q), module.rotary(k)
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    output = F.scaled_dot_product_attention(q, k, v, is_causal=module.causal)
    return module.projection(output.transpose(1, 2).reshape(BATCH, LENGTH, HEADS * HEAD_SIZE))


@pytest.mark.parametrize("implementation", ON_CPU)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dressed", [False, True], ids=["plain", "normalized-and-rotated"])
def test_every_implementation_is_attention(implementation: str, causal: bool, dressed: bool) -> None:
    torch.manual_seed(0)
    module = SelfAttention(
        WIDTH,
        HEADS,
        kv_heads=KV_HEADS,
        head_size=HEAD_SIZE,
        causal=causal,
        rotary=RotaryEmbedding(HEAD_SIZE, LENGTH) if dressed else None,
        qk_norm=dressed,
        bias=True,
        implementation=implementation,
    ).double()
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(module(x), attend_by_definition(module, x))


@pytest.fixture
def op_tensors(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """q, k, v and the output of the last call of the op."""
    tensors: list[Tensor] = []
    apart, joint = attention.flash_attention, attention.flash_attention_qkv

    def record(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        tensors[:] = q, k, v, apart(q, k, v, **options)
        return tensors[-1]

    def record_jointly(qkv: Tensor, heads: int, **options: Any) -> Tensor:
        tensors[:] = *split_heads(qkv, heads), joint(qkv, heads, **options)
        return tensors[-1]

    monkeypatch.setattr(attention, "flash_attention", record)
    monkeypatch.setattr(attention, "flash_attention_qkv", record_jointly)
    return tensors


def test_nothing_is_copied_on_the_way_into_the_op_and_out(op_tensors: list[Tensor]) -> None:
    module = SelfAttention(WIDTH, HEADS, kv_heads=KV_HEADS, head_size=HEAD_SIZE)
    at_the_doors: list[Tensor] = []

    def keep_output(_module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
        at_the_doors.append(output)

    module.qkv.register_forward_hook(keep_output)
    module.projection.register_forward_pre_hook(lambda _, inputs: at_the_doors.extend(inputs))
    module(torch.randn(BATCH, LENGTH, WIDTH))
    q, k, v, output = op_tensors
    assert q.shape == output.shape == (BATCH, HEADS, LENGTH, HEAD_SIZE)
    assert k.shape == v.shape == (BATCH, KV_HEADS, LENGTH, HEAD_SIZE)
    storages = [x.untyped_storage().data_ptr() for x in (*at_the_doors, q, k, v, output)]
    projected, attended = storages[:2]
    assert storages[2:] == [projected, projected, projected, attended]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_reaches_the_op_in_half_precision(dtype: torch.dtype, op_tensors: list[Tensor]) -> None:
    module = SelfAttention(WIDTH, HEADS, head_size=HEAD_SIZE, rotary=RotaryEmbedding(HEAD_SIZE, LENGTH), qk_norm=True)
    with torch.autocast("cpu", dtype=dtype):
        module(torch.randn(BATCH, LENGTH, WIDTH)).sum().backward()
    assert [x.dtype for x in op_tensors] == [dtype] * 4


def test_residual_dropout_acts_in_training_alone() -> None:
    torch.manual_seed(0)
    module = SelfAttention(WIDTH, HEADS, dropout=0.5)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    dropped = (module(x) == 0).double().mean().item()
    assert 0.4 < dropped < 0.6
    assert not (module.eval()(x) == 0).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"heads": 5}, "heads must divide width, got heads=5 and width=42: choose a width of 45"),
        ({"heads": 6, "kv_heads": 4}, "kv_heads must divide heads, got kv_heads=4 and heads=6: choose a divisor of 6"),
        ({"heads": 0}, "heads must be a positive integer, got 0"),
        ({"heads": 6, "head_size": -1}, "head_size must be a positive integer, got -1"),
        ({"heads": 6, "implementation": "fast"}, "implementation must be one of flash, .*, got 'fast'"),
        ({"heads": 6, "rotary": RotaryEmbedding(10, 37)}, r"these have 7: build it as RotaryEmbedding\(7,"),
        ({"heads": 6, "alibi": [0.5, 0.25]}, r"alibi must have one slope a head, \[6\], got shape \[2\]: True makes"),
        ({"heads": 6, "alibi": torch.ones(6, 1)}, r"one slope a head, \[6\], got shape \[6, 1\]"),
        ({"heads": 6, "alibi": torch.tensor(0.5)}, r"one slope a head, \[6\], got shape \[\]"),
        ({"heads": 6, "alibi": 1}, r"one slope a head, \[6\], got shape \[\]"),
        ({"heads": 6, "alibi": None}, "alibi must be True, False or one number for each of heads=6, got None"),
        ({"heads": 6, "alibi": ["steep"] * 6}, "alibi must be True, False or one number for each of heads=6"),
        (
            {"heads": 6, "alibi": [0.5] * 5 + [float("nan")]},
            r"alibi must be finite in fp32, got \[0.5, .*nan\]: a slope",
        ),
        ({"heads": 6, "alibi": [1e39] * 6}, r"alibi must be finite in fp32, got \[1e\+39, "),
        ({"heads": 6, "alibi": nn.Parameter(torch.ones(6))}, r"not learned, .* requires a gradient: give alibi.detach"),
        ({"heads": 6, "alibi": [nn.Parameter(torch.ones(()))] * 6}, "not learned, .* requires a gradient"),
        ({"heads": 6, "attention_dropout": 1.0}, r"attention_dropout must be a number in \[0, 1\), got 1.0: 0 drops"),
        ({"heads": 6, "attention_dropout": "0.1"}, r"attention_dropout must be a number in \[0, 1\), got '0.1'"),
        ({"heads": 6, "attention_dropout": None}, r"attention_dropout must be a number in \[0, 1\), got None: 0 drops"),
        ({"heads": 6, "dropout": float("nan")}, r"dropout must be a number in \[0, 1\), got nan"),
        ({"heads": 6, "scale": 0.0}, r"scale must be positive and at most .*, got 0.0: None is 1 / sqrt\(head_size\)"),
        ({"heads": 6, "scale": 1e39}, r"scale must be positive and at most 1e\+38, got 1e\+39: None is"),
        ({"heads": 6, "window": (-1, 0)}, "window must hold whole numbers from 0"),
        ({"heads": 6, "soft_cap": 0.0}, "soft_cap must be positive and .*, got 0.0"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SelfAttention(WIDTH, **arguments)


@pytest.mark.parametrize("argument", ["causal", "sinks", "deterministic", "qk_norm", "bias"])
def test_flags_that_are_none_are_refused_when_the_module_is_made(argument: str) -> None:
    flag: dict[str, Any] = {argument: "no"}
    with pytest.raises(TypeError, match=rf"{argument} must be True or False, got str no; make one with bool"):
        SelfAttention(WIDTH, HEADS, **flag)


def test_a_rotation_of_another_class_is_refused_when_the_module_is_made() -> None:
    rotary: Any = True
    with pytest.raises(TypeError, match=r"rotary must be a RotaryEmbedding, got bool: .* RotaryEmbedding\(7, co"):
        SelfAttention(WIDTH, HEADS, rotary=rotary)


@pytest.mark.parametrize("shape", [(LENGTH, WIDTH), (BATCH, 3, LENGTH, WIDTH), (BATCH, LENGTH, WIDTH + 1)])
def test_input_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"must be \[B, T, C\] with C = width = 42, got \[{shape[0]}, .*unsqueeze"):
        SelfAttention(WIDTH, HEADS)(torch.randn(shape))
