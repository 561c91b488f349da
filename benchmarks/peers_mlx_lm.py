"""mlx-lm's tests/test_prompt_cache.py, with our entries in the places of its KVCache and RotatingKVCache.

A stand-in is a prompt cache of one layer. Its model, which the file downloads, is a small one with random
weights here, so that no network is needed; what it makes for that model is our prompt cache.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx_lm.utils
from mlx_lm.models import llama

from kvcache import InvalidRangeError, NotSupportedError
from kvcache.integrations import mlx_lm as ours

__all__ = ["prepared"]

_used: Counter[str] = Counter()
_pools: dict[Any, ours.CachePool] = {}


def _pool(key: Any) -> ours.CachePool:
    """One for all entries of a kind in a test, so that they can be merged."""
    if not _used:
        _pools.clear()  # the first of a test
    if key not in _pools:
        window = key[0] if isinstance(key, tuple) else key
        _pools[key] = ours.CachePool([ours.Attention(window)], capacity=512, max_sequences=16, rollback=0)
    return _pools[key]


class _OneLayer(ours.KVCache):
    """A prompt cache of one layer, which goes to a pool of its shape when it is first written."""

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        try:
            return super().update_and_fetch(keys, values)
        except InvalidRangeError:
            if not self.empty():
                raise
            window = self.rows.pool.storage.layers[0].window  # type: ignore[union-attr]
            self.rows = _pool((window, *keys.shape[1::2])).make_prompt_cache()[0].rows
            self._seen = 0
            return super().update_and_fetch(keys, values)


class KVCache(_OneLayer):
    def __init__(self, rows: Any = None, layer: int = 0, seen: int = 0) -> None:
        super().__init__(_pool(None).make_prompt_cache()[0].rows if rows is None else rows, layer, seen)
        _used["KVCache"] += 1


class RotatingKVCache(_OneLayer, ours.RotatingKVCache):
    def __init__(self, max_size: Any = None, keep: int = 0, seen: int = 0) -> None:
        made = not isinstance(max_size, int)
        pool = None if made else _pool(max_size)
        _used["RotatingKVCache"] += 1
        if made:  # by merge, extract or deepcopy: rows, layer
            super().__init__(max_size, keep, seen)
            return
        assert pool is not None
        if keep:
            raise NotSupportedError(f"RotatingKVCache: keep={keep}; no token stays for good here")
        super().__init__(pool.make_prompt_cache()[0].rows, 0)


def _make_prompt_cache(model: Any, max_kv_size: int | None = None) -> list[Any]:
    made = ours.make_prompt_cache(model, capacity=256)
    _used["make_prompt_cache"] += 1
    return made


class _Tokenizer:
    def encode(self, text: str, **options: Any) -> Any:
        return mx.array([[3 + byte % 90 for byte in text.encode()]])


def _load(*arguments: Any, **options: Any) -> tuple[Any, Any]:
    mx.random.seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = llama.Model(
        llama.ModelArgs(model_type="llama", num_hidden_layers=2, rms_norm_eps=1e-5, vocab_size=97, **shape)
    )
    mx.eval(model.parameters())
    return model, _Tokenizer()


def prepared(path: Path) -> tuple[ModuleType, Counter[str]]:
    """The test module with our names in it, and the count of what it makes of ours."""
    spec = importlib.util.spec_from_file_location("peers_mlx_lm_tests", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    mlx_lm.utils.load = _load  # before the file imports it
    spec.loader.exec_module(module)
    for stand_in in (KVCache, RotatingKVCache):
        setattr(module, stand_in.__name__, stand_in)
    module.make_prompt_cache = _make_prompt_cache  # type: ignore[attr-defined]
    return module, _used
