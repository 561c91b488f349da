"""HFPrefixCache: conversations that share prefixes, against ``generate`` without any sharing."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("transformers")
pytest.importorskip("torch")

import torch
import transformers

from kvcache import (
    ClosedError,
    DenseBatch,
    InvalidRangeError,
    InvalidSequenceError,
    NotSupportedError,
    OrderError,
    PrefixOptions,
)
from kvcache.integrations.transformers import HFCache, HFPrefixCache
from kvcache.integrations.transformers import cache as cache_module
from kvcache.prefix.prefix_cache import SessionLimitError
from kvcache.stores import MemoryStore

from ...rigs import hf_models as hf
from ...rigs.hf_models import OPTIONS, llama, plain
from ...rigs.threads import switching_often
from ..agent_sessions import check_that_what_only_a_closed_one_used_goes_first
from ..moving import moves


@pytest.mark.parametrize("name", ["gemma3", "llama4", "qwen3-next"])
def test_a_chat_is_never_read_again(name: str) -> None:
    """Three turns and a side branch; each goes on where the one before ended."""
    made, ids = hf.model(name), hf.tokens(1, 30)
    with HFPrefixCache(made, capacity=200, lookback=8, options=PrefixOptions(interval=16)) as prefix:
        told = []
        for turn in range(3):
            expected = plain(made, ids)
            before = prefix.prefix.stats.reused
            assert torch.equal(prefix.generate(ids, **OPTIONS), expected)
            told.append(prefix.prefix.stats.reused - before)
            ids = torch.cat((expected, hf.tokens(1, 6, seed=turn)), 1)
        # A state that has seen the last prompt's end is that of the prompt, at least.
        assert told[0] == 0
        assert told[1] >= 29
        assert told[2] >= 29 + 14
        branch = torch.cat((ids[:, :30], hf.tokens(1, 9, seed=7)), 1)
        assert torch.equal(prefix.generate(branch, **OPTIONS), plain(made, branch))
        assert prefix.prefix.stats.reused - sum(told) >= 16


@pytest.mark.parametrize("name", ["gemma3", "mistral", "qwen3-next"])
def test_more_chats_in_turn_than_sequences_compute_what_is_new(name: str) -> None:
    """The cells of a window are those of two conversations; what is kept of four goes beside them."""
    made, chats = hf.model(name), [hf.tokens(1, 40, seed=seed) for seed in range(4)]
    every = PrefixOptions(interval=16)
    with HFPrefixCache(made, max_sequences=2, capacity=512, lookback=8, options=every) as prefix:
        for turn in range(3):
            for i, ids in enumerate(chats):
                before, expected = prefix.prefix.stats.reused, plain(made, ids)
                assert torch.equal(prefix.generate(ids, **OPTIONS), expected)
                computed = ids.shape[1] - (prefix.prefix.stats.reused - before)
                assert computed == 40 if not turn else computed <= 31
                chats[i] = torch.cat((expected, hf.tokens(1, 30, seed=10 * turn + i)), 1)


def test_rows_are_read_in_place_in_a_cache_full_of_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    """What others left in the way moves aside once in many tokens; a gather would copy all of them each."""
    made, read = hf.model("llama"), DenseBatch.read
    gathered: list[bool] = []

    def watched(reading: DenseBatch, *args: Any) -> Any:
        gathered.append(not reading.is_view)
        return read(reading, *args)

    monkeypatch.setattr(DenseBatch, "read", watched)
    with HFPrefixCache(made, max_sequences=2, capacity=400) as prefix:
        for turn in range(10):
            ids = hf.tokens(1, 150 - 7 * turn, seed=turn)
            gathered.clear()
            options = {"do_sample": False, "min_new_tokens": 90, "max_new_tokens": 90}
            assert torch.equal(prefix.generate(ids, **options), made.generate(ids, **options))
            assert sum(gathered) <= 4 * made.config.num_hidden_layers
        with prefix.begin(hf.tokens(1, 150, seed=0)[0].tolist()) as session:
            assert not session.cached, "the cache is full"


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3-next"])
def test_answers_are_the_same_while_rows_move_all_the_time(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, moved = hf.model(name), moves(monkeypatch)
    with HFPrefixCache(made, max_sequences=2, capacity=100, lookback=8) as prefix:
        chats = [hf.tokens(1, 60 + 3 * seed, seed=seed) for seed in range(4)]
        for turn in range(2):
            for i, ids in enumerate(chats):
                options = {"do_sample": False, "min_new_tokens": 30, "max_new_tokens": 30}
                found = prefix.generate(ids, **options)
                every = torch.ones_like(ids)  # an answer may have had the padding token
                assert torch.equal(found, made.generate(ids, attention_mask=every, **options))
                chats[i] = torch.cat((found, hf.tokens(1, 9, seed=10 * turn + i)), 1)
    assert sum(moved) >= 10


def test_a_model_whose_config_has_no_longest_position_shares_prefixes() -> None:
    config = transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4)
    made, ids = transformers.BloomForCausalLM(config).eval(), hf.tokens(1, 20)
    with HFPrefixCache(made, capacity=100) as prefix:
        first = prefix.generate(ids, **OPTIONS)
        assert torch.equal(first, plain(made, ids))
        assert torch.equal(prefix.generate(first, **OPTIONS), plain(made, first))
        assert prefix.prefix.stats.reused >= 20


@pytest.mark.parametrize("name", ["gemma3", "qwen3-next"])
def test_a_store_serves_another_process(name: str) -> None:
    made, ids, store = hf.model(name), hf.tokens(1, 40), MemoryStore()
    every = PrefixOptions(interval=16)
    options: dict[str, Any] = {"capacity": 100, "lookback": 8, "block_size": 16, "options": every}
    identity = {"model": name}
    with HFPrefixCache(made, tiers=[store], identity=identity, **options) as first:
        first.generate(ids, **OPTIONS)
    with HFPrefixCache(made, tiers=[store], identity=identity, **options) as second:
        assert torch.equal(second.generate(ids, **OPTIONS), plain(made, ids))
        assert second.prefix.stats.store >= 16


def test_tenants_find_what_is_their_own() -> None:
    made, ids = hf.model("llama"), hf.tokens(1)
    with HFPrefixCache(made, capacity=64) as cache:
        expected = made.generate(ids, max_new_tokens=3, do_sample=False)
        for salt, cached in (("a", 0), ("a", 12), ("b", 0)):
            with cache.begin(ids[0].tolist(), salt) as session:
                assert session.cached == cached
                session.close(keep=False)
            found = cache.generate(ids, salt=salt, max_new_tokens=3, do_sample=False)
            assert torch.equal(found, expected)
        with cache.begin(ids[0].tolist(), "c", shared=4) as session:
            assert session.cached == 0


def test_what_only_a_closed_session_of_an_agent_used_goes_first() -> None:
    prompts = [hf.tokens(1, 24, seed=seed)[0].tolist() for seed in (1, 2, 3)]
    with HFPrefixCache(hf.model("llama"), capacity=68, max_sequences=1) as cache:
        check_that_what_only_a_closed_one_used_goes_first(
            cache, prompts, lambda prompt, **given: cache.generate(torch.tensor([prompt]), **given, **OPTIONS)
        )


def test_conversations_side_by_side() -> None:
    made, ids = hf.model("gemma3"), hf.tokens(1, 24)
    ends = [hf.tokens(1, 5, seed=seed) for seed in (1, 2)]
    with HFPrefixCache(made, max_sequences=2, capacity=64, lookback=8) as prefix:
        prompts = [torch.cat((ids, end), 1) for end in ends]
        sessions = [prefix.begin(prompt[0].tolist()) for prompt in prompts]
        with pytest.raises(SessionLimitError):
            prefix.begin([5])
        for session in sessions:
            session.prefill(6)
        for prompt, session in zip(prompts, sessions, strict=True):
            assert session.cache.get_seq_length() == 28
            found = made.generate(prompt, past_key_values=session.cache, **OPTIONS)
            assert torch.equal(found, plain(made, prompt))
            session.close()
            assert session.cache.get_seq_length() == 0


def test_prefill_evaluates_a_further_turn_too() -> None:
    made, ids, turn = hf.model("gemma3"), hf.tokens(1, 24), hf.tokens(1, 30, seed=1)
    with HFPrefixCache(made, capacity=100, lookback=8) as prefix, prefix.begin(ids[0].tolist()) as session:
        session.prefill()
        session.extend(turn[0].tolist())
        session.prefill(6)
        assert session.remaining == turn[0, -1:].tolist()
        hf.close(
            hf.feed(made, session.cache, turn[:, -1:]),
            hf.fresh(made, torch.cat((ids, turn[:, :-1]), 1), turn[:, -1:]),
        )


def test_a_conversation_has_one_row() -> None:
    made, ids = hf.model("llama"), hf.tokens(1, 24)
    with HFPrefixCache(made, capacity=64) as prefix, prefix.begin(ids[0].tolist()) as session:
        session.prefill()
        with pytest.raises(InvalidSequenceError, match="0 are free"):
            session.cache.fork()
        snapshot = session.cache.snapshot()
        session.cache.reset()
        assert session.cache.get_seq_length() == 0
        hf.close(hf.feed(made, session.cache, ids), hf.fresh(made, ids))
        session.cache.restore(snapshot)
        hf.close(hf.feed(made, session.cache, ids[:, 23:]), hf.fresh(made, ids[:, :23], ids[:, 23:]))
        two = HFCache(made.config)
        hf.feed(made, two, hf.tokens(2))
        with pytest.raises(InvalidRangeError, match="a snapshot of 2 rows, into 1"):
            session.cache.restore(two.snapshot())
        assert session.remaining == []


@pytest.mark.parametrize("drafted", [3, 12])
def test_an_assistant_drafts_from_a_prefix_too(drafted: int) -> None:
    made, assistant = hf.model("gemma3"), hf.model("gemma3", seed=1)
    assistant.generation_config.num_assistant_tokens = drafted
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    ids = hf.tokens(1, 20)
    with HFPrefixCache(made, capacity=200, lookback=16, options=PrefixOptions(interval=8)) as prefix:
        for seed in range(3):
            expected = plain(made, ids)
            assert torch.equal(prefix.generate(ids, assistant_model=assistant, **OPTIONS), expected)
            ids = torch.cat((expected, hf.tokens(1, 6, seed=seed)), 1)
        assert prefix.prefix.stats.reused >= 19 + 19 + 14


def test_what_was_evaluated_before_an_error_is_kept() -> None:
    """A client that is gone, say: its next request goes on behind the prompt."""
    made, ids = hf.model("llama"), hf.tokens(1, 30)

    class Gone:
        def put(self, value: Any) -> None:
            if value.numel() == 1:
                raise ConnectionResetError

        def end(self) -> None: ...

    with HFPrefixCache(made, capacity=100) as prefix:
        with pytest.raises(ConnectionResetError):
            prefix.generate(ids, streamer=Gone(), **OPTIONS)
        assert torch.equal(prefix.generate(ids, **OPTIONS), plain(made, ids))
        assert prefix.stats.reused == 29
        assert repr(prefix.stats) == "<PrefixStats, sessions: 2; tokens: 60, reused: 29 (device: 29)>"


@pytest.mark.parametrize(("layers", "own"), [(1, 2), (2, 1)])
def test_what_a_model_of_other_layers_has_stored_is_not_taken_for_its_own(layers: int, own: int) -> None:
    """It is known from the start what the model stores: such entries are misses, in the first pass too."""
    store, made, ids = MemoryStore(), llama(own), hf.tokens(1, 40)
    options: dict[str, Any] = {"capacity": 100, "identity": {"model": "same"}, "block_size": 8}
    with HFPrefixCache(llama(layers), tiers=[store], **options) as first:
        first.generate(ids, **OPTIONS)
    with HFPrefixCache(made, tiers=[store], **options) as second:
        assert second.stats.sessions == 0
        assert torch.equal(second.generate(ids, **OPTIONS), plain(made, ids))
        assert (second.stats.reused, second.stats.sessions) == (0, 1)
        assert torch.equal(second.generate(ids, **OPTIONS), plain(made, ids))
        assert second.stats.reused == 39


def test_mistakes_are_named() -> None:
    made, ids = hf.model("llama"), hf.tokens(1, 8)
    with pytest.raises(TypeError, match="no option 'max_cache_len'; it is called capacity here"):
        HFPrefixCache(made, max_cache_len=64)
    with pytest.raises(TypeError, match=r"no option 'capcity'; known: max_sequences, capacity, .* tiers"):
        HFPrefixCache(made, capcity=64)
    with pytest.raises(NotSupportedError, match="only decoders"):
        HFPrefixCache(hf.model("t5"))
    with HFPrefixCache(made, max_sequences=1, capacity=12) as prefix:
        with pytest.raises(InvalidRangeError, match=r"\(1, tokens\)"):
            prefix.generate(hf.tokens(2))
        with pytest.raises(TypeError, match="cache_implementation is given; the HFPrefixCache passes"):
            prefix.generate(ids, cache_implementation="static", **OPTIONS)
        with pytest.raises(AttributeError, match="call the HFPrefixCache's own generate"):
            made.generate(ids, past_key_values=prefix, **OPTIONS)
        with pytest.raises(InvalidRangeError, match="a prompt of 13 tokens; there is room for 12"):
            prefix.generate(hf.tokens(1, 13), **OPTIONS)


def test_threads_wait_for_each_other() -> None:
    """Conversations that share a beginning, by generate and by sessions."""
    made = hf.model("llama")
    prompts = [hf.tokens(1, 15 + i) for i in range(3)]
    for prompt in prompts[1:]:
        prompt[:, :12] = prompts[0][:, :12]
    right = [plain(made, prompt) for prompt in prompts]

    def work(i: int, prefix: HFPrefixCache) -> list[bool]:
        found = []
        for n in range(4):
            if n % 2:
                with prefix.lock, prefix.begin(prompts[i][0].tolist()) as session:
                    session.prefill(4)
                    out = made.generate(prompts[i], past_key_values=session.cache, **OPTIONS)
                    session.extend(out[0, prompts[i].shape[1] :].tolist())
            else:
                out = prefix.generate(prompts[i], **OPTIONS)
            found.append(torch.equal(out, right[i]))
        return found

    with (
        switching_often(),
        HFPrefixCache(made, max_sequences=3, capacity=128) as prefix,
        ThreadPoolExecutor(3) as pool,
    ):
        answers = list(pool.map(work, range(3), [prefix] * 3))
        assert not prefix.prefix.sessions
    assert answers == [[True] * 4] * 3


def test_what_a_server_calls_beside_generation_waits_for_the_answer() -> None:
    made, ids = hf.model("llama"), hf.tokens(1, 12)
    right = plain(made, ids)
    with HFPrefixCache(made, max_sequences=1, capacity=64) as prefix, ThreadPoolExecutor(1) as pool:
        calls: list[Any] = []

        class Streamer:
            def put(self, tokens: torch.Tensor) -> None:
                if not calls:  # in the middle of an answer
                    calls.extend(
                        pool.submit(call) for call in (prefix.clear, prefix.flush, prefix.write_through)
                    )
                    assert prefix.stats.tokens == 12  # which waits for nobody
                assert not calls[0].done()

            def end(self) -> None:
                pass

        assert torch.equal(prefix.generate(ids, streamer=Streamer(), **OPTIONS), right)
        for call in calls:
            call.result()
        assert torch.equal(prefix.generate(ids, **OPTIONS), right)
        assert prefix.stats.reused == 0


def test_a_call_that_fails_lets_the_next_thread_go_on() -> None:
    """Also where it failed in the middle of a pass, and its thread lives on."""
    made = llama(2)
    ids = hf.tokens(1, 12)
    right = plain(made, ids)
    layer = made.model.layers[1]
    with HFPrefixCache(made, max_sequences=1, capacity=64) as prefix, ThreadPoolExecutor(1) as pool:
        prefix.generate(hf.tokens(1, 3), **OPTIONS)
        hook = layer.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pool.submit(prefix.generate, ids, **OPTIONS).result()
        session = pool.submit(prefix.begin, ids[0].tolist()).result()
        with pytest.raises(ZeroDivisionError):
            pool.submit(session.prefill).result()
        hook.remove()
        session.close()
        assert torch.equal(prefix.generate(ids, **OPTIONS), right)


@pytest.mark.parametrize("assisted", [False, True])
@pytest.mark.parametrize("asked", [{"max_new_tokens": 1000}, {"max_length": 1000}])
def test_an_answer_ends_where_there_is_no_more_room(
    caplog: pytest.LogCaptureFixture, asked: dict[str, int], assisted: bool
) -> None:
    made, ids = hf.model("llama"), hf.tokens(1, 10)
    options: dict[str, Any] = {"do_sample": False, **asked}
    if assisted:
        options["assistant_model"] = hf.model("llama")
    right = made.generate(ids, do_sample=False, max_new_tokens=23)
    with HFPrefixCache(made, max_sequences=2, capacity=16) as prefix:
        for _ in range(2):
            assert torch.equal(prefix.generate(ids, **options), right)
        assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
        assert "but will end after 33: there is no more room" in caplog.text
        assert torch.equal(prefix.generate(ids, do_sample=False, max_new_tokens=23), right)
        assert len(caplog.records) == 2


def test_stores_are_written_when_asked_while_conversations_go_on() -> None:
    made, ids, store = hf.model("llama"), hf.tokens(1, 30), MemoryStore()
    options: dict[str, Any] = {"tiers": [store], "identity": {"model": "llama"}, "block_size": 8}
    with HFPrefixCache(made, capacity=100, write_through=False, **options) as prefix:
        prefix.generate(ids, **OPTIONS)
        assert not store.usage().entries
        prefix.flush()
        assert store.usage().entries
        assert not prefix.write_through()


def test_what_the_cache_has_is_not_evaluated_twice() -> None:
    made, ids = hf.model("llama"), hf.tokens(1, 90)
    prompt = ids[0].tolist()
    with HFPrefixCache(made, capacity=200) as prefix, torch.no_grad():
        for begun in (True, False):
            with pytest.raises(OrderError, match=r"session\.remaining"), prefix.begin(prompt) as session:
                if begun:
                    session.prefill()
                made(ids, past_key_values=session.cache)
        with prefix.begin(prompt) as session:
            assert session.cached == 89
            rest = torch.tensor([session.remaining])
            assert rest.tolist() == [prompt[-1:]]
            found = made(rest, past_key_values=session.cache).logits[:, -1]
            torch.testing.assert_close(found, made(ids).logits[:, -1])
            session.extend([5])
            assert session.remaining == [5]


def test_a_first_pass_that_fails_between_two_layers_leaves_what_is_stored_in_use() -> None:
    made, ids, store = llama(3), hf.tokens(1, 20), MemoryStore()
    options: dict[str, Any] = {"capacity": 64, "tiers": [store], "identity": {"model": "a"}, "block_size": 4}
    with HFPrefixCache(made, **options) as prefix:
        prefix.generate(ids, **OPTIONS)
    with HFPrefixCache(made, **options) as prefix:
        with hf.failing(made.model.layers[1]):
            prefix.generate(hf.tokens(1, 12, seed=1), **OPTIONS)
        assert torch.equal(prefix.generate(ids, **OPTIONS), plain(made, ids))
        assert prefix.stats.reused == 19


@pytest.mark.parametrize("how", ["pass", "prefill", "prefill again", "open"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3-next"])
def test_of_a_first_pass_that_fails_nothing_is_kept_or_shared(name: str, how: str) -> None:
    """However its session goes on or ends; the last layer has stored nothing yet."""
    made, ids = hf.model(name), hf.tokens(1, 20)
    with HFPrefixCache(made, max_sequences=2, capacity=64) as prefix:
        session = prefix.begin(ids[0].tolist())
        with hf.failing(made.model.layers[1]):
            if how.startswith("prefill"):
                session.prefill()
            else:
                made(ids, cache=session.cache)
        if how == "prefill again":
            assert session.remaining == ids[0].tolist()
            session.prefill()
        if how != "open":
            session.close()
        assert torch.equal(prefix.generate(ids, **OPTIONS), plain(made, ids))
        assert prefix.stats.reused == (19 if how == "prefill again" else 0)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3-next"])
def test_a_part_of_a_prefill_that_fails_is_evaluated_by_the_next_call(name: str) -> None:
    made, ids = hf.model(name), hf.tokens(1, 20)
    with HFPrefixCache(made, capacity=64) as prefix, prefix.begin(ids[0].tolist()) as session:
        session.prefill(8)
        session.extend(hf.tokens(1, 12, seed=1)[0].tolist())
        longer = torch.tensor([[*ids[0].tolist(), *hf.tokens(1, 12, seed=1)[0].tolist()]])
        with hf.failing(made.model.layers[1]):
            session.prefill(8)
        session.prefill(8)
        rest = torch.tensor([session.remaining])
        assert rest.tolist() == longer[:, -1:].tolist()
        found = made(rest, cache=session.cache).logits[:, -1]
        torch.testing.assert_close(found, made(longer).logits[:, -1])


def test_inputs_beside_the_tokens_are_refused_and_those_that_say_nothing_are_not() -> None:
    made, ids = hf.model("llama"), hf.tokens(1, 9)
    with HFPrefixCache(made, capacity=64) as prefix:
        for name, value in (("position_ids", torch.arange(40, 49)[None]), ("pixel_values", [torch.ones(3)])):
            with pytest.raises(NotSupportedError, match=f"{name} is given besides the tokens"):
                prefix.generate(ids, **{name: value}, **OPTIONS)
        found = prefix.generate(ids, token_type_ids=torch.zeros_like(ids), **OPTIONS)
        assert torch.equal(found, plain(made, ids))


def test_types_of_tokens_that_the_model_embeds_are_refused_even_where_all_are_zero() -> None:
    config = transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4)
    made, ids = transformers.GPT2LMHeadModel(config).eval(), hf.tokens(1, 9)
    with HFPrefixCache(made, capacity=64) as prefix:
        with pytest.raises(NotSupportedError, match="token_type_ids is given besides the tokens"):
            prefix.generate(ids, token_type_ids=torch.zeros_like(ids), **OPTIONS)
        assert not prefix.stats.sessions


@pytest.mark.parametrize("by", ["option", "config", "model"])
@pytest.mark.parametrize("name", ["num_beams", "num_return_sequences"])
def test_several_rows_are_refused_whoever_asks_for_them(by: str, name: str) -> None:
    made, ids, options = llama(1), hf.tokens(1, 9), dict[str, Any](OPTIONS)
    if by == "option":
        options[name] = 3
    elif by == "config":
        options["generation_config"] = transformers.GenerationConfig(**{name: 3}, do_sample=True)
    else:
        made.generation_config.update(**{name: 3}, do_sample=True)
    with HFPrefixCache(made, capacity=64) as prefix:
        with pytest.raises(NotSupportedError, match=f"{name}=3; a conversation is one row: pass {name}=1"):
            prefix.generate(ids, **options)
        assert prefix.generate(ids, **{**options, name: 1}).shape == (1, 17)


@pytest.mark.parametrize("by", ["option", "config", "model"])
@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("token_healing", True, "replaces the last tokens"),
        ("use_mtp", True, "drafts from hidden states of the whole prompt"),
        ("speculation_type", "dflash", "drafts from hidden states of the whole prompt"),
    ],
    ids=lambda value: str(value)[:13],
)
def test_what_does_not_go_with_a_prefix_is_refused(by: str, name: str, value: object, why: str) -> None:
    made, options = llama(1), dict[str, Any](OPTIONS)
    if name == "speculation_type":
        options["assistant_model"] = llama(1)
    off = {**options, name: None}
    if by == "option":
        options[name] = value
    elif by == "config":
        config = transformers.GenerationConfig(**{name: value})
        options, off = ({**given, "generation_config": config} for given in (options, off))
    else:
        made.generation_config.update(**{name: value})
    with HFPrefixCache(made, capacity=64) as prefix:
        with pytest.raises(NotSupportedError, match=f"{name}={value!r} {why}.*; pass {name}=None"):
            prefix.generate(hf.tokens(1, 9), **options)
        prefix.generate(hf.tokens(1, 9), **off)


def test_nothing_is_kept_of_an_answer_to_another_prompt() -> None:
    made, ids = llama(1), hf.tokens(1, 9)
    generate = made.generate

    @functools.wraps(generate)
    def other(given: torch.Tensor, **options: Any) -> torch.Tensor:
        return generate(torch.cat((given[:, :-1], given[:, -1:] ^ 1), 1), **options)

    with HFPrefixCache(made, capacity=64) as prefix:
        made.generate = other
        prefix.generate(ids, **OPTIONS)
        made.generate = generate
        longer = torch.cat((ids, ids), 1)
        assert torch.equal(prefix.generate(longer, **OPTIONS), plain(made, longer))


def test_a_short_further_turn_is_not_taken_for_drafts() -> None:
    """All of the prompt, where all but its last token is there: no more than drafts would be."""
    made, ids = llama(1), hf.tokens(1, 9)
    with HFPrefixCache(made, capacity=64) as prefix, torch.no_grad():
        prefix.generate(ids[:, :-1], max_new_tokens=1, do_sample=False)
        refused = pytest.raises(OrderError, match=r"9 tokens from position 8 .*remaining \(1;")
        with refused, prefix.begin(ids[0].tolist()) as session:
            assert session.tokens == ids[0].tolist()
            made(ids, past_key_values=session.cache)
        assert torch.equal(prefix.generate(ids, **OPTIONS), plain(made, ids))


def test_ids_that_the_model_has_no_embedding_of_are_refused_and_so_is_what_is_closed() -> None:
    made = llama(1)
    size = made.get_input_embeddings().num_embeddings
    prefix = HFPrefixCache(made, capacity=64)
    with pytest.raises(InvalidRangeError, match=f"begin: token {size}; the model's ids are 0 to {size - 1}"):
        prefix.generate(torch.tensor([[1, size]]), **OPTIONS)
    session = prefix.begin([1, 2])
    with pytest.raises(InvalidRangeError, match="extend: token -1"):
        session.extend([-1])
    session.close()
    with pytest.raises(ClosedError, match="prefill: the conversation is closed; begin another"):
        session.prefill()
    prefix.close()
    with pytest.raises(ClosedError, match="begin: the HFPrefixCache is closed; make a new one"):
        prefix.begin([1, 2])


def test_a_pass_that_repeats_what_the_cache_has_is_refused_however_short_the_prompt_is() -> None:
    made, other, ids = llama(1), llama(1), hf.tokens(1, 12)
    with HFPrefixCache(made, capacity=64) as prefix:
        made.generate = other.generate  # another module, which is given all tokens and 3 drafts
        with pytest.raises(OrderError, match="27 tokens from position 23 on, in a conversation of 24"):
            prefix.generate(torch.cat((ids, ids), 1), prompt_lookup_num_tokens=3, **OPTIONS)


def test_models_are_left_as_they_are_found_and_others_may_generate_meanwhile() -> None:
    made, ids = llama(2), hf.tokens(1, 9)
    lookup: dict[str, Any] = {**OPTIONS, "prompt_lookup_num_tokens": 2}
    expected = made.generate(ids, **lookup)
    own = made.prepare_inputs_for_generation = functools.wraps(made.prepare_inputs_for_generation)(
        functools.partial(made.prepare_inputs_for_generation)
    )
    meanwhile = []

    class Streamer:
        def put(self, value: torch.Tensor) -> None:
            if len(meanwhile) < 2:
                meanwhile.append(made.generate(ids, **lookup))

        def end(self) -> None:
            assert made.prepare_inputs_for_generation is not own

    with HFPrefixCache(made, capacity=64) as prefix:
        prefix.generate(hf.tokens(1, 12), streamer=Streamer(), **OPTIONS)
    assert all(torch.equal(one, expected) for one in meanwhile)
    assert made.prepare_inputs_for_generation is own


@pytest.mark.parametrize(
    "option",
    [
        {"prompt_lookup_num_tokens": 3},
        {"assistant_early_exit": 1},
        {"prefill_chunk_size": 3},
        {"prefill_chunk_size": 3, "prompt_lookup_num_tokens": 3},
        {"cache_implementation": "static"},
        {"cache_implementation": "dynamic"},
        {"speculation_type": "dflash"},  # and no assistant
    ],
    ids=str,
)
def test_what_a_model_is_configured_to_generate_with_goes_on_from_a_prefix(option: dict[str, Any]) -> None:
    made, ids = llama(2), hf.tokens(1, 12)
    prompts = [ids, torch.cat((ids, ids), 1)]
    expected = [plain(made, prompt) for prompt in prompts]
    made.generation_config.update(**option)
    with HFPrefixCache(made, capacity=64) as prefix:
        for prompt, answer in zip(prompts, expected, strict=True):
            assert torch.equal(prefix.generate(prompt, **OPTIONS), answer)
        assert prefix.stats.reused == 12
    assert made.generation_config.to_diff_dict().items() >= option.items()


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_conversations_are_no_longer_than_keys_are_rotated_by_position_alone(kind: str) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 100.0, "factor": 4.0}
    longest = 15 if kind == "dynamic" else 16
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [8.0, 4, 16, 2] * 2}
        rope |= {"original_max_position_embeddings": 16}
    made = llama(2, max_position_embeddings=64 if kind == "longrope" else 16, rope_parameters=rope)
    with HFPrefixCache(made, capacity=64) as prefix:
        for count in (6, 8, 7):
            ids = hf.tokens(1, count)
            assert torch.equal(prefix.generate(ids, **OPTIONS), plain(made, ids))
        told = f"beyond {longest} the model rotates all keys differently"
        with pytest.raises(InvalidRangeError, match=told):
            prefix.generate(hf.tokens(1, longest + 1), **OPTIONS)
        ids = hf.tokens(1, longest - 3)  # whose answer is cut short
        assert torch.equal(prefix.generate(ids, **OPTIONS), plain(made, ids)[:, : longest + 1])


def test_a_session_that_cannot_be_kept_lets_go_of_its_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    made = hf.model("llama")
    with HFPrefixCache(made, capacity=64) as prefix:
        session = prefix.begin(hf.tokens(1, 9)[0].tolist())
        session.prefill()
        with monkeypatch.context() as patch:
            patch.setattr(prefix.prefix.tree, "insert", Mock(side_effect=MemoryError()))
            with pytest.raises(MemoryError):
                session.close()
        assert session.cache.get_seq_length() == 0
        with pytest.raises(InvalidSequenceError):
            made(hf.tokens(1, 3), past_key_values=session.cache)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("wrapped", ["peft", "compile"])
def test_mamba_is_refused_behind_a_wrapper_too(wrapped: str, monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft")
    config = transformers.Mamba2Config(
        vocab_size=97, hidden_size=32, num_hidden_layers=1, num_heads=8, head_dim=8, state_size=8, n_groups=1
    )
    made: Any = transformers.Mamba2ForCausalLM(config)
    if wrapped == "peft":
        made = peft.get_peft_model(made, peft.LoraConfig(target_modules=["in_proj"], task_type="CAUSAL_LM"))
    else:
        made = torch.compile(made, backend="eager")
    with pytest.raises(NotSupportedError, match=r"Mamba2ForCausalLM\.generate\(\) ignores the states"):
        HFPrefixCache(made, capacity=64)
    monkeypatch.setattr(cache_module, "ALL_CACHE_NAMES", ["past_key_values"])  # before transformers 5.24
    assert cache_module.cache_argument(made) == "cache_params"


_TEXT: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3, "eos_token_id": None,
}  # fmt: skip


def test_models_whose_prompts_attend_to_later_tokens_are_refused() -> None:
    config = transformers.PaliGemmaConfig(
        text_config={"model_type": "gemma", "head_dim": 8, **_TEXT},
        vision_config={"model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 16,
                       "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4, "image_size": 8,
                       "projection_dim": 32},
        image_token_id=96, projection_dim=32, hidden_size=32,
    )  # fmt: skip
    with pytest.raises(NotSupportedError, match=r"PaliGemma\w+ .* attend to later ones too"):
        HFPrefixCache(transformers.PaliGemmaForConditionalGeneration(config), capacity=64)
    made = llama(1)
    made.config.is_causal = False
    with pytest.raises(NotSupportedError, match=r"LlamaForCausalLM .* attend to later ones too"):
        HFPrefixCache(made, capacity=64)


@pytest.mark.parametrize("left", [[[-12]], [[0], [0]]], ids=["image", "two rows"])
def test_what_other_calls_have_left_in_a_model_of_images_does_not_move_the_positions_of_a_text(
    left: list[list[int]],
) -> None:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 100.0}
    config = transformers.Qwen2VLConfig(
        text_config={**_TEXT, "rope_parameters": rope, "bos_token_id": 1, "pad_token_id": 0},
        vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4},
    )
    torch.manual_seed(0)
    made, ids = transformers.Qwen2VLForConditionalGeneration(config).eval(), hf.tokens(1, 20)
    expected, first = plain(made, ids), made(ids).logits[:, -1]

    def leave() -> None:
        made.model.rope_deltas = torch.tensor(left)

    with HFPrefixCache(made, max_sequences=2, capacity=64) as prefix, torch.no_grad():
        prefix.generate(ids[:, :14], **OPTIONS)
        leave()
        assert torch.equal(prefix.generate(ids, **OPTIONS), expected)
        leave()
        with prefix.begin(ids[0].tolist()) as session:
            rest = torch.tensor([session.remaining])
            torch.testing.assert_close(made(rest, past_key_values=session.cache).logits[:, -1], first)
        longer = [*ids[0].tolist(), *range(5, 20)]
        with prefix.begin(longer) as session:
            assert session.cached
            leave()
            session.prefill(8)
            rest = torch.tensor([session.remaining])
            found = made(rest, past_key_values=session.cache).logits[:, -1]
            torch.testing.assert_close(found, made(torch.tensor([longer])).logits[:, -1])


def test_an_exception_that_leaves_the_block_keeps_nothing_of_a_pass_that_failed() -> None:
    made, ids, store = llama(2), hf.tokens(1), MemoryStore()
    options: dict[str, Any] = {"tiers": [store], "identity": {"model": "llama"}, "block_size": 4}
    failing = made.model.layers[1].register_forward_pre_hook(Mock(side_effect=KeyError))
    with (
        pytest.raises(KeyError),
        HFPrefixCache(made, max_sequences=2, capacity=64, **options) as prefix,
    ):
        made(ids, past_key_values=prefix.begin(ids[0].tolist()).cache)
    failing.remove()
    assert store.usage().entries == 0
    with HFPrefixCache(made, max_sequences=2, capacity=64, **options) as prefix:
        assert torch.equal(prefix.generate(ids, **OPTIONS), plain(made, ids))
