"""A rig that takes snapshots, each with its model. Snapshots are named by their index in ``copies``, modulo
its length, so that a trace stays valid if calls are removed. A batch that fits besides all snapshots' cells
copies none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml
from kvcache.snapshots.snapshot import AttentionSnapshot, tensors_of
from kvcache.testing.models.attention import Copy, Setup
from kvcache.testing.rigs.attention import Rig


class CopyRig(Rig):
    """A cache and its model, with snapshots."""

    def __init__(self, setup: Setup, backend: ml.Backend, ctx: ml.Context) -> None:
        super().__init__(setup, backend, ctx)
        self.copies: list[tuple[AttentionSnapshot, Copy]] = []

    def start(self, positions: Sequence[int], sequences: Sequence[int]) -> bool:
        taken, pinned = self._in_cache(), self._pinned()
        done = super().start(positions, sequences)
        used = {token for row in self.model.tokens for token in row.values()}
        if not done or len(used | pinned) <= self.setup.cells:
            assert self._in_cache() == taken, "copied out needlessly"
        return done

    def snapshot(self, seq: int, begin: int, end: int | None) -> None:
        self._both(lambda: self.cache.snapshot(seq, begin, end), lambda: self.model.snapshot(seq, begin, end))

    def scheduled(self, seq: int, ahead: Sequence[int], count: int) -> None:
        """Schedule snapshots ``ahead`` of the end, and run a pass of ``count`` tokens that takes some of
        them.
        """
        offset = self.model.last(seq) + 1
        due = sorted({offset + step for step in ahead})
        self.cache.schedule_snapshots(seq, due)
        if self.start(range(offset, offset + count), [seq] * count):
            self.put()
            taken = self.cache.take_snapshots(seq)
            skipped = self.cache.snapshots.schedule.skipped(seq)
            assert not skipped or self.setup.window is not None, "skipped although there is no window"
            due = [end for end in due if end not in skipped]
            assert [snapshot.end for snapshot in taken] == [end for end in due if end <= offset + count]
            for snapshot, begin in zip(taken, [offset, *due], strict=False):
                assert snapshot.begin == (begin if self.setup.window is None else 0)
                assert snapshot.in_cache, "copied needlessly"
                self.copies.append((snapshot, self.model.snapshot(seq, snapshot.begin, snapshot.end)))
        self.cache.cancel_snapshots(seq)

    def restore(self, which: int, seq: int, target: int | None) -> bool:
        """Restore a snapshot; returns whether it was possible."""
        snapshot, copy = self.copies[which % len(self.copies)]
        answers: list[bool] = []
        shared = snapshot.in_cache
        self.agree(
            lambda: answers.append(self.cache.restore(seq, snapshot, target)),
            lambda: answers.append(self.model.restore(seq, copy, target, shared)),
        )
        assert len(set(answers)) < 2, f"restore gave {answers}"
        self.check_figures()
        return bool(answers) and answers[0]

    def split(self, which: int, at: int) -> None:
        snapshot, copy = self.copies[which % len(self.copies)]
        self._both(lambda: self.cache.split(snapshot, at), lambda: self.model.split(copy, at))

    def merge(self, which: int, other: int) -> None:
        """Merge a snapshot with one that begins at its end, or with any if there is none."""
        parent, model_parent = self.copies[which % len(self.copies)]
        fitting = [pair for pair in self.copies if pair[0].begin == parent.end] or self.copies
        child, model_child = fitting[other % len(fitting)]
        self._both(
            lambda: self.cache.merge(parent, child), lambda: self.model.merge(model_parent, model_child)
        )

    def detach(self, which: int) -> None:
        snapshot = self.copies[which % len(self.copies)][0]
        nbytes = snapshot.nbytes
        snapshot.detach()
        assert not snapshot.in_cache
        assert snapshot.nbytes == nbytes == sum(tensor.nbytes for tensor in tensors_of(snapshot.layers))
        self.check_figures()

    def drop(self, which: int) -> None:
        del self.copies[which % len(self.copies)]
        self.check_figures()

    def remove(self, seq: int, begin: int, end: int | None = None) -> bool:
        taken = self._in_cache()
        done = super().remove(seq, begin, end)
        if not done or end is None:
            assert self._in_cache() == taken, "copied out needlessly"
        return done

    def copy_prefix(self, src: int, dst: int, length: int) -> None:
        taken = self._in_cache()
        super().copy_prefix(src, dst, length)
        assert self._in_cache() == taken, "copied out needlessly"

    def defrag(self, sequences: Sequence[int] | None = None, room: int = 0) -> bool:
        taken, table = self._in_cache(), self.cache.storage.table
        lengths = [len(table.rows[seq]) for seq in sequences or ()]
        needed = len(lengths) * (max(lengths, default=0) + room) - sum(lengths)
        free = table.free
        done = super().defrag(sequences, room)
        assert (needed > free and done) or self._in_cache() == taken, "copied out needlessly"
        return done

    def check_copies(self) -> None:
        """Restore every snapshot that a sequence has room for, and read it."""
        for which, (snapshot, copy) in enumerate(self.copies):
            assert snapshot.positions.tolist() == sorted(copy.tokens)
            assert (snapshot.begin, snapshot.end) == (copy.begin, copy.end)
            assert snapshot.divisible is not copy.whole
            self.remove(0, 0)
            if copy.begin:
                self.forward(range(copy.begin), 0)
            if self.restore(which, 0, None) and copy.tokens and self.model.free():
                self.forward([copy.end], 0)

    def _both(self, real: Callable[[], Any], model: Callable[[], Any]) -> None:
        """Run both calls and add their results to the copies; both must succeed or raise the same error."""
        results: list[Any] = []
        copies: list[Any] = []
        taken = self._in_cache()
        self.agree(lambda: results.append(real()), lambda: copies.append(model()))
        assert self._in_cache() == taken, "copied out needlessly"
        for made, copy in zip(results, copies, strict=True):
            made_parts = made if isinstance(made, tuple) else (made,)
            parts = copy if isinstance(copy, tuple) else (copy,)
            for part, expected in zip(made_parts, parts, strict=True):
                assert (part is None) == (expected is None)
                if part is not None:
                    assert (part.begin, part.end) == (expected.begin, expected.end)
                    self.copies.append((part, expected))
        self.check_figures()

    def _in_cache(self) -> list[bool]:
        return [snapshot.in_cache for snapshot, _ in self.copies]

    def _pinned(self) -> set[int]:
        """The tokens whose cells belong to snapshots."""
        return {
            token for snapshot, copy in self.copies if snapshot.in_cache for token in copy.tokens.values()
        }
