"""The engine over mlx-lm's models: everything that it does gives what the model gives alone."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

pytest.importorskip("mlx_lm")

import mlx.core as mx
from mlx_lm.models import llama
from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear
from mlx_lm.tuner.utils import linear_to_lora_layers

from kvcache import HostTier, InvalidRangeError, NotSupportedError
from kvcache.integrations.mlx_lm import MLXModel
from kvcache.prefix import worker
from kvcache.snapshots.serialize import serialize
from kvcache_engine import Engine, EngineOptions, GenerationOptions, RequestError

from ...rigs import mlx_lm_models as models

ENDLESS = GenerationOptions(6, ignore_eos=True)


def alone(model: Any, prompt: list[int], count: int) -> list[int]:
    return models.greedy(model, prompt, count, None)


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


def inputs_of(part: Any, method: str) -> list[int]:
    """How many tokens each call of a module's method is given, from now on."""
    kind, counts = type(part), list[int]()

    def counted(self: Any, x: Any, **options: Any) -> Any:
        counts.append(x.size if x.dtype == mx.int32 else x.size // x.shape[-1])
        return getattr(kind, method)(self, x, **options)

    part.__class__ = type(kind.__name__, (kind,), {method: counted, "__module__": kind.__module__})
    return counts


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("adapted", [False, True])
def test_a_pass_is_one_call_that_projects_only_what_is_asked_for(tied: bool, adapted: bool) -> None:
    """Adapters of the projection come when the model is driven already."""
    made = models.make_llama(tied=tied)
    prompts = [models.prompt_of(9, 1), models.prompt_of(20, 2)]
    calls = inputs_of(made, "__call__")
    with Engine(MLXModel(made), None, EngineOptions(max_sequences=2, capacity=64)) as engine:
        if adapted:
            adapt_projection(made, tied)
        expected = [alone(made, prompt, 6) for prompt in prompts]
        projected = (
            inputs_of(made.model.embed_tokens, "as_linear") if tied else inputs_of(made.lm_head, "__call__")
        )
        kinds = [type(part) for part in made.modules()]
        calls.clear()
        assert [[*answer.tokens] for answer in engine.complete(prompts, ENDLESS)] == expected
        assert [type(part) for part in made.modules()] == kinds
        assert calls == [29, 2, 2, 2, 2, 2]
        assert projected == [2, 2, 2, 2, 2, 2]


def adapt_projection(made: Any, tied: bool) -> None:
    owner, name = (made.model, "embed_tokens") if tied else (made, "lm_head")
    kind: Any = LoRAEmbedding if tied else LoRALinear
    owner[name] = new = kind.from_base(owner[name], r=2, scale=4.0)
    new.lora_b = mx.random.normal(new.lora_b.shape, key=mx.random.key(1))


def test_a_model_that_projects_by_itself_has_all_logits_computed() -> None:
    class ByItself(models.llama.Model):  # type: ignore[misc]
        def __call__(self, inputs: Any, cache: Any = None) -> Any:
            return self.model(inputs, cache) @ self.model.embed_tokens.weight.T

    made = models.seeded(ByItself(models.make_llama(tied=True).args), 3)
    prompt = models.prompt_of(9)
    with Engine(MLXModel(made), None, EngineOptions(capacity=64)) as engine:
        assert [*engine.complete([prompt], ENDLESS)[0].tokens] == alone(made, prompt, 6)


def test_after_a_failed_call_the_model_is_as_it_was() -> None:
    made = models.make_llama()
    kinds = [type(part) for part in made.modules()]
    with Engine(MLXModel(made), None, EngineOptions(capacity=64)) as engine:
        norm, made.model.norm = made.model.norm, None
        engine.submit(models.prompt_of(9), ENDLESS)
        with pytest.raises(TypeError):
            engine.step()
        made.model.norm = norm
        assert [type(part) for part in made.modules()] == kinds


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


@pytest.mark.parametrize("make", [models.make_llama, models.make_qwen], ids=["full", "hybrid"])
def test_passes_go_on_beside_page_outs(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that makes room waits for the thread that copies what leaves the device, which is slow here."""

    def slowly(*given: Any) -> Any:
        time.sleep(0.02)
        return serialize(*given)

    monkeypatch.setattr(worker, "in_host_memory", lambda backend: False)
    monkeypatch.setattr(worker, "serialize", slowly)
    made, found = make(), list[bool]()
    prompts = [models.prompt_of(size, seed) for seed, size in enumerate((27, 29, 9, 30, 12, 3))]
    expected = [alone(made, prompt, 6) for prompt in prompts]
    options = EngineOptions(
        max_sequences=4, capacity=18, context=64, prefill_chunk=8, block_size=8, interval=8
    )  # fmt: skip

    def work() -> None:
        with Engine(MLXModel(made), None, options, [HostTier(1 << 24)]) as engine:
            engine.prefix.tree.worker.limit = 1  # one snapshot at a time
            for _ in range(4):
                found.append([[*answer.tokens] for answer in engine.complete(prompts, ENDLESS)] == expected)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    assert found == [True] * 4


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
