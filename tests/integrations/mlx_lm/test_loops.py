"""Our caches inside mlx-lm's own models and loops, held against mlx-lm's own caches."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")

import mlx.core as mx
import mlx_lm.models.cache
from mlx_lm.models.cache import ArraysCache as OwnArraysCache
from mlx_lm.models.cache import CacheList, ConcatenateKVCache
from mlx_lm.models.cache import KVCache as OwnKVCache
from mlx_lm.models.cache import make_prompt_cache as own_prompt_cache

import kvcache
import ml
from benchmarks.census import mlx_lm_types
from kvcache.integrations.mlx_lm import (
    Attention,
    CachePool,
    Recurrent,
    SequencesTakenError,
    install,
    layers_of,
    make_prompt_cache,
    rewind,
    uninstall,
)

from ...rigs import mlx_lm_models as models

TOLERANCE = 1e-5
EXACT = ("llama", "qwen")
"""No sliding layer: our K and V lie as mlx-lm's do, and the kernels give the same bits."""


@pytest.fixture(params=list(models.MODELS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(name: str) -> Any:
    return models.shared(name)


# Generation.


def test_generation_gives_the_tokens_and_logits_of_mlx_lms_own_cache(name: str, model: Any) -> None:
    prompt = models.prompt_of(21)
    theirs = models.steps(model, prompt, 24, own_prompt_cache(model))
    ours = models.steps(model, prompt, 24, make_prompt_cache(model, capacity=64))
    models.say_the_same(ours, theirs, 0.0 if name in EXACT else TOLERANCE)
    assert len({token for token, _ in ours}) > 8  # a model that says something


@pytest.mark.parametrize("dtype", [None, ml.DType.F32])
def test_a_bfloat16_model_gives_the_bits_of_mlx_lms_own_cache(dtype: ml.DType | None) -> None:
    model = models.make_llama()
    model.set_dtype(mx.bfloat16)
    prompt = models.prompt_of(12)
    theirs = models.steps(model, prompt, 12, own_prompt_cache(model))
    ours = models.steps(model, prompt, 12, make_prompt_cache(model, capacity=64, dtype=dtype))
    models.say_the_same(ours, theirs, 0.0)


@pytest.mark.parametrize(("dtype", "steps", "per_token"), [(ml.DType.Q8_0, 127, 34), (ml.DType.Q4_0, 7, 18)])
def test_quantized_storage_works_on_sliding_layers_too(dtype: ml.DType, steps: int, per_token: int) -> None:
    """Within a step of each block's scale; mlx-lm quantizes no sliding layer."""
    pool = CachePool([Attention(window=9)], capacity=64, dtype=dtype, rollback=0)
    (entry,) = pool.make_prompt_cache()
    x = np.random.default_rng(0).normal(size=(1, 2, 20, 32)).astype(np.float32)
    for begin, end in ((0, 7), (7, 19), (19, 20)):
        chunk = mx.array(x[:, :, begin:end])
        mask = entry.make_mask(end - begin)
        keys, _ = entry.update_and_fetch(chunk, chunk)
    seen = np.array(keys)[:, :, np.ones(keys.shape[2], bool) if mask is None else np.array(mask)[0]]
    seen = seen[:, :, np.argsort([np.abs(x - seen[:, :, [i]]).sum((0, 1, 3)).argmin() for i in range(9)])]
    step = np.abs(x[:, :, 11:]).max(-1, keepdims=True) / steps
    assert (np.abs(seen - x[:, :, 11:]) <= 1.01 * step).all()
    assert (seen != x[:, :, 11:]).mean() > 0.9
    assert pool.storage.token_bytes(0) == 0  # its shapes were not told
    assert pool.nbytes == pool.cache.cells * 2 * 2 * per_token


def test_mlx_lm_makes_our_prompt_caches_once_installed() -> None:
    model = models.make_gemma()
    prompt = models.prompt_of(9)
    expected = models.greedy(model, prompt, 8, None)
    pool = install(model, capacity=64, max_sequences=2)
    try:
        assert own_prompt_cache(model)[0].rows.pool is pool.sequences
        assert models.greedy(model, prompt, 8, None) == expected
    finally:
        uninstall(model)
    assert not hasattr(own_prompt_cache(model)[0], "rows")


def test_the_layers_of_a_model_are_found_without_computing_anything() -> None:
    f32 = mx.float32
    full, sliding = Attention(None, 2, 16, 16, f32), Attention(models.WINDOW, 2, 16, 16, f32)
    assert layers_of(models.shared("llama")) == [full] * 2
    assert layers_of(models.shared("gemma")) == [sliding, sliding, full]
    state = Recurrent(((3, 64), (4, 8, 8)), (f32, f32))
    assert layers_of(models.shared("qwen")) == [state, full]


# Memory.


def test_memory_is_taken_at_once_and_does_not_grow(model: Any) -> None:
    """mlx-lm's own cache grows every 256 tokens, and copies the history as it does."""
    prompt_cache = make_prompt_cache(model, capacity=300, checkpoints=0)
    pool = prompt_cache[0].rows.pool.storage.cache
    before = pool.nbytes
    assert before > 0
    for chunk in (100, 100, 70, *[1] * 20):
        mx.eval(model(mx.zeros((1, chunk), mx.int32), cache=prompt_cache))
        assert pool.nbytes == before


def test_a_decoding_step_copies_no_buffer() -> None:
    """Peak memory over a step stays below one buffer, which a copied one would add."""
    pool = CachePool([Attention(None, 8, 64, 64, mx.float32)] * 2, capacity=4096)
    entries = pool.make_prompt_cache()
    buffer = pool.nbytes // 4
    assert buffer == 8 << 20
    for tokens in (1000, *[1] * 12):
        x = mx.zeros((1, 8, tokens, 64))
        entries[0].make_mask(tokens)
        mx.synchronize()
        mx.reset_peak_memory()
        start = mx.get_active_memory()
        out = []
        for entry in entries:
            keys, values = entry.update_and_fetch(x, x)
            out.append(keys[..., -1:, :] + values[..., -1:, :])
            del keys, values
        mx.eval(out)
        if tokens == 1:
            assert mx.get_peak_memory() - start < buffer // 2


def test_what_does_not_fit_says_so_and_harms_nothing(model: Any) -> None:
    prompt_cache = make_prompt_cache(model, capacity=24, max_batch=24)
    prompt = models.prompt_of(20)
    mx.eval(model(mx.array([prompt]), cache=prompt_cache))
    with pytest.raises(kvcache.CacheFullError, match="5 cells are needed and 4 are free"):
        model(mx.zeros((1, 5), mx.int32), cache=prompt_cache)
    assert prompt_cache[-1].offset == 20
    again = model(mx.array([[7]]), cache=prompt_cache)
    theirs = own_prompt_cache(model)
    model(mx.array([prompt]), cache=theirs)
    assert models.largest([again], [model(mx.array([[7]]), cache=theirs)]) <= TOLERANCE * 4


# Masks: what a query sees, read off the keys themselves.


def seen_of(keys: Any, mask: Any, tokens: int, row: int = 0) -> list[list[int]]:
    """For each query the values of the keys that it sees, ascending."""
    history = keys.shape[2]
    marks = np.array(keys[row, 0, :, 0]).astype(int)
    if mask is None:
        visible = np.ones((tokens, history), bool)
    elif isinstance(mask, str):
        assert mask == "causal"
        visible = np.arange(history)[None] <= np.arange(history - tokens, history)[:, None]
    else:
        visible = np.array(mask)
        visible = (
            np.broadcast_to(visible, (row + 1, 1, tokens, history))[row, 0] if visible.ndim == 4 else visible
        )
    return [sorted(marks[line].tolist()) for line in visible]


def marked(*rows: list[int]) -> Any:
    """Keys (rows, 2, tokens, 4), every element of a token its mark."""
    marks = np.array(rows, np.float32)
    return mx.array(np.broadcast_to(marks[:, None, :, None], (*marks.shape[:1], 2, marks.shape[1], 4)).copy())


@pytest.mark.parametrize("window", [None, 1, 5, 16])
@pytest.mark.parametrize("narrower", [None, 3, 5, 16])
@pytest.mark.parametrize("return_array", [False, True])
def test_a_query_sees_itself_and_the_window_before_it(
    window: int | None, narrower: int | None, return_array: bool
) -> None:
    random = np.random.default_rng(2)
    pool = CachePool([Attention(window)], capacity=64, max_sequences=2, rollback=3)
    other, (entry,) = pool.make_prompt_cache()[0], pool.make_prompt_cache()
    length = 0
    if narrower is not None and window is not None and narrower > window:
        with pytest.raises(
            kvcache.NotSupportedError, match=f"window_size={narrower} .* keeps {window} tokens"
        ):
            entry.make_mask(1, return_array=return_array, window_size=narrower)
        return
    for tokens in random.choice([1, 1, 2, 6], 14):
        tokens = int(tokens)
        other.update_and_fetch(marked([-1]), marked([-1]))  # another sequence between the cells
        mask = entry.make_mask(tokens, return_array=return_array, window_size=narrower)
        assert entry.offset == length
        keys, _ = entry.update_and_fetch(*[marked([*range(length, length + tokens)])] * 2)
        width = min(w for w in (window, narrower, 1000) if w is not None)
        queries = range(length, length + tokens)
        assert seen_of(keys, mask, tokens) == [[*range(max(0, q - width + 1), q + 1)] for q in queries]
        assert not (return_array and isinstance(mask, str))
        length += tokens


# What goes wrong.


@pytest.mark.parametrize(("name", "options"), [("gemma", {}), ("qwen", {"layers": 4})])
def test_a_pass_that_fails_half_way_is_noticed_and_can_be_made_good(
    name: str, options: dict[str, int]
) -> None:
    model = models.MODELS[name](**options)
    prompt, prompt_cache = models.prompt_of(12), make_prompt_cache(model, capacity=64)
    expected = models.greedy(model, prompt, 8, own_prompt_cache(model))
    mx.eval(model(mx.array([prompt[:9]]), cache=prompt_cache))
    layer = model.layers[1]
    inner, layer.mlp = layer.mlp, None
    with pytest.raises(TypeError):
        model(mx.array([prompt[9:11]]), cache=prompt_cache)
    layer.mlp = inner
    with pytest.raises(kvcache.OrderError, match="failed midway"):
        model(mx.array([prompt[9:11]]), cache=prompt_cache)
    at = rewind(prompt_cache, 9)
    assert at in (0, 9)
    assert models.greedy(model, prompt[at:], 8, prompt_cache) == expected


def test_a_conversation_moves_between_threads() -> None:
    """MLX binds pending work to the thread that began it; a server generates in one of its own."""
    model = models.shared("qwen")
    prompt, prompt_cache = models.prompt_of(9), make_prompt_cache(model, capacity=64)
    said = models.greedy(model, prompt, 5, prompt_cache)
    with ThreadPoolExecutor(1) as pool:
        said += pool.submit(models.greedy, model, [3], 5, prompt_cache).result()
    said += models.greedy(model, [4], 5, prompt_cache)
    theirs = own_prompt_cache(model)
    assert said == [token for part in (prompt, [3], [4]) for token in models.greedy(model, part, 5, theirs)]


def test_another_prompt_cache_in_the_middle_of_a_pass_is_refused() -> None:
    pool = CachePool([Attention()] * 2, capacity=16, max_sequences=2)
    one, two = pool.make_prompt_cache(), pool.make_prompt_cache()
    x = marked([1])
    one[0].update_and_fetch(x, x)
    two[0].update_and_fetch(x, x)
    with pytest.raises(kvcache.OrderError, match="during this one's pass"):
        one[1].update_and_fetch(x, x)


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        (lambda: CacheList(OwnKVCache(), ConcatenateKVCache()), "ConcatenateKVCache"),
        (lambda: CacheList(), "CacheList"),
        (lambda: OwnArraysCache(0), "ArraysCache"),
        (lambda: ConcatenateKVCache(), "ConcatenateKVCache"),
    ],
)
def test_a_model_with_other_kinds_of_layers_is_refused_by_name_and_not_run(
    entry: Callable[[], Any], named: str
) -> None:
    class Wants:
        def make_cache(self) -> list[Any]:
            return [entry()]

        def __call__(self, tokens: Any, cache: Any) -> None:
            raise AssertionError

    with pytest.raises(kvcache.NotSupportedError, match=f"layer 0 of the model wants mlx-lm's {named}"):
        make_prompt_cache(Wants())


