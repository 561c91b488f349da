"""Every type of model that mlx-lm has, built small: odd sizes, random weights, fixed seeds."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import zlib
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx_lm.models
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

__all__ = ["VOCABULARY", "WINDOW", "build", "types"]

VOCABULARY, WINDOW = 131, 7
"""Windows are shorter than prompts."""

_SIZES: dict[Any, str] = {
    VOCABULARY: "vocab_size num_vocab vocab_size_per_layer_input",
    WINDOW: "sliding_window window_size sliding_window_size attention_window_size loop_window_size",
    72: "hidden_size hidden_dim d_model n_embd model_dim",
    56: "intermediate_size n_inner ffn_hidden_size ff_intermediate_size intermediate_size_mlp "
    "dense_intermediate_size block_ff_dim",
    6: "num_attention_heads num_heads n_head n_heads swa_num_attention_heads num_swa_attention_heads "
    "mamba_n_heads mamba_num_heads",
    2: "num_key_value_heads num_kv_heads n_kv_heads num_attention_groups num_experts_per_tok moe_topk moe_k "
    "moe_top_k num_experts_per_token linear_num_key_heads index_n_heads mamba_n_groups n_groups "
    "layer_group_size group_norm_size",
    3: "swa_num_key_value_heads num_swa_key_value_heads n_shared_head linear_conv_kernel_dim mamba_d_conv "
    "conv_kernel conv_L_cache short_conv_kernel_size",
    4: "num_hidden_layers num_layers n_layer n_layers num_transformer_layers linear_num_value_heads "
    "qk_rope_head_dim conv1d_width",
    5: "num_experts num_local_experts n_routed_experts moe_num_experts",
    12: "head_dim swa_head_dim kv_channels hidden_size_per_head",
    10: "v_head_dim swa_v_head_dim linear_key_head_dim",
    8: "qk_nope_head_dim index_head_dim mamba_d_head mamba_head_dim rotary_dim hidden_size_per_layer_input",
    9: "state_size",
    16: "mamba_d_state ssm_state_size global_head_dim",
    20: "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size share_expert_dim "
    "expert_ffn_hidden_size moe_hidden_size kv_lora_rank",
    24: "q_lora_rank dim_model_base",
    1: "n_shared_experts num_shared_experts num_shared_expert moe_num_shared_experts first_k_dense_replace "
    "num_dense_layers moe_layer_freq n_group topk_group decoder_sparse_step moe_layer_start_index",
    512: "max_position_embeddings n_positions n_ctx block_size model_max_length",
    1e-5: "rms_norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon norm_eps norm_epsilon",
    10000.0: "rope_theta rotary_emb_base swa_rope_theta rope_local_base_freq",
    0.5: "partial_rotary_factor rotary_pct",
}  # fmt: skip
_COMMON: dict[str, Any] = {name: size for size, names in _SIZES.items() for name in names.split()}
_COMMON |= dict.fromkeys(
    ["attention_bias", "mlp_bias", "use_bias", "conv_bias", "mamba_proj_bias", "tie_word_embeddings"], False
)
_COMMON |= dict.fromkeys(["norm_topk_prob", "use_qk_norm", "use_conv_bias", "mamba_conv_bias"], True)
_COMMON |= {"mlp_only_layers": [], "rope_scaling": None, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
_COMMON |= {"linear_value_head_dim": 6, "routed_scaling_factor": 1.0, "logits_scaling": 2.0}
_COMMON |= {"attention_multiplier": 0.25, "embedding_multiplier": 2.0, "residual_multiplier": 0.7}

_S, _F = "sliding_attention", "full_attention"
_MIXED = [_S, _F, _S, _S]
_PAIRS = [_S, _F, _S, _F, _S, _F]
_YARN = {
    "rope_type": "yarn", "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    "rope_theta": 10000.0,
}  # fmt: skip
_PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
_KDA = {
    "linear_attn_config": {
        "kda_layers": [1, 2, 3],
        "num_heads": 3,
        "head_dim": 10,
        "short_conv_kernel_size": 3,
    }
}
_MROPE = {"type": "default", "mrope_section": [1, 1, 1], "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_LONGCAT = {
    "attention_method": "MLA", "zero_expert_type": "identity", "zero_expert_num": 2, "num_layers": 3,
    "mla_scale_q_lora": True, "mla_scale_kv_lora": True,
}  # fmt: skip
_MINICPM = {"scale_depth": 1.4, "scale_emb": 2.0}

_OWN: dict[str, dict[str, Any]] = {
    "afm7": {"num_kv_reuse_layers": 2},
    "afmoe": {"layer_types": _MIXED},
    "apertus": {"post_norm": False, "qk_norm": True},
    "baichuan_m1": {"sliding_window_layers": [0, 2], "conv_window": 2},
    "bailing_hybrid": {"num_key_value_heads": 6},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 56, "moe_num_experts": 5, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek_v2": {"rope_scaling": _YARN},
    "deepseek_v32": {"index_topk": 6},
    "deepseek_v41": {
        "hc_mult": 2, "o_lora_rank": 8, "o_groups": 2, "head_dim": 16, "num_hidden_layers": 6,
        "compress_ratios": (0, 1, 4, 3, 3, 3), "kv_source_layer_ids": (1, 2, 3),
        "index_source_layer_ids": (1, 2, 3, 4), "index_topk": 2, "candidate_source_layer_id": 3,
        "candidate_block_size": 2, "candidate_topk_blocks": 3,
    },
    "exaone4": {"sliding_window_pattern": "LLGL"},
    "exaone_moe": {"layer_types": _MIXED, "is_moe_layer": [False, True, True, True]},
    "falcon_h1": {"mamba_d_ssm": 48},
    "gear": {"layer_types": ["conv_mixer", _F, _S, "conv_mixer"]},
    "gemma3_text": {"sliding_window_pattern": 3, "num_hidden_layers": 6, "query_pre_attn_scalar": 12},
    "gemma4_text": {"num_hidden_layers": 6, "layer_types": _PAIRS, "num_kv_shared_layers": 2},
    "glm_moe_dsa": {"index_topk": 6, "rope_parameters": _PLAIN},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "mamba"]},
    "hunyuan": {
        "use_mixed_mlp_moe": True, "use_cla": True, "cla_share_factor": 2,
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
    },
    "jamba": {
        "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2,
        "mamba_d_state": 9, "mamba_expand": 2,
    },
    "kimi_linear": _KDA,
    "laguna": {"layer_types": _MIXED},
    "lfm2": {
        "block_dim": 72, "block_multiple_of": 16, "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False, "full_attn_idxs": [1, 3],
    },
    "lfm2_moe": {"use_expert_bias": True, "full_attn_idxs": [1, 3]},
    "llama": {"layer_types": _MIXED},
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0]},
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": {
        **_LONGCAT, "ngram_vocab_size_ratio": 3, "emb_neighbor_num": 3, "emb_split_num": 2,
    },
    "mamba": {"time_step_rank": 5, "intermediate_size": 60},
    "mamba2": {
        "time_step_limit": (0.001, 10.0), "time_step_rank": "auto", "state_size": 16, "intermediate_size": 72,
    },
    "mellum": {"layer_types": _MIXED, "rope_parameters": {_S: _PLAIN, _F: _PLAIN}},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 1, 0], "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
    },
    "minicpm": _MINICPM,
    "minicpm3": {
        **_MINICPM,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 2, "long_factor": [1.2] * 2,
                         "original_max_position_embeddings": 16},
    },
    "ministral3": {"layer_types": _MIXED, "rope_parameters": _YARN},
    "mistral4": {"rope_parameters": _YARN},
    "muse_glimmer": {"layer_types": _MIXED},
    "nanbeige": {"num_loops": 2},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 3}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"replace_with_linear": True}, "ffn": {"no_op": True}},
            {"attention": {"n_heads_in_group": 2}, "ffn": {"replace_with_linear": True}},
        ]
    },
    "nemotron_h": {"hybrid_override_pattern": ["M", "*", "-", "M"], "time_step_limit": (0.0, 100.0)},
    "olmo": {"mlp_hidden_size": 112, "embedding_size": VOCABULARY},
    "olmo_hybrid": {"linear_allow_neg_eigval": True, "layer_types": ["linear_attention"] * 3 + [_F],
                    "linear_num_key_heads": 4},
    "openelm": {
        "ffn_dim_divisor": 8, "num_query_heads": [6, 6, 4, 4], "num_kv_heads": [2, 3, 2, 1],
        "ffn_multipliers": [1.0, 1.5, 1.0, 0.5],
    },
    "phi3small": {"dense_attention_every_n_layers": 2, "gegelu_limit": 20.0, "vocab_size": 100353},
    "plamo2": {"mamba_d_state": 9, "full_attention_idx": [1]},
    "plamo3": {"sliding_window_pattern": 2, "sliding_window": None},
    "qwen3_5": {"num_experts": 0, "rope_parameters": _MROPE},
    "qwen3_5_moe": {"rope_parameters": _MROPE},
    "recurrent_gemma": {
        "num_hidden_layers": 5, "block_types": ["recurrent", "recurrent", "attention"],
        "logits_soft_cap": 30.0, "num_key_value_heads": 1,
    },
    "rwkv7": {"a_low_rank_dim": 6, "v_low_rank_dim": 5, "gate_low_rank_dim": 7, "decay_low_rank_dim": 6},
    "smollm3": {"layer_types": _MIXED},
    "spark2_5": {"layer_types": _MIXED, "rope_parameters": {_S: _PLAIN, _F: _PLAIN}},
    "stablelm": {"use_qkv_bias": True},
    "step3p5": {"layer_types": _MIXED, "moe_layers_enum": "1,2,3"},
    # With the language model in a text_config.
    "gemma3n": {
        "num_hidden_layers": 6, "num_kv_shared_layers": 2, "layer_types": _PAIRS, "laurel_rank": 8,
        "activation_sparsity_pattern": [0.95, 0.95, 0, 0, 0, 0], "final_logit_softcapping": 30.0,
        "altup_num_inputs": 2, "altup_coef_clip": 120.0, "altup_correct_scale": True, "altup_active_idx": 0,
    },
    "kimi_k3": _KDA,
    "llama4": {"attention_chunk_size": 8, "interleave_moe_layer_step": 2, "num_experts_per_tok": 1,
               "no_rope_layers": [1, 1, 1, 0]},
    "minimax_m3_vl": {
        "intermediate_size": 20, "moe_layer_freq": [0, 1, 1, 1],
        "sparse_attention_config": {
            "sparse_num_index_heads": 2, "sparse_index_dim": 8, "sparse_block_size": 4,
            "sparse_topk_blocks": 2, "sparse_local_block": 1, "sparse_attention_freq": [0, 1, 1, 0],
        },
    },
    "muse_spark": {
        "post_norm_eps": 1e-8, "rope_parameters": _PLAIN, "layer_rope_theta": [10000.0, 0, 10000.0, 10000.0],
        "layer_types": _MIXED, "final_logit_softcapping": 20.0, "output_multiplier": 0.5,
        "num_shared_experts": 0,
    },
}  # fmt: skip
_TEXT: dict[str, str | None] = {
    "gemma3": "gemma3_text", "gemma4": "gemma4_text", "kimi_k25": "deepseek_v3", "kimi_vl": "deepseek_v3",
    "lfm2-vl": "lfm2", "mistral3": "ministral3", "pixtral": "llama", "prism_hadamard_qwen35": "qwen3_5",
    "qwen2_vl": "qwen2", "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe",
    "gemma3n": None, "kimi_k3": None, "llama4": None, "minimax_m3_vl": None, "muse_spark": None,
    "qwen3_5": None, "qwen3_5_moe": None,
}  # fmt: skip
"""Types whose config has the language model's inside, and whose that is; None: their own."""
_HADAMARD = {
    "tensor_namespace": "mlx-vlm-qwen3_5", "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
    "modules": [{"path": "model.layers.1.mlp.down_proj", "embedding": False, "dtype": "float16", "block": 0}],
}  # fmt: skip
_VARIANTS: dict[str, dict[str, Any]] = {
    "llama (full attention)": {"layer_types": None},
    "mamba (falcon_mamba)": {"model_type": "falcon_mamba"},
    "deepseek_v3 (no query rank)": {"q_lora_rank": None},
}
"""Further ways of some types that touch the cache."""


