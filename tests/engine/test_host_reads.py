"""How often the host asks the device in a step of the engine: once, for what all sequences have drawn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import ml
from kvcache.testing.rigs.protocol import only_protocol
from kvcache_engine import Engine, EngineOptions, GenerationOptions, load_model
from kvcache_engine.drafts import ModelDraft
from kvcache_engine.options import SpeculativeOptions

from .test_models import folders

__all__ = ["folders"]

PROMPTS = [[int(t) for t in np.random.default_rng(i).integers(3, 97, 5)] for i in range(15)]
MIXED = [
    GenerationOptions(6, ignore_eos=True, temperature=temperature, top_k=k, top_p=p, seed=11)
    for temperature, k, p in ((0.0, 0, 1.0), (0.8, 0, 1.0), (1.0, 7, 1.0), (1.2, 20, 0.9), (0.7, 0, 0.8))
]
NAMES = ["llama", "mixtral", "gemma3", "qwen3-next"]
PAIRS = [
    *(("elsewhere", name) for name in NAMES),
    *((name, "llama") for name in ("numpy", "torch", "mlx")),
    ("numpy", "qwen3-next"), ("torch", "mixtral"), ("mlx", "gemma3"),
]  # fmt: skip
"""Backends and models: the required core alone has all models, each other backend two."""

FAR = ml.DeviceInfo("elsewhere", "elsewhere")


def elsewhere() -> ml.Backend:
    """The required core alone, on a device that is not the host."""
    numpy: Any = ml.open_backend("numpy")
    numpy._devices = (FAR,)
    return only_protocol(numpy)


@pytest.fixture(scope="module", params=["elsewhere", "numpy", "torch", "mlx"])
def backend(request: pytest.FixtureRequest) -> Iterator[ml.Backend]:
    if request.param == "elsewhere":
        with elsewhere() as found:
            yield found
        return
    pytest.importorskip({"mlx": "mlx.core"}.get(request.param, request.param))
    with ml.open_backend(request.param, device="cpu") as found:
        yield found


@pytest.fixture
def reads(backend: ml.Backend, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the tensors that the host has read."""
    with backend.new_context() as ctx:
        kind: Any = type(ctx.zeros((1,), ml.DType.F32))
    read, shapes = kind.to_numpy, []

    def to_numpy(self: Any) -> np.ndarray:
        shapes.append(self.shape)
        host: np.ndarray = read(self)
        return host

    monkeypatch.setattr(kind, "to_numpy", to_numpy)
    return shapes


def right(answers: dict[tuple[int, ...], list[int]]) -> Any:
    """A draft that knows the answers, and says something else at times."""

    def draft(seq: int, tokens: Any, count: int, width: int) -> list[list[int]]:
        at = len(tokens) - 5
        guess = answers[tuple(tokens[:5])][at : at + count]
        return [[(token + (at == 2)) % 97 for token in guess]]

    return draft


@pytest.mark.parametrize(("backend", "name"), PAIRS, indirect=["backend"], scope="module")
def test_a_step_reads_once_however_many_sequences_there_are(
    backend: ml.Backend, reads: list[tuple[int, ...]], folders: Any, name: str
) -> None:
    if backend.name == "torch" and name != "llama":
        functional = pytest.importorskip("torch.nn.functional")
        if not hasattr(functional, "grouped_mm"):
            pytest.skip("this torch has no grouped product")
    model = load_model(folders(name), backend)
    answers: dict[tuple[int, ...], list[int]] = {}
    for count in (7, 1):
        for drafted in (False, True):
            options = (SpeculativeOptions if drafted else EngineOptions)(
                max_sequences=count, capacity=32, prefill_chunk=24
            )
            with Engine(model, None, options) as engine:
                draft = right(answers) if drafted else None
                requests = [
                    engine.submit(prompt, MIXED[i % len(MIXED)], draft, i)
                    for i, prompt in enumerate(PROMPTS[:count])
                ]
                while engine.busy:
                    reads.clear()
                    engine.step()
                    assert len(reads) == 1, reads
                    if FAR in backend.devices and reads[0][0]:
                        assert reads[0][1] == 2  # an id and the largest logit of each row
                for request in requests:
                    known = answers.setdefault(request.tokens[:5], list(request.tokens[5:]))
                    assert list(request.tokens[5:]) == known
                assert not drafted or engine.speculation.accepted > 0


