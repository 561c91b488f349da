"""The files of a model that another runtime has loaded, and digests of adapters' files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from kvcache.stores import UnknownModelError

__all__ = ["model_folder", "unknown_weights", "weights_digest"]


def model_folder(name: str, revision: str | None = None) -> Path | None:
    """The folder ``name``, or the hub client's local folder of that model; None if neither exists.

    Nothing is downloaded.
    """
    path = Path(name)
    if path.is_dir():
        return path
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except Exception:
        return None


def unknown_weights(reader: str, what: str, option: str) -> UnknownModelError:
    """The error if no local files identify the weights of ``what``; ``option`` of ``reader`` may name
    them.
    """
    return UnknownModelError(
        f"{reader}: no local files identify the weights of {what}; name them in {option}: "
        '{"model": ..., "weights": ...}'
    )


_CONFIGS = ("adapter_config.json", "config.json")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".tensors")
_digests: dict[tuple[str, tuple[tuple[str, int, int], ...]], str] = {}


def weights_digest(path: str) -> str | None:
    """sha256 (hex) of the config and weights of an adapter or a draft model; None if it is not a folder.
    Names given by a server do not identify weights, and other files (a README, a lock) may change.
    """
    folder = Path(path)
    if not folder.is_dir():
        return None
    named = (file for file in folder.iterdir() if file.name in _CONFIGS or file.suffix in _WEIGHTS)
    files = sorted(file for file in named if file.is_file())
    stats = [(file.name, file.stat()) for file in files]
    seen = path, tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
    if seen not in _digests:
        total = hashlib.sha256()
        for file in files:
            total.update(json.dumps([file.name, file.stat().st_size]).encode())
            with file.open("rb") as opened:
                total.update(hashlib.file_digest(opened, "sha256").digest())
        _digests[seen] = total.hexdigest()
    return _digests[seen]
