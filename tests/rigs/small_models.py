"""Configs of small models with random weights, one for each kind of cache, for ``make_model(**config)``."""

from __future__ import annotations

from typing import Any

DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
SLIDING: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_hidden_layers": 3,
    "head_dim": 32, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 32,
    "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {"sliding_attention": {**DEFAULT, "rope_theta": 100.0}, "full_attention": DEFAULT},
}  # fmt: skip
RECURRENT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_hidden_layers": 3,
    "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24, "mlp_only_layers": [1], "decoder_sparse_step": 1,
    "norm_topk_prob": True, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5},
}  # fmt: skip
FULL: dict[str, Any] = {"head_dim": 32}
KINDS = {"full": FULL, "sliding": SLIDING, "recurrent": RECURRENT}
