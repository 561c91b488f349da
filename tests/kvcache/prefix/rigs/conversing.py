"""A PrefixCache over a cache of any kind, and conversations over it, of which all that is seen is checked."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import kvcache
import ml
from kvcache import Batch, CacheDType, PrefixOptions
from kvcache.prefix.outages import Outages
from kvcache.prefix.prefix_cache import PrefixCache, Session
from kvcache.prefix.retention import Retention, TokenRange
from kvcache.prefix.tiers import StoreTier
from kvcache.storage.formats import CacheFormat
from kvcache.testing.rigs.attention import mask_of
from ml import DType

from ..models import digests
from ..models.digests import CONV, HEADS, KEY_DIM, STATE, VALUE_DIM, Token, item_of

WINDOW, CHUNK = 3, 4


def _whole(position: int) -> int:
    return 0


def _window(position: int) -> int:
    return max(0, position - WINDOW)


def _chunk(position: int) -> int:
    return position - position % CHUNK


@dataclass(frozen=True)
class Layers:
    """What one of the wrapped caches (or the only one) keeps: its layers, and what a query sees from."""

    lower: Callable[[int], int] = _whole
    layers: tuple[int, ...] = (0, 1)
    states: tuple[int, ...] = ()
    encoder: bool = False


def _recurrent() -> kvcache.RecurrentCache:
    return kvcache.RecurrentCache(CONV, STATE, checkpoints=2, checkpoint_interval=6)


CACHES: dict[str, tuple[Callable[[], Any], tuple[Layers, ...]]] = {
    "causal": (kvcache.CausalCache, (Layers(),)),
    "chunked": (lambda: kvcache.ChunkedCache(CHUNK), (Layers(_chunk),)),
    "sliding": (lambda: kvcache.SlidingWindowCache(WINDOW), (Layers(_window),)),
    "sliding with memory": (lambda: kvcache.SlidingWindowCache(WINDOW, 6), (Layers(_window),)),
    "wrapper": (
        lambda: kvcache.WrapperCache(kvcache.SlidingWindowCache(WINDOW), kvcache.CausalCache()),
        (Layers(_window, (0, 1)), Layers(_whole, (2,))),
    ),
    "wrapper of chunks": (
        lambda: kvcache.WrapperCache(kvcache.ChunkedCache(CHUNK), kvcache.CausalCache()),
        (Layers(_chunk, (0,)), Layers(_whole, (1,))),
    ),
    "recurrent": (_recurrent, (Layers(_whole, (1,), (0, 2)),)),
    "recurrent and sliding": (
        lambda: kvcache.WrapperCache(_recurrent(), kvcache.SlidingWindowCache(WINDOW)),
        (Layers(_whole, (1,), (0,)), Layers(_window, (2,))),
    ),
    "encoder": (
        lambda: kvcache.WrapperCache(kvcache.EncoderCache(), kvcache.CausalCache()),
        (Layers(layers=(0,), encoder=True), Layers(_whole, (1,))),
    ),
    "encoder and sliding": (
        lambda: kvcache.WrapperCache(kvcache.SlidingWindowCache(WINDOW), kvcache.EncoderCache()),
        (Layers(_window, (1,)), Layers(layers=(0, 2), encoder=True)),
    ),
}
"""Name -> (a new cache, what each of its parts keeps)."""
DIVISIBLE = ("causal", "chunked", "wrapper of chunks", "encoder")
"""Those whose content can be cut at any position."""
STATEFUL = ("recurrent", "recurrent and sliding")
"""Those that want batches to end where a snapshot is due."""
WHOLE = tuple(name for name in CACHES if name not in DIVISIBLE)
SOME = ("causal", "wrapper", "recurrent")
every_cache = pytest.mark.parametrize("cache", CACHES)
some_caches = pytest.mark.parametrize("cache", SOME)
LONG = list(range(10, 30))
"""Twenty tokens. Whole content is kept at 8, 16, 19 and 20 of them."""


@dataclass(frozen=True)
class ConversationSetup:
    """A cache for conversations. ``options`` are the PrefixCache's."""

    cache: str = "causal"
    max_sequences: int = 3
    capacity: int = 48
    max_batch: int = 48
    dtype: CacheDType = DType.F32
    config: ml.CacheConfig | None = None
    options: dict[str, Any] = field(default_factory=lambda: {"block_size": 4, "interval": 8})

    def make(self, backend: ml.Backend) -> Any:
        cache = CACHES[self.cache][0]()
        if self.config is not None:
            cache.set_config(self.config)
        cache.init(backend, self.dtype, self.max_sequences, self.capacity, self.max_batch)
        return cache

    @property
    def token_bytes(self) -> int:
        """What one token takes in all attention layers of one part, where there is only one."""
        (part,) = CACHES[self.cache][1]
        token = CacheFormat.of(self.dtype).nbytes(HEADS, KEY_DIM, VALUE_DIM, DType.F32)
        return len(part.layers) * token


