"""The engine over transformers' models: everything that it does gives what the model gives alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("torch")

import torch
import transformers

import ml
from benchmarks.census import driven
from benchmarks.census import transformers_engine as census
from kvcache import Batch, NotSupportedError
from kvcache.integrations.transformers import TransformersModel, attention
from kvcache_engine import Engine, EngineOptions, GenerationOptions, SpeculativeOptions
from kvcache_engine.drafts import ModelDraft
from kvcache_engine.fingerprint import model_identity

from ...rigs import hf_models as hf

LAYOUTS = {
    "llama": "PACKED",
    "gemma2": "PACKED",  # soft caps
    "gemma3_text": "PACKED",  # windows
    "gpt_oss": "PACKED",  # sinks
    "llama4_text": "PACKED",  # chunks
    "qwen3_next": "ROWS",  # recurrences
    "mamba": "ALONE",  # which goes on from a state by one token at a time
    "bloom": "ALONE",  # positions that it counts itself
    "roberta": "ALONE",  # positions that begin at 2
    "glm_moe_dsa": "ALONE",  # latents that it reads itself, and an indexer
}
"""By type of model, how its tokens are given to it."""


@pytest.fixture(scope="module", params=LAYOUTS)
def case(request: pytest.FixtureRequest) -> census.Case:
    transformers.logging.set_verbosity_error()
    return census.Case(request.param)


some_types = pytest.mark.parametrize(
    "case", ["llama", "gpt_oss", "llama4_text", "qwen3_next", "bloom", "glm_moe_dsa"], indirect=True
)
"""One for each way to attend; docs/engine-models.md has what becomes of all types."""


def llama(**changes: Any) -> Any:
    return copy.deepcopy(hf.model("llama", **changes))


def alone(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    ids = [*prompt]
    for _ in range(count):
        ids.append(int(hf.feed(model, None, torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def ids(count: int, seed: int = 0) -> list[int]:
    found: list[int] = hf.tokens(1, count, seed)[0].tolist()
    return found


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


def test_a_model_that_drafts_for_itself_is_right() -> None:
    model = TransformersModel(llama())
    settings = GenerationOptions(12, ignore_eos=True)
    with (
        Engine(model, None, SpeculativeOptions(capacity=64)) as engine,
        ModelDraft(model, capacity=64) as draft,
    ):
        engine.draft = draft
        answers = engine.complete([ids(9), ids(5, 1)], settings)
        assert [[*answer.tokens] for answer in answers] == [
            alone(model.model, ids(9), 12), alone(model.model, ids(5, 1), 12)
        ]  # fmt: skip
        assert engine.speculation.acceptance == 1.0


def test_trying_a_model_says_nothing_of_who_attends(caplog: pytest.LogCaptureFixture) -> None:
    model = llama()
    TransformersModel(model)
    attention._say.cache_clear()
    TransformersModel(model)  # which attends by the interface already
    assert "own attention" not in caplog.text


def test_log_probabilities_are_those_of_the_model() -> None:
    model = TransformersModel(llama())
    with Engine(model, None, EngineOptions(capacity=64)) as engine:
        [answer] = engine.complete([ids(9)], GenerationOptions(4, ignore_eos=True, logprobs=3))
        logits = hf.feed(model.model, None, torch.tensor([[*ids(9), *answer.tokens]]))[0, 8:12]
    expected = torch.log_softmax(logits.float(), -1)
    for row, token, found in zip(expected, answer.tokens, answer.logprobs, strict=True):
        assert math.isclose(found.token, float(row[token]), abs_tol=1e-4)
        assert [token for token, _ in found.top] == row.topk(3).indices.tolist()


def test_what_is_sampled_depends_on_its_seed_alone() -> None:
    settings = GenerationOptions(8, temperature=1.0, seed=3, ignore_eos=True)
    with Engine(TransformersModel(llama()), None, EngineOptions(capacity=64)) as engine:
        [one] = engine.complete([ids(9)], settings)
        one_of_many = engine.complete([ids(7, 4), ids(9), ids(9, 2)], settings)[1]
        greedy = engine.complete([ids(9)], GenerationOptions(8, ignore_eos=True))[0]
    assert one.tokens == one_of_many.tokens != greedy.tokens


def test_tenants_share_what_they_mean_to_share() -> None:
    with Engine(TransformersModel(llama()), None, EngineOptions(capacity=64)) as engine:
        reused = []
        for salt in ("one", "two", "one"):
            request = engine.submit(ids(20), GenerationOptions(2, ignore_eos=True), salt=salt, shared=5)
            while engine.busy:
                engine.step()
            assert request.answer is not None
            reused.append(request.answer.reused)
    assert reused == [0, 5, 19]


def test_a_models_own_end_and_length_are_kept() -> None:
    made = llama()
    first, second = alone(made, ids(9), 2)
    made.generation_config.eos_token_id = [first, second]
    model = TransformersModel(made)
    assert model.config.eos_ids == (first, second)
    assert model.config.max_positions == 128
    with Engine(model) as engine:
        [answer] = engine.complete([ids(9)], GenerationOptions(20))
        assert (answer.reason, engine.limit) == ("stop", 128)


def test_weights_name_what_a_store_has_of_them() -> None:
    one, other = model_identity(TransformersModel(llama())), model_identity(TransformersModel(llama(seed=1)))
    assert one == model_identity(TransformersModel(llama(attention="sdpa")))
    assert one != other
    assert one["dtype"] == "F32"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    model = TransformersModel(llama().to(dtype))
    kept = ml.DType.F16 if dtype is torch.float16 else ml.DType.BF16
    with Engine(model, None, EngineOptions(capacity=64, cache_dtype=kept)) as engine:
        answers = engine.complete([ids(9), ids(4, 1)], GenerationOptions(3, ignore_eos=True))
    assert all(len(answer.tokens) == 3 for answer in answers)
    assert model.dtype is kept


def test_a_model_goes_on_to_work_by_itself() -> None:
    made = llama()
    before = hf.generate(made, hf.inputs("llama", 2))
    model = TransformersModel(made)
    with Engine(model, None, EngineOptions(capacity=64)) as engine:
        engine.complete([ids(9)], GenerationOptions(3))
        assert hf.generate(made, hf.inputs("llama", 2)).distance(before) < 1e-4


def test_a_model_can_be_trained_after_the_engine_has_driven_it() -> None:
    """Passes run in inference mode; nothing that they leave in a model may be of that mode."""
    model = llama().requires_grad_(True)
    with Engine(TransformersModel(model), options=EngineOptions(capacity=64)) as engine:
        engine.complete([ids(9)], GenerationOptions(3))
    batch = torch.tensor([ids(8)])
    model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())
    assert not any(one.is_inference() for one in (*model.parameters(), *model.buffers()))


def refused(made: Any, reason: str) -> None:
    before = getattr(made.config.get_text_config(decoder=True), "_attn_implementation", None)
    with pytest.raises(NotSupportedError, match=reason):
        TransformersModel(made)
    assert getattr(made.config.get_text_config(decoder=True), "_attn_implementation", None) == before


def test_what_cannot_be_driven_is_refused_in_a_sentence() -> None:
    refused(hf.model("t5"), "T5ForConditionalGeneration has an encoder")
    refused(hf.model("minimax"), "accepts caches of a class of its own only")
    refused(llama().train(), "training mode")
    refused(llama().double(), "computes in torch.float64")

    class Counts(transformers.LlamaForCausalLM):  # type: ignore[misc]
        """Logits depend on how many tokens a call has."""

        def forward(self, input_ids: torch.Tensor, **options: Any) -> Any:
            out = super().forward(input_ids=input_ids, **options)
            out.logits = out.logits + input_ids.shape[1] * torch.arange(97)
            return out

    refused(Counts(llama().config).eval(), "cannot be driven.*logits are .* of the largest")


@pytest.mark.parametrize("name", ["llama", "qwen3-next"])
def test_a_pass_that_fails_in_its_middle_leaves_the_requests_as_they_were(name: str) -> None:
    model = TransformersModel(copy.deepcopy(hf.model(name)))
    prompts, settings = [ids(9), ids(6, 1)], GenerationOptions(6, ignore_eos=True)
    with Engine(model, None, EngineOptions(capacity=64)) as engine:
        requests = [engine.submit(prompt, settings) for prompt in prompts]
        with hf.failing(model.model.lm_head):
            engine.step()
        while engine.busy:
            engine.step()
        found = [[*request.tokens[len(p) :]] for request, p in zip(requests, prompts, strict=True)]
    assert found == [alone(model.model, prompt, 6) for prompt in prompts]


def test_the_ids_of_a_batch_may_be_on_the_device() -> None:
    model = TransformersModel(llama())
    cache = model.make_cache()
    cache.init(model.backend, ml.DType.F32, 1, 32, 32)
    with model.backend.new_context() as ctx:
        inputs = ctx.from_numpy(np.array(ids(5), np.int32))
        found = model.forward(ctx, Batch(range(5), [0] * 5, inputs=inputs), cache).to_numpy()
    cache.close()
    hf.close(torch.from_numpy(found), hf.feed(model.model, None, torch.tensor([ids(5)]))[0])
