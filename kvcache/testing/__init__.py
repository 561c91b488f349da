"""The cache suite, which third parties run on their own backends.

From the shell, on any installed plugin::

    pytest --pyargs kvcache.testing --ml-backend=NAME

or as a test file of the backend's own repository, which is ten lines::

    from kvcache.testing import CacheTests

    class TestMine(CacheTests):
        backend_name = "mine"

The fixtures are those of ``ml.testing.BackendTests``. A backend that only stores (its ``Features`` declare
``"compute"`` absent) runs everything except the arithmetic, and its ``attend`` must raise NotSupportedError.
``python -m kvcache.testing.traces`` runs many more random traces.

``StoreTests`` is the suite for stores. ``DrivenTests`` tests any other cache, on any framework, through a
``CacheDriver``: see ``kvcache.testing.driven``. ``bench`` times decoding through a cache, as the command
``kvcache bench`` does.

Importing this package is cheap: the suite, pytest and hypothesis are loaded with the first test class.

PYTEST_DONT_REWRITE: this file only; pytest rewrites the assertions of the package's modules.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcache.testing import bench
    from kvcache.testing.cache import CacheTests
    from kvcache.testing.driven import (
        AREAS,
        DIM,
        LONGEST,
        TRACES,
        CacheDriver,
        DrivenTests,
        Outcome,
        Seen,
        Span,
        Tokens,
        attended,
        check,
        keys_and_values,
    )
    from kvcache.testing.stores import StoreTests

_DRIVEN = (
    "AREAS", "DIM", "LONGEST", "TRACES", "CacheDriver", "DrivenTests", "Outcome", "Seen", "Span", "Tokens",
    "attended", "check", "keys_and_values",
)  # fmt: skip
_MODULES = {"CacheTests": "kvcache.testing.cache", "StoreTests": "kvcache.testing.stores"}
_MODULES |= dict.fromkeys(_DRIVEN, "kvcache.testing.driven")

__all__ = [
    "AREAS", "DIM", "LONGEST", "TRACES", "CacheDriver", "CacheTests", "DrivenTests", "Outcome", "Seen",
    "Span", "StoreTests", "Tokens", "attended", "bench", "check", "keys_and_values",
]  # fmt: skip

if (_pytest := sys.modules.get("pytest")) is not None:
    _pytest.register_assert_rewrite(__name__)


def __getattr__(name: str) -> Any:
    if name == "bench":
        return importlib.import_module("kvcache.testing.bench")
    if name in _MODULES:
        try:
            return getattr(importlib.import_module(_MODULES[name]), name)
        except ModuleNotFoundError as error:
            raise ImportError(
                f"kvcache.testing needs pytest and hypothesis: pip install 'ml-kvcache[testing]' ({error})",
                name=error.name,
            ) from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