@pytest.mark.parametrize(
    ("name", "new"),
    [
        ("keys", lambda entry, x: entry.keys * 2),
        ("values", lambda entry, x: mx.broadcast_to(x, entry.values.shape)),
        ("values", lambda entry, x: mx.zeros_like(entry.values)),  # of values that are not the keys
    ],
)
def test_a_model_that_sets_k_and_v_itself_to_something_else_is_refused(
    name: str, new: Callable[[Any, Any], Any]
) -> None:
    class Sets:
        layers = (None,)

        def __call__(self, tokens: Any, cache: Any) -> None:
            x = marked([3])
            cache[0].update_and_fetch(x, x + 1)
            setattr(cache[0], name, new(cache[0], x))

    with pytest.raises(kvcache.NotSupportedError, match="layer 0 of the model sets K and V"):
        make_prompt_cache(Sets())


def test_keys_without_values_take_up_no_room_for_them_and_are_saved_with_zeros() -> None:
    shape = {"kv_heads": 1, "key_dim": 16, "dtype": mx.float32}
    one, two = (
        CachePool([Attention(value_dim=16, keys_only=only, **shape)], capacity=8) for only in (True, False)
    )
    assert 2 * one.nbytes == two.nbytes
    entry = one.make_prompt_cache()[0]
    x = mx.random.normal((1, 1, 3, 16))
    keys, _ = entry.update_and_fetch(x, x)
    assert mx.array_equal(keys, x)
    assert mx.array_equal(entry.state[0], x)
    assert mx.array_equal(entry.state[1], mx.zeros_like(x))


