"""MLXPrefixCache: mlx-lm's own answers, from what conversations have in common, in memory and in stores."""

from __future__ import annotations

import copy
import itertools
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest

pytest.importorskip("mlx_lm")

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters, remove_lora_layers

import ml
from kvcache import (
    ClosedError,
    HostTier,
    InvalidRangeError,
    NotSupportedError,
    OrderError,
    PrefixOptions,
)
from kvcache.integrations.mlx_lm import MLXModel, MLXPrefixCache, adapters, rewind
from kvcache.prefix import worker
from kvcache.prefix.prefix_cache import SessionLimitError
from kvcache.stores import MemoryStore

from ...rigs import mlx_lm_models as models
from ..agent_sessions import check_that_what_only_a_closed_one_used_goes_first
from ..moving import moves

FIRST = models.prompt_of(30)
OPTIONS: dict[str, Any] = {
    "block_size": 8, "identity": {"model": "small"}, "options": PrefixOptions(interval=8),
}  # fmt: skip


def plain(name: str, tokens: list[int], count: int) -> list[int]:
    return models.greedy(models.shared(name), tokens, count, None)


def said(cache: MLXPrefixCache, tokens: list[int], count: int, **options: Any) -> list[int]:
    return [token for token, _ in cache.generate(tokens, max_tokens=count, prefill_step_size=7, **options)]


@pytest.fixture(params=models.MODELS)
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    return request.param


def test_turns_and_branches_say_what_they_say_without_it(name: str) -> None:
    with MLXPrefixCache(models.shared(name), capacity=128, **OPTIONS) as cache:
        answer = said(cache, FIRST, 9)
        assert answer == plain(name, FIRST, 9)
        turn = [*FIRST, *answer, *models.prompt_of(5, seed=2)]
        branch = [*FIRST[:24], *models.prompt_of(6, seed=3)]
        for prompt, least in ((turn, 38), (branch, 16), (turn, 38)):
            before = cache.prefix.stats.reused
            assert said(cache, prompt, 7) == plain(name, prompt, 7)
            assert cache.prefix.stats.reused - before >= least


def test_more_chats_in_turn_than_sequences_compute_what_is_new(name: str) -> None:
    chats = [models.prompt_of(30, seed=seed) for seed in range(4)]
    with MLXPrefixCache(models.shared(name), max_sequences=2, capacity=256, **OPTIONS) as cache:
        for turn in range(3):
            for i, tokens in enumerate(chats):
                before = cache.prefix.stats.reused
                answer = said(cache, tokens, 4)
                assert answer == plain(name, tokens, 4)
                computed = len(tokens) - (cache.prefix.stats.reused - before)
                assert computed == 30 if not turn else computed <= 21
                chats[i] = [*tokens, *answer, *models.prompt_of(20, seed=10 * turn + i)]


def test_rows_are_runs_of_cells_in_a_cache_full_of_conversations() -> None:
    """What others left in the way moves aside once in many tokens; a gather would copy all of them each."""
    with MLXPrefixCache(models.shared("llama"), max_sequences=2, capacity=400) as cache:
        table = cache.pool.cache.storage.table
        for turn in range(10):
            prompt, answer, scattered = models.prompt_of(150 - 7 * turn, seed=turn), [], 0
            for token, _ in cache.generate(prompt, max_tokens=90):
                answer.append(token)
                scattered += sum(not row.contiguous for _, row in table.occupied())
            assert answer == plain("llama", prompt, 90)
            assert scattered <= 4
        with cache.begin(models.prompt_of(150, seed=0)) as session:
            assert not session.cached, "the cache is full"


