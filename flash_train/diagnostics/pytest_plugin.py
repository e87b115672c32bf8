"""A pytest plugin: limits and baselines for the memory that a test takes.

    @pytest.mark.peak_memory("1.2 GiB")           the whole test, against a limit
    @pytest.mark.peak_memory                      the whole test, against the baseline file

    def test_step(peak_memory):
        with peak_memory("backward"):             a part of it
            loss.backward()
        peak_memory.predict(module, batch)        a training step that need not fit this machine

What has no limit is compared with the baseline file, which `pytest --update-memory-baseline` writes. Bytes on a CPU are
exact, the allocator's peak on a GPU may be one per cent above its baseline (see `measured_peak` for what is counted).
pytest loads this for everybody who has the package: nothing is imported before a test asks for it.
"""

import contextlib
import json
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from flash_train.memory.sizes import human_bytes, parse_bytes

if TYPE_CHECKING:
    from flash_train.diagnostics.peak import StretchPeak
    from flash_train.memory.live import Block
    from flash_train.memory.predict import Prediction

_NAME = "peak_memory"
_UPDATE = "--update-memory-baseline"
_GPU_TOLERANCE = 0.01


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("memory").addoption(
        _UPDATE, action="store_true", help="write the peaks of peak_memory tests into the baseline file"
    )
    parser.addini("memory_baseline", "the baseline file, from the root directory", default="memory-baseline.json")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"{_NAME}(limit, *, device='cpu', tolerance=None): most memory that the test may take, as '1.2 GiB'; without "
        f"a limit it is compared with the baseline file (see {_UPDATE}). Where the test uses the fixture {_NAME}, "
        "these are the defaults of what it measures.",
    )
    config.stash[_GATE] = gate = Gate(config)
    config.pluginmanager.register(gate, "flash_train_memory_gate")


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    mark = item.get_closest_marker(_NAME)
    if mark is None:
        return (yield)
    fixture: Any = getattr(item, "funcargs", {}).get(_NAME)
    if fixture is None:
        with PeakMemory(item)():
            return (yield)
    result = yield
    if not fixture.used:
        pytest.fail(f"{_NAME} measured nothing: the test has the mark and the fixture, and did not use it", False)
    return result


@pytest.fixture
def peak_memory(request: pytest.FixtureRequest) -> "PeakMemory":
    """Measures and predicts peaks, and fails the test where one is over its limit or its baseline."""
    return PeakMemory(request.node)


class PeakMemory:
    """The fixture `peak_memory`. The mark of the same name gives its defaults."""

    def __init__(self, item: pytest.Item) -> None:
        mark = item.get_closest_marker(_NAME)
        self._item = item
        self._gate = item.config.stash[_GATE]
        try:
            self._defaults = _defaults(*mark.args, **mark.kwargs) if mark else _defaults()
        except TypeError as error:
            text = f"@pytest.mark.{_NAME} takes a limit, device= and tolerance=, and {str(error).partition(' ')[2]}"
            raise ValueError(text) from error
        self._measuring = False
        self._names: set[tuple[str, str]] = set()

    @property
    def used(self) -> bool:
        """Whether anything was held against a limit or a baseline."""
        return bool(self._names)

    @contextlib.contextmanager
    def __call__(
        self, name: str = "", *, limit: str | int | None = None, device: str | None = None,
        tolerance: float | None = None,
    ) -> Iterator["StretchPeak"]:  # fmt: skip
        """`with peak_memory("backward") as peak: ...` measures the block; afterwards `peak.size` has the bytes.

        Args:
            name: of this peak, if a test has several.
            limit: "1.2 GiB", or a number of bytes; None: the mark's, or else the baseline file.
            device: "cpu" or "cuda"; None: the mark's, or else "cpu".
            tolerance: share of the baseline by which the peak may be above it; None: the mark's, or else 0 on a CPU and
                0.01 on a GPU.
        """
        from flash_train.diagnostics.peak import measured_peak

        __tracebackhide__ = True
        limit, device, tolerance = self._settle(limit, device, tolerance)
        with measured_peak(device) as peak:
            outermost, self._measuring = not self._measuring, True
            try:
                yield peak
            finally:
                self._measuring = not outermost
        if not peak.size:
            pytest.fail(f"{_NAME} measured nothing: no tensor was made on {device}; name the right device", False)
        tolerance = (0.0 if peak.source == "cpu" else _GPU_TOLERANCE) if tolerance is None else tolerance
        self._check(name, peak.size, peak.source, limit, tolerance, peak.blocks)

    def predict(
        self, module: Any, batch: Any, *, name: str = "", limit: str | int | None = None,
        tolerance: float | None = None, **settings: Any,
    ) -> "Prediction":  # fmt: skip
        """The predicted peak of a training step on a GPU, checked as a measured one is; see `predict_peak`.

        `module` and `batch` may be larger than this machine: make them under `torch.device("meta")`.
        """
        from flash_train.memory.predict import predict_peak

        __tracebackhide__ = True
        limit, _, tolerance = self._settle(limit, None, tolerance)
        if self._measuring:
            raise ValueError("a prediction makes tensors of its own: call predict outside of what is measured")
        prediction = predict_peak(module, batch, **settings)
        self._check(name, prediction.peak, "predicted", limit, tolerance or 0.0, prediction.blocks)
        return prediction

    def _settle(self, limit: Any, device: str | None, tolerance: Any) -> tuple[int | None, str, float | None]:
        limit = self._defaults["limit"] if limit is None else limit
        tolerance = self._defaults["tolerance"] if tolerance is None else tolerance
        if tolerance is not None and (not isinstance(tolerance, int | float) or not 0 <= tolerance < 1):
            raise ValueError(f"tolerance must be a share of the baseline from 0 to 1, got {tolerance!r}: 0.01 is 1 %")
        size = None if limit is None else parse_bytes(limit, name="limit")
        return size, device or self._defaults["device"], tolerance

    def _check(
        self, name: str, size: int, source: str, limit: int | None, tolerance: float, blocks: tuple["Block", ...]
    ) -> None:
        __tracebackhide__ = True
        if (name, source) in self._names:
            raise ValueError(f"peaks of one test must have names of their own, got {name!r} twice: {_NAME}('forward')")
        self._names.add((name, source))
        test = f"{self._item.nodeid} {name}".strip()
        known = None if limit is not None else self._gate.baseline.get(test, {}).get(source)
        self._item.user_properties.append(
            (_NAME, {"test": test, "source": source, "bytes": size, "limit": limit, "baseline": known})
        )
        found = f"peak memory{f' of {name}' if name else ''} is {human_bytes(size)} ({size} bytes, {source})"
        if limit is not None:
            if size > limit:
                pytest.fail(f"{found}, over the limit of {human_bytes(limit)}{_largest(blocks)}", pytrace=False)
        elif not self._gate.updates:
            if known is None:
                pytest.fail(f"{found}, and {self._gate.path.name} knows no such peak: run pytest {_UPDATE}", False)
            if size > known * (1 + tolerance):
                change = f"{100 * (size / known - 1):.2g} % over its baseline of {human_bytes(known)} ({known} bytes)"
                pytest.fail(f"{found}, {change}{_largest(blocks)}; if it should be, run pytest {_UPDATE}", False)


