"""The conformance suite for backends, as the author of a plugin runs it.

From the shell, on any installed plugin::

    pytest --pyargs ml.testing --ml-backend=NAME
    pytest --pyargs ml.testing --ml-backend=torch --ml-backend-option device=cuda

or as a test file of the backend's own repository, which is ten lines::

    from ml.testing import BackendTests

    class TestMine(BackendTests):
        backend_name = "mine"

A backend that is no plugin overrides the fixture ``backend`` (function-scoped: tests close it) or
``open_backend``. Everything is required unless ``BackendSpec.features`` (or the class attribute
``features``) declares it absent; a declared absence must raise NotSupportedError.

Most tests are tables of cases over operations, dtypes and layouts. A test that fails names the cases that do.

Importing this package is light: the suite, pytest and hypothesis load with the first test class.

PYTEST_DONT_REWRITE: of this file; what is in the package is rewritten, for readable assertions.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from ml.backend_spec import Features

if TYPE_CHECKING:
    from ml.testing.backend import BackendTests

__all__ = ["BackendTests", "Features"]

if (_pytest := sys.modules.get("pytest")) is not None:
    _pytest.register_assert_rewrite(__name__)


def __getattr__(name: str) -> Any:
    if name == "BackendTests":
        try:
            return importlib.import_module("ml.testing.backend").BackendTests
        except ModuleNotFoundError as error:
            raise ImportError(
                f"ml.testing needs pytest and hypothesis: pip install 'ml-kvcache[testing]' ({error})",
                name=error.name,
            ) from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
