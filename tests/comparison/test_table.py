import io

import pytest
from rich.console import Console

from flash_train.comparison.results import cells
from flash_train.comparison.table import print_table
from tests.comparison.made_up import MIB, row

MEMORY = {"peak_allocated_bytes": 29.6 * 1024 * MIB, "peak_reserved_bytes": 34 * 1024 * MIB}


@pytest.mark.parametrize("width", [20, 80, 200])
def test_the_table_is_never_cut_and_fits_eighty_columns(width: int):
    arms = ("naive", "sdpa_efficient", "naive_reversed")
    made = [row(arm, 131_072, device="cuda", memory=MEMORY, speed=140_516.4, losses=(5.0, 2.9224)) for arm in arms]
    file = io.StringIO()
    print_table(cells([*made, row("flash", 131_072, status="oom")]), Console(file=file, width=width, soft_wrap=True))
    printed = file.getvalue()
    assert "…" not in printed and "tokens/s" in printed and printed.count("2.9224") == printed.count("141k") == 3
    assert len({len(line) for line in printed.splitlines() if line.strip()}) == 1
    assert max(map(len, printed.splitlines())) <= 80
