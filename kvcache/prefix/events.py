"""Events for KV-aware routers: which blocks of which prefixes are in which tier, published as this changes.

The events are those of vLLM (vllm/distributed/kv_events.py of 0.32), and ``encode`` produces what its
subscribers decode. A block is ``block_size`` tokens of the PrefixCache, and its hash is the key under which
stores have the prefix that ends with it (``kvcache.stores.Keys``). A block is in a tier if all of it is; it
also counts as in host memory if part of it is there and the rest on the device. A move is a BlockStored and a
BlockRemoved.

Caches with windows or states resume only where a snapshot ends. Their events are by group, like vLLM's for a
hybrid model: each wrapped cache is a group, and a snapshot has the blocks of each group that are needed to
resume there.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvcache.caches.causal import CausalCache
from kvcache.caches.encoder import EncoderCache
from kvcache.caches.states import StateCache
from kvcache.caches.windows import ChunkedCache, SlidingWindowCache
from kvcache.caches.wrapper import unwrapped
from kvcache.prefix.alphabet import Alphabet
from kvcache.prefix.radix_tree import Node
from kvcache.snapshots.snapshot import SnapshotChain
from kvcache.stores import Keys, SaltedToken

__all__ = [
    "DEVICE",
    "HOST",
    "STORAGE",
    "AllBlocksCleared",
    "BlockEvents",
    "BlockRemoved",
    "BlockStored",
    "EventBatch",
    "SnapshotEvents",
    "encode",
]

log = logging.getLogger("kvcache")

DEVICE, HOST, STORAGE = "GPU", "CPU", "STORAGE"
"""vLLM's names for the device (of any kind), host memory, and stores."""
_LOCAL = frozenset((DEVICE, HOST))
"""The media that need no store."""


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Consecutive blocks are now in ``medium``; blocks that were already there stay.

    ``parent_block_hash`` is the hash of the block before the first, None at the beginning of a prompt.
    ``token_ids`` has ``block_size`` ids per block, or is empty if ids are not published. ``extra_keys`` has
    ``(salt,)`` for each private block of a tenant, and is None if that is not published. Only caches with
    windows or states have groups: ``group_idx``, ``kv_cache_spec_kind`` and ``kv_cache_spec_sliding_window``
    (the positions that a query sees, including its own) are None for others.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks are no longer in ``medium``."""

    block_hashes: list[bytes]
    medium: str | None = None
    group_idx: int | None = None


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing is cached anywhere any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared
_OMITTED = ("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window")
"""Fields that vLLM omits if they are None."""


@dataclass(frozen=True, slots=True)
class EventBatch:
    """The events of one step, in order; ``ts`` is in seconds since 1970."""

    ts: float
    events: list[Event]


def encode(batch: EventBatch) -> list[Any]:
    """A batch as plain lists and dicts, which msgpack encodes to what vLLM decodes as ``KVEventBatch``.

    The batch is a list; an event is a dict with its class as "type".
    """
    return [batch.ts, [_fields(event) for event in batch.events]]


def _fields(event: Event) -> dict[str, Any]:
    fields = {each.name: getattr(event, each.name) for each in dataclasses.fields(event)}
    omitted = {name for name in _OMITTED if fields.get(name, 0) is None}
    return {"type": type(event).__name__, **{name: fields[name] for name in fields if name not in omitted}}


@dataclass(slots=True)
class _Known:
    """The blocks that end in a node's edge, and where they were when last published."""

    first: int
    """The number of its first block: block i is tokens [i * size, (i + 1) * size)."""
    parent: str | None
    hashes: list[str]
    told: dict[str, set[str]] = field(default_factory=dict)


