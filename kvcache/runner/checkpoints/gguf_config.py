"""A ModelConfig from the metadata of a GGUF file."""

from __future__ import annotations

from typing import Any

from kvcache.runner.checkpoints.gguf_file import GGUFFile
from kvcache.runner.config import ModelConfig
from kvcache.runner.errors import ModelError
from kvcache.runner.rope_config import scaling_from_factors, yarn_from_gguf
from ml.nn.rope import RopeSpec
from ml.nn.scaling import LinearScaling, RopeScaling

__all__ = ["Metadata", "config_from_gguf"]

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_SCALING = ("factor", "original_context_length", "attn_factor", "yarn_beta_fast", "yarn_beta_slow")


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """Raises ModelError for an unsupported architecture or metadata that is missing or contradictory."""
    try:
        return _parse(file)
    except KeyError as error:
        raise ModelError(f"{file.path}: no metadata or tensor {error.args[0]!r}") from error
    except ModelError as error:
        raise ModelError(f"{file.path}: {error}") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"{file.path}: its metadata cannot be read ({error})") from error


class Metadata:
    """The keys below one architecture's name; of a list, whose values are those of layers, the one of all."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self._file = file
        self._architecture = architecture

    def __getitem__(self, key: str) -> Any:
        found = self.get(key)
        if found is None:
            raise KeyError(f"{self._architecture}.{key}")
        return found

    def get(self, key: str, default: Any = None) -> Any:
        found = self._file.get(f"{self._architecture}.{key}", default)
        if not isinstance(found, list):
            return found
        if len(set(found)) != 1:
            raise ModelError(f"{self._architecture}.{key} differs between layers, which is not supported")
        return found[0]


def _parse(file: GGUFFile) -> ModelConfig:
    name = file.get("general.architecture")
    if name not in _ARCHITECTURES:
        raise ModelError(
            f"unsupported architecture {name!r}; supported in GGUF are {', '.join(_ARCHITECTURES)}"
        )
    data = Metadata(file, name)
    _refuse_unread(data)
    heads, hidden = data["attention.head_count"], data["embedding_length"]
    head_dim = data.get("attention.key_length") or hidden // heads
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
        eos_ids=_eos(file),
    )


def _refuse_unread(data: Metadata) -> None:
    if data.get("expert_count"):
        raise ModelError("mixtures of experts are not supported; use a dense model")
    window = data.get("attention.sliding_window")
    if window and window < data["context_length"]:
        raise ModelError(
            f"a sliding window of {window} tokens is not supported by the runner yet; "
            "use a model with full attention"
        )
    value = data.get("attention.value_length")
    if value is not None and value != data.get("attention.key_length", value):
        raise ModelError(f"attention.value_length={value} differs from key_length, which is not supported")


def _eos(file: GGUFFile) -> tuple[int, ...]:
    """End of sequence, of turn and of message: any of them stops."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = (file.get(f"tokenizer.ggml.{key}") for key in keys)
    return tuple(dict.fromkeys(token for token in found if token is not None))


def _rope(file: GGUFFile, data: Metadata, head_dim: int) -> RopeSpec:
    dim = data.get("rope.dimension_count", head_dim)
    if dim != head_dim:
        raise ModelError(
            f"rope.dimension_count={dim} of head_dim {head_dim}: partial rotation is not supported"
        )
    base = float(data.get("rope.freq_base", 10000.0))
    if "rope_freqs.weight" in file.names:
        return RopeSpec(dim, base, scaling=scaling_from_factors(file.array("rope_freqs.weight"), dim, base))
    return RopeSpec(dim, base, scaling=_scaling(data))


def _scaling(data: Metadata) -> RopeScaling | None:
    kind = data.get("rope.scaling.type", "linear")
    scaling: dict[str, Any] = {key: data.get(f"rope.scaling.{key}") for key in _SCALING}
    scaling["factor"] = scaling["factor"] or data.get("rope.scale_linear")  # as older files have it
    if kind == "none" or (kind == "linear" and not scaling["factor"]):
        return None
    if not scaling["factor"]:
        raise KeyError("rope.scaling.factor")
    if kind == "linear":
        return LinearScaling(float(scaling["factor"]))
    if kind == "yarn":
        return yarn_from_gguf(scaling, data["context_length"])
    raise ModelError(f"rope scaling {kind!r} is not supported; linear and yarn are")
