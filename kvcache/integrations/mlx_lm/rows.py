"""The rows of one prompt cache, shared by all its layers' entries. mlx-lm has no prompt cache object, only a
list of entries: each operation (a pass, ``trim``, ``filter``, ...) is applied to one entry after another.
Here the first entry executes the operation for all, and the others follow: ``events`` counts the operations,
and each entry counts those it has seen. An entry that gets a different operation from the others raises
OrderError.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kvcache.cache import CacheFullError, InvalidRangeError, NotSupportedError, OrderError
from kvcache.integrations.conversations import MOST_DRAFTS, check_missing
from kvcache.integrations.mlx_lm.layers import entries_in
from kvcache.integrations.mlx_lm.passes import ForwardPass
from kvcache.integrations.mlx_lm.sequences import SequencePool
from kvcache.integrations.rows.sequences import ClaimedRows, SharedSequence

__all__ = ["BatchRows", "left_behind"]


class BatchRows(ClaimedRows):
    """Rows of ``pool``: their sequences, their numbers of tokens, and announced padding."""

    def __init__(
        self, pool: SequencePool, claimed: Sequence[SharedSequence], lengths: Sequence[int], batched: bool
    ) -> None:
        """Claim the sequences ``claimed``. ``batched``: offsets are reported as an array, one for each
        row.
        """
        self.pool = pool
        super().__init__(claimed)
        self.lengths = list(lengths)
        self.before = list(lengths)
        """The lengths before the last event."""
        self.batched = batched
        self.kept = False
        """Whether an ``LRUPromptCache`` keeps them, which trims trimmable copies to any length."""
        self.called = False
        """Whether the model's call has announced the current pass (``calls``)."""
        self.events = 0
        self.last: Any = None
        """The last event: a ForwardPass, or a tuple that describes another operation."""
        self.result: Any = None
        self.skip = [0] * len(self.claimed)
        """The remaining columns of left padding."""
        self.left: list[int] | None = None
        """The remaining tokens before right padding, if announced."""
        self.prompt = 0
        """Tokens of the prompt that a single row began with (``MLXSession``); 0: unknown."""
        self.rounds: Any = None
        """The speculative decoding that uses the rows, if any (``loops``)."""
        self._derived: dict[str, tuple[Any, weakref.ref[BatchRows], set[int]]] = {}

    @classmethod
    def empty(cls, pool: SequencePool) -> BatchRows:
        return cls(pool, [pool.hold()], [0], batched=False)

    @classmethod
    def adopted(cls, pool: SequencePool, seq: int, length: int) -> BatchRows:
        """One row over a sequence with another owner, which has ``length`` tokens."""
        return cls(pool, [pool.lent(seq)], [length], batched=False)

    def leave(self) -> None:
        """Release all rows; the owners of their sequences empty them."""
        self.last, self.events = None, self.events + 1
        self._replace([self.pool.hold()], [0])
        self.before = [0]

    def __del__(self) -> None:
        if claimed := getattr(self, "claimed", ()):  # an interrupt may occur before __init__ begins
            self.pool.drop(claimed)

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchRows:
        self.pool.check_sharing("deepcopy")
        self.settle()
        copy = BatchRows(self.pool, self.claimed, self.lengths, self.batched)
        copy.before = list(self.before)
        copy.skip, copy.left = list(self.skip), None if self.left is None else list(self.left)
        return copy

    # Events.

    def settle(self) -> None:
        """Undo a pass that was begun for its mask but not executed."""
        if isinstance(self.last, ForwardPass) and not self.last.written:
            if self.last is self.pool.current:
                self.pool.undo_unwritten()
            self._forget_undone()

    def _forget_undone(self) -> None:
        last = self.last
        if isinstance(last, ForwardPass) and last.undone:
            self.events -= 1
            self.lengths, self.last = list(last.before), None
            self.skip = [skip + begin for skip, begin in zip(self.skip, last.begins, strict=True)]
            if self.left is not None:
                self.left = [left + count for left, count in zip(self.left, last.counts, strict=True)]

    def lengths_for(self, seen: int) -> list[int]:
        """The lengths as seen by an entry that has seen ``seen`` events."""
        self._forget_undone()
        if seen == self.events:
            return self.lengths
        if seen == self.events - 1:
            return self.before
        raise left_behind("update")

    def seen_by_a_bystander(self, seen: int) -> int:
        """The events seen by an unused layer's entry, which follows every pass automatically and was last
        called after ``seen`` events. It has seen all events except possibly the last: a pass with only masks
        so far, or the operation now being applied to it.
        """
        self._forget_undone()
        last = self.last
        missed = (
            not last.written if isinstance(last, ForwardPass) else last is not None and seen < self.events
        )
        return self.events - 1 if missed else self.events

    def padding_for(self, seen: int) -> list[int]:
        """The remaining columns of left padding for an entry that has seen ``seen`` events."""
        if seen < self.events and isinstance(self.last, ForwardPass):
            return [skip + begin for skip, begin in zip(self.skip, self.last.begins, strict=True)]
        return self.skip if len(self.skip) == len(self.lengths_for(seen)) else [0] * len(self.before)

    def do(self, seen: int, event: tuple, action: Callable[[], Any]) -> Any:
        """The result of ``action``, which runs only once for all entries that get the same ``event``."""
        self._forget_undone()
        if seen == self.events - 1 and event == self.last:
            return self.result
        self.settle()
        if seen != self.events:
            raise left_behind(event[0])
        self.pool.undo_unwritten()
        before = list(self.lengths)
        self.result = action()
        self.before, self.last = before, event
        self.events += 1
        return self.result

    # Passes.

    def pass_for(self, seen: int, tokens: int, rows: int | None = None) -> ForwardPass:
        """The next pass of an entry, of ``tokens`` columns; the first entry begins it. ``rows`` is the number
        of rows that the model feeds, if known; an empty prompt cache of one row accepts any number.
        """
        self._forget_undone()
        last = self.last
        if (
            isinstance(last, ForwardPass)
            and not last.written
            and (tokens, rows or last.rows) != (last.tokens, last.rows)
        ):
            self.settle()
        if seen == self.events:
            return self._begin(tokens, rows)
        if seen != self.events - 1 or not isinstance(self.last, ForwardPass):
            raise left_behind("update")
        if self.last.tokens != tokens or rows not in (None, self.last.rows):
            raise OrderError(
                f"update: {rows} rows of {tokens} tokens in a pass that was begun by another layer with "
                f"{self.last.rows} of {self.last.tokens}"
            )
        self.pool.check_current(self.last)
        return self.last

    def live(self) -> ForwardPass | None:
        """The last pass of these rows, if it is still the caches' current pass."""
        self._forget_undone()
        last = self.last
        return last if isinstance(last, ForwardPass) and last is self.pool.current else None

    def _begin(self, tokens: int, rows: int | None) -> ForwardPass:
        self.pool.undo_unwritten()
        if rows is not None:
            self.widen(rows)
        begins, counts = self._columns(tokens)
        if not any(counts):
            raise InvalidRangeError(
                f"update: {tokens} columns of padding only; a pass must store at least one token"
            )
        if self.alike(tokens) is not None:
            raise NotSupportedError(
                f"update: rows that are padded, new or of other lengths, which {_ALL_ALIKE}"
            )
        one = self._owned_pass(tokens, begins, counts)
        self.pool.begin(one)
        self._pass_padding(begins, counts)
        self.before, self.lengths, self.last = one.before, one.after, one
        self.events += 1
        return one

    def _owned_pass(self, tokens: int, begins: list[int], counts: list[int]) -> ForwardPass:
        """A pass in which every row that adds tokens has its own sequence."""
        one = ForwardPass(tokens, list(self.lengths), begins, counts)
        drafts = 0 if self.rounds is None else MOST_DRAFTS
        check_missing("update", self.prompt, one.before[0], one.counts[0], drafts)
        self.check_room("update", one.counts)
        self.pool.reclaim()
        for row, count in enumerate(counts):
            if count:
                self._own(row)
        one.sequences = [claim.seq for claim in self.claimed]
        return one

    def check_room(self, op: str, counts: Sequence[int]) -> None:
        """Raise CacheFullError if a row cannot grow by these tokens, even if the pool has room."""
        longest = self.pool.storage.longest
        for row, (before, count) in enumerate(zip(self.lengths, counts, strict=True)):
            if before + count > longest:
                remedy = "make the pool with a larger capacity, which limits growing states"
                raise CacheFullError(count, int(longest) - before, {row: before}, op, remedy)

    def _columns(self, tokens: int) -> tuple[list[int], list[int]]:
        """The first column of each row's tokens, and their number."""
        begins = [min(skip, tokens) for skip in self.skip]
        counts = [tokens - begin for begin in begins]
        if self.left is not None:
            counts = [min(count, left) for count, left in zip(counts, self.left, strict=True)]
        return begins, counts

    def _pass_padding(self, begins: Sequence[int], counts: Sequence[int]) -> None:
        self.skip = [skip - begin for skip, begin in zip(self.skip, begins, strict=True)]
        if self.left is not None:
            self.left = [left - count for left, count in zip(self.left, counts, strict=True)]

    def widen(self, rows: int) -> None:
        """Give an empty prompt cache this number of rows. Raises InvalidRangeError if it is not empty."""
        if rows == len(self.claimed):
            return
        if len(self.claimed) != 1 or self.lengths[0]:
            raise InvalidRangeError(
                f"update: {rows} rows for a prompt cache of {len(self.claimed)} rows of {self.lengths} "
                "tokens; only an empty prompt cache accepts another number of rows"
            )
        self._replace([self.pool.hold() for _ in range(rows)], [0] * rows)

    # Rows that the model confuses.

    def alike(self, tokens: int) -> list[tuple[list[int], int, int]] | None:
        """Groups of rows of the next pass that may be computed together, with their columns [begin, begin +
        count). None if all rows may be: the model distinguishes them, or they are alike.
        """
        limit = self.pool.storage.alike_from
        if not limit:
            return None
        groups: dict[Any, list[int]] = {}
        for row, (begin, count, length) in enumerate(zip(*self._columns(tokens), self.lengths, strict=True)):
            groups.setdefault((begin, count, min(length, limit)), []).append(row)
        if len(groups) == 1 and next(iter(groups))[:2] == (0, tokens):
            return None
        chosen_groups = [(chosen, begin, count) for (begin, count, _), chosen in groups.items() if count]
        return sorted(
            chosen_groups, key=lambda group: -len(group[0]) * group[2]
        )  # too large groups fail first

    @contextmanager
    def parted(self, tokens: int) -> Iterator[None]:
        """A pass whose rows are computed in separate passes inside the block. Room for all of them is checked
        before the first is computed.
        """
        self.pool.undo_unwritten()
        begins, counts = self._columns(tokens)
        before = self._owned_pass(tokens, begins, counts).before
        self.pool.make_room(sum(counts))
        try:
            yield
        finally:
            if self.lengths != before:  # entries that did not follow are excluded from the next pass
                self._pass_padding(begins, counts)
                self.before, self.last = before, ("parted", tokens)
                self.events += 1

    @contextmanager
    def lent(self, chosen: Sequence[int]) -> Iterator[BatchRows]:
        """These rows as a separate prompt cache that writes in place. If its pass fails midway, the rows are
        empty; if no pass was begun, they are unchanged.
        """
        claims = [self.claimed[row] for row in chosen]
        lengths = [self.lengths[row] for row in chosen]
        lent = BatchRows(self.pool, claims, lengths, batched=self.batched and len(claims) > 1)
        for row in chosen:
            self.swap(row, self.pool.hold())
            self.lengths[row] = 0
        done = False
        try:
            yield lent
            done = True
        finally:
            if done or not lent.events:
                for row, one, length in zip(chosen, lent.claimed, lent.lengths, strict=True):
                    self.swap(row, one)
                    self.lengths[row] = length

    def _own(self, row: int) -> None:
        """A sequence that is not shared."""
        claim = self.claimed[row]
        self.pool.make_way(claim)
        if claim.claims > 1:
            new = self.pool.fork(claim, self.lengths[row])
            self.swap(row, new)
            claim = new
        self.pool.occupy(claim)

    def _replace(self, claims: list[SharedSequence], lengths: list[int]) -> None:
        """Replace the rows, and cancel announced padding."""
        self.replace_all(claims)
        self.lengths = lengths
        self.skip, self.left = [0] * len(claims), None

    # mlx-lm's operations on prompt caches.

    def trim(self, count: int) -> int:
        """Remove the last ``count`` tokens of every row, or all of a shorter one."""
        count = max(0, min(count, max(self.lengths)))
        self.cut([max(0, length - count) for length in self.lengths])
        return count

    def reachable(self, position: int) -> int:
        """The greatest length up to ``position`` that the single row can be cut to."""
        pool, seq = self.pool, self.claimed[0].seq
        if seq is None or position in (0, self.lengths[0]):
            return position
        states = pool.storage.states
        if states is not None:
            position = states.prepare_restore(seq, position) or 0
        return position if pool.storage.cache.can_resume(seq, position) else 0

    def rewind(self, prompt_cache: Iterable[Any], position: int) -> int:
        """Cut the single row with these entries to ``position``, or to the last possible position before it.
        Repairs rows after a failed pass; returns the position reached.
        """
        self.settle()
        entries = [entry for entry in entries_in(prompt_cache) if getattr(entry, "rows", None) is self]
        length = min(entry.size_seen for entry in entries)
        if not 0 <= position <= self.lengths[0]:
            raise InvalidRangeError(
                f"rewind: position {position}; the prompt cache has {self.lengths[0]} tokens"
            )
        target = self.reachable(min(position, length))
        for entry in entries:
            entry.catch_up()
        for entry in entries:
            entry.cut(target)
        return target

    def cut(self, lengths: Sequence[int]) -> None:
        """Keep the first ``lengths[i]`` tokens of row i. An error leaves all rows unchanged."""
        storage = self.pool.storage
        for claim, old, new in zip(self.claimed, self.lengths, lengths, strict=True):
            if 0 < new < old and not storage.cache.can_resume(claim.seq, new):
                raise NotSupportedError(
                    f"trim: {old - new} of {old} tokens, and what a token at {new} attends to is no longer "
                    f"stored: sliding layers keep rollback={storage.rollback} tokens beyond their window, "
                    "recurrent ones the states of some positions (see rewind); compute the prompt again"
                )
        shorter = {row: new for row, new in enumerate(lengths) if new < self.lengths[row]}
        copies = self._copies(shorter)
        for row, length in shorter.items():
            claim = self.claimed[row]
            if row in copies:
                self.swap(row, copies[row])
            else:
                assert claim.seq is not None
                self.pool.cut(claim.seq, length)
            self.lengths[row] = length

    def _copies(self, lengths: Mapping[int, int]) -> dict[int, SharedSequence]:
        """By row, the replacement of a sequence that is shared, or of which nothing is kept."""
        pool, copies = self.pool, dict[int, SharedSequence]()
        try:
            for row, length in lengths.items():
                claim = self.claimed[row]
                if not length and not pool.given_away:
                    copies[row] = pool.hold()
                    continue
                pool.make_way(claim)
                if claim.claims - sum(self.claimed[other] is claim for other in copies) > 1:
                    copies[row] = pool.fork(claim, length)
        except BaseException:
            for copy in copies.values():
                copy.claims += 1
                copy.release()
            raise
        return copies

    def filter(self, keep: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self._check_rows("filter", keep)
        if len({row % len(self.claimed) for row in keep}) < len(keep):
            self.pool.check_sharing("filter")
        skip, left = self.skip, self.left
        self._replace([self.claimed[row] for row in keep], [self.lengths[row] for row in keep])
        self.skip = [skip[row] for row in keep]
        self.left = None if left is None else [left[row] for row in keep]

    def _check_rows(self, op: str, rows: Sequence[int]) -> None:
        count = len(self.claimed)
        for row in rows:
            if not -count <= row < count:
                raise InvalidRangeError(f"{op}: row {row}; the prompt cache has {count}")

    def extend(self, other: BatchRows) -> None:
        """Append the rows of ``other``."""
        other.settle()
        for one in (self, other):
            one.check_finalized("extend")
        theirs = other.held_in(self.pool)
        skip = [*self.skip, *other.skip]
        self._replace([*self.claimed, *theirs], [*self.lengths, *other.lengths])
        self.skip = skip
        self.batched = True

    def prepare(self, lengths: Sequence[int] | None, skip: Sequence[int] | None) -> None:
        """Announce padding: after ``lengths`` tokens per row, or ``skip`` columns before them."""
        storage = self.pool.storage
        padded = lengths is not None or (skip is not None and any(skip))
        if padded and storage.alike_from and not storage.calls_told:
            raise NotSupportedError(f"prepare: padding, which {_ALL_ALIKE}")
        if skip is not None and storage.states is not None and not storage.alike_from:
            for row, (pad, stored) in enumerate(zip(skip, self.lengths, strict=False)):
                if pad > 0 and stored:
                    raise NotSupportedError(
                        f"prepare: left_padding={pad} of row {row}, which holds {stored} tokens; the padding "
                        "would change the states of recurrent layers; pad on the right: lengths= and "
                        "right_padding="
                    )
        for name, counts in (("lengths", lengths), ("left_padding", skip)):
            if counts is not None and len(counts) != len(self.claimed):
                if len(self.claimed) == 1 and not self.lengths[0]:
                    self.widen(len(counts))
                else:
                    raise InvalidRangeError(
                        f"prepare: {name} of {len(counts)} rows; there are {len(self.claimed)}"
                    )
        if skip is not None:
            self.skip = [old + int(new) for old, new in zip(self.skip, skip, strict=True)]
        self.left = None if lengths is None else [int(length) for length in lengths]
        self.batched = self.batched or padded  # from here on, rows have different offsets

    def finalize(self) -> None:
        """End the padding."""
        self.skip, self.left = [0] * len(self.claimed), None

    def check_finalized(self, op: str) -> None:
        """Raise OrderError between ``prepare(lengths=)`` and ``finalize``."""
        if self.left is not None:
            raise OrderError(
                f"{op}: rows with announced right padding, and {self.left} tokens remaining before it; call "
                "finalize() first"
            )

    def extract(self, row: int) -> BatchRows:
        """One row as a separate prompt cache, sharing the stored tokens."""
        self.pool.check_sharing("extract")
        self._check_rows("extract", [row])
        return BatchRows(self.pool, [self.claimed[row]], [self.lengths[row]], batched=False)

    @staticmethod
    def merge(several: Sequence[BatchRows]) -> BatchRows:
        """All rows as one batch, sharing the stored tokens; the originals are unchanged."""
        for one in several:
            one.settle()
            one.check_finalized("merge")
        pool = several[0].pool
        claim = [claim for one in several for claim in one.held_in(pool)]
        return BatchRows(pool, claim, [length for one in several for length in one.lengths], batched=True)

    def held_in(self, pool: SequencePool) -> list[SharedSequence]:
        """The sequences of these rows, which must belong to ``pool``, for use by another prompt cache too."""
        pool.check_sharing("merge")
        if self.pool is not pool:
            raise NotSupportedError(
                "merge: the prompt caches come from different pools; those in one batch must come from "
                "the same pool: "
                "one CachePool(model, max_sequences=...) and its make_prompt_cache(), or install()"
            )
        return self.claimed

    def derived(self, name: str, of: tuple, layer: int, make: Callable[[], BatchRows]) -> BatchRows:
        """The result of ``make``, which every layer may fetch once."""
        derived = self._derived.get(name)
        if derived is not None:
            known, reference, layers = derived
            rows = reference()
            if rows is not None and known == (self.events, of) and layer not in layers and not rows.events:
                layers.add(layer)
                return rows
        rows = make()
        self._derived[name] = (self.events, of), weakref.ref(rows), {layer}
        return rows


_ALL_ALIKE = (
    "this model treats like the other rows, so that results would differ from those of each row alone; "
    "feed such rows one by one, or call the model that the pool was made for"
)


def left_behind(op: str) -> OrderError:
    """The error for an entry that is behind the others."""
    return OrderError(
        f"{op}: this entry did not take part in what the other entries of its prompt cache did (a pass "
        "failed midway, or an operation reached only some of the entries); rewind(prompt_cache, n) repairs it"
    )
