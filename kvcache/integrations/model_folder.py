"""Where the files of a model lie that another runtime has loaded."""

from __future__ import annotations

from pathlib import Path

__all__ = ["model_folder"]


def model_folder(name: str, revision: str | None = None) -> Path | None:
    """The folder ``name``, or where the hub's client keeps the model of that name; None: neither is here.

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
