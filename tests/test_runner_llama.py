"""The Llama-family model against transformers, on small configs with random weights."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvcache
import ml
from kvcache.runner.config import ModelConfig
from kvcache.runner.errors import ModelError, RequestError
from kvcache.runner.models.families import parse_config
from kvcache.runner.models.llama import Llama
from ml import DType

from . import model_passes
from .model_passes import TwoDevices, prompt, run

pytest.importorskip("transformers")

BACKENDS = [
    info.name for info in ml.available_backends() if info.available and info.name in ("numpy", "torch")
]
BASE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "attn_implementation": "eager",
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32, "rope_theta": 10000.0}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied, no groups": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama head_dim": ("Llama", {"head_dim": 32, "num_key_value_heads": 1}),
    "llama3 scaling": ("Llama", {"rope_parameters": LLAMA3}),
    "llama yarn": ("Llama", {"rope_parameters": YARN}),
    "llama linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
    ),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3 with biases, tied": (
        "Qwen3",
        {"head_dim": 20, "attention_bias": True, "tie_word_embeddings": True},
    ),
}


@functools.cache
def peer(family: str) -> Any:
    """The model of transformers with every parameter random, biases and norms too."""
    import torch
    import transformers

    name, changes = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(BASE | changes))
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def expected_logits(family: str, tokens: list[int]) -> np.ndarray:
    import torch

    logits: np.ndarray = peer(family)(torch.tensor([tokens])).logits[0].numpy()
    return logits


def config_of(family: str) -> ModelConfig:
    raw = peer(family).config.to_dict()
    return parse_config(raw | {"architectures": [type(peer(family)).__name__]})


def weights_of(family: str) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in peer(family).state_dict().items()}


def load(backend: ml.Backend, family: str, dtype: DType = DType.F32) -> Llama:
    return Llama(backend, config_of(family), weights_of(family), dtype)


def new_cache(model: Llama, sequences: int = 1, dtype: DType = DType.F32) -> kvcache.CausalCache:
    cache = kvcache.CausalCache(model.shift)
    cache.init(model.backend, dtype, sequences, 64, 64)
    return cache


def feed(
    model: Llama, cache: kvcache.Cache, tokens: Any, start: int = 0, seq: int = 0, outputs: Any = None
) -> np.ndarray:
    positions = range(start, start + len(tokens))
    batch = kvcache.Batch(positions, [seq] * len(tokens), inputs=tokens, outputs=outputs)
    with model.backend.new_context() as ctx:
        cache.start_forward(ctx, batch)
        return model.forward(ctx, batch, cache).to_numpy()


close = functools.partial(model_passes.close, tolerance=1e-4)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[ml.Backend]:
    with ml.open_backend(request.param) as opened:
        yield opened


class TestAgainstTransformers:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_logits_with_prefill_in_chunks(self, backend: ml.Backend, family: str) -> None:
        model, tokens = load(backend, family), prompt(20)
        expected = expected_logits(family, tokens)
        assert np.ptp(expected, axis=1).min() > 1.0  # logits that tell tokens apart
        for chunk in (1, 7, 20):
            cache = new_cache(model)
            parts = [feed(model, cache, tokens[at : at + chunk], at) for at in range(0, len(tokens), chunk)]
            close(np.concatenate(parts), expected)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_greedy_tokens(self, backend: ml.Backend, family: str) -> None:
        model, tokens = load(backend, family), prompt(6)
        cache = new_cache(model)
        row = feed(model, cache, tokens, outputs=[5])[0]
        for _ in range(20):
            tokens.append(int(row.argmax()))
            row = feed(model, cache, tokens[-1:], len(tokens) - 1)[0]
        judged = expected_logits(family, tokens).argmax(axis=1)
        assert tokens[6:] == judged[5:-1].tolist()

    @pytest.mark.parametrize(("dtype", "tolerance"), [(DType.F16, 0.02), (DType.BF16, 0.15)])
    def test_narrow_dtypes(self, backend: ml.Backend, dtype: DType, tolerance: float) -> None:
        """Weights, activations and cache in half precision; logits come in F32 and agree coarsely."""
        for family in ("llama", "qwen3"):
            model, tokens = load(backend, family, dtype), prompt(20)
            expected = expected_logits(family, tokens)
            got = feed(model, new_cache(model, dtype=dtype), tokens)
            assert got.dtype == np.float32
            assert np.abs(got - expected).mean() < tolerance * expected.std()


class TestBatches:
    def test_sequences_interleaved_in_one_batch(self, backend: ml.Backend) -> None:
        model, one, two = load(backend, "llama"), prompt(9, seed=1), prompt(5, seed=2)
        entries = [(0, at) for at in range(9)] + [(1, at) for at in range(5)]
        np.random.default_rng(0).shuffle(entries)
        got = run(model, new_cache(model, sequences=2), entries, (one, two))
        expected = (expected_logits("llama", one), expected_logits("llama", two))
        close(got, np.stack([expected[seq][at] for seq, at in entries]))

    @pytest.mark.parametrize("outputs", [[19], [3, 0, 19], [], list(range(20)), None])
    def test_outputs(self, backend: ml.Backend, outputs: list[int] | None) -> None:
        model, tokens = load(backend, "qwen3"), prompt(20)
        got = feed(model, new_cache(model), tokens, outputs=outputs)
        expected = expected_logits("qwen3", tokens)
        close(got, expected if outputs is None else expected[outputs])

    def test_nothing_is_lost_where_no_output_is_wanted(self, backend: ml.Backend) -> None:
        model, tokens = load(backend, "llama"), prompt(20)
        cache = new_cache(model)
        assert feed(model, cache, tokens[:19], outputs=[]).shape == (0, 97)
        close(feed(model, cache, tokens[19:], 19), expected_logits("llama", tokens)[19:])

    def test_token_ids_as_arrays_and_tensors(self, backend: ml.Backend) -> None:
        model, tokens = load(backend, "llama"), prompt(20)
        expected = expected_logits("llama", tokens)
        close(feed(model, new_cache(model), np.array(tokens)), expected)
        with backend.new_context() as ctx:
            ids = ctx.from_numpy(tokens, DType.I32)
            batch = kvcache.Batch(range(20), [0] * 20, inputs=ids)
            cache = new_cache(model)
            cache.start_forward(ctx, batch)
            close(model.forward(ctx, batch, cache).to_numpy(), expected)

    @pytest.mark.parametrize("family", ["llama", "llama yarn"])
    def test_removal_from_the_middle_shifts_keys(self, backend: ml.Backend, family: str) -> None:
        """One layer's keys depend on position and token alone: removing equals never having seen."""
        config = dataclasses.replace(config_of(family), layers=1)
        model = Llama(backend, config, weights_of(family))
        tokens = prompt(20)
        kept = tokens[:4] + tokens[9:]
        cache, fresh = new_cache(model), new_cache(model)
        feed(model, cache, tokens[:19])
        cache.remove(0, 4, 9)
        feed(model, fresh, kept[:14])
        close(feed(model, cache, tokens[19:], 14), feed(model, fresh, kept[14:], 14))

    def test_refusals(self, backend: ml.Backend) -> None:
        model = load(backend, "llama")
        with backend.new_context() as ctx:
            for inputs, says in ((None, "no inputs"), ([1], "1 inputs for 2 positions")):
                batch = kvcache.Batch([0, 1], [0, 0], inputs=inputs)
                with pytest.raises(RequestError, match=says):
                    model.forward(ctx, batch, new_cache(model))
            batch = kvcache.Batch([0], [0], inputs=[97])
            with pytest.raises(ml.BoundsError):
                model.forward(ctx, batch, new_cache(model))


