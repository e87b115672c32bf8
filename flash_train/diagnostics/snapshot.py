"""What a memory snapshot of torch's says: bytes by time and by the place that allocated them. Needs no torch.

The format is that of `torch.cuda.memory._snapshot()`, written by pickle, recorded under
`torch.cuda.memory._record_memory_history()`.
"""

import pickle
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

Snapshot = Mapping[str, Any]

BEFORE = "allocated before the recording"
NO_STACK = "without a Python stack (autograd's backward, for one)"
_POINTS = 1500
_COUNTED = ("alloc", "free_requested", "free_completed")
_INTERNAL = tuple(f"-packages/{name}/" for name in ("torch", "lightning", "pytorch_lightning", "lightning_fabric"))
_INTERNAL += ("/contextlib.py", "/functools.py")


@dataclass(frozen=True)
class SiteBytes:
    """One place in the code, by the innermost frame that is not torch's or Lightning's own."""

    name: str
    """As "modules/attention.py:31 forward"."""
    most: int
    """Bytes of it alive at once, at the most."""
    at_peak: int
    """Bytes alive at the peak of all."""
    count: int
    """Allocations recorded."""
    stack: tuple[str, ...]
    """Of its first allocation, innermost first."""


@dataclass(frozen=True)
class Recording:
    """A snapshot of one device, replayed. Sizes in bytes, as requested from the allocator."""

    device: int
    peak: int
    """The highest sum since the recording began."""
    events: int
    """Allocations and releases."""
    sites: tuple[SiteBytes, ...]
    """By what they had at the peak, then by the most that they ever had."""
    times: tuple[float, ...]
    """Seconds of each point since the first event."""
    points: tuple[dict[str, int], ...]
    """Bytes by site where the sum was highest around that time."""
    began: int
    """Microseconds of the first event, by the clock of the snapshot; 0 without one."""


def load_snapshot(path: str | Path) -> Snapshot:
    """Read a snapshot's pickle; nothing in it is executed, as pickle would.

    Raises ValueError for another file.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            snapshot = _Plain(file).load()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): give the pickle of a memory snapshot") from error
    except Exception as error:  # pickle raises whatever the bytes lead it to
        raise ValueError(
            f"{path} must be the pickle of a memory snapshot, and is not ({error}): write one with MemorySnapshot, or "
            "torch.cuda.memory._dump_snapshot"
        ) from error
    return check_snapshot(snapshot, str(path))


def check_snapshot(snapshot: Any, name: str) -> Snapshot:
    """Raise ValueError for what holds no allocations, under `name`."""
    if not isinstance(snapshot, Mapping) or not {"segments", "device_traces"} <= set(snapshot):
        raise ValueError(f"{name} must hold a snapshot with segments and device_traces, got {type(snapshot).__name__}")
    traces = snapshot["device_traces"]
    if not isinstance(traces, list) or not all(isinstance(trace, list) for trace in traces):
        raise ValueError(f"{name} must hold a list of events for each device, and does not: record it again")
    if not any(snapshot["device_traces"]):
        raise ValueError(
            f"{name} must have recorded allocations, and has none: call torch.cuda.memory._record_memory_history() "
            "before the part that is of interest, or use MemorySnapshot"
        )
    return snapshot


def pack(snapshot: Snapshot, *, limit: int) -> bytes:
    """Pickle `snapshot` in at most `limit` bytes, as torch's own viewer reads it; the oldest events go first.

    Raises ValueError if even without events it takes more.
    """
    shared: dict[tuple[Any, ...], Any] = {}

    def once(entry: Mapping[str, Any]) -> dict[str, Any]:
        """Equal stacks as one object, which pickle writes once."""
        frames = entry.get("frames")
        if not frames:
            return dict(entry)
        key = tuple((frame["filename"], frame["line"], frame["name"]) for frame in frames)
        return {**entry, "frames": shared.setdefault(key, frames)}

    segments = [{**segment, "blocks": [once(block) for block in segment["blocks"]]} for segment in snapshot["segments"]]
    traces = [[once(event) for event in trace] for trace in snapshot["device_traces"]]
    while True:
        data = pickle.dumps({**snapshot, "segments": segments, "device_traces": traces}, protocol=4)
        if len(data) <= limit:
            return data
        if not any(traces):
            raise ValueError(f"a snapshot must fit its limit, and takes {len(data)} bytes without events: give more")
        traces = [trace[(len(trace) + 1) // 2 :] for trace in traces]


class _Plain(pickle.Unpickler):
    """Lists, dictionaries, strings and numbers, which is all that a snapshot consists of."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"it asks for {module}.{name}")


@dataclass
class _Replay:
    """Runs over the events, once for the sum and once more for what it consists of at given events."""

    alive: dict[int, tuple[str, int]] = field(default_factory=dict)  # by address: site, bytes
    by_site: Counter[str] = field(default_factory=Counter)
    total: int = 0

    def born(self, address: int, site: str, size: int) -> None:
        self.alive[address] = site, size
        self.by_site[site] += size
        self.total += size

    def died(self, address: int) -> None:
        if address in self.alive:
            site, size = self.alive.pop(address)
            self.by_site[site] -= size
            self.total -= size


