"""vLLM's OffloadingConnector with the names of our pages. Imports vLLM.

Everything is vLLM's, but that a KVCacheTier among its ``secondary_tiers`` learns which model computes, the
tokens of each request, and, if our caches would store the same, where a block has K and V.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvcache.integrations.vllm import required  # isort: split

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.logger import init_logger

import ml
from kvcache.cache import InvalidRangeError, NotSupportedError
from kvcache.integrations.vllm.chunks import BlockLayer, TokenNames, token_rows
from kvcache.integrations.vllm.identity import check_config, check_values, identity_of_config, settings_of
from kvcache.integrations.vllm.layers import cache_layers, spec_of
from kvcache.integrations.vllm.options import TIERS, ConnectorOptions
from kvcache.integrations.vllm.packing import Strides
from kvcache.integrations.vllm.paged_cache import block_layers
from kvcache.integrations.vllm.tier import KVCacheTier

__all__ = ["KVCacheOffloadingConnector", "required"]

log = init_logger("vllm.kvcache_tier")  # vLLM shows only loggers under its own name


@dataclass
class BlocksMetadata(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Where a rank's blocks have K and V, as JSON."""

    blocks: str


class KVCacheOffloadingConnector(OffloadingConnector):  # type: ignore[misc]
    """vLLM's OffloadingConnector over a KVCacheTier; see docs/embedding-vllm.md."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        check_values(vllm_config, type(self).__name__)
        tiers = [
            tier
            for tier in vllm_config.kv_transfer_config.kv_connector_extra_config.get(TIERS, ())
            if tier.get("type") == KVCacheTier.__name__
        ]
        if not tiers:
            raise InvalidRangeError(
                f"KVCacheOffloadingConnector: {TIERS} names no KVCacheTier: without one, use vLLM's "
                "OffloadingConnector"
            )
        if role == KVConnectorRole.SCHEDULER:
            for tier in tiers:
                given = tier.get("identity")
                if given is None or isinstance(given, Mapping):  # else the tier says what it must be
                    named = ConnectorOptions((), identity=given)
                    tier["identity"] = identity_of_config(vllm_config, named)
        super().__init__(vllm_config, role, kv_cache_config)
        self._blocks: BlocksMetadata | None = None
        self._tiers: list[KVCacheTier] = []
        self._names: list[TokenNames] = []
        if role == KVConnectorRole.SCHEDULER:
            below = self.scheduler.manager.secondary_tiers
            self._tiers = [tier for tier in below if isinstance(tier, KVCacheTier)]
            self._name({})

    def _name(self, settings: Mapping[str, Any]) -> None:
        self._names = [tier.name_by_tokens(settings) for tier in self._tiers]

    def on_new_request(self, request: Any) -> None:
        for names in self._names:
            names.begin(request)
        super().on_new_request(request)

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Pages of our caches, if the only rank has told where its blocks have K and V."""
        ranks = [one for one in metadata.values() if isinstance(one, BlocksMetadata)]
        if len(ranks) != 1:
            return
        blocks = json.loads(ranks[0].blocks)
        layers = [
            BlockLayer(**{**layer, "key": Strides(*layer["key"]), "value": Strides(*layer["value"])})
            for layer in blocks["layers"]
        ]
        for tier in self._tiers:
            (tokens,) = tier.tokens.values()
            tier.rows = token_rows(
                ml.DType[blocks["dtype"]], blocks["tokens"], tokens // blocks["tokens"], layers
            )
        self._name(blocks["settings"])
        log.info("KVCacheOffloadingConnector: pages of %d tokens, %s", tokens, blocks["settings"])

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        config, groups = self._vllm_config, self._kv_cache_config.kv_cache_groups
        if config.parallel_config.world_size > 1 or len(groups) > 1 or self._canonical_layout:
            return
        try:
            check_config(config, self._kv_cache_config)
        except NotSupportedError:
            return
        modules = config.compilation_config.static_forward_context
        layers = cache_layers(groups[0], kv_caches, modules)
        kernel_blocks = layers[0].cache.shape[0] // self._kv_cache_config.num_blocks
        tokens = groups[0].kv_cache_spec.block_size // kernel_blocks
        found = block_layers(layers, tokens)
        if found is None:
            return
        dtype, where = found
        specs = [spec_of(groups[0], layer.name) for layer in layers]
        windows = [spec.sliding_window or spec.attention_chunk_size for spec in specs]
        settings = settings_of(config, {"kind": "CausalCache", "dtype": dtype.name}, windows)
        blocks = {
            "dtype": dtype.name,
            "tokens": tokens,
            "layers": [asdict(layer) for layer in where],
            "settings": settings,
        }
        self._blocks = BlocksMetadata(json.dumps(blocks))

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._blocks
