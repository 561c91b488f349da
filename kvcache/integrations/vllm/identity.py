"""Identifies the model that computes the pages from vLLM's configuration; does not import vLLM."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml
from kvcache.cache import NotSupportedError
from kvcache.integrations.model_folder import model_folder, unknown_weights
from kvcache.integrations.vllm.options import WHERE, ConnectorOptions
from kvcache.stores import UnknownModelError, identity_of

__all__ = ["SHARED", "check_config", "check_values", "identity_of_config", "settings_of"]

SHARED = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""Models whose K and V equal those of transformers and of our engine, in the same order of elements."""
PLAIN_ROPES = frozenset({"default", "llama3"})
DRAFTLESS = frozenset({"ngram", "ngram_gpu", "suffix"})
"""Speculation methods without a draft model."""
_HOW = frozenset({"enable_multithread_load", "num_threads"})
"""Options of vLLM's loaders that affect how weights are read, not which."""
_DTYPES = {"float32": ml.DType.F32, "float16": ml.DType.F16, "bfloat16": ml.DType.BF16}


def check_config(config: Any, cache: Any) -> None:
    """Raise NotSupportedError for an unsupported ``VllmConfig`` or ``KVCacheConfig``."""
    parallel = config.parallel_config
    _refuse(parallel.pipeline_parallel_size > 1, "pipeline parallelism", "--pipeline-parallel-size 1")
    context = max(
        getattr(parallel, "decode_context_parallel_size", 1),
        getattr(parallel, "prefill_context_parallel_size", 1),
    )
    _refuse(context > 1, "context parallelism", "context parallel sizes of 1")
    check_values(config)
    groups = cache.kv_cache_groups
    kinds = sorted({type(spec).__name__ for group in groups for spec in _specs(group.kv_cache_spec)})
    _refuse(
        len(groups) != 1,
        f"{len(groups)} groups of KV cache layers ({', '.join(kinds)})",
        "a model of attention layers only, and --disable-hybrid-kv-cache-manager if it has windows",
    )
    _refuse(
        kinds != ["FullAttentionSpec"],
        f"a KV cache of {', '.join(kinds)}",
        "layers of full attention, or these together with windows",
    )


def check_values(config: Any, connector: str = "KVCacheConnector") -> None:
    """Raise NotSupportedError for a ``VllmConfig`` whose K and V depend on more than its model."""
    speculative = config.speculative_config
    _refuse(
        getattr(config.cache_config, "calculate_kv_scales", False),
        "K and V with dynamically calculated scales",
        "scales of the checkpoint, without --calculate-kv-scales",
        connector,
    )
    _refuse(
        speculative is not None and speculative.method not in DRAFTLESS,
        f"speculation by {getattr(speculative, 'method', None)!r}, with K and V of a draft model",
        "ngram speculation, or none",
        connector,
    )


def _refuse(case: bool, what: str, remedy: str, connector: str = "KVCacheConnector") -> None:
    if case:
        raise NotSupportedError(f"{connector}: {what} is not supported; it needs {remedy}")


def _specs(spec: Any) -> Iterator[Any]:
    """The specs of a group's layers, if they differ in width."""
    yield from getattr(spec, "kv_cache_specs", {"": spec}).values()


def identity_of_config(config: Any, options: ConnectorOptions) -> dict[str, Any]:
    """The identity of the model: from the options, else a digest of its files as in ``model_identity``, with
    everything else that changes K and V. Raises UnknownModelError if the weights cannot be identified.
    """
    model = config.model_config
    more = {**_quantization(model), **_overrides(config), **_lengths(model)}
    if options.identity is not None:
        identity = dict(options.identity)
    else:
        dummy = str(config.load_config.load_format).rpartition(".")[2].lower() == "dummy"
        identity = {**identity_of(_folder(model, dummy), _dtype(model))}
    return {**identity, "vllm": more} if more else identity


def _dtype(model: Any) -> ml.DType:
    name = str(model.dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise NotSupportedError(
            f"KVCacheConnector: a model of {name}; it must be one of {', '.join(_DTYPES)}"
        )
    return _DTYPES[name]


def _folder(model: Any, dummy: bool) -> Path:
    path = None if dummy else model_folder(model.model, model.revision)
    if path is None:
        raise unknown_weights("KVCacheConnector", repr(model.model), f'{WHERE}: "identity"')
    return path


def _quantization(model: Any) -> dict[str, Any]:
    """The quantization applied while loading; that of a quantized checkpoint is in its files."""
    quantization = getattr(model.hf_config, "quantization_config", None)
    return {"quantization": str(model.quantization)} if model.quantization and not quantization else {}


def _overrides(config: Any) -> dict[str, Any]:
    """The settings that override the model's files."""
    model, images = config.model_config, config.model_config.multimodal_config
    if callable(model.hf_overrides):
        raise UnknownModelError(
            "KVCacheConnector: hf_overrides is a function, which cannot be identified; pass a dict"
        )
    loader = config.load_config.model_loader_extra_config
    if isinstance(loader, Mapping):
        loader = {name: value for name, value in loader.items() if name not in _HOW}
    named = {
        "hf_config": _config_digest(model.hf_config) if model.hf_config_path else "",  # a separate file
        "quantization_config": model.quantization_config,
        "model_loader_extra_config": loader,
        "mm_processor_kwargs": getattr(images, "mm_processor_kwargs", None),
        "media_io_kwargs": getattr(images, "media_io_kwargs", None),
    }
    overrides = {"hf_overrides": model.hf_overrides} if model.hf_overrides else {}
    return overrides | {name: str(value) for name, value in named.items() if value}


def _config_digest(config: Any) -> str:
    """The config's digest without the version of transformers that wrote it."""
    config_fields = json.loads(config.to_json_string())
    config_fields.pop("transformers_version", None)
    return hashlib.sha256(json.dumps(config_fields, sort_keys=True).encode()).hexdigest()


def _lengths(model: Any) -> dict[str, Any]:
    """Settings of rotations that depend on the longest prompt."""
    return {} if _ropes(model) <= PLAIN_ROPES else {"max_model_len": model.max_model_len}


def _ropes(model: Any) -> set[str]:
    parameters = getattr(model.hf_text_config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    return {str(one.get("rope_type", "default")) for one in nested or [parameters]}


def settings_of(config: Any, settings: Mapping[str, Any], windows: list[int | None]) -> dict[str, Any]:
    """The settings in the keys of pages, besides the model; ``settings`` are those of the pages' format.

    If our caches would store the same K and V, they are a ``CausalCache``'s, so that other runtimes can read
    the pages; else they are marked as vLLM's.
    """
    model = config.model_config
    alike = (
        set(getattr(model.hf_config, "architectures", None) or ()) <= SHARED
        and _ropes(model) <= PLAIN_ROPES
        and config.parallel_config.tensor_parallel_size == 1
        and not any(windows)
        and settings["kind"] == "CausalCache"
    )
    if alike:
        return dict(settings)
    return {
        **settings,
        "computed_by": "vLLM",
        "kv_cache_dtype": str(config.cache_config.cache_dtype),
        "windows": windows,
    }
