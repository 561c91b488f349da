"""Models by their name on the Hugging Face Hub: found in its cache on this machine, or fetched into it."""

from __future__ import annotations

import re
from pathlib import Path

from kvcache.runner.errors import ModelError

__all__ = ["is_hub_name", "model_on_hub"]

_NAME = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[\w.-]+))?(?:/(?P<file>[\w.-]+\.gguf))?")
_READ = ["*.json", "*.safetensors", "*.jinja"]
"""What is read of a model's folder; not what lies in folders in it."""


def is_hub_name(name: str) -> bool:
    """Whether it could be OWNER/NAME, OWNER/NAME@REVISION, or a file of one: OWNER/NAME/FILE.gguf."""
    return _NAME.fullmatch(name) is not None


def model_on_hub(name: str) -> Path:
    """The folder or .gguf file of that name in the Hugging Face cache; what is not there is fetched.

    huggingface_hub shows the progress of a download on standard error, and goes by its own variables
    (``HF_HOME``, ``HF_HUB_OFFLINE``, ``HF_TOKEN``, ``HF_ENDPOINT``). Raises ModelError where there is no such
    model, or no way to it.
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
    """In the cache (``local``), or fetched. Raises what huggingface_hub raises."""
    from huggingface_hub import errors, hf_hub_download, snapshot_download

    found = _NAME.fullmatch(name)
    assert found is not None
    repo, revision, file = found.group("repo", "revision", "file")
    if file is not None:
        return Path(hf_hub_download(repo, file, revision=revision, local_files_only=local))
    folder = Path(
        snapshot_download(
            repo, revision=revision, local_files_only=local, allow_patterns=_READ, ignore_patterns=["*/*"]
        )
    )
    if local and not (any(folder.glob("*.safetensors")) and (folder / "config.json").exists()):
        raise errors.LocalEntryNotFoundError(f"{folder} has no weights or no config")  # a tokenizer, say
    return folder