@pytest.mark.parametrize("name", ["mamba", "llama4"])
def test_a_model_that_tells_nothing_of_a_pass_tells_it_by_its_calls_and_goes_on_with_mlx_lms_caches(
    name: str,
) -> None:
    model, prompt = mlx_lm_types.build(name), models.prompt_of(9)
    before = models.greedy(model, prompt, 12, own_prompt_cache(model))
    prompt_cache = make_prompt_cache(model, capacity=64)
    assert models.greedy(model, prompt, 12, prompt_cache) == before
    assert prompt_cache[0].offset == len(prompt) + 12
    assert models.greedy(model, prompt, 12, own_prompt_cache(model)) == before
    ours, own = (
        make_prompt_cache(model, capacity=64),
        own_prompt_cache(model),
    )  # by position, as models take it
    assert mx.array_equal(model(mx.array([prompt]), own), model(mx.array([prompt]), ours))


def test_a_state_that_is_set_outside_of_a_call_is_refused() -> None:
    """Only a mask, K and V, or the call of the model tell how many tokens a pass has."""
    entry = make_prompt_cache(mlx_lm_types.build("mamba"), capacity=8)[0]
    assert entry[0] is None
    with pytest.raises(kvcache.OrderError, match="layer 0 is set before any entry made a mask"):
        entry[0] = mx.zeros((1, 2, 60))


