"""What a device can do at most: dense matrix products per second, from the makers' own figures."""

import logging
from dataclasses import dataclass

import torch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Peak:
    """Dense peak in TFLOP/s of one device, by the format of the operands; None where the device lacks the format.

    Makers like to print twice as much, for matrices half of whose entries are zero: halved here. On GeForce cards
    products accumulated in fp32 count, since those are what torch uses.
    """

    names: tuple[str, ...]
    """As the driver reports them, without the maker's "NVIDIA"."""
    half: float | None
    """fp16, and bf16 unless `bfloat` says otherwise."""
    tf32: float | None
    fp32: float
    source: str
    bfloat: bool = True


PEAKS = (
    Peak(("GB200",), 2500, 1250, 80, "NVIDIA GB200 NVL72 datasheet, per GPU"),
    Peak(("B200",), 2250, 1100, 75, "NVIDIA HGX B200 datasheet, per GPU"),
    Peak(("H200",), 989, 494, 67, "NVIDIA H200 datasheet, SXM"),
    Peak(("H200 NVL",), 835, 418, 60, "NVIDIA H200 datasheet, NVL"),
    Peak(("GH200 120GB", "GH200 480GB", "GH200 144G HBM3e"), 989, 494, 67, "NVIDIA GH200 datasheet"),
    Peak(("H100 80GB HBM3",), 989, 494, 67, "NVIDIA H100 datasheet, SXM"),
    Peak(("H100 NVL",), 835, 418, 60, "NVIDIA H100 datasheet, NVL"),
    Peak(("H100 PCIe",), 756, 378, 51, "NVIDIA H100 PCIe product brief"),
    Peak(
        ("A100-SXM4-40GB", "A100-SXM4-80GB", "A100-PCIE-40GB", "A100 80GB PCIe"),
        312,
        156,
        19.5,
        "NVIDIA A100 datasheet",
    ),
    Peak(("A30",), 165, 82, 10.3, "NVIDIA A30 datasheet"),
    Peak(("A40",), 149.7, 74.8, 37.4, "NVIDIA A40 datasheet"),
    Peak(("A10",), 125, 62.5, 31.2, "NVIDIA A10 datasheet"),
    Peak(("L4",), 121, 60, 30.3, "NVIDIA L4 datasheet"),
    Peak(("L40",), 181, 90.5, 90.5, "NVIDIA L40 datasheet"),
    Peak(("L40S",), 362, 183, 91.6, "NVIDIA L40S datasheet"),
    Peak(("RTX A6000",), 154.8, 77.4, 38.7, "NVIDIA Ampere GA102 architecture whitepaper"),
    Peak(("RTX 6000 Ada Generation",), 364.2, 182.1, 91.1, "NVIDIA Ada GPU architecture whitepaper, professional"),
    Peak(("GeForce RTX 3090",), 71, 35.6, 35.6, "NVIDIA Ampere GA102 architecture whitepaper"),
    Peak(("GeForce RTX 3090 Ti",), 80, 40, 40, "NVIDIA Ada GPU architecture whitepaper, comparison table"),
    Peak(("GeForce RTX 4090",), 165.2, 82.6, 82.6, "NVIDIA Ada GPU architecture whitepaper"),
    Peak(("GeForce RTX 5090",), 209.5, 104.8, 104.8, "NVIDIA RTX Blackwell GPU architecture whitepaper"),
    Peak(("Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB"), 125, None, 15.7, "NVIDIA V100 datasheet", bfloat=False),
    Peak(("Tesla V100-PCIE-16GB", "Tesla V100-PCIE-32GB"), 112, None, 14, "NVIDIA V100 datasheet", bfloat=False),
    Peak(("Tesla T4",), 65, None, 8.1, "NVIDIA T4 datasheet", bfloat=False),
    Peak(("AMD Instinct MI300X", "AMD Instinct MI300X OAM"), 1307.4, 653.7, 163.4, "AMD Instinct MI300X datasheet"),
    Peak(("AMD Instinct MI325X", "AMD Instinct MI325X OAM"), 1307.4, 653.7, 163.4, "AMD Instinct MI325X datasheet"),
)

_BY_NAME = {name: peak for peak in PEAKS for name in peak.names}


def peak_flops(device_name: str, operands: str) -> float | None:
    """Dense FLOP/s of the device that the driver calls `device_name`, or None if it is not in the table.

    The whole name must match: an L40S is no L40, and an H100 NVL no H100. `operands` is "bf16", "fp16", "tf32" or
    "fp32".
    """
    peak = _BY_NAME.get(device_name.removeprefix("NVIDIA ").strip())
    if peak is None or (operands == "bf16" and not peak.bfloat):
        return None
    tera = {"bf16": peak.half, "fp16": peak.half, "tf32": peak.tf32, "fp32": peak.fp32}[operands]
    return None if tera is None else tera * 1e12


def operands_of(precision: str) -> str | None:
    """The format that matrix products take under a Lightning `precision` ("bf16-mixed", ...); None if unknown."""
    if precision.startswith("bf16"):
        return "bf16"
    if precision.startswith("16"):
        return "fp16"
    if precision.startswith("32"):
        return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "fp32"
    return None


def device_peak(device: torch.device, precision: str) -> float | None:
    """FLOP/s that MFU is measured against, or None, and one logged sentence says why."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    operands = operands_of(precision)
    peak = None if operands is None else peak_flops(name, operands)
    if peak is None:
        logger.info(
            "No MFU: the peak of %r at precision %r is not in our table; SpeedMonitor(device_peak_flops=...) sets it.",
            name,
            precision,
        )
    return peak
