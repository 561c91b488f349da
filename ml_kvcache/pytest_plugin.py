"""The pytest11 plugin: the options of the shipped suites, and nothing more until one of them is given.

It is loaded by every run of pytest where this distribution is installed, in whatever project: so it imports
nothing, and the rest is in ``ml.testing.plugin``.
"""

from __future__ import annotations

import sys

from ml_kvcache import hidden

TYPE_CHECKING = False  # typing's, without the cost of importing typing
if TYPE_CHECKING:
    import pytest

__all__: list[str] = []

SUITES = {"ml.testing", "kvcache.testing", "kvcache_engine.testing"}
"""The packages of the shipped suites."""


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
    group.addoption(
        "--ml-time-limit",
        metavar="SECONDS",
        type=float,
        help="a test of the suites that takes longer fails (default: 600 with --ml-backend; 0: no limit)",
    )
    group.addoption("--ml-quick", action="store_true", help="the part of the suites that takes a minute")


def pytest_configure(config: pytest.Config) -> None:
    """The rest is loaded where it is asked for."""
    names = "--ml-backend", "--ml-backend-option", "--ml-quick", "--ml-time-limit"
    if not any(config.getoption(name) for name in names):
        return
    if reason := hidden("ml") or hidden("kvcache"):
        import pytest

        raise pytest.UsageError(f"--ml-backend: {reason}")
    from ml.testing import plugin, quick, time_limit

    config.pluginmanager.register(plugin, "ml-backend")
    if config.getoption("--ml-quick"):
        config.pluginmanager.register(quick, "ml-quick")
    limit = config.getoption("--ml-time-limit")
    if limit is None:
        limit = time_limit.SECONDS
    if not 0 <= limit <= time_limit.MOST:
        import pytest

        raise pytest.UsageError(f"--ml-time-limit={limit:g}: from 0 to {time_limit.MOST:g} seconds")
    if limit:
        config.pluginmanager.register(time_limit.TimeLimit(limit), "ml-time-limit")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where there are tests of the suites: the test in which the process ends is named. xdist does so itself.

    A suite that leaves the choice to the command line (``chosen_by_option``) needs a choice: running on
    whatever happens to be installed would let a missing framework pass as a success.
    """
    if not SUITES & sys.modules.keys():
        return
    classes = {cls for item in items if (cls := getattr(item, "cls", None)) is not None}
    bases = {base.__module__ for cls in classes for base in cls.__mro__}
    if any(name.startswith((*SUITES,)) for name in bases) and not hasattr(config, "workerinput"):
        from ml.testing.crashes import CrashWatch

        config.pluginmanager.register(CrashWatch(), "ml-crashes")
    if config.getoption("--ml-backend"):
        return
    for item in items:
        if getattr(getattr(item, "cls", None), "chosen_by_option", False):
            import pytest

            raise pytest.UsageError(f"{item.nodeid.split('::')[0]}: which backend? Add --ml-backend=NAME")
