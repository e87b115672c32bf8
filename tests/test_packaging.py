"""What is installed is what was tested, and what can be installed by a stranger."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENTS = {requirement.name: requirement for requirement in map(Requirement, PROJECT["dependencies"])}
PINS = {
    pin.name: str(pin.specifier).removeprefix("==")
    for pin in map(Requirement, re.findall(r"^[^#\s].*$", (ROOT / ".ci" / "constraints.txt").read_text(), re.MULTILINE))
}

# From the metadata of torch 2.13.0 on PyPI (requires_dist): triton==3.7.1; platform_system == "Linux". A CPU build of
# torch asks for no triton, so that another pin would pass where the tests run and be refused by pip elsewhere.
TORCH = "2.13.0"
TRITON_OF_TORCH = "3.7.1"


def test_triton_is_the_one_that_torch_asks_for() -> None:
    assert (PINS["torch"], PINS["triton"]) == (TORCH, TRITON_OF_TORCH)


@pytest.mark.parametrize("name", REQUIREMENTS)
def test_the_pinned_version_is_one_that_the_project_admits(name: str) -> None:
    assert REQUIREMENTS[name].specifier.contains(PINS[name])


def test_the_floors_are_stated() -> None:
    assert PROJECT["requires-python"] == ">=3.11"
    for name, floor in {"torch": "2.11", "triton": "3.6", "lightning": "2.5", "hydra-core": "1.3.2"}.items():
        assert f">={floor}" in str(REQUIREMENTS[name].specifier).split(",")
    assert REQUIREMENTS["triton"].marker is not None and "Linux" in str(REQUIREMENTS["triton"].marker)


def test_the_malicious_releases_of_lightning_are_refused() -> None:
    refused = [
        version
        for version in ("2.6.1", "2.6.2", "2.6.3", "2.6.4")
        if Version(version) not in REQUIREMENTS["lightning"].specifier
    ]
    assert refused == ["2.6.2", "2.6.3"]


def test_the_development_tools_are_pinned_exactly() -> None:
    for tool in map(Requirement, PROJECT["optional-dependencies"]["dev"]):
        assert str(tool.specifier).startswith("=="), tool.name


def test_no_folder_of_the_wheel_is_ignored_by_git() -> None:
    patterns = [line for line in (ROOT / ".gitignore").read_text().splitlines() if line.endswith("/")]
    assert {pattern for pattern in patterns if not pattern.startswith("/")} <= {
        "__pycache__/",
        "*.egg-info/",
        ".pytest_cache/",
        ".ruff_cache/",
    }
