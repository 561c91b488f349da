"""The pytest11 plugin: ``--ml-backend`` names the backend that the shipped suites run on.

Importing this imports no framework and no part of the suite. A suite that is collected without a
backend (neither the option nor a ``backend_name``) is a usage error: running on whatever happens
to be installed would let a missing framework pass as a success.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["backend_name", "backend_options"]

_SUITE = (
    "aliasing", "backend", "casts", "compute", "copies", "creation", "groups", "harness", "movement",
    "optional", "order", "reductions", "refusals", "rows", "samples", "stores",
)  # fmt: skip
pytest.register_assert_rewrite(*(f"ml.testing.{name}" for name in _SUITE))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ml", "conformance of ml backends")
    group.addoption(
        "--ml-backend", metavar="NAME", help="the backend that ml.testing and kvcache.testing run on"
    )
    group.addoption(
        "--ml-backend-option",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="an option of ml.open_backend, such as device=cuda or dtype=BF16; may be given often",
    )


def pytest_configure(config: pytest.Config) -> None:
    name = backend_name(config)
    if name is None:
        if config.getoption("--ml-backend-option", default=[]):
            raise pytest.UsageError("--ml-backend-option needs --ml-backend=NAME")
        return
    backend_options(config)
    from ml.plugin_host import probe
    from ml.plugins import registry

    specs, broken = registry().specs(), registry().broken()
    if name in broken:
        raise pytest.UsageError(f"--ml-backend={name}: its plugin is broken: {broken[name]}")
    if name not in specs:
        names = ", ".join([*specs, *broken])
        raise pytest.UsageError(f"--ml-backend={name}: no such backend; there are {names}")
    found = probe(specs[name])  # of this one alone: the others' frameworks are not imported
    if not found.ok:
        hint = specs[name].install_hint
        raise pytest.UsageError(
            f"--ml-backend={name}: cannot run here: {found.reason}; install it with: {hint}"
        )


def pytest_report_header(config: pytest.Config) -> str | None:
    name = backend_name(config)
    return None if name is None else f"ml backend: {name} {dict(backend_options(config)) or ''}".rstrip()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A class that leaves the choice to the command line (``chosen_by_option``) needs a choice."""
    if backend_name(config) is not None:
        return
    for item in items:
        if getattr(getattr(item, "cls", None), "chosen_by_option", False):
            raise pytest.UsageError(f"{item.nodeid.split('::')[0]}: which backend? Add --ml-backend=NAME")


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
