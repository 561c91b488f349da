"""A model of the caches that Ollama had in Go, for the suite of other caches and beside our own.

Written from what ``kvcache/causal.go``, ``encoder.go`` and ``wrapper.go`` of github.com/ollama/ollama do at
``COMMIT``, the last one that has them, and held to the expectations of their own tests. It has one layer, and
of a stored key only what it says: whose token it is, and how far the shift function has moved it. Left out
are the recurrent cache, and passes that reserve memory, which compute nothing. Names are Go's, as Python
spells them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

COMMIT = "a2b3a5e9a3956bc0700a8505580c11faf4da09b5"
"""Of 2 July 2026; the next one that touches kvcache/ removes these files."""


class OllamaError(Exception):
    """What a Go function returns as an error, or panics with."""


@dataclass
class Cell:
    """One place of the cache: who holds it, and what was last written there."""

    position: int = 0
    sequences: set[int] = field(default_factory=set)
    token: int = 0
    moved: int = 0
    """What the shift function has added to the position of the stored key."""

    @property
    def key(self) -> tuple[int, int]:
        return self.token, self.moved


Held = tuple[list[tuple[int, int]], list[list[bool]]]
"""What ``Get`` gives: the keys of a range of cells, and for each query which of them it sees."""


class Cache(Protocol):
    """The methods of Go's interface that these caches share."""

    def init(self, max_sequences: int, capacity: int, max_batch: int, padding: int = 1) -> None: ...
    def start_forward(self, positions: Sequence[int], sequences: Sequence[int]) -> None: ...
    def put(self, tokens: Sequence[int]) -> None: ...
    def copy_prefix(self, src: int, dst: int, length: int) -> None: ...
    def can_resume(self, seq: int, position: int) -> bool: ...
    def remove(self, seq: int, begin: int, end: int | None = None) -> None: ...


