"""The connector's counts in vLLM's own form: its log line and its Prometheus metrics. Imports vLLM."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from kvcache.integrations.vllm.counters import COUNTED

__all__ = ["ConnectorPromMetrics", "ConnectorStats"]


class ConnectorStats(KVConnectorStats):  # type: ignore[misc]
    """Sums by name, of all ranks and of the scheduler."""

    def reset(self) -> None:
        self.data: dict[str, float] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: round(count, 6) for name, count in sorted(self.data.items())}

    def is_empty(self) -> bool:
        return not self.data


class ConnectorPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """A counter ``vllm:kvcache_<name>`` for each of ``COUNTED``."""

    def __init__(
        self, config: Any, types: dict[Any, Any], labels: list[str], by_engine: dict[int, list[object]]
    ) -> None:
        super().__init__(config, types, labels, by_engine)
        self._counters = {
            name: create_metric_per_engine(
                types[Counter](name=f"vllm:kvcache_{name}", documentation=said, labelnames=labels), by_engine
            )
            for name, said in COUNTED.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(count)
