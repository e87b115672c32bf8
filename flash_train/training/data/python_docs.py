"""Text that every Python installation carries: its reference documentation and some of its library's source."""

import hashlib
import importlib
import platform
import sysconfig
from pathlib import Path
from typing import Any

from flash_train.training.data.document_data import DocumentData
from flash_train.training.data.documents import Document, split_by_hash

TOPICS = "pydoc_data.topics"

# Pure Python, well commented, and at the same place in 3.11 to 3.14 (as a file or as a package's __init__).
MODULES = """
    argparse ast asyncio.locks asyncio.streams calendar cmd collections configparser contextlib copy csv dataclasses
    difflib dis doctest enum fractions functools gettext graphlib heapq html.parser http.cookies ipaddress json.decoder
    json.encoder operator optparse os pdb pickle queue random selectors shlex shutil socketserver statistics string
    subprocess tarfile tempfile textwrap threading timeit tokenize trace traceback typing unittest.case urllib.parse
    weakref zipfile
""".split()

# A complete installation carries more than twice as much.
LEAST_BYTES = 1_000_000


class PythonDocs(DocumentData):
    """The topics of Python's help() and the source of MODULES, as bytes, a NUL after each document.

    Nothing is downloaded. Topics and modules validate as a whole, about a tenth of them, chosen by the hash of their
    names, so that a document is on the same side in every Python version. The text itself differs between versions,
    so `provenance` holds the version and each source's sha256, and names what an installation lacks. Raises
    ValueError if it lacks most of it.
    """

    def documents(self) -> tuple[list[Document], list[Document]]:
        texts = {f"topic {name}": text.encode() for name, text in sorted(read_topics().items())}
        texts |= {name: path.read_bytes() for name in MODULES if (path := find_source(name))}
        size = sum(map(len, texts.values()))
        if size < LEAST_BYTES:
            raise ValueError(
                f"python_docs needs at least {LEAST_BYTES} bytes of documentation and source, this Python carries "
                f"{size} in {sysconfig.get_path('stdlib')}; use a complete CPython, or data=text data.paths=<file>"
            )
        documents = [Document.from_bytes(name, text) for name, text in texts.items()]
        return split_by_hash(documents, [hashlib.sha256(name.encode()).hexdigest() for name in texts])

    def origin(self) -> dict[str, Any]:
        missing = [] if read_topics() else [TOPICS]
        missing += [name for name in MODULES if find_source(name) is None]
        return {"source": "python_docs", "python": platform.python_version(), "missing": missing}


def read_topics() -> dict[str, str]:
    """The texts of Python's help() by topic; none where they are not installed."""
    try:
        return importlib.import_module(TOPICS).topics
    except ImportError:
        return {}


def find_source(module: str) -> Path | None:
    """The file of a standard-library module, if it is there."""
    # It is looked up and not imported: some modules act on import, and one of them opens a window.
    path = Path(sysconfig.get_path("stdlib"), *module.split("."))
    candidates = (path.with_name(f"{path.name}.py"), path / "__init__.py")
    return next((candidate for candidate in candidates if candidate.is_file()), None)