def test_a_call_after_a_pass_that_failed_half_way_stores_nothing() -> None:
    model = mlx_lm_types.build("mamba")
    prompt_cache = make_prompt_cache(model, capacity=32, checkpoint_interval=4)
    models.greedy(model, models.prompt_of(9), 1, prompt_cache, step=4)
    layer, model.backbone.layers[2] = model.backbone.layers[2], None
    with pytest.raises(TypeError):
        model(mx.array([[1, 2]]), cache=prompt_cache)
    model.backbone.layers[2] = layer
    with pytest.raises(kvcache.OrderError, match="rewind it"):
        model(mx.array([[1, 2]]), cache=prompt_cache)
    at = rewind(prompt_cache, 9)
    prompt = models.prompt_of(9)
    fresh = make_prompt_cache(model, capacity=32)
    expected = models.greedy(model, prompt, 5, fresh)
    assert models.greedy(model, prompt[at:], 5, prompt_cache) == expected


def test_a_state_that_grows_is_given_at_the_size_that_it_has() -> None:
    model = mlx_lm_types.build("longcat_flash_ngram")
    ours, theirs = make_prompt_cache(model, capacity=16), own_prompt_cache(model)
    for token in (5, 6, 7, 8):
        for prompt_cache in (ours, theirs):
            model(mx.array([[token]]), cache=prompt_cache)
        assert ours[0][0].dtype == theirs[0][0].dtype
        assert ours[0][0].tolist() == theirs[0][0].tolist()


