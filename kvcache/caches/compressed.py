"""A cache of entries that each represent several tokens, used with caches of the tokens themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

import ml
from kvcache.cache import Batch, CacheDType, NotSupportedError, check_whole
from kvcache.caches.base import PreparedCalls
from kvcache.caches.causal import CausalCache
from kvcache.snapshots.snapshot import AttentionSnapshot

__all__ = ["CompressedCache"]


class CompressedCache(PreparedCalls[AttentionSnapshot]):
    """Entries of ``rate`` tokens each, as a part of a WrapperCache whose positions count tokens.

    Entry w represents tokens ``[w * rate, (w + 1) * rate)`` and is stored in the pass with the last of them
    (DeepSeek-AI, "DeepSeek-V4", 2026, section 2.3)::

        rate 4, tokens  0 1 2 3 | 4 5 6 7 | 8 9      10 tokens, 2 entries
        entries               0         1

    ``entries`` stores them at positions w; K and V are put into and read from it. Tokens computed again after
    a ``remove`` store their entries again. Nothing can be removed from the middle, and snapshots begin at 0.
    """

    def __init__(self, rate: int) -> None:
        super().__init__()
        self.rate, self.entries = check_whole("CompressedCache", "rate", rate, least=1), CausalCache()
        self._starts = False
        """Whether the last pass completes an entry."""

    def init(
        self, backend: ml.Backend, dtype: CacheDType, max_sequences: int, capacity: int, max_batch: int
    ) -> None:
        """As CausalCache.init, for ``capacity`` tokens of each sequence."""
        self.entries.init(backend, dtype, max_sequences, -(-capacity // self.rate), max_batch)

    def close(self) -> None:
        self.entries.close()

    def prepare_set_config(self, config: ml.CacheConfig) -> Callable[[], None]:
        return self.entries.prepare_set_config(config)

    def start_forward(self, ctx: ml.Context, batch: Batch, reserve: bool = False) -> None:
        """Find room for the entries completed by the batch; there may be none."""
        positions, sequences = np.asarray(batch.positions), np.asarray(batch.sequences)
        last = (positions + 1) % self.rate == 0
        if last.any():
            closing: Any = positions[last] // self.rate, sequences[last]
            self.entries.start_forward(ctx, Batch(*closing), reserve)
        self._starts = bool(last.any())

    def foreign_pass(self) -> bool | None:
        return self.entries.foreign_pass()

    def take_over(self) -> None:
        self.entries.take_over()

    def pass_under_way(self) -> object:
        return self.entries.pass_under_way()

    def undo_forward(self, resume: object = None) -> None:
        """As CausalCache.undo_forward."""
        if self._starts:
            self.entries.undo_forward(resume)

    def prepare_remove(self, seq: int, begin: int, end: int | None = None) -> Callable[[], None]:
        if end is not None:
            raise NotSupportedError(
                f"remove: [{begin}, {end}) of sequence {seq}: each entry represents {self.rate} tokens; "
                "remove the end only"
            )
        return self.entries.prepare_remove(seq, begin // self.rate)

    def prepare_copy_prefix(self, src_seq: int, dst_seq: int, length: int) -> Callable[[], None]:
        return self.entries.prepare_copy_prefix(src_seq, dst_seq, length // self.rate)

    def can_resume(self, seq: int, position: int) -> bool:
        return True

    def resume_point(self, seq: int, position: int) -> int:
        return position

    def snapshot(self, seq: int, begin: int = 0, end: int | None = None) -> AttentionSnapshot:
        """The entries of tokens ``[0, end)``; None: all."""
        if begin:
            self._cannot("snapshot", f"from {begin}")
        snapshot = self.entries.snapshot(seq, 0, None if end is None else end // self.rate)
        snapshot.end = snapshot.end * self.rate if end is None else end  # in tokens, like the other caches
        return snapshot

    def prepare_restore_snapshot(
        self, seq: int, snapshot: AttentionSnapshot, target: int | None = None
    ) -> Callable[[], None] | None:
        end = snapshot.end if target is None else target
        return self.entries.prepare_restore_snapshot(seq, snapshot, end // self.rate)

    def merge(self, parent: AttentionSnapshot | None, child: AttentionSnapshot) -> NoReturn:
        self._cannot("merge", "of parts")

    def join(self, parts: Sequence[AttentionSnapshot]) -> NoReturn:
        self._cannot("join", f"of {len(parts)} parts")

    def split(self, snapshot: AttentionSnapshot, at: int) -> NoReturn:
        self._cannot("split", f"at {at}")

    def _cannot(self, op: str, what: str) -> NoReturn:
        raise NotSupportedError(f"{op}: {what}: each entry represents {self.rate} tokens")

    def settings(self) -> dict[str, object]:
        return {"kind": type(self).__name__, "rate": self.rate, "entries": self.entries.settings()}

    def mark_lost(self, seq: int) -> None:
        self.entries.mark_lost(seq)

    def defrag(self) -> None:
        self.entries.defrag()

    @property
    def backend(self) -> ml.Backend:
        return self.entries.backend

    @property
    def max_sequences(self) -> int:
        return self.entries.max_sequences

    @property
    def nbytes(self) -> int:
        return self.entries.nbytes

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.rate} tokens each: {self.entries!r}>"
