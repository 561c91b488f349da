"""Identifies the model that computes SGLang's pages, and this rank's share of them; does not import
SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcache.integrations.model_folder import model_folder, unknown_weights, weights_digest
from kvcache.integrations.sglang.options import WHERE
from kvcache.stores import UnknownModelError, files_digest

__all__ = ["identity_of_server", "share_of"]

_CHANGES = (
    "quantization", "quantization_param_path", "modelopt_quant", "rl_quant_profile", "model_impl",
    "json_model_override_args", "decrypted_config_file", "model_loader_extra_config", "mm_process_config",
)  # fmt: skip
"""Server arguments that change K and V in addition to the model's files and dtype."""
_UNSET = ("None", "", "auto", "{}")


def identity_of_server(args: Any, adapters: Sequence[Any] = ()) -> dict[str, Any]:
    """JSON-able: a digest of the model's files, everything else in ``ServerArgs`` that changes K and V, and a
    digest of each of the LoRA ``adapters``, which SGLang distinguishes only by name and path. Raises
    UnknownModelError if no files identify the loaded weights.
    """
    dummy = args is not None and str(getattr(args, "load_format", "auto")).lower().endswith("dummy")
    path = None
    if args is not None and not dummy:
        path = model_folder(args.model_path, getattr(args, "revision", None))
    if path is None:
        raise _unknown("the model" if args is None else repr(args.model_path))
    changes = {name: str(getattr(args, name, None)) for name in _CHANGES}
    changes = {name: value for name, value in changes.items() if value not in _UNSET}
    draft = getattr(args, "speculative_draft_model_path", None)
    if draft and draft != args.model_path:  # else it is part of the model
        revision = getattr(args, "speculative_draft_model_revision", None)
        changes["speculative_draft_model"] = _weights("draft model", draft, revision)
    lora = {adapter.lora_name: _weights("adapter", adapter.lora_path) for adapter in adapters}
    identity = {"files": files_digest(path), "dtype": str(args.dtype), "sglang": changes, "lora": lora}
    return {name: value for name, value in identity.items() if value}


def _weights(what: str, path: str, revision: str | None = None) -> str:
    folder = model_folder(path, revision)
    digest = folder and weights_digest(str(folder))
    if not digest:
        raise _unknown(f"the {what} {path!r}")
    return digest


def _unknown(what: str) -> UnknownModelError:
    return unknown_weights("HiCacheStore", what, f'{WHERE}: "identity"')


def share_of(config: Any, replicated: bool) -> dict[str, str]:
    """The part of a page that a rank of this ``HiCacheStorageConfig`` stores. Ranks of tensor parallelism
    store different heads, unless the content is ``replicated``, as latents are. Data-parallel replicas store
    the same.
    """
    parts = {
        "tensor_parallel": (0, 1) if replicated else (config.tp_rank, config.tp_size),
        "pipeline": (config.pp_rank, config.pp_size),
        "context_parallel": (config.attn_cp_rank, config.attn_cp_size),
    }
    return {name: f"{rank}/{size}" for name, (rank, size) in parts.items() if size > 1}
