"""A pluggy host of one kind of plugin: loads them one by one, and survives a broken one.

Nothing is loaded until the first question. Loading a plugin imports its module; what it needs beyond that
is imported by ``probe`` and ``open`` of the records that are asked.
"""

from __future__ import annotations

import importlib.metadata
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import pluggy

from ml.capabilities import Availability
from ml.errors import MLError, PluginError

__all__ = ["FAILURES", "Hook", "PluginHost", "Record", "probe", "summary"]

FAILURES = (Exception, SystemExit)
"""What a plugin may raise without taking the others, or the program, with it."""


class Record(Protocol):
    """What every plugin's record has."""

    @property
    def name(self) -> str: ...
    @property
    def install_hint(self) -> str: ...
    @property
    def probe(self) -> Callable[[], Availability]: ...
    @property
    def open(self) -> Callable[..., Any]: ...


R = TypeVar("R", bound=Record)


@dataclass(frozen=True, slots=True)
class Hook(Generic[R]):
    """One kind of plugin: what it provides, where it is announced, and the hook that returns its record.

    ``provides`` is the word of messages ("backend"); ``record_name`` is the record as authors import it.
    ``call`` is the function that users open one by; it raises ``unknown`` where there is none of a name,
    ``unavailable`` where it cannot be opened here.
    """

    provides: str
    project: str
    group: str
    specs: Any
    name: str
    record: type[R]
    record_name: str
    call: str
    unknown: type[MLError]
    unavailable: type[MLError]


@dataclass(frozen=True, slots=True)
class _Found(Generic[R]):
    """A plugin that was loaded, or why it could not be."""

    source: str
    spec: R | None = None
    error: str = ""


class PluginHost(Generic[R]):
    """The plugins of one entry-point group."""

    def __init__(
        self, hook: Hook[R], entry_points: Iterable[importlib.metadata.EntryPoint] | None = None
    ) -> None:
        self._hook = hook
        self._entry_points = entry_points
        self._manager = pluggy.PluginManager(hook.project)
        self._manager.add_hookspecs(hook.specs)
        self._found: list[_Found[R]] | None = None
        self._lock = threading.RLock()

    def register(self, plugin: Any, name: str | None = None) -> None:
        """Add a plugin object or module by hand, beside those of the entry points."""
        with self._lock:
            found = self._load()
            found.append(self._record(plugin, name or str(getattr(plugin, "__name__", repr(plugin)))))

    def unregister(self, plugin: Any) -> None:
        """Take out a plugin that :meth:`register` added."""
        with self._lock:
            name = self._manager.get_name(plugin)
            if name is None:
                raise PluginError(f"unregister: {plugin!r} is not registered, or is broken")
            self._manager.unregister(plugin)
            self._found = [found for found in self._load() if found.source != name]

    def specs(self) -> dict[str, R]:
        """Every record by name. PluginError when two plugins claim one name."""
        owners: dict[str, tuple[R, str]] = {}
        for found in self._load():
            if found.spec is None:
                continue
            if found.spec.name in owners:
                raise PluginError(
                    f"{self._hook.provides} {found.spec.name!r} is provided twice, by "
                    f"{owners[found.spec.name][1]} and by {found.source}; uninstall one of them"
                )
            owners[found.spec.name] = (found.spec, found.source)
        return {name: spec for name, (spec, _) in owners.items()}

    def broken(self) -> dict[str, str]:
        """Plugins that could not be loaded, and why."""
        return {found.source: found.error for found in self._load() if found.spec is None}

    def usable(self, name: str, note: str = "") -> R:
        """The record of this name, whose probe is ok.

        Raises the hook's ``unknown``, which lists what there is, or ``unavailable``, with the reason and
        how to install it; ``note`` ends the message.
        """
        spec = self.specs().get(name)
        if spec is None:
            raise self._hook.unknown(f"{self._hook.call}: {self._missing(name)}{note}")
        found = probe(spec)
        if not found.ok:
            said = not spec.install_hint or spec.install_hint in found.reason
            hint = "" if said else f"; install it with: {spec.install_hint}"
            raise self._hook.unavailable(
                f"{self._hook.call}: {name!r} cannot run here: {found.reason}{hint}{note}"
            )
        return spec

    def opened(self, spec: R, *arguments: Any, **options: Any) -> Any:
        """What the record opens.

        Its errors of this package, TypeError and ValueError (an option that it refuses) pass as they are;
        others come as the hook's ``unavailable``.
        """
        try:
            return spec.open(*arguments, **options)
        except (MLError, TypeError, ValueError):
            raise
        except FAILURES as error:
            message = f"{self._hook.call}: {spec.name!r} failed to open: {summary(error)}"
            raise self._hook.unavailable(message) from error

    def _missing(self, name: str) -> str:
        broken = self.broken()
        if name in broken:
            return f"the plugin of {name!r} is broken: {broken[name]}"
        others = f"; broken plugins: {broken}" if broken else ""
        return f"no {self._hook.provides} {name!r}; there are: {self._listed()}{others}"

    def _listed(self) -> str:
        """What there is, as messages list it."""
        return "; ".join(f"{spec.name} ({spec.install_hint})" for spec in self.specs().values())

    def _load(self) -> list[_Found[R]]:
        with self._lock:
            if self._found is None:
                points = self._entry_points
                if points is None:
                    points = importlib.metadata.entry_points(group=self._hook.group)
                self._found = [self._load_one(point) for point in points]
            return self._found

    def _load_one(self, point: importlib.metadata.EntryPoint) -> _Found[R]:
        try:
            plugin = point.load()
        except FAILURES as error:
            return _Found(point.name, error=f"importing {point.value} raised {summary(error)}")
        return self._record(plugin, point.name)

    def _record(self, plugin: Any, source: str) -> _Found[R]:
        """Register with pluggy and ask for the record; a failure takes the plugin out again."""
        hook = self._hook
        unique = source
        while self._manager.has_plugin(unique):
            unique += "'"
        try:
            self._manager.register(plugin, name=unique)
            others = [other for other in self._manager.get_plugins() if other is not plugin]
            records = self._manager.subset_hook_caller(hook.name, others)()
            if len(records) != 1 or not isinstance(records[0], hook.record):
                raise PluginError(f"{hook.name}() gave {records!r}; it returns one {hook.record_name}")
        except FAILURES as error:
            if self._manager.has_plugin(unique):
                self._manager.unregister(name=unique)
            return _Found(source, error=f"{hook.name}() of {source} raised {summary(error)}")
        return _Found(unique, records[0])


def probe(spec: Record) -> Availability:
    """The plugin's own probe; one that raises is unavailable for that reason."""
    try:
        found: object = spec.probe()
    except FAILURES as error:
        return Availability(False, f"its probe raised {summary(error)}")
    if not isinstance(found, Availability):
        return Availability(False, f"its probe gave {found!r}; it returns an ml.Availability")
    return found


def summary(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
