"""A cache with a residual window beside a plain dict that says of each token whether it is exact.

Written from the contract: a pass reads exactly its own tokens, and those that were exact before it and are
among the last of a sequence that holds them, or at its first positions; all others as their codes say.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import kvcache
import ml
from kvcache import Batch
from kvcache.storage.formats import CacheFormat
from kvcache.testing.models.declared import skip_undeclared
from kvcache.testing.rigs.attention import mask_of, outcome, reference_attention
from ml import DType

HEADS, KV_HEADS, DIM, V_DIM = 4, 2, 64, 32
ROUNDING = {DType.F32: 1e-5, DType.F16: 4e-3, DType.BF16: 4e-2}
Pair = tuple[np.ndarray, np.ndarray]
Rows = list[dict[int, "Token"]]


@dataclass(eq=False)
class Token:
    """K and V as they were put, and as their codes say; (heads, dim) each."""

    put: Pair
    coded: Pair
    exact: bool = True

    @property
    def read(self) -> Pair:
        return self.put if self.exact else self.coded


def turn(ctx: ml.Context, layer: int, key: ml.Tensor, offsets: ml.Tensor) -> ml.Tensor:
    """A shift function that tells how far a key has moved."""
    return ctx.from_numpy(_turned(key.to_numpy(), offsets.to_numpy()[:, None, None]), key.dtype)


def _turned(key: np.ndarray, offset: np.ndarray | int) -> np.ndarray:
    found: np.ndarray = (key.astype(np.float32) + np.float32(0.25) * offset).astype(key.dtype)
    return found


class ResidualRig:
    """Every pass is checked: what ``get`` gives bit by bit, ``attend`` against float64."""

    def __init__(
        self, backend: ml.Backend, ctx: ml.Context, window: kvcache.ResidualWindow, seed: int,
        config: ml.CacheConfig | None = None, activations: DType = DType.F32, sliding: int | None = None,
        sequences: int = 3, capacity: int = 40, max_batch: int = 8, oracle: ml.Context | None = None,
    ) -> None:  # fmt: skip
        """``oracle`` makes what is expected, where ``ctx`` may fail."""
        skip_undeclared(backend, window)
        self.oracle = oracle or ctx
        self.ctx, self.window, self.config = ctx, window, config or ml.CacheConfig()
        self.format, self.activations = CacheFormat.of(window), activations
        self.sliding, self.max_batch = sliding, max_batch
        self.cache: kvcache.CausalCache = (
            kvcache.CausalCache(turn) if sliding is None else kvcache.SlidingWindowCache(sliding, shift=turn)
        )
        self.cache.set_config(self.config)
        self.cache.init(backend, window, sequences, capacity, max_batch)
        self.rng, self.rnd = np.random.default_rng(seed), random.Random(seed)
        self.rows: Rows = [{} for _ in range(sequences)]
        self.copies: list[tuple[Any, dict[int, Token]]] = []

    # What tokens are.

    def _new(self, count: int) -> list[Token]:
        shapes = (count, KV_HEADS, DIM), (count, KV_HEADS, V_DIM)
        key, value = (self.rng.standard_normal(s).astype(self.activations.numpy) for s in shapes)
        return self._tokens(key, value)

    def _tokens(self, key: np.ndarray, value: np.ndarray) -> list[Token]:
        coded = self._coded(self.format.key, key), self._coded(self.format.value, value)
        return [Token((key[i], value[i]), (coded[0][i], coded[1][i])) for i in range(len(key))]

    def _coded(self, stored: kvcache.StorageFormat, x: np.ndarray) -> np.ndarray:
        ctx = self.oracle
        found = stored.decode(ctx, stored.encode(ctx, ctx.from_numpy(x, self.activations)), x.shape[-1])
        return found.cast(ctx, self.activations).to_numpy()

    def _retained(self) -> set[Token]:
        last, first = self.window.residual_length, self.window.sink_tokens
        kept: set[Token] = set()
        for row in self.rows:
            ordered = sorted(row)
            kept.update(row[p] for p in ordered if p < first)
            kept.update(row[p] for p in ordered[max(0, len(ordered) - last) :])
        return kept

    # Passes.

    def start(self, pairs: Sequence[tuple[int, int]]) -> list[Token] | None:
        """``start_forward`` of (position, sequence) each; the tokens, None where it is refused."""
        batch = Batch([p for p, _ in pairs], [seq for _, seq in pairs])
        if outcome(lambda: self.cache.start_forward(self.ctx, batch)) is not None:
            return None
        for seq, row in enumerate(self.rows):  # what a sliding window evicts
            held = set(self.cache.positions(seq).tolist())
            self.rows[seq] = {p: token for p, token in row.items() if p in held}
        kept = self._retained()
        for token in {token for row in self.rows for token in row.values()} - kept:
            token.exact = False
        for _, copy in self.copies:
            for token in set(copy.values()) - kept:
                token.exact = False
        new = self._new(len(pairs))
        for (position, seq), token in zip(pairs, new, strict=True):
            self.rows[seq][position] = token
        return new

    def forward(self, pairs: Sequence[tuple[int, int]]) -> bool:
        new = self.start(pairs)
        if new is None:
            return False
        self.put(new)
        self.check(pairs)
        return True

    def put(self, tokens: Sequence[Token]) -> None:
        host = (np.stack([token.put[part] for token in tokens]) for part in (0, 1))
        self.cache.put(self.ctx, *(self.ctx.from_numpy(part, self.activations) for part in host))

    def extend(self, *counts: int) -> bool:
        """The next tokens of sequences 0, 1, ..."""
        return self.forward(
            [(self.end(seq) + i, seq) for seq, count in enumerate(counts) for i in range(count)]
        )

    def read(self, pairs: Sequence[tuple[int, int]]) -> None:
        """A pass that only reads."""
        batch = Batch([p for p, _ in pairs], [seq for _, seq in pairs])
        if outcome(lambda: self.cache.start_forward(self.ctx, batch, read_only=True)) is None:
            self.check(pairs)

    def check(self, pairs: Sequence[tuple[int, int]]) -> None:
        """That each query of the pass reads what it should, as it should."""
        key, value, mask = self.cache.get(self.ctx)
        found = [key.to_numpy(), value.to_numpy()]
        if self.config.permuted_v:
            found[1] = found[1].transpose(2, 0, 1)
        seen = mask_of(mask, len(pairs), found[0].shape[0], self.config)
        query = self.rng.standard_normal((len(pairs), HEADS, DIM)).astype(np.float32) / 8
        asked = self.ctx.from_numpy(query, self.activations)
        out = self.cache.attend(self.ctx, asked, 0.5).to_numpy().astype(np.float64)
        host = asked.to_numpy().astype(np.float32)
        for i, (position, seq) in enumerate(pairs):
            expected = [token.read for token in self.visible(position, seq)]
            actual = [_bits(k, v) for k, v in zip(found[0][seen[i]], found[1][seen[i]], strict=True)]
            assert sorted(actual) == sorted(_bits(*pair) for pair in expected)
            keys, values = (np.stack(part).astype(np.float32) for part in zip(*expected, strict=True))
            wanted = reference_attention(host[i], keys, values, 0.5)
            limit = ROUNDING[self.activations]
            np.testing.assert_allclose(out[i], wanted, rtol=limit, atol=limit)

    def visible(self, position: int, seq: int) -> list[Token]:
        lowest = 0 if self.sliding is None else position - self.sliding
        return [token for p, token in self.rows[seq].items() if lowest <= p <= position]

    def end(self, seq: int) -> int:
        return max(self.rows[seq], default=-1) + 1

    # Between passes.

    def undo(self, pairs: Sequence[tuple[int, int]]) -> None:
        before = self._state()
        if self.start(pairs) is not None:
            self.cache.undo_forward()
            self._go_back(before)
            self.read(self._queries())

    def attempt(self, pairs: Sequence[tuple[int, int]]) -> None:
        """A pass that is taken back where it fails: what it may have written over has lost its slot."""
        before = self._state()
        new = self.start(pairs)
        assert new is not None
        try:
            self.put(new)
        except BaseException:
            self.cache.undo_forward()
            dropped = {token for token, exact in before[1] if exact != token.exact}
            self._go_back(before)
            table = self.cache.storage.table
            for seq, row in enumerate(self.rows):
                slots = table.exact_slots(table.rows[seq].cells)
                for i, position in enumerate(sorted(row)):
                    if row[position] in dropped:
                        row[position].exact = slots is not None and bool(slots[i] >= 0)
            raise

    def _state(self) -> tuple[Rows, list[tuple[Token, bool]]]:
        rows = [dict(row) for row in self.rows]
        held = {token for row in rows for token in row.values()}
        held |= {token for _, copy in self.copies for token in copy.values()}
        return rows, [(token, token.exact) for token in held]

    def _go_back(self, state: tuple[Rows, list[tuple[Token, bool]]]) -> None:
        self.rows = state[0]
        for token, exact in state[1]:
            token.exact = exact

    def copy_prefix(self, src: int, dst: int, length: int) -> None:
        self.cache.copy_prefix(src, dst, length)
        self.rows[dst] = {p: token for p, token in self.rows[src].items() if p < length}

    def remove(self, seq: int, begin: int, end: int | None = None) -> None:
        if outcome(lambda: self.cache.remove(seq, begin, end)) is not None:
            return
        row = self.rows[seq]
        left = {p: token for p, token in row.items() if p < begin}
        for p, token in row.items() if end is not None and end > begin else ():
            if p >= end:  # type: ignore[operator]
                left[p + begin - end] = self._moved(token, begin - end)  # type: ignore[operator]
        self.rows[seq] = row if end == begin else left

    def _moved(self, token: Token, offset: int) -> Token:
        """Turned as it is read, and quantized again."""
        key, value = token.read
        (found,) = self._tokens(_turned(key, offset)[None], value[None])
        return Token((found.put[0], token.put[1]), (found.coded[0], token.coded[1]), token.exact)

    def snapshot(self, seq: int) -> None:
        """None is taken of a sliding window with a gap."""
        if outcome(lambda: self.cache.snapshot(seq)) is not None:
            return
        copy = self.cache.snapshot(seq)
        self.copies.append((copy, {p: self.rows[seq][p] for p in copy.positions.tolist()}))

    def restore(self, which: int, seq: int) -> None:
        """Where it still lies in the cache its very tokens; else its codes alone."""
        if not self.copies:
            return
        copy, content = self.copies[which % len(self.copies)]
        shared = copy.in_cache
        if outcome(lambda: self.cache.restore(seq, copy)) is None:
            self._replaced(seq, content, shared)

    def replace(self, seq: int, by: int) -> None:
        """By a copy of another sequence, out of the cache and in again."""
        copy = self.cache.snapshot(by)
        copy.detach()
        self.cache.restore(seq, copy)
        self._replaced(seq, self.rows[by], shared=False)

    def _replaced(self, seq: int, content: dict[int, Token], shared: bool) -> None:
        self.rows[seq] = {
            p: token if shared else Token(token.put, token.coded, False) for p, token in content.items()
        }

    def forget_lost(self) -> None:
        """Remove what says that a device failure took it."""
        for seq, row in enumerate(self.rows):
            error = outcome(lambda seq=seq: self.cache.snapshot(seq))  # type: ignore[misc]
            if isinstance(error, kvcache.SequenceLostError):
                self.cache.remove(seq, 0)
                row.clear()

    # Random traces.

    def trace(self, calls: int) -> None:
        for _ in range(calls):
            self._step()

    def _step(self) -> None:
        rnd, count = self.rnd, len(self.rows)
        seq, other = rnd.sample(range(count), 2)
        steps: list[tuple[float, Callable[[], object]]] = [
            (0.55, lambda: self.forward(self._pairs())),
            (0.05, lambda: self.undo(self._pairs())),
            (0.05, lambda: self.read(self._queries())),
            (0.1, lambda: self.copy_prefix(seq, other, rnd.randrange(self.end(seq) + 1))),
            (0.06, lambda: self.remove(seq, rnd.randrange(self.end(seq) + 1))),
            (0.06, lambda: self.remove(seq, begin := rnd.randrange(self.end(seq) + 1), begin + 1)),
            (0.03, self.cache.defrag),
            (0.05, lambda: self.snapshot(seq)),
            (0.03, lambda: self.restore(rnd.randrange(99), seq)),
            (0.02, lambda: [copy.detach() for copy, _ in self.copies[:1]]),
        ]
        rnd.choices([call for _, call in steps], [weight for weight, _ in steps])[0]()
        if max(self.end(seq) for seq in range(count)) > 30:
            self.remove(seq, 0)

    def _pairs(self) -> list[tuple[int, int]]:
        ends = [self.end(seq) for seq in range(len(self.rows))]
        pairs = []
        for _ in range(self.rnd.choice((1, 1, 2, 3, 6, self.max_batch))):
            seq = self.rnd.randrange(len(ends))
            pairs.append((ends[seq], seq))
            ends[seq] += 1
        self.rnd.shuffle(pairs)
        return pairs

    def _queries(self) -> list[tuple[int, int]]:
        return [(self.rnd.randrange(end), seq) for seq in range(len(self.rows)) if (end := self.end(seq))]


def _bits(key: np.ndarray, value: np.ndarray) -> bytes:
    return key.tobytes() + value.tobytes()
