"""Every type of model with which transformers generates text, built small with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers.models.auto import configuration_auto, modeling_auto

__all__ = ["BY_ONE", "CANNOT", "LOST_BEHIND_PADDING", "SOUNDS", "build", "image", "types"]

LAYERS, WINDOW = 5, 7
"""Of decoders: an odd number, and more than some classes' defaults. Windows are shorter than prompts."""
LARGEST = 10_000_000
"""Parameters: a type that is larger has a size of its own to be made small."""

_SIZES: dict[int, str] = {
    97: "vocab_size unpadded_vocab_size vocab_size_per_layer_input src_vocab_size tgt_vocab_size",
    48: "hidden_size d_model n_embd dim word_embed_proj_dim embedding_size hidden_size_per_layer_input "
    "attention_hidden_size hidden_size_global",
    6: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
    "attention_heads num_encoder_attention_heads num_decoder_attention_heads encoder_num_attention_heads "
    "decoder_num_attention_heads cross_num_attention_heads",
    3: "num_key_value_heads kv_n_heads encoder_num_key_value_heads decoder_num_key_value_heads",
    8: "head_dim d_kv global_head_dim v_head_dim dim_head qk_nope_head_dim qk_rope_head_dim mamba_d_state "
    "state_size linear_key_head_dim linear_value_head_dim linear_head_dim rotary_dim attention_head_dim "
    "mamba_chunk_size",
    16: "qk_head_dim",
    36: "intermediate_size ffn_dim ffn_hidden_size d_ff dff dim_ff encoder_ffn_dim decoder_ffn_dim "
    "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size intermediate_size_mlp "
    "prefix_dense_intermediate_size shared_experts_intermediate_size expert_ffn_hidden_size",
    LAYERS: "num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers "
    "decoder_num_hidden_layers",
    2: "num_experts_per_tok moe_topk moe_top_k "
    "num_experts_per_token top_k_experts linear_num_key_heads",
    4: "num_local_experts num_experts n_routed_experts moe_num_experts mamba_n_heads n_mamba_heads "
    "linear_num_heads linear_num_value_heads mamba_d_conv conv_kernel linear_conv_kernel_dim conv_L_cache",
    1: "n_group topk_group num_expert_group n_groups mamba_n_groups n_shared_experts num_shared_experts "
    "moe_num_shared_experts first_k_dense_replace",
    24: "kv_lora_rank q_lora_rank",
    WINDOW: "sliding_window attention_window_size window_size sliding_window_size keep_window_size "
    "attention_chunk_size",
    128: "max_position_embeddings n_positions n_ctx max_seq_len max_source_positions max_target_positions "
    "max_encoder_position_embeddings max_decoder_position_embeddings",
}  # fmt: skip
_ENCODER = ("encoder_layers", "num_encoder_layers", "encoder_num_hidden_layers")
_SMALL = {name: size for size, names in _SIZES.items() for name in names.split()} | dict.fromkeys(_ENCODER, 2)
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "decoder_start_token_id": 1}

_BOTH = ["full_attention", "sliding_attention"]
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_INDEXED = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4,
            "indexer_compress_ratio": 2}  # fmt: skip
