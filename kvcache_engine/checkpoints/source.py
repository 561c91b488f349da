"""Locates checkpoints, and defines the interface of all formats: tensors by Hugging Face's names. Models
named as on the Hugging Face Hub are found in its local cache, or downloaded into it.
"""

from __future__ import annotations

import abc
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kvcache_engine.errors import ModelError

__all__ = ["WeightSource", "existing_model_path", "is_hub_name", "located", "model_on_hub"]


T = TypeVar("T")


class WeightSource(Mapping[str, np.ndarray]):
    """Tensors by Hugging Face name; each ``[]`` reads one without keeping it.

    BF16 is ``ml_dtypes.bfloat16``. Arrays alias the mapped file; writes stay in this process.
    """

    origin: Path
    """The folder or file that it was opened from."""

    @abc.abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """The shape, without reading the data. Raises ModelError if there is no such tensor."""

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""

    def _found(self, names: Mapping[str, T], name: str) -> T:
        """The value of ``names`` for a tensor's name. Raises ModelError if there is none."""
        if name not in names:
            raise ModelError(
                f"{self.origin}: no tensor {name!r}; the file is incomplete or belongs to another model"
            )
        return names[name]


def located(path: str | Path) -> Path:
    """The existing path or, if there is none, the model of this name on the Hugging Face Hub. Raises
    ModelError if the Hub does not have it.
    """
    local = Path(path).expanduser()
    return model_on_hub(str(path)) if not local.exists() and is_hub_name(str(path)) else local


def existing_model_path(path: str | Path) -> Path:
    """The folder or .gguf file that ``located`` finds. Raises ModelError for anything else."""
    place = located(path)
    if not place.exists():
        raise ModelError(f"{place}: no such model folder or .gguf file")
    if place.is_file() and place.suffix != ".gguf":
        raise ModelError(f"{place}: a model must be a folder in the Hugging Face format, or a .gguf file")
    return place


_NAME = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[\w.-]+))?(?:/(?P<file>[\w.-]+\.gguf))?")
_READ = ["*.json", "*.safetensors", "*.jinja"]
"""The files that are read in a model's folder, without subfolders."""


def is_hub_name(name: str) -> bool:
    """Whether a name has the form OWNER/NAME, OWNER/NAME@REVISION or OWNER/NAME/FILE.gguf."""
    return _NAME.fullmatch(name) is not None


def model_on_hub(name: str) -> Path:
    """The folder or .gguf file of that name in the Hugging Face cache, downloaded if necessary.
    huggingface_hub shows the progress of a download on standard error, and uses its own variables
    (``HF_HOME``, ``HF_HUB_OFFLINE``, ``HF_TOKEN``, ``HF_ENDPOINT``). Raises ModelError if there is no such
    model, or if the Hub cannot be reached.
    """
    try:
        from huggingface_hub import errors
    except ImportError as error:
        raise ModelError(
            f"{name}: no such model folder or .gguf file; to find models by their name on the Hugging Face "
            "Hub: pip install huggingface_hub"
        ) from error
    try:
        return _find(name, local=True)
    except errors.LocalEntryNotFoundError:
        pass
    try:
        return _find(name, local=False)
    except Exception as error:  # huggingface_hub's own, or those of its HTTP client
        reason = str(error).strip().split("\n", 1)[0]
        raise ModelError(
            f"{name}: no such model folder or .gguf file, nor one of that name in the Hugging Face cache; it "
            f"cannot be fetched: {type(error).__name__}: {reason}"
        ) from error


def _find(name: str, local: bool) -> Path:
    """Find it in the cache (``local``), or download it. Raises the errors of huggingface_hub."""
    from huggingface_hub import errors, hf_hub_download, snapshot_download

    match = _NAME.fullmatch(name)
    assert match is not None
    repo, revision, file = match.group("repo", "revision", "file")
    if file is not None:
        return Path(hf_hub_download(repo, file, revision=revision, local_files_only=local))
    folder = Path(
        snapshot_download(
            repo, revision=revision, local_files_only=local, allow_patterns=_READ, ignore_patterns=["*/*"]
        )
    )
    if local and not (any(folder.glob("*.safetensors")) and (folder / "config.json").exists()):
        raise errors.LocalEntryNotFoundError(f"{folder} has no weights or no config")  # a tokenizer?
    return folder


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises ModelError if it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: not valid JSON ({error})") from error
