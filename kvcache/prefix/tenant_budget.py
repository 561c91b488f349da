"""What one tenant may keep at most in each tier."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.stores.sizes import parse_bytes

__all__ = ["TenantBudget"]


@dataclass(frozen=True, slots=True)
class TenantBudget:
    """Bytes of snapshots that are kept for one tenant on the device and in host memory; None: no limit.

    Sizes such as ``"64MiB"`` become numbers. What everyone may share counts for nobody, nor does what open
    sessions hold. What a tenant has too much goes as if the tier were full: its own that goes first.
    """

    device: int | None = None
    host: int | None = None

    def __init__(self, device: int | str | None = None, host: int | str | None = None) -> None:
        for name, value in (("device", device), ("host", host)):
            found = None if value is None else parse_bytes(value, f"TenantBudget: {name}")
            object.__setattr__(self, name, found)
