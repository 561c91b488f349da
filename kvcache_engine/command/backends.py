"""Information on each backend, from its plugin and from opening it briefly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

import ml
from kvcache import bytes_text

__all__ = ["Surveyed", "listing", "plain", "record", "survey"]

_WIDTH = len("capabilities")

CAPABILITIES: dict[str, type] = {
    name: getattr(ml, name) for name in ml.__all__ if name.startswith("Supports")
}


@dataclass(frozen=True, slots=True)
class Surveyed:
    """A backend; ``error`` is the error of opening it, in which case the later fields are unknown."""

    info: ml.BackendInfo
    dtypes: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    error: str = ""
    memory: tuple[ml.DeviceMemory, ...] = ()
    capabilities: tuple[str, ...] = ()


def survey() -> list[Surveyed]:
    """Every backend in the order of ``ml.available_backends()``; those that can run are opened."""
    infos = ml.available_backends()
    specs = ml.backend_specs()
    return [_survey_one(info, specs.get(info.name)) for info in infos]


def _survey_one(info: ml.BackendInfo, spec: ml.BackendSpec | None) -> Surveyed:
    features = spec.features if spec else None
    dtypes = tuple(dtype.name for dtype in ml.DType if features and dtype in features.dtypes)
    absent = tuple(sorted(features.absent)) if features else ()
    if not info.available:
        return Surveyed(info, dtypes, absent)
    try:
        with ml.open_backend(info.name) as backend:
            memory = backend.memory().devices
            capabilities = tuple(name for name, kind in CAPABILITIES.items() if isinstance(backend, kind))
    except (Exception, SystemExit) as error:  # any error of a plugin: the others are still listed
        text = str(error) if isinstance(error, ml.MLError) else f"{type(error).__name__}: {error}"
        return Surveyed(info, dtypes, absent, " ".join(text.split()))
    return Surveyed(info, dtypes, absent, "", memory, capabilities)


def record(row: Surveyed) -> dict[str, Any]:
    """The information as JSON-able data."""
    rest = asdict(row)
    return {**rest.pop("info"), **rest}


def listing(rows: Sequence[Surveyed]) -> Group:
    """A block for each backend: a line with its name and version, then its features."""
    parts: list[Text | Table] = []
    for row in rows:
        parts.append(_title(row))
        lines = Table.grid(padding=(0, 2), pad_edge=False)
        lines.add_column(style="dim", no_wrap=True)
        lines.add_column(overflow="fold")
        for name, value in _lines(row):
            lines.add_row(f"  {name:<{_WIDTH}}", Text(value))
        parts.append(lines)
    return Group(*parts)


def plain(rows: Sequence[Surveyed]) -> Iterator[str]:
    """The same as unwrapped lines, for a file or another program."""
    for row in rows:
        yield _title(row).plain
        yield from (f"  {name:<{_WIDTH}}  {value}" for name, value in _lines(row))


def _title(row: Surveyed) -> Text:
    info = row.info
    state = "failed to open" if row.error else "" if info.available else "cannot run here"
    facts = [info.version, f"priority {info.priority}", state]
    style = "bold green" if info.available and not row.error else "bold red" if row.error else "dim"
    return Text.assemble((info.name, style), "  ", ", ".join(filter(None, facts)))


def _lines(row: Surveyed) -> Iterator[tuple[str, str]]:
    info = row.info
    if row.error or not info.available:
        yield "why", row.error or " ".join(info.reason.split()) or "no reason given"
    if info.devices:
        yield "devices", ", ".join(info.devices)
    for device in row.memory:
        yield "memory", _memory(device)
    if row.dtypes:
        yield "dtypes", " ".join(row.dtypes)
    if row.absent:
        yield "absent", " ".join(row.absent)
    if info.available and not row.error:
        yield "capabilities", " ".join(row.capabilities) or "-"
    if not info.available and info.install_hint:
        yield "install", info.install_hint


def _memory(device: ml.DeviceMemory) -> str:
    free, total = (None if size is None else bytes_text(size) for size in (device.free, device.total))
    known = {(True, True): f"{free} free of {total}", (True, False): f"{free} free",
             (False, True): f"{total}, free memory unknown"}  # fmt: skip
    return f"{device.device}: {known.get((free is not None, total is not None), 'unknown')}"