@pytest.mark.parametrize(("one", "more"), [((1,), (9,)), ((1, 1), (3, 3))])
def test_a_state_that_grows_otherwise_is_refused(one: tuple[int, ...], more: tuple[int, ...]) -> None:
    class Grows:
        def make_cache(self) -> list[Any]:
            return [OwnArraysCache(1)]

        def __call__(self, tokens: Any, cache: Any) -> None:
            cache[0][0] = mx.zeros((1, *(one if cache[0][0] is None else more)))

    with pytest.raises(kvcache.NotSupportedError, match="layer 0 of the model has a state of"):
        make_prompt_cache(Grows())


def test_a_model_in_a_pipeline_of_processes_is_refused() -> None:
    model = models.MODELS["qwen"]()
    model.model.pipeline_size = 2
    with pytest.raises(kvcache.NotSupportedError, match="a pipeline over 2 processes"):
        make_prompt_cache(model)


@pytest.mark.parametrize("name", ["recurrent_gemma", "longcat_flash_ngram"])
def test_rows_that_a_model_does_not_tell_apart_are_computed_apart(name: str) -> None:
    """mlx-lm's own caches let padding, and the zeros of a row that begins, spoil the states."""
    model, prompts = mlx_lm_types.build(name), [models.prompt_of(n, seed=n) for n in (1, 5, 5, 7)]
    pool = CachePool(model, capacity=32, max_sequences=4)
    caches = [pool.make_prompt_cache() for _ in prompts]
    found = models.run_batch(model, prompts, caches, 6)
    expected = [models.greedy(model, row, 6, own_prompt_cache(model)) for row in prompts]
    assert [tokens for tokens, _, _ in found.values()] == expected


@pytest.mark.parametrize("name", ["deepseek_v32", "minimax_m3_vl", "llama4"])
def test_models_that_choose_or_number_columns_follow_copies_whose_cells_lie_among_others(name: str) -> None:
    model = mlx_lm_types.build(name)
    ours = [make_prompt_cache(model, capacity=64, max_sequences=2)]
    theirs = [own_prompt_cache(model)]
    for caches in (ours, theirs):
        model(mx.array([models.prompt_of(11)]), cache=caches[0])
        caches.append(copy.deepcopy(caches[0]))
    for step, count in enumerate((1, 3, 1, 1, 2, 1)):
        for i in range(2):
            tokens = mx.array([models.prompt_of(count, seed=2 * step + i)])
            found, expected = (model(tokens, cache=caches[i]) for caches in (ours, theirs))
            assert models.largest([found], [expected]) < TOLERANCE


def test_rows_that_a_model_does_not_tell_apart_are_refused_where_its_calls_tell_nothing() -> None:
    model = mlx_lm_types.build("recurrent_gemma")
    pool = CachePool(layers_of(model), capacity=32, max_sequences=4)
    rows = [models.prompt_of(n, seed=n) for n in (5, 7)]
    caches = [pool.make_prompt_cache() for _ in rows]
    with pytest.raises(kvcache.NotSupportedError, match="prepare: padding, which this model treats"):
        models.run_batch(model, rows, caches, 6)
    mixed = caches[0][2]
    mixed.update_and_fetch(*[mx.zeros((1, 1, 3, 12))] * 2)
    mixed.extend(caches[1][2])
    with pytest.raises(kvcache.NotSupportedError, match="update: rows that are padded, new or of other"):
        mixed.make_mask(1)


def test_a_call_of_padding_only_is_refused_and_stores_nothing() -> None:
    model = mlx_lm_types.build("recurrent_gemma")
    prompt_cache = make_prompt_cache(model, capacity=32, max_sequences=2)
    for entry in prompt_cache:
        entry.prepare(left_padding=[4, 3])
    with pytest.raises(kvcache.InvalidRangeError, match="2 columns of padding only"):
        model(mx.array([[0, 0], [0, 0]]), cache=prompt_cache)
    assert prompt_cache[0].empty()
    out = model(mx.array([[0, 0, 0, 0, 5], [0, 0, 0, 6, 7]]), cache=prompt_cache)
    assert prompt_cache[0].rows.lengths == [1, 2]
    alone = model(mx.array([[6, 7]]), own_prompt_cache(model))
    assert float(mx.abs(out[1, 3:] - alone[0]).max()) < TOLERANCE
    assert not out[1, :3].any()


