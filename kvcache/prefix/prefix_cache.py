"""Sessions that do not recompute shared prefixes.

After the prefix cache of Ollama's x/mlxrunner and RadixAttention (SGLang). What a session has computed is
kept as snapshots in a radix tree over tokens: first in the cache itself, without a copy, then in host memory,
then in stores. A new session starts from the longest prefix available in any of these, or in another open
session::

    with prefix.begin(tokens) as session:
        for chunk in session.chunks(512):          # session.remaining, split where snapshots are due
            evaluate(session.seq, chunk)
        while (token := sample()) is not None:
            session.extend([token])
            evaluate(session.seq, [token])
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import Any

from kvcache.cache import (
    ClosedError,
    InvalidRangeError,
    OrderError,
    SnapshotCache,
    check_whole,
)
from kvcache.caches.causal import CausalCache
from kvcache.caches.one_thread import one_thread
from kvcache.caches.wrapper import unwrapped
from kvcache.prefix.agent_sessions import AgentSessions, check_next_use
from kvcache.prefix.alphabet import Tenant
from kvcache.prefix.break_even import BreakEven
from kvcache.prefix.events import BlockEvents, EventBatch, SnapshotEvents
from kvcache.prefix.eviction import Evictor
from kvcache.prefix.matcher import StoreLookup
from kvcache.prefix.options import PrefixOptions
from kvcache.prefix.prefetch import Prefetch, Prefetcher
from kvcache.prefix.prefix_tree import Budgets, PrefixTree
from kvcache.prefix.retention import Retention, check_retention
from kvcache.prefix.session import (
    OpenSessions,
    PrefixStats,
    Session,
    SessionLimitError,
    SessionReplacedError,
    Tokens,
)
from kvcache.prefix.tiers import HostTier, StoreTier
from kvcache.prefix.tree_entry import span_of
from kvcache.prefix.worker import OffloadWorker
from kvcache.snapshots.attention import nobody
from kvcache.snapshots.snapshot import Snapshot
from kvcache.storage.layer_shape import LayerShape
from kvcache.storage.sizes import bytes_text
from kvcache.stores import Keys, Part, SnapshotStore, open_store
from kvcache.stores.closing import Closing
from kvcache.stores.sizes import parse_bytes

__all__ = ["PrefixCache", "PrefixStats", "Session", "SessionLimitError", "SessionReplacedError"]

log = logging.getLogger("kvcache")

_OWNERS: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""The PrefixCache of each cache, and of each cache in a wrapper. One that was dropped without ``close`` owns
nothing.
"""


