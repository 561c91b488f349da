"""Which model computed K and V: the identity in the names of entries that outlive the process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import ml
from kvcache.stores.errors import UnknownModelError

__all__ = ["files_digest", "identity_of"]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""What frameworks call the dtypes of activations."""


def identity_of(path: Path | str, dtype: object) -> dict[str, str]:
    """The ``identity=`` of a model loaded from files: a digest of the files, and the dtype it computes in.

    ``path`` is a folder with config.json and weights, or a .gguf file; ``dtype`` is F32, F16 or BF16, or the
    same of torch, MLX or NumPy, or a name of it. Two models have the same identity exactly if their
    config.json files are equivalent and their weight files are equal byte for byte; their location and the
    backend do not matter. All weights are read once.

    >>> from kvcache.stores import identity_of
    >>> identity_of("model", "BF16")  # doctest: +SKIP
    {'files': '5f0c...', 'dtype': 'BF16'}

    Raises UnknownModelError if there is no model, DTypeError for another dtype.
    """
    path, name = Path(path), _dtype_name(dtype)
    if name is None:
        raise ml.DTypeError(
            f"identity_of: dtype={dtype!r}; it must be F32, F16 or BF16, or a framework's dtype of these"
        )
    whole = (path / "config.json").is_file() and any((path / name).is_file() for name in (_SINGLE, _INDEX))
    if not whole and (not path.is_file() or path.suffix == ".json"):
        raise UnknownModelError(
            f"identity_of: {path} has no config.json, or no weights beside it; give the folder that the "
            "model was loaded from (of a model on the Hub: huggingface_hub.snapshot_download(name))"
        )
    return {"files": files_digest(path), "dtype": name}


def _dtype_name(dtype: object) -> str | None:
    """As ``ml.DType`` calls it: "torch.float16", mlx.core.float16 and np.float16 are F16."""
    shown = dtype.name if isinstance(dtype, ml.DType) else getattr(dtype, "__name__", str(dtype))
    name = shown.rpartition(".")[2].strip().lower()
    name = _NAMES.get(name, name.upper())
    return name if name in _NAMES.values() else None


def files_digest(path: Path) -> str:
    """sha256 (hex) of a model folder's config.json and weight files, or of a .gguf file."""
    total = hashlib.sha256()
    for part in _parts(path):
        if isinstance(part, bytes):
            total.update(hashlib.sha256(part).digest())
        else:
            with part.open("rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def _parts(path: Path) -> Iterator[bytes | Path]:
    """The digested data in order; config.json in canonical form."""
    if path.is_file():
        yield path
        return
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    yield json.dumps(config, sort_keys=True).encode()
    if (path / _SINGLE).is_file():
        yield path / _SINGLE
        return
    shards = json.loads((path / _INDEX).read_text(encoding="utf-8"))["weight_map"]
    for name in sorted(set(shards.values())):
        yield path / name
