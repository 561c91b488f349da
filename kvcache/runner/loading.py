"""From a path to a model that is ready to run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import ml
from kvcache.runner.checkpoints.weights import check_weights, open_weights, parameter_count
from kvcache.runner.config import load_config
from kvcache.runner.errors import ModelError
from kvcache.runner.generate import LanguageModel
from kvcache.runner.memory import check_memory
from kvcache.runner.models.families import family_of
from kvcache.runner.models.loader import Weights

__all__ = ["bundled_model", "load_model"]


def bundled_model() -> Path:
    """The folder of the model that ships with this package. Raises ModelError where it is not there."""
    folder = Path(__file__).parent / "tiny"
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder}: the bundled model is not there; reinstall the package, make it with "
            "python -m examples.train_tiny, or name another with --model"
        )
    return folder


def load_model(
    path: str | Path,
    backend: ml.Backend,
    dtype: ml.DType = ml.DType.F32,
    progress: Callable[[int, int], None] | None = None,
    group: ml.Group | None = None,
) -> LanguageModel:
    """Load a Hugging Face folder or .gguf file onto a backend; ``progress(done, total)`` counts tensors.

    With a ``group`` of several ranks (kvcache.runner.parallel) only this rank's part is loaded; every
    rank calls this, and then gives its model the same passes.

    Every tensor's name and shape is checked, and that the weights fit in memory, before anything is
    put on a device. Raises ModelError or CapacityError.
    """
    config = load_config(path)
    weights = open_weights(path)
    check_weights(config, weights)
    family, read = family_of(config), cast("Weights", weights)
    parts: dict[str, Any] = {}
    if group is not None and group.size > 1:
        parts["share"] = share = family.share(config, group)
        config, read = share.config(config), share.weights(weights, config.head_dim)
    check_memory(config, backend, dtype, 1, 1, parameter_count(config) * dtype.itemsize)
    model: LanguageModel = family.model(backend, config, read, dtype, progress, **parts)
    return model
