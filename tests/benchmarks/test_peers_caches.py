"""Each driver of another project's cache notices a mistake that is planted in that cache."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from typing import Any

import pytest

from benchmarks.pages import DOCS, load
from benchmarks.peers_caches import CACHES, NANO, QUANTO, RECORD, NanoVllm
from benchmarks.peers_sources import checkout
from kvcache.testing.driven import check_area

Mistake = Callable[..., Any]
"""Called in the place of a function of the peer's, which it is given first."""
TRACES = 4


def nothing(original: Any, self: Any, *args: Any, **options: Any) -> None:
    """A call that is forgotten."""


def one_less_of_a_negative(original: Any, self: Any, count: int) -> Any:
    return original(self, min(count + 1, 0))


def first_is_last(original: Any, self: Any, *args: Any, **options: Any) -> Any:
    """Of each history that is read."""
    import torch

    return tuple(torch.cat([x[..., -1:, :], x[..., 1:, :]], -2) for x in original(self, *args, **options))


def mlx_first_is_last(original: Any, self: Any, *args: Any) -> Any:
    """Likewise."""
    import mlx.core as mx

    def changed(x: Any) -> Any:
        if isinstance(x, tuple | list):
            return tuple(map(changed, x))
        return mx.concatenate([x[..., -1:, :], x[..., 1:, :]], -2)

    return changed(original(self, *args))


def as_before(original: Any, self: Any, *args: Any, **options: Any) -> Any:
    """What was stored first stays."""
    if not any(self.has_previous_state.values()) and not any(self.is_recurrent_states_initialized.values()):
        return original(self, *args, **options)
    return args[0]


def rows_in_order(original: Any, self: Any, rows: Any) -> Any:
    """Rows that were asked for in another order."""
    import mlx.core as mx

    return original(self, mx.sort(rows))


def the_other_way_round(original: Any, self: Any, other: Any) -> Any:
    return original(other, self)


def no_window(original: Any, self: Any, *args: Any, **options: Any) -> Any:
    return original(self, *args, **{**options, "window_size": 1 << 20})


def the_table_is_reversed(original: Any, self: Any, sequence: Any, *args: Any) -> None:
    original(self, sequence, *args)
    sequence.block_table.reverse()


def without_tokens(original: Any, function: Any, parent: Any, tokens: Sequence[int], *extra: Any) -> Any:
    """The hash of a block."""
    return original(function, parent, (0,) * len(tokens), *extra)


def the_last_is_the_first(original: Any, self: Any, request: str) -> Any:
    """In each table of blocks."""
    return [[*table[:-1], table[0]] for table in original(self, request)]


def a_block_more(original: Any, self: Any, count: int) -> int:
    """Tokens that no query sees any more."""
    return min(count, int(original(self, count)) + 4)


def a_chunk_more(original: Any, self: Any, count: int) -> int:
    return int(original(self, count)) + 4


def one_slot_further(original: Any, key: Any, value: Any, *others: Any) -> Any:
    keys, values, slots, isa = others
    return original(key, value, keys, values, slots + 1, isa)


def keys_of_a_slot_further(original: Any, key: Any, *others: Any) -> Any:
    return original(key.roll(1, 0), *others)


def a_wider_window(original: Any, *args: Any) -> Any:
    return original(*(x if i != 8 else -1 for i, x in enumerate(args)))