_CHOOSES = {"index_topk": 4, "index_head_dim": 16, "index_n_heads": 24}
"""Of indexers: they choose fewer tokens than a prompt has, with so many heads that scores are not 0 alike."""
_OWN: dict[str, dict[str, Any]] = {
    "axk2": _CHOOSES,
    "bamba": {"attn_layer_indices": [1, 4], "mamba_d_head": 24},
    "bailing_hybrid": {"layer_group_size": 2},
    "blt": {
        "encoder_hash_byte_group_vocab": 61, "encoder_hash_byte_group_size": [3], "vocab_size": 260,
        **{f"{part}_config.vocab_size": 260 for part in ("patcher", "encoder", "decoder")},
        **{f"{part}_config.num_key_value_heads": 6 for part in ("patcher", "encoder", "decoder", "global")},
    },
    "codegen": {"n_head": 4, "rotary_dim": 4},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "dbrx": {"attn_config": {"kv_n_heads": 3, "rope_theta": 10000.0, "clip_qkv": 8.0}, "ffn_config": {
        "hidden_size": 48, "ffn_hidden_size": 36, "moe_num_experts": 4, "moe_top_k": 2}},
    "deepseek_v2": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "deepseek_v32": _CHOOSES,
    "deepseek_v4": {"index_topk": 3, "index_head_dim": 16, "index_n_heads": 24, "compress_rates": {
        "compressed_sparse_attention": 2, "heavily_compressed_attention": 3}},
    "diffllama": {"num_key_value_heads": 2},
    "dots1": {"layer_types": _BOTH, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {**_CHOOSES, "head_dim": 16,
                        "swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8,
                        "swa_num_attention_heads": 6, "swa_num_key_value_heads": 6, "swa_kv_lora_rank": 24},
    "encoder-decoder": {"encoder.is_decoder": False, "decoder.add_cross_attention": True},
    "ernie4_5_moe": {"moe_k": 2},
    "fun_asr_nano": {"adaptor_config.intermediate_size": 12},
    "gemma3n_text": {"num_kv_shared_layers": 2, "intermediate_size": [36] * LAYERS, "laurel_rank": 6,
                     "activation_sparsity_pattern": [0.0] * LAYERS},
    "gemma4_text": {"num_kv_shared_layers": 2},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_d_head": 8},
    "glm_moe_dsa": _CHOOSES,
    "gpt_neo": {"attention_types": [[["global", "local"], 2], [["global"], 1]]},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "mamba_d_head": 24},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "hy_v4": _CHOOSES,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 3},
    "laguna": {"layer_types": _BOTH,
               "num_attention_heads_per_layer": [6] * LAYERS},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "led": {"attention_window": 8},
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"num_heads": 12, "chunk_size": 8},
    "mellum": {"layer_types": _BOTH},
    "mllama": {
        "text_config.cross_attention_layers": [1, 3], "text_config.vocab_size": 97, "image_token_index": 97,
        "vision_config.num_hidden_layers": 2, "vision_config.num_global_layers": 1,
        "vision_config.intermediate_layers_indices": [0, 1], "vision_config.vision_output_dim": 3 * 48,
        "vision_config.image_size": 28, "vision_config.max_num_tiles": 2,
        "vision_config.supported_aspect_ratios": [[1, 1], [1, 2]],
    },
    "moonshine": {"encoder_num_key_value_heads": 6, "decoder_num_key_value_heads": 6},
    "moonshine_streaming": {"num_key_value_heads": 6},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 3},
    "phi4_multimodal": {"vision_config.num_hidden_layers": 1, "audio_config.num_blocks": 1,
                        "audio_config.nemo_conv_channels": 16, "audio_config.ext_pw_out_channel": 48,
                        "audio_config.depthwise_separable_out_channel": 48},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "chunk_size": 8,
                   "moe_shared_expert_intermediate_size": 36},
    "prophetnet": {"num_encoder_layers": LAYERS},
    "qwen4_exp": {f"text_config.{name}": size for name, size in _INDEXED.items()},
    "qwen4_exp_text": _INDEXED,
    "reformer": {"axial_pos_shape": [8, 16], "axial_pos_embds_dim": [16, 32], "is_decoder": True,
                 "attention_head_size": 8, "num_hidden_layers": 2, "attn_layers": ["local", "local"]},
    "seamless_m4t": {"speech_encoder_layers": 1, "t2u_encoder_layers": 1, "t2u_decoder_layers": 1,
                     "speech_encoder_intermediate_size": 36, "feature_projection_input_dim": 16,
                     "speech_encoder_attention_heads": 6},
    "seamless_m4t_v2": {"speech_encoder_layers": 1, "t2u_encoder_layers": 1, "t2u_decoder_layers": 1,
                        "speech_encoder_intermediate_size": 36, "feature_projection_input_dim": 16,
                        "speech_encoder_attention_heads": 6},
    "speech-encoder-decoder": {"encoder.is_decoder": False, "decoder.add_cross_attention": True},
    "roc_bert": {"pronunciation_embed_dim": 8, "pronunciation_vocab_size": 11, "shape_embed_dim": 8,
                 "shape_vocab_size": 13},
    "xlm": {"emb_dim": 48},
    "xlstm": {"num_heads": 3},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 96, "attention_head_dim": 16, "mamba_dt_rank": 3},
    "zamba2": {"attention_hidden_size": 96, "attention_head_dim": 16},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 12},
}  # fmt: skip
CANNOT = {
    "gemma3n": "needs timm for its images; gemma3n_text is its decoder",
    "gemma4_assistant": "drafts for another model, whose keys it reads",
    "gemma4_unified_assistant": "drafts for another model, whose keys it reads",
    "dots3_note": "its towers have fixed sizes; dots3_note_text is its decoder",
    "granite_speech": "its towers have fixed sizes; granite is its decoder",
    "granite_speech_plus": "its towers have fixed sizes; granite is its decoder",
    "nemo_speechlm": "its towers have fixed sizes; nemotron_h is its decoder",
    "dia": "each token is a frame of several codebooks",
    "musicgen": "each token is a frame of several codebooks",
    "musicgen_melody": "each token is a frame of several codebooks",
    "kyutai_speech_to_text": "its towers have fixed sizes",
    "vibevoice": "its towers have fixed sizes; qwen2 is its decoder",
    "vibevoice_asr": "its towers have fixed sizes; qwen2 is its decoder",
    "voxtral_realtime": "each token comes with a piece of sound",
    "pop2piano": "its generate() takes sound and a composer",
}
"""Types that are not built, and why."""
BY_ONE = ("falcon_mamba", "jamba", "mamba", "prophetnet", "recurrent_gemma", "zamba")
"""Types whose modules forget a state where several tokens follow it: these come one by one."""
LOST_BEHIND_PADDING = ("t5gemma", "t5gemma2")
"""Types that transformers' own caches fail on, or give other tokens, where padding precedes new tokens."""
SOUNDS: dict[str, tuple[str, tuple[int, ...]]] = {
    "canary": ("input_features", (64, 80)),
    "cohere_asr": ("input_features", (64, 80)),
    "moonshine": ("input_values", (4000,)),
    "moonshine_streaming": ("input_values", (4000,)),
    "seamless_m4t with encoder": ("input_features", (24, 16)),
    "seamless_m4t_v2 with encoder": ("input_features", (24, 16)),
    "speech-encoder-decoder": ("input_values", (4000,)),
    "speech_to_text": ("input_features", (64, 80)),
    "speecht5": ("input_values", (4000,)),
    "whisper with encoder": ("input_features", (80, 256)),
}
"""What encoders of sound are given: its name, and its shape without the axis of rows."""
_KINDS = ("layer_types", "mlp_layer_types", "layers_block_type")


