"""Small models of mlx-lm's own classes with seeded weights, and ways to run them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models import gemma3_text, gpt_oss, llama, llama4, qwen3_next

VOCAB = 97
WINDOW = 8
COMMON = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
SHAPE = {**COMMON, "vocab_size": VOCAB, "head_dim": 16}


def make_llama(seed: int = 3, head_dim: int = 16, tied: bool = False) -> Any:
    """Two layers of full attention; embeddings that are ``tied`` are the output projection too."""
    shape = {**SHAPE, "head_dim": head_dim}
    arguments = llama.ModelArgs(
        model_type="llama", num_hidden_layers=2, rms_norm_eps=1e-5, tie_word_embeddings=tied, **shape
    )
    return seeded(llama.Model(arguments), seed)


def make_gemma(seed: int = 3, head_dim: int = 16) -> Any:
    """Three layers: two with a sliding window of 8, one with full attention."""
    arguments = gemma3_text.ModelArgs(
        model_type="gemma3_text",
        num_hidden_layers=3,
        sliding_window=WINDOW,
        sliding_window_pattern=3,
        query_pre_attn_scalar=head_dim,
        **{**SHAPE, "head_dim": head_dim},
    )
    return seeded(gemma3_text.Model(arguments), seed)


def make_qwen(seed: int = 3, layers: int = 2, head_dim: int = 16) -> Any:
    """All layers but the last recurrent (gated delta net), every other with experts."""
    arguments = qwen3_next.ModelArgs(
        model_type="qwen3_next",
        num_hidden_layers=layers,
        full_attention_interval=layers,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=2,
        shared_expert_intermediate_size=32,
        moe_intermediate_size=32,
        mlp_only_layers=[],
        norm_topk_prob=True,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        partial_rotary_factor=0.5,
        max_position_embeddings=512,
        **{**SHAPE, "head_dim": head_dim},
    )
    return seeded(qwen3_next.Model(arguments), seed)


def make_llama4(seed: int = 3, head_dim: int = 16) -> Any:
    """Four layers: three of chunks of 8, one with full attention; no experts."""
    text = {
        **SHAPE, "head_dim": head_dim, "attention_bias": False, "attention_chunk_size": WINDOW,
        "interleave_moe_layer_step": 8, "intermediate_size_mlp": 64, "max_position_embeddings": 512,
        "model_type": "llama4_text", "num_experts_per_tok": 1, "num_hidden_layers": 4, "num_local_experts": 2,
        "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 1e4, "use_qk_norm": False,
    }  # fmt: skip
    return seeded(llama4.Model(llama4.ModelArgs(text_config=text, model_type="llama4")), seed)


def make_gpt_oss(seed: int = 3, head_dim: int = 16) -> Any:
    """Two layers with sinks: a sliding window of 8, and full attention."""
    arguments = gpt_oss.ModelArgs(
        num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW,
        **{**SHAPE, "head_dim": head_dim},
    )  # fmt: skip
    return seeded(gpt_oss.Model(arguments), seed)


MODELS: dict[str, Callable[..., Any]] = {"llama": make_llama, "gemma": make_gemma, "qwen": make_qwen}


@functools.cache
def shared(name: str) -> Any:
    """A model for all tests that leave it as it is."""
    return MODELS[name]()


def seeded(model: Any, seed: int, noise: float = 0.0) -> Any:
    """Weights from NumPy's generator, the same on every machine; ``noise`` disturbs them a little."""
    random = np.random.default_rng(seed)
    disturb = np.random.default_rng(seed + 1)
    weights = []
    for name, old in sorted(tree_flatten(model.parameters())):
        if name.endswith("A_log"):
            new = np.log(random.uniform(0.5, 4, size=old.shape))
        elif old.ndim < 2:
            new = np.array(old)
        else:
            scale = 1.0 if "embed" in name else old.shape[-1] ** -0.5
            new = random.normal(size=old.shape) * scale
            new = new + disturb.normal(size=old.shape) * scale * noise
        weights.append((name, mx.array(new.astype(np.float32))))
    model.update(tree_unflatten(weights))
    mx.eval(model.parameters())
    model.eval()
    return model


def prompt_of(length: int, seed: int = 1) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, VOCAB, length)]


def greedy(model: Any, prompt: Sequence[int], count: int, prompt_cache: Any, step: int = 7) -> list[int]:
    return [token for token, _ in steps(model, prompt, count, prompt_cache, step)]


def steps(
    model: Any, prompt: Sequence[int], count: int, prompt_cache: Any, step: int = 7
) -> list[tuple[int, mx.array]]:
    """Greedy tokens and log-probabilities of mlx-lm's own loop, the prompt in chunks of ``step``."""
    loop = generate_step(
        mx.array(list(prompt)), model, prompt_cache=prompt_cache, max_tokens=count, prefill_step_size=step
    )
    return list(loop)


def merged(caches: Sequence[Any]) -> list[Any]:
    """The rows of several prompt caches as one batch."""
    return [type(entries[0]).merge(entries) for entries in zip(*caches, strict=True)]


def say_the_same(ours: Sequence[Any], theirs: Sequence[Any], tolerance: float) -> None:
    """What ``steps`` gave: the same tokens, and log-probabilities that differ by no more."""
    assert [token for token, _ in ours] == [token for token, _ in theirs]
    assert largest([x for _, x in ours], [x for _, x in theirs]) <= tolerance


def largest(ours: Sequence[Any], theirs: Sequence[Any]) -> float:
    """The largest difference between two lists of arrays."""
    return max(float(mx.abs(x - y).max()) for x, y in zip(ours, theirs, strict=True))


def run_batch(model: Any, prompts: Any, caches: Any, count: int, **options: Any) -> dict[int, Any]:
    """uid -> (tokens, log-probabilities, the prompt cache at the end) of mlx-lm's BatchGenerator."""
    generator = BatchGenerator(model, max_tokens=count, **options)
    return finish(generator, generator.insert(prompts, caches=caches))


def finish(generator: Any, uids: Sequence[int]) -> dict[int, Any]:
    found: dict[int, Any] = {uid: ([], [], []) for uid in uids}
    while responses := generator.next_generated():
        for response in responses:
            tokens, logprobs, kept = found[response.uid]
            tokens.append(response.token)
            logprobs.append(response.logprobs)
            if response.finish_reason:
                kept.extend(response.prompt_cache)
    generator.close()
    return found