class Rig:
    """A cache under a PrefixCache, and the passes of a model over it, each checked bit for bit."""

    def __init__(
        self,
        setup: ConversationSetup,
        backend: ml.Backend,
        budget: int | None = None,
        tiers: Sequence[Any] = (),
        **options: Any,
    ) -> None:
        self.setup, self.backend = setup, backend
        self.cache = setup.make(backend)
        self.parts = CACHES[setup.cache][1]
        given = {**setup.options, **options}
        own = {name: given.pop(name) for name in ("identity", "block_size") if name in given}
        if tiers:
            own.setdefault("identity", {"model": "digests"})
        self.prefix = PrefixCache(self.cache, budget, tiers, **own, options=PrefixOptions(**given))
        if self.prefix.tree.store is not None:  # a store that failed is asked again in the next call
            self.tier.outages = Outages(itertools.count(0, 1000).__next__)
        self.evaluated = 0
        """Tokens that were computed since the start."""

    @property
    def tier(self) -> StoreTier:
        assert self.prefix.tree.store is not None, "this rig has no stores"
        return self.prefix.tree.store

    def begin(self, tokens: Sequence[Token], **whose: Any) -> Chat:
        """A session, of which nothing is evaluated yet. ``whose``: as PrefixCache.begin has them."""
        session = self.prefix.begin(list(tokens), **whose)
        assert session.remaining == list(tokens)[session.cached :]
        assert 0 <= session.cached < len(tokens)
        assert self.cache.offset(session.seq) == session.cached
        return Chat(self, session, list(tokens))

    def chat(self, tokens: Sequence[Token], size: int = 1000, **whose: Any) -> Chat:
        """A session whose prompt is evaluated."""
        chat = self.begin(tokens, **whose)
        chat.prefill(size)
        return chat

    def keep(self, tokens: Sequence[Token], size: int = 1000, **whose: Any) -> int:
        """A session from begin to close; how many of its tokens were there already."""
        chat = self.chat(tokens, size, **whose)
        chat.close()
        return chat.cached

    def peek(self, tokens: Sequence[Token]) -> int:
        """How many of these tokens are there, each of them checked; nothing more is kept."""
        chat = self.chat(tokens)
        chat.close(keep=False)
        return chat.cached

    def evaluate(self, seq: int, history: Sequence[Token], tokens: Sequence[Token]) -> None:
        """One pass over ``tokens``, which follow ``history``: what every query sees is checked."""
        first, count = len(history), len(tokens)
        whole = [*history, *tokens]
        self.evaluated += count
        item = item_of(whole)
        items = [] if item is None or item < first else [(item - first, whole[item])]
        with self.backend.new_context() as ctx:
            batch = Batch(list(range(first, first + count)), [seq] * count, multimodal=items)
            self.cache.start_forward(ctx, batch)
            for index, part, cache in self.parts_of():
                for layer in part.states:
                    self._step(ctx, cache, layer, history, whole)
                for layer in part.layers:
                    self._select(index, layer)
                    if part.encoder:
                        self._attend_to_item(ctx, cache, seq, layer, whole, bool(items))
                    else:
                        self._pass(ctx, cache, part, layer, whole, first)

    def start_only(self, seq: int, first: int, count: int) -> None:
        """A pass that begins, and ends before anything is put."""
        with self.backend.new_context() as ctx:
            self.cache.start_forward(ctx, Batch(list(range(first, first + count)), [seq] * count))

    def crash(self, lose: bool) -> None:
        """Let go of all without ``close``. ``lose``: what waits to be written is lost."""
        worker, tier = self.prefix.tree.worker, self.prefix.tree.store
        if worker is not None:
            worker.drain()
        if tier is not None:
            while lose and not tier.writes._queue.empty():
                tier.writes._queue.get()
            tier.close()

    def check_books(self) -> None:
        """Every tier counts what it holds, to the byte, within its budget; statistics add up."""
        tree, stats = self.prefix.tree, self.prefix.stats
        nodes = list(tree.radix_tree)
        serialized = [n.data.serialized.nbytes for n in nodes if n.data and n.data.serialized]
        coming = [
            n.data.leaving.serialized_nbytes
            for n in nodes
            if n.data and n.data.leaving and tree.host is not None and n in tree.host
        ]
        for ledger, sizes in (
            (tree.device, [n.data.snapshot.nbytes for n in nodes if n.data and n.data.snapshot]),
            (tree.host, [*serialized, *coming]),
        ):
            if ledger is not None:
                assert ledger.nbytes == sum(sizes)
                assert len(ledger) == len(sizes)
                assert ledger.budget is None or ledger.nbytes <= ledger.budget
        for node in nodes:
            assert node.data is None or node.data.present, "what holds nothing is not there"
            assert node.data is not None or node.children, "an end that holds nothing"
        assert stats.reused == stats.live + stats.device + stats.host + stats.store <= stats.tokens

    def check_empty(self) -> None:
        """Nothing holds a cell any more."""
        for _, part, cache in self.parts_of():
            if part.encoder:
                assert cache.nbytes == 0
                continue
            table = getattr(cache, "attention", cache)._table
            table.sweep()
            assert table.free == table.cells
            assert not table.pins

    def parts_of(self) -> Iterator[tuple[int, Layers, Any]]:
        caches = self.cache.caches if len(self.parts) > 1 else (self.cache,)
        return ((i, part, cache) for i, (part, cache) in enumerate(zip(self.parts, caches, strict=True)))

    def _select(self, index: int, layer: int) -> None:
        if len(self.parts) > 1:
            self.cache.set_layer_type(index)
        self.cache.set_layer(layer)

    @staticmethod
    def _step(
        ctx: ml.Context, cache: Any, layer: int, history: Sequence[Token], whole: Sequence[Token]
    ) -> None:
        for kind in ("conv", "recurrent"):
            state = getattr(cache, f"{kind}_state")(ctx, layer)
            np.testing.assert_array_equal(
                state.to_numpy().astype(np.float32), digests.state(history, kind, layer)
            )
            new = ctx.from_numpy(digests.state(whole, kind, layer), state.dtype)
            getattr(cache, f"set_{kind}_state")(ctx, layer, new)

    def _attend_to_item(
        self, ctx: ml.Context, cache: Any, seq: int, layer: int, whole: Sequence[Token], brings: bool
    ) -> None:
        """Store the encoder's output with the item; every later token finds it."""
        item = item_of(whole)
        if item is None:
            assert not cache.encoder_cached(seq)
            return
        output = digests.encoder_output(whole, item, layer)
        if brings:
            self.cache.put(ctx, *(ctx.from_numpy(part) for part in output))
        key, value, mask = self.cache.get(ctx)
        assert mask is None
        assert _bytes(key, value, cache.config) == _pack(*output)

    def _pass(
        self, ctx: ml.Context, cache: Any, part: Layers, layer: int, whole: Sequence[Token], first: int
    ) -> None:
        key, value = digests.rows(digests.digests(whole), layer, self.setup.dtype)
        self.cache.put(ctx, ctx.from_numpy(key[first:]), ctx.from_numpy(value[first:]))
        stored_key, stored_value, mask = self.cache.get(ctx)
        config = getattr(cache, "attention", cache).config
        seen = mask_of(mask, len(whole) - first, stored_key.shape[0], config)
        found = _bytes(stored_key, stored_value, config)
        wanted = {row: position for position, row in enumerate(_pack(key, value))}
        for query, row in zip(range(first, len(whole)), seen, strict=True):
            positions = [wanted.get(found[i], -1) for i in np.flatnonzero(row)]
            expected = list(range(part.lower(query), query + 1))
            assert sorted(positions) == expected, f"the query at {query} in layer {layer} sees {positions}"


