"""Multi-token prediction against its definition, by transformers' layers; answers do not depend on it."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ml
from kvcache.caches import branches
from kvcache_engine.drafts import prompt_lookup
from kvcache_engine.engine import Engine
from kvcache_engine.errors import ModelError, RequestError
from kvcache_engine.fingerprint import model_identity
from kvcache_engine.generate import Generator
from kvcache_engine.loading import bundled_model, load_model
from kvcache_engine.models.mtp import TAIL
from kvcache_engine.mtp import MTPDraft
from kvcache_engine.options import EngineOptions, SpeculativeOptions
from kvcache_engine.requests import GenerationOptions

pytest.importorskip("transformers")
pytest.importorskip("torch")

import torch
from safetensors.numpy import load_file, save_file

from ..rigs.each_backend import each_backend
from ..rigs.model_passes import TwoDevices, close, prompt, run
from .test_models import BACKENDS, MODELS, new_cache, random_peer, whole_on_numpy

NAMES = ("deepseek-v3", "deepseek-v3.2", "glm-4.5", "glm-4.5 air")
LAYERS, COUNT = 3, 4


@functools.cache
def peer(name: str) -> Any:
    """transformers' model with a layer more than ours has, the one for multi-token prediction."""
    model_name, config_name, changes = MODELS[name]
    changes = {**changes, "num_hidden_layers": LAYERS + 1}
    if "mlp_layer_types" in changes:
        changes["mlp_layer_types"] = [*changes["mlp_layer_types"], "sparse"]
    model = random_peer(model_name, config_name, changes)
    hidden = model.config.hidden_size
    model.more = {
        **{norm: torch.rand(hidden) + 0.5 for norm in ("enorm", "hnorm", "shared_head.norm")},
        "eh_proj": torch.randn(hidden, 2 * hidden) * 0.2,
    }
    return model


def rms_norm(x: Any, weight: Any, eps: float) -> Any:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


