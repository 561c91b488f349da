"""A model's tensors, read one at a time from safetensors or GGUF files, under Hugging Face's names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kvcache_engine.checkpoints.source import WeightSource, existing_model_path
from kvcache_engine.errors import ModelError

__all__ = ["SafetensorsSource", "open_weights"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


class _File:
    """One mapped safetensors file; its header is checked by the ``safetensors`` package. (Not all versions of
    that package's NumPy reader support BF16.)
    """

    def __init__(self, path: Path) -> None:
        _check_safetensors(path)
        self._data = np.memmap(path, np.uint8, mode="c")  # private pages: writes never reach the file
        size = int.from_bytes(self._data[:8].tobytes(), "little")
        header = json.loads(self._data[8 : 8 + size].tobytes())
        self.tensors: dict[str, dict[str, Any]] = {k: v for k, v in header.items() if k != "__metadata__"}
        self._begin = 8 + size

    def nbytes(self, name: str) -> int:
        begin, end = self.tensors[name]["data_offsets"]
        return int(end - begin)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name]["shape"])

    def dtype(self, name: str) -> str:
        return str(self.tensors[name]["dtype"])

    def array(self, name: str) -> np.ndarray:
        begin, end = self.tensors[name]["data_offsets"]
        flat = self._data[self._begin + begin : self._begin + end]
        array: np.ndarray = np.asarray(flat).view(_DTYPES[self.dtype(name)])
        return array.reshape(self.shape(name))


class SafetensorsSource(WeightSource):
    """One ``model.safetensors``, or the shards of its index; headers are read and checked at once."""

    def __init__(self, folder: Path) -> None:
        self.origin = folder
        self._where: dict[str, _File] = {}
        index = folder / INDEX
        if (folder / SINGLE).is_file():
            self._add(folder / SINGLE, None)
        elif index.is_file():
            for shard, names in _shards(index).items():
                self._add(folder / shard, names)
        else:
            raise ModelError(f"{folder}: no {SINGLE} and no {INDEX}{_other_formats(folder)}")

    def _add(self, path: Path, names: list[str] | None) -> None:
        """Open one file for ``names`` (None: all of its tensors)."""
        file = _File(path)
        for name in file.tensors if names is None else names:
            if name not in file.tensors:
                raise ModelError(f"{path}: no tensor {name!r}, which {INDEX} lists")
            self._where[name] = file

    def __getitem__(self, name: str) -> np.ndarray:
        file = self._found(self._where, name)
        if file.dtype(name) not in _DTYPES:
            raise ModelError(
                f"{self.origin}: {name} is {file.dtype(name)}; weights are read as F32, F16 and BF16: use "
                "an unquantised copy of the model, or a GGUF file"
            )
        return file.array(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, name: object) -> bool:
        return name in self._where

    def shape(self, name: str) -> tuple[int, ...]:
        return self._found(self._where, name).shape(name)

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes(name) for name, file in self._where.items())


def open_weights(path: str | Path) -> WeightSource:
    """The weights of a model folder or a .gguf file; no tensor data is read yet.

    Raises ModelError for a missing folder or file, a folder without weights, or a truncated or corrupt file.
    """
    from kvcache_engine.checkpoints.gguf import GGUFSource, open_gguf

    place = existing_model_path(path)
    if place.is_file():
        return GGUFSource(open_gguf(place))
    return SafetensorsSource(place)


def _check_safetensors(path: Path) -> None:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ModelError("reading safetensors needs: pip install 'ml-kvcache[engine]'") from error
    if not path.is_file():
        raise ModelError(f"{path}: no such file, although {INDEX} lists it; download it again")
    try:
        with safe_open(path, framework="np"):
            pass
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path}: truncated or not a safetensors file ({error}); download it again"
        ) from error


def _shards(index: Path) -> dict[str, list[str]]:
    """The tensors of each shard file, from ``model.safetensors.index.json``."""
    shards: dict[str, list[str]] = {}
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        for name, shard in weight_map.items():
            if Path(shard).name != shard:
                raise ModelError(f"{index}: the shard {shard!r} is not a file name in the model's folder")
            shards.setdefault(shard, []).append(name)
    except ModelError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: no valid index with a 'weight_map' ({error})") from error
    return shards


def _other_formats(folder: Path) -> str:
    files = sorted(
        path.name for pattern in ("*.gguf", "*.bin", "*.pth", "*.npz") for path in folder.glob(pattern)
    )
    if not files:
        return "; is it a model folder in the Hugging Face format?"
    if files[0].endswith(".gguf"):
        return f"; it holds {files[0]}: name that file as the model"
    return (
        f"; it holds {files[0]}, which is not supported: convert it with "
        "save_pretrained(safe_serialization=True)"
    )
