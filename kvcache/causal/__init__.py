"""Causal caches: all of the past (full.py), a sliding window of it, or the current chunk (windows.py).

placing.py finds cells for a batch; sequences.py shares, removes and moves what is stored.

After Ollama's kvcache/causal.go.
"""

from kvcache.causal.full import CausalCache, drop_middle
from kvcache.causal.windows import ChunkedCache, SlidingWindowCache

__all__ = ["CausalCache", "ChunkedCache", "SlidingWindowCache", "drop_middle"]
