"""Which model computes SGLang's pages, and which part of them this rank holds; imports no SGLang."""

from __future__ import annotations

from typing import Any

from kvcache.integrations.model_folder import model_folder
from kvcache.integrations.sglang.options import WHERE
from kvcache.runner.errors import ModelError
from kvcache.runner.fingerprint import files_digest

__all__ = ["identity_of_server", "share_of"]

_CHANGES = ("quantization", "json_model_override_args", "torchao_config")
"""Server arguments that change K and V beside the model's files and its dtype."""


def identity_of_server(args: Any) -> dict[str, Any]:
    """JSON-able: a digest of the model's files, and what else ``ServerArgs`` say about its K and V.

    Raises ModelError where no files tell which weights are loaded.
    """
    dummy = args is not None and str(getattr(args, "load_format", "auto")).lower().endswith("dummy")
    path = None
    if args is not None and not dummy:
        path = model_folder(args.model_path, getattr(args, "revision", None))
    if path is None:
        name = "the model" if args is None else repr(args.model_path)
        raise ModelError(
            f"HiCacheStore: no files tell which weights {name} has; name them in {WHERE}: "
            '"identity": {"model": ..., "weights": ...}'
        )
    changes = {
        name: str(value) for name in _CHANGES if (value := getattr(args, name, None)) not in (None, "", "{}")
    }
    return {"files": files_digest(path), "dtype": str(args.dtype), **({"sglang": changes} if changes else {})}


def share_of(config: Any, replicated: bool) -> dict[str, str]:
    """Which part of a page a rank of this ``HiCacheStorageConfig`` holds.

    Ranks of tensor parallelism have heads of their own, unless what they hold is ``replicated``, as latents
    are. Replicas of data parallelism hold the same.
    """
    parts = {
        "tensor_parallel": (0, 1) if replicated else (config.tp_rank, config.tp_size),
        "pipeline": (config.pp_rank, config.pp_size),
        "context_parallel": (config.attn_cp_rank, config.attn_cp_size),
    }
    return {name: f"{rank}/{size}" for name, (rank, size) in parts.items() if size > 1}
