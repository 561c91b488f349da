"""The model families against transformers: small configs, random weights.

Every model is saved by transformers and loaded from the folder. Windows and chunks are of 8 tokens, so
that 40 tokens are past several of them.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvcache
import ml
from kvcache_engine.checkpoints.weights import open_weights
from kvcache_engine.errors import ModelError, RequestError
from kvcache_engine.generate import Generator
from kvcache_engine.loading import load_config, load_model
from kvcache_engine.models.families import FAMILIES, SUPPORTED_ARCHITECTURES, family_of, parse_config
from kvcache_engine.options import EngineOptions
from kvcache_engine.requests import GenerationOptions
from ml import DType

from ..rigs.each_backend import each_backend, runnable
from ..rigs.model_passes import TwoDevices, close, prompt, run

pytest.importorskip("transformers")

BACKENDS = runnable("numpy", "torch", "mlx")
LENGTH, WINDOW = 40, 8
BASE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
    "initializer_range": 0.1, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
    "attn_implementation": "eager", "experts_implementation": "eager",
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "truncate": False,
        "beta_fast": 32.0, "beta_slow": 1.0, "rope_theta": 10000.0}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32, "rope_theta": 10000.0}  # fmt: skip
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
          "linear_value_head_dim": 12,
          "layer_types": ["linear_attention", "full_attention", "linear_attention"]}  # fmt: skip
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 20, "qk_rope_head_dim": 8,
          "qk_nope_head_dim": 12, "head_dim": 8, "v_head_dim": 10, "n_routed_experts": 8,
          "num_experts_per_tok": 3, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
          "initializer_range": 0.2}  # fmt: skip
LOCAL = {"rope_type": "default", "rope_theta": 100.0}
FULL = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "deepseek-v2": ("DeepseekV2", "DeepseekV2", {
        **LATENT, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
        "routed_scaling_factor": 3.0, "attention_bias": True,
        "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
    }),
    "deepseek-v2 greedy, no query rank": ("DeepseekV2", "DeepseekV2", {
        **LATENT, "q_lora_rank": None, "first_k_dense_replace": 0, "tie_word_embeddings": True,
    }),
    "deepseek-v3": ("DeepseekV3", "DeepseekV3", {
        **LATENT, "n_group": 4, "topk_group": 2, "n_shared_experts": 2,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    }),
    "deepseek-v3 halves, one group": ("DeepseekV3", "DeepseekV3", {
        **LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False,
        "rope_interleave": False, "routed_scaling_factor": 1.0,
    }),
    "deepseek-v3.2": ("DeepseekV32", "DeepseekV32", {
        **LATENT, "n_group": 4, "topk_group": 2, "index_n_heads": 12, "index_head_dim": 14,
        "index_topk": WINDOW, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "pad_token_id": None,  # its embedding would be zeros, and all that it is scored alike
    }),
    "gemma3": ("Gemma3", "Gemma3Text", {
        "sliding_window": WINDOW, "query_pre_attn_scalar": 20, "final_logit_softcapping": 9.0,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"sliding_attention": LOCAL, "full_attention": FULL}, "initializer_range": 0.2,
    }),
    "glm-4.5": ("Glm4Moe", "Glm4Moe", {
        "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "n_shared_experts": 2,
        "moe_intermediate_size": 24, "first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True,
        "routed_scaling_factor": 1.5, "initializer_range": 0.2,
    }),
    "glm-4.5 air": ("Glm4Moe", "Glm4Moe", {
        "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": False,
        "first_k_dense_replace": 0, "rope_parameters": {**LLAMA3, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": True, "initializer_range": 0.2,
    }),
    "mixtral": ("Mixtral", "Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 12}),
    "qwen3-moe": ("Qwen3Moe", "Qwen3Moe", {
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1],
        "norm_topk_prob": True, "initializer_range": 0.2,
    }),
    "qwen3-moe with biases": ("Qwen3Moe", "Qwen3Moe", {
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 2,
        "attention_bias": True, "tie_word_embeddings": True, "rope_parameters": YARN,
    }),
    "qwen3-next": ("Qwen3Next", "Qwen3Next", {
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40, "mlp_only_layers": [1], **LINEAR,
    }),
    "qwen3.5": ("Qwen3_5", "Qwen3_5Text", {"attention_bias": True, "tie_word_embeddings": True, **LINEAR}),
}  # fmt: skip
LLAMAS: dict[str, tuple[str, str, dict[str, Any]]] = {
    name: (family, family, {"initializer_range": 0.2, **changes})
    for name, family, changes in (
        ("llama", "Llama", {"head_dim": None}),
        ("llama tied, no groups", "Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
        ("llama with biases", "Llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama head_dim", "Llama", {"head_dim": 32, "num_key_value_heads": 1}),
        ("llama3 scaling", "Llama", {"rope_parameters": LLAMA3}),
        ("llama yarn", "Llama", {"rope_parameters": {**YARN, "truncate": True}}),
        ("llama linear", "Llama", {"rope_parameters": {**FULL, "rope_theta": 500.0}}),
        ("mistral", "Mistral", {"sliding_window": None}),
        ("qwen2", "Qwen2", {"tie_word_embeddings": True, "head_dim": 12}),
        ("qwen3", "Qwen3", {}),
        ("qwen3 with biases", "Qwen3", {"head_dim": 20, "attention_bias": True, "tie_word_embeddings": True}),
    )
}
CASES = [(on, name) for on in BACKENDS for name in (*MODELS, *LLAMAS) if name in MODELS or on == "numpy"]
every_family = pytest.mark.parametrize(("backend", "name"), CASES, indirect=["backend"])
SAMPLE = ["deepseek-v3.2", "gemma3", "qwen3-next"]
"""One for each kind of cache and of layer."""
HYBRID = "qwen3-next", "qwen3.5"
SHIFTED = [name for name in MODELS if name not in HYBRID]
NARROW = [(DType.F16, 0.03), (DType.BF16, 0.2)]


def whole_on_numpy(names: Iterable[str], sample: Sequence[str] = SAMPLE) -> pytest.MarkDecorator:
    """Of ``names`` the sample on other backends: the test asks nothing of them that the logits do not."""
    pairs = [(on, name) for on in BACKENDS for name in names if on == "numpy" or name in sample]
    return pytest.mark.parametrize(("backend", "name"), pairs, indirect=["backend"])


@functools.cache
def peer(name: str) -> Any:
    """The model of transformers with every parameter random, biases, norms, sinks and corrections too."""
    return random_peer(*(MODELS | LLAMAS)[name])


def random_peer(model_name: str, config_name: str, changes: dict[str, Any]) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{config_name}Config")(**(BASE | changes))
    model = getattr(transformers, f"{model_name}ForCausalLM")(config).eval().requires_grad_(False)
    for path, parameter in model.named_parameters():
        if parameter.ndim == 1 or path.endswith("_bias"):
            parameter.add_(torch.randn_like(parameter) * 0.3)
    for path, buffer in model.named_buffers():
        if path.endswith("correction_bias"):
            buffer.add_(torch.randn_like(buffer) * 0.3 - 0.7)  # scores below 0, as those left out are not
    return model


def expected_logits(name: str, tokens: Sequence[int]) -> np.ndarray:
    return _logits(name, tuple(tokens))


@functools.cache
def _logits(name: str, tokens: tuple[int, ...]) -> np.ndarray:
    import torch

    return peer(name)(torch.tensor([tokens]), use_cache=False).logits[0].numpy()


def expected_tokens(name: str, tokens: Sequence[int], count: int) -> list[int]:
    """What transformers generates, with its own cache."""
    return _generated(name, tuple(tokens), count)


@functools.cache
def _generated(name: str, tokens: tuple[int, ...], count: int) -> list[int]:
    import torch

    ids = torch.tensor([tokens])
    given = {"attention_mask": torch.ones_like(ids), "do_sample": False, "use_cache": True}
    out = peer(name).generate(ids, max_new_tokens=count, **given)
    return out[0, len(tokens) :].tolist()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def folder(name: str) -> Path:
        path = tmp_path_factory.mktemp("model")
        peer(name).save_pretrained(path)
        return path

    return folder


backend = each_backend(*BACKENDS)


@pytest.fixture(scope="module")
def models(backend: ml.Backend, folders: Any) -> Any:
    """``models(name, dtype)``: each is loaded once per backend, of every tensor, as its progress tells."""

    @functools.cache
    def load(name: str, dtype: DType = DType.F32) -> Any:
        seen: list[tuple[int, int]] = []
        model = load_model(folders(name), backend, dtype, lambda *args: seen.append(args))
        total = len(open_weights(folders(name)))
        assert seen == [(i + 1, total) for i in range(total)]
        return model

    return load


@pytest.fixture(scope="module")
def on_numpy(folders: Any) -> Iterator[Any]:
    """The same for what asks nothing of a backend."""
    with ml.open_backend("numpy") as backend:
        yield functools.cache(lambda name: load_model(folders(name), backend))


def new_cache(model: Any, sequences: int = 1, dtype: DType = DType.F32, cache: Any = None) -> Any:
    cache = cache or model.make_cache()
    cache.init(model.backend, dtype, sequences, 64, 48)
    return cache


def feed(model: Any, cache: Any, tokens: list[int], start: int = 0, stop: int | None = None) -> np.ndarray:
    return run(model, cache, [(0, at) for at in range(len(tokens))[start:stop]], [tokens])


@every_family
def test_logits_with_prefill_in_chunks(models: Any, name: str) -> None:
    """Token by token past a window, in chunks smaller and larger than windows, and token by token."""
    model, tokens = models(name), prompt(LENGTH)
    expected = expected_logits(name, tokens)
    assert np.ptp(expected, axis=1).min() > 1.0  # logits that tell tokens apart
    cache, edges = new_cache(model), [*range(11), 15, 20, 36, *range(37, LENGTH + 1)]
    parts = [feed(model, cache, tokens, *both) for both in itertools.pairwise(edges)]
    close(np.concatenate(parts), expected)


@pytest.mark.parametrize(("dtype", "tolerance"), NARROW)
@whole_on_numpy([*MODELS, "llama", "qwen3"])
def test_narrow_dtypes(models: Any, name: str, dtype: DType, tolerance: float) -> None:
    """Weights, activations and cache in half precision: the logits agree coarsely."""
    model, tokens = models(name, dtype), prompt(24)
    cache = new_cache(model, dtype=dtype)
    got = np.concatenate([feed(model, cache, tokens, 0, 16), feed(model, cache, tokens, 16)])
    expected = expected_logits(name, tokens)
    assert got.dtype == np.float32
    assert np.median(np.abs(got - expected)) < tolerance * expected.std()


@pytest.mark.parametrize("name", MODELS)
class TestHybrids:
    def test_two_sequences_interleaved(self, on_numpy: Any, name: str) -> None:
        """Prefills of different lengths shuffled into one batch, then both decode, then one is fed on."""
        model, tokens = on_numpy(name), (prompt(LENGTH, seed=1), prompt(LENGTH, seed=2))
        expected = [expected_logits(name, each) for each in tokens]
        batches = [
            _merge([(0, at) for at in range(19)], [(1, at) for at in range(11)]),
            *([(1, 11 + i), (0, 19 + i)] for i in range(6)),
            [(0, at) for at in range(25, 40)],
            [(1, at) for at in range(17, 40)],
        ]
        cache = new_cache(model, sequences=2)
        for entries in batches:
            got = run(model, cache, entries, tokens)
            close(got, np.stack([expected[seq][at] for seq, at in entries]))

    def test_only_wanted_rows(self, on_numpy: Any, name: str) -> None:
        model, tokens = on_numpy(name), prompt(LENGTH)
        entries = [(0, at) for at in range(LENGTH)]
        expected = expected_logits(name, tokens)
        for outputs in ([39, 3], list(range(LENGTH))):
            close(run(model, new_cache(model), entries, [tokens], outputs=outputs), expected[outputs])
        cache = new_cache(model)
        assert run(model, cache, entries[:30], [tokens], outputs=[]).shape == (0, 97)
        close(feed(model, cache, tokens, 30), expected[30:])

    def test_reserve(self, on_numpy: Any, name: str) -> None:
        """A pass that only shows its shapes leaves nothing behind."""
        model, tokens = on_numpy(name), prompt(LENGTH)
        cache = new_cache(model)
        batch = kvcache.Batch(range(16), [0] * 16, inputs=tokens[:16])
        with model.backend.new_context() as ctx:
            cache.start_forward(ctx, batch, reserve=True)
            assert model.forward(ctx, batch, cache).shape == (16, 97)
        close(feed(model, cache, tokens), expected_logits(name, tokens))

    def test_cache_bytes_are_what_the_cache_allocates(self, on_numpy: Any, name: str) -> None:
        options = EngineOptions(max_sequences=2, capacity=64, prefill_chunk=16)
        with Generator(on_numpy(name), None, options=options) as generator:
            generator.complete([prompt(20)], GenerationOptions(max_new_tokens=2))
            cache: Any = generator.cache
            assert generator.cache_bytes == cache.nbytes


@pytest.mark.parametrize("name", SAMPLE)
class TestEveryKindOfCache:
    def test_a_prefix_shared_by_two_sequences(self, on_numpy: Any, name: str) -> None:
        model, one = on_numpy(name), prompt(LENGTH, seed=3)
        two = one[:21] + prompt(LENGTH, seed=4)[21:]
        cache = new_cache(model, sequences=2)
        run(model, cache, [(0, at) for at in range(21)], [one])
        cache.copy_prefix(0, 1, 21)
        entries = _merge([(0, at) for at in range(21, 40)], [(1, at) for at in range(21, 40)])
        got = run(model, cache, entries, (one, two))
        expected = expected_logits(name, one), expected_logits(name, two)
        close(got, np.stack([expected[seq][at] for seq, at in entries]))

    def test_a_pass_taken_back(self, on_numpy: Any, name: str) -> None:
        """As after a failure: the batch's tokens go, and are computed again."""
        model, tokens = on_numpy(name), prompt(LENGTH)
        cache = new_cache(model, cache=_remembering(model))
        feed(model, cache, tokens, 0, 24)
        feed(model, cache, prompt(LENGTH, seed=9), 24, 33)
        cache.remove(0, 24)
        start = cache.offset(0) if isinstance(cache, kvcache.RecurrentCache) else 24
        assert 16 <= start <= 24
        close(feed(model, cache, tokens, start), expected_logits(name, tokens)[start:])

    def test_the_generator(self, on_numpy: Any, name: str) -> None:
        """Requests that share prefixes, more of them than sequences, in small chunks of prefill."""
        start = prompt(20, seed=5)
        prompts = [start, [*start[:15], *prompt(12, seed=6)], prompt(9, seed=7)]
        options = EngineOptions(max_sequences=2, capacity=48, prefill_chunk=7)
        with Generator(on_numpy(name), None, options=options) as generator:
            answers = generator.complete(prompts, GenerationOptions(max_new_tokens=12))
        for tokens, answer in zip(prompts, answers, strict=True):
            likeliest = expected_logits(name, [*tokens, *answer.tokens]).argmax(1).tolist()
            assert list(answer.tokens) == likeliest[len(tokens) - 1 : -1]
            assert len(answer.tokens) == 12


