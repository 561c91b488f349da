"""The connector that vLLM loads: its interface over our two sides. Imports vLLM. Pages contain all layers of
their tokens and are verified as a whole, so a page cannot be used before it is complete. Loads therefore run
between steps (vLLM schedules other requests meanwhile) and not layer by layer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from kvcache.integrations.vllm import required  # isort: split

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvcache.cache import NotSupportedError
from kvcache.integrations.vllm.identity import check_config, identity_of_config, settings_of
from kvcache.integrations.vllm.layers import cache_layers, spec_of
from kvcache.integrations.vllm.metrics import ConnectorPromMetrics, ConnectorStats
from kvcache.integrations.vllm.options import ConnectorOptions
from kvcache.integrations.vllm.paged_cache import find_pages
from kvcache.integrations.vllm.planner import Planner
from kvcache.integrations.vllm.sides import SchedulerSide, WorkerSide
from kvcache.integrations.vllm.steps import Report, Step

__all__ = ["KVCacheConnector", "required"]

log = init_logger("vllm.kvcache_connector")  # vLLM shows only loggers under its own name


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    step: Step


@dataclass
class ReportMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    report: Report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        return ReportMetadata(self.report.joined(other.report))


@dataclass
class PagesMetadata(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """The format of a rank's pages, as JSON."""

    settings: str


class KVCacheConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Loads prefixes from our stores and saves them there; see docs/embedding-vllm.md."""

    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_config(vllm_config, kv_cache_config)
        self._options = ConnectorOptions.parse(self._kv_transfer_config.kv_connector_extra_config)
        self._spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        self._page_tokens = self._options.tokens_of_page(self._spec.block_size)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._settings = ""
        if role == KVConnectorRole.SCHEDULER:
            policy = self._kv_transfer_config.kv_load_failure_policy
            if policy != "recompute":
                log.warning(
                    "KVCacheConnector: kv_load_failure_policy is %r: a request whose stored page is lost or "
                    'damaged fails; set "kv_load_failure_policy": "recompute"',
                    policy,
                )
            identity = identity_of_config(vllm_config, self._options)
            self._scheduler = SchedulerSide(self._options, identity, self._spec.block_size)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # tokens that are not stored are computed again

    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()

    # The scheduler's side.

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        assert self._scheduler is not None
        for rank_metadata in metadata.values():
            if not isinstance(rank_metadata, PagesMetadata):
                raise NotSupportedError(
                    f"KVCacheConnector: its workers' handshake metadata are {type(rank_metadata).__name__}: "
                    "vLLM's MultiConnector passes those of its first connector that has any to all; name "
                    "KVCacheConnector before that one"
                )
        config = self._kv_transfer_config
        settings = {rank: rank_metadata.settings for rank, rank_metadata in metadata.items()}
        # A pooler that needs every token of a prompt fails if a prefix is not computed.
        reads = config.is_kv_consumer and self._vllm_config.model_config.is_prefix_caching_supported
        self._scheduler.begin(settings, reads, config.is_kv_producer)
        log.info(
            "KVCacheConnector: pages of %d tokens (%d blocks) in %s, %d rank(s), %s",
            self._page_tokens,
            self._page_tokens // self._spec.block_size,
            ", ".join(self._options.store),
            len(settings),
            settings[0],
        )

    @property
    def _planner(self) -> Planner:
        assert self._scheduler is not None
        assert self._scheduler.planner is not None
        return self._scheduler.planner

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._planner.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._planner.admitted(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        scheduled = scheduler_output.num_scheduled_tokens
        state = scheduler_output.kv_connector_block_state

        cached = scheduler_output.scheduled_cached_reqs
        before = [(new.req_id, new.num_computed_tokens) for new in scheduler_output.scheduled_new_reqs]
        before += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        after = [(name, computed + scheduled[name]) for name, computed in before]
        # Our loads run between steps, so this is another connector's load. Whether it failed is known after
        # the step, when vLLM has already scheduled the next ones. A request that ran before uses none of its
        # blocks.
        unsure = self._vllm_config.max_concurrent_batches if scheduler_output.has_sync_kv_loads else 0
        admitted = {new.req_id for new in scheduler_output.scheduled_new_reqs} | cached.resumed_req_ids
        blocks = lambda name: state.get_block_ids(name)[0]  # noqa: E731
        return StepMetadata(self._planner.plan(after, blocks, unsure, admitted))

    def update_connector_output(self, connector_output: Any) -> None:
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, ReportMetadata):
            self._planner.heard(metadata.report)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._planner.finished(request.request_id)
        return False, None

    def reset_cache(self) -> bool:
        self._planner.reset()
        return True

    # A worker's side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        config, blocks = self._vllm_config, self._kv_cache_config.num_blocks
        group = self._kv_cache_config.kv_cache_groups[0]
        modules = config.compilation_config.static_forward_context
        layers = cache_layers(group, kv_caches, modules)
        first = modules[layers[0].name]
        layout = ", ".join(
            [
                f"{first.get_attn_backend().get_name()} {getattr(first, 'isa', '')}".strip(),
                str(self._kv_cache_config.kv_cache_layout),
                f"{config.cache_config.cache_dtype} {layers[0].cache.dtype}",
            ]
        )
        cache = find_pages(
            layers, self._spec.block_size, blocks, self._page_tokens, layout, self._options.pages == "raw"
        )
        specs = [spec_of(group, layer.name) for layer in layers]
        windows = [spec.sliding_window or spec.attention_chunk_size for spec in specs]
        self._settings = json.dumps(settings_of(config, cache.settings, windows))
        self._worker = WorkerSide(self._options, get_tensor_model_parallel_rank(), cache)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return PagesMetadata(self._settings)

    def _step(self) -> Step:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata.step

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert self._worker is not None
        self._worker.transfers.load(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A no-op: no block that a pass reads is still being loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """A no-op: all layers are copied when the pass ends, so that a pass is never split."""

    def wait_for_save(self) -> None:
        assert self._worker is not None
        self._worker.transfers.save(self._step())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        assert self._worker is not None
        return None, self._worker.transfers.arrived(finished_req_ids, self._step().idle) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        assert self._worker is not None
        return self._worker.transfers.invalid_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        assert self._worker is not None
        report = self._worker.transfers.report()
        return None if report is None else ReportMetadata(report)

    # Metrics.

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        side = self._scheduler or self._worker
        counts = side.counters.take() if side is not None else {}
        return ConnectorStats(counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        return ConnectorStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ConnectorPromMetrics:
        return ConnectorPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
