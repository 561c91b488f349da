"""What mlx-lm asks of entries besides storing, entries of other kinds, and the page about it all."""

from __future__ import annotations

import copy
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")

import mlx.core as mx
import mlx_lm
from mlx_lm import server
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import QuantizedKVCache, save_prompt_cache
from mlx_lm.models.cache import make_prompt_cache as own_prompt_cache

import kvcache
from benchmarks.census import mlx_lm_types
from kvcache import NotSupportedError
from kvcache.integrations.mlx_lm import (
    Attention,
    CachePool,
    MLXPrefixCache,
    adopt,
    layers_of,
    make_prompt_cache,
    rewind,
)

from ...rigs import mlx_lm_models as models


def marked(*values: float) -> mx.array:
    """K or V of one row and one head: a token for each value."""
    return mx.array([[[[float(value)] * 4 for value in values]]])


def entries_of(layer: Attention, **options: Any) -> list[Any]:
    """Those of two prompt caches of one pool for a layer."""
    pool = CachePool([layer], capacity=16, max_sequences=2, **options)
    return [pool.make_prompt_cache()[0] for _ in range(2)]


class TestKeysAndValues:
    def test_between_passes_are_what_is_stored_in_the_order_of_positions(self) -> None:
        one, other = entries_of(Attention())
        one.update_and_fetch(marked(1, 2), marked(5, 6))
        other.update_and_fetch(marked(3), marked(4))
        keys, values = one.keys_and_values()
        assert keys[0, 0, :, 0].tolist() == [1, 2]
        assert values[0, 0, :, 0].tolist() == [5, 6]

    def test_of_rows_of_several_lengths_are_refused(self) -> None:
        one, other = entries_of(Attention())
        one.update_and_fetch(marked(1, 2), marked(1, 2))
        other.update_and_fetch(marked(3), marked(3))
        with pytest.raises(kvcache.OrderError, match="different lengths"):
            one.merge([one, other]).keys_and_values()

    def test_in_a_pass_that_was_interrupted_are_refused_where_its_mask_names_another_order(self) -> None:
        one, other = entries_of(Attention(window=2), rollback=4)
        one.update_and_fetch(marked(1, 2, 3), marked(1, 2, 3))
        assert isinstance(one.make_mask(2, window_size=2), mx.array)
        one.update_and_fetch(marked(4, 5), marked(4, 5))
        other.update_and_fetch(marked(6), marked(6))
        with pytest.raises(kvcache.OrderError, match="not in the order of positions"):
            one.keys_and_values()


class TestAnEntryThatIsNeverUsed:
    def test_takes_part_in_what_the_others_do(self) -> None:
        pool = CachePool(
            [Attention(used=False), Attention(), Attention(used=False)], capacity=16, max_sequences=4
        )
        entries, length = pool.make_prompt_cache(), 0
        for step, asked in enumerate((entries, entries[::-1], entries[1:], entries[:1], entries[2:])):
            for entry in asked:
                mask = entry.make_mask(2, return_array=True)
                assert mask.tolist() == [[i <= length + j for i in range(length + 2)] for j in range(2)]
                assert entry.offset == length
            keys, _ = entries[1].update_and_fetch(marked(step, step), marked(step, step))
            length += 2
            assert keys.shape[2] == length
            assert [entry.offset for entry in entries[:: 1 - 2 * (step % 2)]] == [length] * 3
        for order in (entries, entries[::-1]):
            assert [entry.trim(1) for entry in order] == [1] * 3
        assert [entry.offset for entry in entries] == [length - 2] * 3
        batch = [entry.merge([entry, entry]) for entry in entries]
        batch[1].update_and_fetch(mx.zeros((2, 1, 1, 4)), mx.zeros((2, 1, 1, 4)))
        for entry in batch:
            entry.filter([1])
        assert [entry.offset.tolist() for entry in batch] == [[length - 1]] * 3
        assert [entry.extract(0).keys is None for entry in batch] == [True, False, True]

    def test_raises_where_it_is_used_nevertheless(self) -> None:
        (entry,) = CachePool([Attention(used=False)], capacity=16).make_prompt_cache()
        with pytest.raises(kvcache.OrderError, match="layer 0, which the model did not use"):
            entry.update_and_fetch(marked(1), marked(1))


