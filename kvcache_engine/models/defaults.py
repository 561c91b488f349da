"""The defaults for fields that config.json may omit, as in transformers' class of the model.

Sizes without a usual value are required (``vocab_size``, ``hidden_size``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["filled"]

_ALL = {
    "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "attention_bias": False, "mlp_bias": False,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_LLAMA = {"bos_token_id": 1, "eos_token_id": 2}
_QWEN = {"num_key_value_heads": 32, "use_sliding_window": False, "sliding_window": None}
_DEEPSEEK = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}  # fmt: skip
_DEEPSEEK_V3 = {
    **_DEEPSEEK, "bos_token_id": 0, "eos_token_id": 1, "moe_intermediate_size": 2048,
    "num_attention_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
    "first_k_dense_replace": 3, "rope_interleave": True, "index_topk": 2048, "index_head_dim": 128,
    "index_n_heads": 64,
}  # fmt: skip
_GEMMA = {
    "bos_token_id": 2, "eos_token_id": 1, "num_attention_heads": 8, "head_dim": 256,
    "tie_word_embeddings": True, "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0,
}  # fmt: skip
_DELTA_NET = {
    "head_dim": 256, "partial_rotary_factor": 0.25, "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "max_position_embeddings": 32768,
}  # fmt: skip
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": {**_LLAMA, "num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2ForCausalLM": _QWEN,
    "Qwen3ForCausalLM": {**_QWEN, "head_dim": 128},
    "DeepseekV2ForCausalLM": {
        **_DEEPSEEK, **_LLAMA, "moe_intermediate_size": 1407, "n_routed_experts": 64, "n_shared_experts": 2,
        "routed_scaling_factor": 1.0, "n_group": None, "topk_group": None, "topk_method": "greedy",
        "norm_topk_prob": False, "first_k_dense_replace": 0,
    },
    "DeepseekV3ForCausalLM": _DEEPSEEK_V3,
    "DeepseekV32ForCausalLM": _DEEPSEEK_V3,
    "Gemma3ForCausalLM": {
        **_GEMMA, "vocab_size": 262208, "num_key_value_heads": 4, "max_position_embeddings": 131072,
        "sliding_window": 4096, "query_pre_attn_scalar": 256, "final_logit_softcapping": None,
    },
    "Glm4MoeForCausalLM": {
        "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "partial_rotary_factor": 0.5,
        "moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "norm_topk_prob": True, "use_qk_norm": False,
    },
    "MixtralForCausalLM": {
        **_LLAMA, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "rope_theta": 1_000_000.0,
        "sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "Qwen3MoeForCausalLM": {
        "num_key_value_heads": 4, "use_sliding_window": False, "sliding_window": None,
        "num_local_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "decoder_sparse_step": 1, "norm_topk_prob": False,
    },
    "Qwen3NextForCausalLM": {
        **_DELTA_NET, "num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    },
    "Qwen3_5ForCausalLM": {**_DELTA_NET, "num_key_value_heads": 4},
    "WhisperForConditionalGeneration": {
        "tie_word_embeddings": True, "eos_token_id": 50256, "decoder_start_token_id": 50257,
    },
}  # fmt: skip


def filled(raw: Mapping[str, Any], generation: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """config.json with defaults filled in; generation_config.json may override the end-of-sequence tokens."""
    defaults = {**_ALL, **_DEFAULTS[architecture]}
    if "eos_token_id" in generation:
        del defaults["eos_token_id"]
    return {"eos_token_id": None, **defaults, **raw}
