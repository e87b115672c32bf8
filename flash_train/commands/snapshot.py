"""`flash-snapshot`: memory snapshots as a page that needs no network; of two, what one allocates and the other not.

The one command without a configuration: files in, a file out.
"""

import argparse
import os
import sys
from pathlib import Path

from flash_train.commands.hydra_app import ExitCode, complain
from flash_train.diagnostics.snapshot import Recording, compare, load_snapshot, replay
from flash_train.diagnostics.snapshot_page import write_snapshot_page
from flash_train.memory.sizes import human_bytes

_MOST = 8


def main() -> None:
    parser = argparse.ArgumentParser(prog="flash-snapshot", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("first", type=Path, help="a snapshot's pickle, as MemorySnapshot and OOMExplainer write it")
    parser.add_argument("second", type=Path, nargs="?", help="another, to compare with")
    parser.add_argument("--page", type=Path, help="the file to write; by default beside the first")
    parser.add_argument("--device", type=int, help="its number; by default the one with the most events")
    asked = parser.parse_args()
    files = [file for file in (asked.first, asked.second) if file is not None]
    page = asked.page or asked.first.with_suffix(".html" if len(files) == 1 else ".compared.html")
    try:
        if any(page.resolve() == file.resolve() for file in files):
            raise ValueError(f"the page must be another file than the snapshots, got {page}: give --page another.html")
        snapshots = [load_snapshot(file) for file in files]
        write_snapshot_page(page, *snapshots, names=[str(file) for file in files], device=asked.device)
        _print(files, [replay(each, device=asked.device) for each in snapshots])
        print(page)
    except BrokenPipeError:  # whoever read our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(ExitCode.FAILURE)
    except (OSError, ValueError) as error:
        cannot = isinstance(error, OSError) and f"cannot write {error.filename}: {error.strerror}; give --page"
        complain("snapshot", cannot or str(error))
        sys.exit(ExitCode.BAD_INPUT)


def _print(files: list[Path], recordings: list[Recording]) -> None:
    for file, recording in zip(files, recordings, strict=True):
        print(f"{file}: at most {human_bytes(recording.peak)}, {recording.events:,} events")
    if len(recordings) == 1:
        _print_one(recordings[0])
    else:
        _print_difference(recordings[0], recordings[1], files)


def _print_one(recording: Recording) -> None:
    for site in recording.sites[:_MOST]:
        print(f"  {human_bytes(site.at_peak):>9}  {site.name}")


def _print_difference(first: Recording, second: Recording, files: list[Path]) -> None:
    pairs = compare(first, second)
    only = ([(pair.first, pair.name) for pair in pairs if not pair.second],
            [(pair.second, pair.name) for pair in pairs if not pair.first])  # fmt: skip
    for file, sites in zip(files, only, strict=True):
        print(f"only in {file}, at most:" + ("" if sites else " nothing"))
        for size, name in sites[:_MOST]:
            print(f"  {human_bytes(size):>9}  {name}")


if __name__ == "__main__":
    main()
