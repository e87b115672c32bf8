"""`flash-workspace`: a saved view of our runs in wandb."""

from pathlib import Path
from typing import Any

from flash_train.commands.hydra_app import ExitCode, complain, launch

MODULE = "flash_train.commands.workspace"

_TYPES: dict[str, Any] = {"entity": str | None, "project": str, "name": str}


def workspace(config: dict[str, Any], folder: Path, overrides: list[str]) -> int:
    """Save what `config` asks for; the exit code."""
    from flash_train.commands.construct import check_arguments
    from flash_train.commands.workspace_view import build_workspace

    check_arguments({name: config[name] for name in _TYPES}, _TYPES, key="")
    for name in _TYPES:
        if config[name] == "" or (name != "name" and "/" in (config[name] or "")):
            raise ValueError(
                f"{name} must be a name, and not empty or a path, got {config[name]!r}; as in "
                "entity=my-team project=flash_train"
            )
    view = build_workspace(config["entity"] or "", config["project"], config["name"])
    try:
        view.entity = view.entity or _default_entity()
        print(view.save().url)
    except Exception as error:  # whatever wandb and what it stands on raise: no network, a wrong key, no such project
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        complain("workspace", f"wandb saved no view: {said}")
        return ExitCode.FAILURE
    return ExitCode.OK


def _default_entity() -> str:
    """Where wandb would put a run of whoever is logged in."""
    import wandb

    api = wandb.Api()
    entity = api.settings["entity"] or api.default_entity
    if not entity:
        raise RuntimeError("whoever is logged in has no default entity; give entity=<user or team>")
    return entity


def main() -> None:
    launch(workspace, config_name="workspace", module=MODULE)


if __name__ == "__main__":
    main()
