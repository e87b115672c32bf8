"""The README's tables of combinations are what happens."""

import re
from pathlib import Path

import pytest
import torch

from flash_train.ops.choice import interpreting
from tests.ops.combinations import FEATURES, run, text
from tests.ops.test_sweep import OLD_INTERPRETER

README = Path(__file__).parents[2] / "README.md"


@OLD_INTERPRETER
@pytest.mark.skipif(not interpreting() and not torch.cuda.is_available(), reason="the kernels cannot run here")
def test_readme_holds_the_tables_as_they_come_out():
    (held,) = re.findall(r"<!-- combinations -->\n(.*?)\n<!-- /combinations -->", README.read_text(), re.DOTALL)
    assert held.strip() == text()


@pytest.mark.parametrize("implementation", ["tiled", "naive"])
def test_all_features_that_do_not_exclude_each_other_work_together(implementation):
    excluded = {"document ids", "packed (cu_seqlens)", "T ≠ S", "output_dtype"}
    for documents in ("document ids", "packed (cu_seqlens)"):
        assert run((*(name for name in FEATURES if name not in excluded), documents), implementation) is None
