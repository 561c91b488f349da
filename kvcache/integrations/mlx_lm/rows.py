"""The rows of one prompt cache, seen by all its layers' entries.

mlx-lm knows no prompt cache, only a list of entries: what it does to one (a pass, ``trim``, ``filter``,
...) it does to the next, layer by layer. Here the first entry that is asked does it for all, and the
others follow: ``events`` counts what was done, and each entry counts what it has seen of it. An entry
that is asked for something else than the others were raises OrderError.
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
    """Rows of ``pool``: their sequences, how many tokens each holds, and the padding that is announced."""

    def __init__(
        self, pool: SequencePool, claimed: Sequence[SharedSequence], lengths: Sequence[int], batched: bool
    ) -> None:
        """Claims ``claimed``. ``batched``: offsets are told as an array, one for each row."""
        self.pool = pool
        super().__init__(claimed)
        self.lengths = list(lengths)
        self.before = list(lengths)
        """The lengths before the last event."""
        self.batched = batched
        self.kept = False
        """Whether an ``LRUPromptCache`` keeps them, which trims copies by any length where it may trim."""
        self.called = False
        """Whether the model's call has told the pass under way (``calls``)."""
        self.events = 0
        self.last: Any = None
        """The last event: a ForwardPass, or a tuple that tells what was done."""
        self.result: Any = None
        self.skip = [0] * len(self.claimed)
        """Columns of left padding to come."""
        self.left: list[int] | None = None
        """Tokens to come before right padding, where some was announced."""
        self.prompt = 0
        """Tokens of the prompt that one row was begun with (``MLXSession``); 0: not known."""
        self.rounds: Any = None
        """The speculation that uses them, if one does (``loops``)."""
        self._derived: dict[str, tuple[Any, weakref.ref[BatchRows], set[int]]] = {}

    @classmethod
    def empty(cls, pool: SequencePool) -> BatchRows:
        return cls(pool, [pool.hold()], [0], batched=False)

    @classmethod
    def adopted(cls, pool: SequencePool, seq: int, length: int) -> BatchRows:
        """One row over a sequence that somebody else has, with ``length`` tokens in it."""
        return cls(pool, [pool.lent(seq)], [length], batched=False)

    def leave(self) -> None:
        """Let go of all rows: whoever has their sequences empties them."""
        self.last, self.events = None, self.events + 1
        self._replace([self.pool.hold()], [0])
        self.before = [0]

    def __del__(self) -> None:
        if held := getattr(self, "claimed", ()):  # an interrupt may come before __init__ begins
            self.pool.drop(held)

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchRows:
        self.pool.check_sharing("deepcopy")
        self.settle()
        copy = BatchRows(self.pool, self.claimed, self.lengths, self.batched)
        copy.before = list(self.before)
        copy.skip, copy.left = list(self.skip), None if self.left is None else list(self.left)
        return copy

    # Events.

    def settle(self) -> None:
        """Forget a pass that was begun for its mask and not carried out."""
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
        """The lengths as an entry sees them that has seen so many events."""
        self._forget_undone()
        if seen == self.events:
            return self.lengths
        if seen == self.events - 1:
            return self.before
        raise left_behind("update")

    def seen_by_a_bystander(self, seen: int) -> int:
        """What an entry has seen that is in every pass by itself, and was last asked after ``seen`` events.

        It misses at most the last event, which it is being asked for: a pass of which there are only masks as
        yet, or what is done to all entries.
        """
        self._forget_undone()
        last = self.last
        missed = (
            not last.written if isinstance(last, ForwardPass) else last is not None and seen < self.events
        )
        return self.events - 1 if missed else self.events

    def padding_for(self, seen: int) -> list[int]:
        """The columns of left padding that an entry has before it that has seen so many events."""
        if seen < self.events and isinstance(self.last, ForwardPass):
            return [skip + begin for skip, begin in zip(self.skip, self.last.begins, strict=True)]
        return self.skip if len(self.skip) == len(self.lengths_for(seen)) else [0] * len(self.before)

    def do(self, seen: int, event: tuple, action: Callable[[], Any]) -> Any:
        """Do ``action``, unless another entry's asking for the same ``event`` has done it; its result."""
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
        """The pass of ``tokens`` columns that an entry takes part in next, begun where it is the first.

        ``rows``, where known, is how many rows the model feeds: an empty prompt cache of one row takes
        any number.
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
        """The pass that these rows were last in, while the caches still stand there."""
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
        """A pass whose rows that add tokens have sequences of their own."""
        one = ForwardPass(tokens, list(self.lengths), begins, counts)
        drafts = 0 if self.rounds is None else MOST_DRAFTS
        check_missing("update", self.prompt, one.before[0], one.counts[0], drafts)
        self.check_room("update", one.counts)
        self.pool.reclaim()
        for row, count in enumerate(counts):
            if count:
                self._own(row)
        one.sequences = [held.seq for held in self.claimed]
        return one

    def check_room(self, op: str, counts: Sequence[int]) -> None:
        """Raise CacheFullError where a row has no room for so many tokens more, wherever the pool has."""
        longest = self.pool.storage.longest
        for row, (before, count) in enumerate(zip(self.lengths, counts, strict=True)):
            if before + count > longest:
                remedy = "make the pool with a larger capacity; what the layers keep of a row grows up to it"
                raise CacheFullError(count, int(longest) - before, {row: before}, op, remedy)

    def _columns(self, tokens: int) -> tuple[list[int], list[int]]:
        """Where the tokens of each row begin in so many columns, and how many they are."""
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
        """Make an empty prompt cache one of so many rows. InvalidRangeError for one that is not empty."""
        if rows == len(self.claimed):
            return
        if len(self.claimed) != 1 or self.lengths[0]:
            raise InvalidRangeError(
                f"update: {rows} rows for a prompt cache of {len(self.claimed)} rows of {self.lengths} "
                "tokens; only an empty prompt cache accepts another number of rows"
            )
        self._replace([self.pool.hold() for _ in range(rows)], [0] * rows)

    # Rows that the model does not tell apart.

    def alike(self, tokens: int) -> list[tuple[list[int], int, int]] | None:
        """Rows of the next pass that may be computed together, with their columns [begin, begin + count).

        None where all may be, as they are: the model tells them apart, or they are alike.
        """
        limit = self.pool.storage.alike_from
        if not limit:
            return None
        groups: dict[Any, list[int]] = {}
        for row, (begin, count, length) in enumerate(zip(*self._columns(tokens), self.lengths, strict=True)):
            groups.setdefault((begin, count, min(length, limit)), []).append(row)
        if len(groups) == 1 and next(iter(groups))[:2] == (0, tokens):
            return None
        found = [(chosen, begin, count) for (begin, count, _), chosen in groups.items() if count]
        return sorted(found, key=lambda group: -len(group[0]) * group[2])  # what is too large fails first

    @contextmanager
    def parted(self, tokens: int) -> Iterator[None]:
        """A pass of so many columns, of which rows are lent to passes of their own in the block.

        There is room for all of them before the first is computed.
        """
        self.pool.undo_unwritten()
        begins, counts = self._columns(tokens)
        before = self._owned_pass(tokens, begins, counts).before
        self.pool.make_room(sum(counts))
        try:
            yield
        finally:
            if self.lengths != before:  # entries that do not follow have no part in the next pass
                self._pass_padding(begins, counts)
                self.before, self.last = before, ("parted", tokens)
                self.events += 1

    @contextmanager
    def lent(self, chosen: Sequence[int]) -> Iterator[BatchRows]:
        """These rows as a prompt cache of their own, which writes in place.

        They are empty where a pass fails half way, and as they were where none was begun.
        """
        held = [self.claimed[row] for row in chosen]
        lengths = [self.lengths[row] for row in chosen]
        lent = BatchRows(self.pool, held, lengths, batched=self.batched and len(held) > 1)
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
        """A sequence that is no one else's."""
        held = self.claimed[row]
        self.pool.make_way(held)
        if held.claims > 1:
            new = self.pool.fork(held, self.lengths[row])
            self.swap(row, new)
            held = new
        self.pool.occupy(held)

    def _replace(self, held: list[SharedSequence], lengths: list[int]) -> None:
        """Other rows instead, with no padding announced."""
        self.replace_all(held)
        self.lengths = lengths
        self.skip, self.left = [0] * len(held), None

    # What mlx-lm does to prompt caches.

    def trim(self, count: int) -> int:
        """Take the last ``count`` tokens from every row, at most what is there."""
        count = max(0, min(count, max(self.lengths)))
        self.cut([max(0, length - count) for length in self.lengths])
        return count

    def reachable(self, position: int) -> int:
        """The greatest length, at most ``position``, that the one row can be cut to."""
        pool, seq = self.pool, self.claimed[0].seq
        if seq is None or position in (0, self.lengths[0]):
            return position
        states = pool.storage.states
        if states is not None:
            position = states.prepare_restore(seq, position) or 0
        return position if pool.storage.cache.can_resume(seq, position) else 0

    def rewind(self, prompt_cache: Iterable[Any], position: int) -> int:
        """Take the one row, whose entries these are, back to ``position`` or as little before it as it can.

        Whole again where a pass failed half way; returns where it is then.
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
        """Keep the first ``lengths[i]`` tokens of row i. An error leaves all as they were."""
        storage = self.pool.storage
        for held, old, new in zip(self.claimed, self.lengths, lengths, strict=True):
            if 0 < new < old and not storage.cache.can_resume(held.seq, new):
                raise NotSupportedError(
                    f"trim: {old - new} of {old} tokens, and what a token at {new} attends to is no longer "
                    f"stored: sliding layers keep rollback={storage.rollback} tokens beyond their window, "
                    "recurrent ones the states of some positions (see rewind); compute the prompt again"
                )
        shorter = {row: new for row, new in enumerate(lengths) if new < self.lengths[row]}
        copies = self._copies(shorter)
        for row, length in shorter.items():
            held = self.claimed[row]
            if row in copies:
                self.swap(row, copies[row])
            else:
                assert held.seq is not None
                self.pool.cut(held.seq, length)
            self.lengths[row] = length

    def _copies(self, lengths: Mapping[int, int]) -> dict[int, SharedSequence]:
        """By row, what takes the place of one that others hold too, or that keeps nothing."""
        pool, found = self.pool, dict[int, SharedSequence]()
        try:
            for row, length in lengths.items():
                held = self.claimed[row]
                if not length and not pool.given_away:
                    found[row] = pool.hold()
                    continue
                pool.make_way(held)
                if held.claims - sum(self.claimed[other] is held for other in found) > 1:
                    found[row] = pool.fork(held, length)
        except BaseException:
            for copy in found.values():
                copy.claims += 1
                copy.release()
            raise
        return found

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
        """The rows of ``other`` behind these."""
        other.settle()
        for one in (self, other):
            one.check_finalized("extend")
        theirs = other.held_in(self.pool)
        skip = [*self.skip, *other.skip]
        self._replace([*self.claimed, *theirs], [*self.lengths, *other.lengths])
        self.skip = skip
        self.batched = True

    def prepare(self, lengths: Sequence[int] | None, skip: Sequence[int] | None) -> None:
        """Announce padding: ``lengths`` tokens per row and then padding, or ``skip`` columns of it first."""
        storage = self.pool.storage
        padded = lengths is not None or (skip is not None and any(skip))
        if padded and storage.alike_from and not storage.calls_told:
            raise NotSupportedError(f"prepare: padding, which {_ALL_ALIKE}")
        if skip is not None and storage.states is not None and not storage.alike_from:
            for row, (pad, held) in enumerate(zip(skip, self.lengths, strict=False)):
                if pad > 0 and held:
                    raise NotSupportedError(
                        f"prepare: left_padding={pad} of row {row}, which holds {held} tokens; the states of "
                        "recurrent layers would go on over it; pad at the right: lengths= and right_padding="
                    )
        for name, given in (("lengths", lengths), ("left_padding", skip)):
            if given is not None and len(given) != len(self.claimed):
                if len(self.claimed) == 1 and not self.lengths[0]:
                    self.widen(len(given))
                else:
                    raise InvalidRangeError(
                        f"prepare: {name} of {len(given)} rows; there are {len(self.claimed)}"
                    )
        if skip is not None:
            self.skip = [old + int(new) for old, new in zip(self.skip, skip, strict=True)]
        self.left = None if lengths is None else [int(length) for length in lengths]
        self.batched = self.batched or padded  # rows are at offsets of their own from here on

    def finalize(self) -> None:
        """No more padding."""
        self.skip, self.left = [0] * len(self.claimed), None

    def check_finalized(self, op: str) -> None:
        """Raise OrderError between ``prepare(lengths=)`` and ``finalize``."""
        if self.left is not None:
            raise OrderError(
                f"{op}: rows whose right padding was announced, with {self.left} tokens to come before it; "
                "call finalize() first"
            )

    def extract(self, row: int) -> BatchRows:
        """One row as a prompt cache of its own, sharing what is stored."""
        self.pool.check_sharing("extract")
        self._check_rows("extract", [row])
        return BatchRows(self.pool, [self.claimed[row]], [self.lengths[row]], batched=False)

    @staticmethod
    def merge(several: Sequence[BatchRows]) -> BatchRows:
        """All rows as one batch, sharing what is stored; the others stay as they are."""
        for one in several:
            one.settle()
            one.check_finalized("merge")
        pool = several[0].pool
        held = [held for one in several for held in one.held_in(pool)]
        return BatchRows(pool, held, [length for one in several for length in one.lengths], batched=True)

    def held_in(self, pool: SequencePool) -> list[SharedSequence]:
        """The sequences of these rows, which must be of ``pool``, for rows of another prompt cache too."""
        pool.check_sharing("merge")
        if self.pool is not pool:
            raise NotSupportedError(
                "merge: the prompt caches come from different pools; those in one batch must come from "
                "the same pool: "
                "one CachePool(model, max_sequences=...) and its make_prompt_cache(), or install()"
            )
        return self.claimed

    def derived(self, name: str, of: tuple, layer: int, make: Callable[[], BatchRows]) -> BatchRows:
        """What ``make`` gives, the same for every layer that asks once."""
        found = self._derived.get(name)
        if found is not None:
            known, reference, layers = found
            rows = reference()
            if rows is not None and known == (self.events, of) and layer not in layers and not rows.events:
                layers.add(layer)
                return rows
        rows = make()
        self._derived[name] = (self.events, of), weakref.ref(rows), {layer}
        return rows


_ALL_ALIKE = (
    "this model takes for rows like the others, so that they would get other results than each row alone; "
    "feed such rows one by one, or call the model that the pool was made for"
)


def left_behind(op: str) -> OrderError:
    """What is raised for an entry that is behind the others."""
    return OrderError(
        f"{op}: this entry did not take part in what the other entries of its prompt cache did (a pass that "
        "failed half way, or something done to some of the entries only); rewind(prompt_cache, n) repairs it"
    )
