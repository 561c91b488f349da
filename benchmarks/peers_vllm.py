"""vLLM's tests of connectors, with ours in the place of ExampleConnector.

They only schedule: the model is a config, of which theirs would be downloaded.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

import vllm.config
from transformers import OPTConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from benchmarks.peers_tests import named, tokenizer
from kvcache.integrations.vllm import KVCacheConnector
from kvcache.integrations.vllm.connector import PagesMetadata

LEFT_OUT: dict[str, str] = {}
"""Patterns of tests that are not run, and why."""

_used: Counter[str] = Counter()


class _Connector(KVCacheConnector):  # type: ignore[misc]
    """With a store in memory, whose pages have the format that a worker would have told."""

    def __init__(self, config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        config = copy.copy(config)
        config.kv_transfer_config = copy.copy(config.kv_transfer_config)
        config.kv_transfer_config.kv_connector_extra_config = {"store": "memory:", "identity": {"model": "m"}}
        super().__init__(config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.set_xfer_handshake_metadata({0: PagesMetadata("{}")})
        _used["KVCacheConnector"] += 1


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
        with named(tests, ExampleConnector=_Connector):
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