class PrefixCache(Closing):
    """Sessions over one cache that share their prefixes through a radix tree of snapshots.

    ``budget`` limits the bytes of snapshots on the device; it is a number or a size such as ``"2GiB"`` (None:
    as much as the cells of the cache hold, and copies of windows and states up to ``limits["copies"]``). When
    a window needs cells that its snapshots hold, the snapshots are copied out and stay on the device as long
    as they fit; beyond that they are evicted. ``tiers`` is at most one HostTier, followed by stores, nearest
    first: open stores, arguments of ``open_store``, or Paths of folders. Evicted content moves to the next
    tier.

    ``identity`` identifies what computed K and V: model, weights, rope settings, tensor-parallel rank. It is
    required with a store, which others may share. ``block_size`` is the number of tokens that a stored key
    covers. Everything else is in ``options``, whose fields may also be named: ``interval=64``.

    The PrefixCache uses all sequences of the cache, except those in which a caller has put something itself,
    such as a branch. One thread at a time may call it and its sessions, between passes: a call ends the
    current pass, or raises OrderError while another thread is in a call or in the middle of a pass. A
    background thread writes to the stores. A forked child can continue with its copy; fork when nothing is in
    progress, after ``flush``.

    >>> import ml
    >>> from kvcache import Batch, CausalCache, HostTier, PrefixCache
    >>> cache = CausalCache()
    >>> with ml.open_backend("numpy") as backend, backend.new_context() as ctx:
    ...     cache.init(backend, ml.DType.F32, max_sequences=2, capacity=32, max_batch=16)
    ...     with PrefixCache(cache, "64MiB", [HostTier("1GiB")]) as prefix:
    ...         for prompt in ([1, 2, 3, 4, 5], [1, 2, 3, 9]):
    ...             with prefix.begin(prompt) as session:
    ...                 tokens = list(session.remaining)         # the model evaluates only these
    ...                 positions = range(session.cached, len(prompt))
    ...                 cache.start_forward(ctx, Batch(positions, [session.seq] * len(tokens)))
    ...                 kv = ctx.zeros((len(tokens), 1, 4), ml.DType.F32)
    ...                 cache.put(ctx, kv, kv)
    ...                 print(session.cached, len(tokens))
    0 5
    3 1
    """

    def __init__(
        self,
        cache: SnapshotCache,
        budget: int | str | None = None,
        tiers: Sequence[HostTier | SnapshotStore | str | PathLike[str]] = (),
        *,
        identity: Mapping[str, Any] | None = None,
        block_size: int = 128,
        options: PrefixOptions | None = None,
        **named: Any,
    ) -> None:
        settings = _settings_of(cache)
        budget = None if budget is None else parse_bytes(budget, "PrefixCache: budget")
        options = PrefixOptions.of(options, named)
        _check_given(tiers, identity)
        if options.whole_blocks:  # what was computed in other passes has other last bits
            check_whole("PrefixCache", "block_size with whole_blocks", block_size, least=2)
            settings = {**settings, "whole_blocks": block_size}
        keys = Keys({"given": dict(identity or {}), "salt": options.salt, "cache": settings}, block_size)
        if not hasattr(cache, "offset"):
            raise InvalidRangeError(
                f"PrefixCache: {type(cache).__name__} knows no positions; wrap it with the cache of the "
                "model's own tokens (WrapperCache)"
            )
        check_unowned(cache)
        check_empty(cache, cache.max_sequences)
        host, stores, self._opened = _sorted_tiers(tiers)
        self.cache = cache
        self.stats = PrefixStats()
        in_flight, backlog, read_ahead = map(int, (options.in_flight, options.backlog, options.read_ahead))
        worker = OffloadWorker(cache.backend, in_flight) if in_flight and tiers else None
        self.break_even = options.break_even or BreakEven()
        store = StoreTier(stores, backlog, cache.backend, self.break_even) if stores else None
        budgets = Budgets(budget, host, None if options.tenant_budget is None else options.tenant_limit)
        self.tree = PrefixTree(cache, keys, budgets, store, worker)
        self.alphabet = self.tree.alphabet
        self.evictor = Evictor(self.tree)
        ahead = store is not None and read_ahead and store.reads_ahead
        self._prefetcher = (
            Prefetcher(store, read_ahead, lambda entry: span_of(entry)[0]) if store and ahead else None
        )
        shapes = {i: LayerShape(*shape) for i, shape in (options.layers or {}).items()}
        lookup = StoreLookup(self.tree, shapes, self._prefetcher)
        self._open = OpenSessions(self.tree, self.evictor, lookup, self.stats, options, block_size)
        self._calls = self._open.calls
        self._open.agents.prefetcher = self._prefetcher
        self._in_flight, self._read_ahead = in_flight, read_ahead
        self._closed = False
        self._finalizer = weakref.finalize(self, _warn_of_loss, self.tree) if store is not None else None
        self._own(weakref.ref(self._open))
        cache.on_pressure = self.evictor.relieve
        parts = unwrapped(cache)
        for i, window in self.evictor.copies.parts.items():
            relieve = functools.partial(self.evictor.relieve, part=i, window=window)
            parts[i].on_pressure = relieve
        _OWNERS.update(dict.fromkeys(unwrapped(cache), weakref.ref(self._open)))

    def __repr__(self) -> str:
        if self._closed:
            return "<PrefixCache, closed>"
        kept = [f"{tier} {bytes_text(count)}" for tier, count in self.nbytes.items() if count]
        content = f"kept: {', '.join(kept) or 'nothing'}"
        return f"<PrefixCache, open sessions: {len(self.sessions)}; {content}; over {self.cache!r}>"

    # Sessions.

    def foreign_pass(self) -> bool | None:
        """PreparedCalls.foreign_pass of the cache; False if the cache does not have it."""
        return self._open.foreign_pass()

    @one_thread
    def begin(
        self,
        tokens: Tokens,
        salt: str = "",
        shared: int = 0,
        retention: Retention | None = None,
        variant: Part = None,
        session_id: str = "",
        next_use: float | None = None,
    ) -> Session:
        """Start a conversation with the prompt ``tokens``, from the longest cached prefix.

        Only conversations with the same ``salt`` can reuse what is computed for this one, here and in stores
        (like vLLM's ``cache_salt``). Its first ``shared`` tokens, such as a system prompt, are shared by
        everyone, including those that are added to a shorter prompt; without a salt, all are.

        ``variant`` is whatever else K and V depend on, besides the tokens and ``identity``, such as the
        digest of an adapter: None, numbers, strings, bytes, or lists and dicts of these. Conversations with
        different variants share nothing, whatever their salts.

        ``retention`` sets the priorities with which ranges of the conversation are evicted, and for how long
        from when the session closes.

        ``session_id`` names the session of an agent that the conversation belongs to, for ``agent_sessions``;
        it changes neither what is found nor what is kept. ``next_use``, if known, is how many seconds after
        the end of this conversation the session's next one will begin: the longer that is, the earlier is
        evicted what only that session used.

        At least one token is left to evaluate. If the device fails to restore the prefix, a warning is
        logged, all tokens are left to evaluate, and the prefix stays cached. Raises SessionLimitError if all
        sequences are in use, CacheFullError if the prefix does not fit beside the open sessions (close one
        and begin again; later, begin that one again with its ``tokens``), and InvalidRangeError for an empty
        prompt. If it raises, no session has been started.
        """
        self._check("begin")
        tenant = Tenant.of(salt, shared, variant)
        check_retention(retention)
        if not isinstance(session_id, str):
            raise InvalidRangeError(f"begin: session_id={session_id!r:.60}; it must be a string")
        if next_use is not None:
            check_next_use("begin: next_use", next_use)
        self._open.forget_items()
        ids = self.alphabet.encode(tokens, tenant, op="begin")
        if not ids.size:
            raise InvalidRangeError("begin: the prompt is empty; it must contain at least one token")
        self._open.next_free("begin")  # refuses before anything is settled
        self.tree.settle()
        session = self._open.begin(ids, tenant, session_id, next_use)
        session.retention = retention
        return session

    @one_thread
    def prefetch(
        self, tokens: Tokens, salt: str = "", shared: int = 0, variant: Part = None
    ) -> Prefetch | None:
        """Look up a prompt in the stores and read its entries into host memory for ``begin``, in background
        threads.

        Call ``release`` of the result when the session has begun, or will not begin; the entries stay in
        memory until then. A ``begin`` before everything is read reads the rest. All such prompts together
        take at most ``read_ahead`` bytes, and entries that they share are read once. The files of a folder,
        whose bytes go directly into the cache, are read into the system's page cache. None if there is
        nothing to read.
        """
        self._check("prefetch")
        ids = self.alphabet.encode(tokens, Tenant.of(salt, shared, variant), op="prefetch")
        return self._open.matcher.prefetch(ids) if ids.size else None

    @one_thread
    def adopt(
        self,
        tokens: Tokens,
        snapshot: Snapshot | Sequence[Snapshot],
        salt: str = "",
        shared: int = 0,
        variant: Part = None,
    ) -> bool:
        """Keep a snapshot of ``tokens`` that was made elsewhere, as if a session had computed it.

        Or several snapshots, as ``Session.snapshots`` returns them: each begins at 0, or where the previous
        one ends, and the last ends with ``tokens``. They are briefly restored into a free sequence. Returns
        False if one is incomplete; those before it are kept. Raises SessionLimitError without a free
        sequence, and the errors of the cache's ``restore``.
        """
        self._check("adopt")
        ids = self.alphabet.encode(tokens, Tenant.of(salt, shared, variant), op="adopt")
        seq, reached = self._open.next_free("adopt"), 0
        self.tree.settle()
        pieces = snapshot if isinstance(snapshot, Sequence) else [snapshot]
        if not pieces or getattr(pieces[-1], "end", ids.size) != ids.size:
            return False
        with self.evictor.within_budgets(), contextlib.ExitStack() as following:
            try:
                self._open.used.add(seq)
                for piece in pieces:
                    end = int(getattr(piece, "end", ids.size))
                    # The first may begin anywhere if ``restore`` accepts it as complete.
                    follows = not reached or piece.begin in (0, reached)
                    if not follows or not self.cache.restore(seq, piece):
                        return False
                    if self._open.computed(seq) < end:  # tokens were evicted, or layers lack some
                        return False
                    path = self.tree.walk(ids[:end])
                    own = [] if self.tree.divisible else [self.cache.snapshot(seq, reached, end)]
                    self.tree.insert(seq, path, own)
                    following.enter_context(self.tree.in_use(path.nodes[-1:], restoring=True))
                    reached = end
            finally:
                self._open.empty(seq)
        self._open.agents.use(ids)
        return True

    def next_snapshot(self, seq: int) -> int | None:
        """Where a batch of the sequence should end for a snapshot; None: anywhere."""
        return self._open.next_snapshot(seq)

    @one_thread
    def longest(self, tokens: Tokens, salt: str = "", shared: int = 0, variant: Part = None) -> int:
        """How many of the tokens ``begin`` would find now without asking the stores."""
        self._check("longest")
        ids = self.alphabet.encode(tokens, Tenant.of(salt, shared, variant), op="longest")
        return self._open.matcher.longest(ids) if ids.size else 0

    @one_thread
    def evict(self, nbytes: int | str | None = None) -> int:
        """Offload ``nbytes`` (None: all) of the device's least recently used snapshots; returns the number of
        bytes.

        They are in host memory when this returns, and may not have been written to stores yet: it waits for
        writes only while more than ``backlog`` bytes are waiting.
        """
        self._check("evict")
        nbytes = None if nbytes is None else parse_bytes(nbytes, "evict: nbytes")
        with self.tree.patient():
            count = self.evictor.evict(nbytes)
            self.tree.settle()
        return count

    @one_thread
    def clear(self) -> None:
        """Discard everything kept in the cache and in host memory, for example because the weights have
        changed.

        That includes entries read ahead and content waiting to be written: nothing computed before reaches a
        store afterwards. Open sessions continue, but their content is not shared, and nothing is kept when
        they close. Stores are unchanged: empty them afterwards, or give new weights an identity of their own.
        """
        self._check("clear")
        self._open.clear()
        if self._prefetcher is not None:
            self._prefetcher.clear()

    @one_thread
    def flush(self) -> None:
        """Wait for pending transfers; with stores, also write everything that they lack and wait for it."""
        self._check("flush")
        self.tree.flush()

    @one_thread
    def write_through(self, nbytes: int | str | None = None) -> bool:
        """Start writing what no store has yet, in the background; returns True if some of it is left.

        Nothing is evicted, and the caller does not wait. Each call submits at most about ``nbytes``, and no
        more than ``backlog`` allows: call it again, for example between two passes. A process that is killed
        loses only what it has computed since. Open sessions are not included.
        """
        self._check("write_through")
        limit = math.inf if nbytes is None else parse_bytes(nbytes, "write_through: nbytes")
        self.tree.settle()
        return self.tree.write_through(limit)

    def close(self, flush: bool = True) -> None:
        """Close open sessions, write what is kept to the stores (if ``flush``), and release the cache."""
        if self._closed:
            return
        if self._finalizer is not None:
            self._finalizer.detach()
        failed = []
        for session in list(self._open.sessions.values()):
            try:
                with self.tree.patient():
                    session.close()
            except Exception as error:  # what the others keep is written nevertheless
                failed.append(error)
        with contextlib.ExitStack() as rest:  # all of them, even if one raises; in reverse order
            rest.callback(self._let_go)
            for store in self._opened:
                rest.callback(store.close)
            if self.tree.store is not None:
                rest.callback(self.tree.store.close)
            rest.callback(self.tree.clear)
            rest.callback(self._flush_at_end if flush else self.tree.drain)
            if self._prefetcher is not None:
                rest.callback(self._prefetcher.close)
        if failed:
            raise failed[0]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """As ``close``; after an exception, each session keeps what it would keep as a context manager."""
        for session in () if kind is None else self.sessions:
            with contextlib.suppress(Exception):  # the exception in progress says more
                session.__exit__(kind, error, trace)
        self.close()

    def _flush_at_end(self) -> None:
        self.tree.flush()
        if lost := self.tree.unwritten:
            log.warning("close: %s could not be written to any store and are lost", bytes_text(lost))

    def _own(self, owner: Callable[[], object | None]) -> None:
        """Tell the caches whose sessions use their sequences: they refuse gaps then, and name the remedy."""
        for part in unwrapped(self.cache):
            if isinstance(part, CausalCache):
                part.snapshots.owner = owner

    def _let_go(self) -> None:
        self._closed = self._open.closed = True
        self._open.agents.clear()
        self.cache.on_pressure = None
        self._own(nobody)
        for part in unwrapped(self.cache):
            _OWNERS.pop(part, None)

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def sessions(self) -> tuple[Session, ...]:
        """The open sessions."""
        return tuple(self._open.sessions.values())

    @property
    def agent_sessions(self) -> AgentSessions:
        """The sessions of agents, named by ``session_id``: to list, close, delete or retain them."""
        return self._open.agents

    def publish_events(
        self,
        publish: Callable[[EventBatch], None] | None,
        *,
        token_ids: bool = True,
        private: bool = False,
    ) -> None:
        """Publish events when blocks of ``block_size`` tokens enter or leave a tier; None: stop.

        The first batch lists what is already kept; each call that changes anything publishes at least one.
        ``token_ids`` includes token ids beside hashes; the ids of a conversation with a salt, and the salt,
        only with ``private``. The hashes are the keys of the stores.

        ``publish`` is called in the caller's thread, must be quick, and must not use this PrefixCache;
        exceptions that it raises are logged. With windows or recurrent states, each wrapped cache is a group
        (``BlockStored.group_idx``), and a snapshot has the blocks of each group that are needed to resume at
        the last whole block before its end.
        """
        self._check("publish_events")
        if publish is not None and not callable(publish):
            raise InvalidRangeError(
                f"publish_events: publish={publish!r:.60}; it must be a function, or None"
            )
        events: BlockEvents | None = None
        if publish is not None:
            common = publish, self.tree.keys, self.alphabet, token_ids, private
            events = BlockEvents(*common) if self.tree.divisible else SnapshotEvents(self.cache, *common)
        self.tree.events = events

    @property
    def on_restore(self) -> Callable[[int, int], None] | None:
        """A callback, (done, total) tokens, while a prefix is restored from host memory or stores.

        It runs in the restoring thread, must not raise, and must not use the PrefixCache.
        """
        return self._open.matcher.on_restore

    @on_restore.setter
    def on_restore(self, told: Callable[[int, int], None] | None) -> None:
        self._open.matcher.on_restore = told

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of snapshots per tier: "device", "host" if there is a host tier, "writing" to stores, and
        "ahead", read from stores for future sessions.

        "leaving" counts snapshots on their way to "host", where they are already counted, or to the stores:
        the device has copies of them until they have arrived.
        """
        sizes = {"device": self.tree.device.nbytes}
        if self.tree.worker is not None:
            sizes["leaving"] = self.tree.worker.waiting
        if self.tree.host is not None:
            sizes["host"] = self.tree.host.nbytes
        if self.tree.store is not None:
            sizes["writing"] = self.tree.store.writes.waiting
        if self._prefetcher is not None:
            sizes["ahead"] = self._prefetcher.nbytes
        return sizes

    @property
    def limits(self) -> dict[str, int | None]:
        """The most bytes to plan for in addition to those of the cache itself; None: no limit.

        On the device: "copies" of windows and states outside the cache's cells (full attention has none), and
        snapshots "leaving" for other tiers. Without a budget, the copies take at most as many bytes as the
        cache's K and V (with windows alone: as K and V of ``max_sequences * capacity`` tokens), and 16 times
        its states. In the process's memory: "host", content waiting for "writing" to stores (a single larger
        snapshot may exceed it), and entries read "ahead" from them. A restoration of windows or states holds
        all entries that it reads in addition.
        """
        tree, limits = self.tree, dict[str, int | None]()
        if not tree.divisible:
            budget = tree.device.budget
            limits["copies"] = self.evictor.copies.limit if budget is None else budget
        if tree.worker is not None:
            limits["leaving"] = self._in_flight
        if tree.host is not None:
            limits["host"] = tree.host.budget
        if tree.store is not None:
            limits["writing"] = tree.store.writes.backlog
        if self._prefetcher is not None:
            limits["ahead"] = self._read_ahead
        return limits

    @property
    def failed(self) -> dict[str, int]:
        """The number of snapshots lost on the way to "host" memory and to a "store"; each is logged.

        Their content is computed again when needed.
        """
        return {
            "host": self.tree.failed,
            "store": 0 if self.tree.store is None else self.tree.store.writes.failed,
        }

    @property
    def over_tenant_budget(self) -> int:
        """How often something of a tenant was evicted because the tenant exceeded ``tenant_budget``."""
        return self.tree.over_budget

    @property
    def stores(self) -> tuple[SnapshotStore, ...]:
        """The stores, nearest first."""
        return () if self.tree.store is None else self.tree.store.stores

    @property
    def store_errors(self) -> dict[str, int]:
        """The number of failed store calls by kind: "read", "write", "corrupt", "full"; {} without stores."""
        return {} if self.tree.store is None else dict(self.tree.store.errors)

    def _check(self, op: str) -> None:
        if self._closed:
            raise ClosedError(f"{op}: the PrefixCache is closed")


def _warn_of_loss(tree: PrefixTree) -> None:
    """Warn about a PrefixCache that was dropped without ``close``, or at the end of the process."""
    try:
        lost = tree.unwritten
    except Exception:  # in the middle of a change, or half constructed
        return
    if lost:
        log.warning(
            "a PrefixCache ended without close(): %s that it kept are not in its stores; call close(), or "
            "flush() while it is in use",
            bytes_text(lost),
        )


def _settings_of(cache: SnapshotCache) -> dict[str, object]:
    if not hasattr(cache, "settings"):
        raise InvalidRangeError(f"PrefixCache: {cache!r:.60} is not a cache; it must be an initialized cache")
    try:
        return cache.settings()
    except (OrderError, ClosedError) as error:  # its message begins with "settings: "
        raise type(error)(f"PrefixCache: {str(error).partition(': ')[2]}") from None


def _check_given(tiers: object, identity: object) -> None:
    """Refuse arguments of the wrong type, and a store without an identity."""
    if isinstance(tiers, (str, PathLike, HostTier, SnapshotStore)) or not isinstance(tiers, Sequence):
        one = "HostTier('1GiB')" if not isinstance(tiers, (str, PathLike)) else f"Path({os.fspath(tiers)!r})"
        raise InvalidRangeError(f"PrefixCache: tiers={tiers!r:.60}; it must be a list, such as [{one:.60}]")
    for tier in tiers:
        if not isinstance(tier, (HostTier, str, PathLike, SnapshotStore)):
            raise InvalidRangeError(
                f"PrefixCache: {tier!r:.60} is not a tier; it must be a HostTier, a store, or the path or "
                "URL of a store"
            )
    if identity is not None and not isinstance(identity, Mapping):
        raise InvalidRangeError(
            f"PrefixCache: identity={identity!r:.60}; it must be a dict that names the model and its "
            "weights, such as {'model': 'my-model', 'weights': 'sha256:...'}"
        )
    if not identity and not all(isinstance(tier, HostTier) for tier in tiers):
        raise InvalidRangeError(
            "PrefixCache: a store outlives the process and may be shared, so identity= is required: a dict "
            "that names the model and its weights, such as {'model': 'my-model', 'weights': 'sha256:...'}"
        )


def _sorted_tiers(
    tiers: Sequence[HostTier | SnapshotStore | str | PathLike[str]],
) -> tuple[HostTier | None, list[SnapshotStore], list[SnapshotStore]]:
    """The host tier, the stores in order, and the stores that were opened here."""
    hosts = [tier for tier in tiers if isinstance(tier, HostTier)]
    if len(hosts) > 1 or (hosts and tiers[0] is not hosts[0]):
        raise InvalidRangeError("PrefixCache: tiers must be at most one HostTier, followed by stores")
    stores: list[SnapshotStore] = []
    opened: list[SnapshotStore] = []
    try:
        for tier in tiers[len(hosts) :]:
            if isinstance(tier, SnapshotStore):
                stores.append(tier)
            elif isinstance(tier, (str, PathLike)):
                opened.append(open_store(tier))
                stores.append(opened[-1])
    except BaseException:
        for store in opened:
            store.close()
        raise
    return (hosts[0] if hosts else None), stores, opened


def check_unowned(cache: Any) -> None:
    """Refuse a second PrefixCache over the same sequences: they would empty each other's sessions."""
    for part in unwrapped(cache):
        ref = _OWNERS.get(part)
        owner = None if ref is None else ref()
        if owner is not None:
            raise InvalidRangeError(
                f"PrefixCache: another PrefixCache, with {len(owner.sessions)} open sessions, uses this "
                f"{type(part).__name__} and all its sequences; close that one first, or begin sessions there"
            )


def check_empty(cache: SnapshotCache, sequences: int) -> None:
    """Refuse a cache that holds tokens, since sessions begin by emptying their sequence."""
    for seq in range(sequences):
        length = cache.offset(seq)
        if length:
            raise InvalidRangeError(
                f"PrefixCache: sequence {seq} holds tokens up to position {length - 1}; a PrefixCache takes "
                f"an empty cache and uses all its sequences: call remove({seq}, 0) first"
            )