class TestQuantizedByMlxLm:
    @pytest.mark.parametrize("start", [0, 5])
    @pytest.mark.parametrize("make", [models.make_llama, models.make_llama4, models.make_qwen])
    def test_kv_bits_gives_the_logits_of_mlx_lms_own_quantized_cache(self, make: Any, start: int) -> None:
        """Layers that mlx-lm leaves as they are (chunks, states) go on in the pool, past their chunks."""
        model = make(head_dim=32)
        quantized = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": start, "prefill_step_size": 4}
        ours, theirs = (
            list(generate_step(mx.arange(3, 12), model, max_tokens=18, prompt_cache=each, **quantized))
            for each in (make_prompt_cache(model, capacity=64), own_prompt_cache(model))
        )
        models.say_the_same(ours, theirs, 1e-5)

    def test_an_entry_is_read_once_and_left_as_it_is(self) -> None:
        entry = entries_of(Attention())[0]
        x = mx.arange(64, dtype=mx.float32).reshape(1, 1, 2, 32)
        entry.update_and_fetch(x, x)
        made = entry.to_quantized(group_size=32, bits=8)
        assert isinstance(made, QuantizedKVCache)
        assert made.offset == 2
        read = mx.dequantize(*made.keys, group_size=32, bits=8)
        assert float(mx.abs(read - x).max()) <= 0.5 * 31 / 255 + 1e-5  # half a step of a group's range
        assert entry.offset == 2
        assert mx.array_equal(entry.keys, x)

    def test_models_with_sliding_layers_are_refused_before_any_layer_is_converted(self) -> None:
        prompt_cache = make_prompt_cache(models.shared("gemma"), capacity=32)
        full = next(entry for entry in prompt_cache if type(entry).__name__ == "KVCache")
        with pytest.raises(kvcache.NotSupportedError, match="dtype="):
            full.to_quantized(group_size=32, bits=8)

    def test_batches_are_refused(self) -> None:
        entries = entries_of(Attention())
        with pytest.raises(kvcache.NotSupportedError, match="batch"):
            entries[0].merge(entries).to_quantized()


def test_rows_are_told_by_their_numbers() -> None:
    entry = CachePool([Attention()], capacity=16, max_sequences=3).make_prompt_cache()[0]
    x = mx.arange(3, dtype=mx.float32).reshape(-1, 1, 1, 1) * mx.ones((1, 1, 2, 4))
    entry.update_and_fetch(x, x)
    assert entry.extract(-1).keys[0, 0, 0, 0] == 2
    entry.filter(mx.array([2, -3]))
    assert entry.keys[:, 0, 0, 0].tolist() == [2, 0]


def test_a_row_of_a_session_is_not_doubled() -> None:
    with MLXPrefixCache(models.shared("llama"), capacity=64) as cache, cache.begin([5, 6, 7]) as session:
        session.prefill()
        with pytest.raises(NotSupportedError, match=r"filter: .* has no copies"):
            session.prompt_cache[0].filter([0, 0])


def test_a_state_is_not_set_and_what_takes_one_over_is_named() -> None:
    for entry in make_prompt_cache(models.shared("qwen"), capacity=16):
        for call in (lambda e: type(e).from_state(e.state), lambda e: setattr(e, "state", e.state)):
            with pytest.raises(NotSupportedError, match=r"adopt\(prompt_cache, pool\)"):
                call(entry)


def test_a_loop_over_an_entry_of_states_ends_after_the_last() -> None:
    model = models.shared("qwen")
    entry = make_prompt_cache(model, capacity=16)[0]
    assert [*entry] == [None, None]
    with pytest.raises(IndexError, match="state 2 of layer 0, which has 2"):
        entry[2]


