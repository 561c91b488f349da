"""The options of our storage backend in ``--hicache-storage-backend-extra-config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvcache.integrations.open_stores import check_number, parse_options

__all__ = ["StorageOptions"]

WHERE = "hicache-storage-backend-extra-config"
SGLANGS = frozenset({"backend_name", "module_path", "class_name", "interface_v1", "tp_lcm_size"})
"""Options that SGLang reads itself and passes on."""


@dataclass(frozen=True, slots=True)
class StorageOptions:
    """The options of ``HiCacheStore``, checked.

    ``store``: URLs, nearest first; they are read in order, and all are written. ``threads``: the number of
    threads that read pages. ``identity`` replaces the digest of the model's files. ``interface_v1`` is
    SGLang's: pages are read into its host pool and written out of it in place.
    """

    store: tuple[str, ...]
    threads: int = 2
    identity: Mapping[str, Any] | None = None
    interface_v1: bool = False

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> StorageOptions:
        """Raises InvalidRangeError for an unknown option and for an invalid value."""
        known = [field.name for field in fields(cls)]
        ours = {name: value for name, value in given.items() if name in known or name not in SGLANGS}
        options = parse_options(WHERE, ours, known)
        options["interface_v1"] = bool(given.get("interface_v1", False))
        check_number(f"{WHERE}: threads", options.get("threads", 1), int, 1)
        return cls(**options)
