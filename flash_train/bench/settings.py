"""What a run of `flash-bench` or `flash-traffic` is asked to do, checked before anything is measured."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flash_train.bench.cases import DIRECTIONS, Case, read_case
from flash_train.bench.contestants import CONTESTANTS
from flash_train.ops.choice import choose_implementation, interpreting
from flash_train.ops.kernels.tables import Launch, check_launch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Contest:
    """Who meets on which problems: the keys that conf/bench.yaml and conf/traffic.yaml share, explained there."""

    cases: tuple[Case, ...]
    contestants: tuple[str, ...]
    directions: tuple[str, ...]
    device: torch.device
    dtype: torch.dtype
    compile_mode: str | None
    """torch.compile's mode; None: not compiled."""
    seed: int


@dataclass(frozen=True, kw_only=True)
class Settings(Contest):
    """The keys of conf/bench.yaml; what each means stands there."""

    rounds: int
    seconds: float
    reference: str
    graph: bool


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What `flash-bench tune=true` does; the keys of conf/bench.yaml, explained there."""

    cases: tuple[Case, ...]
    kernels: tuple[str, ...]
    """Those of `tables.DIRECTIONS` that the directions are made of."""
    launches: tuple[Launch, ...] | None
    """The candidates; None: a grid."""
    device: torch.device
    dtype: torch.dtype
    rounds: int
    seconds: float
    graph: bool
    seed: int


def read_settings(config: Mapping[str, Any]) -> Settings:
    """The settings in a composed configuration. Raises ValueError, in one sentence, for what makes no measurement."""
    contest = _read_contest(config, tuple(DIRECTIONS))
    _whole("rounds", config["rounds"], 1)
    seconds = config["seconds"]
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 < seconds < math.inf:
        raise ValueError(f"seconds must be a positive number, got {seconds!r}")
    if config["reference"] not in CONTESTANTS:
        raise ValueError(f"reference must be one of {', '.join(CONTESTANTS)}, got {config['reference']!r}")
    _flag("graph", config["graph"])
    if config["graph"] and contest.device.type != "cuda":
        raise ValueError("graph=true replays a CUDA graph and needs device=cuda, got device=cpu")
    return Settings(
        **vars(contest),
        rounds=config["rounds"],
        seconds=float(seconds),
        reference=config["reference"],
        graph=config["graph"],
    )


def read_tuning(config: Mapping[str, Any]) -> Tuning | None:
    """The settings of a search for launches; None if none is asked for. Raises ValueError as `read_settings`."""
    _flag("tune", config["tune"])
    given = config["launches"]
    if not config["tune"]:
        if given is not None:
            raise ValueError(f"launches are what tune=true tries, got launches={given!r} without it; add tune=true")
        return None
    settings = read_settings(config)
    if config["contestants"] is not None:
        raise ValueError(
            "tune=true times this package's Triton kernels against themselves, got contestants="
            f"{config['contestants']}; leave contestants out"
        )
    if settings.compile_mode is not None:
        raise ValueError("tune=true times kernels by themselves, got compile=on; leave compile out")
    if settings.rounds < 2:
        raise ValueError("rounds must be 2 or more with tune=true, to tell a gain from the spread, got 1")
    if settings.device.type == "cpu" and not interpreting():
        raise ValueError(
            "tune=true times launches on a GPU, got device=cpu; add device=cuda, or try it out with "
            "TRITON_INTERPRET=1, whose times say nothing"
        )
    if settings.device.type == "cuda" and interpreting():
        raise ValueError("tune=true times compiled kernels, and TRITON_INTERPRET=1 interprets them; unset it")
    for case in settings.cases:
        q, v = (torch.empty(1, 1, 1, size, dtype=settings.dtype, device=settings.device) for size in (case.D, case.E))
        choose_implementation("triton", q, q, v)
    kernels = {"forward": ("forward",), "backward": ("dkdv", "dq"), "both": ("forward", "dkdv", "dq")}
    return Tuning(
        cases=settings.cases,
        kernels=tuple(dict.fromkeys(kernel for direction in settings.directions for kernel in kernels[direction])),
        launches=None if given is None else _read_launches(given),
        device=settings.device,
        dtype=settings.dtype,
        rounds=settings.rounds,
        seconds=settings.seconds,
        graph=settings.graph,
        seed=settings.seed,
    )


def _read_launches(given: object) -> tuple[Launch, ...]:
    if not isinstance(given, list) or not given or not all(isinstance(node, dict) for node in given):
        raise ValueError(
            "launches must be null for a grid, or a list of launches like "
            f"{{block_t: 64, block_s: 64, warps: 4, stages: 2}}, got {given!r}"
        )
    return tuple(check_launch(f"launches[{index}]", node) for index, node in enumerate(given))


def read_traffic(config: Mapping[str, Any]) -> Contest:
    """As `read_settings`, for `flash-traffic`: on a GPU, and no two problems of the same T."""
    if not torch.cuda.is_available():
        raise ValueError(
            "the bytes that are counted are those of a GPU's memory, and torch sees no CUDA device; run it where there "
            "is one"
        )
    contest = _read_contest({**config, "device": "cuda"}, ("forward", "backward"))
    lengths = [case.T for case in contest.cases]
    if len(set(lengths)) < len(lengths):
        raise ValueError(f"preset.cases must differ in T, by which they are drawn, got T={lengths}; try preset=traffic")
    return contest


def _read_contest(config: Mapping[str, Any], directions: tuple[str, ...]) -> Contest:
    contestants = _some_of("contestants", config["contestants"], tuple(CONTESTANTS))
    directions = _some_of("directions", config["directions"], directions)
    cases = config["preset"].get("cases")
    if not isinstance(cases, list) or not cases or not all(isinstance(node, dict) for node in cases):
        raise ValueError(f"preset.cases must be a list of shapes like {{B: 2, H: 6, T: 512, D: 64}}, got {cases!r}")
    _whole("seed", config["seed"], 0)
    if config["dtype"] not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {config['dtype']!r}")
    _flag("compile.enabled", config["compile"]["enabled"])
    return Contest(
        cases=tuple(read_case(node, key=f"preset.cases[{index}]") for index, node in enumerate(cases)),
        contestants=contestants,
        directions=directions,
        device=_device(config["device"]),
        dtype=DTYPES[config["dtype"]],
        compile_mode=config["compile"]["mode"] if config["compile"]["enabled"] else None,
        seed=config["seed"],
    )


def _whole(key: str, given: object, least: int) -> None:
    if not isinstance(given, int) or isinstance(given, bool) or given < least:
        raise ValueError(f"{key} must be a whole number from {least} on, got {given!r}")


def _flag(key: str, given: object) -> None:
    if not isinstance(given, bool):
        raise ValueError(f"{key} must be true or false, got {given!r}")


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
