"""What a KV-aware router follows: which blocks of which prefixes lie in which tier, told as it changes.

The events are those of vLLM (vllm/distributed/kv_events.py of 0.32), and ``encode`` gives what its
subscribers decode. A block is ``block_size`` tokens of the PrefixCache, and its hash the key under which
stores have the prefix that it ends (``kvcache.stores.Keys``). It is in a tier if all of it is; in host memory
also if part of it is there, and the rest on the device: it is had from both. A move is a BlockStored and a
BlockRemoved.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvcache.prefix.alphabet import Alphabet
from kvcache.prefix.radix_tree import Node
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
    "encode",
]

log = logging.getLogger("kvcache")

DEVICE, HOST, STORAGE = "GPU", "CPU", "STORAGE"
"""vLLM's names of what is kept on the device (whatever device that is), in host memory, and in stores."""
_LOCAL = frozenset((DEVICE, HOST))
"""Of what is found without a store."""


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks that follow one another are in ``medium`` now; those that were there already stay.

    ``parent_block_hash`` is that of the block before the first, None at the beginning of a prompt.
    ``token_ids`` has ``block_size`` ids per block, or is empty where ids are not told. ``extra_keys`` has
    ``(salt,)`` for each block of a tenant's own, and is None where that is not told.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[str, ...] | None] | None = None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks are in ``medium`` no longer."""

    block_hashes: list[bytes]
    medium: str | None = None


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing is kept anywhere."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class EventBatch:
    """What happened in one step, in order; ``ts`` in seconds since 1970."""

    ts: float
    events: list[Event]


def encode(batch: EventBatch) -> list[Any]:
    """A batch as plain lists and dicts, which msgpack makes what vLLM's ``KVEventBatch`` decodes.

    The batch is a list; an event is a dict with its class as "type".
    """
    return [batch.ts, [_fields(event) for event in batch.events]]


def _fields(event: Event) -> dict[str, Any]:
    fields = {each.name: getattr(event, each.name) for each in dataclasses.fields(event)}
    if fields.get("extra_keys", 0) is None:
        del fields["extra_keys"]
    return {"type": type(event).__name__, **fields}


@dataclass(slots=True)
class _Known:
    """The blocks that end in a node's edge, and where they were when they were last told."""

    first: int
    """Number of its first block: block i is tokens [i * size, (i + 1) * size)."""
    parent: str | None
    hashes: list[str]
    told: dict[str, set[str]] = field(default_factory=dict)


class BlockEvents:
    """Tells ``publish`` how the blocks of a radix tree move, from the nodes that changed.

    A block belongs to the node in whose edge its last token lies: each has one owner at any time. With
    ``token_ids`` their ids are told, with ``private`` those of conversations with a salt and that salt, too.

    ``publish`` is called by the thread that uses the PrefixCache, in the middle of its work: it must be
    quick, and leave the PrefixCache alone. What it raises is logged, and that batch is lost.
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
        """A node was added, parted, removed, or keeps something else now."""
        self._changed[node] = None

    def dropped(self, key: str) -> None:
        """Stores have an entry no longer. Any thread may say so."""
        self._dropped.append(key)

    def cleared(self) -> None:
        """Nothing is kept any more, and there are no stores."""
        self._known.clear()
        self._changed.clear()
        self._cleared = True

    def tell(self, root: Node[Any]) -> None:
        """Publish what has changed in the tree under ``root`` since the last time, if anything."""
        if not (self._changed or self._dropped or self._cleared):
            return
        events: list[Event] = [AllBlocksCleared()] if self._cleared else []
        self._cleared = False
        lost = [self._dropped.popleft() for _ in range(len(self._dropped))]
        for known in self._known.values() if lost else ():
            known.told.get(STORAGE, set()).difference_update(lost)
        events += [BlockRemoved([bytes.fromhex(key) for key in lost], STORAGE)] if lost else []
        events += self._moves(root)
        if events:
            try:
                self._publish(EventBatch(time.time(), events))
            except Exception:
                log.exception("events: a batch of %d events was not published", len(events))

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
            if STORAGE in before:  # what a store was given it has until it is dropped
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
        """The nodes that changed, and those below with a block that begins in one of them."""
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
        """The blocks that end in a node's edge; those above it are hashed first where they are not yet."""
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
        """By medium, those blocks of a node that are there: the first may begin in nodes above."""
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
        """Events for blocks that are new in a medium: one for each run that is told alike."""
        run: list[int] = []
        salts = self._salts(node, known) if fresh else []
        for i, key in enumerate(known.hashes):
            if run and (key not in fresh or salts[i] != salts[run[-1]]):
                yield self._event(node, known, medium, run, salts[run[-1]])
                run = []
            if key in fresh:
                run.append(i)
        if run:
            yield self._event(node, known, medium, run, salts[run[-1]])

    def _event(
        self, node: Node[Any], known: _Known, medium: str, run: Sequence[int], salt: str | None
    ) -> BlockStored:
        size = self._keys.block_size
        before = known.hashes[run[0] - 1] if run[0] else known.parent
        ids: list[int] = []
        if self._token_ids and (salt is None or self._private):
            tokens = _tokens(node, (known.first + run[0]) * size, (known.first + run[-1] + 1) * size)
            named = self._alphabet.decode(tokens)
            known_ids = [item for item in named if isinstance(item, int)]
            ids = known_ids if len(known_ids) == len(named) else []  # an image has no id
        return BlockStored(
            [bytes.fromhex(known.hashes[i]) for i in run],
            None if before is None else bytes.fromhex(before),
            ids,
            size,
            medium=medium,
            extra_keys=[(salt,)] * len(run) if salt is not None and self._private else None,
        )

    def _salts(self, node: Node[Any], known: _Known) -> list[str | None]:
        """Whose each block is: it is a tenant's own from its first own token on."""
        size = self._keys.block_size
        tokens = _tokens(node, 0, node.end)
        negative = np.flatnonzero(tokens < 0)
        for at, item in zip(negative, self._alphabet.named(tokens[negative]), strict=True):
            if isinstance(item, SaltedToken) and item.salt:
                own = int(at) // size
                return [item.salt if known.first + i >= own else None for i in range(len(known.hashes))]
        return [None] * len(known.hashes)


def _media_of(node: Node[Any]) -> frozenset[str]:
    """Where what a node keeps is: some of DEVICE, HOST and STORAGE."""
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
