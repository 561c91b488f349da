"""An encoder cache and its model, a dict with the output of each sequence, and random traces of both."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import kvcache
import ml
from kvcache import Batch
from kvcache.snapshots.snapshot import EncoderSnapshot
from kvcache.testing.models import values
from kvcache.testing.rigs.attention import TOLERANCE, mask_of, reference_attention
from kvcache.testing.rigs.machine import Op, Trace
from ml import DType

LAYERS = (0, 3)


@dataclass(frozen=True)
class Output:
    """The encoder output of a sequence: rows numbered from ``first``, at the position of its token."""

    position: int
    first: int
    count: int

    def rows(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        ids = np.arange(self.first, self.first + self.count)
        return values.keys(ids, ids % 7, layer), values.values(ids, layer)


class EncoderRig:
    """An encoder cache and its model, a dict with the output of each sequence."""

    def __init__(
        self,
        backend: ml.Backend,
        ctx: ml.Context,
        dtype: DType = DType.F32,
        config: ml.CacheConfig | None = None,
        max_sequences: int = 4,
    ) -> None:
        self.ctx, self.dtype, self.max_sequences = ctx, dtype, max_sequences
        self.config = config or ml.CacheConfig()
        self.cache = kvcache.EncoderCache()
        self.cache.set_config(self.config)
        self.cache.init(backend, dtype, max_sequences, 16, 8)
        self.outputs: dict[int, Output] = {}
        self.next_row = 1
        self.copies: list[tuple[EncoderSnapshot, Output | None]] = []
        self.pass_: tuple[list[int], list[int]] = ([], [])

    def start(self, positions: Sequence[int], sequences: Sequence[int], items: Sequence[int] = ()) -> None:
        """Start a pass; ``items`` are the batch indices with something to encode."""
        self.pass_ = list(positions), list(sequences)
        multimodal = [(index, "an image") for index in items]
        self.cache.start_forward(self.ctx, Batch(*self.pass_, multimodal=multimodal))
        indices = items or range(len(positions))
        self.receivers: dict[int, int] = {}
        for index in indices:
            if items or sequences[index] not in self.receivers:
                self.receivers[sequences[index]] = positions[index]

    def put(self, *lengths: int, equal: bool = False, layers: Sequence[int] = LAYERS) -> None:
        """Put outputs of these lengths for the receivers, in order."""
        for (seq, position), count in zip(self.receivers.items(), lengths, strict=True):
            self.outputs[seq] = Output(position, self.next_row, count)
            self.next_row += count
        for layer in layers:
            parts = [self.outputs[seq].rows(layer) for seq in self.receivers]
            key, value = (np.concatenate([part[i] for part in parts]) for i in range(2))
            self.cache.set_layer(layer)
            tensors = self.ctx.from_numpy(key), self.ctx.from_numpy(value)
            self.cache.put(self.ctx, *tensors, lengths=None if equal else lengths)

    def check(self, computes: bool = True) -> None:
        """Check that every token of the pass sees exactly its own sequence's rows, in every layer."""
        positions, sequences = self.pass_
        for layer in LAYERS:
            self.cache.set_layer(layer)
            key, value, mask = self.cache.get(self.ctx)
            stored_key, stored_value = key.to_numpy().astype(np.float32), value.to_numpy().astype(np.float32)
            if self.config.permuted_v:
                stored_value = stored_value.transpose(2, 0, 1)
            seen = self.seen(mask, len(positions), len(stored_key))
            for row, seq in zip(seen, sequences, strict=True):
                wanted_key, wanted_value = self.outputs[seq].rows(layer)
                np.testing.assert_array_equal(stored_key[row], wanted_key)
                np.testing.assert_array_equal(stored_value[row], wanted_value)
            if computes:
                self.check_attend(layer)
        for seq in range(self.max_sequences):
            assert self.cache.encoder_cached(seq) == (seq in self.outputs)

    def seen(self, mask: kvcache.Mask, tokens: int, history: int) -> np.ndarray:
        if mask is None:
            assert len(set(self.pass_[1])) == 1, "only one sequence needs no mask"
            return np.ones((tokens, history), dtype=bool)
        return mask_of(mask, tokens, history, self.config)

    def check_attend(self, layer: int) -> None:
        sequences = self.pass_[1]
        query = values.queries(len(sequences), len(sequences))
        out = self.cache.attend(self.ctx, self.ctx.from_numpy(query, self.dtype), 0.5)
        limit = TOLERANCE[self.dtype]
        for attended, asked, seq in zip(out.to_numpy().astype(np.float64), query, sequences, strict=True):
            wanted = reference_attention(asked, *self.outputs[seq].rows(layer), 0.5)
            np.testing.assert_allclose(attended[:, 3:], wanted[:, 3:], rtol=limit, atol=limit)

    def copy_prefix(self, src: int, dst: int, length: int) -> None:
        self.cache.copy_prefix(src, dst, length)
        output = self.outputs.get(src)
        self.outputs.pop(dst, None)
        if output is not None and output.position < length:
            self.outputs[dst] = output

    def remove(self, seq: int, begin: int, end: int | None = None) -> None:
        self.cache.remove(seq, begin, end)
        output = self.outputs.get(seq)
        if output is None or output.position < begin:
            return
        if end is None or output.position < end:
            del self.outputs[seq]
        else:
            self.outputs[seq] = Output(output.position - end + begin, output.first, output.count)

    def snapshot(self, seq: int, begin: int, end: int) -> None:
        output = self.outputs.get(seq)
        inside = output if output is not None and begin <= output.position < end else None
        self.copies.append((self.cache.snapshot(seq, begin, end), inside))

    def restore(self, seq: int, which: int, target: int) -> bool:
        """Restore a snapshot; returns whether it was possible. Output at or after its begin is replaced,
        earlier output stays.
        """
        snapshot, output = self.copies[which]
        done = self.cache.restore(seq, snapshot, target)
        assert done is (snapshot.begin <= target <= snapshot.end)
        if done and seq in self.outputs and self.outputs[seq].position >= snapshot.begin:
            del self.outputs[seq]
        if done and output is not None and output.position < target:
            self.outputs[seq] = output
        return done

    def split(self, which: int, at: int) -> None:
        """Add both halves to the copies, and the snapshot merged from them."""
        snapshot, output = self.copies[which]
        first, second = self.cache.split(snapshot, at)
        assert (first is None) == (at == snapshot.begin)
        assert (second.begin, second.end) == (at, snapshot.end)
        is_late = output is not None and output.position >= at
        if first is not None:
            assert (first.begin, first.end, first.nbytes + second.nbytes) == (
                snapshot.begin, at, snapshot.nbytes,
            )  # fmt: skip
            self.copies.append((first, None if is_late else output))
        self.copies.append((second, output if is_late else None))
        self.copies.append((self.cache.merge(first, second), output))

    def look(self, computes: bool = True, read_only: bool = False) -> None:
        """Read back all sequences that have output, in one pass."""
        holders = sorted(self.outputs, reverse=True)
        if holders:
            self.pass_ = [9] * len(holders), holders
            self.cache.start_forward(self.ctx, Batch(*self.pass_), read_only=read_only)
            self.check(computes)


