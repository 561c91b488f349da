"""The engine over models of transformers and of mlx-lm gives what the model gives alone."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("mlx_lm")

import mlx.core as mx
import mlx.nn as nn
import torch
import transformers
from mlx.utils import tree_map

import ml
from benchmarks.census import driven, mlx_lm_engine, transformers_engine
from kvcache import Batch
from kvcache.integrations.mlx_lm import MLXModel
from kvcache.integrations.transformers import TransformersModel
from kvcache_engine import Engine, EngineOptions, GenerationOptions
from kvcache_engine.fingerprint import model_identity

from ..rigs import hf_models as hf
from ..rigs import mlx_lm_models as models

ENDLESS = GenerationOptions(6, ignore_eos=True)


class Transformers:
    layouts: ClassVar[dict[str, str]] = {
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
    some = ("llama", "gpt_oss", "llama4_text", "qwen3_next", "bloom", "glm_moe_dsa")
    failing = ("llama", "qwen3-next")
    case = transformers_engine.Case
    drive = TransformersModel

    @staticmethod
    def make(name: str = "llama", **changes: Any) -> Any:
        transformers.logging.set_verbosity_error()
        return copy.deepcopy(hf.model(name, **changes))

    @staticmethod
    def prompt(count: int, seed: int = 0) -> list[int]:
        found: list[int] = hf.tokens(1, count, seed)[0].tolist()
        return found

    @staticmethod
    def logits(made: Any, ids: list[int]) -> np.ndarray:
        found: np.ndarray = hf.feed(made, None, torch.tensor([ids]))[0].float().numpy()
        return found

    @staticmethod
    def halved(made: Any, dtype: ml.DType) -> Any:
        return made.to(torch.float16 if dtype is ml.DType.F16 else torch.bfloat16)

    @staticmethod
    def ending(made: Any, ids: list[int]) -> tuple[Any, int]:
        """The model that ends at these ids, and its longest text."""
        made.generation_config.eos_token_id = ids
        return TransformersModel(made), 128

    @staticmethod
    @contextlib.contextmanager
    def failing_in(made: Any) -> Iterator[None]:
        with hf.failing(made.lm_head):
            yield


class Lost(nn.Module):  # type: ignore[misc]
    """A part of a model that fails."""

    def __call__(self, *arguments: Any) -> Any:
        raise MemoryError("lost")


class MLXLM:
    layouts: ClassVar[dict[str, str]] = {
        "llama": "PACKED",
        "gemma3_text": "PACKED",  # windows
        "gpt_oss": "PACKED",  # sinks
        "gemma2": "ROWS",  # soft caps, by attention of its own
        "deepseek_v32": "ROWS",  # latents that it reads itself, and an indexer
        "qwen3_next": "ROWS",  # recurrences
        "mamba": "ROWS",
        "llama4": "ROWS",  # chunks, by a mask of its own
    }
    some = ("llama", "gemma3_text", "gpt_oss", "deepseek_v32", "qwen3_next")
    failing = tuple(models.MODELS)
    case = mlx_lm_engine.Case
    drive = MLXModel

    @staticmethod
    def make(name: str = "llama", **changes: Any) -> Any:
        return models.MODELS[name](**changes)

    prompt = staticmethod(models.prompt_of)

    @staticmethod
    def logits(made: Any, ids: list[int]) -> np.ndarray:
        return np.array(made(mx.array([ids]))[0].astype(mx.float32))

    @staticmethod
    def halved(made: Any, dtype: ml.DType) -> Any:
        half = mx.float16 if dtype is ml.DType.F16 else mx.bfloat16
        made.update(tree_map(lambda array: array.astype(half), made.parameters()))
        return made

    @staticmethod
    def ending(made: Any, ids: list[int]) -> tuple[Any, int]:
        return MLXModel(made, {"eos_token_id": ids, "text_config": {"max_position_embeddings": 40}}), 40

    @staticmethod
    @contextlib.contextmanager
    def failing_in(made: Any) -> Iterator[None]:
        norm, made.model.norm = made.model.norm, Lost()
        with pytest.raises(MemoryError, match="lost"):
            yield
        made.model.norm = norm


RUNTIMES: dict[str, Any] = {"transformers": Transformers, "mlx-lm": MLXLM}
each_runtime = pytest.mark.parametrize("runtime", RUNTIMES.values(), ids=RUNTIMES)


def cases(which: str) -> list[Any]:
    """Types of models of both runtimes: all whose layout is known, one for each way to attend, or others."""
    return [
        pytest.param((name, label), id=f"{name}-{label}")
        for name, runtime in RUNTIMES.items()
        for label in getattr(runtime, which)
    ]


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest) -> Any:
    runtime, label = request.param
    return RUNTIMES[runtime].case(label)


def alone(runtime: Any, made: Any, prompt: list[int], count: int) -> list[int]:
    ids = [*prompt]
    for _ in range(count):
        ids.append(int(runtime.logits(made, ids)[-1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("case", cases("layouts"), indirect=True)
def test_a_type_is_given_its_tokens_in_the_layout_that_it_takes(
    case: driven.Case, request: pytest.FixtureRequest
) -> None:
    runtime, label = request.node.callspec.params["case"]
    assert case.driven.layout.name == RUNTIMES[runtime].layouts[label]


@pytest.mark.parametrize("case", cases("some"), indirect=True)
def test_mixed_requests_answer_as_the_model_alone(case: driven.Case) -> None:
    """Shared prefixes, chunks of prompts, one cancelled, one preempted; twice, the second from a folder."""
    for answers in driven.mixed(case):
        assert answers == case.alone(answers)


@pytest.mark.parametrize("case", cases("some"), indirect=True)
def test_drafts_change_no_answer(case: driven.Case) -> None:
    """Those that are looked up in the text, and those of a smaller model, which is driven likewise."""
    [answers] = driven.drafts(case)
    assert answers == case.alone(answers)


@each_runtime
def test_log_probabilities_are_those_of_the_model(runtime: Any) -> None:
    made, prompt = runtime.make(), runtime.prompt(9)
    with Engine(runtime.drive(made), None, EngineOptions(capacity=64)) as engine:
        [answer] = engine.complete([prompt], GenerationOptions(4, ignore_eos=True, logprobs=3))
        logits = runtime.logits(made, [*prompt, *answer.tokens])[8:12]
    expected = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    for row, token, found in zip(expected, answer.tokens, answer.logprobs, strict=True):
        assert math.isclose(found.token, float(row[token]), abs_tol=1e-4)
        assert [token for token, _ in found.top] == np.argsort(-row)[:3].tolist()


@each_runtime
def test_ends_and_length_are_those_of_the_model(runtime: Any) -> None:
    made, prompt = runtime.make(), runtime.prompt(9)
    first, second = alone(runtime, made, prompt, 2)
    model, longest = runtime.ending(made, [first, second])
    assert (model.config.eos_ids, model.config.max_positions) == ((first, second), longest)
    with Engine(model) as engine:
        [answer] = engine.complete([prompt], GenerationOptions(20))
        assert (answer.reason, engine.limit) == ("stop", longest)


@each_runtime
def test_weights_name_what_a_store_has_of_them(runtime: Any) -> None:
    one, other = (model_identity(runtime.drive(runtime.make(seed=seed))) for seed in (3, 4))
    assert one == model_identity(runtime.drive(runtime.make(seed=3)))
    assert one != other
    assert one["dtype"] == "F32"


@pytest.mark.parametrize("dtype", [ml.DType.F16, ml.DType.BF16])
@each_runtime
def test_half_precision(runtime: Any, dtype: ml.DType) -> None:
    model = runtime.drive(runtime.halved(runtime.make(), dtype))
    assert model.dtype is dtype
    with Engine(model, None, EngineOptions(capacity=64, cache_dtype=dtype)) as engine:
        answers = engine.complete([runtime.prompt(9), runtime.prompt(4, 1)], ENDLESS)
    assert all(len(answer.tokens) == 6 for answer in answers)


@pytest.mark.parametrize("which", cases("failing"))
def test_a_pass_that_fails_in_its_middle_leaves_the_requests_as_they_were(which: tuple[str, str]) -> None:
    runtime, made = RUNTIMES[which[0]], RUNTIMES[which[0]].make(which[1])
    prompts = [runtime.prompt(9), runtime.prompt(6, 1)]
    with Engine(runtime.drive(made), None, EngineOptions(capacity=64)) as engine:
        requests = [engine.submit(prompt, ENDLESS) for prompt in prompts]
        engine.step()
        with runtime.failing_in(made):
            engine.step()
        while engine.busy:
            engine.step()
        found = [[*request.tokens[len(p) :]] for request, p in zip(requests, prompts, strict=True)]
        assert found == [alone(runtime, made, prompt, 6) for prompt in prompts]


@each_runtime
def test_the_ids_of_a_batch_may_be_on_the_device(runtime: Any) -> None:
    made, ids = runtime.make(), runtime.prompt(5)
    model = runtime.drive(made)
    cache = model.make_cache()
    cache.init(model.backend, ml.DType.F32, 1, 32, 32)
    with model.backend.new_context() as ctx:
        inputs = ctx.from_numpy(np.array(ids, np.int32))
        found = model.forward(ctx, Batch(range(5), [0] * 5, inputs=inputs, outputs=[4, 1]), cache).to_numpy()
    cache.close()
    assert np.abs(found - runtime.logits(made, ids)[[4, 1]]).max() < 1e-4
