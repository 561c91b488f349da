"""The cache suite, as third parties run it on their own backend.

From the shell, on any installed plugin::

    pytest --pyargs kvcache.testing --ml-backend=NAME

or as a test file of the backend's own repository, which is ten lines::

    from kvcache.testing import CacheTests

    class TestMine(CacheTests):
        backend_name = "mine"

The fixtures are those of :class:`ml.testing.BackendTests`. A backend that only stores (its
``Features`` declare ``"compute"`` absent) runs all of it but the arithmetic, and its ``attend`` has to
raise NotSupportedError. :class:`StoreTests` is the suite of a place for snapshots.
``python -m kvcache.testing.traces`` runs many more random traces.

Importing this package is light: the suite, pytest and hypothesis load with the first test class.

PYTEST_DONT_REWRITE: of this file; what is in the package is rewritten, for readable assertions.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcache.testing.cache import CacheTests
    from kvcache.testing.stores import StoreTests

__all__ = ["CacheTests", "StoreTests"]

_MODULES = {"CacheTests": "kvcache.testing.cache", "StoreTests": "kvcache.testing.stores"}

if (_pytest := sys.modules.get("pytest")) is not None:
    _pytest.register_assert_rewrite(__name__)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
