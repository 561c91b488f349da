"""Attention in CuPy with a KV cache: ``python examples/own_loop/cupy_attention.py``."""

try:
    import cupy as cp
except ModuleNotFoundError:
    raise SystemExit("cupy is not installed: pip install 'ml-kvcache[cupy-cuda12x]'") from None

import ml
from kvcache import Batch, CausalCache, SlidingWindowCache


class Attention:
    def __init__(self, dim: int, heads: int, kv_heads: int, window: int | None = None) -> None:
        self.head_dim = dim // heads
        normal = cp.random.RandomState(0).standard_normal
        widths = {"query": heads, "key": kv_heads, "value": kv_heads}
        shapes = {name: (dim, n * self.head_dim) for name, n in widths.items()}
        self.weights = {name: normal(shape, dtype="float32") * dim**-0.5 for name, shape in shapes.items()}

        self.cache = CausalCache() if window is None else SlidingWindowCache(window)
        backend = ml.open_backend("cupy")
        self.context = backend.new_context()
        self.cache.init(backend, ml.DType.F32, max_sequences=4, capacity=64, max_batch=64)

    def project(self, x: cp.ndarray) -> list[cp.ndarray]:
        """Query, key and value of x (tokens, dim), each (tokens, heads, head_dim)."""
        return [cp.matmul(x, w).reshape(len(x), -1, self.head_dim) for w in self.weights.values()]

    def __call__(self, x: cp.ndarray, positions: list[int], sequences: list[int]) -> cp.ndarray:
        """x (tokens, dim): token i is at positions[i] of text sequences[i], and sees what is before it."""
        wrap = self.context.from_native  # no copy
        query, key, value = map(wrap, self.project(x))
        self.cache.start_forward(self.context, Batch(positions, sequences))  # in a model: once per step
        self.cache.set_layer(0)  # in a model: each layer its own
        self.cache.put(self.context, key, value)
        seen = self.cache.attend(self.context, query, scale=self.head_dim**-0.5)
        return seen.native.reshape(len(x), -1)

    def without_cache(self, x: cp.ndarray, window: int | None = None) -> cp.ndarray:
        """The same over the whole text x at once."""
        query, key, value = (part.transpose(1, 0, 2) for part in self.project(x))
        group = len(query) // len(key)
        key, value = cp.repeat(key, group, axis=0), cp.repeat(value, group, axis=0)
        scores = cp.matmul(query, key.transpose(0, 2, 1)) * self.head_dim**-0.5
        back = cp.arange(len(x))[:, None] - cp.arange(len(x))
        scores = cp.where((back >= 0) & (back <= (len(x) if window is None else window)), scores, -cp.inf)
        weights = cp.exp(scores - scores.max(axis=-1, keepdims=True))
        seen = cp.matmul(weights / weights.sum(axis=-1, keepdims=True), value)
        return seen.transpose(1, 0, 2).reshape(len(x), -1)


if __name__ == "__main__":
    for window in (None, 3):  # 3: each token sees itself and the three before it
        attention = Attention(dim=64, heads=8, kv_heads=2, window=window)
        normal = cp.random.RandomState(1).standard_normal
        first, second = normal((12, 64), dtype="float32"), normal((9, 64), dtype="float32")
        both = cp.concatenate((first[:8], second[:5]))
        steps = [attention(both, [*range(8), *range(5)], [0] * 8 + [1] * 5)]
        steps += [  # both texts grow by a token in each call
            attention(cp.stack((first[8 + i], second[5 + i])), [8 + i, 5 + i], [0, 1]) for i in range(4)
        ]
        decoded = cp.concatenate([steps[0][:8], *(step[:1] for step in steps[1:])])
        off = float(abs(decoded - attention.without_cache(first, window)).max())
        assert off < 1e-5
        print(f"window {window}: decoding with the cache equals attention over the whole past, to {off:.0e}")