class Reference:
    """The definition, over a whole text at once: hidden states, then guesses one after another."""

    def __init__(self, name: str, tokens: Sequence[int]) -> None:
        self.model, self.tokens = peer(name), list(tokens)
        self.eps = self.model.config.rms_norm_eps
        hidden = self._layers(self.model.model.embed_tokens(torch.tensor([self.tokens[:-1]])), range(LAYERS))
        hidden = rms_norm(hidden, self.model.model.norm.weight, self.eps)
        inputs = torch.cat([torch.zeros_like(hidden[:, :1]), hidden], 1)
        self.inputs = self._joined(self.tokens, inputs)
        self.inputs[:, 0] = 0.0

    def _joined(self, tokens: Sequence[int], before: Any) -> Any:
        more, embedded = self.model.more, self.model.model.embed_tokens(torch.tensor([tokens]))
        both = rms_norm(embedded, more["enorm"], self.eps), rms_norm(before, more["hnorm"], self.eps)
        return torch.cat(both, -1) @ more["eh_proj"].T

    def _layers(self, hidden: Any, which: Sequence[int]) -> Any:
        inner, count = self.model.model, hidden.shape[1]
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        rotary = inner.rotary_emb(hidden, positions)
        for i in which:
            found = inner.layers[i](
                hidden, attention_mask=mask, position_ids=positions, position_embeddings=rotary,
                past_key_values=None, use_cache=False,
            )  # fmt: skip
            hidden = found[0] if isinstance(found, tuple) else found
        return hidden

    def guess(self) -> np.ndarray:
        """Logits (vocab_size,) of the next guess."""
        hidden = rms_norm(self._layers(self.inputs, [LAYERS]), self.model.more["shared_head.norm"], self.eps)
        self.last = hidden[:, -1:]
        return self.model.lm_head(self.last)[0, 0].numpy()

    def extend(self, token: int) -> None:
        self.inputs = torch.cat([self.inputs, self._joined([token], self.last)], 1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def folder(name: str) -> Path:
        path: Path = tmp_path_factory.mktemp("model")
        model = peer(name)
        model.save_pretrained(path)
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        config |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
        for key in ("mlp_layer_types", "layer_types", "indexer_types"):
            if config.get(key):
                config[key] = config[key][:LAYERS]
        (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        tensors = load_file(path / "model.safetensors")
        more = {f"model.layers.{LAYERS}.{key}.weight": value.numpy() for key, value in model.more.items()}
        save_file({**tensors, **more}, path / "model.safetensors")
        return path

    return folder


backend = each_backend(*BACKENDS)


@pytest.fixture(scope="module")
def models(backend: ml.Backend, folders: Any) -> Any:
    return functools.cache(lambda name, mtp=True: load_model(folders(name), backend, mtp=mtp))


@pytest.fixture(scope="module")
def on_numpy(folders: Any) -> Iterator[Any]:
    with ml.open_backend("numpy") as opened:
        yield functools.cache(lambda name, mtp=True: load_model(folders(name), opened, mtp=mtp))


@pytest.mark.parametrize("name", NAMES)
def test_guesses_are_those_of_the_definition(models: Any, name: str) -> None:
    """Two sequences, prefilled in chunks beside each other; then guesses behind one of them."""
    model, texts = models(name), [prompt(21, 1), prompt(16, 2)]
    cache = new_cache(model, 2)
    for begin in (0, 1, 6):
        end = {0: 1, 1: 6, 6: 20}[begin]
        entries = [(seq, at) for at in range(begin, end) for seq in (0, 1) if at < len(texts[seq]) - 1]
        run(model, cache, entries, texts)
    for seq, tokens in enumerate(texts):
        reference, seen = Reference(name, tokens), []

        def choose(ctx: ml.Context, logits: ml.Tensor, seen: list[np.ndarray] = seen) -> ml.Tensor:
            seen.append(logits.to_numpy()[0])
            return logits.argmax(ctx, 1)

        with model.backend.new_context() as ctx:
            assert model.mtp.guess(ctx, cache, seq, tokens, COUNT, choose)
        for found in seen:
            close(found, reference.guess())
            reference.extend(int(found.argmax()))
        branches.rollback(cache, seq, len(tokens) - 1)


@whole_on_numpy(NAMES, ["glm-4.5"])
def test_answers_are_those_without_it(models: Any, name: str) -> None:
    prompts = [prompt(9, 3), prompt(14, 4), prompt(1, 5)]
    plain = models(name, mtp=False)
    options: dict[str, Any] = {"max_sequences": 2, "capacity": 64, "prefill_chunk": 7}
    with Generator(plain, None, options=EngineOptions(**options)) as generator:
        expected = [answer.tokens for answer in generator.complete(prompts, GenerationOptions(12))]
    model = models(name)
    with Generator(model, None, draft=MTPDraft(model), options=SpeculativeOptions(**options)) as generator:
        assert [each.tokens for each in generator.complete(prompts, GenerationOptions(12))] == expected
        assert generator.speculation.drafted > 30
        cache: Any = generator.cache
        generator.engine.forget()
        assert cache.free_cells == cache.cells


@pytest.mark.parametrize("name", ["deepseek-v3", "glm-4.5"])
def test_what_is_drawn_is_drawn_from_what_the_definition_says(on_numpy: Any, name: str) -> None:
    model, tokens = on_numpy(name), prompt(12, 6)
    cache, draft = new_cache(model), MTPDraft(model)
    draft.bind(model, cache)
    run(model, cache, [(0, at) for at in range(11)], [tokens])
    settings = GenerationOptions(8, temperature=0.8, seed=3)
    proposal = draft.sample(0, tokens, COUNT, settings.sampler(0), 0)
    again = draft.sample(0, tokens, COUNT, settings.sampler(0), 0)
    assert list(proposal.tokens) == list(again.tokens)
    assert cache.offset(0) == 11
    reference = Reference(name, tokens)
    for token, given in zip(proposal.tokens, proposal.probabilities, strict=True):
        wanted = torch.tensor(reference.guess() / 0.8).softmax(-1).numpy()
        np.testing.assert_allclose(given, wanted, atol=1e-4)
        reference.extend(int(token))


def test_a_layer_that_says_what_the_model_says_is_always_right(folders: Any, tmp_path: Path) -> None:
    """A model whose next token depends on the last one alone, and a layer that passes the embedding on."""
    source = folders("glm-4.5")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = dict(load_file(source / "model.safetensors"))
    for key, value in tensors.items():
        if key.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[key] = np.zeros_like(value)
    last, hidden = f"model.layers.{LAYERS}", tensors["model.norm.weight"].size
    both = np.concatenate([np.eye(hidden), np.zeros((hidden, hidden))], 1)
    tensors[f"{last}.eh_proj.weight"] = both.astype(np.float32)
    tensors[f"{last}.enorm.weight"] = np.ones(hidden, np.float32)
    tensors[f"{last}.shared_head.norm.weight"] = tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with ml.open_backend("numpy") as backend:
        model = load_model(tmp_path, backend, mtp=True)
        options = SpeculativeOptions(max_sequences=2, capacity=64, tokens=3)
        with Generator(model, None, draft=MTPDraft(model), options=options) as generator:
            for settings in (GenerationOptions(13), GenerationOptions(13, temperature=1.0, seed=2)):
                generator.complete([prompt(6, 7), prompt(5, 8)], settings)
        counts = generator.speculation
        assert counts.acceptance > 0.99
        assert counts.tokens_per_pass > 3.9


def test_prefixes_are_shared_and_stored_with_it(on_numpy: Any) -> None:
    """A conversation that comes back begins where it did without; what its layer stored comes with it."""
    first, plain, model = prompt(17, 9), on_numpy("glm-4.5", mtp=False), on_numpy("glm-4.5")
    options = SpeculativeOptions(max_sequences=1, capacity=64)
    found = []
    for each, draft in ((plain, prompt_lookup), (model, MTPDraft(model))):
        with Engine(each, None, options) as engine:
            request = engine.submit(first, GenerationOptions(8), draft)
            answer = _answer(engine, request.id)
            later = engine.submit([*first, *answer, *prompt(5, 10)], GenerationOptions(8), draft)
            found.append((answer, _answer(engine, later.id), engine.prefix.stats.reused))
            cached = sorted(engine.cache.storage.buffers)
        assert cached == list(range(LAYERS + (each is model)))
    assert found[0] == found[1]
    assert found[0][2] > 20


def _answer(engine: Engine, request: int) -> list[int]:
    while True:
        for event in engine.step():
            if getattr(event, "request", None) == request and hasattr(event, "reason"):
                return list(event.tokens)


def test_without_the_hidden_state_there_is_no_idea(on_numpy: Any) -> None:
    model, tokens = on_numpy("deepseek-v3"), prompt(60, 11)
    cache, draft = new_cache(model, 2), MTPDraft(model)
    assert draft(0, tokens[:5], 3, 1) == []  # bound to no cache
    draft.bind(model, cache)
    run(model, cache, [(0, at) for at in range(40)], [tokens])
    assert len(draft(0, tokens[:41], 3, 1)[0]) == 3
    assert draft(0, tokens[:40], 3, 1) == []  # the cache holds one more
    assert draft(1, tokens[:1], 3, 1) == []
    branches.rollback(cache, 0, 40 - TAIL)
    assert draft(0, tokens[: 41 - TAIL], 3, 1) == []
    branches.rollback(cache, 0, 30 - TAIL + 10)
    assert cache.offset(0) == 40 - TAIL


def test_behind_a_prefix_no_hidden_state_is_of_who_was_there_before(
    on_numpy: Any,
) -> None:
    model, tokens = on_numpy("deepseek-v3"), prompt(60, 11)
    with Engine(model, None, EngineOptions(max_sequences=1, capacity=64)) as engine:
        for known in (0, 20):
            engine.submit(tokens[:21], GenerationOptions(2, ignore_eos=True))
            engine.step()
            assert (engine.statistics.reused_tokens > 0) == (known > 0)
            with model.backend.new_context() as ctx:
                states = model.mtp._states(engine.cache)
                kept = [states.last(ctx, 0, at) is not None for at in range(21)]
            assert kept == [at >= known for at in range(21)]
            while engine.busy:
                engine.step()


def test_what_cannot_draft_is_refused(on_numpy: Any, folders: Any) -> None:
    model, plain = on_numpy("glm-4.5"), on_numpy("glm-4.5", mtp=False)
    with pytest.raises(RequestError, match=r"the model has no layer for it; load_model\(..., mtp=True\)"):
        MTPDraft(plain)
    with (
        Engine(plain, None, SpeculativeOptions(capacity=32)) as engine,
        pytest.raises(RequestError, match="only for the model"),
    ):
        engine.submit([1, 2], None, MTPDraft(model))
    with (
        ml.open_backend("numpy") as backend,
        pytest.raises(ModelError, match="no layer for multi-token pred"),
    ):
        load_model(bundled_model(), backend, mtp=True)
    with TwoDevices() as devices, pytest.raises(ModelError, match="needs a model on one device"):
        load_model(folders("glm-4.5"), devices, mtp=True)


def test_a_layer_that_is_not_loaded_is_told(folders: Any, caplog: pytest.LogCaptureFixture) -> None:
    with ml.open_backend("numpy") as backend, caplog.at_level("INFO", "kvcache"):
        load_model(folders("glm-4.5"), backend)
        load_model(bundled_model(), backend)
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "the layer for multi-token prediction is not loaded; mtp=True loads it"
    ]


def test_what_is_stored_with_the_layer_is_another_models(on_numpy: Any) -> None:
    with_it, without = (model_identity(on_numpy("glm-4.5", mtp=mtp)) for mtp in (True, False))
    assert with_it == {**without, "mtp": "yes"}


def test_outputs_are_the_rows_that_were_asked_for(on_numpy: Any) -> None:
    model, tokens = on_numpy("deepseek-v3"), prompt(9, 12)
    every = run(model, new_cache(model), [(0, at) for at in range(9)], [tokens])
    found = run(model, new_cache(model), [(0, at) for at in range(9)], [tokens], outputs=[2, 8])
    close(found, every[[2, 8]], 1e-5)
