"""Devices of this machine in torch: names, options, free and total bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from backends.placement import asked_devices, check_once
from ml.devices import DeviceInfo
from ml.errors import DeviceError


@dataclass(frozen=True, slots=True)
class Place:
    """A device of an open backend: its name, and torch's device behind it.

    "cpu:0" and "cpu:1" are two places on the one CPU, since torch drops the index there: a model split over
    devices can be tested on a machine without any.
    """

    name: str
    device: torch.device

    def info(self) -> DeviceInfo:
        kind = self.device.type
        if kind == "cuda":
            return DeviceInfo(self.name, kind, torch.cuda.get_device_name(self.device))
        threads = f", {torch.get_num_threads()} threads" if kind == "cpu" else ""
        return DeviceInfo(self.name, kind, f"PyTorch {torch.__version__}{threads}")


def existing_devices() -> tuple[str, ...]:
    """Names for ``device=``, the default first: CUDA if available, else the CPU. MPS is never the default,
    since it lacks operations of the contract.
    """
    names = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    names.append("cpu")
    if torch.backends.mps.is_available():
        names.append("mps")
    return tuple(names)


def find_places(
    device: str | torch.device | None, devices: Sequence[str | torch.device] | None
) -> tuple[Place, ...]:
    """The requested places. Raises DeviceError for one that does not exist."""
    asked = asked_devices(device, devices)
    places = tuple(map(_find, existing_devices()[:1] if asked is None else asked))
    check_once([place.name for place in places])
    return places


def _find(wanted: str | torch.device) -> Place:
    try:
        if not isinstance(wanted, (str, torch.device)):
            raise TypeError("a device must be a name or a torch.device")
        device = torch.device(wanted)
        if device.type == "meta":
            raise TypeError("the meta device stores no data")
        if device.type == "cpu":
            if isinstance(wanted, str) and str(device) != wanted:  # torch stores the index in 8 bits
                raise TypeError("places on the CPU are cpu and cpu:0 to cpu:127")
            return Place(str(device), torch.device("cpu"))
        if str(device) in existing_devices() and device.type == "cuda":  # testing it would use its memory
            return Place(str(device), device)
        existing = torch.empty(0, device=device).device  # with its index: "cuda" is "cuda:0"
    except Exception as error:  # torch raises AssertionError, RuntimeError and others here
        raise DeviceError(
            f"open_backend: torch has no device {str(wanted)!r} here; available: "
            f"{', '.join(existing_devices())} ({_first_line(error)})"
        ) from error
    return Place("mps" if existing.type == "mps" else str(existing), existing)


def device_memory(place: Place) -> tuple[int | None, int | None]:
    """(free, total) bytes; None if unknown to torch."""
    if place.device.type == "cuda":
        return torch.cuda.mem_get_info(place.device)
    if place.device.type == "mps":
        total = int(torch.mps.recommended_max_memory())
        return max(0, total - int(torch.mps.driver_allocated_memory())), total
    if place.device.type == "cpu":
        from ml.host import host_memory

        return host_memory()
    return None, None


def release(places: Sequence[Place]) -> None:
    """Return cached blocks to the devices."""
    kinds = {place.device.type for place in places}
    if "cuda" in kinds:
        torch.cuda.empty_cache()
    if "mps" in kinds:
        torch.mps.empty_cache()


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0] or type(error).__name__
