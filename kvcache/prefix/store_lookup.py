"""Serialized snapshots of a prefix that stores have, put into a sequence of the cache."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator, Sequence

import numpy as np

import ml
from kvcache.cache import InvalidRangeError
from kvcache.caches.wrapper import unwrapped
from kvcache.offload.direct_load import load_back, restore_serialized
from kvcache.offload.prefetch import Prefetch, Prefetcher
from kvcache.offload.tiers import LookUp, StoreTier
from kvcache.prefix.prefix_tree import PrefixTree
from kvcache.prefix.tree_entry import span_of
from kvcache.snapshots.attention import AttentionSnapshots
from kvcache.snapshots.check_serialized import check_serialized
from kvcache.snapshots.layer_shapes import Layers, check_layers, layers_of_cache, layers_of_serialized
from kvcache.stores import Chain, SerializedSnapshot
from kvcache.stores.errors import SnapshotCorruptError

__all__ = ["StoreLookup"]

log = logging.getLogger("kvcache")

Told = Callable[[int], None]
"""Hears how many tokens of a prefix the sequence has by now."""


class StoreLookup:
    """Reads entries from the stores of a tree. What is not what its key says is dropped there, and not used.

    ``layers`` are those that serialized snapshots have to have; {}: those of the cache. What ``ahead`` has
    read by then is not asked for again.
    """

    def __init__(self, tree: PrefixTree, layers: Layers, ahead: Prefetcher | None = None) -> None:
        self._cache, self._tree, self._layers = tree.cache, tree, layers
        self._prefetcher = ahead
        self._known = bool(layers)
        """Whether it is known which layers there are. In a cache that nothing was kept of, a first pass may
        have failed before its last layer."""
        self._learned = False
        """Whether only entries say that the cache has some of its layers: the model has not put them yet."""
        self._doubtful = False
        """Whether entries were wrong about that: none is used until something that the model put is kept."""
        self._used: list[int] = []
        """The ends of entries that the last ``fetch`` read, inside blocks too."""

    def prefetch(self, ids: np.ndarray, length: int) -> Prefetch | None:
        """Read ahead what stores have behind the first ``length`` tokens; None: there is nothing to read."""
        limit = int(ids.size) - 1
        if self._prefetcher is None or length >= limit or self._waits_for_model:
            return None
        return self._prefetcher.start(self._chain(ids[:limit]), length, limit, self._tree.divisible)

    def longest(self, ids: np.ndarray, length: int, limit: int) -> LookUp:
        """How many tokens of ``ids[:limit]`` the stores say they have; ``length`` where it is no more.

        What computing is faster for is not among it.
        """
        if self._tree.store is None or length >= limit or self._waits_for_model:
            return LookUp(length)
        chain = self._chain(ids[:limit])
        known = None if self._prefetcher is None else self._prefetcher.look_up(chain, length, limit)
        if known is not None:
            return known
        return self._store.look_up(chain, length, limit, self._tree.divisible)

    def fetch(self, seq: int, ids: np.ndarray, reached: int, told: Told) -> int:
        """Put entries behind the first ``reached`` tokens, which the sequence has; returns how far that went.

        In order, each when it is read, as far as they follow one another. For content that is divisible.
        ``told``, which raises nothing, hears now and then how far it is.
        """
        size = self._tree.keys.block_size
        chain = self._chain(ids)
        ends = (*range(reached - reached % size + size, int(ids.size), size), int(ids.size))
        go_on = self._straight if self._store.reads_straight else self._ahead
        self._used.clear()
        found = go_on(seq, ids, chain, reached, ends, told)
        if found > reached:
            self._touch(chain, ids, sorted({end for end in (*ends, *self._used) if end <= found}))
        return found

    def read_back(
        self, ids: np.ndarray, floor: int, lent: contextlib.ExitStack
    ) -> list[SerializedSnapshot] | None:
        """Entries that follow one another to the end of ``ids``, from ``floor`` or before.

        They are good until ``lent`` is closed. [] where no store has one of them: those behind it, which
        nobody can use, are dropped, so that what is computed instead is written. None where one cannot be
        read now.
        """
        chain = self._chain(ids)
        entries: list[SerializedSnapshot] = []
        at = int(ids.size)
        while at > floor or not entries:
            serialized = self._checked(ids, lent.enter_context(self._read(chain.at(at))), at)
            if serialized is None:
                if not self._store.lacking([chain.at(at)])[0]:
                    return None
                for part in entries:
                    self.drop(ids, span_of(part)[1])
                return []
            entries.append(serialized)
            at, _ = span_of(serialized)
        return entries[::-1]

    def restore(self, seq: int, serialized: SerializedSnapshot) -> bool:
        """Whether an entry, which was checked, was put into the sequence; not one of another cache."""
        expected = self._layers or layers_of_cache(self._cache)
        self._known = self._known or bool(self._tree.radix_tree.root.children)
        learned = {} if self._known else layers_of_serialized(serialized)
        new = learned.keys() - expected.keys()
        try:
            check_layers(serialized, {**learned, **expected})
            restored = restore_serialized(self._cache, seq, [serialized], lent=True)
            self._known = self._known or restored
            self._learned = self._learned or (restored and bool(new))
            return restored
        except (SnapshotCorruptError, InvalidRangeError) as error:
            log.warning("load back: %s; the serialized snapshot is dropped and computed again", error)
            return False
        except (ml.DeviceError, MemoryError) as error:
            if not new:
                raise
            log.warning("load back: %s; stores are not asked before the model has put its own layers", error)
            self._doubtful = True
            return False

    def unlearn(self) -> None:
        """Forget the layers that only entries tell of, where the model puts others. No session is open.

        It does where one was refused that it put first, or it has put some and not all of them.
        """
        if not self._learned:
            return
        parts = [getattr(part, "attention", part) for part in unwrapped(self._cache)]
        taken = [getattr(part, "snapshots", None) for part in parts]
        storages = [each.storage.buffers for each in taken if isinstance(each, AttentionSnapshots)]
        layers = [held for buffers in storages for held in buffers.values()]
        self._learned = not all(held.stamp for held in layers)
        if not self._learned or not any(held.stamp or held.doubted for held in layers):
            return
        log.warning(
            "load back: stores have entries of other layers than the model puts, under its identity; none is "
            "used before it has put its own. PrefixCache(layers=) tells them apart from the start"
        )
        self._tree.clear()
        for buffers in storages:
            for layer in [layer for layer, held in buffers.items() if not held.stamp]:
                del buffers[layer]
        self._learned, self._known, self._doubtful = False, False, True

    @property
    def _waits_for_model(self) -> bool:
        self._doubtful = self._doubtful and not self._tree.radix_tree.root.children
        return self._doubtful

    def drop(self, ids: np.ndarray, end: int) -> None:
        """Take the entry of the first ``end`` tokens out of the stores: it is not what its key says.

        It stays as long as that cannot be known.
        """
        if self._waits_for_model:
            return
        self._store.drop(self._chain(ids[:end]).at(end))

    def touch(self, ids: np.ndarray, ends: Sequence[int]) -> None:
        """Note that the entries that end there are in use, each of which needs those before it."""
        self._touch(self._chain(ids), ids, ends)

    def _touch(self, chain: Chain, ids: np.ndarray, ends: Sequence[int]) -> None:
        writer = self._tree.writer
        assert writer is not None
        self._store.touch([chain.at(end) for end in ends])
        nodes = self._tree.radix_tree.match(ids[: ends[0]]).nodes
        before = [end for node in nodes if node.data is not None for end in writer.ends(node)]
        if before := [end for end in before if end < ends[0]]:
            self._store.touch([chain.at(end) for end in (*before, *ends)])

    def _straight(
        self, seq: int, ids: np.ndarray, chain: Chain, reached: int, ends: Sequence[int], told: Told
    ) -> int:
        """Have serialized snapshots read to where they will lie, the others from where the store has them."""
        stuck = 0
        while ends:
            before = reached
            # The first may begin before what is held already; a cache that cannot never can. What the layers
            # of a cache are is checked by its first entry, which comes the other way.
            if stuck < 2 and (not self._layers or layers_of_cache(self._cache)):
                reached = load_back(self._cache, seq, self._store, chain, reached, ends, told, self._used)
                stuck = stuck + 1 if reached == before else 0
                ends = [end for end in ends if end > reached]
            if ends:
                with self._store.serialized(chain.at(ends[0])) as found:
                    if not self._next(seq, ids, found, reached, ends[0]):
                        break
                reached, ends = ends[0], ends[1:]
                told(reached)
        return reached

    def _ahead(
        self, seq: int, ids: np.ndarray, chain: Chain, reached: int, ends: Sequence[int], told: Told
    ) -> int:
        """Restore each serialized snapshot while the next one is read."""
        with contextlib.closing(self._entries([chain.at(end) for end in ends])) as entries:
            for end in ends:
                if not self._next(seq, ids, next(entries), reached, end):
                    break
                reached = end
                told(reached)
        return reached

    def _entries(self, keys: Sequence[str]) -> Generator[SerializedSnapshot | None, None, None]:
        """As ``StoreTier.entries``; first those that were read ahead."""
        count = 0
        while count < len(keys) and (page := self._read_ahead(keys[count])) is not None:
            yield page
            count += 1
        yield from self._store.entries(keys[count:])

    def _read(self, key: str) -> contextlib.AbstractContextManager[SerializedSnapshot | None]:
        page = self._read_ahead(key)
        return self._store.read(key) if page is None else contextlib.nullcontext(page)

    def _read_ahead(self, key: str) -> SerializedSnapshot | None:
        return None if self._prefetcher is None else self._prefetcher.page(key)

    def _next(
        self, seq: int, ids: np.ndarray, found: SerializedSnapshot | None, reached: int, end: int
    ) -> bool:
        """Whether an entry, which ends at ``end``, was put behind the first ``reached`` tokens."""
        serialized = self._checked(ids, found, end)
        if serialized is None:
            return False
        begin, _ = span_of(serialized)
        with contextlib.ExitStack() as lent:
            before = self.read_back(ids[:begin], reached, lent) if begin > reached else []
            if begin > reached and not before:  # conversations part there, and what ends there is gone
                if before is not None:
                    self.drop(ids, end)
                return False
            self._used += [span_of(part)[1] for part in before or ()]
            for part in (*(before or ()), serialized):
                if not self.restore(seq, part):
                    self.drop(ids, span_of(part)[1])
                    self._cache.remove(seq, reached)
                    return False
        return True

    def _checked(
        self, ids: np.ndarray, serialized: SerializedSnapshot | None, end: int
    ) -> SerializedSnapshot | None:
        """What is stored if it is an entry that ends at ``end``; another under its key is dropped."""
        if serialized is None:
            return None
        try:
            begin, last = check_serialized("load back", serialized, complete=True)
            if begin < last == end:
                self._store.break_even.sized(serialized.nbytes, end - begin)
                return serialized
            raise SnapshotCorruptError(
                f"load back: a serialized snapshot of [{begin}, {last}) under the key of {end} tokens"
            )
        except SnapshotCorruptError as error:
            log.warning("%s; the serialized snapshot is dropped and computed again", error)
        self.drop(ids, end)
        return None

    @property
    def _store(self) -> StoreTier:
        assert self._tree.store is not None
        return self._tree.store

    def _chain(self, ids: np.ndarray) -> Chain:
        return self._tree.keys.chain(self._tree.alphabet.named(ids))
