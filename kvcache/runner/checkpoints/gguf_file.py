"""A GGUF file: its metadata as plain Python values, and its tensors as arrays."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kvcache.runner.errors import ModelError

__all__ = ["GGUFFile", "open_gguf"]


class GGUFFile:
    """Opened and checked through the ``gguf`` package; tensor data is read on demand.

    Raises ModelError where the file is missing, truncated or no GGUF file, or ``gguf`` is not installed.
    """

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError as error:
            raise ModelError(
                f"{path}: reading GGUF files needs: pip install 'ml-kvcache[cli,gguf]'"
            ) from error
        try:
            self._reader = gguf.GGUFReader(path, "c")  # private pages: nobody's write reaches the file
        except Exception as error:  # the reader checks little: bad bytes raise whatever they meet first
            raise ModelError(f"{path}: truncated or not a GGUF file ({_first_line(error)})") from error
        self.path = path
        self._gguf = gguf
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._check_split()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as stored (quantised)."""
        return sum(int(tensor.n_bytes) for tensor in self._tensors.values())

    def has(self, key: str) -> bool:
        return key in self._reader.fields

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value: str, int, float, bool or a list of those; ``default`` where absent."""
        field = self._reader.fields.get(key)
        if field is None:
            return default
        strings = field.types[-1] == self._gguf.GGUFValueType.STRING
        if field.types[0] == self._gguf.GGUFValueType.ARRAY:
            if strings:
                return [str(bytes(field.parts[i]), "utf-8", "replace") for i in field.data]
            return [_plain(field.parts[i][0]) for i in field.data]
        return str(bytes(field.parts[-1]), "utf-8", "replace") if strings else _plain(field.parts[-1][0])

    def shape(self, name: str) -> tuple[int, ...]:
        """Row-major: GGML counts dimensions from the innermost."""
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def array(self, name: str) -> np.ndarray:
        """F32, F16 and BF16 as they are; quantised blocks become F32."""
        tensor = self._tensors[name]
        kind = tensor.tensor_type.name
        array: np.ndarray = np.asarray(tensor.data)
        if kind in ("F32", "F16"):
            return array
        try:
            if kind == "BF16":
                array = array.view(ml_dtypes.bfloat16)
            else:
                array = self._gguf.dequantize(array, tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise ModelError(
                f"{self.path}: {name} is stored as {kind}, which the gguf package cannot read ({error})"
            ) from error
        return array.reshape(self.shape(name))

    def _check_split(self) -> None:
        count = self.get("split.count", 1)
        if count > 1:
            raise ModelError(
                f"{self.path}: one of {count} parts of a split model; join them: llama-gguf-split --merge"
            )


def open_gguf(path: Path) -> GGUFFile:
    """The file, parsed once for its config, its vocabulary and its weights: that takes seconds."""
    try:
        status = path.stat()
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from error
    return _opened(path, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=1)
def _opened(path: Path, changed: int, size: int) -> GGUFFile:
    return GGUFFile(path)


def _plain(value: Any) -> Any:
    """A Python number; a float32 as the shortest decimal that it stands for (1e-05, not 9.99999975e-06)."""
    return float(str(value)) if isinstance(value, np.float32) else value.item()


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
