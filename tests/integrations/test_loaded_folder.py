"""When files name what a runtime computes from them: never where other runtimes may compute otherwise."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

import ml
from kvcache.integrations.loaded_folder import LoadedFolder
from kvcache.stores import identity_of
from kvcache_engine import bundled_model

PLAIN = {"rope_theta": 10000.0, "rope_scaling": None}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip

LINEAR = {"type": "linear", "factor": 2}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(bundled_model() / name, made / name)
    return made


def change(folder: Path, **fields: Any) -> None:
    """Other fields in config.json; ...: without that field."""
    config = {**json.loads((folder / "config.json").read_text(encoding="utf-8")), **fields}
    text = json.dumps({name: value for name, value in config.items() if value is not ...})
    (folder / "config.json").write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("fields", "rotation"),
    [
        ({}, PLAIN),
        ({}, {"rope_parameters": {"rope_type": "default", "rope_theta": 10000}}),
        ({"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 10000}}, PLAIN),
        ({"rope_scaling": LLAMA3}, {"rope_parameters": {**LLAMA3, "rope_theta": 10000.0}}),
        ({"rope_scaling": LINEAR}, {**PLAIN, "rope_scaling": LINEAR}),
        ({"model_type": "mistral", "sliding_window": None}, PLAIN),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": False}, PLAIN),
        ({"model_type": "qwen3", "layer_types": ["full_attention"] * 4}, PLAIN),
    ],
)  # fmt: skip
def test_files_name_what_every_runtime_computes(
    folder: Path, fields: dict[str, Any], rotation: dict[str, Any]
) -> None:
    change(folder, **fields)
    assert LoadedFolder(folder).identity(ml.DType.F16, "mlx-lm", rotation) == identity_of(folder, "F16")


@pytest.mark.parametrize(
    ("fields", "rotation", "reason"),
    [
        ({"model_type": "gemma2"}, PLAIN, "type 'gemma2'"),
        ({"quantization": {"bits": 4}}, PLAIN, "config.json has quantization"),
        ({"quantization_config": {"quant_method": "fp8"}}, PLAIN, "config.json has quantization_config"),
        ({"partial_rotary_factor": 0.5}, PLAIN, "config.json has partial_rotary_factor"),
        ({"hidden_act": "gelu"}, PLAIN, "hidden_act is 'gelu'"),
        ({"rms_norm_eps": ...}, PLAIN, "config.json has no rms_norm_eps"),
        ({"rope_theta": ...}, PLAIN, "config.json has no rope_theta"),
        ({"rope_theta": 5e5}, PLAIN, "mlx-lm rotates keys by {'rope_theta': 10000.0"),
        ({"rope_parameters": {"rope_theta": 5e5}}, PLAIN, "config.json has several rope_theta"),
        ({"rope_scaling": LLAMA3}, PLAIN, "mlx-lm rotates keys by"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, PLAIN, "rotations of type 'yarn'"),
        ({"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2}}, PLAIN, "rotations of type"),
        ({"model_type": "mistral"}, PLAIN, "config.json has no sliding_window"),
        ({"model_type": "mistral", "sliding_window": 64}, PLAIN, "sliding windows"),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True}, PLAIN, "sliding windows"),
        ({"layer_types": ["sliding_attention"] * 4}, PLAIN, "sliding windows"),
        ({"model_type": "qwen3", "attention_bias": True}, PLAIN, "biases"),
    ],
)
def test_files_name_nothing_that_runtimes_may_compute_otherwise(
    folder: Path, caplog: pytest.LogCaptureFixture, fields: dict[str, Any], rotation: Any, reason: str
) -> None:  # fmt: skip
    change(folder, **fields)
    refused(LoadedFolder(folder), caplog, reason, rotation)


def refused(
    loaded: LoadedFolder, caplog: pytest.LogCaptureFixture, reason: str, rotation: Any = PLAIN
) -> None:
    """Nothing names it, and one line of the log says why."""
    with caplog.at_level(logging.WARNING, "kvcache"):
        assert loaded.identity(ml.DType.F32, "mlx-lm", rotation) is None
    [record] = caplog.records
    assert "only between processes with mlx-lm" in record.getMessage()
    assert reason in record.getMessage()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("model-extra.safetensors", "of which mlx-lm reads all"),
        ("adapter_config.json", "adapter_config.json is not read by every runtime"),
        ("hf_quant_config.json", "hf_quant_config.json is not read by every runtime"),
    ],
)
def test_files_that_only_some_runtimes_read(
    folder: Path, caplog: pytest.LogCaptureFixture, name: str, reason: str
) -> None:
    (folder / name).write_bytes(b"{}")
    refused(LoadedFolder(folder), caplog, reason)


def test_files_that_changed_since_they_were_loaded(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    loaded = LoadedFolder(folder)
    change(folder, rms_norm_eps=1e-6)
    refused(loaded, caplog, "its files have changed since it was loaded")


def test_weights_that_the_files_lack(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """transformers draws them at random."""
    pytest.importorskip("transformers")
    from kvcache.integrations.transformers import TransformersModel

    change(folder, attention_bias=True)
    with ml.open_backend("torch") as backend:
        found = TransformersModel.load(folder, backend, ml.DType.F32).identity()
    assert "files" not in found
    assert "transformers has initialized weights" in caplog.text
