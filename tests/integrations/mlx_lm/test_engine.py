"""The engine over mlx-lm's models: everything that it does gives what the model gives alone."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx_lm")

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models import llama
from mlx_lm.tuner.utils import linear_to_lora_layers

import ml
from benchmarks.census import driven
from benchmarks.census import mlx_lm_engine as census
from kvcache import Batch, InvalidRangeError, NotSupportedError
from kvcache.integrations.mlx_lm import MLXModel
from kvcache_engine import Engine, EngineOptions, GenerationOptions, RequestError
from kvcache_engine.fingerprint import model_identity

from ...rigs import mlx_lm_models as models

LAYOUTS = {
    "llama": "PACKED",
    "gemma3_text": "PACKED",  # windows
    "gpt_oss": "PACKED",  # sinks
    "gemma2": "ROWS",  # soft caps, by attention of its own
    "deepseek_v32": "ROWS",  # latents that it reads itself, and an indexer
    "qwen3_next": "ROWS",  # recurrences
    "mamba": "ROWS",
    "llama4": "ROWS",  # chunks, by a mask of its own
}
"""By type of model, how its tokens are given to it."""
ENDLESS = GenerationOptions(6, ignore_eos=True)


@pytest.fixture(scope="module", params=LAYOUTS)
def case(request: pytest.FixtureRequest) -> census.Case:
    return census.Case(request.param)


some_types = pytest.mark.parametrize(
    "case", ["llama", "gemma3_text", "gpt_oss", "deepseek_v32", "qwen3_next"], indirect=True
)
"""One for each way to attend; docs/engine-models.md has what becomes of all types."""


def alone(model: Any, prompt: list[int], count: int) -> list[int]:
    return models.greedy(model, prompt, count, None)


def test_a_type_is_given_its_tokens_in_the_layout_that_it_takes(
    case: census.Case, request: pytest.FixtureRequest
) -> None:
    assert case.driven.layout.name == LAYOUTS[request.node.callspec.params["case"]]


@some_types
def test_mixed_requests_answer_as_the_model_alone(case: census.Case) -> None:
    """Shared prefixes, chunks of prompts, one cancelled, one preempted; twice, the second from a folder."""
    for answers in driven.mixed(case):
        assert answers == case.alone(answers)


@some_types
def test_drafts_change_no_answer(case: census.Case) -> None:
    """Those that are looked up in the text, and those of a smaller model, which is driven likewise."""
    [answers] = driven.drafts(case)
    assert answers == case.alone(answers)


def test_log_probabilities_are_those_of_the_model() -> None:
    made, prompt = models.make_llama(), models.prompt_of(9)
    with Engine(MLXModel(made), None, EngineOptions(capacity=64)) as engine:
        [answer] = engine.complete([prompt], GenerationOptions(4, ignore_eos=True, logprobs=3))
    logits = np.array(made(mx.array([[*prompt, *answer.tokens]]))[0, 8:12])
    expected = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    for row, token, found in zip(expected, answer.tokens, answer.logprobs, strict=True):
        assert math.isclose(found.token, float(row[token]), abs_tol=1e-4)
        assert [token for token, _ in found.top] == np.argsort(-row)[:3].tolist()


def test_of_a_prompt_only_the_last_token_has_logits() -> None:
    """Those of all 256 would take 32 MiB; nobody asks for them, and most of the time would go into them."""
    vocabulary = 1 << 15
    arguments = llama.ModelArgs(
        model_type="llama",
        num_hidden_layers=2,
        rms_norm_eps=1e-5,
        **{**models.SHAPE, "vocab_size": vocabulary},
    )
    made = models.seeded(llama.Model(arguments), 3)
    with Engine(MLXModel(made), None, EngineOptions(max_sequences=2, capacity=300)) as engine:
        engine.complete([models.prompt_of(3)], ENDLESS)  # buffers are allocated at the first pass
        engine.submit([token % vocabulary for token in models.prompt_of(256)], ENDLESS)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        engine.step()
        assert engine.running[0].run.generated == 1
        assert mx.get_peak_memory() - before < 256 * vocabulary * 4 // 2


def test_what_is_sampled_depends_on_its_seed_alone() -> None:
    settings = GenerationOptions(8, temperature=1.0, seed=3, ignore_eos=True)
    prompt, others = models.prompt_of(9), [models.prompt_of(7, 4), models.prompt_of(9, 2)]
    with Engine(MLXModel(models.make_llama()), None, EngineOptions(capacity=64)) as engine:
        [one] = engine.complete([prompt], settings)
        one_of_many = engine.complete([others[0], prompt, others[1]], settings)[1]
        greedy = engine.complete([prompt], GenerationOptions(8, ignore_eos=True))[0]
    assert one.tokens == one_of_many.tokens != greedy.tokens


def test_tenants_share_what_they_mean_to_share() -> None:
    with Engine(MLXModel(models.make_llama()), None, EngineOptions(capacity=64)) as engine:
        reused = []
        for salt in ("one", "two", "one"):
            request = engine.submit(models.prompt_of(20), ENDLESS, salt=salt, shared=5)
            while engine.busy:
                engine.step()
            assert request.answer is not None
            reused.append(request.answer.reused)
    assert reused == [0, 5, 19]


def test_prefixes_are_found_for_the_adapters_that_computed_them() -> None:
    """They change while the engine is idle; under requests they may not."""
    made, prompt, reused = models.make_llama(), models.prompt_of(14), []
    keys = {"rank": 2, "scale": 8.0, "dropout": 0.0, "keys": ["self_attn.q_proj", "self_attn.k_proj"]}
    linear_to_lora_layers(made, 2, keys)
    layers = [part for _, part in made.named_modules() if hasattr(part, "lora_a")]
    for part in layers:
        part.lora_b = mx.random.normal(part.lora_b.shape, key=mx.random.key(1))
    with Engine(MLXModel(made), None, EngineOptions(capacity=64)) as engine:
        for scale in (8.0, 1.0, 8.0, 1.0):
            for part in layers:
                part.scale = scale
            [answer] = engine.complete([prompt], ENDLESS)
            assert [*answer.tokens] == alone(made, prompt, len(answer.tokens))
            reused.append(answer.reused)
        assert reused == [0, 0, 13, 13]
        engine.submit([5, *prompt], ENDLESS)
        layers[0].scale = 8.0
        with pytest.raises(RequestError, match="have changed, while earlier requests are unfinished"):
            engine.submit(prompt, ENDLESS)


def test_ends_and_length_are_those_that_the_config_says() -> None:
    made, prompt = models.make_qwen(), models.prompt_of(9)
    first, second = alone(made, prompt, 2)
    model = MLXModel(made, {"eos_token_id": [first, second]})
    assert (model.config.eos_ids, model.config.max_positions) == ((first, second), 512)
    assert MLXModel(made, {"text_config": {"max_position_embeddings": 40}}).config.max_positions == 40
    with Engine(model, None, EngineOptions(capacity=64)) as engine:
        [answer] = engine.complete([prompt], GenerationOptions(20))
    assert answer.reason == "stop"


def test_weights_name_what_a_store_has_of_them() -> None:
    one, other = model_identity(MLXModel(models.make_llama())), model_identity(MLXModel(models.make_llama(4)))
    assert one == model_identity(MLXModel(models.make_llama()))
    assert one != other
    assert one["dtype"] == "F32"


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision(dtype: mx.Dtype) -> None:
    made = models.make_llama()
    made.update(tree_map(lambda array: array.astype(dtype), made.parameters()))
    model = MLXModel(made)
    assert model.dtype is (ml.DType.F16 if dtype == mx.float16 else ml.DType.BF16)
    with Engine(model, None, EngineOptions(capacity=64, cache_dtype=model.dtype)) as engine:
        answers = engine.complete([models.prompt_of(9), models.prompt_of(4, 1)], ENDLESS)
    assert all(len(answer.tokens) == 6 for answer in answers)


class Lost(nn.Module):  # type: ignore[misc]
    """A part of a model that fails."""

    def __call__(self, *arguments: Any) -> Any:
        raise RuntimeError("lost")


@pytest.mark.parametrize("name", models.MODELS)
def test_a_pass_that_fails_in_its_middle_leaves_the_requests_as_they_were(name: str) -> None:
    made = models.MODELS[name]()
    model, prompts = MLXModel(made), [models.prompt_of(9), models.prompt_of(6, 1)]
    with Engine(model, None, EngineOptions(capacity=64)) as engine:
        requests = [engine.submit(prompt, ENDLESS) for prompt in prompts]
        engine.step()
        norm, made.model.norm = made.model.norm, Lost()
        with pytest.raises(RuntimeError, match="lost"):
            engine.step()
        made.model.norm = norm
        while engine.busy:
            engine.step()
        found = [[*request.tokens[len(p) :]] for request, p in zip(requests, prompts, strict=True)]
    assert found == [alone(made, prompt, 6) for prompt in prompts]


def test_any_thread_may_ask_and_the_model_works_by_itself_meanwhile() -> None:
    made, answers = models.make_qwen(), list[Any]()
    prompts = [models.prompt_of(9 + seed, seed) for seed in range(4)]
    expected = [alone(made, prompt, 6) for prompt in prompts]
    with Engine(MLXModel(made), None, EngineOptions(capacity=64)) as engine:

        def ask(prompt: list[int]) -> None:
            answers.append((prompt, engine.complete([prompt], ENDLESS)[0].tokens))

        threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [alone(made, prompt, 6) for prompt in prompts] == expected
    assert sorted((p, [*found]) for p, found in answers) == sorted(zip(prompts, expected, strict=True))


def test_the_ids_of_a_batch_may_be_on_the_device() -> None:
    made = models.make_llama()
    model, ids = MLXModel(made), models.prompt_of(5)
    cache = model.make_cache()
    cache.init(model.backend, ml.DType.F32, 1, 32, 32)
    with model.backend.new_context() as ctx:
        inputs = ctx.from_numpy(np.array(ids, np.int32))
        found = model.forward(ctx, Batch(range(5), [0] * 5, inputs=inputs, outputs=[4, 1]), cache).to_numpy()
    cache.close()
    assert np.abs(found - np.array(made(mx.array([ids]))[0])[[4, 1]]).max() < 1e-4


def test_what_cannot_be_driven_is_refused_in_a_sentence() -> None:
    with pytest.raises(InvalidRangeError, match="model is a str"):
        MLXModel("llama")

    class Counts(models.llama.Model):  # type: ignore[misc]
        """Logits depend on how many tokens a text has so far, which no cache tells."""

        def __call__(self, inputs: Any, cache: Any = None) -> Any:
            return super().__call__(inputs, cache) + inputs.shape[1] * mx.arange(97)

    made = Counts(models.make_llama().args)
    with pytest.raises(NotSupportedError, match=r"cannot be driven with .* in one row: its logits are .* of"):
        MLXModel(made)
