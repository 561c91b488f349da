"""A cache and its model, driven together: every call is checked against the model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import cast

import numpy as np

import kvcache
import ml
from kvcache.testing.models import values
from kvcache.testing.models.attention import Model, Setup
from ml import DType

TOLERANCE = {DType.F32: 1e-5, DType.F16: 2e-2, DType.BF16: 1.2e-1}


def outcome(call: Callable[[], object]) -> ml.MLError | None:
    """The error that a call raises, or None."""
    try:
        call()
    except ml.MLError as error:
        return error
    return None


def mask_of(mask: object, tokens: int, history: int, config: ml.CacheConfig) -> np.ndarray:
    """The mask as BOOL (tokens, history), after checking its form; an elided one is written out."""
    if mask is None or mask is ml.CAUSAL:
        assert config.elide_mask, "a mask may be elided only if the config allows it"
        if mask is None:
            return np.ones((tokens, history), dtype=bool)
        assert history >= tokens
        return np.asarray(np.arange(history) <= np.arange(history - tokens, history)[:, None])
    mask = cast("ml.Tensor", mask)
    assert mask.dtype is config.mask_dtype
    padding = config.mask_batch_padding
    assert mask.shape == ((tokens + padding - 1) // padding * padding, history)
    host = mask.to_numpy().astype(np.float32)
    assert ((host == 0) | (host == -np.inf)).all(), "a mask contains 0 and -inf only"
    assert (host[tokens:] == -np.inf).all(), "rows of padding see nothing"
    return np.asarray(host[:tokens] == 0)


def look(
    cache: kvcache.CausalCache,
    ctx: ml.Context,
    tokens: int,
    layer: int = 0,
    encoding: values.Encoding | None = None,
    extra: bool = False,
) -> list[dict[int, int]]:
    """position -> token for what each query of the pass sees in a layer.

    Checks shapes and dtypes, and every visible row bit by bit; with ``extra`` also the results of
    ``get_extra``.
    """
    cache.set_layer(layer)
    key, value, mask = cache.get(ctx)
    config, encoding = cache.config, encoding or values.encoding(DType.F32)
    history = key.shape[0]
    assert history % config.cache_padding == 0
    assert key.shape == (history, values.KV_HEADS, encoding.key_dim)
    wide = (history, values.KV_HEADS, encoding.value_dim)
    assert value.shape == ((wide[1], wide[2], wide[0]) if config.permuted_v else wide)
    stored_key, stored_value = key.to_numpy().astype(np.float32), value.to_numpy().astype(np.float32)
    if config.permuted_v:
        stored_value = stored_value.transpose(2, 0, 1)
    seen = mask_of(mask, tokens, history, config)
    some = seen.any(axis=0)
    ids, positions = encoding.decode(stored_key)
    for stored, expected in zip(
        (stored_key, stored_value), encoding.pair(ids[some], positions[some], layer), strict=True
    ):
        _same(stored[some], expected)
    if extra:
        for name, expected in values.extras(ids[some], positions[some], layer).items():
            _same(cache.get_extra(ctx, name).to_numpy()[some], expected)
    pairs = [(positions[row].tolist(), ids[row].tolist()) for row in seen]
    for visible, _ in pairs:
        assert len(set(visible)) == len(visible), f"a position is seen twice: {visible}"
    return [dict(zip(*pair, strict=True)) for pair in pairs]


def _same(actual: np.ndarray, expected: np.ndarray) -> None:
    if not np.array_equal(actual, expected):  # the fast comparison first
        np.testing.assert_array_equal(actual, expected)


def reference_attention(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, scale: float, sinks: np.ndarray | None = None
) -> np.ndarray:
    """One query (heads, dim) over keys (n, kv_heads, dim) and values: float64 (heads, v_dim)."""
    shared = np.arange(query.shape[0]) // (query.shape[0] // key.shape[1])  # the KV head of each head
    wide_key, wide_value = (host.astype(np.float64)[:, shared].swapaxes(0, 1) for host in (key, value))
    logits = (wide_key @ query.astype(np.float64)[:, :, None])[:, :, 0] * scale
    if sinks is not None:
        logits = np.concatenate([logits, sinks.astype(np.float64)[:, None]], axis=1)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    attended: np.ndarray = (weights[:, None, : key.shape[0]] @ wide_value)[:, 0]
    return attended


class Rig:
    """A cache and its model. Tokens are numbered in the order in which they are put."""

    def __init__(self, setup: Setup, backend: ml.Backend, ctx: ml.Context) -> None:
        self.setup, self.backend, self.ctx = setup, backend, ctx
        self.model = Model(setup)
        self.cache = setup.make(backend)
        self.next_token = 1
        self.pass_: tuple[list[int], list[int]] = ([], [])
        """Positions and sequences of the current pass."""

    # Checked calls.

    def start(self, positions: Sequence[int], sequences: Sequence[int]) -> bool:
        """Call ``start_forward``; returns whether the batch was accepted."""
        ids = range(self.next_token, self.next_token + len(positions))
        batch = kvcache.Batch(list(positions), list(sequences))
        self.agree(
            lambda: self.cache.start_forward(self.ctx, batch),
            lambda: self.model.start(positions, sequences, ids),
        )
        taken = self.refusal is None
        if taken:
            self.pass_ = list(positions), list(sequences)
            self.next_token += len(positions)
        self.check_figures()
        return taken

    def start_and_undo(self, positions: Sequence[int], sequences: Sequence[int]) -> None:
        """Call ``start_forward``, then ``undo_forward``, which also undoes evictions."""
        before = [dict(row) for row in self.model.tokens]
        if self.start(positions, sequences):
            self.cache.undo_forward()
            self.model.tokens = before
            self.check_figures()

    def read(self, positions: Sequence[int], sequences: Sequence[int]) -> bool:
        """Start a read-only pass; returns whether the batch was accepted."""
        batch = kvcache.Batch(list(positions), list(sequences))
        self.agree(
            lambda: self.cache.start_forward(self.ctx, batch, read_only=True),
            lambda: self.model.read(positions, sequences),
        )
        self.check_figures()
        if self.refusal is not None:
            return False
        self.pass_ = list(positions), list(sequences)
        assert isinstance(outcome(self.put), kvcache.OrderError)
        return True

    def put(self, layers: int | None = None) -> None:
        """Put into all layers, or the first ``layers``."""
        positions, _ = self.pass_
        ids = np.arange(self.next_token - len(positions), self.next_token)
        for layer in range(self.setup.layers if layers is None else layers):
            self.cache.set_layer(layer)
            self.put_rows(ids, positions, layer)

    def put_rows(self, ids: Sequence[int] | np.ndarray, positions: Sequence[int], layer: int) -> None:
        """Put keys, values and extras as a model passes them."""
        rows, dtype = self.setup.encoding.pair(ids, positions, layer), self.setup.activations
        key, value = (self.ctx.from_numpy(x, dtype) for x in rows)
        self._put_tensors(key, value, ids, positions, layer)

    def _put_tensors(
        self, key: ml.Tensor, value: ml.Tensor, ids: Sequence[int] | np.ndarray, positions: Sequence[int],
        layer: int,
    ) -> None:  # fmt: skip
        """Put tensors, with these tokens' extras if the cache has extras."""
        ctx, setup = self.ctx, self.setup
        if not setup.latent and not setup.extra:
            self.cache.put(ctx, key, value)
            return
        host = values.extras(ids, positions, layer) if setup.extra else {}
        extra = {name: ctx.from_numpy(array) for name, array in host.items()}
        if setup.latent:
            self.cache.put(ctx, key, v_dim=setup.encoding.value_dim, extra=extra)
        else:
            self.cache.put(ctx, key, value, extra=extra)

    def check_seen(self, lifted: Collection[int] = (), layers: int | None = None) -> None:
        """Check what every query of the pass sees, in all layers or the first ``layers``."""
        positions, sequences = self.pass_
        expected = [
            self.model.visible(seq, position, i in lifted)
            for i, (position, seq) in enumerate(zip(positions, sequences, strict=True))
        ]
        for layer in range(self.setup.layers if layers is None else layers):
            seen = look(self.cache, self.ctx, len(positions), layer, self.setup.encoding, self.setup.extra)
            assert seen == expected, f"layer {layer}: saw {seen}, not {expected}"

    def check_attend(self, seed: int, lifted: Collection[int] = (), sinks: bool = False) -> None:
        """Check ``attend`` in every layer against float64 attention over the model's content."""
        positions, sequences = self.pass_
        encoding, computed = self.setup.encoding, self.setup.computed
        query = encoding.queries(seed, len(positions))
        logits = np.linspace(-1, 1, values.HEADS, dtype=np.float32) if sinks else None
        for layer in range(self.setup.layers):
            self.cache.set_layer(layer)
            tensor = None if logits is None else self.ctx.from_numpy(logits, computed)
            asked = self.ctx.from_numpy(query, computed)
            attended = self.cache.attend(self.ctx, asked, 0.5, tensor)
            assert attended.shape == (len(positions), values.HEADS, encoding.value_dim)
            wanted = []
            for i, (position, seq) in enumerate(zip(positions, sequences, strict=True)):
                seen = self.model.visible(seq, position, i in lifted)
                ids = list(seen.values())
                wanted.append(
                    reference_attention(query[i], *encoding.pair(ids, list(seen), layer), 0.5, logits)
                )
            self._check_close(attended, wanted)

    def check_selected(self, seed: int, sinks: bool = False) -> None:
        """Check ``attend`` over random selected rows of ``get`` against attention over the visible ones."""
        ctx, count, computed = self.ctx, len(self.pass_[0]), self.setup.computed
        query, rng = self.setup.encoding.queries(seed, count), np.random.default_rng(seed)
        logits = np.linspace(-1, 1, values.HEADS, dtype=np.float32) if sinks else None
        for layer in range(self.setup.layers):
            self.cache.set_layer(layer)
            key, value, mask = self.cache.get(ctx)
            config, history = self.cache.config, key.shape[0]
            seen = mask_of(mask, count, history, config)
            host = [x.to_numpy().astype(np.float32) for x in (key, value)]
            if config.permuted_v:
                host[1] = host[1].transpose(2, 0, 1)
            select = rng.integers(-2, history + 2, (count, rng.integers(1, 9))).astype(np.int32)
            select[:, 0] = [rng.choice(np.flatnonzero(own)) for own in seen]  # at least one that is seen
            tensor = None if logits is None else ctx.from_numpy(logits, computed)
            attended = self.cache.attend(
                ctx, ctx.from_numpy(query, computed), 0.5, tensor, select=ctx.from_numpy(select)
            )
            wanted = []
            for i, chosen in enumerate(select):
                own = [row for row in chosen.tolist() if 0 <= row < history and seen[i, row]]
                wanted.append(reference_attention(query[i], host[0][own], host[1][own], 0.5, logits))
            self._check_close(attended, wanted)

    def _check_close(self, attended: ml.Tensor, wanted: Sequence[np.ndarray]) -> None:
        limit, content = TOLERANCE[self.setup.computed], slice(self.setup.encoding.content, None)
        assert attended.dtype is self.setup.computed, "as the query"
        actual = attended.to_numpy().astype(np.float64)[:, :, content]
        np.testing.assert_allclose(actual, np.stack(wanted)[:, :, content], rtol=limit, atol=limit)

    def spoil(self, seq: int) -> None:
        """Leave NaN in every free cell, by putting and removing tokens."""
        count, first = self.model.free(), self.model.last(seq) + 1
        if count and self.start(range(first, first + count), [seq] * count):
            self.put_nan()
            self.remove(seq, first)

    def put_nan(self) -> None:
        """Put NaN for all tokens of the pass."""
        count = len(self.pass_[0])
        for layer in range(self.setup.layers):
            self.cache.set_layer(layer)
            key, value = (
                self.ctx.full((count, values.KV_HEADS, dim), np.nan, DType.F32)
                for dim in (self.setup.encoding.key_dim, self.setup.encoding.value_dim)
            )
            self._put_tensors(key, value, [0] * count, self.pass_[0], layer)

    def forward(
        self, positions: Sequence[int], sequences: Sequence[int] | int, lifted: Collection[int] = ()
    ) -> bool:
        """A whole pass: start, put, set_causal, look. Returns whether the batch was accepted."""
        if isinstance(sequences, int):
            sequences = [sequences] * len(positions)
        if not self.start(positions, sequences):
            return False
        self.put()
        if lifted:
            self.cache.set_causal(self.ctx, except_=lifted)
        self.check_seen(lifted)
        return True

    def extend(self, seq: int, count: int = 1) -> bool:
        """A pass with the next ``count`` tokens of a sequence."""
        first = self.model.last(seq) + 1
        return self.forward(range(first, first + count), seq)

    def copy_prefix(self, src: int, dst: int, length: int) -> None:
        self.agree(
            lambda: self.cache.copy_prefix(src, dst, length), lambda: self.model.copy_prefix(src, dst, length)
        )
        self.check_figures()

    def remove(self, seq: int, begin: int, end: int | None = None) -> bool:
        """Remove positions; returns whether it was accepted."""
        self.agree(lambda: self.cache.remove(seq, begin, end), lambda: self.model.remove(seq, begin, end))
        self.check_figures()
        return self.refusal is None

    def evict(self, seq: int, positions: Sequence[int]) -> bool:
        """Evict positions; returns whether it was accepted."""
        self.agree(lambda: self.cache.evict(seq, positions), lambda: self.model.evict(seq, positions))
        self.check_figures()
        return self.refusal is None

    def defrag(self, sequences: Sequence[int] | None = None, room: int = 0) -> bool:
        """Returns whether the sequences, or all of them, were moved together."""
        done: list[bool] = []
        self.agree(
            lambda: done.append(self.cache.defrag(sequences, room)), lambda: self.model.defrag(sequences)
        )
        self.check_figures()
        if sequences is not None and done == [True]:
            self._check_line(sequences, room)
        return done == [True]

    def _check_line(self, sequences: Sequence[int], room: int) -> None:
        """These sequences are evenly spaced runs with free cells behind them."""
        table = self.cache.storage.table
        rows = [table.rows[seq] for seq in sequences]
        assert all(row.contiguous for row in rows)
        starts = [row.first_cell for row in rows if len(row)]
        if all(map(len, rows)):
            assert len({later - earlier for earlier, later in itertools.pairwise(starts)}) < 2
        for row in rows:
            behind = table.references[row.last_cell + 1 :][:room] if len(row) else table.references[:0]
            assert not behind.any()
            assert not len(row) or behind.size == room

    def reserve(self, tokens: int) -> None:
        """A ``reserve`` pass: its shapes span all cells, and it writes nothing."""
        positions = range(tokens)
        self.cache.start_forward(self.ctx, kvcache.Batch(positions, [0] * tokens), reserve=True)
        for layer in range(self.setup.layers):
            self.cache.set_layer(layer)
            self.put_rows([0] * tokens, positions, layer)
            assert self.cache.get(self.ctx)[0].shape[0] == self.setup.cells
        self.check_figures()

    # Checks.

    refusal: ml.MLError | None = None

    def agree(self, real: Callable[[], object], model: Callable[[], object]) -> None:
        """Run both calls; both must succeed or raise the same error."""
        raised, expected = outcome(real), outcome(model)
        assert (raised is None) == (expected is None), f"raised {raised!r}, expected {expected!r}"
        if expected is not None:
            assert isinstance(raised, type(expected)), f"raised {raised!r}, expected {expected!r}"
        if isinstance(raised, kvcache.CacheFullError):
            assert isinstance(expected, kvcache.CacheFullError)
            assert (raised.asked, raised.free, raised.held) == (expected.asked, expected.free, expected.held)
        self.refusal = raised

    def check_figures(self) -> None:
        """Check cells, positions, and ``can_resume`` around every position where its result may change."""
        cache, model = self.cache, self.model
        assert cache.cells == self.setup.cells
        assert cache.free_cells == model.free()
        assert cache.held() == model.held()
        for seq, row in enumerate(model.tokens):
            stored = sorted(row)
            assert cache.positions(seq).tolist() == stored
            first, last = (stored[0], stored[-1]) if stored else (0, -1)
            edge = first + (self.setup.window or 0)
            keep = self.setup.keep
            slid = next((position for position in stored if position >= keep), keep) + edge - first
            for position in {
                *(0, first, edge - 1, edge, edge + 1, last, last + 1, last + 2),
                *(keep, keep + 1, slid - 1, slid, slid + 1),
                *(position + 2 for position in row if position + 1 not in row),
            } - {-1}:
                resumes = cache.can_resume(seq, position)
                assert resumes == model.can_resume(seq, position), (
                    f"can_resume({seq}, {position}) is {resumes}"
                )

    def drain(self) -> None:
        """Read back every stored token from the end of each sequence; empties the cache. A query directly
        after the last token sees that token and its window; these are then removed.
        """
        for seq in range(self.setup.max_sequences):
            while self.model.tokens[seq]:
                last = lowest = self.model.last(seq)
                if self.model.free():
                    assert self.forward([last + 1], seq), f"no cell for {last + 1} of sequence {seq}"
                    lowest = min(last, *self.model.visible(seq, last + 1))
                self.remove(seq, lowest)
