"""``import kvcache`` brings next to nothing but itself; what it names is there when it is asked for."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import kvcache

SOURCE = Path(kvcache.__file__).read_text(encoding="utf-8")


def imported_by(code: str) -> set[str]:
    """The modules that a fresh interpreter has after ``code``, above those that it starts with."""
    script = f"import sys; before = set(sys.modules)\n{code}\nprint(*sorted(set(sys.modules) - before))"
    line = [sys.executable, "-I", "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{script}"]
    ended = subprocess.run(line, capture_output=True, text=True, check=True, timeout=60)
    return set(ended.stdout.split())


def test_importing_it_imports_nothing_else() -> None:
    assert imported_by("import kvcache") <= {"kvcache", "ml_kvcache", "__future__"}


def test_a_cache_brings_neither_stores_nor_the_prefix_cache() -> None:
    found = imported_by("from kvcache import CausalCache")
    assert "kvcache.caches.causal" in found
    assert not {name for name in found if name.startswith(("kvcache.stores", "kvcache.prefix.prefix_cache"))}


def test_what_type_checkers_are_told_is_what_there_is() -> None:
    """The imports for them, ``__all__`` and the modules that names are taken from say the same."""
    guarded = next(
        node for node in ast.parse(SOURCE).body if ast.unparse(node).startswith("if TYPE_CHECKING")
    )
    assert isinstance(guarded, ast.If)
    told = {
        alias.name: node.module
        for node in guarded.body
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("kvcache.")
        for alias in node.names
    }
    assert sorted(told) == sorted(kvcache.__all__)
    for name, module in told.items():
        assert getattr(kvcache, name) is getattr(importlib.import_module(str(module)), name)


def test_every_name_is_listed_and_found_once() -> None:
    assert set(kvcache.__all__) <= set(dir(kvcache))
    assert kvcache.CausalCache is kvcache.CausalCache
    space: dict[str, object] = {}
    exec("from kvcache import *", space)
    assert set(kvcache.__all__) <= set(space)


def test_packages_are_attributes_without_being_imported_first() -> None:
    code = "import kvcache; assert kvcache.stores.open_store; kvcache.caches"
    assert {"kvcache.stores", "kvcache.caches"} <= imported_by(code)


@pytest.mark.parametrize("name", ["nonsense", "_private", "__wrapped__"])
def test_what_is_not_there_is_an_attribute_error(name: str) -> None:
    assert not hasattr(kvcache, name)
    with pytest.raises(AttributeError, match=f"module 'kvcache' has no attribute '{name}'"):
        getattr(kvcache, name)
    with pytest.raises(ImportError):
        exec(f"from kvcache import {name}")


WITHOUT = """
import sys
sys.modules.update(dict.fromkeys({absent!r}))
try:
    {code}
except ImportError as error:
    print(error)
"""
"""``code`` where some packages are not installed."""


@pytest.mark.parametrize(
    ("absent", "code", "says"),
    [
        (["zmq"], "from kvcache import *; ZmqPublisher", ""),
        (["msgspec"], "from kvcache import *; ZmqPublisher()", "ml-kvcache[events]"),
        (["transformers"], "import kvcache.integrations.transformers", "ml-kvcache[transformers]"),
        (["torch"], "from kvcache.integrations.transformers import HFCache", "ml-kvcache[transformers]"),
        (["mlx_lm"], "import kvcache.integrations.mlx_lm", "ml-kvcache[mlx-lm]"),
        (["mlx", "mlx.core"], "from kvcache.integrations.mlx_lm import CachePool", "ml-kvcache[mlx-lm]"),
        (["pytest"], "from ml.testing import BackendTests", "ml-kvcache[testing]"),
        (["pytest"], "from kvcache.testing import CacheTests", "ml-kvcache[testing]"),
    ],
)
def test_what_an_absent_package_takes_away_names_the_extra(absent: list[str], code: str, says: str) -> None:
    script = WITHOUT.format(absent=absent, code=code)
    line = [sys.executable, "-I", "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{script}"]
    ended = subprocess.run(line, capture_output=True, text=True, check=True, timeout=120)
    assert (f"pip install '{says}'" in ended.stdout) if says else not ended.stdout
