"""What ``--hicache-storage-backend-extra-config`` may say to our storage backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvcache.integrations.open_stores import check_number, parse_options

__all__ = ["StorageOptions"]

WHERE = "hicache-storage-backend-extra-config"
SGLANGS = frozenset({"backend_name", "module_path", "class_name", "interface_v1", "tp_lcm_size"})
"""What SGLang reads there itself, and leaves in."""


@dataclass(frozen=True, slots=True)
class StorageOptions:
    """The options of ``HiCacheStore``, checked.

    ``store`` are URLs, the nearest first: read in order, all of them written. ``threads`` read pages at a
    time. ``identity`` names the model in place of a digest of its files. ``interface_v1`` is SGLang's: pages
    are read into its host pool and written out of it in place.
    """

    store: tuple[str, ...]
    threads: int = 2
    identity: Mapping[str, Any] | None = None
    interface_v1: bool = False

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> StorageOptions:
        """Raises InvalidRangeError for an unknown option, and for a value that is none."""
        known = [field.name for field in fields(cls)]
        ours = {name: value for name, value in given.items() if name in known or name not in SGLANGS}
        found = parse_options(WHERE, ours, known)
        found["interface_v1"] = bool(given.get("interface_v1", False))
        check_number(f"{WHERE}: threads", found.get("threads", 1), int, 1)
        return cls(**found)
