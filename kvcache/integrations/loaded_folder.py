"""What names the weights of a model that a runtime has loaded from a folder.

Pages and saved conversations of such a model are named by its files, as the bundled engine names them, and so
shared by all runtimes, only where each of them is known to compute the same K and V from these files: a
different answer is worse than a prefix that is computed again.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml
from kvcache.stores import identity_of

__all__ = ["LoadedFolder"]

log = logging.getLogger("kvcache")

_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Types of models whose layers, shapes and rotations are the same in every runtime."""
_READ = {
    "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "rope_scaling",
    "rope_parameters", "max_position_embeddings", "attention_bias", "mlp_bias", "hidden_act",
    "sliding_window", "use_sliding_window", "max_window_layers", "layer_types",
}  # fmt: skip
"""Fields of config.json that every runtime reads alike, or that are compared below."""
_WITHOUT_EFFECT = {
    "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "transformers_version",
    "use_cache", "initializer_range", "attention_dropout", "pretraining_tp", "tie_word_embeddings",
    "_name_or_path",
}  # fmt: skip
"""Fields that K and V do not depend on."""
_NEEDED = ("rms_norm_eps", "num_key_value_heads", "max_position_embeddings")
"""Fields whose defaults differ among runtimes."""
_SCALING = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Ways of rotation that every runtime computes alike, and the numbers of each."""
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_OTHERS = ("adapter_config.json", "hf_quant_config.json")
"""Files beside the weights with which some runtimes load something else."""


class LoadedFolder:
    """A model folder as it was when a runtime loaded it; make this before, and ask for ``identity`` later."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._files = self._state()
        self.doubt: str | None = None
        """Why the model may not be what the files say, if its loader knows."""

    def identity(self, dtype: ml.DType, runtime: str, rotation: Mapping[str, Any]) -> dict[str, str] | None:
        """As ``identity_of``; None, and a line in the log, where other runtimes may compute other K and V.

        ``rotation`` is what the loaded model has of "rope_theta" and "rope_scaling" or "rope_parameters".
        """
        try:
            why = self.doubt or self._difference(runtime, rotation)
        except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
            why = f"its files cannot be compared ({error})"
        if why is None:
            found = identity_of(self.folder, dtype)
            why = self._change()
            if why is None:
                return found
        log.warning(
            "%s: stores and saved files of this model can be shared only between processes with %s: %s",
            self.folder, runtime, why,
        )  # fmt: skip
        return None

    def _state(self) -> dict[str, tuple[int, int, int]]:
        """Of the config and the weights, what changes when they are written."""
        try:
            files = [
                file
                for file in self.folder.iterdir()
                if file.name in ("config.json", *_OTHERS) or file.name.startswith("model")
            ]
            stats = {file.name: file.stat() for file in files}
        except OSError:
            return {}
        return {name: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in sorted(stats.items())}

    def _change(self) -> str | None:
        return None if self._files == self._state() else "its files have changed since it was loaded"

    def _difference(self, runtime: str, rotation: Mapping[str, Any]) -> str | None:
        """Why runtimes may compute other K and V from these files than this one; None: they do not."""
        if not self.folder.is_dir():
            return "it was not loaded from a folder"
        if change := self._change():
            return change
        for name in _OTHERS:
            if name in self._files:
                return f"{name} is not read by every runtime"
        single = (self.folder / _SINGLE).is_file()
        if not single and not (self.folder / _INDEX).is_file():
            return f"it has neither {_SINGLE} nor {_INDEX}"
        digested = {_SINGLE} if single else {*_json(self.folder / _INDEX)["weight_map"].values()}
        if digested != {file.name for file in self.folder.glob("model*.safetensors")}:
            return "it has other model*.safetensors than its index lists, of which mlx-lm reads all"
        return _difference_of(_json(self.folder / "config.json"), runtime, rotation)


def _json(file: Path) -> dict[str, Any]:
    found = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{file.name} holds a {type(found).__name__}")
    return found


def _difference_of(config: Mapping[str, Any], runtime: str, rotation: Mapping[str, Any]) -> str | None:
    fields = {name: value for name, value in config.items() if value is not None}
    kind = fields.get("model_type")
    if kind not in _TYPES:
        return (
            f"runtimes may store models of type {kind!r} differently; {', '.join(_TYPES)} are known to agree"
        )
    if unknown := sorted(set(fields) - _READ - _WITHOUT_EFFECT):
        return f"config.json has {unknown[0]}, which runtimes may read differently"
    needed = [*_NEEDED, *(["sliding_window"] if kind == "mistral" else [])]
    if missing := [name for name in needed if name not in config]:
        return f"config.json has no {missing[0]}, for which runtimes have defaults of their own"
    if fields.get("hidden_act", "silu") not in ("silu", "swish"):
        return f"hidden_act is {fields['hidden_act']!r}, which not every runtime reads"
    sliding = "sliding_window" in fields and (kind == "mistral" or fields.get("use_sliding_window"))
    if sliding or {*fields.get("layer_types", ())} - {"full_attention"}:
        return "it has sliding windows, which runtimes store differently"
    if kind != "llama" and (fields.get("attention_bias") or fields.get("mlp_bias")):
        return "it has biases that not every runtime reads"
    asked, own = _rotation(fields), _rotation(rotation)
    if isinstance(asked, str) or asked != own:
        return (
            asked if isinstance(asked, str) else f"{runtime} rotates keys by {own}; config.json says {asked}"
        )
    return None


def _rotation(fields: Mapping[str, Any]) -> dict[str, Any] | str:
    """The base and the scaling of a rotation, by name; or why they are not certain."""
    nested, scaling = fields.get("rope_parameters") or {}, fields.get("rope_scaling") or {}
    bases = {float(part["rope_theta"]) for part in (fields, nested) if part.get("rope_theta") is not None}
    if len(bases) != 1:
        return f"config.json has {'several' if bases else 'no'} rope_theta; runtimes may rotate differently"
    ways = []
    for part in filter(None, (nested, scaling)):
        kinds = {part[name] for name in ("rope_type", "type") if name in part} or {"default"}
        kind = kinds.pop()
        if kinds or kind not in _SCALING or {*part} - {"rope_theta", "rope_type", "type", *_SCALING[kind]}:
            return f"runtimes may compute rotations of type {kind!r} differently"
        ways.append({"rope_type": kind, **{name: float(part[name]) for name in _SCALING[kind]}})
    way = ways[0] if ways else {"rope_type": "default"}
    if any(other != way for other in ways):
        return "config.json has rope_scaling and other rope_parameters"
    return {"rope_theta": bases.pop(), **way}
