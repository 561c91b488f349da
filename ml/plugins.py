"""Finding backends: a pluggy host that loads plugins one by one and survives a broken one.

Nothing is loaded until the first question. Loading a plugin imports its module, which imports no
framework; a framework is imported by ``probe`` and ``open`` of the backends that are asked.
"""

from __future__ import annotations

import importlib.metadata
import os
import threading
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pluggy

from ml import hookspecs
from ml.capabilities import Availability, BackendInfo, BackendSpec
from ml.errors import BackendNotFoundError, BackendUnavailableError, MLError, PluginError
from ml.protocols import Backend

__all__ = [
    "ENTRY_POINT_GROUP",
    "ENVIRONMENT_VARIABLE",
    "Registry",
    "available_backends",
    "open_backend",
    "registry",
]

ENTRY_POINT_GROUP = "ml.backends"
ENVIRONMENT_VARIABLE = "ML_BACKEND"

_FAILURES = (Exception, SystemExit)
"""What a plugin may raise without taking the others, or the program, with it."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A plugin that was loaded, or why it could not be."""

    source: str
    spec: BackendSpec | None = None
    error: str = ""


class Registry:
    """The plugins of one entry-point group. :func:`registry` gives the process's own."""

    def __init__(self, entry_points: Iterable[importlib.metadata.EntryPoint] | None = None) -> None:
        self._entry_points = entry_points
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._found: list[_Found] | None = None
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

    def specs(self) -> dict[str, BackendSpec]:
        """Every backend by name. PluginError when two plugins claim one name."""
        owners: dict[str, tuple[BackendSpec, str]] = {}
        for found in self._load():
            if found.spec is None:
                continue
            if found.spec.name in owners:
                raise PluginError(
                    f"backend {found.spec.name!r} is provided twice, by {owners[found.spec.name][1]} and by "
                    f"{found.source}; uninstall one of them"
                )
            owners[found.spec.name] = (found.spec, found.source)
        return {name: spec for name, (spec, _) in owners.items()}

    def broken(self) -> dict[str, str]:
        """Plugins that could not be loaded, and why."""
        return {found.source: found.error for found in self._load() if found.spec is None}

    def infos(self) -> tuple[BackendInfo, ...]:
        """Every backend and every broken plugin, best first."""
        rows = [self._info(spec) for spec in self.specs().values()]
        rows += [BackendInfo(name, False, reason, None, (), 0, "") for name, reason in self.broken().items()]
        return tuple(sorted(rows, key=lambda row: (not row.available, -row.priority, row.name)))

    def open(self, name: str | None, options: dict[str, Any]) -> Backend:
        """Open by name, else by ``ML_BACKEND``, else the first by priority whose probe is ok."""
        wanted = name or os.environ.get(ENVIRONMENT_VARIABLE) or None
        if wanted is not None:
            return self._open_named(wanted, options)
        reasons = []
        for spec in sorted(self.specs().values(), key=lambda spec: (-spec.priority, spec.name)):
            found = probe(spec)
            if not found.ok:
                reasons.append(f"{spec.name} ({found.reason})")
                continue
            try:
                return _open(spec, options)
            except BackendUnavailableError as error:
                warnings.warn(f"{error}; trying the next backend", RuntimeWarning, stacklevel=3)
                reasons.append(str(error))
        reasons += [f"{source} ({error})" for source, error in self.broken().items()]
        raise BackendUnavailableError(f"open_backend: no backend can run here: {'; '.join(reasons)}")

    def _open_named(self, name: str, options: dict[str, Any]) -> Backend:
        specs = self.specs()
        if name not in specs:
            raise BackendNotFoundError(self._unknown(name, specs))
        spec = specs[name]
        found = probe(spec)
        if not found.ok:
            hint = f"; install it with: {spec.install_hint}" if spec.install_hint else ""
            raise BackendUnavailableError(f"open_backend: {name!r} cannot run here: {found.reason}{hint}")
        return _open(spec, options)

    def _unknown(self, name: str, specs: dict[str, BackendSpec]) -> str:
        broken = self.broken()
        if name in broken:
            return f"open_backend: the plugin of {name!r} is broken: {broken[name]}"
        known = "; ".join(f"{spec.name} ({spec.install_hint})" for spec in specs.values())
        others = f"; broken plugins: {broken}" if broken else ""
        return f"open_backend: no backend {name!r}; there are: {known}{others}"

    def _info(self, spec: BackendSpec) -> BackendInfo:
        found = probe(spec)
        return BackendInfo(
            spec.name, found.ok, found.reason, found.version, found.devices, spec.priority, spec.install_hint
        )

    def _load(self) -> list[_Found]:
        with self._lock:
            if self._found is None:
                points = self._entry_points
                if points is None:
                    points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
                self._found = [self._load_one(point) for point in points]
            return self._found

    def _load_one(self, point: importlib.metadata.EntryPoint) -> _Found:
        try:
            plugin = point.load()
        except _FAILURES as error:
            return _Found(point.name, error=f"importing {point.value} raised {_summary(error)}")
        return self._record(plugin, point.name)

    def _record(self, plugin: Any, source: str) -> _Found:
        """Register with pluggy and ask for the record; a failure takes the plugin out again."""
        unique = source
        while self._manager.has_plugin(unique):
            unique += "'"
        try:
            self._manager.register(plugin, name=unique)
            caller = self._manager.subset_hook_caller(
                "ml_backend", [other for other in self._manager.get_plugins() if other is not plugin]
            )
            records = caller()
            if len(records) != 1 or not isinstance(records[0], BackendSpec):
                raise PluginError(f"ml_backend() gave {records!r}; it returns one ml.BackendSpec")
        except _FAILURES as error:
            if self._manager.has_plugin(unique):
                self._manager.unregister(name=unique)
            return _Found(source, error=f"ml_backend() of {source} raised {_summary(error)}")
        return _Found(unique, records[0])


def probe(spec: BackendSpec) -> Availability:
    """The plugin's own probe; one that raises is unavailable for that reason."""
    try:
        found: object = spec.probe()
    except _FAILURES as error:
        return Availability(False, f"its probe raised {_summary(error)}")
    if not isinstance(found, Availability):
        return Availability(False, f"its probe gave {found!r}; it returns an ml.Availability")
    return found


def _open(spec: BackendSpec, options: dict[str, Any]) -> Backend:
    try:
        return spec.open(**options)
    except (MLError, TypeError, ValueError):  # an option that the backend refuses
        raise
    except _FAILURES as error:
        raise BackendUnavailableError(
            f"open_backend: {spec.name!r} failed to open: {_summary(error)}"
        ) from error


def _summary(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


_registry: Registry | None = None
_registry_lock = threading.Lock()


def registry() -> Registry:
    """The process's registry, made at the first call."""
    global _registry
    with _registry_lock:
        if _registry is None:
            _registry = Registry()
        return _registry


def open_backend(name: str | None = None, **options: Any) -> Backend:
    """Open a backend: by ``name``, else by the variable ``ML_BACKEND``, else the best available.

    ``options`` go to the backend: ``device=`` and ``dtype=`` are common to all of ours.

    Raises BackendNotFoundError for an unknown name (the message lists those that exist and how to
    install them), BackendUnavailableError where it cannot run here.
    """
    return registry().open(name, options)


def available_backends() -> tuple[BackendInfo, ...]:
    """Every backend that a plugin provides, runnable ones first, with the reason for the others."""
    return registry().infos()
