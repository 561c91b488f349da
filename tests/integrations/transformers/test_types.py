"""What types of models ask of HFCache beyond the common: each was wrong, or broke a generate() that works."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("torch")

import numpy as np
import torch
import transformers
from transformers.models.minimax.modeling_minimax import MiniMaxCache

import ml
from benchmarks.census import transformers as census
from kvcache import InvalidRangeError, NotSupportedError, OrderError
from kvcache.integrations.transformers import HFCache, HFPrefixCache, HFStaticCache, install
from kvcache.stores import MemoryStore

from ...rigs import hf_models as hf


@pytest.mark.parametrize("order", [[1, 0, 2], [1, 1, 0, 0]])
def test_rows_in_another_order_go_on_from_their_states_while_a_snapshot_holds_them(order: list[int]) -> None:
    """A layer fetches its states before it tells how many tokens the pass has."""
    made, ids, new = hf.model("qwen3-next"), hf.tokens(3, 5), hf.tokens(len(order), 4)
    cache = HFCache(made.config, capacity=32, max_sequences=8)
    hf.feed(made, cache, ids)
    snapshot = cache.snapshot()
    cache.batch_select_indices(order)
    hf.close(hf.feed(made, cache, new), hf.fresh(made, ids[order], new))
    assert snapshot


STATES = ("qwen3_next", "bamba", "lfm2", "mamba2", "minimax", "zaya", "falcon_h1", "inkling_text")


class TestPaddingBesideStates:
    """It would enter them behind a token of its row, and in a pass of one token, which has no mask."""

    @pytest.mark.parametrize(
        ("label", "begin", "end", "hidden"),
        [
            (label, *((10, 14, 12), (10, 11, 10), (0, 10, 9), (10, 14, 10))[(i + step) % 4])
            for i, label in enumerate(STATES)
            for step in (0, 1)
        ],
    )
    def test_is_refused_and_changes_nothing(self, label: str, begin: int, end: int, hidden: int) -> None:
        """Between others, the one of a pass, on the right of a prompt, the first of a later pass."""
        case, ids, mask = census.Case(label), hf.tokens(2, 14), torch.ones(2, 14, dtype=torch.long)
        cache = case.ours()
        if begin:
            case.feed(cache, ids[:, :begin], mask[:, :begin])
        mask[1, hidden] = 0
        with pytest.raises(NotSupportedError, match=f"hides token {hidden} of row 1.* states of {label}"):
            case.feed(cache, ids[:, begin:end], mask[:, :end])
        found = case.feed(cache, ids[:, begin:end], torch.ones_like(mask[:, :end]))
        hf.close(found, case.feed(None, ids[:, :end])[:, begin:], 2e-3)

    def test_is_refused_in_fixed_shapes_and_in_a_second_turn(self) -> None:
        case, ids, mask = census.Case("qwen3_next"), hf.tokens(2, 14), torch.ones(2, 14, dtype=torch.long)
        mask[1, 12] = 0
        for cache in (case.ours(), HFStaticCache(case.config, capacity=32)):
            batch = {"input_ids": ids[:, :8], "attention_mask": mask[:, :8]}
            hf.generate(case.model, batch, cache, max_new_tokens=3)
            with pytest.raises(NotSupportedError, match="hides token 12 of row 1"):
                case.generate({"input_ids": ids, "attention_mask": mask}, cache)

    @pytest.mark.parametrize("width", [4, 5, 9, 12, 13, 14])
    @pytest.mark.parametrize("kind", [HFCache, HFStaticCache])
    @pytest.mark.parametrize("label", ["qwen3_next", "mamba2"])
    def test_a_later_turn_hides_nothing_on_its_left(self, label: str, kind: Any, width: int) -> None:
        """It is not where the row begins, whatever the mask has before it."""
        case, ids, mask = census.Case(label), hf.tokens(2, 13), torch.ones(2, width, dtype=torch.long)
        mask[1, : width - 2] = width == 13
        mask[1, width - 4 : width - 2] = 0
        cache, expected = kind(case.config, capacity=32), case.feed(None, ids)
        case.feed(cache, ids[:, :9])
        with pytest.raises((NotSupportedError, InvalidRangeError), match=r"hides token|an attention_mask of"):
            case.feed(cache, ids[:, 9:], mask)
        hf.close(case.feed(cache, ids[:, 9:]), expected[:, 9:], 1e-3)

    @pytest.mark.parametrize("kind", [HFCache, HFStaticCache])
    @pytest.mark.parametrize("label", ["qwen3_next", "lfm2", "mamba2"])
    def test_on_the_left_may_take_several_passes(self, label: str, kind: Any) -> None:
        case, ids, mask = census.Case(label), hf.tokens(2, 14), torch.ones(2, 14, dtype=torch.long)
        mask[1, :6] = 0
        cache, theirs = kind(case.config, capacity=32), case.feed(None, ids, mask)
        for begin, end in ((0, 4), (4, 8), (8, 14)):
            found = case.feed(cache, ids[:, begin:end], mask[:, :end])
        hf.close(found, theirs[:, 8:], 1e-3)

    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize("kind", [HFCache, HFStaticCache])
    @pytest.mark.parametrize("label", ["mamba2", "jamba", "qwen3_next", "mamba"])
    def test_a_turn_with_any_mask_is_right_or_refused(self, label: str, kind: Any, seed: int) -> None:
        """Against each row's visible tokens alone, computed from scratch. A refused turn is as if never."""
        case, random = census.Case(label), np.random.default_rng(seed)
        cache, visible = kind(case.config, capacity=32), [torch.zeros(1, 0, dtype=torch.long)] * 2
        told = torch.ones(2, 0, dtype=torch.long)
        for turn in range(5):
            ids = hf.tokens(2, int(random.integers(1, 6)), seed=8 * seed + turn)
            new = torch.ones_like(ids)
            if turn == 0 or random.random() < 0.5:
                new[1, : random.integers(0, ids.shape[1] + 1)] = 0
            elif random.random() < 0.3:
                new[0, random.integers(ids.shape[1])] = 0
            columns = torch.cat((told, new), 1)
            width = columns.shape[1] if random.random() < 0.6 else int(random.integers(ids.shape[1], 30))
            mask = torch.cat((columns.new_ones(2, max(0, width - columns.shape[1])), columns), 1)[:, -width:]
            try:
                found = case.feed(cache, ids, mask)
            except (NotSupportedError, InvalidRangeError):
                continue
            told = columns
            for row in range(2):
                shown = ids[row : row + 1, new[row] == 1]
                visible[row] = torch.cat((visible[row], shown), 1)
                if count := shown.shape[1]:
                    alone = case.feed(None, visible[row])[0, -count:]
                    hf.close(found[row, new[row] == 1], alone, 2e-3)


