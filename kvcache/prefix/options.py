"""The options of a PrefixCache other than its cache, budget, tiers and the keys of its entries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from kvcache.cache import InvalidRangeError, check_whole
from kvcache.prefix.break_even import BreakEven
from kvcache.prefix.eviction_queue import TenantBudget
from kvcache.snapshots.layer_shapes import Layers
from kvcache.stores.sizes import parse_bytes
from ml.errors import OptionError

__all__ = ["PrefixOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixOptions:
    """Checked options of a PrefixCache; one object may be used for several caches.

    Numbers of bytes may be given as sizes such as ``"256MiB"``, and are ints afterwards.

    Raises InvalidRangeError for an invalid value; the message names it and what it must be.

    >>> from kvcache import PrefixOptions, TenantBudget
    >>> PrefixOptions(interval=256, tenant_budget=TenantBudget("512MiB"), write_through=True).interval
    256
    """

    interval: int = 512
    """The number of tokens between snapshots of windows and recurrent states in a prompt; at least that many
    if space is short.
    """
    in_flight: int | str = 256 << 20
    """The most bytes that a thread is copying from the device to host memory at a time; 0: the caller
    copies.
    """
    tenant_budget: TenantBudget | Callable[[str], TenantBudget | None] | None = None
    """The limit of what is kept for each tenant (the ``salt`` of ``begin``): one for all tenants, or a
    function of the salt. None, also as the function's result: no limit.
    """
    salt: str = ""
    """Separates the entries of this PrefixCache in stores from others with the same identity; ``begin`` takes
    a salt for each conversation."""
    layers: Layers | None = None
    """The shapes that the model stores, {layer: ((heads, dim) of K, (heads, dim) of V)} for all attention
    layers; stored content with other shapes is corrupt. None: the shapes of the cache, which an unused cache
    learns from the first serialized snapshot that it restores."""
    backlog: int | str = 256 << 20
    """The most bytes that may wait to be written to the stores."""
    write_through: bool | None = None
    """Whether a thread writes what the stores lack of each session when it closes, so that a process that is
    killed loses little. None: no for a PrefixCache, yes for an HFPrefixCache or MLXPrefixCache.
    """
    break_even: BreakEven | None = None
    """Decides when a store is not asked because computing is faster. None: a new one, which always asks until
    it is told by ``break_even.computed`` how long passes over prompts take.
    """
    read_ahead: int | str = 256 << 20
    """The most bytes of host memory that ``prefetch`` fills; 0: it has no effect."""
    whole_blocks: bool = False
    """Reuse only whole blocks of ``block_size`` prompt tokens. If each pass over a prompt ends with a block
    (``Session.next_cut``) and has one sequence, reused content equals what an empty cache would compute, bit
    for bit. Stores keep such content apart from all other content.
    """

    def __post_init__(self) -> None:
        interval = check_whole("PrefixOptions", "interval", self.interval, least=1)
        object.__setattr__(self, "interval", interval)
        for name in ("in_flight", "backlog", "read_ahead"):
            object.__setattr__(self, name, parse_bytes(getattr(self, name), f"PrefixOptions: {name}"))
        budget, layers = self.tenant_budget, self.layers
        if not (budget is None or isinstance(budget, TenantBudget) or callable(budget)):
            raise InvalidRangeError(
                f"PrefixOptions: tenant_budget={budget!r:.60}; it must be a TenantBudget, or a function of "
                "the salt"
            )
        if not isinstance(self.salt, str):
            raise InvalidRangeError(f"PrefixOptions: salt={self.salt!r:.60}; it must be a string")
        if layers is not None and not isinstance(layers, Mapping):
            raise InvalidRangeError(
                f"PrefixOptions: layers={layers!r:.60}; it must be a dict, {{layer: ((heads, dim) of K, "
                "(heads, dim) of V)}"
            )
        if not isinstance(self.write_through, bool | None):
            raise InvalidRangeError(
                f"PrefixOptions: write_through={self.write_through!r:.60}; it must be a bool, or None"
            )
        if not isinstance(self.whole_blocks, bool):
            raise InvalidRangeError(
                f"PrefixOptions: whole_blocks={self.whole_blocks!r:.60}; it must be a bool"
            )
        if not isinstance(self.break_even, BreakEven | None):
            raise InvalidRangeError(
                f"PrefixOptions: break_even={self.break_even!r:.60}; it must be a BreakEven"
            )

    @classmethod
    def of(cls, options: Self | None, named: Mapping[str, Any]) -> Self:
        """``options``, or the defaults, with the fields in ``named`` replaced. Raises OptionError for unknown
        fields.
        """
        known = [field.name for field in fields(cls)]
        for name in named:
            if name not in known:
                raise OptionError(f"PrefixCache: no option {name!r}; PrefixOptions has {', '.join(known)}")
        if not isinstance(options, cls | None):
            raise InvalidRangeError(f"PrefixCache: options={options!r:.60}; it must be PrefixOptions(...)")
        return replace(cls() if options is None else options, **named)

    def tenant_limit(self, salt: str) -> TenantBudget | None:
        """The budget of a tenant; None if it has none."""
        budget = self.tenant_budget
        return budget(salt) if callable(budget) else budget
