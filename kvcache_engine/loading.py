"""Loading models from a path."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import ml
from kvcache_engine.checkpoints.source import WeightSource, existing_model_path, read_json
from kvcache_engine.checkpoints.weights import open_weights
from kvcache_engine.config import ModelConfig
from kvcache_engine.errors import ModelError
from kvcache_engine.language_model import LanguageModel
from kvcache_engine.memory import check_memory
from kvcache_engine.models.families import expected_shapes, family_of, parameter_count, parse_config
from kvcache_engine.weights import Weights

__all__ = ["bundled_model", "check_weights", "load_config", "load_model"]

log = logging.getLogger("kvcache")


def bundled_model() -> Path:
    """The folder of the model that ships with this package. Raises ModelError if it is missing."""
    folder = Path(__file__).parent / "tiny"
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder}: the bundled model is not there; reinstall the package, make it with "
            "python -m examples.train_tiny, or name another with --model"
        )
    return folder


def load_config(path: str | Path) -> ModelConfig:
    """The config of a model folder or .gguf file. Raises ModelError with a message of one line."""
    place = existing_model_path(path)
    if place.is_file():
        from kvcache_engine.checkpoints.gguf import config_from_gguf, open_gguf

        return config_from_gguf(open_gguf(place))
    raw = _read_json(place / "config.json")
    generation = place / "generation_config.json"
    return parse_config(raw, _read_json(generation) if generation.is_file() else {}, str(place))


def load_model(
    path: str | Path,
    backend: ml.Backend,
    dtype: ml.DType = ml.DType.F32,
    progress: Callable[[int, int], None] | None = None,
    group: ml.Group | None = None,
    mtp: bool = False,
) -> LanguageModel:
    """Load a Hugging Face folder or .gguf file onto a backend; ``progress(done, total)`` counts tensors.

    With a ``group`` of several ranks (kvcache_engine.parallel), only this rank's part is loaded; every rank
    must call this, and then run the same passes.

    ``mtp`` also loads the layer for multi-token prediction, with which ``kvcache_engine.mtp.MTPDraft``
    drafts.

    The name and shape of every tensor, and the memory required, are checked before anything is put on a
    device. Raises ModelError or CapacityError.
    """
    config = load_config(path)
    weights = open_weights(path)
    config = _with_mtp(config, weights, mtp)
    check_weights(config, weights)
    family, read = family_of(config), cast("Weights", weights)
    parts: dict[str, Any] = {}
    if group is not None and group.size > 1:
        parts["share"] = share = family.share(config, group)
        config, read = share.config(config), share.weights(weights, config.head_dim)
    check_memory(config, backend, dtype, 1, 1, parameter_count(config) * dtype.itemsize)
    model: LanguageModel = family.model(backend, config, read, dtype, progress, **parts)
    return model


def _with_mtp(config: Any, source: WeightSource, mtp: bool) -> Any:
    """The config with that layer if requested; ModelError for a model or a checkpoint without it."""
    name = f"model.layers.{config.layers}.eh_proj.weight"
    there = hasattr(config, "with_mtp") and name in source
    if mtp and not there:
        raise ModelError(
            f"{source.origin}: no layer for multi-token prediction ({name}); DeepSeek-V3 and GLM-4.5 have one"
        )
    if there and not mtp:
        log.info("%s: the layer for multi-token prediction is not loaded; mtp=True loads it", source.origin)
    return config.with_mtp() if mtp else config


def check_weights(config: ModelConfig, source: WeightSource) -> None:
    """Refuse, before anything is put on a device, tensors that are missing or of the wrong shape."""
    expected = expected_shapes(config)
    missing = [name for name in expected if name not in source]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(
            f"{source.origin}: no tensor {missing[0]!r}{more}, which the config requires; "
            "the download is incomplete or the config belongs to another model"
        )
    for name, shape in expected.items():
        if source.shape(name) != shape:
            raise ModelError(
                f"{source.origin}: {name} has shape {source.shape(name)}; the config says {shape}"
            )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ModelError(f"{path.parent}: no {path.name}; is it a model folder in the Hugging Face format?")
    content = read_json(path)
    if not isinstance(content, dict):
        raise ModelError(f"{path}: holds a {type(content).__name__}; it must be a JSON object")
    return content
