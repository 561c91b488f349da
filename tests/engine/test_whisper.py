"""Whisper's decoder against transformers: what the encoder gave is put once, and read at every step."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import kvcache
import ml
from kvcache_engine.errors import ModelError, RequestError
from kvcache_engine.models.families import FAMILIES
from kvcache_engine.models.whisper import Whisper, make_cache
from ml import DType

from ..rigs.each_backend import runnable
from ..rigs.model_passes import close, prompt, run

pytest.importorskip("transformers")

BACKENDS = runnable("numpy", "torch", "mlx")
FRAMES = (20, 13)
LENGTH = 40


@functools.cache
def peer() -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=97, d_model=48, encoder_layers=1, decoder_layers=3, encoder_attention_heads=4,
        decoder_attention_heads=4, decoder_ffn_dim=80, encoder_ffn_dim=40, max_source_positions=20,
        max_target_positions=64, num_mel_bins=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, init_std=0.2, attn_implementation="eager", suppress_tokens=None,
        begin_suppress_tokens=None,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@functools.cache
def states(which: int) -> np.ndarray:
    """(frames, hidden_size): what the encoder says of some sound; the second is cut short."""
    import torch

    torch.manual_seed(which)
    encoded: np.ndarray = peer().model.encoder(torch.randn(1, 8, 40)).last_hidden_state[0].numpy()
    return encoded[: FRAMES[which]]


def expected_logits(which: int, tokens: Sequence[int]) -> np.ndarray:
    import torch

    encoded = (torch.from_numpy(states(which))[None],)
    logits = peer()(encoder_outputs=encoded, decoder_input_ids=torch.tensor([list(tokens)])).logits
    return logits[0].numpy()


@pytest.fixture(scope="module", params=BACKENDS)
def model(request: pytest.FixtureRequest) -> Iterator[Whisper]:
    with ml.open_backend(request.param) as backend:
        yield load(backend)


def load(backend: ml.Backend, dtype: DType = DType.F32) -> Whisper:
    family = FAMILIES["WhisperForConditionalGeneration"]
    weights = {name: tensor.numpy() for name, tensor in peer().state_dict().items()}
    return family.model(backend, family.parse(peer().config.to_dict(), {}), weights, dtype)


def new_cache(model: Whisper, sequences: int = 1, dtype: DType = DType.F32) -> kvcache.WrapperCache:
    cache = model.make_cache()
    cache.init(model.backend, dtype, sequences, 64, 64)
    return cache


def test_logits_with_prefill_in_chunks(model: Whisper) -> None:
    tokens = prompt(LENGTH)
    expected = expected_logits(0, tokens)
    assert np.ptp(expected, axis=1).min() > 1.0
    for chunk in (1, 5, 16):
        cache, parts = new_cache(model), []
        for at in range(0, LENGTH, chunk):
            entries = [(0, i) for i in range(at, min(at + chunk, LENGTH))]
            parts.append(run(model, cache, entries, [tokens], multimodal=[] if at else [(0, states(0))]))
        close(np.concatenate(parts), expected)


def test_two_sequences_with_encoders_of_different_lengths(model: Whisper) -> None:
    """In one batch from the start; then each alone and both together."""
    tokens = (prompt(LENGTH, seed=1), prompt(LENGTH, seed=2))
    expected = [expected_logits(which, tokens[which]) for which in (0, 1)]
    first = [(1, 0), (0, 0), (0, 1), (1, 1), (1, 2), (0, 2)]
    batches: list[tuple[list[tuple[int, int]], list[tuple[int, Any]]]] = [
        (first, [(0, states(1)), (1, states(0))]),
        ([(0, at) for at in range(3, 20)], []),
        *(([(1, 3 + i), (0, 20 + i)], []) for i in range(5)),
        ([(1, at) for at in range(8, 40)], []),
    ]
    cache = new_cache(model, sequences=2)
    for entries, items in batches:
        got = run(model, cache, entries, tokens, multimodal=items)
        close(got, np.stack([expected[seq][at] for seq, at in entries]))


def test_a_second_sequence_joins_and_another_takes_its_place(model: Whisper) -> None:
    one, two = prompt(LENGTH, seed=3), prompt(LENGTH, seed=4)
    cache = new_cache(model, sequences=2)
    run(model, cache, [(0, at) for at in range(10)], (one, two), multimodal=[(0, states(0))])
    entries = [(0, 10), *((1, at) for at in range(4))]
    got = run(model, cache, entries, (one, two), multimodal=[(1, states(1))])
    close(got[:1], expected_logits(0, one[:11])[10:])
    close(got[1:], expected_logits(1, two[:4]))
    cache.remove(0, 0)
    got = run(model, cache, [(0, at) for at in range(6)], (two, one), multimodal=[(0, states(1))])
    close(got, expected_logits(1, two[:6]))


def test_a_prefix_shared_by_two_sequences(model: Whisper) -> None:
    one = prompt(LENGTH, seed=5)
    two = one[:12] + prompt(LENGTH, seed=6)[12:]
    cache = new_cache(model, sequences=2)
    run(model, cache, [(0, at) for at in range(12)], [one], multimodal=[(0, states(0))])
    cache.copy_prefix(0, 1, 12)
    got = run(model, cache, [(seq, at) for at in range(12, 30) for seq in (0, 1)], (one, two))
    close(got[::2], expected_logits(0, one)[12:30])
    close(got[1::2], expected_logits(0, two)[12:30])


def test_states_as_a_tensor(model: Whisper) -> None:
    tokens = prompt(10)
    with model.backend.new_context() as ctx:
        item = ctx.from_numpy(states(0))
    got = run(model, new_cache(model), [(0, at) for at in range(10)], [tokens], multimodal=[(0, item)])
    close(got, expected_logits(0, tokens))


def test_reserve(model: Whisper) -> None:
    tokens = prompt(10)
    cache = new_cache(model)
    batch = kvcache.Batch(range(10), [0] * 10, inputs=tokens, multimodal=[(0, states(0))])
    with model.backend.new_context() as ctx:
        cache.start_forward(ctx, batch, reserve=True)
        assert model.forward(ctx, batch, cache).shape == (10, 97)
    got = run(model, cache, [(0, at) for at in range(10)], [tokens], multimodal=[(0, states(0))])
    close(got, expected_logits(0, tokens))


@pytest.mark.parametrize(("dtype", "tolerance"), [(DType.F16, 0.02), (DType.BF16, 0.15)])
def test_narrow_dtypes(model: Whisper, dtype: DType, tolerance: float) -> None:
    tokens, narrow = prompt(20), load(model.backend, dtype)
    got = run(
        narrow,
        new_cache(narrow, dtype=dtype),
        [(0, at) for at in range(20)],
        [tokens],
        multimodal=[(0, states(0))],
    )
    expected = expected_logits(0, tokens)
    assert np.median(np.abs(got - expected)) < tolerance * expected.std()


def test_refusals(model: Whisper) -> None:
    tokens = prompt(3)
    with pytest.raises(kvcache.OrderError, match="sequence 0 has no encoder output"):
        run(model, new_cache(model), [(0, 0)], [tokens])
    with pytest.raises(RequestError, match=r"encoder states \(13, 47\); they must be \(frames, 48\)"):
        run(model, new_cache(model), [(0, 0)], [tokens], multimodal=[(0, states(1)[:, 1:])])
    with pytest.raises(RequestError, match="Whisper runs on a WrapperCache, not a CausalCache"):
        cache = kvcache.CausalCache()
        cache.init(model.backend, DType.F32, 1, 8, 8)
        run(model, cache, [(0, 0)], [tokens])


def test_configs() -> None:
    parse = FAMILIES["WhisperForConditionalGeneration"].parse
    raw = peer().config.to_dict()
    config = parse(raw, {"eos_token_id": [2, 3]})
    assert (config.layers, config.heads, config.head_dim, config.max_positions) == (3, 4, 12, 64)
    assert config.eos_ids == (2, 3)
    assert [type(cache).__name__ for cache in make_cache(config).caches] == ["EncoderCache", "CausalCache"]
    with pytest.raises(ModelError, match="activation_function='relu' is not supported"):
        parse(raw | {"activation_function": "relu"}, {})
