"""A pluggy host for one kind of plugin, which loads plugins one by one and tolerates broken ones.

Nothing is loaded before the first query. Loading a plugin imports its module; further dependencies are
imported by ``probe`` and ``open`` of the records that are used.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import pluggy

from ml.backend_spec import Availability
from ml.errors import MLError, PluginError
from ml.probing import Probe
from ml.records import shown, summary
from ml_kvcache import HOME, hidden

FAILURES = (Exception, SystemExit)
"""The errors that a plugin may raise without affecting other plugins or the program."""


class Record(Protocol):
    """The fields of every plugin record."""

    @property
    def name(self) -> str: ...
    @property
    def install_hint(self) -> str: ...
    @property
    def probe(self) -> Callable[[], Availability]: ...
    @property
    def open(self) -> Callable[..., Any]: ...


R = TypeVar("R", bound=Record)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Hook(Generic[R]):
    """One kind of plugin: what it provides, its entry-point group, and the hook that returns its record.

    ``provides`` is the word used in messages ("backend"); ``record_name`` and ``marker`` are the record and
    the decorator as authors import them. ``call`` is the function with which users open one; it raises
    ``unknown`` for an unknown name and ``unavailable`` for one that cannot be opened here. The opened object,
    described by ``opens``, has the ``methods``.
    """

    provides: str
    project: str
    group: str
    specs: Any
    name: str
    record: type[R]
    record_name: str
    marker: str
    opens: str
    methods: tuple[str, ...]
    call: str
    unknown: type[MLError]
    unavailable: type[MLError]


@dataclass(frozen=True, slots=True)
class _Found(Generic[R]):
    """A loaded plugin, or the reason why it could not be loaded. ``source`` is unique; ``value`` is its
    location.
    """

    source: str
    value: str
    plugin: Any = None
    spec: R | None = None
    probe: Probe | None = None
    error: str = ""


def misfit(open: Callable[..., Any], /, *arguments: Any, **options: Any) -> str | None:
    """Why the function's signature does not accept these arguments; None if it does, or if it has no
    signature.
    """
    try:
        signature = inspect.signature(open, follow_wrapped=False)
    except ValueError:  # written in C
        return None
    try:
        signature.bind(*arguments, **options)
    except TypeError as error:
        parameters = [*signature.parameters.values()][len(arguments) :]
        known = sorted(one.name for one in parameters)
        more = any(one.kind is one.VAR_KEYWORD for one in parameters)
        wrong = () if more else (name for name in options if name not in known)
        return next((f"no option {name!r}; there are: {', '.join(known)}" for name in wrong), str(error))
    return None


class PluginHost(Generic[R]):
    """The plugins of one entry-point group."""

    def __init__(
        self, hook: Hook[R], entry_points: Iterable[importlib.metadata.EntryPoint] | None = None
    ) -> None:
        self._hook = hook
        self._entry_points = entry_points
        self._plugins: list[_Found[R]] | None = None
        self._lock = threading.RLock()

    def register(self, plugin: Any, name: str | None = None) -> None:
        """Add a plugin object or module, in addition to those of the entry points."""
        with self._lock:
            plugins = self._load()
            source = name or str(getattr(plugin, "__name__", None) or shown(plugin))
            plugins.append(self._asked(plugin, _label(source, "by hand", plugins), "by hand"))

    def unregister(self, plugin: Any) -> None:
        """Remove a plugin that ``register`` added."""
        with self._lock:
            plugins = self._load()
            kept = [one for one in plugins if one.plugin is not plugin or one.spec is None]
            if len(kept) == len(plugins):
                raise PluginError(f"unregister: {plugin!r} is not registered, or is broken")
            self._plugins = kept

    def specs(self) -> dict[str, R]:
        """All records by name, except names that two plugins claim."""
        return {name: claims[0] for name, claims in self._claims().items() if len(claims) == 1}

    def broken(self) -> dict[str, str]:
        """Unusable plugins and names, with the reason: plugins that could not be loaded, and names claimed
        twice.
        """
        claims = self._claims()
        reasons = {name: self._twice(name) for name, records in claims.items() if len(records) > 1}
        for plugin in self._load():
            if plugin.spec is None:
                taken = plugin.source in claims
                reasons[f"{plugin.source} ({plugin.value})" if taken else plugin.source] = plugin.error
        return reasons

    def probe(self, spec: R) -> Availability:
        """The result of the record's probe, which runs once; unavailable if it raises or takes too long."""
        return self._probe(spec).answer()

    def late(self, spec: R) -> bool:
        """Whether the record's probe was started and has not finished."""
        return self._probe(spec).late

    def usable(self, name: str, note: str = "") -> R:
        """The record of this name, after a successful probe.

        Raises the errors of ``claimed`` and ``ready``; ``note`` is appended to the message.
        """
        return self.ready(self.claimed(name, note), note)

    def claimed(self, name: str, note: str = "") -> R:
        """The record of this name, without a probe.

        Raises the hook's ``unknown``, which lists the known names, PluginError for a name that two plugins
        claim; ``note`` is appended to the message.
        """
        claims = self._claims().get(name, ())
        if len(claims) > 1:
            raise PluginError(
                f"{self._hook.call}: {self._hook.provides} {name!r} is {self._twice(name)}{note}"
            )
        if not claims:
            raise self._hook.unknown(f"{self._hook.call}: {self._missing(name)}{note}")
        return claims[0]

    def ready(self, spec: R, note: str = "") -> R:
        """The record, after a successful probe.

        Raises the hook's ``unavailable``, with the reason and how to install it; ``note`` is appended to the
        message.
        """
        availability = self.probe(spec)
        if not availability.ok:
            said = not spec.install_hint or spec.install_hint in availability.reason or self.late(spec)
            hint = "" if said else f"; install it with: {spec.install_hint}"
            raise self._hook.unavailable(
                f"{self._hook.call}: {spec.name!r} cannot run here: {availability.reason}{hint}{note}"
            )
        return spec

    def opened(self, spec: R, *arguments: Any, **options: Any) -> Any:
        """The object that the record opens.

        Raises the errors of ``called``, and the hook's ``unavailable`` if the object lacks required methods.
        """
        hook = self._hook

        def opened() -> tuple[Any, list[str]]:
            made = spec.open(*arguments, **options)
            owner = None if isinstance(made, type) else made
            return made, [name for name in hook.methods if not callable(getattr(owner, name, None))]

        made, lacks = self.called(spec, opened, given=bool(arguments or options))
        if lacks:
            raise hook.unavailable(
                f"{hook.call}: {spec.name!r} failed to open: its open() returned {shown(made)}, which does "
                f"not implement {hook.opens}: it lacks {', '.join(lacks)}"
            )
        return made

    def called(self, spec: R, function: Callable[[], T], given: bool) -> T:
        """The result of a function of the record.

        Errors of this package are passed on, and so are TypeError and ValueError if arguments were ``given``;
        others become the hook's ``unavailable``.
        """
        refusals = (TypeError, ValueError) if given else ()
        try:
            return function()
        except (MLError, *refusals):
            raise
        except FAILURES as error:
            what = f"{self._hook.call}: {spec.name!r}"
            raise self._hook.unavailable(f"{what} failed to open: {summary(error)}") from error

    def _claims(self) -> dict[str, list[R]]:
        """All records by name."""
        claims: dict[str, list[R]] = {}
        for plugin in self._load():
            if plugin.spec is not None:
                claims.setdefault(plugin.spec.name, []).append(plugin.spec)
        return claims

    def _twice(self, name: str) -> str:
        by = [
            plugin.source for plugin in self._load() if plugin.spec is not None and plugin.spec.name == name
        ]
        return f"provided twice, by {' and by '.join(by)}; uninstall one of them"

    def _missing(self, name: str) -> str:
        broken = self.broken()
        if name in broken:
            return f"the plugin of {name!r} is broken: {broken[name]}"
        others = f"; broken plugins: {broken}" if broken else ""
        return f"no {self._hook.provides} {name!r}; known: {self._listed()}{others}"

    def _listed(self) -> str:
        """The known names, as listed in messages."""
        return "; ".join(f"{spec.name} ({spec.install_hint})" for spec in self.specs().values())

    def _probe(self, spec: R) -> Probe:
        probes = (one.probe for one in self._load() if one.spec is spec and one.probe is not None)
        return next(probes, None) or Probe(spec.probe)

    def _load(self) -> list[_Found[R]]:
        with self._lock:
            if self._plugins is None:
                points = self._entry_points
                if points is None:
                    points = importlib.metadata.entry_points(group=self._hook.group)
                self._plugins = []
                for point in points:
                    self._plugins.append(self._loaded(point, _label(point.name, point.value, self._plugins)))
            return self._plugins

    def _loaded(self, point: importlib.metadata.EntryPoint, source: str) -> _Found[R]:
        try:
            loaded = self._asked(point.load(), source, point.value)
        except FAILURES as error:
            loaded = _Found(source, point.value, error=f"importing {point.value} raised {summary(error)}")
        if loaded.spec is not None:
            return loaded
        package = point.value.partition(":")[0].partition(".")[0]
        homes = [HOME] if point.dist is None else [str(point.dist.locate_file("")), HOME]
        hider = hidden(package, *homes)
        return replace(loaded, error=f"{loaded.error} ({hider})") if hider else loaded

    def _asked(self, plugin: Any, source: str, value: str) -> _Found[R]:
        """Each plugin with the record from its hook; plugins are queried one at a time, so that none hides
        another.
        """
        hook = self._hook
        manager = pluggy.PluginManager(hook.project)
        manager.add_hookspecs(hook.specs)
        try:
            manager.register(plugin)
            caller = getattr(manager.hook, hook.name)
            if not caller.get_hookimpls():
                raise PluginError(self._unmarked(plugin))
            (record,) = caller() or [None]
            if not isinstance(record, hook.record):
                raise PluginError(f"it returned {shown(record)}; it must return one {hook.record_name}")
        except FAILURES as error:
            reason = str(error) if type(error) is PluginError else f"{hook.name}() raised {summary(error)}"
            return _Found(source, value, plugin, error=reason)
        return _Found(source, value, plugin, record, Probe(record.probe))

    def _unmarked(self, plugin: Any) -> str:
        """Why pluggy does not find the hook."""
        name, marker = self._hook.name, self._hook.marker
        if callable(getattr(plugin, name, None)):
            return f"its {name}() has no @hookimpl: decorate it with {marker}"
        return f"it has no {name}(); define that function, decorated with {marker}"


def _label(name: str, value: str, others: list[_Found[R]]) -> str:
    """A name that no other plugin has."""
    taken = {one.source for one in others}
    label = name if name not in taken else f"{name} ({value})"
    while label in taken:
        label += "'"
    return label