def test_an_entry_and_a_pool_show_what_they_hold() -> None:
    model = models.make_llama()
    pool = CachePool(model, capacity=32)
    cache = pool.make_prompt_cache()
    list(generate_step(mx.array([3, 4, 5]), model, max_tokens=2, prompt_cache=cache))
    assert repr(cache[1]) == "<KVCache of ml-kvcache, layer 1, tokens of each row: 5>"
    assert repr(pool).startswith("<CachePool, free sequences: 0; <CausalCache")


# DeepSeek-V4.1, whose entries hold a window, latents of groups of tokens, and the group that is open.


@pytest.fixture(scope="module")
def model() -> Any:
    return mlx_lm_types.build("deepseek_v41")


def feed(model: Any, prompt_cache: Any, tokens: list[int], *sizes: int) -> list[mx.array]:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    assert ends[-1] == len(tokens)
    parts = [tokens[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    return [model(mx.array([part]), cache=prompt_cache)[0] for part in parts]


def same(ours: list[mx.array], theirs: list[mx.array]) -> None:
    assert models.largest(ours, theirs) <= 1e-5


def test_layers_say_how_their_states_grow(model: Any) -> None:
    first, second, third, *_, last = layers_of(model, capacity=30)
    assert (first.names, first.shapes, first.capacity) == (("window",), ((7, 16),), None)
    assert first == last, "layers that read what another one compressed keep a window alone"
    assert second.names == ("window", "compress_kv", "index_k")
    assert second.shapes == ((7, 16), (30, 16), (30, 8)), "groups of one token"
    assert third.names == ("window", "compress_kv", "index_k", "pending_kv", "pending_gate")
    assert third.shapes == ((7, 16), (7, 16), (7, 8), (3, 16), (3, 16)), "groups of four"


def test_what_an_entry_shows_is_what_mlx_lms_own_shows(model: Any) -> None:
    ours, theirs = make_prompt_cache(model, capacity=40), own_prompt_cache(model)
    for size in (1, 2, 1, 5, 1, 1, 1, 4, 9):
        tokens = models.prompt_of(size, seed=size)
        same(*(feed(model, cache, tokens, size) for cache in (ours, theirs)))
        for mine, its in zip(ours, theirs, strict=True):
            assert (mine.offset, mine.window_size, mine.empty()) == (its.offset, its.window_size, False)
            assert len(mine.state) == len(its.state)
            for one, other in zip(mine.state, its.state, strict=True):
                if other is None or not other.size:
                    assert one is None or not one.size
                else:
                    assert models.largest([one], [other]) <= 1e-5


def test_a_copy_and_its_original_go_on_and_back_on_their_own(model: Any) -> None:
    pool = CachePool(model, capacity=40, max_sequences=2, checkpoint_interval=3, checkpoints=8)
    first, tokens = pool.make_prompt_cache(), models.prompt_of(24)
    feed(model, first, tokens[:12], 5, 7)
    other = copy.deepcopy(first)
    feed(model, other, models.prompt_of(9, seed=5), 4, 1, 1, 3)
    reached = rewind(other, 11)
    assert 0 < reached <= 11
    theirs = own_prompt_cache(model)
    feed(model, theirs, tokens[:12], 5, 7)
    same(*(feed(model, cache, tokens[12:], 1, 1, 10) for cache in (first, theirs)))
    feed(model, other, tokens[reached:], 24 - reached)
    rest = models.prompt_of(3, seed=8)
    same(feed(model, other, rest, 1, 2), feed(model, theirs, rest, 1, 2))


@pytest.mark.parametrize("sizes", [(3, 7), (1,) * 10])
def test_a_row_whose_first_pass_closes_no_group_is_whole(
    model: Any, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    pool = CachePool(model, capacity=40, max_sequences=2, checkpoint_interval=1)
    ours, theirs, tokens = pool.make_prompt_cache(), own_prompt_cache(model), models.prompt_of(10)
    for cache in (ours, theirs):
        feed(model, cache, tokens, *sizes)
    feed(model, ours, [5], 1)
    feed(model, pool.make_prompt_cache(), models.prompt_of(5), 5)
    save_prompt_cache(str(tmp_path / "kept.safetensors"), ours)
    assert rewind(ours, 10) == 10
    same(*(feed(model, cache, [6, 7], 1, 1) for cache in (ours, theirs)))


@pytest.mark.parametrize("count", [3, 12, 13])
def test_a_prompt_cache_of_mlx_lms_is_taken_over(model: Any, count: int) -> None:
    theirs, pool = own_prompt_cache(model), CachePool(model, capacity=40)
    feed(model, theirs, models.prompt_of(count), count)
    ours = adopt(theirs, pool)
    assert ours[0].offset == count
    rest = models.prompt_of(11, seed=2)
    same(feed(model, ours, rest, 1, 6, 1, 3), feed(model, theirs, rest, 1, 6, 1, 3))
    assert adopt(own_prompt_cache(model), CachePool(model, capacity=8))[0].empty()


@pytest.mark.parametrize("count", [25, 28])
def test_a_prompt_cache_longer_than_the_capacity_is_not_taken_over(model: Any, count: int) -> None:
    theirs, pool = own_prompt_cache(model), CachePool(model, capacity=24, max_sequences=3)
    feed(model, theirs, models.prompt_of(count), count)
    with pytest.raises(
        kvcache.CacheFullError, match=f"adopt: {count} cells .* 24 are free .* larger capacity"
    ):
        adopt(theirs, pool)
    assert pool.free_sequences == 3


def test_a_row_longer_than_its_capacity_is_refused_and_stays_as_it_was(model: Any) -> None:
    cache = CachePool(model, capacity=10, max_sequences=3).make_prompt_cache()
    theirs, tokens = own_prompt_cache(model), models.prompt_of(10)
    for one in (cache, theirs):
        feed(model, one, tokens[:8], 8)
    with pytest.raises(kvcache.CacheFullError, match=r"3 cells are needed and 2 are free .* larger capacity"):
        feed(model, cache, tokens[:3], 3)
    same(feed(model, cache, tokens[8:], 2), feed(model, theirs, tokens[8:], 2))


# docs/embedding-mlx-lm.md works as written: its code is run, in order, on models that mlx-lm loads.

PAGE = Path(__file__).resolve().parents[3] / "docs" / "embedding-mlx-lm.md"
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with "model" and "draft" as Hugging Face stores them, and a byte-level tokenizer."""
    for name, layers in (("model", 3), ("draft", 2)):
        made = make_model(num_hidden_layers=layers, rms_norm_eps=1e-6)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
        (made / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        made.rename(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_code_of_the_page_runs_and_says_what_mlx_lm_says(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "load", server.load)  # which the page replaces
    blocks = FENCE.findall(PAGE.read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    model, tokenizer, prompts = names["model"], names["tokenizer"], names["prompts"]
    plain = mlx_lm.generate(model, tokenizer, "Once upon", max_tokens=20)
    assert names["text"] == names["spoken"] == plain != ""
    assert names["batch"].texts == names["batch_again"].texts
    assert names["batch"].texts == mlx_lm.batch_generate(model, tokenizer, prompts, max_tokens=12).texts
    assert names["position"] == 6
    assert server.load("model")[0].make_cache()[0].rows.pool.max_sequences == 52
    assert all(cache[0].empty() for cache in names["caches"])  # what goes into a batch stays as it was
    responses = mlx_lm.stream_generate(model, tokenizer, "!", prompt_cache=names["story_again"], max_tokens=6)
    again = mlx_lm.stream_generate(model, tokenizer, "!", prompt_cache=names["story"], max_tokens=6)
    assert [x.token for x in responses] == [x.token for x in again]
    assert (folder / "story.safetensors").is_file()
    mx.clear_cache()


def test_the_page_names_every_option() -> None:
    text = PAGE.read_text(encoding="utf-8")
    options = set(inspect.signature(CachePool).parameters) - {"model", "backend"}
    assert [name for name in sorted(options) if f"`{name}`" not in text and f"{name}=" not in text] == []
