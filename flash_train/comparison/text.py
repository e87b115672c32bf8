"""Numbers as people read them, and strings as Hydra does."""

from collections.abc import Mapping
from typing import Any

from flash_train.memory.sizes import human_bytes as human_bytes


def human_count(number: float) -> str:
    """`number` with three digits and thousands as k, M or G: 124M."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g}{suffix}"
    return f"{number:.3g}"


def human_seconds(seconds: float) -> str:
    """`seconds` as 42 s, 3:05 or 1:02:09."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def human_ratio(ratio: float) -> str:
    """A ratio with two digits: 0.042x, 3.1x, 24x."""
    if ratio < 0.95:
        return f"{ratio:.2g}x"
    return f"{ratio:.1f}x" if ratio < 9.95 else f"{ratio:.0f}x"


def quoted(value: object) -> str:
    """`value` as a quoted string of Hydra's override grammar, so that it may hold blanks, commas or '='."""
    text = str(value).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"


def levers(config: Mapping[str, Any]) -> list[str]:
    """What in a run's configuration changes memory, speed or loss and not the model, in a few words each."""
    precision, checkpointing, compiled = config["precision"], config["checkpointing"], config["compile"]
    parts = [precision["lightning"]]
    if precision["residual"] == "bf16" and precision["lightning"] == "bf16-mixed":
        parts.append("bf16 residual")
    if precision.get("master_weights"):
        parts.append("fp32 masters and gradients" if precision.get("fp32_gradients") else "fp32 masters")
    if precision["fp8"]:
        parts.append(f"linear layers in fp8 ({precision['fp8']})")
    if compiled["enabled"]:
        share = compiled["memory_budget"]
        parts.append("compiled" if share == 1.0 else f"compiled to keep {share:g} of its activations")
    if checkpointing["granularity"] != "none":
        each = checkpointing["every"]
        which = "each block" if each == 1 else f"one block in {each}"
        kept = ", attention's results kept" if checkpointing["granularity"] == "selective" else ""
        what = "the activation of " if checkpointing["granularity"] == "activation" else ""
        parts.append(f"checkpointing of {what}{which}{kept}")
    if chunk_rows := config["loss"]["chunk_rows"]:
        parts.append(f"loss in chunks of {chunk_rows:,} rows")
    if z_loss := config["loss"].get("z_loss"):
        parts.append(f"z-loss {z_loss:g}")
    if (multiple := config["vocabulary_multiple"]) != 1:
        parts.append(f"vocabulary padded to a multiple of {multiple}")
    return parts