@pytest.mark.parametrize(
    ("label", "kind"),
    [
        ("jamba", HFCache),
        ("jamba", HFStaticCache),
        ("zamba", HFCache),
        ("zamba", HFStaticCache),
        ("recurrent_gemma", HFStaticCache),
    ],
)
def test_types_that_forget_their_state_get_one_token_at_a_time_behind_it(label: str, kind: Any) -> None:
    case, ids = census.Case(label), hf.tokens(1, 12)
    cache, expected = kind(case.config, capacity=32), case.feed(None, ids)
    case.feed(cache, ids[:, :9])
    with pytest.raises(NotSupportedError, match=r"pass these 3 tokens one at a time"):
        hf.feed(case.model, cache, ids[:, 9:])
    found = [case.feed(cache, ids[:, at : at + 1]) for at in range(9, 12)]
    hf.close(torch.cat(found, 1), expected[:, 9:], 1e-3)


def test_a_second_generate_goes_on_from_states_alone() -> None:
    """Where all layers are linear, transformers gives all tokens again, unless the cache counts them."""
    case, ids = census.Case("mamba2"), hf.tokens(2, 9)
    cache = case.ours()
    for options in ({}, {"prefill_chunk_size": 4}, {}):
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        found = case.generate(batch, cache, **options)
        assert found.agrees(case.generate(batch, use_cache=False))
        ids = torch.cat((found.tokens, hf.tokens(2, 5, seed=4)), 1)
    cache.reset()
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert case.generate(batch, cache).agrees(case.generate(batch, use_cache=False))


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_decoder_alone_drafts_beside_the_encoder_of_another_model(layers: int) -> None:
    """Its cross attention has a place of its own, though its config names no encoder."""
    made, batch = hf.model("whisper", decoder_layers=3), hf.inputs("whisper", 1)
    torch.manual_seed(3)
    config = copy.deepcopy(made.config)
    config.decoder_layers = layers
    assistant = transformers.WhisperForCausalLM(config).eval()
    assistant.generation_config.suppress_tokens = None
    drafts: list[torch.Tensor] = []
    assistant.register_forward_hook(lambda module, given, found: drafts.append(found.logits))
    expected = hf.generate(made, batch)
    with install():
        found = hf.generate(made, batch, assistant_model=assistant)
    assert found.distance(expected) < 1e-4
    encoded = made.model.encoder(**batch)[0]
    with torch.no_grad():
        alone = assistant(found.sequences[:, :1], encoder_outputs=(encoded,), use_cache=False).logits
    hf.close(drafts[0][:, :1], alone, 1e-4)


