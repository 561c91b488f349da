"""What a model looks like: read from Hugging Face's config.json or from GGUF metadata, and checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcache.runner.errors import ModelError
from kvcache.runner.rope_config import rope_from_config
from ml.nn.rope import RopeSpec

__all__ = [
    "SUPPORTED_ARCHITECTURES",
    "ModelConfig",
    "existing_model_path",
    "load_config",
    "parse_config",
    "read_token_ids",
    "refuse_quantized",
]

# The Llama family, which ModelConfig alone describes; kvcache.runner.models.families knows the others.
SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_BY_MODEL_TYPE = {"llama": 0, "mistral": 1, "qwen2": 2, "qwen3": 3}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Llama-family model. Sizes count elements, ``max_positions`` tokens; ids are token ids.

    ``attention_bias``: q, k and v have biases; ``output_bias``: o has one; ``qk_norm``: an RMS norm per
    head on queries and keys. ``sliding_window`` and ``layer_types`` are as config.json says them.

    Raises ModelError for sizes that do not go together.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    rope: RopeSpec
    tie_embeddings: bool
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    bos_id: int | None
    eos_ids: tuple[int, ...]
    sliding_window: int | None
    layer_types: tuple[str, ...] | None

    def __post_init__(self) -> None:
        for name in _SIZES:
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1:
                raise ModelError(f"model config: {name}={size!r}; it is a whole number >= 1")
        if self.heads % self.kv_heads:
            raise ModelError(f"model config: {self.heads} heads are no multiple of {self.kv_heads} kv heads")
        for token in (*self.eos_ids, *(() if self.bos_id is None else (self.bos_id,))):
            if not 0 <= token < self.vocab_size:
                raise ModelError(f"model config: token id {token} is outside the {self.vocab_size} tokens")

    def cached_tokens(self, max_sequences: int, capacity: int, max_batch: int) -> int:
        """Tokens whose keys and values are stored, of all layers together, when the cache is full."""
        return self.layers * max_sequences * capacity

    @property
    def cached_layers(self) -> dict[int, tuple[tuple[int, int], tuple[int, int]]]:
        """(heads, dim) of keys and of values, by the layers that a cache has them of."""
        widths = (self.kv_heads, self.head_dim), (self.kv_heads, self.head_dim)
        return dict.fromkeys(range(self.layers), widths)

    def state_bytes(self, max_sequences: int, capacity: int) -> int:
        """Bytes of what a cache holds beside keys and values: recurrent states, at most."""
        return 0


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "layers",
    "heads",
    "kv_heads",
    "head_dim",
    "max_positions",
)


def load_config(path: str | Path) -> ModelConfig:
    """The config of a model folder or .gguf file. Raises ModelError with one clear line."""
    found = existing_model_path(path)
    if found.is_file():
        from kvcache.runner.checkpoints.gguf_config import config_from_gguf
        from kvcache.runner.checkpoints.gguf_file import open_gguf

        return config_from_gguf(open_gguf(found))
    raw = _read_json(found / "config.json")
    generation = found / "generation_config.json"
    return parse_config(raw, _read_json(generation) if generation.is_file() else {}, str(found))


def existing_model_path(path: str | Path) -> Path:
    """A folder, or a file whose name ends in .gguf; else ModelError."""
    found = Path(path).expanduser()
    if not found.exists():
        raise ModelError(f"{found}: no such model folder or .gguf file")
    if found.is_file() and found.suffix != ".gguf":
        raise ModelError(f"{found}: a model is a folder in the Hugging Face format, or a .gguf file")
    return found


def parse_config(
    raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None, origin: str = "config.json"
) -> ModelConfig:
    """From the contents of config.json and generation_config.json; ``origin`` names them in errors."""
    try:
        return _parse(raw, generation or {})
    except KeyError as error:
        raise ModelError(f"{origin}: config.json has no {error.args[0]!r}") from error
    except ModelError as error:
        raise ModelError(f"{origin}: {error}") from error
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise ModelError(f"{origin}: config.json cannot be understood ({error})") from error


def _parse(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    architecture = _architecture(raw)
    if architecture not in SUPPORTED_ARCHITECTURES:
        from kvcache.runner.models.families import FAMILIES

        config: ModelConfig = FAMILIES[architecture].parse(raw, generation)
        return config
    _refuse_unread(raw)
    qwen2, qwen3 = architecture == "Qwen2ForCausalLM", architecture == "Qwen3ForCausalLM"
    heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
    head_dim = raw.get("head_dim") or (128 if qwen3 else hidden // heads)
    max_positions = raw["max_position_embeddings"]
    bias = bool(raw.get("attention_bias", False)) and (architecture == "LlamaForCausalLM" or qwen3)
    bos = read_token_ids(raw.get("bos_token_id"))
    eos = read_token_ids(raw.get("eos_token_id")) + read_token_ids(generation.get("eos_token_id"))
    return ModelConfig(
        architecture=architecture,
        vocab_size=raw["vocab_size"],
        hidden_size=hidden,
        intermediate_size=raw["intermediate_size"],
        layers=raw["num_hidden_layers"],
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        max_positions=max_positions,
        rope=rope_from_config(raw, head_dim, max_positions),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=bias or qwen2,
        output_bias=bias,
        mlp_bias=bool(raw.get("mlp_bias", False)) and architecture == "LlamaForCausalLM",
        qk_norm=qwen3,
        bos_id=bos[0] if bos else None,
        eos_ids=tuple(dict.fromkeys(eos)),
        sliding_window=_window(raw, architecture, max_positions),
        layer_types=tuple(raw["layer_types"]) if raw.get("layer_types") else None,
    )


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or []
    if not names and raw.get("model_type") in _BY_MODEL_TYPE:
        return SUPPORTED_ARCHITECTURES[_BY_MODEL_TYPE[raw["model_type"]]]
    from kvcache.runner.models.families import FAMILIES

    if not names:
        names = [name for name, family in FAMILIES.items() if family.model_type == raw.get("model_type")]
    for name in names:
        if name in FAMILIES and FAMILIES[name].causal:
            return str(name)
    shown = ", ".join(map(str, names)) or f"model_type {raw.get('model_type')!r}"
    known = ", ".join(name for name, family in FAMILIES.items() if family.causal)
    raise ModelError(f"unsupported architecture {shown}; supported are {known}")


def _refuse_unread(raw: Mapping[str, Any]) -> None:
    """Settings that would change the numbers and that the runner's model does not know."""
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"hidden_act {activation!r} is not supported; only 'silu' is")
    refuse_quantized(raw)


