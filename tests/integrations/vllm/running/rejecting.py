"""A connector that promises tokens of every prompt within the step itself, and then has none of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

from .engines import BLOCK

TOKENS = 4 * BLOCK


@dataclass
class Promised(KVConnectorMetadata):  # type: ignore[misc]
    blocks: set[int]


class Handshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    pass


class Rejecting(KVConnectorBase_V1):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._seen: set[str] = set()
        self._promised: set[int] = set()
        self._invalid: set[int] = set()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return Handshake() if self._kv_transfer_config.get_from_extra_config("handshake", False) else None

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0 if request.request_id in self._seen else max(0, TOKENS - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._seen.add(request.request_id)
            self._promised.update(blocks.get_block_ids()[0][: TOKENS // BLOCK])

    def build_connector_meta(self, scheduler_output: Any) -> Promised:
        promised, self._promised = self._promised, set()
        return Promised(promised)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._invalid |= self._get_connector_metadata().blocks

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *given: Any, **named: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
