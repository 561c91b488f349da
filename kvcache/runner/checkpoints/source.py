"""What a checkpoint offers in whatever format: its tensors by Hugging Face's names."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from kvcache.runner.checkpoints.hub import is_hub_name, model_on_hub
from kvcache.runner.errors import ModelError

__all__ = ["WeightSource", "existing_model_path", "located"]


class WeightSource(Mapping[str, np.ndarray]):
    """Tensors by Hugging Face name; each ``[]`` reads one and keeps nothing.

    BF16 comes as ``ml_dtypes.bfloat16``. Arrays alias the mapped file; a write stays in this process.
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
        return ModelError(
            f"{self.origin}: no tensor {name!r}; the file is incomplete or belongs to another model"
        )


def located(path: str | Path) -> Path:
    """What lies there or, where nothing does, the model of this name on the Hugging Face Hub.

    Raises ModelError where the Hub was asked in vain.
    """
    found = Path(path).expanduser()
    return model_on_hub(str(path)) if not found.exists() and is_hub_name(str(path)) else found


def existing_model_path(path: str | Path) -> Path:
    """A folder, or a file whose name ends in .gguf, as ``located`` finds it; else ModelError."""
    found = located(path)
    if not found.exists():
        raise ModelError(f"{found}: no such model folder or .gguf file")
    if found.is_file() and found.suffix != ".gguf":
        raise ModelError(f"{found}: a model must be a folder in the Hugging Face format, or a .gguf file")
    return found
