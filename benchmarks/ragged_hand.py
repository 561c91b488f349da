"""Decode steps over several sequences as one would write them by hand, once for each framework.

``benchmarks.ragged`` compares with these. All keep (sequences, heads, capacity, dim), write the new token
themselves, and make what a pass works out once (places, masks) in ``start``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

HEADS, KV, DIM = 8, 4, 64
GROUP = HEADS // KV
SCALE = DIM**-0.5
GROWTH = 8
"""Steps after which every sequence is cut back to what it began with."""
COPIES = 1 << 29
"""Bytes of the loop's copies of shared tokens, in a layer; further sequences read those of others again."""


@dataclass(frozen=True)
class Case:
    """``own[i]``: tokens that sequence i has to itself, before the first step.

    ``levels``: what is shared before these, outermost first: tokens, and how many sequences side by side
    read the same ones.
    """

    name: str
    own: tuple[int, ...]
    levels: tuple[tuple[int, int], ...] = ()

    @property
    def sequences(self) -> int:
        return len(self.own)

    @property
    def shared(self) -> int:
        """Tokens before each sequence's own."""
        return sum(tokens for tokens, _ in self.levels)

    @property
    def capacity(self) -> int:
        """Of a sequence's own tokens."""
        return max(self.own) + GROWTH

    @property
    def distinct(self) -> int:
        """Bytes of a layer that the queries of a first step see, each counted once."""
        shared = sum(tokens * self.sequences // readers for tokens, readers in self.levels)
        return 8 * KV * DIM * (shared + sum(self.own) + self.sequences)

    @cached_property
    def tails(self) -> np.ndarray:
        """F32 (sequences, heads, capacity, dim); keys are values here."""
        return self._random(0, self.sequences, self.capacity)

    @cached_property
    def prefixes(self) -> list[np.ndarray]:
        """Each level as (segments, heads, tokens, dim)."""
        return [
            self._random(number, self.sequences // readers, tokens)
            for number, (tokens, readers) in enumerate(self.levels, 1)
        ]

    def _random(self, seed: int, rows: int, tokens: int) -> np.ndarray:
        return np.random.default_rng(seed).standard_normal((rows, KV, tokens, DIM), np.float32)


class Ops:
    """NumPy's way, and what the others share with it."""

    lazy = False
    native = staticmethod(np.array)

    def one_thread(self) -> None:
        """NumPy and MLX have it from OMP_NUM_THREADS."""

    def places(self, at: np.ndarray, capacity: int) -> Any:
        """What ``write`` wants to know: where in each row the new token goes."""
        rows = np.arange(at.size)
        return int(at[0]) if (at == at[0]).all() else (self.native(rows), self.native(at))

    def write(self, x: Any, places: Any, token: Any) -> None:
        if isinstance(places, int):
            x[:, :, places] = token
        else:
            x[places[0], :, places[1]] = token

    def row(self, x: Any, i: int, count: int) -> Any:
        """The first ``count`` tokens of row i as (1, heads, count, dim)."""
        return x[i : i + 1, :, :count]

    def attend(self, q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        return self.partial(q, k, v, mask)[0]

    def partial(self, q: Any, k: Any, v: Any, mask: Any = None) -> tuple[Any, Any]:
        scores = (q * np.float32(SCALE)) @ k.swapaxes(-1, -2)
        scores = scores if mask is None else scores + mask
        top = scores.max(-1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(-1, keepdims=True)
        return weights @ v / total, np.log(total) + top

    def merge(self, parts: list[tuple[Any, Any]]) -> Any:
        top = np.maximum.reduce([lse for _, lse in parts])
        weights = [np.exp(lse - top) for _, lse in parts]
        merged = sum(out * weight for (out, _), weight in zip(parts, weights, strict=True))
        return merged / sum(weights)

    def stack(self, found: list[Any]) -> Any:
        return np.concatenate(found)

    def done(self, found: Any) -> object:
        return found


class TorchOps(Ops):
    def __init__(self) -> None:
        import torch

        self.torch, self.native, self.stack = torch, torch.tensor, torch.cat
        self.sdpa = torch.nn.functional.scaled_dot_product_attention
        self.flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def one_thread(self) -> None:
        self.torch.set_num_threads(1)

    def places(self, at: np.ndarray, capacity: int) -> Any:
        if (at == at[0]).all():
            return int(at[0])
        rows = np.arange(at.size)[:, None] * KV + np.arange(KV)
        return self.native((rows * capacity + at[:, None]).reshape(-1))

    def write(self, x: Any, places: Any, token: Any) -> None:
        if isinstance(places, int):
            x[:, :, places] = token
        elif len(token) <= 64:
            x.view(-1, DIM).index_copy_(0, places, token.view(-1, DIM))
        else:
            x.view(-1, DIM)[places] = token.view(-1, DIM)

    def row(self, x: Any, i: int, count: int) -> Any:
        strides = x.stride()
        return x.as_strided((1, KV, count, DIM), strides, i * strides[0])

    def attend(self, q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        return self.sdpa(q, k, v, mask)

    def partial(self, q: Any, k: Any, v: Any, mask: Any = None) -> tuple[Any, Any]:
        out, lse = self.flash(q, k, v, 0.0, False, attn_mask=mask)
        return out, lse.unsqueeze(-1)

    def merge(self, parts: list[tuple[Any, Any]]) -> Any:
        if len(parts) == 2:
            (out, lse), (other, other_lse) = parts
            return self.torch.lerp(other, out, self.torch.sigmoid(lse - other_lse))
        weights = self.torch.cat([lse for _, lse in parts], -1).softmax(-1)
        return (self.torch.stack([out for out, _ in parts], -1) @ weights.unsqueeze(-1)).squeeze(-1)


class MlxOps(Ops):
    lazy = True

    def __init__(self) -> None:
        import mlx.core as mx

        mx.set_default_device(mx.cpu)
        self.mx, self.native, self.stack, self.done = mx, mx.array, mx.concatenate, mx.eval

    def attend(self, q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        return self.mx.fast.scaled_dot_product_attention(q, k, v, scale=SCALE, mask=mask)

    def partial(self, q: Any, k: Any, v: Any, mask: Any = None) -> tuple[Any, Any]:
        scores = (q * SCALE) @ k.swapaxes(-1, -2)
        lse = self.mx.logsumexp(scores, axis=-1, keepdims=True)
        return self.mx.exp(scores - lse) @ v, lse

    def merge(self, parts: list[tuple[Any, Any]]) -> Any:
        weights = self.mx.softmax(self.mx.concatenate([lse for _, lse in parts], axis=-1), axis=-1)
        return sum(out * weights[..., i : i + 1] for i, (out, _) in enumerate(parts))


def ops_of(backend: str) -> Ops:
    return {"numpy": Ops, "torch": TorchOps, "mlx": MlxOps}[backend]()


class Hand:
    """``layers`` times K and V; ``start`` begins a step of all, ``layer`` gives (sequences, heads, dim)."""

    def __init__(self, ops: Ops, case: Case, layers: int, query: np.ndarray, token: np.ndarray) -> None:
        self.ops, self.case, self.grown = ops, case, 0
        self.query = ops.native(query).reshape(case.sequences, KV, GROUP, DIM)
        self.token = ops.native(token)
        self.lengths, self.capacity = np.array(case.own), case.capacity
        tensors = self.tensors()
        self.layers = [[ops.native(x) for x in tensors] for _ in range(layers)]
        ops.done(self.layers)

    def tensors(self) -> list[np.ndarray]:
        """K and V, and what else a layer stores."""
        return [self.case.tails, self.case.tails]

    def start(self) -> None:
        at = self.lengths + self.grown
        self.counts = [int(count) for count in at + 1]
        self.most = max(self.counts)
        self.places = self.ops.places(at, self.capacity)

    def write(self, i: int) -> list[Any]:
        tensors = self.layers[i]
        for x in tensors[:2]:
            self.ops.write(x, self.places, self.token)
        return tensors

    def layer(self, i: int) -> Any:
        raise NotImplementedError

    def done(self, found: Any) -> object:
        return self.ops.done(found)

    def finish(self) -> None:
        self.grown = (self.grown + 1) % GROWTH


class Padded(Hand):
    """One call over all, padded to the longest, with a mask where lengths differ."""

    mask: Any = None

    def start(self) -> None:
        super().start()
        if min(self.counts) < self.most:
            seen = np.arange(self.most) < np.array(self.counts)[:, None]
            mask = np.where(seen, np.float32(0), np.float32(-np.inf))
            shape = self.case.sequences, 1, GROUP, self.most
            self.mask = self.ops.native(np.broadcast_to(mask[:, None, None], shape))

    def layer(self, i: int) -> Any:
        k, v = self.write(i)
        found = self.ops.attend(self.query, k[:, :, : self.most], v[:, :, : self.most], self.mask)
        return found.reshape(-1, HEADS, DIM)


class Loop(Hand):
    """A call per sequence over a view of its own; of what is shared each has a copy."""

    def tensors(self) -> list[np.ndarray]:
        case = self.case
        if not case.levels:
            return super().tensors()
        self.capacity += case.shared
        rows = np.arange(max(1, min(case.sequences, COPIES // (8 * KV * DIM * self.capacity))))
        self.lengths, self.token = self.lengths[: rows.size] + case.shared, self.token[: rows.size]
        of = [x[rows // readers] for x, (_, readers) in zip(case.prefixes, case.levels, strict=True)]
        return [np.concatenate([*of, case.tails[rows]], axis=2)] * 2

    def layer(self, i: int) -> Any:
        k, v = self.write(i)
        row, attend, counts = self.ops.row, self.ops.attend, self.counts
        rows = len(counts)
        found = []
        for seq in range(self.case.sequences):
            at = seq % rows
            query = self.query[seq : seq + 1]
            found.append(attend(query, row(k, at, counts[at]), row(v, at, counts[at])))
        return self.ops.stack(found).reshape(-1, HEADS, DIM)


class Cascade(Hand):
    """What is shared read once by the queries of all that share it, all tails by one call; merged.

    The tails are of one length.
    """

    def tensors(self) -> list[np.ndarray]:
        return [*super().tensors(), *(x for level in self.case.prefixes for x in (level, level))]

    def layer(self, i: int) -> Any:
        case, ops = self.case, self.ops
        k, v, *prefixes = self.write(i)
        parts = [ops.partial(self.query, k[:, :, : self.most], v[:, :, : self.most])]
        for number, (_, readers) in enumerate(case.levels):
            segments = case.sequences // readers
            rows = self.query.reshape(segments, readers, KV, GROUP, DIM).swapaxes(1, 2)
            rows = rows.reshape(segments, KV, readers * GROUP, DIM)
            pair = ops.partial(rows, *prefixes[2 * number : 2 * number + 2])
            shape = segments, KV, readers, GROUP, -1
            parts.insert(
                number,
                tuple(x.reshape(shape).swapaxes(1, 2).reshape(-1, KV, GROUP, x.shape[-1]) for x in pair),
            )
        return ops.merge(parts).reshape(-1, HEADS, DIM)
