"""The table of peaks: whole names, dense figures, a source for each."""

import logging

import pytest
import torch

from flash_train.diagnostics.peak_flops import PEAKS, device_peak, operands_of, peak_flops


@pytest.mark.parametrize(
    ("name", "operands", "flops"),
    [
        ("NVIDIA H200", "bf16", 989e12),
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 NVL", "bf16", 835e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156e12),
        ("NVIDIA L40", "bf16", 181e12),
        ("NVIDIA L40S", "bf16", 362e12),
        ("NVIDIA L4", "bf16", 121e12),
        ("NVIDIA GeForce RTX 4090", "fp16", 165.2e12),
        ("AMD Instinct MI300X", "bf16", 1307.4e12),
        ("Tesla T4", "bf16", None),  # the chip has no bf16 products
        ("NVIDIA H100", "bf16", None),  # no driver says so: which of the three would it be?
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),
    ],
)
def test_a_device_is_known_by_its_whole_name(name: str, operands: str, flops: float | None) -> None:
    assert peak_flops(name, operands) == flops


def test_each_entry_is_unique_and_names_its_source() -> None:
    names = [name for peak in PEAKS for name in peak.names]
    assert len(set(names)) == len(names)
    assert all(peak.source.startswith(("NVIDIA", "AMD")) for peak in PEAKS)


def test_dense_figures_halve_with_the_width_of_the_operands() -> None:
    for peak in PEAKS:
        if peak.half is not None and peak.tf32 is not None:
            assert 1.9 < peak.half / peak.tf32 < 2.1, peak.names
            assert peak.fp32 <= peak.tf32, peak.names


def test_precision_decides_what_the_peak_is() -> None:
    precisions = ("bf16-mixed", "bf16-true", "16-mixed", "32-true", "64-true", "transformer-engine")
    assert [operands_of(each) for each in precisions] == ["bf16", "bf16", "fp16", "fp32", None, None]


def test_an_unknown_device_is_answered_with_one_sentence(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert device_peak(torch.device("cpu"), "bf16-mixed") is None
    assert caplog.messages == [
        "No MFU: the peak of 'cpu' at precision 'bf16-mixed' is not in our table; "
        "SpeedMonitor(device_peak_flops=...) sets it."
    ]
