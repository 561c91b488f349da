"""Which sequences of one model's caches are in use, and by which rows of batches."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Any

from kvcache.cache import InvalidSequenceError

__all__ = ["ClaimedRows", "Sequences", "SharedSequence"]


class SharedSequence:
    """A sequence, shared by all claims to it; ``seq`` is None until something is stored."""

    __slots__ = ("_retired", "claims", "seq")

    def __init__(self, retired: list[int], seq: int | None = None) -> None:
        self._retired = retired
        self.seq = seq
        self.claims = 0

    def release(self) -> None:
        """Release one claim; after the last one, the sequence can be reused."""
        self.claims -= 1
        if not self.claims and self.seq is not None:
            self._retired.append(self.seq)  # emptied later: this may run during a pass
            self.seq = None


class ClaimedRows:
    """The rows of a batch, each with a claim to its sequence."""

    def __init__(self, claimed: Iterable[SharedSequence] = ()) -> None:
        self.claimed: list[SharedSequence] = []
        self.replace_all(claimed)

    def replace_all(self, sequences: Iterable[SharedSequence]) -> None:
        """Replace the rows' sequences; old claims are released after all new ones are made."""
        before, self.claimed = self.claimed, [*sequences]
        for one in self.claimed:
            one.claims += 1
        for one in before:
            one.release()

    def swap(self, row: int, new: SharedSequence) -> None:
        """Replace the sequence of one row."""
        new.claims += 1
        self.claimed[row].release()
        self.claimed[row] = new


class Sequences:
    """Sequences ``[0, max_sequences)`` of ``cache``. A sequence without claims is emptied and reused."""

    def __init__(self, max_sequences: int, cache: Any) -> None:
        self.max_sequences, self.cache = max_sequences, cache
        self.given_away = False
        """Whether another object owns the sequences."""
        self._free = list(range(max_sequences))
        """A heap: the lowest is used first, so that rows that begin together are adjacent."""
        self._retired: list[int] = []

    @property
    def free(self) -> int:
        """The number of free sequences."""
        return len(self._free) + len(self._retired)

    @property
    def taken(self) -> list[int]:
        """The sequences in use."""
        return sorted({*range(self.max_sequences)} - {*self._free} - {*self._retired})

    def give_away(self) -> None:
        """Hand all sequences to another owner, which has them adopted one by one."""
        self._free.clear()
        self.given_away = True

    def lent(self, seq: int) -> SharedSequence:
        """A sequence with another owner, which empties it."""
        return SharedSequence([], seq)

    def hold(self) -> SharedSequence:
        """A new, empty sequence to claim, which takes no room yet."""
        return SharedSequence(self._retired)

    def occupy(self, claim: SharedSequence) -> None:
        """Assign a sequence to ``claim`` if it has none."""
        if claim.seq is None:
            claim.seq = self._take()

    def fork(self, claim: SharedSequence, length: int) -> SharedSequence:
        """A separate sequence that shares the first ``length`` tokens of ``claim`` without a copy."""
        new = self.hold()
        if claim.seq is not None and length:
            seq = self._take()
            try:
                self.cache.copy_prefix(claim.seq, seq, length)
            except BaseException:
                heapq.heappush(self._free, seq)
                raise
            new.seq = seq
        return new

    def cut(self, seq: int, length: int) -> None:
        """Keep the first ``length`` tokens of a sequence."""
        self.cache.remove(seq, length)

    def reclaim(self) -> None:
        """Empty the sequences without claims."""
        while self._retired:
            seq = self._retired.pop()
            self.cut(seq, 0)
            heapq.heappush(self._free, seq)

    def _take(self) -> int:
        self.reclaim()
        if not self._free:
            raise self._none_free(1)
        return heapq.heappop(self._free)

    def _none_free(self, count: int) -> Exception:
        return InvalidSequenceError(f"{count} sequences are needed and {self.free} are free")
