"""The folder of a program's results, as argparse takes it."""

import argparse
from pathlib import Path


def new_folder(text: str) -> Path:
    """The path, made whole, of a folder that is not there yet, or is empty: results of two runs do not mix."""
    folder = Path(text).resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise argparse.ArgumentTypeError(
            f"{folder} is not empty; give a new folder, for a run would mix with an older one"
        )
    return folder
