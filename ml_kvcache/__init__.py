"""Where the packages of this distribution lie, and what hides one of them: ``hidden``.

``ml``, ``kvcache`` and ``backends`` are names that a project may have itself, and Python takes whichever is
first on ``sys.path``. Nothing else is called as the distribution is, so this package can be relied upon.

PYTEST_DONT_REWRITE: what is imported before pytest starts is no reason for its warning.
"""

from __future__ import annotations

import os
import sys

__all__ = ["HOME", "hidden"]

HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
"""The folder that this package is in, and the others beside it."""


def hidden(name: str, *homes: str | os.PathLike[str]) -> str:
    """What is wrong where another module ``name`` comes before that of ``homes``; empty where nothing is.

    ``homes``: folders, of which the first that has such a package or module counts; by default the one where
    this distribution lies. Nothing is imported.
    """
    places = [os.path.join(home, name) for home in homes or (HOME,)]
    ours = next((path for path in places if os.path.exists(path) or os.path.exists(f"{path}.py")), None)
    found = _location(name)
    if ours is None or found is None or _same(found, ours):
        return ""
    return (
        f"Python finds {name!r} at {found}, which hides the one at {ours}: rename that of the project, or "
        "run where it is not on sys.path"
    )


def _location(name: str) -> str | None:
    """The folder of a package or file of a module, as ``import`` finds it."""
    module = sys.modules.get(name)
    specs = (finder.find_spec(name, None) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    spec = next(filter(None, specs), None) if module is None else getattr(module, "__spec__", None)
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or ())
    return folders[0] if folders else spec.origin


def _same(found: str, ours: str) -> bool:
    """Whether both are one place, also by way of links."""
    found = found.removesuffix(".py")
    return found == ours or os.path.realpath(found) == os.path.realpath(ours)