def _defaults(limit: Any = None, *, device: str = "cpu", tolerance: float | None = None) -> dict[str, Any]:
    """The mark's arguments."""
    return {"limit": limit, "device": device, "tolerance": tolerance}


def _checked(baseline: Any) -> dict[str, dict[str, int]]:
    if not isinstance(baseline, dict):
        raise ValueError(f"it is a {type(baseline).__name__}")
    for test, sources in baseline.items():
        sizes = list(sources.values()) if isinstance(sources, dict) else [sources]
        if not isinstance(sources, dict) or not all(type(size) is int and size > 0 for size in sizes):
            raise ValueError(f"{test} has {sources!r}")
    return baseline


def _largest(blocks: tuple["Block", ...]) -> str:
    from flash_train.diagnostics.peak import describe_blocks

    return f"; largest then: {describe_blocks(blocks)}" if blocks else ""


class Gate:
    """The baseline file of a test session: {test: {source: bytes}}."""

    def __init__(self, config: pytest.Config) -> None:
        self.path: Path = config.rootpath / config.getini("memory_baseline")
        self.updates = bool(config.getoption(_UPDATE))
        self._worker = hasattr(config, "workerinput")  # of pytest-xdist: the reports reach the one that writes
        self._known: dict[str, dict[str, int]] | None = None
        self._found: list[dict[str, Any]] = []
        self._refusal: str | None = None

    @property
    def baseline(self) -> dict[str, dict[str, int]]:
        if self._known is None:
            try:
                self._known = _checked(json.loads(self.path.read_text())) if self.path.exists() else {}
            except (ValueError, OSError) as error:
                raise ValueError(
                    f"{self.path} must hold {{test: {{source: bytes}}}} as JSON, and does not ({error}): delete it, "
                    f"and run pytest {_UPDATE}"
                ) from error
        return self._known

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self._found += [value for name, value in report.user_properties if name == _NAME]  # pyright: ignore

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        measured = [each for each in self._found if each["limit"] is None]
        if not self.updates or self._worker or not measured:
            return
        try:
            peaks = {test: dict(sources) for test, sources in self.baseline.items()}
            for each in measured:
                peaks.setdefault(each["test"], {})[each["source"]] = each["bytes"]
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(peaks, indent=2, sort_keys=True) + "\n")
        except (OSError, ValueError) as error:
            self._refusal = f"no peaks were written to {self.path}: {error}"
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.updates:
            number = sum(each["limit"] is None for each in self._found)
            if self._refusal is not None:
                terminalreporter.write_line(self._refusal, red=True)
            elif number:
                terminalreporter.write_line(f"{self.path.name}: {number} {'peak' if number == 1 else 'peaks'} written")
            return
        lower = [each for each in self._found if each["baseline"] and each["bytes"] < 0.99 * each["baseline"]]
        for each in lower:
            change = f"{human_bytes(each['bytes'])} instead of {human_bytes(each['baseline'])}"
            terminalreporter.write_line(f"{each['test']}: peak memory is {change}; pytest {_UPDATE} keeps it there")


_GATE = pytest.StashKey[Gate]()
