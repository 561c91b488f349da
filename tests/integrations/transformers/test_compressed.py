"""DeepSeek-V4 in HFCache: entries of several tokens beside windows of K and V, and what they are made of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("torch")

import torch

import ml
from benchmarks.census import transformers as census
from kvcache import Batch, CacheFullError, CompressedCache, DenseBatch, NotSupportedError
from kvcache.integrations.transformers import HFCache, HFPrefixCache, HFStaticCache

from ...rigs import hf_models as hf

IDS = torch.cat((census.tokens(2, 13), census.tokens(2, 10, seed=3)), 1)
RATES = (2, 3)
PARTS = ("kv_norm", "compressor.kv_proj", "compressor.rotary_emb")


@pytest.fixture(scope="module")
def made() -> Any:
    """Windows of 7. Entries of 3 tokens in layers 0, 2 and 4; of 2 tokens, with indexers, in 1 and 3."""
    return census.Case("deepseek_v4").model


@pytest.fixture(scope="module")
def whole(made: Any) -> torch.Tensor:
    return hf.feed(made, None, IDS)


def cache_of(made: Any, **options: Any) -> HFCache:
    return HFCache(made.config, **{"capacity": 32, "lookback": 4, **options})


def feed(made: Any, cache: Any, begin: int, *counts: int) -> torch.Tensor:
    parts = IDS[:, begin : begin + sum(counts)].split(counts, 1)
    return torch.cat([hf.feed(made, cache, part) for part in parts], 1)


@pytest.mark.parametrize("counts", [[23], [1] * 23, [2, 3, 1, 1, 6, 10], [12, 1, 1, 9], [5, 13, 5]], ids=str)
def test_passes_of_any_length_continue_as_one_pass_over_all(
    made: Any, whole: torch.Tensor, counts: list[int]
) -> None:
    hf.close(feed(made, cache_of(made), 0, *counts), whole)


@pytest.mark.parametrize("kept", [1, 2, 3, 6, 11])
def test_what_is_taken_back_comes_again(made: Any, whole: torch.Tensor, kept: int) -> None:
    cache = cache_of(made, lookback=16)
    feed(made, cache, 0, 6, 1, 6)
    cache.crop(kept)
    hf.close(feed(made, cache, kept, 1, 3, 19 - kept), whole[:, kept:])


@pytest.mark.parametrize("gone", [1, 4, 8, 9])
def test_drafts_longer_than_the_lookback_are_taken_back(made: Any, whole: torch.Tensor, gone: int) -> None:
    cache = cache_of(made, lookback=1)
    feed(made, cache, 0, 12)
    cache.activate_past_recording()
    cache.crop(0)
    feed(made, cache, 12, 9)
    cache.crop(-gone)
    hf.close(feed(made, cache, 21 - gone, 1, gone), whole[:, 21 - gone : 22])


@pytest.mark.parametrize("held", [1, 2, 7, 12])
def test_forks_copies_and_what_is_saved_go_on_alike(made: Any, whole: torch.Tensor, held: int) -> None:
    cache = cache_of(made, max_sequences=4)
    feed(made, cache, 0, held)
    others = hf.others_of(cache, cache_of(made))
    hf.feed(made, cache, IDS[:, :3])
    for other in others:
        hf.close(feed(made, other, held, 1, 4), whole[:, held : held + 5])


def test_half_precision_is_that_of_transformers_own_cache_to_the_bit() -> None:
    """The gates of the window before are rebuilt, with a bias that models keep in float32."""
    case = census.Case("deepseek_v4")
    case.model.to(torch.bfloat16).set_experts_implementation("eager")
    for name, parameter in case.model.named_parameters():
        if any(part in name for part in case.model._keep_in_fp32_modules_strict):
            parameter.data = parameter.data.float()
    ours, theirs = (feed(case.model, cache, 0, 5, 1, 4, 1, 1, 8) for cache in (case.ours(), case.theirs()))
    assert ours.dtype is torch.bfloat16
    assert torch.equal(ours, theirs)


def test_rows_change_places_with_their_entries(made: Any, whole: torch.Tensor) -> None:
    cache = cache_of(made)
    feed(made, cache, 0, 8)
    cache.reorder_cache(torch.tensor([1, 0]))
    hf.close(hf.feed(made, cache, IDS[[1, 0], 8:12]), whole[[1, 0], 8:12])


@pytest.mark.parametrize(
    ("part", "layer", "tokens"),
    [(part, (0, 3, 4)[i], (1, 4, 9)[i - j]) for j, part in enumerate(PARTS) for i in range(3)],
)
def test_after_an_exception_the_advice_works(
    made: Any, whole: torch.Tensor, part: str, layer: int, tokens: int
) -> None:
    """Before K and V, before inputs of entries, and between these and the entries that a pass completes."""
    cache = cache_of(made, lookback=16)
    feed(made, cache, 0, 11)
    with hf.failing(made.model.layers[layer].self_attn.get_submodule(part)):
        feed(made, cache, 11, tokens)
    if part != "kv_norm" or layer:  # before anything is stored nothing is to be undone
        hf.take_advice(cache, lambda: feed(made, cache, 11, 1))
    assert cache.get_seq_length() == 11
    hf.close(feed(made, cache, 11, 1, 3, 8), whole[:, 11:])


def test_entries_have_room_for_as_many_tokens_as_were_asked_for(made: Any, whole: torch.Tensor) -> None:
    cache = cache_of(made, capacity=13)
    feed(made, cache, 0, 12)
    tops = [top for top in cache.rows.pool.family.tops if isinstance(top, CompressedCache)]
    assert {top.rate: top.entries.cells for top in tops} == {2: 2 * 7, 3: 2 * 5}
    with pytest.raises(CacheFullError, match="capacity=13"):
        feed(made, cache, 12, 6)
    hf.close(feed(made, cache, 12, 1), whole[:, 12:13])
    cache.reserve(32)
    hf.close(feed(made, cache, 13, 6), whole[:, 13:19])


def test_what_has_no_boundary_at_every_token_is_refused(made: Any) -> None:
    cache = cache_of(made)
    feed(made, cache, 0, 9)
    with pytest.raises(NotSupportedError, match="several tokens each; remove the end only"):
        cache.remove(2, 4)
    assert cache.get_seq_length() == 9
    with pytest.raises(NotSupportedError, match="several tokens each; use HFCache"):
        HFStaticCache(made.config, capacity=8)
    with pytest.raises(NotSupportedError, match="several tokens each; prefixes"):
        HFPrefixCache(made)


@pytest.mark.parametrize("rate", RATES)
def test_entries_are_those_of_a_plain_dictionary(rate: int) -> None:
    backend = ml.open_backend("numpy")
    rng, cache = np.random.default_rng(rate), CompressedCache(rate)
    cache.init(backend, ml.DType.F32, 3, 40, 1)
    model: list[list[float]] = [[], [], []]
    """The number of each token of each sequence; an entry is the sum of its window."""
    with backend.new_context() as ctx:
        for _ in range(200):
            seq, other = (int(x) for x in rng.choice(3, 2, replace=False))
            held, choice = len(model[seq]), rng.integers(5)
            if choice < 2 and held < 36:
                new = rng.normal(size=int(rng.integers(1, 5))).tolist()
                cache.start_forward(ctx, Batch(range(held, held + len(new)), [seq] * len(new)))
                if rng.random() < 0.2:
                    cache.undo_forward()
                    continue
                model[seq] += new
                closed = entries_of(model[seq], rate)[held // rate :]
                if closed.size:
                    cache.entries.set_layer(0)
                    cache.entries.put(ctx, ctx.from_numpy(closed.astype(np.float32).reshape(-1, 1, 1)))
            elif choice == 2:
                kept = int(rng.integers(held + 1))
                cache.remove(seq, kept)
                model[seq] = model[seq][:kept]
            elif choice == 3:
                kept = int(rng.integers(held + 1))
                cache.copy_prefix(seq, other, kept)
                model[other] = model[seq][:kept]
            else:
                end = int(rng.integers(held + 1))
                snapshot = cache.snapshot(seq, 0, end)
                assert (snapshot.begin, snapshot.end, snapshot.positions.size) == (0, end, end // rate)
                kept = int(rng.integers(end + 1))
                assert cache.restore(other, snapshot, kept)
                model[other] = model[seq][:kept]
            for seq, numbers in enumerate(model):
                if len(numbers) >= rate:
                    found, _ = DenseBatch(cache.entries, [seq]).read(ctx, 0)
                    np.testing.assert_allclose(found.to_numpy().ravel(), entries_of(numbers, rate), rtol=1e-6)
                else:
                    assert cache.entries.offset(seq) == 0


def entries_of(numbers: list[float], rate: int) -> np.ndarray:
    return np.array(numbers[: len(numbers) // rate * rate]).reshape(-1, rate).sum(1)
