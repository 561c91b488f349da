"""Which of the snapshots that a tier keeps is worth the least, and goes first.

``PrefixTree`` asks for scores, ``kvcache.offload.eviction`` has the queue that they order, ``Evictor`` takes
from it. (Policies that take single tokens out of a sequence are ``kvcache.EvictionPolicy``.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvcache.cache import InvalidRangeError

__all__ = ["GDSF", "LRU", "PrefixEvictionPolicy", "Use", "policy_of"]


@dataclass(frozen=True, slots=True)
class Use:
    """A use of the tokens ``[begin, end)`` of a conversation, an edge of the tree."""

    time: int
    """On a clock that counts uses."""
    count: int
    """How often they were used, this time included."""
    begin: int
    end: int
    nbytes: int
    """What they take in the tier."""
    age: float
    """The highest score of what has been evicted from the tier so far; 0 before."""
    computed: bool
    """Whether what goes from this tier is computed again; else a further tier has it."""


class PrefixEvictionPolicy(Protocol):
    """The order in which what has the same priority (``Retention``) goes."""

    def score(self, use: Use) -> float:
        """The worth of an edge in one tier after a use; the lowest goes first, the deepest of equals.

        A later use of the same edge must not score lower. What leads to an edge stays at least as long as
        the edge, whatever its own score.
        """


@dataclass(frozen=True, slots=True)
class LRU:
    """The least recently used goes first."""

    def score(self, use: Use) -> float:
        return use.time


@dataclass(frozen=True, slots=True)
class GDSF:
    """What is dear to compute, small and often used stays longest: GreedyDual-Size-Frequency.

    An edge scores ``age + count * cost / nbytes`` (L. Cherkasova, Improving WWW Proxies Performance with
    Greedy-Dual-Size-Frequency Caching Policy, HP Labs, 1998): what was used often long ago falls behind as
    the age of the tier grows. The cost of a token is that of the model's matrices, and of attention to
    all tokens before it; what another tier keeps costs its transfer, by bytes.

    ``cost_doubles_at`` is the position of the token that costs twice what the first one does: the
    parameters of the model, divided by 2 * layers * query heads * head_dim (30,000 for a Llama of 8 billion).
    """

    cost_doubles_at: int = 32768

    def __post_init__(self) -> None:
        if self.cost_doubles_at < 1:
            raise InvalidRangeError(
                f"GDSF: cost_doubles_at={self.cost_doubles_at!r}; it must be a position of at least 1"
            )

    def score(self, use: Use) -> float:
        if not use.computed:
            return use.age + use.count
        mean = 1 + (use.begin + use.end) / 2 / self.cost_doubles_at
        return use.age + use.count * (use.end - use.begin) * mean / max(1, use.nbytes)


_POLICIES: dict[str, type[LRU | GDSF]] = {"lru": LRU, "gdsf": GDSF}


def policy_of(policy: str | PrefixEvictionPolicy) -> PrefixEvictionPolicy:
    """The policy of that name, "lru" or "gdsf", or the policy itself."""
    if hasattr(policy, "score"):
        return policy
    if policy not in _POLICIES:
        raise InvalidRangeError(
            f"PrefixCache: eviction_policy={policy!r:.60}; it must be 'lru', 'gdsf' or an object with score()"
        )
    return _POLICIES[policy]()
