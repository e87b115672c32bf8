"""How the Hopper kernels mask a tile of scores."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_train.ops.kernels.hopper.shim import layout_of


@gluon.jit
def hide(s, low, high, first, BLOCK: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr):
    """`s` [64, BLOCK], whose columns are numbered from `first` on: minus infinity but in columns low to high - 1, two
    numbers a row. Without LOW or HIGH there is no such bound.

    A thread has two columns of every eight. Where they begin is taken off its bounds, so that these are compared with
    constants alone: the numbers of all columns would fill registers, and those that a loop keeps are spilled.
    """
    parts = s.reshape([64, BLOCK // 8, 4, 2])
    ALL: gl.constexpr = layout_of(parts)
    PAIRS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, ALL))  # [64, 4]
    EIGHTS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, ALL)))
    eights = gl.arange(0, BLOCK // 8, EIGHTS)[None, :, None, None]
    pair = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, ALL))))[None, None, None, :]
    columns = eights * 8 + pair
    begin = first + 2 * gl.arange(0, 4, gl.SliceLayout(0, PAIRS))[None, :]
    if HIGH:
        bound = gl.convert_layout(high, gl.SliceLayout(1, PAIRS))[:, None] - begin
        parts = gl.where(columns < bound[:, None, :, None], parts, float("-inf"))
    if LOW:
        bound = gl.convert_layout(low, gl.SliceLayout(1, PAIRS))[:, None] - begin
        parts = gl.where(columns >= bound[:, None, :, None], parts, float("-inf"))
    return gl.convert_layout(parts.reshape([64, BLOCK]), layout_of(s))