def refuse_quantized(raw: Mapping[str, Any]) -> None:
    """ModelError for a checkpoint whose weights are quantised."""
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ModelError(
            f"weights quantised by {method!r} are not read; take the unquantised model or a GGUF"
        )


def _window(raw: Mapping[str, Any], architecture: str, max_positions: int) -> int | None:
    """None, or an error: layers of a sliding window are not run yet.

    Mistral uses its window wherever there is one (and has 4096 where config.json leaves it out); Qwen
    only with ``use_sliding_window``. A window that no position can outgrow is full attention.
    """
    if architecture == "MistralForCausalLM":
        window = raw.get("sliding_window", 4096)
    else:
        window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    windowed = [kind for kind in raw.get("layer_types") or () if kind != "full_attention"]
    if windowed or (window is not None and window < max_positions):
        shown = f"layer type {windowed[0]!r}" if windowed else f"a sliding window of {window} tokens"
        raise ModelError(f"{shown} is not supported by the runner yet; take a model with full attention")
    return None


def read_token_ids(value: Any) -> list[int]:
    """One id, a list of them or None, as config.json has them."""
    if value is None:
        return []
    return [int(token) for token in (value if isinstance(value, list | tuple) else [value])]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ModelError(f"{path.parent}: no {path.name}; is it a model folder in the Hugging Face format?")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path}: holds a {type(found).__name__}; it is a JSON object")
    return found
