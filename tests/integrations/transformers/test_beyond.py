"""What HFCache does that transformers' own caches do not: going back, forks, storage, errors."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("torch")

import torch
import transformers

import ml
from benchmarks.census import transformers as census
from kvcache import (
    CacheFullError,
    CausalCache,
    InvalidRangeError,
    InvalidSequenceError,
    NotSupportedError,
    OrderError,
)
from kvcache.integrations.transformers import (
    HFCache,
    HFPrefixCache,
    HFStaticCache,
    install,
    rope_shift,
    uninstall,
)
from kvcache.stores import MemoryStore, SerializedSnapshot, get_snapshot, put_snapshot

from ...rigs import hf_models as hf

ATTENTION = [name for name in hf.DECODERS if name != "qwen3-next"]
EACH_KIND = ("gemma3", "llama4", "qwen3-next")
"""Full and sliding, chunked, linear attention."""
WINDOWS = {"layer_types": ("sliding_attention", "sliding_attention")}


class TestStorage:
    def test_memory_is_what_the_capacity_says(self) -> None:
        made = hf.model("llama")
        cache = HFCache(made.config, max_sequences=3, capacity=50)
        assert cache.nbytes == 0
        hf.feed(made, cache, hf.tokens(2))
        assert cache.nbytes == 2 * 2 * 3 * 50 * 2 * 16 * 4  # K and V, layers, cells, heads, dims, bytes

    @pytest.mark.parametrize("recorded", [False, True])
    def test_windows_cost_no_more_than_they_show_and_what_may_be_taken_back(self, recorded: bool) -> None:
        made = hf.model("gemma3", layer_types=("sliding_attention", "sliding_attention"))
        cache = HFCache(made.config, capacity=4096, lookback=4)
        if recorded:
            cache.activate_past_recording()
        for _ in range(5):
            hf.feed(made, cache, hf.tokens(2, 40))
            cache.crop(0)
        kept = hf.WINDOW - 1 + 4
        assert cache.nbytes == 2 * 2 * (2 * 2 * kept) * 2 * 16 * 4
        assert cache.get_seq_length() == 200

    @pytest.mark.parametrize("kind", [HFCache, HFStaticCache])
    def test_a_cache_that_is_dropped_gives_its_memory_back_at_once(self, kind: Any) -> None:
        """Without the garbage collector, which may be long in coming: nothing in it refers back to it."""
        with ml.open_backend("torch", device="cpu") as backend:
            for name in ("gemma3", "qwen3-next", "t5"):
                made = hf.model(name)
                gc.collect()
                gc.disable()
                try:
                    cache = kind(made.config, backend=backend, capacity=64)
                    hf.generate(made, hf.inputs(name, 2), cache, num_beams=2, max_new_tokens=3)
                    assert backend.memory().devices[0].allocated >= cache.nbytes > 0
                    del cache
                    assert backend.memory().devices[0].allocated == 0
                finally:
                    gc.enable()

    @pytest.mark.parametrize("rows", [1, 3])
    def test_what_is_decoded_is_copied_into_the_buffers_that_the_model_looks_into(self, rows: int) -> None:
        """Past ``put``, whose checks are made once; what it would refuse, or copy first, still goes there."""
        made = hf.model("llama")
        cache = HFCache(made.config, capacity=50)
        hf.feed(made, cache, hf.tokens(rows))
        with mock.patch.object(CausalCache, "put", side_effect=AssertionError):
            for _ in range(3):
                hf.feed(made, cache, hf.tokens(rows, 1))
        last = [tuple(x[:, :, -1:] for x in (layer.keys, layer.values)) for layer in cache.layers]
        before = [[layer.keys.clone(), layer.values.clone()] for layer in cache.layers]
        with mock.patch.object(CausalCache, "put", autospec=True, side_effect=CausalCache.put) as put:
            for i, (key, value) in enumerate(last):  # the memory of the cache itself
                found = cache.update(key, value, i)
                for x, old in zip(found, before[i], strict=True):
                    assert torch.equal(x, torch.cat((old, old[:, :, -1:]), 2))
            assert put.call_count == len(last)
        for wrong in (torch.zeros(rows, 2, 1, 8), torch.zeros(rows, 1, 1, 16)):
            with pytest.raises(InvalidRangeError, match="put: "):
                cache.update(torch.zeros(rows, 2, 1, 16), wrong, 0)
            cache.crop(-1)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_narrow_models_are_stored_as_they_are(self, dtype: torch.dtype) -> None:
        made = copy.deepcopy(hf.model("gemma3")).to(dtype)
        expected = hf.MODES["left padding"]("gemma3", made, None)
        cache = HFCache(made.config, capacity=64, lookback=2)
        assert hf.MODES["left padding"]("gemma3", made, cache).distance(expected) == 0.0
        assert cache.layers[0].keys.dtype is dtype

    @pytest.mark.parametrize(
        ("dtype", "most", "bits"),
        [
            (ml.DType.F16, 0.02, 16),
            (ml.DType.Q8_0, 1.0, 8.5),
            (ml.DType.Q4_0, 8.0, 4.5),
            ((torch.float16, "F8_E4M3"), 1.0, (16 + 9) / 2),
            ("AFFINE8_32/Q4_0", 8.0, (10 + 4.5) / 2),
        ],
    )
    def test_smaller_storage_on_sliding_layers_too(self, dtype: Any, most: float, bits: float) -> None:
        made, ids = hf.model("gemma3", head_dim=32), hf.tokens(2, 30)
        plain, small = (HFCache(made.config, capacity=64, lookback=2, dtype=one) for one in (None, dtype))
        expected = [hf.feed(made, plain, ids[:, i : i + 6]) for i in range(0, 30, 6)]
        found = [hf.feed(made, small, ids[:, i : i + 6]) for i in range(0, 30, 6)]
        distance = float((torch.cat(found, 1) - torch.cat(expected, 1)).abs().max())
        assert 0 < distance < most
        assert small.nbytes * 32 == plain.nbytes * bits

    def test_a_dtype_of_torch_names_the_storage_too(self) -> None:
        made, sizes = hf.model("llama"), []
        for dtype in (torch.float16, ml.DType.F16, "float16"):
            cache = HFCache(made.config, capacity=64, dtype=dtype)
            hf.feed(made, cache, hf.tokens(1, 6))
            sizes.append(cache.nbytes)
        assert sizes == [2 * 2 * 64 * 2 * 16 * 2] * 3

    def test_conversations_share_prefixes_in_a_pair_of_formats(self) -> None:
        made, ids = hf.model("llama", head_dim=32), hf.tokens(1, 20)
        with HFPrefixCache(made, capacity=64, max_sequences=2, dtype=("Q8_0", "Q4_0")) as prefix:
            for cached in (0, 19):
                with prefix.begin(ids[0].tolist()) as session:
                    assert session.cached == cached
                    made(ids[:, cached:], past_key_values=session.cache)

    @pytest.mark.parametrize(
        ("name", "mode", "backend"),
        [
            *(("gemma3", "left padding", backend) for backend in ("numpy", "mlx", "torch")),
            ("qwen3-next", "padded beams", "numpy"),
        ],
    )
    def test_keys_and_states_on_another_backend(
        self, name: str, mode: str, backend: str, open_any: Any
    ) -> None:
        made = hf.model(name)
        with open_any(backend) as opened:
            cache = HFCache(made.config, backend=opened, capacity=64, lookback=2)
            assert hf.MODES[mode](name, made, cache).distance(hf.expected(name, mode)) == 0.0

    def test_states_need_memory_that_the_model_can_write(self, open_any: Any) -> None:
        made = hf.model("qwen3-next")
        with open_any("mlx") as opened:
            cache = HFCache(made.config, backend=opened, capacity=64)
            with pytest.raises(ml.NotSupportedError, match="in place"):
                hf.MODES["sampling"]("qwen3-next", made, cache)


class TestOverflow:
    @pytest.mark.parametrize(
        ("name", "kind", "told"),
        [
            (
                "llama",
                HFCache,
                "6 cells are needed and 4 are free.*capacity=12 cells, and padding takes cells",
            ),
            ("qwen3-next", HFCache, "6 cells are needed and 4 are free"),
            ("llama", HFStaticCache, "3 cells are needed and 2 are free"),
        ],
    )
    def test_says_what_is_asked_and_free_and_changes_nothing(self, name: str, kind: Any, told: str) -> None:
        made, ids = hf.model(name), hf.tokens(2, 20)
        cache = kind(made.config, capacity=12)
        hf.feed(made, cache, ids[:, :10])
        with pytest.raises(CacheFullError, match=told):
            hf.feed(made, cache, ids[:, 10:13])
        assert int(cache.get_seq_length()) == 10
        hf.close(hf.feed(made, cache, ids[:, 10:12]), hf.fresh(made, ids[:, :10], ids[:, 10:12]))

    def test_more_rows_than_sequences(self) -> None:
        made = hf.model("llama")
        cache = HFCache(made.config, max_sequences=2, capacity=32)
        with pytest.raises(InvalidSequenceError, match="3 sequences are needed and 2 are free"):
            hf.feed(made, cache, hf.tokens(3))
        hf.feed(made, cache, hf.tokens(2))
        with pytest.raises(InvalidRangeError, match="the batch has 1 rows"):
            hf.feed(made, cache, hf.tokens(1))

    def test_reserve_and_grow_make_room_for_all_that_is_held(self) -> None:
        for name, grow in [(name, grow) for name in EACH_KIND for grow in (False, True)]:
            made, ids = hf.model(name), hf.tokens(2, 30)
            cache = HFCache(made.config, capacity=14, lookback=2, grow=grow)
            hf.feed(made, cache, ids[:, :12])
            if not grow:
                cache.reserve(40)
            hf.close(hf.feed(made, cache, ids[:, 12:]), hf.fresh(made, ids[:, :12], ids[:, 12:]))

    @pytest.mark.parametrize("name", EACH_KIND)
    def test_growing_makes_room_for_what_shared_cells_and_for_what_is_restored(self, name: str) -> None:
        made, ids, more, store = hf.model(name), hf.tokens(1, 30), hf.tokens(1, 12, seed=4), MemoryStore()
        options: dict[str, Any] = {"lookback": 2, "grow": True}
        cache, loaded = (HFCache(made.config, capacity=n, max_sequences=4, **options) for n in (10, 4))
        hf.feed(made, cache, ids)
        cache.save(store, "a")
        loaded.load(store, "a")
        forks = [cache.fork() for _ in range(3)]
        forks[0].reset()
        hf.close(hf.feed(made, forks[0], more), hf.fresh(made, more))
        shared = HFCache(made.config, capacity=10, max_sequences=4, lookback=2)
        hf.feed(made, shared, ids)
        for rows in (shared, loaded):
            rows.batch_repeat_interleave(4)
        assert copy.deepcopy(shared).get_seq_length() == 30
        for held in (forks[1], copy.deepcopy(loaded)):
            batch = more.repeat(len(held.rows.sequences), 1)
            hf.close(hf.feed(made, held, batch), hf.fresh(made, ids.repeat(len(batch), 1), batch))


class TestGoingBack:
    @pytest.mark.parametrize("name", ["gemma3", "llama4"])
    def test_crop_to_a_position(self, name: str) -> None:
        made, ids, other = hf.model(name), hf.tokens(2, 24), hf.tokens(2, 6, seed=9)
        cache = HFCache(made.config, capacity=64, lookback=8)
        hf.feed(made, cache, ids[:, :12])
        for i in range(12, 24):
            hf.feed(made, cache, ids[:, i : i + 1])
        cache.crop(18)
        assert cache.get_seq_length() == 18
        hf.close(hf.feed(made, cache, other), hf.fresh(made, ids[:, :18], other))
        cache.crop(-6)
        hf.close(hf.feed(made, cache, ids[:, 18:]), hf.fresh(made, ids[:, :18], ids[:, 18:]))

    def test_a_window_that_has_forgotten_refuses(self) -> None:
        made, ids = hf.model("gemma3"), hf.tokens(2, 30)
        cache = HFCache(made.config, capacity=64, lookback=3)
        for i in range(30):
            hf.feed(made, cache, ids[:, i : i + 1])
        with pytest.raises(NotSupportedError, match=r"no longer have.*lookback=3"):
            cache.crop(20)
        assert cache.get_seq_length() == 30
        cache.crop(27)
        hf.close(hf.feed(made, cache, ids[:, 27:]), hf.fresh(made, ids[:, :27], ids[:, 27:]))

    def test_what_was_not_recorded_is_refused_and_nothing_is_lost(self) -> None:
        made, ids = hf.model("gemma3"), hf.tokens(1, 20)
        cache = HFCache(made.config, capacity=64, lookback=2)
        hf.feed(made, cache, ids)
        cache.activate_past_recording()
        with pytest.raises(NotSupportedError, match="lookback=2"):
            cache.crop(9)
        new = hf.tokens(1, 2, seed=3)
        hf.close(hf.feed(made, cache, new), hf.fresh(made, ids, new))

    @pytest.mark.parametrize("lookback", [0, 2])
    def test_of_several_recorded_passes_the_first_is_taken_back_as_far_as_windows_keep(
        self, lookback: int
    ) -> None:
        made, ids = hf.model("gemma3"), hf.tokens(1, 30)
        for length in range(15, 23):
            cache = HFCache(made.config, capacity=64, lookback=lookback)
            cache.activate_past_recording()
            hf.feed(made, cache, ids[:, :15])
            cache.crop(0)
            for part in (slice(15, 20), slice(20, 21), slice(21, 24)):
                hf.feed(made, cache, ids[:, part])
            if length < 20 - lookback:
                with pytest.raises(NotSupportedError, match="no longer have"):
                    cache.crop(length)
            else:
                cache.crop(length)
                hf.close(hf.feed(made, cache, ids[:, length:]), hf.feed(made, None, ids)[:, length:])

    def test_a_prefill_longer_than_a_window_leaves_no_hole_to_go_back_to(self) -> None:
        made, ids = hf.model("gemma3"), hf.tokens(1, 40)
        cache = HFCache(made.config, capacity=64, lookback=8)
        hf.feed(made, cache, ids[:, :20])
        hf.feed(made, cache, ids[:, 20:37])  # longer than the 15 tokens that are kept
        with pytest.raises(NotSupportedError):
            cache.crop(25)
        cache.crop(30)
        hf.close(hf.feed(made, cache, ids[:, 30:]), hf.fresh(made, ids[:, :30], ids[:, 30:]))

    def test_recurrent_states_go_back_to_checkpoints_or_refuse(self) -> None:
        made, ids = hf.model("qwen3-next"), hf.tokens(2, 30)
        cache = HFCache(made.config, capacity=64)
        hf.feed(made, cache, ids[:, :12])
        cache.checkpoint()
        for i in range(12, 20):
            hf.feed(made, cache, ids[:, i : i + 1])
        with pytest.raises(NotSupportedError, match=r"can go back to \[12, 20\] and 0 only"):
            cache.crop(16)
        steps = [ids[:, i : i + 1] for i in range(12, 20)]
        hf.close(hf.feed(made, cache, ids[:, 20:22]), hf.fresh(made, ids[:, :12], *steps, ids[:, 20:22]))
        cache.crop(12)
        hf.close(hf.feed(made, cache, ids[:, 12:]), hf.fresh(made, ids[:, :12], ids[:, 12:]))

    def test_to_the_beginning_and_another_batch(self) -> None:
        for name in ("gemma3", "qwen3-next", "t5"):
            made = hf.model(name)
            cache = HFCache(made.config, max_sequences=3, capacity=64)
            for rows in (1, 3):
                expected = hf.generate(made, hf.inputs(name, rows), max_new_tokens=4)
                found = hf.generate(made, hf.inputs(name, rows), cache, max_new_tokens=4)
                assert found.distance(expected) == 0.0
                cache.reset()
                assert cache.get_seq_length() == 0

    @pytest.mark.parametrize("name", ATTENTION)
    @pytest.mark.parametrize("layer", [0, 1])
    def test_remove_from_the_middle(self, name: str, layer: int) -> None:
        """In a model of one layer, what is left is as if the rest had never been there."""
        types = {"gemma3": "layer_types", "gpt-oss": "layer_types", "llama4": "layer_types"}
        changes: dict[str, Any] = {"num_hidden_layers": 1}
        if name in types:
            local = "chunked_attention" if name == "llama4" else "sliding_attention"
            changes["layer_types"] = ((local, "full_attention")[layer],)
        if name == "llama4":
            changes["no_rope_layers"] = (1 - layer,)
        made, ids = hf.model(name, **changes), hf.tokens(2, 30)
        cache = HFCache(made.config, capacity=64, lookback=24, shift=rope_shift(made.config))
        hf.feed(made, cache, ids[:, :20])
        cache.remove(14, 18)
        assert cache.get_seq_length() == 16
        left = torch.cat((ids[:, :14], ids[:, 18:]), 1)
        hf.close(hf.feed(made, cache, ids[:, 20:]), hf.fresh(made, left[:, :16], left[:, 16:]))

    @pytest.mark.parametrize("kept", ["", "snapshot", "reset", "store", "fork", "copy"])
    def test_positions_and_masks_of_before_a_removal_are_refused(self, kept: str) -> None:
        """``generate`` counts positions by its mask, a loop of one's own hides columns by it."""
        made, ids, store = hf.model("llama"), hf.tokens(2, 30), MemoryStore()
        cache = HFCache(made.config, max_sequences=6, capacity=64, shift=rope_shift(made.config))
        hf.feed(made, cache, ids[:, :29])
        cache.remove(5, 15)
        snapshot, removed = cache.snapshot(), cache
        if kept == "reset":
            cache.reset()
        elif kept in ("fork", "copy"):
            cache = cache.fork() if kept == "fork" else copy.deepcopy(cache)
        elif kept:
            cache = HFCache(made.config, max_sequences=4, capacity=64, shift=rope_shift(made.config))
        if kept == "store":
            assert removed.save(store, "removed")
            assert cache.load(store, "removed")
        elif kept in ("snapshot", "reset"):
            cache.restore(snapshot)
        before, mask = cache.fork(), torch.ones(2, 30)
        with pytest.raises(
            InvalidRangeError, match=r"position 29 for 1 new tokens after 19 .*10 were removed"
        ):
            hf.generate(made, {"input_ids": ids[:, 29:], "attention_mask": mask}, cache)
        mask[0, :3] = 0
        with pytest.raises(InvalidRangeError, match=r"30 columns for 1 new tokens after 19 .*must have 20"):
            made(ids[:, 29:], attention_mask=mask, cache=cache)
        given = {"input_ids": ids[:, 29:], "attention_mask": torch.ones(2, 20)}
        found = hf.generate(made, given, cache, max_new_tokens=1)
        hf.close(found.logits[0], hf.feed(made, before, ids[:, 29:])[:, -1])

    @pytest.mark.parametrize("kind", [HFCache, HFStaticCache])
    def test_a_pass_that_failed_is_noticed_and_taken_back(self, kind: Any) -> None:
        made, ids = hf.model("gemma3"), hf.tokens(2, 20)
        cache = kind(made.config, capacity=32)
        hf.feed(made, cache, ids[:, :10])
        with hf.failing(made.model.layers[1].self_attn):
            hf.feed(made, cache, ids[:, 10:13])
        for _ in range(2):
            with pytest.raises(OrderError, match=r"crop\(-3\)"):
                hf.feed(made, cache, ids[:, 13:14])
        with pytest.raises((OrderError, InvalidRangeError)):
            cache.crop(12)
        cache.crop(-3)
        hf.close(hf.feed(made, cache, ids[:, 10:]), hf.fresh(made, ids[:, :10], ids[:, 10:]))

    @pytest.mark.parametrize("layer", [1, -1])
    @pytest.mark.parametrize("name", ["llama", "gemma3", "llama4", "qwen3-next"])
    def test_rewinding_takes_back_a_pass_that_failed(self, name: str, layer: int) -> None:
        """States go back to a snapshot inside, as some layers have gone on."""
        made, ids = hf.model(name), hf.tokens(2, 20)
        cache = HFCache(made.config, capacity=32, interval=4)
        for part in ids[:, :10].split(5, 1):
            hf.feed(made, cache, part)
        with hf.failing(made.model.layers[layer].mlp if name != "llama4" else made.model.layers[layer]):
            hf.feed(made, cache, ids[:, 10:13])
        assert cache.rewind(10) == cache.get_seq_length() == 10
        hf.close(hf.feed(made, cache, ids[:, 10:]), hf.fresh(made, ids[:, :10], ids[:, 10:]))

    @pytest.mark.parametrize("kind", [HFCache, HFStaticCache])
    def test_a_first_pass_that_failed_is_noticed_and_forgotten(self, kind: Any) -> None:
        made, ids = hf.model("gemma3"), hf.tokens(2, 20)
        cache = kind(made.config, capacity=32)
        for _ in range(2):
            with hf.failing(made.model.layers[1].self_attn):
                hf.feed(made, cache, ids[:, :3])
            with pytest.raises(OrderError, match=r"reset\(\)"):
                hf.feed(made, cache, ids[:, 3:5])
            cache.reset()
            hf.close(hf.feed(made, cache, ids), hf.fresh(made, ids))
            cache.reset()

    def test_keys_that_could_not_be_stored_are_not_taken_for_stored(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made, ids = hf.model("llama", num_hidden_layers=1), hf.tokens(2, 20)
        cache = HFCache(made.config, capacity=32)
        hf.feed(made, cache, ids[:, :10])
        with monkeypatch.context() as patch:
            patch.setattr(cache.rows.pool.family.all, "put", mock.Mock(side_effect=ml.DeviceError))
            cache.rows.pool.views.clear()
            with pytest.raises(ml.DeviceError):
                hf.feed(made, cache, ids[:, 10:13])
        assert cache.get_seq_length() == 10
        with pytest.raises(InvalidRangeError, match="puts 1 tokens of 2 rows, in a pass of 3"):
            hf.feed(made, cache, ids[:, 10:11])
        hf.close(hf.feed(made, cache, ids[:, 10:13]), hf.fresh(made, ids[:, :10], ids[:, 10:13]))


class TestSharing:
    @pytest.mark.parametrize("name", EACH_KIND)
    def test_forks_go_their_own_ways(self, name: str) -> None:
        made, ids = hf.model(name), hf.tokens(2, 16)
        ways = [hf.tokens(2, 12, seed=seed) for seed in (1, 2, 3)]
        cache = HFCache(made.config, max_sequences=6, capacity=40, lookback=2)
        hf.feed(made, cache, ids)
        forks = [cache, cache.fork(), cache.fork()]
        parts = (slice(0, 1), slice(1, 2), slice(2, 9), slice(9, 12))
        for part in parts:
            for fork, way in zip(forks, ways, strict=True):
                found = hf.feed(made, fork, way[:, part])
                before = [way[:, one] for one in parts if one.start <= part.start]
                hf.close(found, hf.fresh(made, ids, *before))

    def test_forks_and_beams_share_cells(self) -> None:
        made = hf.model("llama")
        cache = HFCache(made.config, max_sequences=4, capacity=30)
        hf.feed(made, cache, hf.tokens(1, 20))
        free = cache.rows.pool.family.all.free_cells
        forks = [cache.fork() for _ in range(3)]
        assert cache.rows.pool.family.all.free_cells == free
        with pytest.raises(InvalidSequenceError):
            cache.fork()
        forks[0].reset()
        cache.fork()

    def test_one_pass_at_a_time(self) -> None:
        made, ids = hf.model("llama"), hf.tokens(1)
        cache = HFCache(made.config, max_sequences=2, capacity=32)
        hf.feed(made, cache, ids)
        fork, keys = cache.fork(), torch.zeros(1, 2, 1, 16)
        cache.update(keys, keys, 0)
        with pytest.raises(OrderError, match="did not reach all layers"):
            cache.fork()
        fork.update(keys, keys, 0)
        with pytest.raises(ml.MLError, match="one forward pass at a time"):
            cache.update(keys, keys, 1)

    def test_rows_are_repeated_and_selected(self) -> None:
        for name in EACH_KIND:
            made, ids = hf.model(name), hf.tokens(2, 12)
            more = hf.tokens(3, 5, seed=4)
            cache = HFCache(made.config, max_sequences=6, capacity=20, lookback=2)
            hf.feed(made, cache, ids)
            cache.batch_repeat_interleave(3)
            cache.batch_select_indices(torch.tensor([5, 0, 3]))
            hf.close(hf.feed(made, cache, more), hf.fresh(made, ids[[1, 0, 1]], more))

    def test_rows_are_selected_by_a_tensor_a_mask_or_a_sequence(self) -> None:
        made, held = hf.model("llama"), []
        for chosen in (torch.tensor([0, 2]), torch.tensor([True, False, True]), (0, 2), [0, 2]):
            cache = HFCache(made.config, max_sequences=3, capacity=32)
            hf.feed(made, cache, hf.tokens(3))
            cache.batch_select_indices(chosen)
            held.append(cache.layers[0].keys)
        assert held[0].shape[0] == 2
        assert all(torch.equal(keys, held[0]) for keys in held)

    @pytest.mark.parametrize("name", [*EACH_KIND, "gpt-oss", "t5", "whisper"])
    def test_snapshots_and_stores(self, name: str) -> None:
        """Back to an earlier turn; into a second cache; through a store into a third."""
        made, batch = hf.model(name), hf.inputs(name, 2)
        cache = HFCache(made.config, max_sequences=4, capacity=40, lookback=2)
        hf.generate(made, batch, cache, max_new_tokens=4)
        snapshot, store = cache.snapshot(), MemoryStore()
        length = cache.get_seq_length()
        assert cache.save(store, "turn")
        extra = {"encoder_outputs": _encoded(made, batch)} if made.config.is_encoder_decoder else {}
        more = hf.tokens(2, 6, seed=5)

        def carry_on(held: HFCache) -> torch.Tensor:
            assert held.get_seq_length() == length
            key = "decoder_input_ids" if extra else "input_ids"
            with torch.no_grad():
                logits: torch.Tensor = made(**{key: more}, past_key_values=held, **extra).logits
            return logits

        expected = carry_on(cache)
        cache.restore(snapshot)
        second, third = (HFCache(made.config, capacity=40, lookback=2) for _ in range(2))
        second.restore(snapshot)
        assert not third.load(store, "another")
        assert third.load(store, "turn")
        for held in (cache, second, third):
            assert torch.equal(carry_on(held), expected)

    @pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in EACH_KIND), ("gemma3", WINDOWS)])
    def test_a_loaded_cache_goes_back_to_snapshots_inside(self, name: str, options: dict[str, Any]) -> None:
        """A prompt that leaves the saved one computes its own tokens, and less than an interval before."""
        made = hf.model(name, max_position_embeddings=4096, **options)
        ids, new = hf.tokens(2, 2000), hf.tokens(2, 3, seed=5)
        cache, store = HFCache(made.config, capacity=2048, lookback=0, interval=500), MemoryStore()
        for part in ids.split(250, 1):
            hf.feed(made, cache, part)
        assert cache.save(store, "all")
        assert cache.save(store, "one", inside=_inside(cache.snapshot()) // 3)
        assert cache.save(store, "none", inside=0)
        anywhere = name == "llama4"  # which keeps all tokens
        for key, leaves, reached in [
            *(("all", at, at - at % 500) for at in (1990, 1500, 600)),
            ("one", 1990, 1000), ("one", 600, 0), ("none", 1990, 0),
        ]:  # fmt: skip
            loaded = HFCache(made.config, capacity=2048, lookback=0)
            assert loaded.load(store, key)
            assert loaded.rewind(leaves) == loaded.get_seq_length() == (leaves if anywhere else reached)
            if key == "all":
                rest = torch.cat((ids[:, loaded.get_seq_length() : leaves], new), 1)
                logits = hf.feed(made, loaded, rest)[:, -new.shape[1] :]
                hf.close(logits, hf.fresh(made, ids[:, :leaves], new))

    @pytest.mark.parametrize("name", ["gemma3", "qwen3-next"])
    def test_snapshots_inside_follow_their_rows(self, name: str) -> None:
        made, ids, new = hf.model(name), hf.tokens(3, 40), hf.tokens(2, 3, seed=5)
        cache = HFCache(made.config, capacity=64, max_sequences=5, lookback=0, interval=8)
        for part in ids.split(10, 1):
            hf.feed(made, cache, part)
        cache.batch_select_indices([2, 0])
        twin = cache.fork()
        assert (cache.rewind(29), twin.rewind(31)) == (20, 30)
        hf.close(hf.feed(made, cache, new), hf.fresh(made, ids[[2, 0], :20], new))
        hf.close(hf.feed(made, twin, new), hf.fresh(made, ids[[2, 0], :30], new))
        assert cache.rewind(19) == 10  # what was computed since is gone
        hf.close(hf.feed(made, cache, new), hf.fresh(made, ids[[2, 0], :10], new))
        with pytest.raises(InvalidRangeError, match="rewind: to 14; the cache has 13 tokens"):
            cache.rewind(14)

    @pytest.mark.parametrize(("name", "options"), [("gemma3", {}), ("gemma3", WINDOWS), ("qwen3-next", {})])
    def test_a_conversation_is_saved_with_the_snapshots_of_its_prefix_cache(
        self, name: str, options: dict[str, Any]
    ) -> None:
        made, ids, store = hf.model(name, **options), hf.tokens(1, 41), MemoryStore()
        with HFPrefixCache(made, capacity=64, interval=8) as prefix, prefix.begin(ids[0].tolist()) as session:
            session.prefill()
            session.cache.save(store, "chat", inside=1 << 30)
        loaded = HFCache(made.config, capacity=64, lookback=0)
        assert loaded.load(store, "chat")
        assert [loaded.rewind(at) for at in (40, 39, 20)] == [40, 32, 16]
        hf.close(hf.feed(made, loaded, ids[:, 16:]), hf.fresh(made, ids[:, :16], ids[:, 16:]))

    def test_an_entry_that_does_not_count_removed_tokens_is_loaded(self) -> None:
        made, ids, store = hf.model("llama"), hf.tokens(2, 20), MemoryStore()
        cache, other = (HFCache(made.config, capacity=32) for _ in range(2))
        hf.feed(made, cache, ids[:, :9])
        cache.save(store, "new")
        entry = get_snapshot(store, "new")
        assert entry is not None
        meta = {name: value for name, value in entry.meta.items() if name not in ("removed", "interior")}
        put_snapshot(store, "earlier", SerializedSnapshot(meta, entry.arrays))
        assert other.load(store, "earlier")
        hf.close(hf.feed(made, other, ids[:, 9:]), hf.fresh(made, ids[:, :9], ids[:, 9:]))

    def test_a_snapshot_of_another_model_is_refused_and_nothing_lost(self) -> None:
        made, ids = hf.model("llama"), hf.tokens(1, 20)
        cache = HFCache(made.config, capacity=32)
        hf.feed(made, cache, ids[:, :12])
        other = HFCache(hf.model("llama", head_dim=32).config, capacity=32)
        hf.feed(hf.model("llama", head_dim=32), other, ids)
        with pytest.raises(InvalidRangeError):
            cache.restore(other.snapshot())
        fresh, gemma, store = HFCache(made.config), HFCache(hf.model("gemma3").config), MemoryStore()
        hf.feed(hf.model("gemma3"), gemma, ids)
        gemma.save(store, "gemma")
        with pytest.raises(InvalidRangeError):
            fresh.load(store, "gemma")
        hf.feed(made, fresh, hf.tokens(2))  # the first batch still says how many rows there are
        hf.close(hf.feed(made, cache, ids[:, 12:]), hf.fresh(made, ids[:, :12], ids[:, 12:]))


def _inside(snapshot: Any) -> int:
    """Bytes of the snapshots inside."""
    return sum(one.nbytes for one in snapshot.interior)


def _encoded(made: Any, batch: dict[str, torch.Tensor]) -> Any:
    with torch.no_grad():
        return made.get_encoder()(**batch)


class TestInstalling:
    @pytest.fixture(autouse=True)
    def _clean(self) -> Iterator[None]:
        yield
        uninstall()

    def test_a_chat_grows_between_calls(self) -> None:
        made, ids = hf.model("gemma3"), hf.tokens(2)
        theirs = ours = None
        for _ in range(3):
            batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            expected = hf.generate(made, batch, theirs)
            with install(lookback=2):
                found = hf.generate(made, batch, ours)
            assert found.distance(expected) == 0.0
            theirs, ours = expected.cache, found.cache
            ids = torch.cat((expected.sequences, hf.tokens(2, 20)), 1)
        assert isinstance(ours, HFCache)

    def test_static_where_static_is_asked_for_and_the_callers_where_one_is_given(self) -> None:
        made = hf.model("llama")
        batch = hf.inputs("llama", 2, 3)
        expected = hf.generate(made, batch, cache_implementation="static")
        given = transformers.DynamicCache(config=made.config)
        with install():
            found = hf.generate(made, batch, cache_implementation="static")
            assert hf.generate(made, batch, given).cache is given
        assert isinstance(found.cache, HFStaticCache)
        assert found.distance(expected) == 0.0

    def test_what_it_cannot_serve_keeps_its_own_cache(self, caplog: pytest.LogCaptureFixture) -> None:
        case = census.Case("openai-gpt")
        expected = case.generate(case.batch(1))
        with install(), caplog.at_level(logging.WARNING, logger="kvcache.transformers"):
            for _ in range(2):
                assert case.generate(case.batch(1)).agrees(expected)
        (told,) = caplog.messages
        assert "OpenAIGPTLMHeadModel keeps transformers' own cache" in told

    def test_twice_is_an_error_and_uninstalling_twice_is_none(self) -> None:
        install()
        with pytest.raises(OrderError, match="uninstall"):
            install()
        uninstall()
        uninstall()


@pytest.mark.parametrize(
    ("kind", "rows", "options", "ends"),
    [
        (HFCache, 1, {"capacity": 16}, 17),  # the last token is not stored
        (HFCache, 2, {"capacity": 16, "max_sequences": 3}, 25),
        (HFCache, 1, {"capacity": 16, "grow": True}, 30),
        (HFStaticCache, 2, {"capacity": 16}, 17),
    ],
)
def test_an_answer_ends_where_the_room_of_a_given_cache_ends(
    kind: Any, rows: int, options: dict[str, Any], ends: int, caplog: pytest.LogCaptureFixture
) -> None:
    made, ids = hf.model("llama"), hf.tokens(rows, 10)
    right = made.generate(ids, do_sample=False, max_new_tokens=20)
    cache = kind(made.config, **options)
    found = made.generate(ids, cache=cache, do_sample=False, max_new_tokens=20)
    assert torch.equal(found, right[:, :ends])
    assert caplog.text.count(f"may have 30 tokens, but will end after {ends}") == (ends < 30)
    with pytest.raises(CacheFullError) if ends < 30 else contextlib.nullcontext():
        made.generate(found, cache=cache, do_sample=False, max_new_tokens=20)


def test_positions_in_the_keys_of_a_layer_are_those_of_the_mask() -> None:
    """``keys`` shows what the next token may see, at most."""
    made = hf.model("gemma3")
    cache = HFCache(made.config, capacity=64, lookback=2)
    assert cache.layers[0].keys is None
    hf.feed(made, cache, hf.tokens(2, 20))
    assert cache.layers[0].keys.shape == (2, 2, hf.WINDOW - 1, 16)
    assert cache.layers[1].values.shape == (2, 2, 20, 16)
    assert cache.get_mask_sizes(3, 0) == (hf.WINDOW + 2, 13)
    assert cache.get_mask_sizes(3, 1) == (23, 0)
    assert np.array_equal(cache.is_sliding, [True, False])