class BlockEvents:
    """Tells ``publish`` how the blocks of a radix tree move, from the nodes that changed.

    A block belongs to the node in whose edge its last token lies, so each has one owner at any time. With
    ``token_ids``, token ids are published; with ``private``, also those of conversations with a salt, and the
    salt.

    ``publish`` is called by the thread that uses the PrefixCache, in the middle of its work: it must be
    quick, and must not use the PrefixCache. If it raises, the error is logged and the batch is lost.
    """

    def __init__(
        self,
        publish: Callable[[EventBatch], None],
        keys: Keys,
        alphabet: Alphabet,
        token_ids: bool = True,
        private: bool = False,
    ) -> None:
        self._publish, self._keys, self._alphabet = publish, keys, alphabet
        self._token_ids, self._private = token_ids, private
        self._known: dict[Node[Any], _Known] = {}
        self._changed: dict[Node[Any], None] = {}
        self._dropped: deque[str] = deque()
        self._cleared = False

    def changed(self, node: Node[Any]) -> None:
        """A node was added, split or removed, or its snapshots changed."""
        self._changed[node] = None

    def dropped(self, key: str) -> None:
        """The stores have lost an entry. Thread-safe."""
        self._dropped.append(key)

    def cleared(self) -> None:
        """Everything was discarded, and there are no stores."""
        self._known.clear()
        self._changed.clear()
        self._cleared = True

    def tell(self, root: Node[Any]) -> None:
        """Publish the changes in the tree under ``root`` since the last call, if any."""
        if not (self._changed or self._dropped or self._cleared):
            return
        events: list[Event] = [AllBlocksCleared()] if self._cleared else []
        self._cleared = False
        events += self._losses([self._dropped.popleft() for _ in range(len(self._dropped))])
        events += self._moves(root)
        if events:
            try:
                self._publish(EventBatch(time.time(), events))
            except Exception:
                log.exception("events: a batch of %d events was not published", len(events))

    def _losses(self, keys: list[str]) -> list[Event]:
        """Stores have these entries no longer."""
        for known in self._known.values() if keys else ():
            known.told.get(STORAGE, set()).difference_update(keys)
        return [BlockRemoved([bytes.fromhex(key) for key in keys], STORAGE)] if keys else []

    def _moves(self, root: Node[Any]) -> list[Event]:
        nodes = self._with_straddling()
        self._changed = {}
        before: dict[str, set[str]] = {}
        for node in nodes:
            if (known := self._known.pop(node, None)) is not None:
                for medium, hashes in known.told.items():
                    before.setdefault(medium, set()).update(hashes)
        now: dict[str, set[str]] = {}
        stored: list[Event] = []
        for node in sorted((node for node in nodes if _top(node) is root), key=lambda node: node.end):
            if node is root:
                continue
            known = self._blocks_of(node)
            there = self._media(node, known)
            if STORAGE in before:  # a store counts as having what it was given until it drops it
                there.setdefault(STORAGE, set()).update(before[STORAGE].intersection(known.hashes))
            for medium, hashes in there.items():
                known.told[medium] = hashes
                now.setdefault(medium, set()).update(hashes)
                stored += self._stored(node, known, medium, hashes - before.get(medium, set()))
        removed: list[Event] = []
        for medium in (DEVICE, HOST):
            gone = before.get(medium, set()) - now.get(medium, set())
            if gone:
                removed.append(BlockRemoved([bytes.fromhex(key) for key in sorted(gone)], medium))
        return stored + removed

    def _with_straddling(self) -> dict[Node[Any], None]:
        """The changed nodes, and nodes below them with a block that begins in one of them."""
        size = self._keys.block_size
        affected: dict[Node[Any], None] = {}
        waiting = [(node, node.end - node.end % -size) for node in self._changed]
        while waiting:
            node, upto = waiting.pop()
            affected[node] = None
            below = node.children.values()
            waiting += [(child, upto) for child in below if child.begin < upto and child not in affected]
        return affected

    def _blocks_of(self, node: Node[Any]) -> _Known:
        """The blocks that end in a node's edge; blocks above it are hashed first if necessary."""
        above: list[Node[Any]] = [node]
        while (up := above[-1].parent) is not None and up.parent is not None and up not in self._known:
            above.append(up)
        for each in reversed(above):
            self._known[each] = self._hashed(each)
        return self._known[node]

    def _hashed(self, node: Node[Any]) -> _Known:
        size = self._keys.block_size
        first, last = node.begin // size, node.end // size
        above = self._known.get(node.parent) if node.parent is not None else None
        parent = None if above is None else (above.hashes[-1] if above.hashes else above.parent)
        if first == last:
            return _Known(first, parent, [])
        ids = _tokens(node, first * size, last * size)
        return _Known(first, parent, self._keys.chain(self._alphabet.named(ids), after=parent).aligned)

    def _media(self, node: Node[Any], known: _Known) -> dict[str, set[str]]:
        """The blocks of a node in each medium; the first may begin in nodes above."""
        here = _media_of(node)
        if not known.hashes or not here:
            return {}
        parts, up = [here], node.parent
        while up is not None and up.end > known.first * self._keys.block_size:
            parts.append(_media_of(up))
            up = up.parent
        first = set(frozenset.intersection(*parts))
        if not first & _LOCAL and all(part & _LOCAL for part in parts):
            first.add(HOST)  # some of it, and the rest on the device
        there = {medium: set(known.hashes[1:]) for medium in here}
        for medium in first:
            there.setdefault(medium, set()).add(known.hashes[0])
        return there

    def _stored(self, node: Node[Any], known: _Known, medium: str, fresh: set[str]) -> Iterator[BlockStored]:
        """Events for blocks that are new in a medium, one for each run of consecutive blocks."""
        if fresh:
            yield from self._runs(node, known.first, known.parent, known.hashes, medium, fresh)

    def _runs(
        self,
        node: Node[Any],
        first: int,
        parent: str | None,
        hashes: Sequence[str],
        medium: str,
        fresh: set[str],
        **group: Any,
    ) -> Iterator[BlockStored]:
        """Events for the blocks in ``fresh``, one for each run of blocks on the path to a node.

        ``hashes`` are those of the blocks, ``first`` is the number of the first block, ``parent`` the hash of
        the one before it.
        """
        salts = self._salts(node, first, len(hashes))

        def alike(i: int) -> Any:
            return hashes[i] in fresh, salts[i]

        for (published, salt), indices in itertools.groupby(range(len(hashes)), alike):
            run = [*indices]
            if published:
                before = hashes[run[0] - 1] if run[0] else parent
                yield BlockStored(
                    [bytes.fromhex(hashes[i]) for i in run],
                    None if before is None else bytes.fromhex(before),
                    self._ids(node, first + run[0], first + run[-1] + 1, salt),
                    self._keys.block_size,
                    medium=medium,
                    extra_keys=[(salt,)] * len(run) if salt is not None and self._private else None,
                    **group,
                )

    def _ids(self, node: Node[Any], first: int, stop: int, salt: str | None) -> list[int]:
        """The tokens of the blocks [first, stop) of the path to a node, if these are published."""
        if not self._token_ids or not (salt is None or self._private):
            return []
        size = self._keys.block_size
        named = self._alphabet.decode(_tokens(node, first * size, stop * size))
        ids = [item for item in named if isinstance(item, int)]
        return ids if len(ids) == len(named) else []  # an image has no id

    def _salts(self, node: Node[Any], first: int, count: int) -> list[str | None]:
        """The salt of each block; a block is private from the conversation's first private token on."""
        tokens = _tokens(node, 0, node.end)
        negative = np.flatnonzero(tokens < 0)
        for at, item in zip(negative, self._alphabet.named(tokens[negative]), strict=True):
            if isinstance(item, SaltedToken) and item.salt:
                own = int(at) // self._keys.block_size
                return [item.salt if first + i >= own else None for i in range(count)]
        return [None] * count


