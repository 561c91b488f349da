"""Attention in PyTorch with a KV cache: ``python examples/own_loop/torch_attention.py``."""

try:
    import torch
    from torch import nn
    from torch.nn import functional
except ModuleNotFoundError:
    raise SystemExit("torch is not installed: pip install 'ml-kvcache[torch]'") from None

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
        backend = ml.open_backend("torch", device="cpu")
        self.context = backend.new_context()
        self.cache.init(backend, ml.DType.F32, max_sequences=4, capacity=64, max_batch=64)

    def project(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Query, key and value of x (tokens, dim), each (tokens, heads, head_dim)."""
        return [f(x).unflatten(-1, (-1, self.head_dim)) for f in (self.query, self.key, self.value)]

    @torch.inference_mode()
    def forward(self, x: torch.Tensor, positions: list[int], sequences: list[int]) -> torch.Tensor:
        """x (tokens, dim): token i is at positions[i] of text sequences[i], and sees what is before it."""
        wrap = self.context.from_native  # no copy
        query, key, value = map(wrap, self.project(x))
        self.cache.start_forward(self.context, Batch(positions, sequences))  # in a model: once per step
        self.cache.set_layer(0)  # in a model: each layer its own
        self.cache.put(self.context, key, value)
        seen = self.cache.attend(self.context, query, scale=self.head_dim**-0.5)
        return self.output(seen.native.flatten(1))

    @torch.inference_mode()
    def without_cache(self, x: torch.Tensor, window: int | None = None) -> torch.Tensor:
        """The same over the whole text x at once."""
        query, key, value = (part.transpose(0, 1)[None] for part in self.project(x))
        back = torch.arange(len(x))[:, None] - torch.arange(len(x))
        mask = (back >= 0) & (back <= (len(x) if window is None else window))
        seen = functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
        return self.output(seen[0].transpose(0, 1).flatten(1))


if __name__ == "__main__":
    torch.manual_seed(0)
    for window in (None, 3):  # 3: each token sees itself and the three before it
        attention = Attention(dim=64, heads=8, kv_heads=2, window=window)
        first, second = torch.randn(12, 64), torch.randn(9, 64)
        steps = [attention(torch.cat((first[:8], second[:5])), [*range(8), *range(5)], [0] * 8 + [1] * 5)]
        steps += [  # both texts grow by a token in each call
            attention(torch.stack((first[8 + i], second[5 + i])), [8 + i, 5 + i], [0, 1]) for i in range(4)
        ]
        decoded = torch.cat([steps[0][:8], *(step[:1] for step in steps[1:])])
        off = (decoded - attention.without_cache(first, window)).abs().max().item()
        assert off < 1e-5
        print(f"window {window}: decoding with the cache equals attention over the whole past, to {off:.0e}")