class Causal:
    """Go's four constructors in one: a window or a chunk of 0 is none, a memory of 0 is the window."""

    def __init__(self, window: int = 0, memory: int = 0, chunk: int = 0, shifts: bool = True) -> None:
        self.window, self.memory, self.chunk, self.shifts = window, memory, chunk, shifts

    def init(self, max_sequences: int, capacity: int, max_batch: int, padding: int = 1) -> None:
        memory = self.memory or self.window
        if self.window and max_sequences > 1:  # one more, for a stop token that is taken back
            memory = max(memory, self.window + 1)
        if not self.window or memory >= capacity:
            self.kept, count = None, max_sequences * capacity
        elif memory < self.window:
            raise OllamaError(f"window {self.window} does not fit memory {memory}")
        else:
            self.kept, count = memory, max_sequences * memory + max_batch
        self.padding = padding
        self.cells = [Cell() for _ in range(-(-count // padding) * padding)]

    def of(self, seq: int) -> list[int]:
        """The cells of a sequence, in their order."""
        return [i for i, cell in enumerate(self.cells) if seq in cell.sequences]

    def start_forward(self, positions: Sequence[int], sequences: Sequence[int]) -> None:
        self.batch = list(zip(positions, sequences, strict=True))
        self.lifted: frozenset[int] = frozenset()
        used = self.slide()
        free = [i for i, cell in enumerate(self.cells) if not cell.sequences][: len(self.batch)]
        if len(free) < len(self.batch):  # what has slid out is gone all the same
            raise OllamaError(
                f"could not find a kv cache slot (cache: {len(self.cells)} batch: {len(self.batch)})"
            )
        for i, (position, seq) in zip(free, self.batch, strict=True):
            self.cells[i].position, self.cells[i].sequences = position, {seq}
        self.places = free
        used += free
        self.range = range(
            min(used) // self.padding * self.padding, -(-(max(used) + 1) // self.padding) * self.padding
        )

    def slide(self) -> list[int]:
        """Drop what lies before the memory of each sequence; return the cells that the batch may see."""
        in_batch = {seq for _, seq in self.batch}
        if self.kept is None:
            return [i for seq in in_batch for i in self.of(seq)]
        used = []
        for seq in in_batch.union(*(cell.sequences for cell in self.cells)):
            cells = self.of(seq)
            if seq in in_batch:
                lowest = min(position for position, other in self.batch if other == seq)
                used += [i for i in cells if self.cells[i].position >= lowest - self.window]
            else:
                lowest = max(0, *(self.cells[i].position for i in cells)) + 1
            for i in cells:
                if self.cells[i].position < lowest - self.kept:
                    self.cells[i].sequences.discard(seq)
        return used

    def put(self, tokens: Sequence[int]) -> None:
        if len(tokens) != len(self.batch):
            raise OllamaError(f"inconsistent batch sizes ({len(self.batch)}, {len(tokens)})")
        for i, token in zip(self.places, tokens, strict=True):
            self.cells[i].token, self.cells[i].moved = token, 0

    def set_causal(self, except_: Iterable[int]) -> None:
        self.lifted = frozenset(except_)

    def get(self) -> Held:
        shown = [self.cells[i] for i in self.range]
        return [cell.key for cell in shown], [
            [self.sees(cell, query, *place) for cell in shown] for query, place in enumerate(self.batch)
        ]

    def sees(self, cell: Cell, query: int, position: int, seq: int) -> bool:
        return (
            seq in cell.sequences
            and (query in self.lifted or cell.position <= position)
            and not (self.chunk and cell.position < position - position % self.chunk)
            and not (self.window and cell.position < position - self.window)
        )

    def copy_prefix(self, src: int, dst: int, length: int) -> None:
        for cell in self.cells:
            cell.sequences.discard(dst)
            if src in cell.sequences and cell.position < length:
                cell.sequences.add(dst)

    def can_resume(self, seq: int, position: int) -> bool:
        if self.kept is None:
            return True
        stored = [self.cells[i].position for i in self.of(seq)]
        return bool(stored) and max(0, position - self.window) >= min(stored) and position <= max(stored) + 1

    def remove(self, seq: int, begin: int, end: int | None = None) -> None:
        offset = 0 if end is None else begin - end
        for i in self.of(seq):
            cell = self.cells[i]
            if cell.position >= begin and (end is None or cell.position < end):
                cell.sequences.discard(seq)
            elif end is not None and cell.position >= end:
                if len(cell.sequences) > 1:  # those before it have their new positions, and keep the old keys
                    raise OllamaError("shifting cells shared by multiple sequences not supported")
                cell.position += offset
        left = self.of(seq)
        if end is None or not left:
            return
        if not self.shifts:
            raise OllamaError("model does not support operation")
        for i in left:
            if self.cells[i].position >= begin:
                self.cells[i].moved += offset


class Encoder:
    """One output of an encoder, for one sequence; ``Get`` gives it without a mask."""

    def __init__(self) -> None:
        self.position, self.cached, self.current = 0, False, 0
        self.output: tuple[int, ...] = ()

    def init(self, max_sequences: int, capacity: int, max_batch: int, padding: int = 1) -> None:
        if max_sequences > 1 or padding > 1:
            raise OllamaError("encoder cache does not support multiple sequences, or padding")

    def start_forward(
        self, positions: Sequence[int], sequences: Sequence[int], images: Sequence[int] = ()
    ) -> None:
        """``images``: the batch indices that bring one; the last counts."""
        if images:
            self.current = positions[images[-1]]

    def put(self, tokens: Sequence[int]) -> None:
        self.position, self.cached, self.output = self.current, True, tuple(tokens)

    def get(self) -> tuple[int, ...]:
        return self.output

    def copy_prefix(self, src: int, dst: int, length: int) -> None:
        raise OllamaError("encoder cache does not support multiple sequences")

    def can_resume(self, seq: int, position: int) -> bool:
        return True

    def remove(self, seq: int, begin: int, end: int | None = None) -> None:
        if self.position >= begin and (end is None or self.position < end):
            self.cached = False


class Wrapper:
    """Several caches that start, copy, resume and remove together."""

    def __init__(self, *caches: Cache) -> None:
        self.caches = caches

    def init(self, max_sequences: int, capacity: int, max_batch: int, padding: int = 1) -> None:
        for cache in self.caches:
            cache.init(max_sequences, capacity, max_batch, padding)

    def start_forward(self, positions: Sequence[int], sequences: Sequence[int]) -> None:
        for i, cache in enumerate(self.caches):
            try:
                cache.start_forward(positions, sequences)
            except OllamaError:
                for begun in reversed(self.caches[:i]):
                    for position, seq in zip(positions, sequences, strict=True):
                        begun.remove(seq, position)
                raise

    def put(self, tokens: Sequence[int]) -> None:
        for cache in self.caches:
            cache.put(tokens)

    def copy_prefix(self, src: int, dst: int, length: int) -> None:
        for cache in self.caches:
            cache.copy_prefix(src, dst, length)

    def can_resume(self, seq: int, position: int) -> bool:
        return all(cache.can_resume(seq, position) for cache in self.caches)

    def remove(self, seq: int, begin: int, end: int | None = None) -> None:
        for cache in self.caches:
            cache.remove(seq, begin, end)