def test_answers_are_the_same_while_rows_move_all_the_time(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = moves(monkeypatch)
    with MLXPrefixCache(models.shared(name), max_sequences=2, capacity=100, **OPTIONS) as cache:
        chats = [models.prompt_of(60 + 3 * seed, seed=seed) for seed in range(4)]
        for turn in range(2):
            for i, tokens in enumerate(chats):
                answer = said(cache, tokens, 30)
                assert answer == plain(name, tokens, 30)
                chats[i] = [*tokens, *answer, *models.prompt_of(9, seed=10 * turn + i)]
    assert sum(moved) >= 10


def test_logits_processors_see_the_whole_prompt_whatever_of_it_is_reused() -> None:
    model = models.shared("llama")
    processors = make_logits_processors(repetition_penalty=1.5, repetition_context_size=64)
    steps = generate_step(mx.array(FIRST), model, max_tokens=9, logits_processors=processors)
    expected = [int(token) for token, _ in steps]
    assert expected != plain("llama", FIRST, 9)
    with MLXPrefixCache(model, capacity=128, **OPTIONS) as cache:
        assert said(cache, FIRST, 9, logits_processors=processors) == expected
        assert said(cache, FIRST, 9, logits_processors=processors) == expected
        assert cache.prefix.stats.reused


def test_progress_is_told_of_the_whole_prompt() -> None:
    model, told = models.shared("llama"), []
    options = {"max_tokens": 1, "prompt_progress_callback": lambda done, total: told.append((done, total))}
    list(generate_step(mx.array(FIRST), model, prefill_step_size=7, **options))
    expected, told[:] = [*told], []
    with MLXPrefixCache(model, capacity=128, budget=1 << 20) as cache:
        list(cache.generate(FIRST, prefill_step_size=7, **options))
        assert told == expected
        told.clear()
        list(cache.generate(FIRST, prefill_step_size=7, **options))
        assert told[0] == (29, 30)
        assert told[-1] == (30, 30)


def test_what_was_evicted_and_what_a_store_has_comes_back(name: str) -> None:
    store = MemoryStore()
    expected = plain(name, [*FIRST, 5], 6)
    with MLXPrefixCache(models.shared(name), capacity=128, tiers=[HostTier(), store], **OPTIONS) as cache:
        said(cache, FIRST, 4)
        cache.prefix.evict()
        assert said(cache, [*FIRST, 5], 6) == expected
        assert cache.prefix.stats.host >= 24
    with MLXPrefixCache(models.shared(name), capacity=128, tiers=[store], **OPTIONS) as cache:
        assert said(cache, [*FIRST, 5], 6) == expected
        assert cache.prefix.stats.store >= 24


def test_several_conversations_are_open_side_by_side(name: str) -> None:
    prompts = [[*FIRST[:20], *models.prompt_of(4, seed=i)] for i in (4, 5)]
    with MLXPrefixCache(models.shared(name), max_sequences=2, capacity=256, **OPTIONS) as cache:
        running = [cache.generate(prompt, max_tokens=8, prefill_step_size=7) for prompt in prompts]
        answers: list[list[int]] = [[], []]
        for _ in range(8):
            for answer, steps in zip(answers, running, strict=True):
                answer.append(next(steps)[0])
        with pytest.raises(SessionLimitError):
            cache.begin(FIRST)
        for steps in running:
            steps.close()
        assert answers == [plain(name, prompt, 8) for prompt in prompts]
        cache.begin(FIRST).close()


def test_who_stops_in_the_middle_keeps_what_was_said() -> None:
    with MLXPrefixCache(models.shared("llama"), capacity=128, **OPTIONS) as cache:
        whole = plain("llama", FIRST, 10)
        steps = cache.generate(FIRST, max_tokens=10)
        heard = [token for token, _ in itertools.islice(steps, 4)]
        steps.close()
        assert heard == whole[:4]
        with cache.begin([*FIRST, *heard, 1]) as session:
            assert session.cached == 34
        assert said(cache, [*FIRST, *heard], 6) == whole[4:]


def test_who_stops_after_the_cache_was_closed_is_not_bothered(name: str) -> None:
    with MLXPrefixCache(models.shared(name), capacity=64) as cache:
        steps = cache.generate(FIRST, max_tokens=9)
        next(steps)
    steps.close()
    with pytest.raises(StopIteration):
        next(steps)


def test_a_loop_of_ones_own_goes_on_from_the_session() -> None:
    model = models.shared("llama")
    with MLXPrefixCache(model, capacity=128, **OPTIONS) as cache:
        with cache.begin(FIRST) as session:
            token = session.prefill(11)
            assert token.tolist() == FIRST[-1:]
            logits = model(token[None], cache=session.prompt_cache)
            assert int(mx.argmax(logits[0, -1])) == plain("llama", FIRST, 1)[0]
        assert session.prompt_cache[0].offset == 0, "it is another's now"
        with cache.begin([*FIRST, 3]) as session:
            assert session.cached == 30


def test_prefill_evaluates_a_further_turn_too(name: str) -> None:
    model, turn, progress = models.shared(name), models.prompt_of(12, seed=5), Mock()
    with MLXPrefixCache(model, capacity=128, **OPTIONS) as cache:
        with cache.begin(FIRST) as session:
            steps = generate_step(session.prefill(), model, prompt_cache=session.prompt_cache, max_tokens=4)
            answer = [int(token) for token, _ in steps]
            session.extend([*answer, *turn])
            whole = [*FIRST, *answer, *turn]
            last = session.prefill(8, progress)
            assert [call.args for call in progress.call_args_list] == [(34, 46), (42, 46)]
            assert session.remaining == last.tolist() == turn[-1:]
            steps = generate_step(last, model, prompt_cache=session.prompt_cache)
            said_next = [int(token) for token, _ in itertools.islice(steps, 3)]
            assert said_next == plain(name, whole, 3)
            session.extend(said_next)
            assert session.prefill().tolist() == session.remaining == [], "all of it is evaluated"
        with pytest.raises(ClosedError):
            session.prefill()
        assert said(cache, [*whole, *said_next, 5], 6) == plain(name, [*whole, *said_next, 5], 6)


def test_parts_of_a_further_turn_end_where_a_snapshot_is_due() -> None:
    model, ends = models.shared("qwen"), []
    with MLXPrefixCache(model, capacity=128, **OPTIONS) as cache, cache.begin(FIRST[:10]) as session:
        session.extend(FIRST[10:])
        seq = session.prompt_cache[0].rows.claimed[0].seq
        cache.pool.cache.schedule_snapshots(seq, [13, 21])
        session.prefill(10, lambda done, _: ends.append(done))
        assert ends == [0, 8, 9, 13, 21]


@pytest.mark.parametrize("size", [0, 2.5])
def test_prefill_refuses_parts_of_no_tokens(size: Any) -> None:
    with MLXPrefixCache(models.shared("llama"), capacity=64) as cache, cache.begin(FIRST) as session:
        with pytest.raises(InvalidRangeError, match=f"prefill: size={size}"):
            session.prefill(size)
        assert session.remaining == FIRST


def test_after_an_error_the_prompt_that_was_evaluated_is_kept() -> None:
    with MLXPrefixCache(models.shared("llama"), capacity=128, **OPTIONS) as cache:
        with pytest.raises(RuntimeError, match="stop"), cache.begin(FIRST) as session:
            session.prefill()
            raise RuntimeError("stop")
        with cache.begin(FIRST) as session:
            assert session.cached == len(FIRST) - 1
            assert session.remaining == FIRST[-1:]


@pytest.mark.parametrize("at", [1, 3])
def test_a_part_of_a_prefill_that_fails_is_evaluated_by_the_next_call(name: str, at: int) -> None:
    model = models.MODELS[name]()
    layer = model.model.layers[1]
    failing = Mock(layer, wraps=layer, use_sliding=False, side_effect=[DEFAULT] * (at - 1) + [MemoryError])
    with MLXPrefixCache(model, capacity=128) as cache:
        with cache.begin(FIRST) as session:
            model.model.layers[1] = failing
            with pytest.raises(MemoryError):
                session.prefill(7)
            model.model.layers[1] = layer
            assert len(session.remaining) >= len(FIRST) - 7 * (at - 1)
            session.prefill(7)
        assert said(cache, FIRST, 5) == plain(name, FIRST, 5)
        assert cache.stats.reused == len(FIRST) - 1


def test_what_the_prompt_cache_has_is_not_evaluated_twice() -> None:
    model, prompt = models.shared("llama"), models.prompt_of(90)
    with MLXPrefixCache(model, capacity=200, **OPTIONS) as cache:
        expected = [token for token, _ in cache.generate(prompt, max_tokens=4)]
        with cache.begin(prompt) as session:
            session.prefill()
            last = session.prefill()
            steps = generate_step(last, model, prompt_cache=session.prompt_cache, max_tokens=4)
            assert [int(token) for token, _ in steps] == expected
        whole = mx.array(prompt)
        for begun in (False, True):  # the whole prompt, where some of it, or all but its last token, is there
            with pytest.raises(OrderError, match=r"session\.remaining"), cache.begin(prompt) as session:
                if begun:
                    session.prefill()
                list(generate_step(whole, model, prompt_cache=session.prompt_cache, max_tokens=1))
        with cache.begin(prompt) as session:
            rest = mx.array(session.remaining)
            steps = generate_step(rest, model, prompt_cache=session.prompt_cache, max_tokens=4)
            assert [int(token) for token, _ in steps] == expected


def test_a_prompt_cache_goes_with_its_session_has_no_copies_and_is_emptied_in_place() -> None:
    model = models.shared("llama")
    with MLXPrefixCache(model, capacity=128, **OPTIONS) as cache, cache.begin(FIRST) as session:
        session.prefill()
        entry = session.prompt_cache[0]
        for share in (copy.deepcopy, lambda x: x.extract(0), lambda x: x.merge([x]), lambda x: x.extend(x)):
            with pytest.raises(NotSupportedError, match="begin another session"):
                share(entry)
        assert rewind(session.prompt_cache, 0) == 0
        logits = model(mx.array([session.remaining]), cache=session.prompt_cache)
        assert int(mx.argmax(logits[0, -1])) == plain("llama", FIRST, 1)[0]


@pytest.mark.parametrize(
    "option",
    [{"kv_bits": 8}, {"max_kv_size": 64}, {"prompt_cache": []}, {"input_embeddings": mx.zeros((30, 32))}],
)
def test_options_of_prompt_caches_are_refused_where_they_come_too_late(option: dict[str, Any]) -> None:
    with MLXPrefixCache(models.shared("llama"), capacity=64, **OPTIONS) as cache:
        with pytest.raises(InvalidRangeError, match=next(iter(option))):
            next(cache.generate(FIRST, **option))
        with pytest.raises(InvalidRangeError, match=r"room for 256"):
            cache.begin([*range(2, 99)] * 3)


def test_a_short_further_turn_is_not_taken_for_drafts() -> None:
    """All of the prompt, where all but its last token is there: no more than drafts would be."""
    model, prompt = models.shared("llama"), models.prompt_of(9)
    with MLXPrefixCache(model, capacity=64, **OPTIONS) as cache:
        said(cache, prompt[:-1], 1)
        with (
            pytest.raises(OrderError, match=r"8 tokens from .* 8 .*remaining \(1;"),
            cache.begin(prompt) as own,
        ):
            assert (own.tokens, own.cached) == (prompt, 8)
            list(generate_step(mx.array(prompt), model, prompt_cache=own.prompt_cache, max_tokens=1))
        assert said(cache, prompt, 5) == plain("llama", prompt, 5)


def test_ids_that_the_model_has_no_embedding_of_are_refused() -> None:
    """MLX reads behind the end of it, which may end the process."""
    with MLXPrefixCache(models.shared("llama"), capacity=64, **OPTIONS) as cache:
        for wrong in ([1, 99_999], [1, -1], np.array([97])):
            with pytest.raises(InvalidRangeError, match=r"begin: token .*; the model's ids are 0 to 96:"):
                next(cache.generate(wrong))
        with cache.begin([1, 2]) as session, pytest.raises(InvalidRangeError, match="extend: token 97"):
            session.extend([97])
        assert said(cache, FIRST, 2) == plain("llama", FIRST, 2)


def test_what_is_closed_says_so_and_what_to_do() -> None:
    cache = MLXPrefixCache(models.shared("llama"), capacity=64, **OPTIONS)
    session = cache.begin(FIRST)
    session.close()
    with pytest.raises(ClosedError, match="prefill: the conversation is closed; begin another"):
        session.prefill()
    steps = cache.generate(FIRST)
    next(steps)
    cache.close()
    for op, call in (("generate", lambda: list(steps)), ("begin", lambda: cache.begin(FIRST))):
        with pytest.raises(ClosedError, match=f"{op}: the MLXPrefixCache is closed; make a new one"):
            call()


def test_unknown_options_are_told_with_what_to_use() -> None:
    with pytest.raises(InvalidRangeError, match=r"no option 'capcity'; known: .*; do you mean 'capacity'\?"):
        MLXPrefixCache(models.shared("llama"), capcity=64)
    with MLXPrefixCache(models.shared("llama"), capacity=64, **OPTIONS) as cache:
        with pytest.raises(InvalidRangeError, match=r"no option 'temperature'; pass sampler=.*make_sampler"):
            next(cache.generate(FIRST, temperature=0.5))
        with pytest.raises(InvalidRangeError, match="no option 'max_token'; those of generate_step: "):
            next(cache.generate(FIRST, max_token=5))


def test_repr_says_what_it_is_of() -> None:
    with MLXPrefixCache(models.shared("llama"), capacity=32, backend=ml.open_backend("mlx")) as cache:
        assert repr(cache).startswith("<MLXPrefixCache of a Model; <PrefixCache, open sessions: 0")


def adapted(folder: Path, seed: int = 0, scale: float = 8.0) -> Path:
    """The files of an adapter."""
    made = models.make_llama()
    parameters = {"rank": 2, "scale": scale, "dropout": 0.0, "keys": ["self_attn.q_proj", "self_attn.k_proj"]}
    linear_to_lora_layers(made, 2, parameters)
    mx.random.seed(seed)
    leaves = [(name, array) for name, array in tree_flatten(made.parameters()) if ".lora_" in name]
    folder.mkdir()
    mx.save_safetensors(
        str(folder / "adapters.safetensors"), {name: mx.random.normal(array.shape) for name, array in leaves}
    )
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def reloaded(model: Any, folder: Path) -> None:
    load_adapters(remove_lora_layers(model), str(adapted(folder / "other", seed=9)))


def rescaled(model: Any, folder: Path) -> None:
    for _, layer in model.named_modules():
        if hasattr(layer, "lora_a"):
            layer.scale = 1.0


def written(model: Any, folder: Path) -> None:
    for _, layer in model.named_modules():
        if hasattr(layer, "lora_a"):
            layer.lora_a[:] = -layer.lora_a


def added(model: Any, folder: Path) -> None:
    for _, layer in model.named_modules():
        if hasattr(layer, "lora_a"):
            layer.lora_b += 0.5


def fused(model: Any, folder: Path) -> None:
    layers = [(name, layer.fuse()) for name, layer in model.named_modules() if hasattr(layer, "fuse")]
    model.update_modules(tree_unflatten(layers))


def base(model: Any, folder: Path) -> None:
    model.model.embed_tokens.weight = model.model.embed_tokens.weight * 0.5


def base_written(model: Any, folder: Path) -> None:
    model.model.embed_tokens.weight[:] = model.model.embed_tokens.weight * 0.5


@pytest.mark.parametrize("change", [reloaded, rescaled, written, added, fused, base, base_written])
def test_weights_that_have_changed_find_nothing_that_they_did_not_compute(
    change: Callable[[Any, Path], None], tmp_path: Path
) -> None:
    model, first = models.make_llama(), adapted(tmp_path / "first")
    with MLXPrefixCache(model, capacity=128, **OPTIONS) as cache:
        steps: list[tuple[Callable[[], object], int]] = [
            (lambda: None, 0),
            (lambda: load_adapters(model, str(first)), 0),
            (lambda: None, 29),
            (lambda: change(model, tmp_path), 0),
            (lambda: None, 29),
        ]
        for step, reused in steps:
            step()
            before = cache.prefix.stats.reused
            assert said(cache, FIRST, 5) == models.greedy(model, FIRST, 5, None)
            assert cache.prefix.stats.reused - before == reused


def in_another_order(model: Any, folder: Path) -> None:
    weight = model.model.layers[1].mlp.up_proj.weight
    model.model.layers[1].mlp.up_proj.weight = mx.contiguous(weight.T).T


def exchanged(model: Any, folder: Path) -> None:
    one, other = (layer.self_attn for layer in model.model.layers[:2])
    one.k_proj, other.k_proj = other.k_proj, one.k_proj


def replaced_in_place(model: Any, folder: Path) -> None:
    """By an array that differs in elements that are not sampled, and which gets the other's ``id``."""
    embedding = model.model.embed_tokens
    other, before = mx.array(embedding.weight), id(embedding.weight)
    other[1:3] += 1
    mx.eval(other)
    del embedding.weight
    made = [mx.array(other)]
    while id(made[-1]) != before and len(made) < 1000:
        made.append(mx.array(other))
    assert id(made[-1]) == before
    embedding.weight = made[-1]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("memory", ["of the host", "of a device"])
@pytest.mark.parametrize("change", [base, base_written, exchanged, replaced_in_place])
def test_a_model_without_adapters_has_another_variant_after_each_change_only(
    change: Callable[[Any, Path], None], memory: str, dtype: mx.Dtype, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(adapters, "_host_reads", lambda: memory == "of the host")
    model = models.make_llama()
    model.set_dtype(dtype)
    in_another_order(model, tmp_path)
    watched = MLXModel(model)
    assert watched.variant() == watched.variant() is None
    change(model, tmp_path)
    assert watched.variant() == watched.variant() is not None


def test_small_arrays_may_be_replaced_by_equal_ones() -> None:
    """As Gemma 3n does in each pass."""
    model = models.make_llama()
    watched = MLXModel(model)
    norm = model.model.norm
    for _ in range(3):
        norm.weight = mx.array(norm.weight)
        assert watched.variant() is None
    changed = np.array(norm.weight)
    changed[5] += 1
    norm.weight = mx.array(changed)
    assert watched.variant() is not None


def test_an_adapter_is_found_again_by_what_it_is(tmp_path: Path) -> None:
    folder, store = adapted(tmp_path / "first"), MemoryStore()
    model = models.make_llama()
    with MLXPrefixCache(model, capacity=128, tiers=[store], **OPTIONS) as cache:
        plain_answer = said(cache, FIRST, 5)
        load_adapters(model, str(folder))
        answer = said(cache, FIRST, 5)
        remove_lora_layers(model)
        assert said(cache, FIRST, 5) == plain_answer
        assert cache.prefix.stats.reused == 29
    model = load_adapters(models.make_llama(), str(folder))
    with MLXPrefixCache(model, capacity=128, tiers=[store], **OPTIONS) as cache:
        assert said(cache, FIRST, 5, salt=repr(("", cache.adapters.variant()))) == answer
        assert cache.prefix.stats.reused == 0
        assert said(cache, FIRST, 5) == answer
        assert cache.prefix.stats.store >= 24


def test_what_only_a_closed_session_of_an_agent_used_goes_first() -> None:
    prompts = [models.prompt_of(24 + extra)[extra:] for extra in (0, 40, 80)]
    with MLXPrefixCache(models.shared("llama"), capacity=60, max_sequences=1) as cache:
        check_that_what_only_a_closed_one_used_goes_first(
            cache, prompts, lambda prompt, **given: said(cache, prompt, 5, **given)
        )


def test_threads_wait_for_each_other_and_for_a_free_conversation(name: str) -> None:
    rows = [FIRST[:count] for count in (20, 30, 12)]
    right = [plain(name, row, 5) for row in rows]

    with MLXPrefixCache(models.shared(name), capacity=64, max_sequences=2, **OPTIONS) as cache:

        def answer(i: int) -> None:
            for k in range(4):
                assert said(cache, rows[(i + k) % 3], 5) == right[(i + k) % 3]

        with ThreadPoolExecutor(3) as threads:
            for found in [threads.submit(answer, i) for i in range(3)]:
                found.result()
        assert cache.stats.reused > 0
        assert not cache.prefix.sessions


def test_an_answer_goes_on_in_another_thread() -> None:
    with (
        MLXPrefixCache(models.shared("qwen"), capacity=64, **OPTIONS) as cache,
        ThreadPoolExecutor(1) as thread,
    ):
        steps = cache.generate(FIRST, max_tokens=6)
        found = [(thread.submit(next, steps).result() if i % 2 else next(steps))[0] for i in range(6)]
        assert found == plain("qwen", FIRST, 6)
        assert next(steps, None) is None


def test_another_thread_clears_between_two_tokens() -> None:
    with (
        MLXPrefixCache(models.shared("qwen"), capacity=64, **OPTIONS) as cache,
        ThreadPoolExecutor(1) as thread,
    ):
        steps = cache.generate(FIRST, max_tokens=6)
        found = [next(steps)[0]]
        for call in (cache.clear, cache.flush, cache.write_through, lambda: cache.stats):
            thread.submit(call).result()
        found += [token for token, _ in steps]
        assert found == plain("qwen", FIRST, 6)
        assert said(cache, FIRST, 2) == found[:2]
        assert cache.stats.reused == 0


@pytest.mark.parametrize("name", ["llama", "qwen"])
def test_tokens_that_make_room_wait_for_what_leaves_the_device(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread copies it, slowly here, one at a time, and a token that needs the cells waits."""
    offloads, serialize = list[int](), worker.serialize

    def slowly(*given: Any) -> Any:
        time.sleep(0.1)
        offloads.append(len(answered))
        return serialize(*given)

    monkeypatch.setattr(worker, "in_host_memory", lambda backend: False)
    monkeypatch.setattr(worker, "serialize", slowly)
    asked = [(models.prompt_of(6, seed), 2) for seed in range(7)] + [(models.prompt_of(5, 7), 48)]
    expected, answered = [plain(name, *each) for each in asked], list[list[int]]()

    def work() -> None:
        with MLXPrefixCache(
            models.shared(name), capacity=60, max_sequences=1, tiers=[HostTier()], **OPTIONS
        ) as cache:
            cache.prefix.tree.worker.limit = 1
            for prompt, count in asked:
                answered.append(said(cache, prompt, count))

    thread = Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    assert answered == expected
    assert offloads.count(7) > 1, "while the last answer is decoded"


def test_who_holds_all_conversations_is_told_and_others_wait() -> None:
    with MLXPrefixCache(models.shared("llama"), capacity=64, max_sequences=1, **OPTIONS) as cache:
        session = cache.begin(FIRST)
        with pytest.raises(SessionLimitError):
            cache.begin(FIRST)
        with ThreadPoolExecutor(1) as thread:
            waits = thread.submit(said, cache, FIRST, 4)
            assert wait([waits], timeout=0.2).not_done
            session.close()
            assert waits.result() == plain("llama", FIRST, 4)


def test_an_answer_that_does_not_fit_ends_where_the_room_ends(caplog: pytest.LogCaptureFixture) -> None:
    with MLXPrefixCache(models.shared("llama"), capacity=34, max_sequences=1, **OPTIONS) as cache:
        assert said(cache, FIRST, 9) == plain("llama", FIRST, 4)
        assert (
            "an answer of up to 9 tokens will end after 4, because the pool has no more room" in caplog.text
        )
        with pytest.raises(InvalidRangeError, match="a prompt of 34 tokens"):
            said(cache, [*FIRST, 1, 2, 3, 4], 1)


def test_a_page_of_other_shapes_binds_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Of another model under the same identity: what the model stores decides, not what was read first."""
    options = {"capacity": 64, "tiers": [MemoryStore()], **OPTIONS}
    with MLXPrefixCache(models.make_llama(head_dim=32), **options) as other:
        said(other, FIRST, 2)
    with MLXPrefixCache(models.shared("llama"), **options) as cache:
        for _ in range(2):
            assert said(cache, FIRST, 4) == plain("llama", FIRST, 4)
        assert cache.stats.reused > 0
    assert "its content is computed again" in caplog.text
