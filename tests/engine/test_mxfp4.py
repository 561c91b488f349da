"""Experts in MXFP4: bit for bit what transformers makes of them, and a model that runs on them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import ml
from kvcache import Batch
from kvcache_engine import load_model
from kvcache_engine.checkpoints.weights import open_weights
from kvcache_engine.errors import ModelError
from kvcache_engine.loading import load_config

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
    "sliding_window": 8,
}  # fmt: skip
PACKED = ("gate_up_proj", "down_proj")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One small random gpt-oss, as it is shipped and as transformers widens it."""
    import transformers
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**SIZES)).to(torch.bfloat16)
    config = model.config.to_dict() | {"architectures": ["GptOssForCausalLM"]}
    wide = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    packed = dict(wide)
    draw = np.random.default_rng(0)
    for name in [name for name in wide if name.endswith(PACKED)]:
        experts, rows, out = packed.pop(name).shape
        blocks = torch.from_numpy(draw.integers(0, 256, (experts, out, rows // 32, 16), np.uint8))
        scales = torch.from_numpy(draw.integers(119, 125, (experts, out, rows // 32)).astype(np.uint8))
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        wide[name] = convert_moe_packed_tensors(blocks, scales).contiguous()
    made = tmp_path_factory.mktemp("mxfp4"), tmp_path_factory.mktemp("wide")
    method = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    for folder, tensors, more in zip(made, (packed, wide), (method, {}), strict=True):
        (folder / "config.json").write_text(json.dumps(config | more), encoding="utf-8")
        safetensors.save_file(tensors, folder / "model.safetensors")
    return made


def test_what_is_read_is_what_transformers_makes_of_it(folders: tuple[Path, Path]) -> None:
    packed, wide = map(open_weights, folders)
    assert sorted(packed) == sorted(wide)
    assert len(packed) == len(wide)
    assert packed.nbytes < wide.nbytes
    for name in wide:
        assert packed.shape(name) == wide.shape(name)
        assert packed[name].dtype == wide[name].dtype
        assert np.array_equal(packed[name].view(np.uint16), wide[name].view(np.uint16)), name


def test_the_logits_are_those_of_the_widened_model(
    folders: tuple[Path, Path], numpy_backend: ml.Backend
) -> None:
    found = []
    for folder in folders:
        model = load_model(folder, numpy_backend)
        cache = model.make_cache()
        cache.init(numpy_backend, ml.DType.F32, 1, 16, 16)
        with numpy_backend.new_context() as ctx:
            batch = Batch(range(12), [0] * 12, inputs=[*range(3, 15)], outputs=[11])
            cache.start_forward(ctx, batch)
            found.append(model.forward(ctx, batch, cache).to_numpy())
    assert np.array_equal(*found)
    assert np.isfinite(found[0]).all()


def test_blocks_without_their_scales_are_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    tensors = safetensors.load_file(folders[0] / "model.safetensors")
    name = next(name for name in tensors if name.endswith("gate_up_proj_scales"))
    tensors[name] = tensors[name][..., :1].contiguous()
    (tmp_path / "config.json").write_text((folders[0] / "config.json").read_text(), encoding="utf-8")
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    assert load_config(tmp_path).hidden_size == 64
    with pytest.raises(ModelError, match=r"MXFP4 has \(experts, out, blocks, 16\)"):
        open_weights(tmp_path)
    del tensors[name]
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"no tensor .*_scales"):
        open_weights(tmp_path)
