"""Imports point one way, and configuration stops at the door."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import flash_train

PACKAGE = Path(flash_train.__file__).parent
MAY_IMPORT = {
    "ops": {"ops"},
    "modules": {"modules", "ops"},
    "models": {"models", "modules", "ops"},
    "training": {"training", "models", "modules", "ops"},
    "diagnostics": {"diagnostics", "memory"},
    "memory": {"memory"},
    "planning": {"planning", "memory", "comparison"},
    "comparison": {"comparison", "diagnostics", "memory", "training", "models", "modules", "ops"},
    "bench": {"bench", "comparison", "diagnostics", "ops"},
    "integrations": {"integrations", "ops"},
    "config": set(),
    "commands": {
        "commands",
        "config",
        "bench",
        "comparison",
        "planning",
        "memory",
        "diagnostics",
        "training",
        "models",
        "modules",
        "ops",
    },
}


def imports() -> Iterator[tuple[Path, str]]:
    """Every module that a file of the package imports, wherever in the file it does."""
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                yield from ((file, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}: imports are absolute"
                yield file, node.module or ""
                yield from ((file, f"{node.module}.{alias.name}") for alias in node.names)


def layer(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_imports_point_one_way() -> None:
    for file, module in imports():
        parts = module.split(".")
        if parts[0] == "flash_train" and len(parts) > 1 and layer(file) != "__init__" and parts[1] in MAY_IMPORT:
            assert parts[1] in MAY_IMPORT[layer(file)], f"{file.relative_to(PACKAGE)} imports {module}"


def test_configuration_stops_at_the_door() -> None:
    for file, module in imports():
        if module.split(".")[0] in ("omegaconf", "hydra"):
            assert layer(file) in ("commands", "config"), f"{file.relative_to(PACKAGE)} imports {module}"


def test_diagnostics_and_predictions_know_torch_and_lightning_only() -> None:
    known = {"torch", "lightning", "flash_train", *sys.stdlib_module_names}
    for file, module in imports():
        if layer(file) in ("diagnostics", "memory"):
            more = {
                "probe_output.py": {"rich", "matplotlib"},
                "oom_output.py": {"rich"},
                "pytest_plugin.py": {"pytest"},
            }.get(file.name, set())
            assert module.split(".")[0] in known | more, f"{file.relative_to(PACKAGE)} imports {module}"


def test_transformers_is_imported_by_its_drop_in_alone() -> None:
    drop_in = [PACKAGE / "integrations" / name for name in ("transformers.py", "transformers_masks.py")]
    for file, module in imports():
        if module.split(".")[0] == "transformers":
            assert file in drop_in, f"{file.relative_to(PACKAGE)} imports {module}"


def test_importing_the_package_costs_little_beyond_torch() -> None:
    script = """
import sys, flash_train
for module in ("triton", "hydra", "omegaconf", "wandb", "lightning", "matplotlib", "rich", "transformers"):
    assert module not in sys.modules, module
"""
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
