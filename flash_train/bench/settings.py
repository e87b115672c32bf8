"""What a run of `flash-bench` is asked to do, checked before anything is timed."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flash_train.bench.cases import DIRECTIONS, Case, read_case
from flash_train.bench.contestants import CONTESTANTS

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The keys of conf/bench.yaml; what each means stands there."""

    cases: tuple[Case, ...]
    contestants: tuple[str, ...]
    directions: tuple[str, ...]
    device: torch.device
    dtype: torch.dtype
    rounds: int
    seconds: float
    reference: str
    graph: bool
    compile_mode: str | None
    """torch.compile's mode; None: not compiled."""
    seed: int


def read_settings(config: Mapping[str, Any]) -> Settings:
    """The settings in a composed configuration. Raises ValueError, in one sentence, for what makes no measurement."""
    contestants = _some_of("contestants", config["contestants"], tuple(CONTESTANTS))
    directions = _some_of("directions", config["directions"], tuple(DIRECTIONS))
    cases = config["preset"].get("cases")
    if not isinstance(cases, list) or not cases or not all(isinstance(node, dict) for node in cases):
        raise ValueError(f"preset.cases must be a list of shapes like {{B: 2, H: 6, T: 512, D: 64}}, got {cases!r}")
    for key, least in (("rounds", 1), ("seed", 0)):
        if not isinstance(config[key], int) or isinstance(config[key], bool) or config[key] < least:
            raise ValueError(f"{key} must be a whole number from {least} on, got {config[key]!r}")
    seconds = config["seconds"]
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 < seconds < math.inf:
        raise ValueError(f"seconds must be a positive number, got {seconds!r}")
    if config["dtype"] not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {config['dtype']!r}")
    if config["reference"] not in CONTESTANTS:
        raise ValueError(f"reference must be one of {', '.join(CONTESTANTS)}, got {config['reference']!r}")
    for key, flag in (("graph", config["graph"]), ("compile.enabled", config["compile"]["enabled"])):
        if not isinstance(flag, bool):
            raise ValueError(f"{key} must be true or false, got {flag!r}")
    device = _device(config["device"])
    if config["graph"] and device.type != "cuda":
        raise ValueError("graph=true replays a CUDA graph and needs device=cuda, got device=cpu")
    return Settings(
        cases=tuple(read_case(node, key=f"preset.cases[{index}]") for index, node in enumerate(cases)),
        contestants=contestants,
        directions=directions,
        device=device,
        dtype=DTYPES[config["dtype"]],
        rounds=config["rounds"],
        seconds=float(seconds),
        reference=config["reference"],
        graph=config["graph"],
        compile_mode=config["compile"]["mode"] if config["compile"]["enabled"] else None,
        seed=config["seed"],
    )


def _some_of(key: str, given: object, names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of `names` that are given, in their own order; all for None."""
    if given is None:
        return names
    if not isinstance(given, list) or not given:
        raise ValueError(f"{key} must be a list of some of {', '.join(names)}, got {given!r}")
    for name in given:
        if name not in names:
            raise ValueError(f"{key} must be some of {', '.join(names)}, got {name!r}")
    return tuple(name for name in names if name in given)


def _device(name: object) -> torch.device:
    if name not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda needs a CUDA device and torch sees none; choose device=cpu")
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device("cpu")