def _merge(one: list[tuple[int, int]], two: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Both in their own order, shuffled into one another."""
    chosen = np.random.default_rng(0).permutation([0] * len(one) + [1] * len(two))
    left, right = iter(one), iter(two)
    return [next(right) if pick else next(left) for pick in chosen]


def _remembering(model: Any) -> Any:
    """A cache that can go back further than its window, or to checkpoints close by."""
    family = family_of(model.config)
    if isinstance(model.make_cache(), kvcache.RecurrentCache):
        return family.make_cache(model.config, model.dtype, checkpoint_interval=8)
    if "memory" not in inspect.signature(family.model.cache_of).parameters:
        return model.make_cache()
    return family.make_cache(model.config, model.dtype, memory=32)


@whole_on_numpy([*SHIFTED, "llama", "llama yarn"])
@pytest.mark.parametrize("layer", [1, 2])
def test_removal_from_the_middle_shifts_keys(backend: Any, folders: Any, name: str, layer: int) -> None:
    """One layer's keys depend on position and token alone: removing equals never having seen."""
    config = load_config(folders(name))
    family = family_of(config)
    kept = {"kinds", "rotated", "sparse"} & {field.name for field in dataclasses.fields(config)}
    single = dataclasses.replace(config, layers=1, **{key: getattr(config, key)[layer:][:1] for key in kept})
    model = family.model(backend, single, _Moved(open_weights(folders(name)), layer))
    tokens = prompt(30)
    short = tokens[:4] + tokens[9:]
    cache, fresh = (new_cache(model, cache=_remembering(model)) for _ in range(2))
    feed(model, cache, tokens, 0, 29)
    cache.remove(0, 4, 9)
    feed(model, fresh, short, 0, 24)
    close(feed(model, cache, short, 24), feed(model, fresh, short, 24))


class _Moved:
    """Weights whose layer ``layer`` is called layer 0."""

    def __init__(self, weights: Any, layer: int) -> None:
        self.weights, self.layer = weights, layer

    def _name(self, name: str) -> str:
        return name.replace("model.layers.0.", f"model.layers.{self.layer}.")

    def __getitem__(self, name: str) -> np.ndarray:
        return self.weights[self._name(name)]

    def __contains__(self, name: object) -> bool:
        return self._name(str(name)) in self.weights


@pytest.mark.parametrize("name", [*MODELS, "llama"])
def test_layers_on_several_devices(folders: Any, name: str) -> None:
    """Hidden states and what a pass shares follow the layers."""
    with TwoDevices() as backend:
        model, tokens = load_model(folders(name), backend), prompt(LENGTH)
        close(feed(model, new_cache(model), tokens), expected_logits(name, tokens))
    assert (0, 1) in backend.moves


class TestRefusals:
    def test_the_wrong_cache(self, models: Any) -> None:
        model = models("gemma3")
        cache = new_cache(model, cache=kvcache.CausalCache())
        with pytest.raises(RequestError, match="Gemma3 runs on a WrapperCache, not a CausalCache"):
            feed(model, cache, prompt(3))

    def test_batches(self, models: Any, backend: ml.Backend) -> None:
        model = models("llama")
        with backend.new_context() as ctx:
            for inputs, says in ((None, "no inputs"), ([1], "1 inputs for 2 positions")):
                batch = kvcache.Batch([0, 1], [0, 0], inputs=inputs)
                with pytest.raises(RequestError, match=says):
                    model.forward(ctx, batch, new_cache(model))
            with pytest.raises(ml.BoundsError):
                model.forward(ctx, kvcache.Batch([0], [0], inputs=[97]), new_cache(model))

    @pytest.mark.parametrize(
        ("name", "changes", "says"),
        [
            ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob=True is not supported"),
            ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc' is not supported"),
            ("deepseek-v2", {"n_group": 3}, "3 of 8 experts within 2 of 3 groups; groups must have"),
            ("deepseek-v3", {"topk_group": 1}, "at least as many experts as are chosen"),
            ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
            ("deepseek-v3", {"kv_lora_rank": 0}, "kv_lora_rank=0; it is a whole number >= 1"),
            ("deepseek-v3.2", {"layer_types": ["full_attention"] * 3}, "layer type 'full_attention'"),
            ("deepseek-v3.2", {"q_lora_rank": None}, "it needs a q_lora_rank"),
            ("deepseek-v3.2", {"index_head_dim": 6}, "heads at least as wide as the rotated part"),
            ("deepseek-v3.2", {"mlp_layer_types": ["dense"]}, "one for each layer"),
            ("deepseek-v3", {"quantization_config": {"quant_method": "fp8"}}, "quantised by 'fp8'"),
            ("gemma3", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping=5.0 is not supported"),
            ("gemma3", {"layer_types": ["full_attention"]}, "1 layer_types for 3 layers"),
            ("gemma3", {"final_logit_softcapping": 0.0}, "final_logit_softcapping=0.0; it must be above 0"),
            ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0.0; it must be above 0"),
            ("deepseek-v3", {"topk_group": 9}, "within 9 of 4 groups"),
            ("mixtral", {"num_experts_per_tok": 7}, "num_experts_per_tok=7; .* at most the 6 experts"),
            *((name, {"num_experts_per_tok": 0}, "num_experts_per_tok=0")
              for name in ("deepseek-v3", "qwen3-next", "glm-4.5")),
            ("gemma3", {"quantization_config": {"quant_method": "mxfp4"}}, "quantised by 'mxfp4'"),
            ("gemma3", {"layer_types": ["mamba"] * 3}, "layer type 'mamba' is not supported"),
            *((name, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported")
              for name in ("gemma3", "mixtral")),
            ("deepseek-v3", {"rope_parameters": {**FULL, "mscale_all_dim": 1.0}}, "mscale_all_dim with rope"),
            ("qwen3-next", {"linear_num_key_heads": 3}, "4 linear value heads for 3 key heads"),
            ("qwen3.5", {"hidden_act": "relu"}, "hidden_act='relu' is not supported"),
        ],
    )  # fmt: skip
    def test_configs(self, name: str, changes: dict[str, Any], says: str) -> None:
        raw = peer(name).config.to_dict() | {"architectures": [f"{MODELS[name][0]}ForCausalLM"]}
        parse_config(raw)
        with pytest.raises(ModelError, match=says):
            parse_config(raw | changes)


@pytest.mark.parametrize("name", MODELS)
def test_configs_by_model_type(name: str) -> None:
    raw = peer(name).config.to_dict() | {"architectures": None}
    assert parse_config(raw).architecture == f"{MODELS[name][0]}ForCausalLM"


@pytest.mark.parametrize("name", [*MODELS, *LLAMAS])
def test_what_config_json_leaves_out_is_what_transformers_takes(name: str) -> None:
    """Or it is asked for by name."""
    theirs = type(peer(name).config)
    whole = theirs(**(BASE | (MODELS | LLAMAS)[name][2])).to_dict()
    named = {"architectures": [f"{(MODELS | LLAMAS)[name][0]}ForCausalLM"]}
    for left_out in set(whole) - {"architectures", "model_type", "transformers_version"}:
        less = {key: value for key, value in whole.items() if key != left_out}
        try:
            full = theirs(**{key: value for key, value in less.items() if key != "model_type"}).to_dict()
        except Exception:  # transformers does without it no better
            continue
        ours, wanted = _parsed(less | named), _parsed(full | named)
        assert ours == wanted or ours == f"config.json: config.json has no {left_out!r}", left_out


def _parsed(raw: dict[str, Any]) -> Any:
    try:
        return parse_config(raw)
    except ModelError as error:
        return str(error)


def test_generation_config_says_where_a_text_ends_in_place_of_a_default() -> None:
    raw = peer("llama").config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    del raw["eos_token_id"]
    assert [parse_config(raw, {**each}).eos_ids for each in ({}, {"eos_token_id": 9})] == [(2,), (9,)]


def test_configs_as_they_were_before_transformers_5() -> None:
    """Rotary settings outside ``rope_parameters``, layer types as a pattern."""
    raw = peer("gemma3").config.to_dict() | {"architectures": ["Gemma3ForCausalLM"]}
    del raw["rope_parameters"], raw["layer_types"]
    raw |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 2}
    raw |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "_sliding_window_pattern": 3}
    config: Any = parse_config(raw)
    assert config.kinds == ("sliding_attention", "full_attention", "sliding_attention")
    assert (config.rope.base, config.rope.scaling.factor) == (1e6, 8.0)
    assert (config.local_rope.base, config.local_rope.scaling) == (1e4, None)


def test_token_ids_as_arrays_and_tensors(models: Any, backend: ml.Backend) -> None:
    model, tokens = models("llama"), prompt(LENGTH)
    with backend.new_context() as ctx:
        for inputs in (np.array(tokens), ctx.from_numpy(tokens, DType.I32)):
            batch, cache = kvcache.Batch(range(LENGTH), [0] * LENGTH, inputs=inputs), new_cache(model)
            cache.start_forward(ctx, batch)
            close(model.forward(ctx, batch, cache).to_numpy(), expected_logits("llama", tokens))


def test_every_family_has_a_model_here() -> None:
    tested = {f"{model}ForCausalLM" for model, _, _ in MODELS.values()}
    hybrid = {name for name, family in FAMILIES.items() if family.causal} - {*SUPPORTED_ARCHITECTURES}
    assert tested == hybrid


@pytest.mark.parametrize("name", ["gemma3", "qwen3-next"])
def test_the_command_line(name: str, make_model: Any, tmp_path: Path) -> None:
    """``kvcache generate --model DIR`` on a folder that transformers saved, with a byte tokenizer."""
    from ..command.cli_rig import run as command

    peer(name).save_pretrained(tmp_path)
    tokenizer = (make_model() / "tokenizer.json").read_text(encoding="utf-8")
    (tmp_path / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    result = command("generate", "--model", tmp_path, "--prompt", "!", "--max-tokens", 12, "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)["outputs"][0]
    assert answer["tokens"] == expected_tokens(name, [1, 3], 12)