def test_rows_whose_call_fails_are_empty_and_the_batch_goes_no_further() -> None:
    model = mlx_lm_types.build("recurrent_gemma")
    pool = CachePool(model, capacity=32, max_sequences=2)
    rows = [pool.make_prompt_cache() for _ in range(2)]
    model(mx.array([[1, 2, 3]]), cache=rows[0])
    both = models.merged(rows)
    del rows
    block, model.model.layers[3] = model.model.layers[3], None
    with pytest.raises(TypeError):
        model(mx.array([[4], [5]]), cache=both)
    model.model.layers[3] = block
    with pytest.raises(kvcache.OrderError):
        model(mx.array([[4], [5]]), cache=both)
    assert both[0].rows.lengths == [0, 0]
    del both
    assert pool.free_sequences == 2


@pytest.mark.parametrize(("capacity", "sequences"), [(6, 2), (8, 3)], ids=["cells", "sequences"])
def test_rows_that_are_computed_apart_all_stay_as_they_were_where_one_does_not_fit(
    capacity: int, sequences: int
) -> None:
    model = mlx_lm_types.build("gemma2")
    pool = CachePool(model, capacity=capacity, max_sequences=sequences)
    rows = [pool.make_prompt_cache() for _ in range(2)]
    prompts = [[5, 6, 7, 8], [8, 9, 3, 4, 5, 6]]
    for entries, prompt in zip(rows, prompts, strict=True):
        model(mx.array([prompt]), cache=entries)
    both = models.merged(rows)
    del entries
    if sequences == 2:
        rows.clear()  # what a batch shares with others takes sequences of its own
    with pytest.raises(kvcache.CacheFullError if sequences == 2 else SequencesTakenError):
        model(mx.array([[3, 4], [5, 6]]), cache=both)
    assert both[0].rows.lengths == [4, 6]
    rows.clear()
    out = model(mx.array([[3], [5]]), cache=both)
    for row, more in enumerate((3, 5)):
        alone = model(mx.array([[*prompts[row], more]]), own_prompt_cache(model))
        assert models.largest([out[row, -1]], [alone[0, -1]]) < TOLERANCE


@pytest.mark.parametrize("lengths", [None, [1, 200]], ids=["one group", "the later of two"])
def test_rows_that_are_computed_apart_stay_where_their_pass_is_too_large_for_sliding_layers(
    lengths: list[int] | None,
) -> None:
    model = mlx_lm_types.build("llama4")
    pool = CachePool(model, capacity=256, max_sequences=2, max_batch=8)
    rows = [pool.make_prompt_cache() for _ in range(2)]
    model(mx.array([[5, 6, 7]]), cache=rows[0])
    both = models.merged(rows)
    del rows
    for entry in both if lengths else ():
        entry.prepare(lengths=lengths, right_padding=[199, 0])
    with pytest.raises(kvcache.CacheFullError, match=r"smaller prefill_step_size, or .* larger max_batch"):
        model(mx.zeros((2, 200), mx.int32), cache=both)
    assert both[0].rows.lengths == [3, 0]
    for entry in both:
        entry.finalize()
    out = model(mx.array([[3], [5]]), cache=both)
    alone = model(mx.array([[5, 6, 7, 3]]), own_prompt_cache(model))
    assert models.largest([out[0, -1]], [alone[0, -1]]) < TOLERANCE


MODEL_FILES = sorted((Path(str(mlx_lm.__file__)).parent / "models").glob("*.py"))


def test_entries_are_of_every_class_that_mlx_lms_models_test_for() -> None:
    """A model file that tests for a class of caches does something else for the others."""
    texts = [path.read_text(encoding="utf-8") for path in MODEL_FILES if path.stem != "cache"]
    calls = [call for text in texts for call in re.findall(r"isinstance\(([^()]*\(?[^()]*)\)", text)]
    named = {name for call in calls for name in re.findall(r"\w*Cache\w*", call)}
    tested = {name for name in named if hasattr(mlx_lm.models.cache, name)}
    assert tested
    kinds = {kind for name in models.MODELS for kind in map(type, make_prompt_cache(models.shared(name)))}
    assert len(kinds) == 3
    for kind in kinds:
        assert issubclass(kind, getattr(mlx_lm.models.cache, kind.__name__))
    assert tested <= {kind.__name__ for kind in kinds}


def test_entries_are_true_and_claim_no_quantization_of_mlx_lms(model: Any) -> None:
    for entry in make_prompt_cache(model, capacity=16):
        assert entry
        assert not hasattr(entry, "bits")
        assert not hasattr(entry, "meta_state")