def replay(snapshot: Snapshot, *, device: int | None = None) -> Recording:
    """The recording of `device`; None: of the one with the most events.

    Raises ValueError for a device without any, and for events that are not as torch writes them.
    """
    try:
        return _replay(snapshot, device)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"a snapshot must be as torch writes it, and in this one an entry is broken "
            f"({type(error).__name__}: {error}): record it again"
        ) from error


def _replay(snapshot: Snapshot, device: int | None) -> Recording:
    traces: Sequence[Sequence[Mapping[str, Any]]] = snapshot["device_traces"]
    if device is None:
        device = max(range(len(traces)), key=lambda index: len(traces[index]))
    if not 0 <= device < len(traces) or not traces[device]:
        recorded = [index for index, trace in enumerate(traces) if trace]
        raise ValueError(f"device must be one with recorded allocations, got {device}: there is {recorded}")
    events = [e for e in traces[device] if e["action"] in _COUNTED]
    sites = _Sites()
    named = [sites.of(e.get("frames") or ()) if e["action"] == "alloc" else "" for e in events]
    older = _older(events, snapshot["segments"], device, sites)
    step = max(1, -(-len(events) // _POINTS))
    # Which event of each stretch has the highest sum, and which of all.
    state = _with(older)
    highest = [(state.total, -1)]
    for index, (event, site) in enumerate(zip(events, named, strict=True)):
        _apply(state, event, site)
        if index % step == 0:
            highest.append((state.total, index))
        elif state.total > highest[-1][0]:
            highest[-1] = state.total, index
    peak, at = max(highest)
    wanted = {index for _, index in highest}
    # What they consist of.
    state = _with(older)
    points = {-1: dict(state.by_site)}
    most = Counter(state.by_site)
    for index, (event, site) in enumerate(zip(events, named, strict=True)):
        _apply(state, event, site)
        if site:
            most[site] = max(most[site], state.by_site[site])
        if index in wanted:
            points[index] = {name: size for name, size in state.by_site.items() if size}
    began = events[0].get("time_us", 0) if events else 0
    times = {i: (events[i].get("time_us", i) - began) / 1e6 if i >= 0 else 0.0 for i in points}
    counts = Counter(site for site in named if site)
    found = [SiteBytes(name, most[name], points[at].get(name, 0), counts[name], sites.stacks[name]) for name in most]
    found.sort(key=lambda each: (-each.at_peak, -each.most, each.name))
    return Recording(
        device, peak, len(events), tuple(found), tuple(times.values()), tuple(points.values()), began
    )  # fmt: skip


def _with(older: Mapping[int, tuple[str, int]]) -> _Replay:
    state = _Replay()
    for address, (site, size) in older.items():
        state.born(address, site, size)
    return state


def _apply(state: _Replay, event: Mapping[str, Any], site: str) -> None:
    if event["action"] == "alloc":
        state.died(event["addr"])  # whose release the recording has lost
        state.born(event["addr"], site, event["size"])
    else:
        state.died(event["addr"])


def _older(
    events: Sequence[Mapping[str, Any]], segments: Sequence[Mapping[str, Any]], device: int, sites: "_Sites"
) -> dict[int, tuple[str, int]]:
    """What was alive before the first event: released without having been allocated, or alive at the end likewise."""
    born: set[int] = set()
    older: dict[int, tuple[str, int]] = {}
    for event in events:
        if event["action"] == "alloc":
            born.add(event["addr"])
        elif event["addr"] not in born:
            older.setdefault(event["addr"], (BEFORE, event["size"]))
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"] if segment.get("device", device) == device else ():
            if block["state"] == "active_allocated" and address not in born and address not in older:
                frames = block.get("frames") or ()
                older[address] = sites.of(frames) if frames else BEFORE, block.get("requested_size", block["size"])
            address += block["size"]
    return older


class _Sites:
    """Names for stacks, the same in every snapshot."""

    def __init__(self) -> None:
        self.stacks: dict[str, tuple[str, ...]] = defaultdict(tuple)
        self._by_stack: dict[tuple[tuple[str, int, str], ...], str] = {}

    def of(self, frames: Sequence[Mapping[str, Any]]) -> str:
        stack = tuple((frame["filename"], frame["line"], frame["name"]) for frame in frames)
        if stack not in self._by_stack:
            python = [frame for frame in stack if frame[0].endswith(".py") or frame[0].startswith("<")]
            self._by_stack[stack] = self._name(python) if python else NO_STACK
        return self._by_stack[stack]

    def _name(self, python: list[tuple[str, int, str]]) -> str:
        own = (frame for frame in python if not any(part in frame[0] for part in _INTERNAL))
        filename, line, function = next(own, python[0])
        name = f"{'/'.join(filename.split('/')[-2:])}:{line} {function}"
        self.stacks.setdefault(name, tuple(f"{file}:{line} {function}" for file, line, function in python))
        return name


@dataclass(frozen=True)
class SiteDifference:
    """One allocation site in two recordings, by the most bytes that it had alive at once; 0 where it is missing."""

    name: str
    first: int
    second: int


def compare(first: Recording, second: Recording) -> tuple[SiteDifference, ...]:
    """Every site of either, largest difference first: those that one has and the other lacks have a 0."""
    sizes = [{site.name: site.most for site in each.sites} for each in (first, second)]
    pairs = [SiteDifference(name, *(size.get(name, 0) for size in sizes)) for name in {**sizes[0], **sizes[1]}]
    return tuple(sorted(pairs, key=lambda pair: (-abs(pair.first - pair.second), pair.name)))
