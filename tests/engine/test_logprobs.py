"""Log probabilities: of arrays, of a model's own logits, and of requests that ask for them among others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import ml
from kvcache import Batch, CausalCache
from kvcache_engine import (
    Engine,
    EngineOptions,
    Finished,
    GenerationOptions,
    Llama,
    Token,
    Tokenizer,
    bundled_model,
    load_model,
)
from kvcache_engine.options import SpeculativeOptions
from ml import nn

from ..rigs.each_backend import host_and_tensors

pytest.importorskip("tokenizers")

Find = Callable[[np.ndarray, np.ndarray, int], np.ndarray]
PROMPT = "And God said unto Noah,"


def by_tensors(backend: ml.Backend) -> Find:
    def find(logits: np.ndarray, tokens: np.ndarray, most: int) -> np.ndarray:
        with backend.new_context() as ctx:
            there = ctx.from_numpy(logits), ctx.from_numpy(tokens.astype(np.int32))
            return nn.logprobs(ctx, *there, most).to_numpy()

    return find


find = host_and_tensors(nn.logprobs_on_host, by_tensors)


def reference(logits: Sequence[float]) -> np.ndarray:
    """log softmax, after the definition."""
    weights = np.exp(np.array(logits, np.longdouble) - max(logits))
    with np.errstate(divide="ignore"):
        return np.log(weights / weights.sum()).astype(np.float64)


@pytest.mark.parametrize("most", [0, 1, 5, 40])
@pytest.mark.parametrize("scale", [0.1, 3.0, 60.0])
def test_each_row_is_its_log_softmax_likeliest_first(find: Find, most: int, scale: float) -> None:
    random = np.random.default_rng(most)
    logits = random.normal(0, scale, (5, 40)).astype(np.float32)
    logits[1, 7:30] = -np.inf  # cannot come
    logits[2, [3, 4, 9]] = 4 * scale  # equals: the lower id first
    tokens = np.array([0, 31, 9, 39, int(logits[4].argmax())])
    found = find(logits, tokens, most)
    assert found.shape == (5, 1 + 2 * most)
    for row, values, token in zip(found, logits.tolist(), tokens, strict=True):
        expected = reference(values)
        order = np.argsort(-expected, kind="stable")[:most]
        np.testing.assert_array_equal(row[1 + most :], order)
        np.testing.assert_allclose(row[: 1 + most], expected[[token, *order]], rtol=2e-6, atol=2e-6)


def test_what_does_not_fit_is_refused(find: Find) -> None:
    logits, tokens = np.zeros((2, 4), np.float32), np.zeros(2, np.int64)
    for wrong in ((logits[0], tokens, 0), (logits, tokens[:1], 0), (logits, tokens, 5), (logits, tokens, -1)):
        with pytest.raises(ml.ShapeError, match="logprobs: logits"):
            find(*wrong)


@pytest.fixture(scope="module")
def model() -> Iterator[Llama]:
    with ml.open_backend("numpy") as backend:
        yield load_model(bundled_model(), backend)


def logits_after(model: Llama, tokens: Sequence[int], first: int) -> np.ndarray:
    """The model's own, behind each of the tokens from ``first`` on, in one pass."""
    cache, count = CausalCache(), len(tokens)
    cache.init(model.backend, ml.DType.F32, max_sequences=1, capacity=count, max_batch=count)
    with contextlib.closing(cache), model.backend.new_context() as ctx:
        batch = Batch(range(count), [0] * count, inputs=tokens, outputs=range(first, count))
        cache.start_forward(ctx, batch)
        return model.forward(ctx, batch, cache).to_numpy()


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_an_answers_are_those_of_the_models_logits(model: Llama, temperature: float) -> None:
    """Before temperature and top-k, whatever draws from them."""
    settings = GenerationOptions(8, temperature=temperature, top_k=50, seed=5, logprobs=4)
    with Engine(model, Tokenizer.load(bundled_model()), EngineOptions(capacity=64)) as engine:
        prompt = engine.encode(PROMPT)
        (answer,) = engine.complete([prompt], settings)
        (plain,) = engine.complete([prompt], GenerationOptions(8, temperature=temperature, top_k=50, seed=5))
    assert (answer.text, plain.logprobs) == (plain.text, ())
    rows = logits_after(model, [*prompt, *answer.tokens[:-1]], len(prompt) - 1)
    for row, token, found in zip(rows.tolist(), answer.tokens, answer.logprobs, strict=True):
        expected = reference(row)
        order = np.argsort(-expected, kind="stable")[:4]
        assert found.token == pytest.approx(expected[token], abs=1e-4)
        assert [each for each, _ in found.top] == order.tolist()
        np.testing.assert_allclose([value for _, value in found.top], expected[order], atol=1e-4)


