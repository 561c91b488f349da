"""The size of an engine's cache, and how its passes are split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import ml
from kvcache import TenantBudget
from kvcache.cache import CacheDType
from kvcache.stores import StoreValueError, parse_bytes
from kvcache_engine.config import ModelSizes
from kvcache_engine.errors import RequestError, check_whole

__all__ = ["Acceptance", "EngineOptions", "Fetch", "SpeculativeOptions"]

Acceptance = Literal["rejection", "exact"]
Fetch = Literal["measured", "always"]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options of an engine: up to ``max_sequences`` at a time, of ``capacity`` tokens each (None: the
    model's ``max_positions``, at most 4096), stored as ``cache_dtype`` (see ``Cache.init``). One
    forward pass has the next token of every answer, and prompt tokens up to ``prefill_chunk`` in all.

    ``context`` is the most tokens of one request (None: ``capacity``). All sequences share ``max_sequences *
    capacity`` tokens, so a larger ``context`` lets some exceed their share while others need less. ``budget``
    limits the bytes of kept snapshots on the device, including those in the cache's own cells (None: twice
    the size of the cache). ``interval`` and ``block_size`` are options of PrefixCache: entries of stores, and
    blocks in events, have ``block_size`` tokens, and keys depend on it. ``tenant_budget``, ``read_ahead``,
    ``backlog`` and ``write_through`` are options of PrefixCache too; with ``write_through``, a thread writes
    each answer to the stores when it ends. Bytes may be sizes such as ``"2GiB"``, which become numbers.

    ``batch_invariant``: answers do not depend on the cache's content or on other requests, bit for bit. Each
    pass then has one request, and ``block_size`` tokens of a prompt, whatever ``prefill_chunk`` is; only such
    blocks are reused, not answers.

    ``fetch``: "measured" reads from a store only if fetching is faster than computing, as measured so far
    (``BreakEven``); "always" reads every prefix.

    >>> from kvcache_engine import EngineOptions
    >>> EngineOptions(max_sequences=16, capacity=8192, cache_dtype="Q8_0", write_through=True).capacity
    8192
    """

    max_sequences: int = 4
    capacity: int | None = None
    prefill_chunk: int = 512
    cache_dtype: CacheDType = ml.DType.F32
    context: int | None = None
    budget: int | str | None = None
    interval: int = 512
    block_size: int = 128
    tenant_budget: TenantBudget | Callable[[str], TenantBudget] | None = None
    fetch: Fetch = "measured"
    read_ahead: int | str = 256 << 20
    backlog: int | str = 256 << 20
    write_through: bool = True
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        self._check_positive("max_sequences", "prefill_chunk", "block_size")
        self._check_positive(*(name for name in ("capacity", "context") if getattr(self, name) is not None))
        if self.batch_invariant and self.block_size < 2:
            raise RequestError("EngineOptions: block_size=1; with batch_invariant it must be at least 2")
        if self.fetch not in get_args(Fetch):
            raise RequestError(f"EngineOptions: fetch={self.fetch!r}; it must be 'measured' or 'always'")
        for name in ("budget", "read_ahead", "backlog"):
            try:
                object.__setattr__(self, name, parse_bytes(getattr(self, name), f"EngineOptions: {name}"))
            except StoreValueError as error:
                raise RequestError(str(error)) from None
        for name in ("read_ahead", "backlog"):
            object.__setattr__(self, name, check_whole("EngineOptions", name, getattr(self, name), 0))

    def _check_positive(self, *names: str) -> None:
        for name in names:
            object.__setattr__(self, name, check_whole(type(self).__name__, name, getattr(self, name), 1))

    def capacity_for(self, config: ModelSizes) -> int:
        return min(config.max_positions, 4096) if self.capacity is None else self.capacity

    def context_for(self, config: ModelSizes) -> int:
        """The most tokens of one request, prompt and answer together."""
        return min(self.context or self.capacity_for(config), config.max_positions)

    def cache_sizes(self, config: ModelSizes) -> tuple[CacheDType, int, int]:
        """The format, the number of sequences and the tokens of each, as for ``Cache.init``.

        Raises RequestError for a ``context`` larger than the cache.
        """
        capacity = self.capacity_for(config)
        total = capacity * self.max_sequences
        if self.context is not None and self.context > total:
            raise RequestError(
                f"EngineOptions: context={self.context}; it must be in [1, {total}], what the cache has"
            )
        return self.cache_dtype, self.max_sequences, capacity

    @property
    def largest_batch(self) -> int:
        return max(self.block_size if self.batch_invariant else self.prefill_chunk, self.max_sequences)


@dataclass(frozen=True, slots=True)
class SpeculativeOptions(EngineOptions):
    """EngineOptions with speculative decoding: up to ``tokens`` draft tokens per pass, in each of up to
    ``width`` branches.

    With more than one branch, the cache has ``width`` additional sequences for each of ``max_sequences``, and
    room for their drafts.

    ``acceptance`` applies to a ``SamplingDraft`` if the request samples: "rejection" keeps the distribution
    and accepts the most tokens; "exact" produces the tokens that plain decoding draws with the same seed.
    With more than one branch it is always exact.
    """

    tokens: int = 4
    width: int = 1
    acceptance: Acceptance = "rejection"

    def __post_init__(self) -> None:
        EngineOptions.__post_init__(self)
        self._check_positive("tokens", "width")
        if self.batch_invariant:
            raise RequestError(
                "SpeculativeOptions: batch_invariant=True; passes that verify drafts have as many tokens as "
                "there are drafts, which changes the last bits of answers: use EngineOptions"
            )
        if self.acceptance not in get_args(Acceptance):
            raise RequestError(
                f"SpeculativeOptions: acceptance={self.acceptance!r}; it must be 'rejection' or 'exact'"
            )

    @property
    def rejects(self) -> bool:
        """Whether drafts are sampled and accepted by rejection sampling where possible."""
        return self.acceptance == "rejection" and self.width == 1

    def cache_sizes(self, config: ModelSizes) -> tuple[CacheDType, int, int]:
        dtype, sequences, capacity = EngineOptions.cache_sizes(self, config)
        if self.width == 1:
            return dtype, sequences, capacity
        # All sequences share the cells, for their texts and for the drafts of all branches.
        drafts = self.width * (self.tokens + 1)
        return dtype, sequences * (1 + self.width), -(-(capacity + drafts) // (1 + self.width))

    @property
    def largest_batch(self) -> int:
        return max(self.prefill_chunk, self.max_sequences * self.width * (self.tokens + 1))