def types() -> list[str]:
    """The names of all modules of mlx-lm that are models, and of variants."""
    found = [module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)]
    return sorted([*(name for name in found if name not in _PARTS), *_VARIANTS])


_PARTS = {
    "activations", "base", "bitlinear_layers", "cache", "gated_delta", "mla", "pipeline", "rope_utils", "ssm",
    "switch_layers",
}  # fmt: skip
"""Modules that models are made of."""


def build(name: str) -> Any:
    """A small model of a type with weights that are the same on every machine."""
    kind = name.partition(" ")[0]
    sys.modules.setdefault("hf_olmo", ModuleType("hf_olmo"))  # olmo asks whether it is there, and no more
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    model = module.Model(module.ModelArgs.from_dict(_config(kind) | _VARIANTS.get(name, {})))
    model.update(tree_unflatten([(path, _seeded(path, x)) for path, x in tree_flatten(model.parameters())]))
    model.eval()
    return model


def _config(kind: str) -> dict[str, Any]:
    if kind not in _TEXT:
        return {**_COMMON, "model_type": kind, **_OWN.get(kind, {})}
    text = _TEXT[kind] or kind
    inner = {**_COMMON, "model_type": text, **_OWN.get(text, {})}
    if kind == "prism_hadamard_qwen35":
        return {"model_type": kind, "text_config": {**inner, "intermediate_size": 128}, **_HADAMARD}
    return {"model_type": kind, "vocab_size": VOCABULARY, "text_config": inner}


def _seeded(path: str, old: mx.array) -> mx.array:
    random = np.random.default_rng(zlib.crc32(path.encode()))
    if not mx.issubdtype(old.dtype, mx.floating):
        return mx.array(random.integers(0, 256, old.shape)).astype(old.dtype)
    if path.endswith("A_log"):
        new = np.log(random.uniform(0.5, 4, old.shape))
    elif old.ndim < 2:
        new = np.array(old.astype(mx.float32)) + 0.1 * random.normal(size=old.shape)
    else:
        new = random.normal(size=old.shape) * (1.0 if "embed" in path else old.shape[-1] ** -0.5)
    return mx.array(new.astype(np.float32)).astype(old.dtype)
