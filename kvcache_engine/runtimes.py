"""Whose code computes a model: ours, transformers' or mlx-lm's. None is imported before it is chosen."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

import ml
from kvcache_engine.checkpoints.source import read_json
from kvcache_engine.errors import ModelError
from kvcache_engine.language_model import LanguageModel
from kvcache_engine.loading import load_config

__all__ = ["Runtime", "load_foreign", "runtime_for", "sampling_defaults"]


class Runtime(StrEnum):
    """The library whose model the engine runs."""

    OWN = "own"
    TRANSFORMERS = "transformers"
    MLX_LM = "mlx-lm"

    @property
    def backend(self) -> str:
        """On what the models of another library compute, and keep K and V; "" for our own: on any."""
        return {Runtime.TRANSFORMERS: "torch", Runtime.MLX_LM: "mlx"}.get(self, "")

    @property
    def package(self) -> str:
        return self.value.replace("-", "_")

    @property
    def installed(self) -> bool:
        return self is Runtime.OWN or importlib.util.find_spec(self.package) is not None


_MODELS = {Runtime.TRANSFORMERS: "TransformersModel", Runtime.MLX_LM: "MLXModel"}
"""What ``kvcache.integrations`` offers of each."""


def runtime_for(path: Path, asked: Runtime | None = None) -> Runtime:
    """The runtime of the model at ``path``: the one that is asked for, else the first that is good for it.

    A .gguf file and what we have a model for run by our own code, weights that MLX has quantized by mlx-lm,
    and others by transformers or mlx-lm, whichever is installed (on macOS mlx-lm, where both are).

    Raises NotSupportedError for a runtime that is not installed, ModelError for a model that no runtime here
    may take.
    """
    if asked is not None:
        if not asked.installed:
            raise ml.NotSupportedError(
                f"--runtime {asked.value} needs {asked.value}: pip install 'ml-kvcache[{asked.value}]'"
            )
        return asked
    config = path / "config.json"
    if not config.is_file():  # load_config says what is wrong, if anything is
        return Runtime.OWN
    raw = read_json(config)
    if isinstance(raw, dict) and "quantization" in raw and Runtime.MLX_LM.installed:
        return Runtime.MLX_LM
    try:
        load_config(path)
        return Runtime.OWN
    except ModelError as error:
        others = [Runtime.TRANSFORMERS, Runtime.MLX_LM]
        found = [each for each in others[:: -1 if sys.platform == "darwin" else 1] if each.installed]
        if not found or not isinstance(raw, dict) or "model_type" not in raw:
            raise ModelError(
                f"{error}; most other models run with pip install 'ml-kvcache[transformers]'"
                if not found
                else str(error)
            ) from None
        return found[0]


def load_foreign(runtime: Runtime, path: Path, backend: ml.Backend, dtype: ml.DType) -> LanguageModel:
    """The model in a folder, by the library that has its code; ``backend`` is one of ``runtime.backend``.

    Raises ModelError where the library cannot load it, NotSupportedError where the engine cannot drive it.
    """
    module = importlib.import_module(f"kvcache.integrations.{runtime.package}")
    try:
        return cast("LanguageModel", getattr(module, _MODELS[runtime]).load(path, backend, dtype))
    except ml.MLError:
        raise
    except Exception as error:  # whatever a library makes of a folder
        reason = (str(error).strip() or "no reason is given").splitlines()[0]
        raise ModelError(
            f"{path}: {runtime.value} cannot load this model ({type(error).__name__}: {reason})"
        ) from error


def sampling_defaults(path: Path) -> dict[str, Any]:
    """What generation_config.json says of how to draw, by the names of ``GenerationOptions``; {}: nothing.

    A model whose ``do_sample`` is not true says nothing of it.
    """
    folder = path if path.is_dir() else path.parent
    file = folder / "generation_config.json"
    told = read_json(file) if file.is_file() else {}
    if not isinstance(told, dict) or told.get("do_sample") is not True:
        return {}
    found = {name: told.get(name) for name in ("temperature", "top_k", "top_p", "min_p")}
    return {"temperature": 1.0, **{name: value for name, value in found.items() if value is not None}}
