"""attn_implementation="kvcache": models attend by our caches, with the results of transformers' own way."""

from __future__ import annotations

import contextlib
import copy
import itertools
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("torch")

import torch
import torch._dynamo.utils
import transformers
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama

import ml
from benchmarks.census import transformers as census
from kvcache import CacheFullError, NotSupportedError
from kvcache.integrations.transformers import HFCache, HFPrefixCache, HFStaticCache, attention, stored
from kvcache.integrations.transformers.deferred import Deferred
from kvcache.integrations.transformers.pool import CachePool

from ...rigs import hf_models as hf

CASES = [
    *(("gemma3", mode) for mode in hf.MODES if mode != "sampling"),
    *((name, mode) for name in ("llama", "gpt-oss") for mode in ("chat", "padded beams", "assisted")),
    ("llama", "chunked prefill"), ("gpt-oss", "prompt lookup"), ("qwen3", "left padding"),
    *((name, mode) for name in ("llama4", "qwen3-next") for mode in ("padded beams", "chat")),
    ("mistral", "left padding"), ("gemma2", "left padding"), ("t5", "left padding"), ("whisper", "beams"),
]  # fmt: skip
OTHER_WAY = {"gemma2": "softcap", "t5": "position_bias"}
"""Models that ask for what a cache does not do."""

CENSUS = ("inkling2_text", "inkling2_loop_text", "bigbird_pegasus")
"""Types that give sinks by another name, a bias, or modules that are not causal a prompt that is."""


def theirs(name: str) -> str:
    return "eager" if name in ("gpt-oss", "gemma2") else "sdpa"  # which knows no sinks and no softcap


