"""Bugs in the place of parts of kvcache, and the run that each has to be noticed in."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

Plant = Callable[..., Any]
Bug = tuple[str, str, Plant]
"""What is replaced, in kvcache or by its whole name in kvcache_engine; the test that fails then, by how its
name begins behind ``test_``, and a part of its parameters; what is called in its place, with the original
first."""
KEPT: list[Any] = []
"""What is never let go of."""


def always(value: Any) -> Plant:
    return lambda original, *args, **named: value


NOTHING = always(None)


class Put:
    """A value, property or class in the place of another, not called by way of it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self) -> None:
        raise AssertionError("what is put is not called")


def named(path: str) -> Any:
    return pkgutil.resolve_name(path if path.startswith("kvcache_engine.") else f"kvcache.{path}")


def like(path: str) -> Put:
    return Put(named(path))


def prop(function: Callable[[Any], Any]) -> Put:
    return Put(property(function))


def after(change: Callable[[Any], None]) -> Plant:
    """The result, changed."""

    def call(f: Any, *args: Any) -> Any:
        found = f(*args)
        change(found)
        return found

    return call


SLIPS = (AttributeError, TypeError, NameError)
"""What a bug raises that does not fit the code; it is not noticed then."""
UNUSED = [f"-pno:{name}" for name in (
    "cacheprovider", "unraisableexception", "threadexception", "doctest", "junitxml", "pastebin", "stepwise",
    "setuponly", "setupplan", "legacypath", "faulthandler", "logging", "debugging", "ml-crashes",
)]  # fmt: skip
"""Plugins of pytest; two collect all garbage for warnings when a session ends."""
RANDOM = 10
"""How often a test may pass: some only fail as threads happen to meet."""


class Planter:
    """Runs, instead of all that pytest collected, each bug's own test until it fails for one parameter."""

    def __init__(self, bugs: list[Bug]) -> None:
        self.bugs = bugs
        self.unnoticed = [f"{target}: {test}" for target, test, _ in bugs]
        self.skipped: dict[str, str] = {}
        """Bugs that only tests notice which do not run here, and why these do not."""
        self.error: BaseException | None = None

    def pytest_configure(self, config: pytest.Config) -> None:
        config.option.tbstyle = "native"  # no source is looked up for it

    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> None:
        if call.excinfo is not None:
            self.error = call.excinfo.value

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for target, test, plant in self.bugs:
            name, _, parameter = f"test_{test}".rstrip("]").partition("[")
            items = [i for i in session.items if i.name.startswith(name) and parameter in i.name[len(name) :]]
            with pytest.MonkeyPatch.context() as patch:
                owner, _, attribute = target.rpartition("." if "." in target.partition(":")[2] else ":")
                patch.setattr(named(owner), attribute, in_place_of(named(target), plant))
                skips: list[str] = []
                if any(self.fails(item, skips) for item in items * RANDOM):
                    self.unnoticed.remove(f"{target}: {test}")
                elif skips:
                    self.unnoticed.remove(f"{target}: {test}")
                    self.skipped[f"{target}: {test}"] = skips[0]
                elif isinstance(self.error, SLIPS):
                    self.unnoticed.append(f"  {self.error!r}")
        return True

    def fails(self, item: Any, skips: list[str]) -> bool:
        """Whether the test fails; where it is skipped, ``skips`` has the reason then."""
        self.error = None
        item._initrequest()
        runtestprotocol(item, log=False, nextitem=None)
        if isinstance(self.error, pytest.skip.Exception):
            skips.append(str(self.error))
        return not isinstance(self.error, (type(None), pytest.skip.Exception, *SLIPS))


def in_place_of(original: Any, plant: Plant) -> Any:
    if isinstance(plant, Put):
        return plant.value
    return lambda *args, **options: plant(original, *args, **options)