def _bytes(key: ml.Tensor, value: ml.Tensor, config: ml.CacheConfig) -> list[bytes]:
    host = value.to_numpy().astype(np.float32)
    return _pack(key.to_numpy().astype(np.float32), host.transpose(2, 0, 1) if config.permuted_v else host)


def _pack(key: np.ndarray, value: np.ndarray) -> list[bytes]:
    return [row.tobytes() for row in np.concatenate((key, value), axis=2)]


class Chat:
    """A session and what was evaluated of it."""

    def __init__(self, rig: Rig, session: Session, tokens: list[Token]) -> None:
        self.rig, self.session, self.tokens = rig, session, tokens
        self.done = self.cached = session.cached
        self.rewound = False

    @property
    def seq(self) -> int:
        return self.session.seq

    def prefill(self, size: int = 1000, honour: bool = True) -> None:
        """Evaluate the prompt in parts of ``size``; ``honour``: as ``chunks`` cuts them."""
        if honour:
            for part in self.session.chunks(size):
                assert 0 < len(part) <= size
                self._evaluate(part)
        else:
            rest = self.session.remaining
            for start in range(0, len(rest), size):
                self._evaluate(rest[start : start + size])
        assert self.done == len(self.tokens)

    def say(self, tokens: Sequence[Token]) -> None:
        """Add tokens and evaluate them."""
        self.session.extend(list(tokens))
        self.tokens += tokens
        self._evaluate(list(tokens))

    def rewind(self, length: int) -> None:
        """Take tokens back; those before ``length`` that went with them are evaluated again."""
        self.rewound = True
        self.done = self.session.rewind(length)
        self.tokens = self.tokens[:length]
        assert self.done <= length
        assert self.rig.cache.offset(self.seq) == self.done
        assert self.session.tokens == self.tokens
        if self.tokens:
            self.prefill()

    def _evaluate(self, part: Sequence[Token]) -> None:
        assert self.tokens[self.done : self.done + len(part)] == list(part)
        self.rig.evaluate(self.seq, self.tokens[: self.done], part)
        self.done += len(part)

    def close(self, keep: bool = True) -> None:
        self.session.close(keep)


Talk = Callable[..., Rig]


def room(r: Rig, tokens: int) -> None:
    """Let the device keep so many tokens and no more."""
    r.prefix.tree.device.budget = tokens * r.setup.token_bytes
    r.prefix.evictor.enforce()


def read(r: Rig, tokens: list[int], keep: bool = True) -> int:
    """As ``Rig.keep``, in passes of 8 tokens after each of which others may start from what there is."""
    chat = r.begin(tokens)
    for part in chat.session.chunks(8):
        chat._evaluate(part)
        if keep:
            chat.session.keep()
    chat.close()
    return chat.cached


def asked(priority: int, duration: float | None = None, begin: int = 0, end: int | None = None) -> Retention:
    return Retention([TokenRange(begin, end, priority, duration)])


def line(first: int, count: int) -> list[int]:
    """A prompt of ids that follow one another."""
    return list(range(first, first + count))


def longest(r: Rig, *prompts: list[int], **whose: Any) -> list[int]:
    return [r.prefix.longest([*prompt, 0], **whose) for prompt in prompts]
