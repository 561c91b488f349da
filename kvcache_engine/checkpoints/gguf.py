"""A GGUF file: its metadata, the ModelConfig that it describes, and its tensors under Hugging Face's names.

The rows of tensors are returned in Hugging Face's order.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kvcache_engine.checkpoints.gguf_rope import scaling_from_factors, yarn_from_gguf
from kvcache_engine.checkpoints.source import WeightSource
from kvcache_engine.config import ModelConfig
from kvcache_engine.errors import ModelError
from ml.nn import LinearScaling, RopeScaling, RopeSpec

__all__ = ["GGUFFile", "GGUFSource", "config_from_gguf", "half_split_rows", "open_gguf"]


class GGUFFile:
    """Opened and checked through the ``gguf`` package; tensor data is read on demand.

    Raises ModelError if the file is missing, truncated or not a GGUF file, or if ``gguf`` is not installed.
    """

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError as error:
            raise ModelError(
                f"{path}: reading GGUF files needs: pip install 'ml-kvcache[engine,gguf]'"
            ) from error
        try:
            self._reader = gguf.GGUFReader(path, "c")  # private pages: writes never reach the file
        except Exception as error:  # the reader checks little: bad bytes raise arbitrary errors
            raise ModelError(f"{path}: truncated or not a GGUF file ({_first_line(error)})") from error
        self.path = path
        self._gguf = gguf
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        if (count := self.get("split.count", 1)) > 1:
            raise ModelError(
                f"{path}: one of {count} parts of a split model; join them: llama-gguf-split --merge"
            )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as stored, possibly quantised."""
        return sum(int(tensor.n_bytes) for tensor in self._tensors.values())

    def has(self, key: str) -> bool:
        return key in self._reader.fields

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value: str, int, float, bool or a list of those; ``default`` if absent."""
        field = self._reader.fields.get(key)
        if field is None:
            return default
        strings = field.types[-1] == self._gguf.GGUFValueType.STRING
        if field.types[0] == self._gguf.GGUFValueType.ARRAY:
            if strings:
                return [str(bytes(field.parts[i]), "utf-8", "replace") for i in field.data]
            return [_plain(field.parts[i][0]) for i in field.data]
        return str(bytes(field.parts[-1]), "utf-8", "replace") if strings else _plain(field.parts[-1][0])

    def shape(self, name: str) -> tuple[int, ...]:
        """The row-major shape; GGML counts dimensions from the innermost."""
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def array(self, name: str) -> np.ndarray:
        """F32, F16 and BF16 unchanged; quantised blocks become F32."""
        tensor = self._tensors[name]
        kind = tensor.tensor_type.name
        array: np.ndarray = np.asarray(tensor.data)
        if kind in ("F32", "F16"):
            return array
        try:
            if kind == "BF16":
                array = array.view(ml_dtypes.bfloat16)
            else:
                array = self._gguf.dequantize(array, tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise ModelError(
                f"{self.path}: {name} is stored as {kind}, which the gguf package cannot read ({error})"
            ) from error
        return array.reshape(self.shape(name))


def open_gguf(path: Path) -> GGUFFile:
    """The file, parsed once for config, vocabulary and weights, since parsing takes seconds."""
    try:
        status = path.stat()
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from error
    return _opened(path, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=1)
def _opened(path: Path, changed: int, size: int) -> GGUFFile:
    return GGUFFile(path)


def _plain(value: Any) -> Any:
    """A Python number; a float32 as the shortest decimal that rounds to it (1e-05, not 9.99999975e-06)."""
    return float(str(value)) if isinstance(value, np.float32) else value.item()


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_SCALING = ("factor", "original_context_length", "attn_factor", "yarn_beta_fast", "yarn_beta_slow")


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """The config. Raises ModelError for an unsupported architecture, and for missing or contradictory
    metadata.
    """
    try:
        return _parse(file)
    except KeyError as error:
        raise ModelError(f"{file.path}: no metadata or tensor {error.args[0]!r}") from error
    except ModelError as error:
        raise ModelError(f"{file.path}: {error}") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"{file.path}: its metadata cannot be read ({error})") from error


class _Metadata:
    """The keys below one architecture's name; a list of one value per layer is reduced to its common
    value.
    """

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self._file = file
        self._architecture = architecture

    def __getitem__(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise KeyError(f"{self._architecture}.{key}")
        return value

    def get(self, key: str, default: Any = None) -> Any:
        value = self._file.get(f"{self._architecture}.{key}", default)
        if not isinstance(value, list):
            return value
        if len(set(value)) != 1:
            raise ModelError(f"{self._architecture}.{key} differs between layers, which is not supported")
        return value[0]


def _parse(file: GGUFFile) -> ModelConfig:
    name = file.get("general.architecture")
    if name not in _ARCHITECTURES:
        raise ModelError(
            f"unsupported architecture {name!r}; supported in GGUF are {', '.join(_ARCHITECTURES)}"
        )
    data = _Metadata(file, name)
    _refuse_unread(data)
    heads, hidden = data["attention.head_count"], data["embedding_length"]
    head_dim = data.get("attention.key_length") or hidden // heads
    # End of sequence, of turn and of message: each of them stops.
    ends = (file.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom"))
    return ModelConfig(
        architecture=_ARCHITECTURES[name],
        vocab_size=file.shape("token_embd.weight")[0],
        hidden_size=hidden,
        intermediate_size=data["feed_forward_length"],
        layers=data["block_count"],
        heads=heads,
        kv_heads=data.get("attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=float(data["attention.layer_norm_rms_epsilon"]),
        max_positions=data["context_length"],
        rope=_rope(file, data, head_dim),
        tie_embeddings="output.weight" not in file.names,
        attention_bias="blk.0.attn_q.bias" in file.names,
        output_bias="blk.0.attn_output.bias" in file.names,
        mlp_bias="blk.0.ffn_up.bias" in file.names,
        qk_norm="blk.0.attn_q_norm.weight" in file.names,
        bos_id=file.get("tokenizer.ggml.bos_token_id"),
        eos_ids=tuple(dict.fromkeys(token for token in ends if token is not None)),
    )


def _refuse_unread(data: _Metadata) -> None:
    if data.get("expert_count"):
        raise ModelError("mixtures of experts are not supported; use a dense model")
    window = data.get("attention.sliding_window")
    if window and window < data["context_length"]:
        raise ModelError(
            f"a sliding window of {window} tokens is not supported for GGUF; use a model with full attention"
        )
    value = data.get("attention.value_length")
    if value is not None and value != data.get("attention.key_length", value):
        raise ModelError(f"attention.value_length={value} differs from key_length, which is not supported")


def _rope(file: GGUFFile, data: _Metadata, head_dim: int) -> RopeSpec:
    dim = data.get("rope.dimension_count", head_dim)
    if dim != head_dim:
        raise ModelError(
            f"rope.dimension_count={dim} of head_dim {head_dim}: partial rotation is not supported"
        )
    base = float(data.get("rope.freq_base", 10000.0))
    if "rope_freqs.weight" in file.names:
        return RopeSpec(dim, base, scaling=scaling_from_factors(file.array("rope_freqs.weight"), dim, base))
    return RopeSpec(dim, base, scaling=_scaling(data))


def _scaling(data: _Metadata) -> RopeScaling | None:
    kind = data.get("rope.scaling.type", "linear")
    scaling: dict[str, Any] = {key: data.get(f"rope.scaling.{key}") for key in _SCALING}
    scaling["factor"] = scaling["factor"] or data.get("rope.scale_linear")  # the key of older files
    if kind == "none" or (kind == "linear" and not scaling["factor"]):
        return None
    if not scaling["factor"]:
        raise KeyError("rope.scaling.factor")
    if kind == "linear":
        return LinearScaling(float(scaling["factor"]))
    if kind == "yarn":
        return yarn_from_gguf(scaling, data["context_length"])
    raise ModelError(f"rope scaling {kind!r} is not supported; linear and yarn are")


_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROTATED = re.compile(r"blk\.\d+\.attn_([qk])\.(weight|bias)")


class GGUFSource(WeightSource):
    """A GGUF file's weights.

    llama.cpp stores the query and key rows of its ``llama`` architecture (Llama and Mistral) for the
    interleaved form of rotary embeddings; they are permuted back to Hugging Face's half-split order, so that
    one RopeSpec applies to both formats. Qwen's are stored half-split.
    """

    def __init__(self, file: GGUFFile) -> None:
        self._file, self.origin = file, file.path
        self._names = {hf: name for name in self._file.names if (hf := _hugging_face_name(name)) is not None}
        self._heads: dict[str, int] = {}
        if self._file.get("general.architecture") == "llama":
            data = _Metadata(self._file, "llama")
            if heads := data.get("attention.head_count", 0):
                self._heads = {"q": heads, "k": data.get("attention.head_count_kv", heads)}

    def __getitem__(self, name: str) -> np.ndarray:
        stored = self._found(self._names, name)
        array = self._file.array(stored)
        rotated = _ROTATED.fullmatch(stored)
        if rotated and self._heads:
            return half_split_rows(array, self._heads[rotated[1]])
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.shape(self._found(self._names, name))

    @property
    def nbytes(self) -> int:
        return self._file.nbytes


def _hugging_face_name(name: str) -> str | None:
    """Hugging Face's name for a GGUF tensor; None for one that the model does not read."""
    if name in _TOP:
        return _TOP[name]
    block = _BLOCK.fullmatch(name)
    if block is None or block[2] not in _LAYER:
        return None
    return f"model.layers.{block[1]}.{_LAYER[block[2]]}.{block[3]}"


def half_split_rows(array: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows (pair 0 first half, pair 0 second half, pair 1 ...) to (all first halves, all second
    halves).

    Per head of size 6, by row: 0 3 1 4 2 5 as stored -> 0 1 2 3 4 5. The inverse of ``permute`` in
    llama.cpp's convert_hf_to_gguf.py.
    """
    pairs = array.reshape(heads, -1, 2, *array.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)