@dataclass(frozen=True, slots=True)
class _Group:
    """One of the caches of a wrapper, as vLLM describes a group of layers."""

    index: int
    kind: str | None
    window: int | None = None
    """The number of positions that a query sees, including its own."""
    keep: int = 0
    """The number of positions at the beginning that every query sees."""

    @property
    def described(self) -> dict[str, Any]:
        return {
            "group_idx": self.index,
            "kv_cache_spec_kind": self.kind,
            "kv_cache_spec_sliding_window": self.window,
        }

    def blocks(self, begin: int, end: int, size: int) -> list[range]:
        """The blocks of a snapshot of ``[begin, end)`` that are needed to resume at its last whole block."""
        last = end // size
        if self.kind == "sliding_window" and self.window is not None:
            first = max(0, last - -(-(self.window - 1) // size))
            sinks = min(first, -(-self.keep // size))
            return [range(sinks), range(first, last)]
        if self.kind in ("mamba", None):
            return [range(max(0, last - 1), last)]
        return [range(begin // size, last)]


def _groups(cache: Any) -> list[_Group]:
    groups = []
    for i, each in enumerate(unwrapped(cache)):
        match each:
            case SlidingWindowCache():
                groups.append(_Group(i, "sliding_window", each.window + 1, each.keep))
            case ChunkedCache():
                groups.append(_Group(i, "chunked_local_attention"))
            case EncoderCache():
                groups.append(_Group(i, "cross_attention"))
            case CausalCache():
                groups.append(_Group(i, "full_attention"))
            case StateCache():
                groups.append(_Group(i, "mamba"))
            case _:
                groups.append(_Group(i, None))
    return groups


_Place = tuple[int, str]
"""A group, by index, and a medium."""


class SnapshotEvents(BlockEvents):
    """For a cache with indivisible snapshots, publishes by group the blocks that resuming at each of them
    needs.

    Snapshots share blocks, which are removed with the last snapshot that has them. What was written to stores
    counts as present until they drop it.
    """

    def __init__(self, cache: Any, *arguments: Any, **options: Any) -> None:
        """``arguments`` and ``options`` are those of ``BlockEvents``."""
        super().__init__(*arguments, **options)
        self._groups = _groups(cache)
        self._published: dict[Node[Any], list[tuple[_Place, str]]] = {}
        """The blocks of snapshots on the device and in host memory."""
        self._in_stores: dict[str, list[tuple[_Place, str]]] = {}
        """The blocks of snapshots in stores, by key."""
        self._counts: Counter[tuple[_Place, str]] = Counter()
        """The number of snapshots that have each block."""

    def cleared(self) -> None:
        super().cleared()
        self._published.clear()
        self._in_stores.clear()
        self._counts.clear()

    def _losses(self, keys: list[str]) -> list[Event]:
        gone = [each for key in keys for each in self._in_stores.pop(key, ())]
        self._counts.subtract(gone)
        return self._removed(gone)

    def _moves(self, root: Node[Any]) -> list[Event]:
        nodes, self._changed = self._changed, {}
        before: list[tuple[_Place, str]] = []
        for node in nodes:
            self._known.pop(node, None)
            before += self._published.pop(node, ())
        had = {each for each in before if self._counts[each] > 0}
        self._counts.subtract(before)
        stored: list[Event] = []
        for node in sorted((node for node in nodes if _top(node) is root), key=lambda node: node.end):
            if node is not root:
                self._blocks_of(node)
                stored += self._of_node(node, had)
        return stored + self._removed(before)

    def _of_node(self, node: Node[Any], had: set[tuple[_Place, str]]) -> Iterator[BlockStored]:
        """Record the blocks of a node's snapshots, and publish new ones."""
        media = _media_of(node)
        published = self._published.setdefault(node, [])
        for begin, end in _spans(node):
            for medium in sorted(media):
                noted = published
                if medium == STORAGE:
                    key = self._key(node, end)
                    if key in self._in_stores:
                        continue
                    noted = self._in_stores[key] = []
                for group in self._groups:
                    for blocks in group.blocks(begin, end, self._keys.block_size):
                        yield from self._note(node, blocks, (group, medium), noted, had)

    def _note(
        self,
        node: Node[Any],
        blocks: range,
        place: tuple[_Group, str],
        noted: list[tuple[_Place, str]],
        had: set[tuple[_Place, str]],
    ) -> Iterator[BlockStored]:
        group, medium = place
        before, hashes = self._hashes(node, blocks)
        fresh: set[str] = set()
        for each in hashes:
            which = (group.index, medium), each
            if not self._counts[which] and which not in had:
                fresh.add(each)
            self._counts[which] += 1
            noted.append(which)
        if fresh:
            described = group.described
            yield from self._runs(node, blocks.start, before, hashes, medium, fresh, **described)

    def _hashes(self, node: Node[Any], blocks: range) -> tuple[str | None, list[str]]:
        """The hash of the block before ``blocks`` on the path to a node (None if there is none), and
        theirs.
        """
        parts: list[list[str]] = []
        first, at = max(0, blocks.start - 1), node
        while at.parent is not None:
            known = self._known[at]
            parts.append(known.hashes[max(0, first - known.first) : max(0, blocks.stop - known.first)])
            if known.first <= first:
                break
            at = at.parent
        hashes = [each for part in reversed(parts) for each in part]
        return (hashes[0], hashes[1:]) if blocks.start else (None, hashes)

    def _key(self, node: Node[Any], end: int) -> str:
        """The key under which stores have the snapshot that ends there."""
        size = self._keys.block_size
        last = end // size
        before, _ = self._hashes(node, range(last, last))
        rest = self._alphabet.named(_tokens(node, last * size, end))
        return self._keys.chain(rest, after=before).at(end - last * size)

    def _removed(self, gone: Sequence[tuple[_Place, str]]) -> list[Event]:
        """Events for those of these blocks that no snapshot has any more."""
        removed: dict[_Place, dict[str, None]] = {}
        for place, key in gone:
            if self._counts[place, key] <= 0:
                del self._counts[place, key]
                removed.setdefault(place, {})[key] = None
        return [
            BlockRemoved([bytes.fromhex(key) for key in sorted(keys)], medium, index)
            for (index, medium), keys in sorted(removed.items())
        ]


def _spans(node: Node[Any]) -> list[tuple[int, int]]:
    """[begin, end) of each snapshot of a node."""
    entry = node.data
    if entry is None:
        return []
    if isinstance(entry.snapshot, SnapshotChain):
        return [(part.begin, part.end) for part in entry.snapshot.parts]
    return [(entry.begin, node.end)]


def _media_of(node: Node[Any]) -> frozenset[str]:
    """The media of a node's content: some of DEVICE, HOST and STORAGE."""
    return node.data.media if node.data is not None else frozenset()


def _top(node: Node[Any]) -> Node[Any]:
    while node.parent is not None:
        node = node.parent
    return node


def _tokens(node: Node[Any], begin: int, end: int) -> np.ndarray:
    """Tokens [begin, end) of the path to a node."""
    parts: list[np.ndarray] = []
    at: Node[Any] | None = node
    while at is not None and at.end > begin and at.parent is not None:
        parts.append(at.tokens)
        at = at.parent
    base = 0 if at is None else at.end
    joined = np.concatenate(parts[::-1]) if parts else np.zeros(0, np.int64)
    return joined[begin - base : end - base]
