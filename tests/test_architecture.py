"""Arrows run one way: backends -> ml <- kvcache, and what lies above the library uses its public names.

The contracts are in pyproject.toml. They are about modules; the names are checked here: each package that the
reference documents (docs/reference.py) names in ``__all__`` what others may use.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def assigned(file: Path, name: str) -> tuple[str, ...]:
    """The strings of a list in a module, which is not imported: it may need what is not installed."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return tuple(ast.literal_eval(node.value))
    raise LookupError(f"{file} has no {name}")


@functools.cache
def exported(module: str) -> tuple[str, ...]:
    path = ROOT.joinpath(*module.split("."))
    return assigned(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"), "__all__")


PACKAGES = assigned(ROOT / "docs" / "reference.py", "PACKAGES")
"""What the reference documents."""
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
LIBRARY = frozenset(
    name
    for name in PACKAGES
    if name.split(".")[0] == "ml"
    or name in ("kvcache", "kvcache.cache", "kvcache.stores", "kvcache.testing", "kvcache.testing.bench")
)
"""What integrations, views and the engine may import from: the public packages of the library."""
ROOMS: dict[str, tuple[frozenset[str], tuple[str, ...]]] = {
    "kvcache/integrations": (LIBRARY, ("kvcache.integrations",)),
    "kvcache/views": (LIBRARY, ("kvcache.views",)),
    # The command line draws with the parts of the views, and runs the suites that ship.
    "kvcache_engine": (LIBRARY, ("kvcache.views", "kvcache.testing", "ml.testing")),
    "benchmarks": (frozenset(PACKAGES), ()),
    "examples": (frozenset(PACKAGES), ()),
}
"""By folder, the public packages, and those whose modules are the folder's own."""


def ignored() -> set[tuple[str, str]]:
    """The exceptions of the contracts: (importing module, imported module)."""
    ignored = [one for contract in SETTINGS["contracts"] for one in contract.get("ignore_imports", ())]
    return {(source, target) for source, _, target in (one.partition(" -> ") for one in ignored)}


def internals(source: str, public: frozenset[str], own: tuple[str, ...]) -> Iterator[tuple[int, str, str]]:
    """(line, module, name) of each name that is imported from ml or kvcache and is not public.

    A name is public in a package of ``public`` if ``__all__`` has it, or if it is such a package itself.
    Modules in the packages ``own`` belong to the importing folder.
    """
    tree = ast.parse(source)
    whole = {"ml": "ml", "kvcache": "kvcache"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            module, names = node.module, [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                module = alias.name
                if module.split(".")[0] in whole and module not in public and not is_in(module, own):
                    yield node.lineno, module, "*"
            continue
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in whole:
            module, names = node.value.id, [node.attr]
        else:
            continue
        if module.split(".")[0] not in whole or is_in(module, own):
            continue
        names_of = exported(module) if module in public else ()
        for name in names:
            inside = f"{module}.{name}"
            if name not in names_of and inside not in public and not is_in(inside, own) and name[0] != "_":
                is_module = ROOT.joinpath(*inside.split(".")).with_suffix(".py").is_file()
                yield node.lineno, inside if is_module else module, name


def is_in(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def test_the_import_contracts_are_kept() -> None:
    # In a process of its own: the linter sets up logging for itself, and silences all loggers that there are.
    lint = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    ended = subprocess.run(
        [sys.executable, "-c", lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{len(SETTINGS['contracts'])} kept, 0 broken" in ended.stdout


@pytest.mark.parametrize("room", ROOMS)
def test_what_lies_above_the_library_uses_its_public_names(room: str) -> None:
    public, own = ROOMS[room]
    found = {
        (".".join(file.relative_to(ROOT).with_suffix("").parts), module): f"line {line}: {name}"
        for file in sorted((ROOT / room).rglob("*.py"))
        for line, module, name in internals(file.read_text(), public, own)
    }
    allowed = {(source, target) for source, target in ignored() if is_in(source, (room.replace("/", "."),))}
    assert {place: where for place, where in found.items() if place not in allowed} == {}
    assert allowed <= found.keys(), "an exception that is no longer needed"


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        ("from kvcache.storage.cell_table import CellTable", "CellTable"),
        ("from kvcache import CausalCache, CellTable", "CellTable"),
        ("from kvcache.stores import manifest", "manifest"),
        ("import kvcache.prefix.tiers", "*"),
        ("import kvcache\nkvcache.caches", "caches"),
        ("from ml.block_formats import AFFINE", "AFFINE"),
        ("from ml.nn import rope, hidden", "hidden"),
        ("def later():\n    from kvcache.caches.causal import CausalCache", "CausalCache"),
    ],
)
def test_a_planted_import_of_an_internal_is_found(planted: str, found: str) -> None:
    assert [name for _, _, name in internals(planted, *ROOMS["kvcache/integrations"])] == [found]


def test_public_names_and_own_modules_are_not_found() -> None:
    good = """
import kvcache, ml
from kvcache import CausalCache, DenseBatch, branches
from kvcache.cache import Batch
from kvcache.integrations.rows.caches import Kind
from kvcache.stores import FileStore, digest_of
from kvcache.testing import bench
from kvcache.testing.bench import interleave
from ml import DType, nn
kvcache.CausalCache, kvcache.__version__, ml.DType
"""
    assert [*internals(good, *ROOMS["kvcache/integrations"])] == []