class TestLoading:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_progress_counts_every_tensor(self, family: str) -> None:
        seen: list[tuple[int, int]] = []
        with ml.open_backend("numpy") as backend:
            Llama(backend, config_of(family), weights_of(family), progress=lambda *args: seen.append(args))
        total = seen[0][1]
        assert seen == [(i + 1, total) for i in range(total)]
        tied = config_of(family).tie_embeddings and "lm_head.weight" in weights_of(family)
        assert total == len(weights_of(family)) - tied

    def test_missing_and_misshapen_tensors(self) -> None:
        weights = weights_of("llama")
        name = "model.layers.1.self_attn.k_proj.weight"
        with ml.open_backend("numpy") as backend:
            with pytest.raises(
                ModelError, match=rf"{name}.* has shape \(24, 47\); the config says \(24, 48\)"
            ):
                Llama(backend, config_of("llama"), weights | {name: weights[name][:, :-1]})
            del weights[name]
            with pytest.raises(ModelError, match=f"no tensor '{name}'"):
                Llama(backend, config_of("llama"), weights)


def test_layers_on_several_devices() -> None:
    """Hidden states and rotations follow the layers."""
    with TwoDevices() as backend:
        model, tokens = load(backend, "llama"), prompt(20)
        close(feed(model, new_cache(model), tokens), expected_logits("llama", tokens))
    assert (0, 1) in backend.moves
