"""Which model computed keys and values: what snapshots that outlive the process are named by."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml
from kvcache.runner.checkpoints.weights import INDEX, SINGLE
from kvcache.runner.errors import ModelError
from kvcache.runner.parallel import Share

__all__ = ["files_digest", "identity_of", "model_identity"]


def model_identity(model: Any) -> dict[str, str]:
    """JSON-able: a digest of the files that ``model`` was loaded from, and the dtype it computes in.

    Two models agree in it exactly where config.json says the same and the weight files are equal byte
    for byte; where they lie and which backend runs them does not matter. Of a model that is split over
    ranks, the rank and their number are in it too: each has keys and values of its own heads. So is whether
    the layer for multi-token prediction stores its own. Reads all weights once.

    A model that has an ``identity()`` of its own is asked. Raises ModelError for another one that was not
    loaded from files: name it yourself then.
    """
    own = getattr(model, "identity", None)
    if own is not None:
        told: dict[str, str] = own()
        return told
    origin = getattr(model, "origin", None)
    if origin is None:
        raise ModelError(
            f"{type(model).__name__} was not loaded from files, so that nothing tells it from others; "
            "pass identity="
        )
    found = identity_of(origin, model.dtype, getattr(model, "share", None))
    return {**found, "mtp": "yes"} if getattr(model, "mtp", None) is not None else found


def identity_of(path: Path | str, dtype: ml.DType | str, share: Share | None = None) -> dict[str, str]:
    """``model_identity`` of what ``load_model(path, ..., dtype)`` gives: a model, or a ``share`` of it.

    ``path`` is a folder with config.json and weights, or a .gguf file; ModelError where there is none.
    ``dtype``, or its name, is what the model computes in; DTypeError for an unknown one.
    """
    path, name = Path(path), dtype if isinstance(dtype, str) else getattr(dtype, "name", "")
    if name not in ("F32", "F16", "BF16"):
        raise ml.DTypeError(f"identity_of: dtype={dtype!r}; it must be F32, F16 or BF16")
    whole = (path / "config.json").is_file() and any((path / name).is_file() for name in (SINGLE, INDEX))
    if not whole and (not path.is_file() or path.suffix == ".json"):
        raise ModelError(
            f"identity_of: {path} has no config.json, or no weights beside it; give the folder that the "
            "model was loaded from (of a model on the Hub: huggingface_hub.snapshot_download(name))"
        )
    found = {"files": files_digest(path), "dtype": name}
    return found if share is None else {**found, "tensor_parallel": share.name}


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
    """What the digest is over, in order; the config without the blanks and the order of its JSON."""
    if path.is_file():
        yield path
        return
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    yield json.dumps(config, sort_keys=True).encode()
    if (path / SINGLE).is_file():
        yield path / SINGLE
        return
    shards = json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"]
    for name in sorted(set(shards.values())):
        yield path / name
