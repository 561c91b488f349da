"""The hooks behind ``--ml-backend`` and ``--ml-backend-option``, registered once one of them is used.

Importing this imports no framework and no part of the suite. The options themselves are declared by
``ml_kvcache.pytest_plugin``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping


def pytest_configure(config: pytest.Config) -> None:
    """Only the chosen backend is probed: the others' frameworks are not imported."""
    name, options = backend_name(config), backend_options(config)
    if name is None and options:
        raise pytest.UsageError("--ml-backend-option needs --ml-backend=NAME")
    if name is None:
        return
    from ml.errors import MLError
    from ml.plugins import registry

    try:
        registry().usable(name)
    except MLError as error:
        raise pytest.UsageError(f"--ml-backend={name}: {error}") from None


def pytest_report_header(config: pytest.Config) -> str | None:
    name = backend_name(config)
    return None if name is None else f"ml backend: {name} {dict(backend_options(config)) or ''}".rstrip()


def backend_name(config: pytest.Config) -> str | None:
    """The value of ``--ml-backend``, or None."""
    name: str | None = config.getoption("--ml-backend", default=None)
    return name or None


def backend_options(config: pytest.Config) -> Mapping[str, Any]:
    """The options for ``ml.open_backend`` from the command line; ``dtype`` becomes an ml.DType."""
    options: dict[str, Any] = {}
    for pair in config.getoption("--ml-backend-option", default=[]):
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise pytest.UsageError(f"--ml-backend-option {pair!r}: give KEY=VALUE")
        options[key] = _dtype(value) if key == "dtype" else value
    return options


def _dtype(value: str) -> Any:
    from ml.dtypes import DType

    try:
        return DType[value.upper()]
    except KeyError:
        names = ", ".join(dtype.name for dtype in DType)
        raise pytest.UsageError(f"--ml-backend-option dtype={value}: one of {names}") from None
