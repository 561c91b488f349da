"""The options in ``kv_connector_extra_config``, and those of a tier in its ``secondary_tiers``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvcache.cache import InvalidRangeError
from kvcache.integrations.open_stores import check_number, parse_options
from kvcache.stores import StoreValueError, parse_bytes

__all__ = ["LEAST_PAGE", "PAGES", "ConnectorOptions", "TierOptions"]

WHERE = "kv_connector_extra_config"
TIERS = "secondary_tiers"
PAGES = ("auto", "raw")
LEAST_PAGE = 128
"""The default number of tokens of a page, rounded up to whole blocks."""


@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    """The connector's options, checked.

    ``store``: URLs, nearest first. ``page_tokens``: the number of tokens of an entry, in whole blocks of
    vLLM; 0: the fewest blocks with at least 128. ``host_memory`` limits the bytes that wait to be written; a
    step with more waits ``save_wait`` seconds for room, then postpones the rest. A scheduler waits
    ``lookup_wait`` seconds for a store's answer, then schedules other requests first; no answer after
    ``lookup_timeout`` seconds is a miss. ``identity`` replaces the digest of the model's files. ``pages``:
    "raw" stores blocks in the layout of vLLM's attention, whatever it is.
    """

    store: tuple[str, ...]
    page_tokens: int = 0
    host_memory: int = 256 << 20
    load_threads: int = 2
    lookup_threads: int = 2
    lookup_wait: float = 0.002
    lookup_timeout: float = 1.0
    save_wait: float = 0.05
    save_generated: bool = True
    identity: Mapping[str, Any] | None = None
    pages: str = "auto"

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> ConnectorOptions:
        """Raises InvalidRangeError for an unknown option and for an invalid value."""
        options = parse_options(WHERE, given, [field.name for field in fields(cls)])
        if "host_memory" in options:
            options["host_memory"] = _bytes_of(options["host_memory"], f"{WHERE}: host_memory")
        for name, least in {"page_tokens": 0, "load_threads": 1, "lookup_threads": 1}.items():
            check_number(f"{WHERE}: {name}", options.get(name, least), int, least)
        for name in ("lookup_wait", "lookup_timeout", "save_wait"):
            check_number(f"{WHERE}: {name}", options.get(name, 0), (int, float), 0)
        check_number(f"{WHERE}: save_generated", options.get("save_generated", True), bool, False)
        if options.get("pages", "auto") not in PAGES:
            raise InvalidRangeError(
                f"{WHERE}: pages={options['pages']!r}; it must be one of {', '.join(PAGES)}"
            )
        return cls(**options)

    def tokens_of_page(self, block_size: int) -> int:
        """The tokens of a page. Raises InvalidRangeError unless ``page_tokens`` are whole blocks."""
        tokens = self.page_tokens or -(-LEAST_PAGE // block_size) * block_size
        if tokens % block_size:
            raise InvalidRangeError(
                f"{WHERE}: page_tokens={tokens}; vLLM's blocks have {block_size} tokens, and a page is whole "
                "blocks"
            )
        return tokens


@dataclass(frozen=True, slots=True)
class TierOptions:
    """The options of ``KVCacheTier``, checked.

    ``store``: URLs, nearest first. ``identity`` names the model and whatever else its K and V depend on;
    ``KVCacheOffloadingConnector`` supplies it. ``threads``: the number of threads for reads and writes.
    ``enable_kv_events``: tell vLLM's events of chunks that were stored. ``locality``: "LOCAL" or "REMOTE".
    """

    store: tuple[str, ...]
    identity: Mapping[str, Any]
    threads: int = 4
    enable_kv_events: bool = False
    locality: str | None = None

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> TierOptions:
        """Raises InvalidRangeError for an unknown or missing option and for an invalid value."""
        options = parse_options(TIERS, given, [field.name for field in fields(cls)])
        if options.get("identity") is None:
            raise InvalidRangeError(
                f"{TIERS}: identity is missing: vLLM's hashes of tokens do not cover the model; name it and "
                'its weights, as in {"model": ..., "weights": ...}, or let "kv_connector": '
                '"KVCacheOffloadingConnector" do it'
            )
        check_number(f"{TIERS}: threads", options.get("threads", 1), int, 1)
        check_number(f"{TIERS}: enable_kv_events", options.get("enable_kv_events", False), bool, False)
        if options.get("locality") not in (None, "LOCAL", "REMOTE"):
            raise InvalidRangeError(f"{TIERS}: locality={options['locality']!r}; it must be LOCAL or REMOTE")
        return cls(**options)


def _bytes_of(size: int | str, what: str) -> int:
    try:
        return parse_bytes(size, what)
    except StoreValueError as error:
        raise InvalidRangeError(str(error)) from None
