"""Shell completion of backends, formats, stores and saved conversations, without opening any of them. If
there are no completions, shells complete file names.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from pathlib import Path

from rich.markup import escape

from kvcache.stores import strict_json
from kvcache_engine.saved import FORMAT

__all__ = ["backend_names", "cache_types", "conversations", "files_beginning", "mend_zsh", "stores",
           "stores_and_conversations"]  # fmt: skip

_MAX_HEADER, _MAX_VALUES = 1 << 24, 1 << 20
"""Limits for headers that are inspected: bytes, and JSON values."""
MOST = 200
"""The most files that are inspected in a folder, to limit the wait."""


_FIRST_TAB = """
if [ "$funcstack[1]" = "_%(prog_name)s" ]; then
  %(complete_func)s "$@"
fi
"""


def mend_zsh() -> None:
    """Make the first Tab in zsh complete too; typer's script is only loaded by it."""
    with contextlib.suppress(ImportError, KeyError):  # then from the second Tab on
        from typer._completion_shared import _completion_scripts as scripts

        if "funcstack" not in scripts["zsh"]:
            scripts["zsh"] += _FIRST_TAB


def backend_names(incomplete: str) -> list[tuple[str, str]]:
    """Names of the plugins, whether they can run here or not; no framework is imported."""
    import ml

    try:
        specs = ml.backend_specs()
    except Exception:  # any error of a plugin: a shell must not show a traceback
        return []
    names = sorted(name for name in specs if name.startswith(incomplete))
    return [(name, escape(specs[name].install_hint)) for name in names]


def cache_types(incomplete: str) -> list[str]:
    """Names of storage formats, in lower case."""
    from kvcache import format_names

    try:
        return [name.lower() for name in format_names() if name.startswith(incomplete.upper())]
    except Exception:  # any error of a plugin
        return []


def stores(incomplete: str) -> list[str]:
    """Folders of stores, and the URL schemes of other stores."""
    from kvcache.stores import StoreFolder, store_schemes

    folders = [name for name, path in _beside(incomplete) if path.is_dir() and StoreFolder.is_store(path)]
    try:
        schemes = [f"{name}://" for name in store_schemes()]
    except Exception:
        schemes = []
    return [*folders, *(scheme for scheme in schemes if scheme.startswith(incomplete))]


def conversations(incomplete: str) -> list[str]:
    """Files that ``kvcache save`` wrote."""
    return [name for name, path in _beside(incomplete) if _is_conversation(path)]


def stores_and_conversations(incomplete: str) -> list[str]:
    from kvcache.stores import StoreFolder

    return [
        name
        for name, path in _beside(incomplete)
        if (StoreFolder.is_store(path) if path.is_dir() else _is_conversation(path))
    ]


def files_beginning(word: str) -> list[str]:
    """Files and folders (with a slash) that complete the word."""
    return [f"{name}{'/' if path.is_dir() else ''}" for name, path in _beside(word, None)]


def _beside(word: str, most: int | None = MOST) -> Iterator[tuple[str, Path]]:
    """Names that complete the word, with their paths."""
    folder, slash, start = word.rpartition("/")
    try:
        paths = sorted(Path(f"{folder}{slash}" or ".").expanduser().iterdir())
    except OSError:
        return
    names = [path for path in paths if path.name.startswith(start) and (start or path.name[0] != ".")]
    for path in names[:most]:
        yield f"{folder}{slash}{path.name}", path


def _is_conversation(path: Path) -> bool:
    """Whether a file is a saved conversation, judging only by its header."""
    try:
        if not path.is_file():  # reading a pipe would block
            return False
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > _MAX_HEADER:
                return False
            header = strict_json.decode(file.read(size), _MAX_VALUES)
        return FORMAT in str(header.get("__metadata__", ""))
    except (OSError, ValueError, AttributeError, struct.error):
        return False