def test_beams_of_minimax_are_right_under_install() -> None:
    """transformers makes it no cache that beams could be reordered in; its model then makes one."""
    made, batch = hf.model("minimax"), hf.inputs("minimax", 2)
    expected = hf.generate(made, batch, num_beams=3, use_cache=False)
    with install():
        found = hf.generate(made, batch, num_beams=3)
        assert isinstance(found.cache, HFCache)
        assert hf.generate(made, batch, use_cache=False).cache is None
    assert torch.equal(found.sequences, expected.sequences)


@pytest.mark.parametrize("way", ["HFCache", "HFStaticCache", "install"])
def test_a_decoder_deeper_than_the_default_of_its_class(way: str) -> None:
    made = hf.model("whisper", decoder_layers=6, encoder_layers=1)
    batch = hf.inputs("whisper", 2)
    expected = hf.generate(made, batch)
    if way == "install":
        with install():
            found = hf.generate(made, batch)
    else:
        cache = HFCache(made.config) if way == "HFCache" else HFStaticCache(made.config, capacity=32)
        found = hf.generate(made, batch, cache)
    assert found.distance(expected) < 1e-4


def test_a_decoder_alone_of_an_encoder_decoders_config_has_the_decoders_layers() -> None:
    """transformers' own cache counts the encoder's, and has too few."""
    config = transformers.BartConfig(
        vocab_size=97, d_model=32, encoder_layers=1, decoder_layers=3, decoder_attention_heads=4,
        decoder_ffn_dim=48, eos_token_id=None, forced_eos_token_id=None, pad_token_id=0, init_std=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    made = transformers.BartForCausalLM(config).eval()
    ids = hf.tokens(2)
    hf.close(parts_of(made, HFCache(made.config, capacity=32), ids, 9, 4), hf.feed(made, None, ids))


class TestHybrids:
    def test_a_four_dimensional_mask_needs_no_count_of_tokens(self) -> None:
        made, ids = hf.model("qwen3-next"), hf.tokens(2)
        cache, own = HFCache(made.config, capacity=64), transformers.DynamicCache(config=made.config)
        for part in (slice(0, 9), slice(9, 10), slice(10, 13)):
            count = part.stop - part.start
            mask = torch.ones(count, part.stop, dtype=torch.bool).tril(part.start).expand(2, 1, -1, -1)
            with torch.no_grad():
                found, expected = (
                    made(input_ids=ids[:, part], attention_mask=mask, past_key_values=one).logits
                    for one in (cache, own)
                )
            hf.close(found, expected)

    @pytest.mark.parametrize("tokens", [1, 3])
    def test_after_an_exception_the_advice_works(self, tokens: int) -> None:
        made, ids = hf.model("qwen3-next"), hf.tokens(2, 20)
        cache = HFCache(made.config, capacity=64)
        hf.feed(made, cache, ids[:, :6])
        cache.checkpoint()
        hf.feed(made, cache, ids[:, 6:10])
        with hf.failing(made.model.layers[-1]):
            hf.feed(made, cache, ids[:, 10 : 10 + tokens])
        with pytest.raises(OrderError, match=r"Call crop\(-\d+\).*go back to \[6,"):
            hf.feed(made, cache, ids[:, 10:11])
        cache.crop(6)
        hf.close(hf.feed(made, cache, ids[:, 6:]), hf.feed(made, None, ids)[:, 6:])


@pytest.mark.parametrize("tokens", [1, 3, 12])
def test_small_windows_come_back_after_an_exception(tokens: int) -> None:
    """A pass of more tokens than they keep has taken the cells of those that they kept."""
    made, ids = hf.model("gemma3", layer_types=("sliding_attention",) * 2), hf.tokens(2, 30)
    cache = HFCache(made.config, capacity=64, lookback=0)
    hf.feed(made, cache, ids[:, :10])
    with hf.failing(made.model.layers[-1]):
        hf.feed(made, cache, ids[:, 10 : 10 + tokens])
    for go_on in (lambda: hf.feed(made, cache, ids[:, 10:11]), lambda: cache.crop(0)):
        with pytest.raises(OrderError, match=rf"Call crop\(-{tokens}\) to undo it"):
            go_on()
    cache.crop(-tokens)
    hf.close(hf.feed(made, cache, ids[:, 10:]), hf.feed(made, None, ids)[:, 10:])


class TestSpeculation:
    @pytest.mark.parametrize(("name", "drafted"), [("gemma3", 3), ("gpt-oss", 12), ("gemma3", 30)])
    def test_drafts_longer_than_the_lookback(self, name: str, drafted: int) -> None:
        made = hf.model(name)
        assistant = copy.deepcopy(made)
        assistant.generation_config.num_assistant_tokens = drafted
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.assistant_confidence_threshold = 0
        with torch.no_grad():
            generator = torch.Generator().manual_seed(1)
            for parameter in assistant.parameters():
                parameter.mul_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
        batch = hf.inputs(name, 1)
        expected = hf.generate(made, batch)
        with install(lookback=0):
            cache = HFCache(made.config, capacity=128, lookback=0)
            found = hf.generate(made, batch, cache, assistant_model=assistant)
        assert found.distance(expected) < 1e-4

    @pytest.mark.filterwarnings("ignore")  # transformers', of leaving early
    @pytest.mark.parametrize("label", ["lfm2", "lfm3"])
    def test_convolutions_leave_early(self, label: str) -> None:
        case = census.Case(label)
        batch, layers = case.batch(1), case.config.num_hidden_layers
        expected = case.generate(batch, use_cache=False)
        for cache in (case.ours(), None):
            with install(lookback=0):
                found = case.generate(batch, cache, assistant_early_exit=2)
            case.config.num_hidden_layers = layers  # which leaving early changes for good
            assert found.agrees(expected)

    def test_many_steps_before_a_crop(self) -> None:
        made, ids, other = hf.model("gemma3"), hf.tokens(1, 60), hf.tokens(1, 5, seed=3)
        cache = HFCache(made.config, capacity=128, lookback=2)
        hf.feed(made, cache, ids[:, :20])
        cache.activate_past_recording()
        for i in range(20, 55):
            hf.feed(made, cache, ids[:, i : i + 1])
        cache.crop(-35)
        hf.close(
            hf.feed(made, cache, other),
            hf.feed(made, None, torch.cat((ids[:, :20], other), 1))[:, 20:],
        )

    @pytest.mark.parametrize(("interrupted", "gone"), [(False, 1), (False, 6), (True, 1), (True, 5)])
    def test_convolutions_go_back_by_their_inputs(self, interrupted: bool, gone: int) -> None:
        case = census.Case("lfm3")
        cache, ids, other = case.ours(), census.tokens(2, 12), census.tokens(2, 5, seed=3)
        case.feed(cache, ids[:, :2])
        cache.activate_past_recording()
        case.feed(cache, ids[:, 2:6])
        case.feed(cache, ids[:, 6:7])
        if interrupted:
            with hf.failing(case.model.model.layers[-1]):
                case.feed(cache, ids[:, 7:])
            cache.crop(-5)
        case.feed(cache, ids[:, 7:])
        cache.crop(-gone)
        expected = case.feed(None, torch.cat((ids[:, : 12 - gone], other), 1))
        hf.close(case.feed(cache, other), expected[:, 12 - gone :])

    def test_convolutions_go_back_with_the_rows_that_are_left(self) -> None:
        case = census.Case("lfm3")
        cache, ids, other = case.ours(), census.tokens(2, 12), census.tokens(2, 5, seed=3)
        cache.activate_past_recording()
        case.feed(cache, ids[:, :8])
        cache.reorder_cache(torch.tensor([1, 0]))
        case.feed(cache, ids[[1, 0], 8:])
        cache.crop(-3)
        expected = case.feed(None, torch.cat((ids[[1, 0], :9], other), 1))
        hf.close(case.feed(cache, other), expected[:, 9:])


class TestDtypes:
    def test_what_would_be_rounded_is_refused(self) -> None:
        config = hf.model("llama").config
        keys = torch.randn(1, 2, 3, 16)
        cache = HFCache(config, capacity=8)
        with pytest.raises(ml.DTypeError, match=r"layer 0 puts F32.*BF16.*dtype=torch.float32"):
            cache.update(keys.bfloat16(), keys, 0)
        wide = HFCache(config, capacity=8, dtype=torch.float32)
        found = wide.update(keys.bfloat16(), keys, 0)
        assert torch.equal(found[0], keys.bfloat16())
        assert torch.equal(found[1], keys)

    def test_install_leaves_models_of_float64_their_own_cache(self) -> None:
        made = copy.deepcopy(hf.model("llama")).double()
        batch = hf.inputs("llama", 2)
        expected = hf.generate(made, batch)
        with install():
            assert hf.generate(made, batch).distance(expected) == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_steps_of_grouped_heads_come_to_the_kernel_that_a_static_cache_has(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a mask transformers leaves grouped heads to PyTorch, which is many times slower on a CPU."""
    made = copy.deepcopy(hf.model("llama", "sdpa")).to(dtype)
    attend = torch.nn.functional.scaled_dot_product_attention
    calls: list[tuple[Any, ...]] = []

    def recorded(query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        masked = kwargs.get("attn_mask") is not None
        calls.append((query.shape[1:3], key.shape[1], masked, kwargs.get("enable_gqa", False)))
        return attend(query, key, *args, **kwargs)

    found = []
    for cache in (HFCache(made.config, capacity=32), HFStaticCache(made.config, capacity=32)):
        hf.feed(made, cache, hf.tokens(1, 9))
        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)
            hf.feed(made, cache, hf.tokens(1, 1))
        found.append([*calls])
        calls.clear()
    assert found[0] == found[1]
    assert len(found[0]) == 2
    assert {call[1:] for call in found[0]} == {(2, True, False)}


class TestAttentionAndStatesInOneLayer:
    """Falcon-H1 has the states' turn first in each layer, Zamba that of attention."""

    @pytest.mark.parametrize("label", ["falcon_h1", "zamba"])
    def test_a_layer_goes_back_as_a_whole(self, label: str) -> None:
        case, ids = census.Case(label), census.tokens(2, 9)
        cache, other = case.ours(), case.ours()
        for made in (cache, other):
            case.feed(made, ids[:, :5])
        cache.checkpoint()
        for _ in range(3):
            case.feed(cache, ids[:, :1])
        cache.crop(5)
        for i in range(5, 9):
            hf.close(case.feed(cache, ids[:, i : i + 1]), case.feed(other, ids[:, i : i + 1]))
        assert cache.get_seq_length() == 9
        with pytest.raises(NotSupportedError, match="recurrent states can go back"):
            cache.crop(7)

    def test_a_pass_that_stops_between_the_two_is_noticed(self) -> None:
        case, ids = census.Case("falcon_h1"), census.tokens(2, 6)
        cache, other = case.ours(), case.ours()
        case.feed(cache, ids)
        case.feed(other, ids)
        with hf.failing(case.model.model.layers[1].self_attn):
            case.feed(cache, ids[:, :1])
        with pytest.raises(OrderError, match="did not reach all layers"):
            case.feed(cache, ids[:, :1])
        cache.reset()
        case.feed(cache, ids)
        hf.close(case.feed(cache, ids[:, :1]), case.feed(other, ids[:, :1]))


class TestRefusals:
    @pytest.mark.parametrize(
        ("label", "told"),
        [
            ("xlstm", "takes no cache of keys and values"),
            ("blt", "other tokens with any cache"),
            ("rwkv", "takes no cache of keys and values"),
            ("openai-gpt", "takes no cache of keys and values"),
        ],
    )
    def test_types_that_are_not_served_are_refused_in_a_sentence(self, label: str, told: str) -> None:
        config = census.Case(label).config
        for make in (HFCache, lambda config: HFStaticCache(config, capacity=8)):
            with pytest.raises(NotSupportedError, match=told) as caught:
                make(config)
            assert len(str(caught.value)) < 250

    def test_states_in_modules_are_not_forked_or_saved(self) -> None:
        case = census.Case("recurrent_gemma")
        cache = case.ours(max_sequences=4)
        case.feed(cache, census.tokens(2, 6))
        for change in (cache.fork, cache.snapshot, lambda: copy.deepcopy(cache), lambda: cache.crop(-1)):
            with pytest.raises(NotSupportedError, match="in its own modules"):
                change()
        with pytest.raises(NotSupportedError, match="in its own modules"):
            HFPrefixCache(case.model)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers 5.19's own
def test_an_image_comes_with_one_turn_and_another_with_the_next() -> None:
    """Mllama: cross attention of another length, in the decoder's own cache."""
    case = census.Case("mllama with image")
    batch = case.batch(2)
    for cache in (case.ours(), HFStaticCache(case.config, capacity=64)):
        assert case.generate(batch, cache, disable_compile=True).agrees(case.generate(batch))
    ours, own = case.ours(), case.theirs()
    for seed in (0, 1):
        turn = case.batch(2, seed=seed)
        turn["cross_attention_mask"] = torch.ones(2, 2 * census.PROMPT, seed + 1, 2, dtype=torch.long)
        turn["attention_mask"] = torch.ones(2, (seed + 1) * census.PROMPT, dtype=torch.long)
        with torch.no_grad():
            found, expected = (case.model(**turn, past_key_values=cache).logits for cache in (ours, own))
        hf.close(found, expected)


class TestIndexers:
    @staticmethod
    def made(name: str = "glm_moe_dsa") -> Any:
        return census.Case(name).model

    @pytest.mark.parametrize("options", [{}, {"backend": "numpy"}, {"dtype": torch.float32}])
    def test_layers_without_an_indexer_of_their_own_read_what_another_has_chosen(self, options: Any) -> None:
        config = self.made().config
        config.indexer_types = ["full", "shared", "full", "shared", "shared"]
        torch.manual_seed(0)
        made, ids = transformers.GlmMoeDsaForCausalLM(config).eval(), hf.tokens(2, 20)
        cache, store = HFCache(config, capacity=64, **options), MemoryStore()
        hf.feed(made, cache, ids[:, :9])
        cache.save(store, "nine")
        later = HFCache(config, capacity=64, **options)
        assert later.load(store, "nine")
        hf.close(parts_of(made, later, ids[:, 9:], 1, 10), hf.feed(made, None, ids)[:, 9:])

    def test_its_keys_are_those_of_transformers_own_cache_after_crop_fork_and_reordering(self) -> None:
        made, ids = self.made(), hf.tokens(3, 13)
        ours = HFCache(made.config, max_sequences=6, capacity=64)
        theirs = transformers.DynamicCache(config=made.config)
        for cache in (ours, theirs):
            hf.feed(made, cache, ids)
            cache.crop(-4)
            cache.reorder_cache(torch.tensor([2, 0, 0]))
        fork = ours.fork()
        hf.feed(made, ours, ids[:, :5])
        for cache in (fork, theirs):
            hf.feed(made, cache, ids[:, 9:11])
        for one, other in zip(fork.layers, theirs.layers, strict=True):
            assert torch.equal(one.indexer_keys, other.indexer_keys)
            assert torch.equal(one.keys, other.keys)

    @pytest.mark.parametrize("backend", ["torch", "numpy"])
    def test_positions_of_several_axes_stay_with_their_tokens(self, backend: str) -> None:
        made, ids = self.made("qwen4_exp_text"), hf.tokens(2, 12)
        first = made.config.layer_types.index("indexed_attention")
        places = torch.stack([torch.arange(12) * factor for factor in (1, 1, 2, 3)])[:, None].expand(4, 2, 12)
        ours = HFCache(made.config, max_sequences=4, capacity=64, backend=backend)
        theirs = transformers.DynamicCache(config=made.config)
        for begin, end in ((0, 7), (7, 8), (8, 12)):
            found, expected = (
                made(ids[:, begin:end], position_ids=places[..., begin:end], past_key_values=cache).logits
                for cache in (ours, theirs)
            )
            hf.close(found, expected)
        fork, copied = ours.fork(), copy.deepcopy(ours)
        held = theirs.layers[first].indexer_position_ids
        for cache in (ours, fork, copied):
            assert torch.equal(cache.layers[first].indexer_position_ids, held)
        ours.reset()
        assert ours.layers[first].indexer_position_ids is None
        assert torch.equal(fork.layers[first].indexer_position_ids, held)

    def test_a_pass_that_ends_between_k_and_v_and_its_keys_is_told_and_undone(self) -> None:
        made, ids = self.made(), hf.tokens(2, 20)
        cache = HFCache(made.config, capacity=64)
        hf.feed(made, cache, ids[:, :9])
        cache.update(torch.ones(2, 1, 3, 24), torch.ones(2, 1, 3, 8), 0)
        with pytest.raises(OrderError, match=r"Call crop\(-3\)"):
            hf.feed(made, cache, ids[:, 9:10])
        cache.crop(-3)
        hf.close(hf.feed(made, cache, ids[:, 9:]), hf.feed(made, None, ids)[:, 9:])

    @pytest.mark.parametrize(
        ("name", "attention"),
        [*(("deepseek_v32", way) for way in ("eager", "sdpa", "kvcache")), ("qwen4_exp_text", "kvcache")],
    )
    def test_every_attention_reads_what_it_has_chosen(self, name: str, attention: str) -> None:
        made, ids = self.made(name), hf.tokens(2, 20)
        expected, cache = hf.feed(made, None, ids), HFCache(made.config, capacity=64)
        made.set_attn_implementation(attention)
        hf.close(parts_of(made, cache, ids, 9, 1, 10), expected)

    def test_nothing_is_removed_from_the_middle(self) -> None:
        made, ids = self.made(), hf.tokens(1, 9)
        cache = HFCache(made.config, capacity=64, shift=lambda ctx, layer, key, offsets: key)
        hf.feed(made, cache, ids)
        with pytest.raises(NotSupportedError, match=r"remove: \[2, 4\) of 9 tokens: the keys of indexers"):
            cache.remove(2, 4)
        assert cache.get_seq_length() == 9
        cache.remove(7, 9)
        assert cache.layers[0].indexer_keys.shape[1] == cache.get_seq_length() == 7

    def test_fixed_shapes_take_their_keys_back_with_k_and_v(self) -> None:
        made, ids = self.made("deepseek_v32"), hf.tokens(2, 20)
        cache = HFStaticCache(made.config, capacity=32)
        hf.feed(made, cache, ids[:, :9])
        hf.feed(made, cache, hf.tokens(2, 4)[:, :3])
        cache.crop(-3)
        hf.close(hf.feed(made, cache, ids[:, 9:]), hf.feed(made, None, ids)[:, 9:])
        cache.reset()
        hf.close(hf.feed(made, cache, ids), hf.feed(made, None, ids))


# Layers that give whole states, and the number of tokens with K and V alone.

LINEAR, FULL = "linear_attention", "full_attention"
LAYERS = {
    "states first": ("minimax", (LINEAR, LINEAR, FULL, LINEAR)),
    "attention first": ("minimax", (FULL, LINEAR, FULL)),
    "both in one layer": ("zaya", ("hybrid", "hybrid", "hybrid")),
    "windows and states in one layer": ("zaya", ("hybrid_sliding", "hybrid", "hybrid_sliding")),
}


def build(layers: str) -> Any:
    name, types = LAYERS[layers]
    return hf.model(name, layer_types=types, num_hidden_layers=len(types))


def parts_of(made: Any, cache: Any, ids: torch.Tensor, *counts: int) -> torch.Tensor:
    return torch.cat([hf.feed(made, cache, part) for part in ids.split(counts, 1)], 1)


@pytest.mark.parametrize("layers", LAYERS)
def test_whole_states_of_passes_of_any_length_continue_as_one_pass_over_all(layers: str) -> None:
    made, ids = build(layers), hf.tokens(2)[:, :13]
    hf.close(
        parts_of(made, HFCache(made.config, capacity=32), ids, 5, 1, 3, 1, 1, 2), hf.feed(made, None, ids)
    )


@pytest.mark.parametrize("layers", [*LAYERS][1:])  # MiniMaxCache has no masks for states first
def test_whole_states_keep_their_dtype(layers: str) -> None:
    made, ids = copy.deepcopy(build(layers)).to(torch.bfloat16), hf.tokens(2)[:, :9]
    own: Any = MiniMaxCache() if "one layer" not in layers else transformers.DynamicCache(config=made.config)
    ours = parts_of(made, HFCache(made.config, capacity=32), ids, 5, 3, 1)
    assert torch.equal(ours, parts_of(made, own, ids, 5, 3, 1))


@pytest.mark.parametrize("layers", LAYERS)
def test_forks_copies_and_what_is_saved_of_whole_states_go_on_alike(layers: str) -> None:
    made, ids = build(layers), hf.tokens(2)[:, :11]
    cache = HFCache(made.config, capacity=32, max_sequences=4)
    hf.feed(made, cache, ids[:, :7])
    others = hf.others_of(cache, HFCache(made.config, capacity=32))
    hf.feed(made, cache, ids[:, :2])
    expected = hf.feed(made, None, ids)[:, 7:]
    for other in others:
        hf.close(parts_of(made, other, ids[:, 7:], 1, 3), expected)


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize(("at", "tokens"), [(0, 3), (1, 1), (1, 3)])
def test_after_an_exception_in_any_layer_the_advice_works(layers: str, at: int, tokens: int) -> None:
    """It is raised in the attention of one of the layers, behind what the layer has fetched."""
    made, ids = build(layers), hf.tokens(2)[:, :10]
    cache = HFCache(made.config, capacity=32)
    hf.feed(made, cache, ids[:, :6])
    cache.checkpoint()
    attention = made.model.layers[at].self_attn
    with hf.failing(getattr(attention, "out_proj", None) or attention.o_proj):
        hf.feed(made, cache, ids[:, :tokens])
    hf.take_advice(cache, lambda: hf.feed(made, cache, ids[:, 6:7]))
    assert cache.get_seq_length() == 6
    hf.close(parts_of(made, cache, ids[:, 6:], 1, 3), hf.feed(made, None, ids)[:, 6:])


def test_a_first_pass_that_ends_before_any_k_and_v_leaves_nothing() -> None:
    made, ids = build("states first"), hf.tokens(2)[:, :9]
    cache = HFCache(made.config, capacity=32)
    with hf.failing(made.model.layers[1].self_attn.out_proj):
        hf.feed(made, cache, ids[:, :4])
    assert cache.get_seq_length() == 0
    hf.close(parts_of(made, cache, ids, 6, 3), hf.feed(made, None, ids))


def test_minimax_is_served_by_a_subclass_of_its_own_class() -> None:
    config = build("attention first").config
    cache = HFCache(config)
    assert isinstance(cache, MiniMaxCache)
    assert isinstance(cache.fork(), MiniMaxCache)
    assert not isinstance(HFCache(transformers.LlamaConfig()), MiniMaxCache)