def test_log_probabilities_come_in_the_same_read_and_only_for_those_that_ask(
    backend: ml.Backend, reads: list[tuple[int, ...]], folders: Any
) -> None:
    """Two of eight ask, one for three of the likeliest and one for none."""
    model, asking = load_model(folders("llama"), backend), {2: 3, 5: 0}
    with Engine(model, None, EngineOptions(max_sequences=8, capacity=32)) as engine:
        requests = [
            engine.submit(prompt, replace(MIXED[i % len(MIXED)], logprobs=asking.get(i)), stream=i)
            for i, prompt in enumerate(PROMPTS[:8])
        ]
        while engine.busy:
            reads.clear()
            engine.step()
            assert len(reads) == 1, reads
            if FAR in backend.devices and reads[0][0]:
                # Ids and largest logits of all, then of each that asks its own, three values, three ids.
                assert reads[0] == (8 * 2 + 2 * (1 + 2 * 3),)
    for i, request in enumerate(requests):
        found = request.run.logprobs
        assert [len(each.top) for each in found] == ([asking[i]] * 6 if i in asking else [])


@pytest.mark.parametrize("name", ["mixtral", "qwen3-next"])
def test_many_tokens_of_a_prompt_ask_nothing_of_the_experts_that_they_chose(
    reads: list[tuple[int, ...]], backend: ml.Backend, folders: Any, name: str
) -> None:
    """More than 256 pairs of a token and an expert, also where there is no grouped product."""
    model = load_model(folders(name), backend)
    with Engine(model, None, EngineOptions(max_sequences=4, capacity=128)) as engine:
        for prompt in np.random.default_rng(0).integers(3, 97, (4, 100)):
            engine.submit(prompt.tolist(), MIXED[1])
        while engine.busy:
            reads.clear()
            engine.step()
            assert len(reads) == 1


@pytest.mark.parametrize(("name", "dtype"), [("mixtral", "F16"), ("gemma3", "F32"), ("qwen3-next", "F16")])
def test_a_step_on_cuda_waits_once(folders: Any, name: str, dtype: str) -> None:
    """For what was drawn, also after more than 256 pairs; for these dtypes torch has no grouped product."""
    pytest.importorskip("torch")
    from ..rigs.cuda_double import cuda_double

    with (
        cuda_double() as transfers,
        ml.open_backend("torch", device="cuda:0", dtype=ml.DType[dtype]) as backend,
        Engine(load_model(folders(name), backend), None, EngineOptions(4, 128)) as engine,
    ):
        for i, prompt in enumerate(np.random.default_rng(0).integers(3, 97, (4, 100))):
            engine.submit(prompt.tolist(), replace(MIXED[i], max_new_tokens=2))
        while engine.busy:
            transfers.clear()
            engine.step()
            assert [noted.kind for noted in transfers.waits] == ["download"]


def test_a_draft_of_a_model_is_read_once(
    backend: ml.Backend, reads: list[tuple[int, ...]], folders: Any
) -> None:
    with ModelDraft(load_model(folders("llama"), backend), width=3, capacity=64) as draft:
        reads.clear()
        assert [len(guess) for guess in draft(0, PROMPTS[0], 4, 3)] == [4, 4, 4]
        assert reads == [(3, 4)]


def test_every_device_draws_the_same(folders: Any) -> None:
    """Logits that differ in their last bits may make another draw: here none does."""
    with ml.open_backend("numpy") as numpy, elsewhere() as far:
        found = []
        for backend in (numpy, far):
            with Engine(load_model(folders("mixtral"), backend), None, EngineOptions(8, 64)) as engine:
                requests = [engine.submit(p, MIXED[i % 5], None, i) for i, p in enumerate(PROMPTS)]
                while engine.busy:
                    engine.step()
                found.append([request.tokens for request in requests])
        assert found[0] == found[1]
