"""ModelConfig from config.json, in its old and new forms, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ml
from kvcache_engine.config import ModelConfig
from kvcache_engine.errors import ModelError, RunnerError
from kvcache_engine.loading import load_config
from kvcache_engine.models.families import parse_config
from ml.nn import LinearScaling, Llama3Scaling, RopeSpec, YarnScaling

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-05,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_every_field_of_a_plain_llama() -> None:
    assert parse_config(LLAMA) == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=172,
        layers=5,
        heads=8,
        kv_heads=4,
        head_dim=8,
        rms_norm_eps=1e-05,
        max_positions=512,
        rope=RopeSpec(8, 10000.0),
        tie_embeddings=False,
        attention_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        bos_id=1,
        eos_ids=(2,),
    )


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({"rope_theta": 5e5}, RopeSpec(8, 5e5)),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, RopeSpec(8, 5e5)),
        ({"rope_scaling": None}, RopeSpec(8)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeSpec(8, scaling=LinearScaling(2.0))),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "rope_theta": 5e5},
            RopeSpec(8, 5e5, scaling=Llama3Scaling(8.0, 1.0, 4.0, 64)),
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
            RopeSpec(8, 5e5, scaling=Llama3Scaling(8.0, 1.0, 4.0, 64)),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
            RopeSpec(8, scaling=YarnScaling(4.0, 128)),
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "original_max_position_embeddings": 32},
            RopeSpec(8, scaling=Llama3Scaling(8.0, 1.0, 4.0, 32)),
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "llama3", **LLAMA3}},
             "original_max_position_embeddings": 32},
            RopeSpec(8, scaling=Llama3Scaling(8.0, 1.0, 4.0, 64)),
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "mscale": 1.0,
                                 "mscale_all_dim": 0.5, "attention_factor": 1.5, "truncate": False}},
            RopeSpec(8, scaling=YarnScaling(4.0, 512, 16.0, 1.0, 1.5, 1.0, 0.5, False)),
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 7.0}}}, RopeSpec(8, 7.0)),
    ],
)  # fmt: skip
def test_rope_in_the_old_and_the_new_form(changes: dict[str, Any], rope: RopeSpec) -> None:
    assert parse_config({**LLAMA, **changes}).rope == rope


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"head_dim": 32}, {"head_dim": 32}),
        ({"head_dim": None}, {"head_dim": 8}),
        ({"num_key_value_heads": None}, {"kv_heads": 8}),
        ({"attention_bias": True}, {"attention_bias": True, "output_bias": True}),
        ({"mlp_bias": True}, {"mlp_bias": True}),
        ({"tie_word_embeddings": True}, {"tie_embeddings": True}),
        ({"eos_token_id": [2, 5]}, {"eos_ids": (2, 5)}),
        ({"eos_token_id": None, "bos_token_id": None}, {"eos_ids": (), "bos_id": None}),
        ({"architectures": None, "model_type": "mistral", "sliding_window": None},
         {"architecture": "MistralForCausalLM"}),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 512}, {}),
        ({"sliding_window": 4, "use_sliding_window": True}, {}),  # which Llama does not look at
        ({"architectures": ["Qwen2ForCausalLM"]},
         {"attention_bias": True, "output_bias": False, "qk_norm": False}),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 4, "use_sliding_window": False}, {}),
        ({"architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention"] * 5},
         {"qk_norm": True, "attention_bias": False, "head_dim": 128}),
        ({"architectures": ["Qwen3ForCausalLM"], "attention_bias": True},
         {"attention_bias": True, "output_bias": True}),
    ],
)  # fmt: skip
def test_what_the_families_say(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    config = parse_config({**LLAMA, **changes})
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel; supported are Llama"),
        ({"architectures": None, "model_type": "mamba"}, "unsupported architecture model_type 'mamba'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised by 'gptq' are not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor=0.25"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "no 'factor'"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "'linear' with factor=0.0; it must be above 0"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}}, "mscale_all_dim with"),
        ({"num_key_value_heads": 3}, "8 heads are not a multiple of 3"),
        ({"head_dim": 7}, "dim=7; it must be even"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"hidden_size": "64"}, "cannot be read"),
        ({"num_attention_heads": 0}, "cannot be read"),
        ({"eos_token_id": 512}, "token id 512 is outside the 512 tokens"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 128}, "sliding window of 128"),
        ({"architectures": ["MistralForCausalLM"], "max_position_embeddings": 9999}, "window of 4096"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 128, "use_sliding_window": False},
         "sliding window of 128"),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 4, "use_sliding_window": True},
         "sliding window of 4"),
        ({"architectures": ["Qwen3ForCausalLM"], "layer_types": ["sliding_attention"]}, "'sliding_att"),
    ],
)  # fmt: skip
def test_refusals_are_one_clear_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse_config({**LLAMA, **changes}, origin="here")
    assert message in str(caught.value)
    assert str(caught.value).startswith("here: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"]
)
def test_a_missing_size_is_named(name: str) -> None:
    raw = {key: value for key, value in LLAMA.items() if key != name}
    with pytest.raises(ModelError, match=f"config.json has no '{name}'"):
        parse_config(raw)


def test_the_errors_are_ml_errors_and_value_errors() -> None:
    assert issubclass(ModelError, RunnerError)
    assert issubclass(RunnerError, ml.MLError)
    assert issubclass(RunnerError, ValueError)


def test_generation_config_adds_stop_tokens(make_model: Callable[..., Path]) -> None:
    folder = make_model()
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 2, 6]}', encoding="utf-8")
    assert load_config(folder).eos_ids == (2, 5, 6)


def test_folders_and_files_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such model folder"):
        load_config(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{not json", encoding="utf-8")
    with pytest.raises(ModelError, match="not valid JSON"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(ModelError, match="it must be a JSON object"):
        load_config(tmp_path)
    with pytest.raises(ModelError, match=r"or a \.gguf file"):
        load_config(tmp_path / "config.json")