def test_they_come_with_their_tokens_and_reach_no_one_else(model: Llama) -> None:
    """More requests than sequences, with prompts that begin alike; one ends at a string in its middle."""
    tokenizer = Tokenizer.load(bundled_model())
    asked = [None, 0, 2, None, 1]
    with Engine(model, tokenizer, EngineOptions(max_sequences=2, capacity=64)) as engine:
        stop = engine.complete([f"{PROMPT} 2"], GenerationOptions(6))[0].text[4:8]
        requests = [
            engine.submit(f"{PROMPT} {i}", GenerationOptions(6, logprobs=n, stop=[stop] if n == 2 else []))
            for i, n in enumerate(asked)
        ]
        events = []
        while engine.busy:
            events += engine.step()
    for request, wanted in zip(requests, asked, strict=True):
        mine = [event for event in events if event.request == request.id]
        tokens = [event for event in mine if isinstance(event, Token) and event.token is not None]
        (answer,) = [event for event in mine if isinstance(event, Finished)]
        assert tuple(event.token for event in tokens) == answer.tokens
        if wanted is None:
            assert answer.logprobs == ()
            assert all(event.logprobs is None for event in tokens)
        else:
            assert answer.logprobs == tuple(event.logprobs for event in tokens)
            assert {len(each.top) for each in answer.logprobs} == {wanted}
            assert answer.reason == ("stop" if wanted == 2 else "length")


def test_drafted_tokens_have_those_of_plain_decoding(model: Llama) -> None:
    tokenizer = Tokenizer.load(bundled_model())
    settings = GenerationOptions(12, logprobs=2)
    with Engine(model, tokenizer, EngineOptions(capacity=64)) as engine:
        (plain,) = engine.complete([PROMPT], settings)
        prompt = engine.encode(PROMPT)

    def draft(seq: int, tokens: Sequence[int], count: int, width: int) -> list[list[int]]:
        at = len(tokens) - len(prompt)
        return [[*plain.tokens[at : at + 2], 7][:count]]  # two that are right, and one that is not

    with Engine(model, tokenizer, SpeculativeOptions(capacity=64)) as engine:
        request = engine.submit(prompt, settings, draft)
        while engine.busy:
            engine.step()
        assert engine.speculation.accepted > 0
    assert request.text == plain.text
    for one, other in zip(request.run.logprobs, plain.logprobs, strict=True):
        assert one.token == pytest.approx(other.token, abs=1e-4)
        assert [each for each, _ in one.top] == [each for each, _ in other.top]


# The bytes of tokens.


def tokenizer_of(decoder: Any, vocabulary: Sequence[str]) -> Tokenizer:
    from tokenizers import AddedToken, models
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="?"))
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    backend.decoder = decoder
    return Tokenizer(backend, [])


def test_bytes_of_a_token_are_those_its_decoder_writes() -> None:
    decoders = pytest.importorskip("tokenizers").decoders
    replace, fallback = decoders.Replace("▁", " "), decoders.ByteFallback()
    cases: list[tuple[Any, dict[str, bytes]]] = [
        (
            decoders.ByteLevel(),
            {"ĠNoah": b" Noah", "Ã": b"\xc3", "Ċ": b"\n", "日": "日".encode()},
        ),
        (decoders.Metaspace(), {"▁Noah": b" Noah", "<0xE2>": b"<0xE2>"}),
        (
            decoders.Sequence([replace, fallback, decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
            {"▁Noah": b" Noah", "<0xE2>": b"\xe2", "é": "é".encode()},
        ),
        (decoders.WordPiece(), {"##ah": b"##ah"}),
        (None, {"Noah": b"Noah"}),
    ]
    for decoder, expected in cases:
        tokenizer = tokenizer_of(decoder, [*expected, "?"])
        found = {token: tokenizer.token_bytes[i] for i, token in enumerate(expected)}
        assert found == expected
        special = len(expected) + 1  # behind "?"
        assert tokenizer.token_bytes[special] == b"<s>"
        assert tokenizer.token_bytes[9999] == b""


def test_bytes_of_a_texts_tokens_are_the_text() -> None:
    tokenizer = Tokenizer.load(bundled_model())
    text = "And God said unto Noah, \N{GREEK SMALL LETTER ALPHA} \N{GRINNING FACE}\n\tdone"
    found = b"".join(tokenizer.token_bytes[token] for token in tokenizer.encode(text, bos=False))
    assert found.decode().removeprefix(" ") == text
