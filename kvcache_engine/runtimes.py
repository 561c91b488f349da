"""Which library runs a model: this package, transformers or mlx-lm. Each is imported only if chosen."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

import ml
from kvcache_engine.checkpoints.source import read_json
from kvcache_engine.errors import ModelError
from kvcache_engine.language_model import LanguageModel
from kvcache_engine.loading import load_config

__all__ = ["Runtime", "load_foreign", "runtime_for", "runtime_of", "sampling_defaults"]


class Runtime(StrEnum):
    """The library whose model the engine runs."""

    OWN = "own"
    TRANSFORMERS = "transformers"
    MLX_LM = "mlx-lm"

    @property
    def backend(self) -> str:
        """The backend that the library's models run on and store K and V with; "" for our own models: any."""
        return {Runtime.TRANSFORMERS: "torch", Runtime.MLX_LM: "mlx"}.get(self, "")

    @property
    def package(self) -> str:
        return self.value.replace("-", "_")

    @property
    def installed(self) -> bool:
        return self is Runtime.OWN or importlib.util.find_spec(self.package) is not None


_MODELS = {Runtime.TRANSFORMERS: "TransformersModel", Runtime.MLX_LM: "MLXModel"}
"""The class in ``kvcache.integrations`` for each library."""


def runtime_for(path: Path, asked: Runtime | None = None) -> Runtime:
    """The runtime for the model at ``path``: the requested one, else the first that is suitable.

    .gguf files and supported architectures run with our own code, weights quantized by MLX with mlx-lm, and
    others with transformers or mlx-lm, whichever is installed (with mlx-lm on macOS if both are).

    Raises NotSupportedError for a runtime that is not installed, ModelError for a model that no installed
    runtime can run.
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


def runtime_of(identity: Mapping[str, Any]) -> Runtime:
    """The runtime that has a model of this identity; OWN also where the others have it, too."""
    return next((runtime for runtime in _MODELS if runtime.package in identity), Runtime.OWN)


def load_foreign(runtime: Runtime, path: Path, backend: ml.Backend, dtype: ml.DType) -> LanguageModel:
    """Load the model in a folder with its library; ``backend`` must be of the kind ``runtime.backend``.

    Raises ModelError if the library cannot load it, NotSupportedError if the engine cannot run it.
    """
    module = importlib.import_module(f"kvcache.integrations.{runtime.package}")
    try:
        return cast("LanguageModel", getattr(module, _MODELS[runtime]).load(path, backend, dtype))
    except ml.MLError:
        raise
    except Exception as error:  # libraries raise anything for an unsuitable folder
        reason = (str(error).strip() or "no reason is given").splitlines()[0]
        raise ModelError(
            f"{path}: {runtime.value} cannot load this model ({type(error).__name__}: {reason})"
        ) from error


def sampling_defaults(path: Path) -> dict[str, Any]:
    """The sampling settings in generation_config.json, under the names of ``GenerationOptions``; {} if there
    are none.

    The settings of a model whose ``do_sample`` is not true are ignored.
    """
    folder = path if path.is_dir() else path.parent
    file = folder / "generation_config.json"
    told = read_json(file) if file.is_file() else {}
    if not isinstance(told, dict) or told.get("do_sample") is not True:
        return {}
    found = {name: told.get(name) for name in ("temperature", "top_k", "top_p", "min_p")}
    return {"temperature": 1.0, **{name: value for name, value in found.items() if value is not None}}
