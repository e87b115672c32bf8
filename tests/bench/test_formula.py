"""The formulas of the bytes, against small cases counted by hand."""

from typing import Any

import pytest

from flash_train.bench.cases import read_case
from flash_train.bench.formula import (
    Tiles,
    hopper_bytes,
    keys_read,
    least_bytes,
    naive_bytes,
    queries_read,
    triton_bytes,
)

# in 2-byte elements q is 360 bytes, k 168, v 112, the output 240, a T x S matrix 840, a row of fp32 numbers 240
ODD = {"B": 2, "H": 6, "G": 2, "T": 5, "S": 7, "D": 3, "E": 2, "causal": True}
TILES = Tiles(2, 3)  # 19 rows of keys and 11 of queries, the first row of READ


def test_the_least_is_each_tensor_once() -> None:
    case = read_case(ODD, key="case")
    assert least_bytes(case, "forward", 2) == 360 + 168 + 112 + 240
    assert least_bytes(case, "backward", 2) == 2 * (360 + 168 + 112) + 240
    assert least_bytes(case, "forward", 4) == 2 * least_bytes(case, "forward", 2)


def test_naive_writes_and_reads_the_scores_and_the_probabilities() -> None:
    case = read_case(ODD, key="case")
    assert naive_bytes(case, "forward", 2) == (360 + 168 + 840) + (840 + 840) + (840 + 112 + 240)
    products = [840 + 240 + 112, 240 + 112 + 840, 840 + 168 + 360, 840 + 360 + 168]  # dV, dP, dQ, dK
    assert naive_bytes(case, "backward", 2) == sum(products) + 3 * 840


READ: list[tuple[dict[str, Any], Tiles, int, int]] = [
    # queries 0-1 see keys 0-3, 2-3 see 0-5, 4 sees all 7; each in whole tiles of 3 keys, the last of 1
    ({"T": 5, "S": 7, "causal": True}, Tiles(2, 3), 6 + 6 + 7, 5 + 5 + 1),
    # each query and the one before it
    ({"T": 6, "causal": True, "window": [1, None]}, Tiles(2, 2), 2 + 4 + 4, 4 + 4 + 2),
    # the middle tiles belong to both documents
    ({"T": 6, "documents": [3, 3]}, Tiles(2, 2), 4 + 6 + 4, 4 + 6 + 4),
    # queries 0 and 1 see nothing
    ({"T": 6, "S": 4, "causal": True}, Tiles(2, 2), 0 + 2 + 4, 4 + 2),
    ({"T": 5, "S": 7}, Tiles(4, 8), 2 * 7, 5),
]


@pytest.mark.parametrize(
    ("given", "tiles", "keys", "queries"), READ, ids=lambda x: str(x) if isinstance(x, dict) else ""
)
def test_a_tile_reads_the_tiles_that_it_meets(given: dict, tiles: Tiles, keys: int, queries: int) -> None:
    case = read_case({"B": 1, "H": 1, "D": 1} | given, key="case")
    assert (keys_read(case, tiles), queries_read(case, tiles)) == (keys, queries)


def test_the_portable_kernels_read_tiles_again_for_each_query_head() -> None:
    case = read_case(ODD, key="case")
    keys, queries = 12 * 19 * (3 + 2) * 2, 12 * 11 * ((3 + 2) * 2 + 8)
    assert triton_bytes(case, "forward", 2, {"forward": TILES}) == 360 + keys + 240 + 240
    delta, dkdv = 240 + 240 + 240, (168 + 112) + queries + (168 + 112)
    dq = 360 + 240 + 2 * 240 + keys + 360
    assert triton_bytes(case, "backward", 2, {"dkdv": TILES, "dq": TILES}) == delta + dkdv + dq


def test_the_hopper_backward_adds_to_an_fp32_gradient() -> None:
    case = read_case(ODD, key="case")
    assert hopper_bytes(case, "forward", 2, TILES) == triton_bytes(case, "forward", 2, {"forward": TILES})
    zeros, rows = 720, 240 + 240 + 3 * 240
    queries = 12 * 11 * ((3 + 2) * 2 + 8 + 2 * 3 * 4)
    assert hopper_bytes(case, "backward", 2, TILES) == zeros + rows + 2 * (168 + 112) + queries + 720 + 360


def test_one_tile_for_all_is_the_least_and_the_log_sum_exp() -> None:
    case = read_case({"B": 2, "H": 3, "T": 37, "S": 41, "D": 5}, key="case")
    assert triton_bytes(case, "forward", 2, {"forward": Tiles(64, 64)}) == (
        least_bytes(case, "forward", 2) + 2 * 3 * 37 * 4
    )