MLX = "mlx_lm.models.cache"
HF = "transformers.cache_utils"
MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"
LEAVES_WINDOW = f"{MANAGERS}:SlidingWindowManager.get_num_skipped_tokens"
LEAVES_CHUNK = f"{MANAGERS}:ChunkedLocalAttentionManager.get_num_skipped_tokens"
TABLES = "vllm.v1.core.kv_cache_manager:KVCacheManager.get_block_ids"
HASHES = "vllm.v1.core.kv_cache_utils:hash_block_tokens"
OLLAMA = "benchmarks.peers_ollama:Causal"
MISTAKES: list[tuple[str, str, str, Mistake]] = [
    ("CausalCache", "crop", "kvcache:CausalCache.remove", nothing),
    ("CausalCache", "copy", "kvcache:CausalCache.copy_prefix", nothing),
    ("SlidingWindowCache", "save", "kvcache:SlidingWindowCache.restore", lambda *_: True),
    ("ChunkedCache", "select", "kvcache:ChunkedCache.copy_prefix", nothing),
    ("DynamicCache", "tokens", f"{HF}:DynamicLayer.update", first_is_last),
    ("DynamicCache", "crop", f"{HF}:DynamicLayer.crop", one_less_of_a_negative),
    ("DynamicCache", "select", f"{HF}:DynamicLayer.reorder_cache", nothing),
    ("DynamicCache, sliding", "batch", f"{HF}:DynamicSlidingWindowLayer.update", first_is_last),
    ("DynamicCache, sliding", "draft", f"{HF}:DynamicSlidingWindowLayer.crop", one_less_of_a_negative),
    ("DynamicCache, chunked", "padding", f"{HF}:DynamicSlidingWindowLayer.update", first_is_last),
    ("StaticCache", "tokens", f"{HF}:StaticLayer.update", first_is_last),
    ("StaticCache", "crop", f"{HF}:StaticLayer.crop", nothing),
    ("StaticCache, sliding", "tokens", f"{HF}:StaticSlidingWindowLayer.update", first_is_last),
    ("StaticCache, chunked", "select", f"{HF}:StaticSlidingWindowLayer.reorder_cache", nothing),
    ("QuantizedCache, fp8", "tokens", f"{HF}:Fp8QuantizedLayer.update", first_is_last),
    ("QuantizedCache, fp8", "select", f"{HF}:Fp8QuantizedLayer.reorder_cache", nothing),
    (QUANTO, "tokens", f"{HF}:QuantizedLayer.update", first_is_last),
    ("DynamicCache, conv", "tokens", f"{HF}:LinearAttentionLayer.update_conv_state", as_before),
    ("DynamicCache, conv", "draft", f"{HF}:LinearAttentionLayer.crop", one_less_of_a_negative),
    ("DynamicCache, conv", "select", f"{HF}:LinearAttentionLayer.reorder_cache", nothing),
    ("DynamicCache, recurrent", "tokens", f"{HF}:LinearAttentionLayer.update_recurrent_state", as_before),
    ("KVCache", "tokens", f"{MLX}:KVCache.update_and_fetch", mlx_first_is_last),
    ("KVCache", "crop", f"{MLX}:KVCache.trim", lambda original, self, n: original(self, n - 1) + 1),
    ("QuantizedKVCache", "tokens", f"{MLX}:QuantizedKVCache.update_and_fetch", mlx_first_is_last),
    ("QuantizedKVCache", "draft", f"{MLX}:QuantizedKVCache.trim", lambda _, self, n: n),
    ("RotatingKVCache", "tokens", f"{MLX}:RotatingKVCache.make_mask", no_window),
    ("ChunkedKVCache", "tokens", f"{MLX}:ChunkedKVCache.update_and_fetch", mlx_first_is_last),
    ("BatchKVCache", "select", f"{MLX}:BatchKVCache.filter", rows_in_order),
    ("BatchKVCache", "join", f"{MLX}:BatchKVCache.extend", the_other_way_round),
    ("BatchRotatingKVCache", "batch", f"{MLX}:BatchRotatingKVCache.update_and_fetch", mlx_first_is_last),
    ("BatchRotatingKVCache", "select", f"{MLX}:BatchRotatingKVCache.filter", rows_in_order),
    ("ArraysCache", "select", f"{MLX}:ArraysCache.filter", rows_in_order),
    ("ArraysCache", "padding", f"{MLX}:ArraysCache.make_mask", nothing),
    (NANO, "select", "nanovllm.engine.block_manager:BlockManager.allocate", the_table_is_reversed),
    ("KVCacheManager", "select", HASHES, without_tokens),
    ("KVCacheManager", "draft", TABLES, the_last_is_the_first),
    ("KVCacheManager, sliding window", "tokens", LEAVES_WINDOW, a_block_more),
    ("KVCacheManager, hybrid", "select", HASHES, without_tokens),
    ("KVCacheManager, hybrid, sliding window", "batch", LEAVES_WINDOW, a_block_more),
    ("KVCacheManager, hybrid, chunked", "padding", LEAVES_CHUNK, a_chunk_more),
    ("CPU_ATTN", "tokens", "vllm._custom_ops:cpu_attn_reshape_and_cache", keys_of_a_slot_further),
    ("CPU_ATTN", "batch", "vllm._custom_ops:cpu_attn_reshape_and_cache", one_slot_further),
    ("CPU_ATTN, sliding window", "tokens", "vllm._custom_ops:cpu_attention_with_kv_cache", a_wider_window),
    ("Causal", "crop", f"{OLLAMA}.remove", nothing),
    ("Causal", "copy", f"{OLLAMA}.copy_prefix", nothing),
    ("Causal, SWA", "select", f"{OLLAMA}.copy_prefix", nothing),
    ("Causal, SWA with memory", "crop", f"{OLLAMA}.remove", nothing),
    ("Causal, chunked", "draft", f"{OLLAMA}.remove", nothing),
]
"""A cache, an area in which the driver has to notice it, what is replaced, and by what."""
NEEDED = {"transformers": "transformers", "mlx-lm": "mlx_lm", "vLLM": "vllm"}


@pytest.mark.parametrize(
    ("name", "area", "target", "mistake"),
    MISTAKES,
    ids=[f"{name}: {target.rpartition(':')[2]}" for name, _, target, _ in MISTAKES],
)
def test_a_planted_mistake_is_noticed(
    name: str, area: str, target: str, mistake: Mistake, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, _, driver, span = CACHES[name]
    if package := "optimum.quanto" if name == QUANTO else NEEDED.get(project):
        pytest.importorskip(package, reason=f"{package} is not installed")
    if name == NANO:
        if (source := checkout("nano-vllm")) is None:
            pytest.skip("PEERS_SRC has no checkout of nano-vllm")
        monkeypatch.setattr(NanoVllm, "source", source)
    assert check_area(driver, span, area, TRACES).result != "fails"
    owner, attribute = re.split(r"[.:](?=\w+$)", target)
    place = resolve_name(owner)
    original = getattr(place, attribute)
    monkeypatch.setattr(place, attribute, lambda *args, **options: mistake(original, *args, **options))
    assert check_area(driver, span, area, TRACES).result == "fails"


def test_each_driver_has_a_planted_mistake() -> None:
    assert {*CACHES} - {name for name, *_ in MISTAKES} == set()
    record = load(DOCS / RECORD)["caches"]
    assert [one[:2] for one in MISTAKES if record[one[0]][one[1]][0] == "absent"] == []