def step(made: Any, cache: Any, ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Logits (rows, vocabulary) of the last tokens."""
    with torch.no_grad():
        logits: torch.Tensor = made(input_ids=ids, attention_mask=mask, past_key_values=cache).logits[:, -1]
    return logits


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each layer's attention was the cache's; padding is left out wherever there is some."""
    found: list[bool] = []
    attend = stored.Stored.attend

    def counted(self: stored.Stored, *arguments: Any) -> Any:
        out = attend(self, *arguments)
        found.append(out is not None)
        return out

    monkeypatch.setattr(stored.Stored, "attend", counted)
    monkeypatch.setattr(stored, "CALLS", 0)
    attention._say.cache_clear()
    return found


@pytest.mark.parametrize(("name", "mode"), CASES, ids=map(", ".join, CASES))
def test_tokens_and_logits_are_those_of_transformers_own_way(
    name: str, mode: str, served: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    expected = hf.expected(name, mode, theirs(name))
    made = hf.model(name, attention.ATTENTION)
    found = hf.MODES[mode](name, made, HFCache(made.config, capacity=64, lookback=24))
    assert found.distance(expected) <= 2e-5
    assert any(served) == (name not in OTHER_WAY)
    assert f"it asks for {OTHER_WAY.get(name)}" in caplog.text or name not in OTHER_WAY


@pytest.mark.parametrize(
    "options",
    [{"num_return_sequences": 3}, {"num_return_sequences": 2, "num_beams": 2}, {"prefill_chunk_size": 4}],
    ids=["answers", "beams", "parts that are padding"],
)
def test_several_answers_and_prompts_in_parts(options: dict[str, Any], served: list[bool]) -> None:
    batch, options = hf.inputs("llama", 2, 9), {"do_sample": True, **options}
    expected = hf.generate(hf.model("llama", "sdpa"), batch, **options)
    made = hf.model("llama", attention.ATTENTION)
    found = hf.generate(made, batch, HFCache(made.config, capacity=64), **options)
    assert found.distance(expected) <= 2e-5
    assert all(served)


@pytest.mark.parametrize(("backend", "seed"), [("torch", 0), ("torch", 1), ("torch", 2), ("numpy", 0)])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_masks_of_any_form_that_change_from_pass_to_pass(
    backend: str, name: str, seed: int, served: list[bool]
) -> None:
    """Holes anywhere, shown again later; no mask at all; rows that take each other's place."""
    random = np.random.default_rng(seed)
    own, made = hf.model(name, "sdpa"), hf.model(name, attention.ATTENTION)
    plain = transformers.DynamicCache(config=own.config)
    ours = HFCache(made.config, max_sequences=3, capacity=80, lookback=32, backend=backend)
    mask = torch.zeros(3, 0, dtype=torch.long)
    for i in range(10):
        count = int(random.choice((1, 1, 1, 4, 9)))
        mask = torch.cat((mask, torch.from_numpy(random.random((3, count)) < 0.7).long()), 1)
        if random.random() < 0.3:
            past = mask.shape[1] // 2
            mask[:, :past] = torch.from_numpy(random.random((3, past)) < 0.7)
        shown = None if random.random() < 0.15 else mask
        ids = hf.tokens(3, count, seed=i)
        hf.close(step(made, ours, ids, shown), step(own, plain, ids, shown))
        if random.random() < 0.3:
            order = torch.from_numpy(random.integers(0, 3, 3))
            plain.reorder_cache(order)
            ours.reorder_cache(order)
            mask = mask[order]
    assert all(served)


@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_a_step_behind_a_token_that_is_hidden_reads_its_own_token(name: str, served: list[bool]) -> None:
    """Of one row, of both, and twice in a row."""
    own, made = hf.model(name, theirs(name)), hf.model(name, attention.ATTENTION)
    plain, ours = transformers.DynamicCache(config=own.config), HFCache(made.config, capacity=32)
    ids, mask = hf.tokens(2, 13), torch.ones(2, 13, dtype=torch.long)
    mask[0, [5, 8, 9]] = mask[1, 8] = 0
    for begin, end in itertools.pairwise((0, *range(4, 14))):
        given = ids[:, begin:end], mask[:, :end]
        hf.close(step(made, ours, *given), step(own, plain, *given))
    assert all(served)


class TestKeysAndValuesThatTheModelReturns:
    """Gemma 4's, which are made when something looks into them; storage of another dtype copies them."""

    @pytest.mark.skipif(not hasattr(transformers, "Gemma4AssistantConfig"), reason="of newer transformers")
    @pytest.mark.parametrize(("options", "most"), [({"lookback": 0}, 1e-4), ({"dtype": "float16"}, 0.05)])
    def test_are_read_behind_a_crop(self, options: dict[str, Any], most: float) -> None:
        """Its own assistant drafts from them, when what was rejected has been taken back."""
        small = {"vocab_size": 12, "tie_word_embeddings": False}
        own, made = (hf.model("gemma4", way, seed=2, **small) for way in ("sdpa", attention.ATTENTION))
        config = copy.deepcopy(own.config)
        config.num_kv_shared_layers, config.vocab_size_per_layer_input = 2, 0
        torch.manual_seed(1)
        assistant = transformers.Gemma4AssistantForCausalLM(
            transformers.Gemma4AssistantConfig(text_config=config, backbone_hidden_size=32)
        ).eval()
        assistant.generation_config.num_assistant_tokens = 3
        drafted: list[torch.Tensor] = []
        assistant.register_forward_hook(lambda module, given, found: drafted.append(found.logits))
        batch = {"input_ids": hf.tokens(1) % 12}
        draft: dict[str, Any] = {"assistant_model": assistant, "max_new_tokens": 24}
        expected = hf.generate(own, batch, **draft)
        wanted = [*drafted]
        drafted.clear()
        found = hf.generate(made, batch, HFCache(made.config, capacity=64, **options), **draft)
        assert found.distance(expected) < most
        hf.close(torch.cat(drafted), torch.cat(wanted), most)
        assert len(drafted) < 60  # some were accepted

    def test_are_read_behind_the_next_pass(self) -> None:
        made, ids = hf.model("gemma4", attention.ATTENTION), hf.tokens(2)
        options: dict[str, Any] = {"return_shared_kv_states": True}
        cache, other = (HFCache(made.config, capacity=64, dtype="float16") for _ in range(2))
        with torch.no_grad():
            kept = made(ids, past_key_values=cache, **options).shared_kv_states["full_attention"]
            at_once = made(ids, past_key_values=other, **options).shared_kv_states["full_attention"]
            expected = [one + 0 for one in at_once]
            made(ids, past_key_values=cache)
        assert all(torch.equal(one, two) for one, two in zip(kept, expected, strict=True))

    def test_are_not_made_where_nobody_keeps_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made, ids = hf.model("llama", attention.ATTENTION), hf.tokens(2)
        cache = HFCache(made.config, capacity=64, dtype="float16")
        monkeypatch.setattr(CachePool, "read", None)
        for _ in range(2):
            hf.feed(made, cache, ids)
            cache.crop(-3)

    def test_are_not_made_of_a_pass_that_failed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its error keeps them, and may say that memory is short."""
        made, ids = hf.model("llama", attention.ATTENTION), hf.tokens(2)
        cache = HFCache(made.config, capacity=64, dtype="float16")
        hf.feed(made, cache, ids)
        monkeypatch.setattr(CachePool, "read", None)
        kept: list[Deferred] = []
        pair = stored.Stored.pair

        def keeping(*given: Any) -> Any:
            found = pair(*given)
            kept.extend(found)
            return found

        monkeypatch.setattr(stored.Stored, "pair", keeping)
        with hf.failing(made.model.layers[0].self_attn.o_proj):
            hf.feed(made, cache, ids)
        cache.crop(-hf.PROMPT)
        assert [one.made for one in kept] == [None, None]


class TestSharedPrompt:
    """Four rows that share 13 tokens, and go on with 3 to 6 of their own, padded in between."""

    @pytest.fixture
    def rows(self) -> tuple[HFCache, torch.Tensor, torch.Tensor]:
        made = hf.model("llama", attention.ATTENTION)
        cache = HFCache(made.config, max_sequences=4, capacity=64)
        cache.bind(torch.empty(0)).tops[0].set_config(ml.CacheConfig(call_bytes=1))  # whatever is shared
        hf.feed(made, cache, hf.tokens(1))
        cache.batch_repeat_interleave(4)
        mask = torch.ones(4, 19, dtype=torch.long)
        for row in range(4):
            mask[row, 13 : 13 + row] = 0
        return cache, hf.tokens(4, 6), mask

    @pytest.fixture
    def expected(self, rows: tuple[HFCache, torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
        """Logits of what the rows add, and of two tokens more."""
        own, (_, ids, mask) = hf.model("llama", "sdpa"), rows
        plain = transformers.DynamicCache(config=own.config)
        hf.feed(own, plain, hf.tokens(1).expand(4, -1))
        return [step(own, plain, *given) for given in self.passes(ids, mask)]

    @staticmethod
    def passes(ids: torch.Tensor, mask: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        one = torch.ones(4, 1, dtype=torch.long)
        longer = torch.cat((mask, one), 1)
        return [(ids, mask), (ids[:, :1], longer), (ids[:, 1:2], torch.cat((longer, one), 1))]

    def test_is_read_once_and_nothing_dense_is_made(
        self, rows: Any, expected: Any, served: list[bool], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*arguments: Any, **options: Any) -> None:
            raise AssertionError("dense keys or a dense mask")

        made, (cache, ids, mask) = hf.model("llama", attention.ATTENTION), rows
        for owner, name in ((attention, "sdpa_mask"), (attention, "eager_mask"), (CachePool, "read")):
            monkeypatch.setattr(owner, name, refuse)
        for given, logits in zip(self.passes(ids, mask), expected, strict=True):
            hf.close(step(made, cache, *given), logits)
            causal = cache.rows.pool.family.all
            reading = causal.pass_under_way().reading.segments(1)
            padding = int((mask == 0).sum())
            assert sum(segment.length for segment in reading) == causal.cells - causal.free_cells - padding
        assert served == [True] * 6

    @pytest.mark.parametrize("change", ["keys", "mask"])
    def test_what_the_model_looks_into_is_made(
        self, change: str, rows: Any, expected: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
    ) -> None:
        attention._say.cache_clear()
        made, (cache, ids, mask) = hf.model("llama", attention.ATTENTION), rows
        forward = type(made.model.layers[0].self_attn).forward

        def changed(self: Any, hidden_states: Any, *arguments: Any, **options: Any) -> Any:
            options["attention_mask"] = options["attention_mask"][:, :, :, :]
            return forward(self, hidden_states, *arguments, **options)

        if change == "mask":
            monkeypatch.setattr(type(made.model.layers[0].self_attn), "forward", changed)
        else:
            update = HFCache.update
            monkeypatch.setattr(
                HFCache, "update", lambda *given, **more: tuple(x * 1 for x in update(*given, **more))
            )
        for given, logits in zip(self.passes(ids, mask), expected, strict=True):
            hf.close(step(made, cache, *given), logits)
        told = {"keys": "not come from an HFCache", "mask": "more than causal"}[change]
        assert len(caplog.messages) == 1
        assert told in caplog.text


@pytest.mark.parametrize("grow", [True, False])
def test_a_padded_prompt_in_parts_grows_a_full_cache_or_says_that_it_is_full(
    grow: bool, served: list[bool]
) -> None:
    made, given = hf.model("llama", attention.ATTENTION), hf.inputs("llama", 2, 3)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "prefill_chunk_size": 8}
    cache = HFCache(made.config, capacity=10, grow=grow)
    with contextlib.nullcontext() if grow else pytest.raises(CacheFullError, match="pass a larger capacity="):
        found = made.generate(**given, past_key_values=cache, **options)
        assert torch.equal(found, hf.model("llama", "sdpa").generate(**given, **options))
    assert all(served)


def test_a_conversation_goes_on_from_a_prefix_that_another_has_had(served: list[bool]) -> None:
    made, own = hf.model("llama", attention.ATTENTION), hf.model("llama", "sdpa")
    with HFPrefixCache(made, max_sequences=2, capacity=64) as prefix:
        for seed in (0, 1):
            ids = torch.cat((hf.tokens(1), hf.tokens(1, 5, seed)), 1)
            found = prefix.generate(ids, max_new_tokens=6, do_sample=False)
            assert torch.equal(found, own.generate(ids, max_new_tokens=6, do_sample=False))
        assert prefix.prefix.stats.reused == 13
    assert all(served)


@pytest.mark.parametrize(
    "options", [{"dtype": ml.DType.Q8_0}, {"dtype": torch.float16}, {"backend": "numpy"}]
)
def test_what_is_stored_in_another_way_is_attended_to_alike(
    options: dict[str, Any], served: list[bool]
) -> None:
    results = []
    for way in ("sdpa", attention.ATTENTION):
        made = hf.model("llama", way, head_dim=32)
        cache = HFCache(made.config, capacity=64, **options)
        results.append(hf.generate(made, hf.inputs("llama", 3, 5), cache))
    assert results[1].distance(results[0]) <= 2e-2
    assert all(served)


class TestOtherWays:
    """What is transformers' own attention, and told once."""

    @pytest.fixture(autouse=True)
    def fresh(self) -> None:
        attention._say.cache_clear()

    def check(self, cache: Any, caplog: Any, told: str) -> None:
        made = hf.model("llama", attention.ATTENTION)
        plain = transformers.DynamicCache(config=made.config)
        own, ids, mask = hf.model("llama", "sdpa"), *hf.inputs("llama", 3, 5).values()
        one = torch.ones(3, 1, dtype=torch.long)
        for given in ((ids, mask), (ids[:, :1], torch.cat((mask, one), 1))):
            hf.close(step(made, cache, *given), step(own, plain, *given))
        assert [told in message for message in caplog.messages] == [True] * bool(told)

    def test_another_cache(self, caplog: Any) -> None:
        config = hf.model("llama", attention.ATTENTION).config
        self.check(transformers.DynamicCache(config=config), caplog, "not come from an HFCache")
        caplog.clear()
        attention._say.cache_clear()
        self.check(HFCache(hf.model("llama", "sdpa").config, capacity=32), caplog, "not come from an HFCache")
        caplog.clear()
        self.check(HFStaticCache(config, capacity=32), caplog, "")

    @pytest.mark.parametrize(
        "make",
        [
            lambda config: HFStaticCache(config, capacity=32),
            lambda config: transformers.StaticCache(config, max_cache_len=32),
        ],
        ids=["HFStaticCache", "StaticCache"],
    )
    @pytest.mark.parametrize("name", ["llama", "gemma3"])
    def test_several_tokens_at_once_behind_a_cache_of_fixed_shapes(self, name: str, make: Any) -> None:
        made, ids = hf.model(name, attention.ATTENTION), hf.tokens(2, 20)
        cache = make(made.config)
        for part in (slice(0, 6), slice(6, 15), slice(15, 20)):
            expected = hf.feed(hf.model(name), None, ids)[:, part]
            hf.close(hf.feed(made, cache, ids[:, part]), expected)

    def test_weights_that_are_asked_for_are_given(self, caplog: Any) -> None:
        made, ids = hf.model("llama", attention.ATTENTION), hf.tokens(2)
        eager = hf.model("llama", "eager")
        with torch.no_grad():
            found = made(ids, past_key_values=HFCache(made.config, capacity=32), output_attentions=True)
            expected = eager(ids, output_attentions=True)
        hf.close(found.attentions[1], expected.attentions[1])
        assert "output_attentions" in caplog.text

    def test_sinks_are_never_left_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made, eager = (hf.model("gpt-oss", way) for way in (attention.ATTENTION, "eager"))
        ids = hf.tokens(2)
        hf.close(hf.feed(made, None, ids), hf.feed(eager, None, ids))
        monkeypatch.setattr(
            modeling_gpt_oss, "eager_attention_forward", modeling_llama.eager_attention_forward
        )
        with pytest.raises(NotSupportedError, match="GptOssAttention asks for s_aux"):
            hf.feed(made, None, ids)

    @pytest.mark.parametrize("cache", [None, transformers.DynamicCache, HFCache], ids=str)
    @pytest.mark.parametrize("value", [torch.ones(1), 2.0, True, "linear"], ids=repr)
    def test_a_keyword_that_nothing_knows_is_refused(
        self, value: object, cache: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Unless the model's own attention knows it, which then computes."""
        made, ids = hf.model("llama", attention.ATTENTION), hf.tokens(2)
        told: list[object] = []

        def eager(*given: Any, temperature: object = None, **options: Any) -> Any:
            told.append(temperature)
            return own(*given, **options)

        def hand_on(self: Any, *given: Any, **options: Any) -> Any:
            return forward(self, *given, temperature=value, **options)

        own, forward = modeling_llama.eager_attention_forward, modeling_llama.LlamaAttention.forward
        monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", hand_on)
        attention._own_names.cache_clear()
        with pytest.raises(NotSupportedError, match="LlamaAttention asks for temperature, which neither"):
            hf.feed(made, cache and cache(config=made.config), ids)
        monkeypatch.setattr(modeling_llama, "eager_attention_forward", eager)
        found = hf.feed(made, cache and cache(config=made.config), ids)
        hf.close(found, hf.feed(hf.model("llama", "sdpa"), None, ids))
        assert told == [value, value]
        attention._own_names.cache_clear()

    @pytest.mark.parametrize("cache", [None, transformers.DynamicCache, HFCache], ids=str)
    @pytest.mark.parametrize("value", [3, "3", False, 3.0], ids=repr)
    @pytest.mark.parametrize("named", [True, False])
    def test_a_keyword_that_the_models_own_attention_reads_is_honoured(
        self, named: bool, value: Any, cache: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Where the caller of the model gives it, which its layers hand on unread."""

        def by_name(*given: Any, scaling: float, sharpness: Any = 1, **options: Any) -> Any:
            return own(*given, scaling=scaling * float(sharpness), **options)

        def of_the_rest(*given: Any, scaling: float, **options: Any) -> Any:
            return own(*given, scaling=scaling * float(options.pop("sharpness", 1)), **options)

        own, ids = modeling_llama.eager_attention_forward, hf.tokens(2)
        monkeypatch.setattr(modeling_llama, "eager_attention_forward", by_name if named else of_the_rest)
        made, eager = (hf.model("llama", way) for way in (attention.ATTENTION, "eager"))
        with torch.no_grad():
            expected = eager(ids, sharpness=value, use_cache=False).logits
            found = made(ids, sharpness=value, past_key_values=cache and cache(config=made.config)).logits
            plain = made(ids, use_cache=False).logits
        hf.close(found, expected)
        assert (found - plain).abs().max() > 1e-3

    def test_what_is_for_other_parts_of_a_model_is_handed_on(self) -> None:
        made, ids = hf.model("llama", attention.ATTENTION), hf.tokens(2)
        cache, more = HFCache(made.config, capacity=32), {"output_router_logits": True, "of_another_part": 7}
        with torch.no_grad():
            found = made(ids, past_key_values=cache, token_type_ids=ids, **more).logits
        hf.close(found, hf.feed(hf.model("llama", "sdpa"), None, ids))

    @pytest.mark.parametrize("cache", [None, transformers.DynamicCache, HFCache], ids=str)
    @pytest.mark.parametrize("label", CENSUS)
    def test_types_that_ask_for_what_is_not_common(self, label: str, cache: Any) -> None:
        """Prompts, and steps behind them, as by the attention that is the model's own."""
        made = census.Case(label).model
        made.set_attn_implementation("eager")
        ids = hf.tokens(2, 20)
        expected = hf.feed(made, None, ids)
        made.set_attn_implementation(attention.ATTENTION)
        cache = cache and cache(config=made.config)
        if cache is None:
            hf.close(hf.feed(made, None, ids), expected, 1e-4)
        else:
            parts = [hf.feed(made, cache, ids[:, begin:end]) for begin, end in ((0, 12), (12, 13), (13, 20))]
            hf.close(torch.cat(parts, 1), expected, 1e-4)

    def test_blocks_that_an_indexer_chooses_are_not_left_out(self) -> None:
        """MiniMax M3 folds them into the masks of "eager" and "sdpa" alone."""
        config = copy.deepcopy(census.Case("minimax_m3_vl_text").config)
        config.layer_types = ["minimax_m3_sparse"] * len(config.layer_types)
        config._attn_implementation = attention.ATTENTION
        made = transformers.MiniMaxM3VLForCausalLM(config)
        with pytest.raises(NotSupportedError, match="asks for block_indices"):
            hf.feed(made, None, hf.tokens(2))

    def test_training(self, caplog: Any) -> None:
        """Gradients reach the queries, as they do with HFCache and SDPA."""
        grads = []
        for way in ("sdpa", attention.ATTENTION):
            made, ids = hf.model("llama", way, seed=5), hf.tokens(2)
            weight = made.model.layers[1].self_attn.q_proj.weight.requires_grad_()
            made(ids, past_key_values=HFCache(made.config, capacity=32)).logits.sum().backward()
            grads.append(weight.grad)
            weight.requires_grad_(False)
        hf.close(*grads)
        assert "gradients" in caplog.text
        caplog.clear()
        made.model.layers[1].self_attn.attention_dropout = 0.5
        with torch.no_grad():
            made.train()(ids, past_key_values=HFCache(made.config, capacity=32))
        made.eval()
        assert "dropout" in caplog.text

    def test_a_mask_of_ones_own(self, caplog: Any) -> None:
        made, own, ids = hf.model("llama", attention.ATTENTION), hf.model("llama", "sdpa"), hf.tokens(2)
        shown = torch.rand(2, 1, 13, 13, generator=torch.Generator().manual_seed(1)) < 0.5
        shown |= torch.eye(13, dtype=torch.bool)
        hf.close(step(made, HFCache(made.config, capacity=32), ids, shown), step(own, None, ids, shown))
        assert "more than causal" in caplog.text

    def test_changing_the_way_with_a_cache_that_is_in_use(self) -> None:
        made, own, ids = hf.model("llama", "sdpa", seed=3), hf.model("llama", "eager", seed=3), hf.tokens(3)
        cache, plain = HFCache(made.config, capacity=64), transformers.DynamicCache(config=own.config)
        try:
            for way in ("sdpa", attention.ATTENTION, "eager", attention.ATTENTION):
                made.set_attn_implementation(way)
                hf.close(hf.feed(made, cache, ids), hf.feed(own, plain, ids))
                hf.close(hf.feed(made, cache, ids[:, :1]), hf.feed(own, plain, ids[:, :1]))
        finally:
            made.set_attn_implementation("sdpa")

    @pytest.mark.parametrize("kind", [HFCache, HFStaticCache])
    def test_compiled_code_steps_out_of_the_graph_for_a_cache_that_grows(self, kind: Any) -> None:
        """Its cell table is not traced: the graph breaks, and the numbers are right."""
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        made, own = (hf.model("llama", way, num_hidden_layers=1) for way in (attention.ATTENTION, "sdpa"))
        compiled = torch.compile(made.model, backend="eager", fullgraph=kind is HFStaticCache, dynamic=False)
        cache, plain = kind(made.config, capacity=32), transformers.DynamicCache(config=own.config)
        hf.close(hf.feed(made, cache, hf.tokens(2)), hf.feed(own, plain, hf.tokens(2)))
        with torch.no_grad():
            found = compiled(input_ids=hf.tokens(2, 1), past_key_values=cache).last_hidden_state
        hf.close(made.lm_head(found), hf.feed(own, plain, hf.tokens(2, 1)))
        breaks = str(torch._dynamo.utils.counters["graph_break"])
        assert ("wrapped with `torch.compiler.disable`" in breaks) == (kind is HFCache)
        torch._dynamo.reset()


class TestDeferred:
    def test_is_made_by_the_first_operation_and_not_by_its_metadata(self) -> None:
        made: list[int] = []

        def make() -> torch.Tensor:
            made.append(1)
            return torch.arange(6.0).reshape(2, 3)

        found = Deferred.of(torch.empty(()), (2, 3), make)
        assert (found.shape, found.size(1), found.dim()) == ((2, 3), 3, 2)
        assert (found.dtype, found.device.type, found.is_cpu) == (torch.float32, "cpu", True)
        assert not made
        found += 1
        found[0, 0] = 7
        assert torch.cat([found, found]).tolist() == [[7, 2, 3], [4, 5, 6]] * 2
        assert type(found * 1) is torch.Tensor
        assert made == [1]
