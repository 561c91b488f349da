"""vLLM's tests of connectors, with ours in the place of ExampleConnector.

They only schedule: the model is a config, of which theirs would be downloaded. The suite of what keys must
tell apart (v1/core/conformance, which vllm-project/vllm#53769 proposes) names adapters that have no files:
ours has some of its own for each.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

import numpy as np
import vllm.config
from transformers import OPTConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.lora.request import LoRARequest

from benchmarks.peers_tests import named, tokenizer
from kvcache.integrations.vllm import KVCacheConnector
from kvcache.integrations.vllm.connector import PagesMetadata
from kvcache.integrations.vllm.options import ConnectorOptions
from kvcache.integrations.vllm.pages import RawPages
from kvcache.integrations.vllm.sides import WorkerSide

LEFT_OUT: dict[str, str] = {}
"""Patterns of tests that are not run, and why."""

_used: Counter[str] = Counter()


class _Blocks:
    """Blocks without a device, each of which is zeros."""

    def __init__(self, tokens: int) -> None:
        self.pages = RawPages(tokens, 1, (tokens,), "zeros")

    def gather(self, blocks: Sequence[int]) -> Any:
        zeros = np.zeros((len(blocks), self.pages.tokens), np.uint8)
        return SimpleNamespace(arrays=[zeros], ready=lambda: True)

    def follow(self) -> None: ...
    def scatter(self, blocks: Sequence[int | None], arrays: Sequence[np.ndarray]) -> None: ...


class _Connector(KVCacheConnector):  # type: ignore[misc]
    """With pages of a block, in the folder that ExampleConnector would write to, or in memory.

    It is the scheduler's side; a worker's stands beside it, for tests that have this one store a layer.
    """

    def __init__(self, config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        config = copy.copy(config)
        transfer = config.kv_transfer_config = copy.copy(config.kv_transfer_config)
        folder = transfer.get_from_extra_config("shared_storage_path", None)
        tokens = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        transfer.kv_connector_extra_config = {
            "store": f"file://{folder}?durable=no" if Path(folder or "").is_absolute() else "memory:",
            "identity": {"model": "m"}, "page_tokens": tokens, "lookup_wait": 20.0, "lookup_timeout": 20.0,
        }  # fmt: skip
        super().__init__(config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.set_xfer_handshake_metadata({0: PagesMetadata("{}")})
        self._beside = WorkerSide(
            ConnectorOptions.parse(transfer.kv_connector_extra_config), 0, _Blocks(tokens)
        )
        _used["KVCacheConnector"] += 1

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if blocks is None:  # of a request that is new to the connector, whose scheduler would have asked it
            self.get_num_new_matched_tokens(request, 0)
            blocks = SimpleNamespace(get_block_ids=lambda: ([],))
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        if scheduler_output.kv_connector_block_state is None:  # blocks from 0 on, which vLLM gives to nobody
            blocks = {
                new.req_id: ([block + 1 for block in new.block_ids[0]],)
                for new in scheduler_output.scheduled_new_reqs
            }
            scheduler_output.kv_connector_block_state = SimpleNamespace(get_block_ids=blocks.__getitem__)
        return super().build_connector_meta(scheduler_output)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self._beside.transfers.save(self._get_connector_metadata().step)
        self._beside.close()


class _Adapters:
    """vLLM's LoRARequest, with files of its own for each name and path."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def __call__(self, lora_name: str, lora_int_id: int, lora_path: str) -> LoRARequest:
        folder = self._folder / hashlib.sha256(f"{lora_name}\n{lora_path}".encode()).hexdigest()
        folder.mkdir(exist_ok=True)
        (folder / "adapter_model.safetensors").write_text(f"{lora_name}\n{lora_path}")
        return LoRARequest(lora_name, lora_int_id, str(folder))


def theirs() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


@contextlib.contextmanager
def ours() -> Iterator[None]:
    """Where vLLM finds its own by name, and in the test files."""
    registry = KVConnectorFactory._registry
    own = registry["ExampleConnector"]
    registry["ExampleConnector"] = lambda: _Connector
    tests = [module for name, module in sys.modules.items() if name.partition(".")[0] == "tests"]
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            named(tests, ExampleConnector=_Connector, LoRARequest=_Adapters(folder)),
        ):
            yield
    finally:
        registry["ExampleConnector"] = own


@contextlib.contextmanager
def prepared(paths: Sequence[Path]) -> Iterator[tuple[Sequence[Path], Counter[str]]]:
    with tempfile.TemporaryDirectory() as folder:
        config = OPTConfig(
            architectures=["OPTForCausalLM"], hidden_size=64, num_attention_heads=1, vocab_size=50272
        )
        config.save_pretrained(folder)
        tokenizer().save_pretrained(folder)

        def small(self: Any, *arguments: Any, model: str = "", **options: Any) -> None:
            plain(self, *arguments, model=folder, **options)

        plain = vllm.config.ModelConfig.__init__
        with patch.object(vllm.config.ModelConfig, "__init__", small):
            yield paths, _used