def types() -> dict[str, tuple[str, str]]:
    """Label -> type and name of the model's class; a type with two kinds of model has two labels."""
    found: dict[str, tuple[str, str]] = {}
    for kind, mapping in (
        ("", modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        (" with encoder", modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
        (" with encoder", modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES),
    ):
        for name, model in sorted(mapping.items()):
            made = (name, model if isinstance(model, str) else model[0])
            if made not in found.values():
                found[name + kind if name in found else name] = made
    return found | {"mllama with image": ("mllama", "MllamaForConditionalGeneration")}


def small(kind: type, own: Mapping[str, Any]) -> Any:
    """A config of a class with all sizes small, and what ``own`` says by name or ``part.name``."""
    changes: dict[str, Any] = {}
    told = kind().to_dict()
    for name, value in told.items():
        if isinstance(value, dict) and name in kind.sub_configs:
            inner = {key.split(".", 1)[1]: size for key, size in own.items() if key.startswith(f"{name}.")}
            known = value.get("model_type") in configuration_auto.CONFIG_MAPPING
            part = configuration_auto.CONFIG_MAPPING[value["model_type"]] if known else kind.sub_configs[name]
            changes[name] = small(part, inner)
        elif name in _TOKENS and not isinstance(value, list):
            changes[name] = _TOKENS[name] if value is not None or name != "decoder_start_token_id" else None
        elif name in _SMALL and isinstance(value, int) and not isinstance(value, bool):
            changes[name] = own.get("encoder", 2) if name in _ENCODER else _SMALL[name]
        elif name in _KINDS and value:
            changes[name] = [*dict.fromkeys(value)]
    if isinstance(told.get("kv_lora_rank"), int):  # latent keys are unfolded for all heads
        changes["num_key_value_heads"] = _SMALL["num_attention_heads"]
    if told.get("is_decoder") is False and not told["is_encoder_decoder"]:
        changes["is_decoder"] = True
    changes |= {key: value for key, value in own.items() if "." not in key and key != "encoder"}
    for name in _KINDS:
        if changes.get(name):
            count = changes.get("num_hidden_layers", LAYERS)
            changes[name] = [changes[name][i % len(changes[name])] for i in range(count)]
    return kind(**changes)


def image(label: str, rows: int, count: int, seed: int) -> dict[str, torch.Tensor]:
    """What else a model is given with ``count`` tokens that an image belongs to."""
    if not label.endswith(" with image"):
        return {}
    pixels = torch.randn(rows, 1, 2, 3, 28, 28, generator=torch.Generator().manual_seed(seed))
    return {
        "pixel_values": pixels,
        "aspect_ratio_ids": torch.ones(rows, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(rows, 1, 2, dtype=torch.long),
        "cross_attention_mask": torch.ones(rows, count, 1, 2, dtype=torch.long),
    }


def build(label: str, seed: int = 0) -> Any:
    """The model of a label of ``types``."""
    name, model = types()[label]
    kind, own = getattr(transformers, model), _OWN.get(name, {})
    if label == name and name + " with encoder" in types():
        own = {"encoder": LAYERS, **own}  # transformers' caches count the encoder's layers here
    config = small(configuration_auto.CONFIG_MAPPING[name], own)
    if not isinstance(config, kind.config_class):
        config = config.get_text_config(decoder=True)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in kind(config).parameters())
    if count > LARGEST:
        raise ValueError(f"{count:,} parameters")
    torch.manual_seed(seed)
    made = kind(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for path, parameter in made.named_parameters():
        if parameter.ndim > 1 and not path.endswith("A_log"):
            parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5, generator=generator)
    return made
