"""Where the configuration lies, and how Hydra finds it: `conf/` and `recipes/`, beside the package or inside it."""

from pathlib import Path

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf


def config_root() -> Path:
    """The folder that holds `conf/` and `recipes/`: the package itself (a wheel), else the one around it (a checkout).

    Raises FileNotFoundError if neither does, which means an incomplete installation.
    """
    package = Path(__file__).resolve().parent
    for root in (package, package.parent):
        if (root / "conf" / "train.yaml").is_file() and (root / "recipes").is_dir():
            return root
    raise FileNotFoundError(f"no conf/ and recipes/ in {package} or beside it; install flash_train again")


def group_options(*more: Path) -> dict[str, list[str]]:
    """Every configuration group with the names that can be chosen in it; `more` are further folders like `conf/`."""
    root = config_root()
    groups = [folder for top in (root / "conf", *more) if top.is_dir() for folder in top.iterdir() if folder.is_dir()]
    options: dict[str, set[str]] = {}
    for folder in (*groups, root / "recipes"):
        options.setdefault(folder.name, set()).update(file.stem for file in folder.glob("*.yaml"))
    return {name: sorted(files) for name, files in sorted(options.items()) if files}


class RecipeSource(FileConfigSource):
    """`recipes/` as a group of its own: a search path to its parent would offer all of a checkout as groups."""

    @staticmethod
    def scheme() -> str:
        return "recipes"

    def is_group(self, config_path: str) -> bool:
        return config_path in ("", "recipes") and super().is_group(config_path)

    def is_config(self, config_path: str) -> bool:
        return config_path.startswith("recipes/") and super().is_config(config_path)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if config_path == "":
            return [] if results_filter == ObjectType.CONFIG else ["recipes"]
        return super().list(config_path, results_filter)


class RecipeSearchPath(SearchPathPlugin):
    """Adds `recipes/` where help, completion and sweeps see it too (`hydra.searchpath` reaches none of them)."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("flash_train", f"recipes://{config_root()}")


def run_folder(resume_from: str | None, fresh: str) -> str:
    """Where a run writes: the folder it resumes from, if that is one, else a fresh one."""
    return resume_from if resume_from and Path(resume_from).is_dir() else fresh


def register() -> None:
    """Make the recipes and the resolvers known to Hydra in this process. Repeating it changes nothing."""
    Plugins.instance().register(RecipeSource)
    Plugins.instance().register(RecipeSearchPath)
    OmegaConf.register_new_resolver("config_root", lambda: str(config_root()), replace=True)
    OmegaConf.register_new_resolver("run_folder", run_folder, replace=True)
