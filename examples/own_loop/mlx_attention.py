"""Attention in MLX with a KV cache: ``python examples/own_loop/mlx_attention.py``."""

try:
    import mlx.core as mx
    from mlx import nn
except ModuleNotFoundError:
    raise SystemExit("mlx is not installed: pip install 'ml-kvcache[mlx]'") from None

import ml
from kvcache import Batch, CausalCache, SlidingWindowCache


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, window: int | None = None) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.query = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.key = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.output = nn.Linear(heads * self.head_dim, dim, bias=False)

        self.cache = CausalCache() if window is None else SlidingWindowCache(window)
        backend = ml.open_backend("mlx")
        self.context = backend.new_context()
        self.cache.init(backend, ml.DType.F32, max_sequences=4, capacity=64, max_batch=64)

    def project(self, x: mx.array) -> list[mx.array]:
        """Query, key and value of x (tokens, dim), each (tokens, heads, head_dim)."""
        return [f(x).reshape(len(x), -1, self.head_dim) for f in (self.query, self.key, self.value)]

    def __call__(self, x: mx.array, positions: list[int], sequences: list[int]) -> mx.array:
        """x (tokens, dim): token i is at positions[i] of text sequences[i], and sees what is before it."""
        wrap = self.context.from_native  # no copy
        query, key, value = map(wrap, self.project(x))
        self.cache.start_forward(self.context, Batch(positions, sequences))  # in a model: once per step
        self.cache.set_layer(0)  # in a model: each layer its own
        self.cache.put(self.context, key, value)
        seen = self.cache.attend(self.context, query, scale=self.head_dim**-0.5)
        return self.output(seen.native.flatten(1))

    def without_cache(self, x: mx.array, window: int | None = None) -> mx.array:
        """The same over the whole text x at once."""
        query, key, value = (part.swapaxes(0, 1)[None] for part in self.project(x))
        back = mx.arange(len(x))[:, None] - mx.arange(len(x))
        mask = (back >= 0) & (back <= (len(x) if window is None else window))
        scale = self.head_dim**-0.5
        seen = mx.fast.scaled_dot_product_attention(query, key, value, scale=scale, mask=mask)
        return self.output(seen[0].swapaxes(0, 1).flatten(1))


if __name__ == "__main__":
    mx.random.seed(0)
    for window in (None, 3):  # 3: each token sees itself and the three before it
        attention = Attention(dim=64, heads=8, kv_heads=2, window=window)
        first, second = mx.random.normal((12, 64)), mx.random.normal((9, 64))
        both = mx.concatenate((first[:8], second[:5]))
        steps = [attention(both, [*range(8), *range(5)], [0] * 8 + [1] * 5)]
        steps += [  # both texts grow by a token in each call
            attention(mx.stack((first[8 + i], second[5 + i])), [8 + i, 5 + i], [0, 1]) for i in range(4)
        ]
        decoded = mx.concatenate([steps[0][:8], *(step[:1] for step in steps[1:])])
        off = mx.abs(decoded - attention.without_cache(first, window)).max().item()
        assert off < 1e-5
        print(f"window {window}: decoding with the cache equals attention over the whole past, to {off:.0e}")
