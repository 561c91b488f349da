"""The devices of an open backend, and their memory."""

from __future__ import annotations

from dataclasses import dataclass

from ml.records import INTEGER, NAME, OPTIONAL_INTEGER, TEXT, check, members

__all__ = ["BackendMemory", "DeviceInfo", "DeviceMemory"]


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One device of an open backend: its name ("cpu", "cuda:0"), its kind, and the framework's name for
    it.
    """

    name: str
    kind: str
    description: str = ""

    def __post_init__(self) -> None:
        check(self, name=NAME, kind=TEXT, description=TEXT)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of one device in bytes. ``free`` and ``total`` are None if the framework does not report
    them.
    """

    device: str
    allocated: int
    free: int | None = None
    total: int | None = None

    def __post_init__(self) -> None:
        check(self, device=NAME, allocated=INTEGER, free=OPTIONAL_INTEGER, total=OPTIONAL_INTEGER)


@dataclass(frozen=True, slots=True)
class BackendMemory:
    devices: tuple[DeviceMemory, ...]

    def __post_init__(self) -> None:
        check(self, devices=members("a tuple of ml.DeviceMemory", DeviceMemory, tuple))

    @property
    def allocated(self) -> int:
        """Bytes allocated by this backend on all its devices."""
        return sum(device.allocated for device in self.devices)
