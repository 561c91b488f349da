"""A model's tensors, read one at a time from safetensors or GGUF files, under Hugging Face's names."""

from __future__ import annotations

import abc
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvcache.runner.config import ModelConfig
from kvcache.runner.errors import ModelError

__all__ = [
    "SafetensorsSource",
    "WeightSource",
    "check_weights",
    "expected_shapes",
    "open_weights",
    "parameter_count",
]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPES = ("F32", "F16", "BF16")


class WeightSource(Mapping[str, np.ndarray]):
    """Tensors by Hugging Face name; each ``[]`` reads one and keeps nothing.

    BF16 comes as ``ml_dtypes.bfloat16``. Arrays may alias the mapped file: do not write into them.
    """

    @abc.abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Without reading the data. ModelError where there is no such tensor."""

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Bytes of all tensors as they are stored."""

    @property
    @abc.abstractmethod
    def origin(self) -> Path:
        """The folder or file that this was opened from."""

    def _missing(self, name: str) -> ModelError:
        return ModelError(f"{self.origin}: no tensor {name!r}; the file is incomplete or of another model")


class SafetensorsSource(WeightSource):
    """One ``model.safetensors``, or the shards of its index; headers are read and checked at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._where: dict[str, Any] = {}
        self._nbytes = 0
        index = folder / INDEX
        if (folder / SINGLE).is_file():
            self._add(folder / SINGLE, None)
        elif index.is_file():
            for shard, names in _shards(index).items():
                self._add(folder / shard, names)
        else:
            raise ModelError(f"{folder}: no {SINGLE} and no {INDEX}{_other_formats(folder)}")

    def _add(self, path: Path, names: list[str] | None) -> None:
        """Open one file for ``names`` (None: for all that it holds)."""
        handle = _open_safetensors(path)
        held = set(handle.keys())
        for name in sorted(held) if names is None else names:
            if name not in held:
                raise ModelError(f"{path}: no tensor {name!r}, which {INDEX} says is there")
            self._where[name] = handle
            self._nbytes += _stored_bytes(handle.get_slice(name))

    def __getitem__(self, name: str) -> np.ndarray:
        handle = self._handle(name)
        dtype = handle.get_slice(name).get_dtype()
        if dtype not in _DTYPES:
            raise ModelError(
                f"{self._folder}: {name} is {dtype}; weights are read as {', '.join(_DTYPES)}: "
                "take an unquantised copy of the model, or a GGUF file"
            )
        array: np.ndarray = handle.get_tensor(name)
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, name: object) -> bool:
        return name in self._where

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handle(name).get_slice(name).get_shape())

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def origin(self) -> Path:
        return self._folder

    def _handle(self, name: str) -> Any:
        try:
            return self._where[name]
        except KeyError:
            raise self._missing(name) from None


def open_weights(path: str | Path) -> WeightSource:
    """The weights of a model folder or a .gguf file; no tensor data is read yet.

    Raises ModelError for a missing folder or file, no weights in it, or a truncated or corrupt file.
    """
    from kvcache.runner.config import existing_model_path
    from kvcache.runner.gguf_weights import GGUFSource

    found = existing_model_path(path)
    return GGUFSource(found) if found.is_file() else SafetensorsSource(found)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The name and shape of every tensor that a model of this config reads."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    linear = {
        "self_attn.q_proj": (queries, hidden, config.attention_bias),
        "self_attn.k_proj": (keys, hidden, config.attention_bias),
        "self_attn.v_proj": (keys, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, queries, config.output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    for name, (rows, columns, bias) in linear.items():
        layer[f"{name}.weight"] = (rows, columns)
        if bias:
            layer[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        layer["self_attn.q_norm.weight"] = layer["self_attn.k_norm.weight"] = (config.head_dim,)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for i in range(config.layers):
        shapes.update({f"model.layers.{i}.{name}": shape for name, shape in layer.items()})
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def parameter_count(config: ModelConfig) -> int:
    """How many numbers a model of this config holds; a tied embedding counts once."""
    return sum(int(np.prod(shape, dtype=np.int64)) for shape in expected_shapes(config).values())


def check_weights(config: ModelConfig, source: WeightSource) -> None:
    """Refuse, before anything is put on a device, tensors that are missing or of the wrong shape."""
    expected = expected_shapes(config)
    missing = [name for name in expected if name not in source]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(
            f"{source.origin}: no tensor {missing[0]!r}{more}, which the config asks for; "
            "the download is incomplete or the config is of another model"
        )
    for name, shape in expected.items():
        if source.shape(name) != shape:
            raise ModelError(
                f"{source.origin}: {name} has shape {source.shape(name)}; the config says {shape}"
            )


def _open_safetensors(path: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ModelError("reading safetensors needs: pip install 'ml-kvcache[cli]'") from error
    if not path.is_file():
        raise ModelError(f"{path}: no such file, though {INDEX} names it; download it again")
    try:
        return safe_open(path, framework="np")
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path}: truncated or not a safetensors file ({error}); download it again"
        ) from error


def _stored_bytes(piece: Any) -> int:
    bits = {"F64": 64, "I64": 64, "F32": 32, "I32": 32, "F16": 16, "BF16": 16}.get(piece.get_dtype(), 8)
    return int(np.prod(piece.get_shape(), dtype=np.int64)) * bits // 8


def _shards(index: Path) -> dict[str, list[str]]:
    """The tensors of each shard file, from ``model.safetensors.index.json``."""
    shards: dict[str, list[str]] = {}
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        for name, shard in weight_map.items():
            if Path(shard).name != shard:
                raise ModelError(f"{index}: the shard {shard!r} is not a file name in the model's folder")
            shards.setdefault(shard, []).append(name)
    except ModelError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: no valid index with a 'weight_map' ({error})") from error
    return shards


def _other_formats(folder: Path) -> str:
    found = sorted(
        path.name for pattern in ("*.gguf", "*.bin", "*.pth", "*.npz") for path in folder.glob(pattern)
    )
    if not found:
        return "; is it a model folder in the Hugging Face format?"
    if found[0].endswith(".gguf"):
        return f"; it holds {found[0]}: name that file as the model"
    return (
        f"; it holds {found[0]}, which is not read: convert it with save_pretrained(safe_serialization=True)"
    )