class EncoderMachine:
    """Random calls on an encoder cache."""

    def __init__(self, rig: EncoderRig, computes: bool) -> None:
        self.rig, self.computes = rig, computes

    def choose(self, rnd: random.Random) -> Op:
        r, count = self.rig, self.rig.max_sequences
        seq, roll = rnd.randrange(count), rnd.random()
        if roll < 0.4:
            pairs = [(rnd.randrange(8), s) for s in rnd.choices(range(count), k=rnd.randint(1, 4))]
            pairs = rnd.sample(list(dict.fromkeys(pairs)), len(set(pairs)))
            items = tuple(sorted(rnd.sample(range(len(pairs)), rnd.randint(0, len(pairs)))))
            lengths = tuple(rnd.randint(1, 5) for _ in pairs)
            return (
                "encode",
                tuple(p for p, _ in pairs),
                tuple(s for _, s in pairs),
                items,
                lengths,
                rnd.random() < 0.2,
            )
        if roll < 0.52 and count > 1:
            return "copy_prefix", *rnd.sample(range(count), 2), rnd.randrange(9)
        if roll < 0.68 or not r.copies:
            begin = rnd.randrange(4)
            return "snapshot", seq, begin, begin + rnd.randrange(6)
        if roll < 0.76:
            which = rnd.randrange(len(r.copies))
            begin, end = r.copies[which][0].begin, r.copies[which][0].end
            return rnd.choice(
                (("restore", seq, which, rnd.randint(0, end + 1)), ("split", which, rnd.randint(begin, end)))
            )
        if roll < 0.88:
            begin = rnd.randrange(8)
            return "remove", seq, begin, rnd.choice((None, begin + rnd.randrange(4)))
        return "look", self.computes, rnd.random() < 0.5

    def apply(self, op: Op) -> None:
        name, *rest = op
        args: Any = rest
        if name == "encode":
            self._encode(*args)
        elif name not in ("restore", "split"):
            getattr(self.rig, str(name))(*args)
        elif self.rig.copies:
            at = len(args) - 2
            args[at] %= len(self.rig.copies)
            if name == "split":
                snapshot = self.rig.copies[args[0]][0]
                args[1] = min(max(args[1], snapshot.begin), snapshot.end)
            getattr(self.rig, str(name))(*args)

    def _encode(
        self, positions: Sequence[int], sequences: Sequence[int], items: Sequence[int],
        lengths: Sequence[int], undone: bool,
    ) -> None:  # fmt: skip
        r, before = self.rig, dict(self.rig.outputs)
        r.start(positions, sequences, items)
        r.put(*lengths[: len(r.receivers)])
        if all(seq in r.outputs for seq in sequences):
            r.check(self.computes)
        if undone:
            r.cache.undo_forward()
            r.outputs = before

    def finish(self) -> None:
        for which, (snapshot, _) in enumerate(self.rig.copies):
            self.rig.restore(0, which, snapshot.end)
            self.rig.look(computes=False)
        self.rig.look(self.computes)


def encoder_trace(rnd: random.Random, floats: Sequence[DType], computes: bool) -> Trace:
    config = ml.CacheConfig(
        mask_batch_padding=rnd.choice((1, 3)),
        mask_dtype=rnd.choice(list(floats)),
        permuted_v=rnd.random() < 0.3,
    )
    count, dtype = rnd.randint(1, 4), rnd.choice(list(floats))

    def machine(backend: ml.Backend, ctx: ml.Context) -> EncoderMachine:
        return EncoderMachine(EncoderRig(backend, ctx, dtype, config, count), computes)

    return Trace((config, dtype, count), rnd.randint(3, 12), machine)
