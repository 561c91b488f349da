"""Finding backends, and choosing one.

Loading a plugin imports its module, which must not import a framework; frameworks are imported by ``probe``
and ``open`` of the backends that are tried.
"""

from __future__ import annotations

import importlib.metadata
import os
import threading
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from ml import hookspecs
from ml.backend_spec import BackendInfo, BackendSpec
from ml.errors import BackendNotFoundError, BackendUnavailableError, MLError, OptionError
from ml.plugin_host import Hook, PluginHost, misfit
from ml.protocols import Backend

__all__ = [
    "ENTRY_POINT_GROUP",
    "ENVIRONMENT_VARIABLE",
    "Registry",
    "available_backends",
    "backend_specs",
    "open_backend",
    "registry",
]

ENTRY_POINT_GROUP = "ml.backends"
ENVIRONMENT_VARIABLE = "ML_BACKEND"

_HOOK = Hook(
    provides="backend",
    project=hookspecs.PROJECT,
    group=ENTRY_POINT_GROUP,
    specs=hookspecs,
    name="ml_backend",
    record=BackendSpec,
    record_name="ml.BackendSpec",
    marker="@ml.hookimpl",
    opens="ml.Backend",
    methods=("new_context", "memory", "close"),
    call="open_backend",
    unknown=BackendNotFoundError,
    unavailable=BackendUnavailableError,
)


class Registry(PluginHost[BackendSpec]):
    """The plugins of one entry-point group. ``registry()`` returns that of the process."""

    def __init__(self, entry_points: Iterable[importlib.metadata.EntryPoint] | None = None) -> None:
        super().__init__(_HOOK, entry_points)

    def infos(self) -> tuple[BackendInfo, ...]:
        """All backends, broken plugins and doubly claimed names, best first."""
        rows = [self._info(spec) for spec in self.specs().values()]
        rows += [BackendInfo(name, False, reason, None, (), 0, "") for name, reason in self.broken().items()]
        return tuple(sorted(rows, key=lambda row: (not row.available, -row.priority, row.name)))

    def open(self, name: str | None, options: dict[str, Any]) -> Backend:
        """Open by name, else by ``ML_BACKEND``, else the first by priority whose probe succeeds."""
        chosen = os.environ.get(ENVIRONMENT_VARIABLE) or None
        if name:
            return self._open_named(name, options)
        if chosen is not None:
            return self._open_named(chosen, options, asked_by=f" ({ENVIRONMENT_VARIABLE} asks for it)")
        reasons = []
        for spec in sorted(self.specs().values(), key=lambda spec: (-spec.priority, spec.name)):
            availability = self.probe(spec)
            if not availability.ok:
                reasons.append(f"{spec.name} ({availability.reason})")
                if self.late(spec):
                    self._passed_over(f"open_backend: {spec.name!r}: {availability.reason}")
                continue
            try:
                return self._opened(spec, options)
            except MLError as error:
                if options and not isinstance(error, BackendUnavailableError):
                    raise  # an option that the backend refuses
                self._passed_over(str(error))
                reasons.append(str(error))
        reasons += [f"{source} ({error})" for source, error in self.broken().items()]
        raise BackendUnavailableError(f"open_backend: no backend can run here: {'; '.join(reasons)}")

    @staticmethod
    def _passed_over(reason: str) -> None:
        """Warn at the line that called ``ml.open_backend``."""
        warnings.warn(f"{reason}; trying the next backend", RuntimeWarning, stacklevel=4)

    def _open_named(self, name: str, options: dict[str, Any], asked_by: str = "") -> Backend:
        return self._opened(self.usable(name, asked_by), options)

    def _opened(self, spec: BackendSpec, options: dict[str, Any]) -> Backend:
        if options and (wrong := misfit(spec.open, **options)):
            raise OptionError(f"open_backend: {spec.name!r}: {wrong}")
        opened: Backend = self.opened(spec, **options)
        return opened

    def _info(self, spec: BackendSpec) -> BackendInfo:
        availability = self.probe(spec)
        return BackendInfo(
            spec.name,
            availability.ok,
            availability.reason,
            availability.version,
            availability.devices,
            spec.priority,
            spec.install_hint,
        )


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
    """Open a backend by ``name``, else by the environment variable ``ML_BACKEND``, else the best available
    one.

    ``options`` are passed to the backend; all built-in backends have ``device=`` and ``dtype=``
    (F32, F16 or BF16, as an ``ml.DType`` or by name).

    Raises BackendNotFoundError for an unknown name (the message lists the known ones and how to install
    them), BackendUnavailableError if it cannot run here, OptionError for an option that it does not have.
    """
    return registry().open(name, options)


def available_backends() -> tuple[BackendInfo, ...]:
    """All backends of all plugins: first those that can run, then the others with the reason."""
    return registry().infos()


def backend_specs() -> Mapping[str, BackendSpec]:
    """What each plugin says of its backend, by name; nothing is probed, and no framework is imported.

    A broken plugin is left out: ``available_backends`` lists it with the reason.
    """
    return registry().specs()
