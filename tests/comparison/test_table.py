import io

import pytest
from rich.console import Console

from flash_train.comparison.results import cells
from flash_train.comparison.table import columns, print_table
from tests.comparison.made_up import MIB, row

MEMORY = {
    "peak_allocated_bytes": 29.6 * 1024 * MIB,
    "peak_reserved_bytes": 34 * 1024 * MIB,
    "predicted_bytes": 29.5 * 1024 * MIB,
}


@pytest.mark.parametrize("width", [20, 80, 200])
def test_the_table_is_never_cut_and_fits_eighty_columns(width: int):
    arms = ("naive", "sdpa_efficient", "naive_reversed")
    made = [row(arm, 131_072, device="cuda", memory=MEMORY, speed=140_516.4, losses=(5.0, 2.9224)) for arm in arms]
    file = io.StringIO()
    print_table(cells([*made, row("flash", 131_072, status="oom")]), Console(file=file, width=width, soft_wrap=True))
    printed = file.getvalue()
    assert "…" not in printed and "tokens/s" in printed and printed.count("2.9224") == printed.count("141k") == 3
    lines = printed.splitlines()
    second = next(index for index, line in enumerate(lines) if line.startswith("Predicted and measured peaks"))
    for table in (lines[:second], lines[second + 1 :]):
        assert len({len(line) for line in table if line.strip()}) == 1
    assert max(map(len, lines)) <= 80
    assert sum("29.5 GiB   29.6 GiB   -0.34 %" in line for line in lines) == 3


def test_what_was_not_predicted_is_a_dash_and_without_any_there_is_no_second_table():
    none = {"peak_allocated_bytes": 29.6 * 1024 * MIB, "prediction_refusal": "because"}
    made = cells([row("naive", 37, memory=MEMORY), row("sdpa", 37, memory=none), row("flash", 37, status="oom")])
    file = io.StringIO()
    print_table(made, Console(file=file, width=200))
    told = [line.split() for line in file.getvalue().partition("Predicted")[2].splitlines()]
    assert ["37", "sdpa", "-", "29.6", "GiB", "-"] in told
    assert ["37", "flash", "101", "MiB", "OOM", "-"] in told
    assert "predicted" not in columns(cells([row("sdpa", 37, memory=none)]))
