"""LMCache's own keys of chunks, under ours, and what its server finds in our stores: every context and pair
that its names tell apart.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.distributed.api import ObjectKey, ipc_key_to_object_keys
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.token_database import ChunkedTokenDatabase

from kvcache.integrations.lmcache.chunks import identity_of_model

from ....isolation import faces
from ....isolation.cells import cells, check_cell, walks
from ....isolation.contexts import BLOCK, IDS, WHOLE, Context
from .test_l2_adapter import SHAPE, get, open_server, until

walked = walks()


class OfDatabase(faces.OfLMCache):
    """Of a request with its tags, as LMCache's database of tokens makes them."""

    def keys(self, context: Context, tags: dict[str, Any]) -> list[Any]:
        size, dtype = 1 + ("rank" in context), torch.bfloat16 if "dtype" in context else torch.float32
        metadata = LMCacheMetadata("m", size, size, 0, 0, dtype, (1, 2, BLOCK, 1, 8), chunk_size=BLOCK)
        config = LMCacheEngineConfig.from_defaults(chunk_size=BLOCK)
        made = ChunkedTokenDatabase(config, metadata)
        return [key for _, _, key in made.process_tokens(IDS[:WHOLE], request_configs=tags)]


@cells([OfDatabase])
def test_chunks_of_the_database_of_tokens(
    face: Any, tier: str, dimension: str, walked: Any, record_property: Any
) -> None:
    check_cell(face, tier, dimension, walked, record_property)


class OfServer(faces.OfLMCacheServer):
    """One server for each model; its memory forgets after each request what then is in our store alone."""

    face = replace(
        faces.OfLMCacheServer.face,
        tiers=dict.fromkeys(faces.OfLMCacheServer.face.tiers, ("folder",)),
        told={},
    )

    def __init__(self, tier: str, folder: Path) -> None:
        super().__init__(tier, folder)
        self.url = f"file://{folder / 'store'}?durable=no"
        self._servers: dict[Context, StorageManager] = {}

    def keys(self, context: Context, salt: str) -> list[ObjectKey]:
        ranks = 1 + ("rank" in context)
        asked = IPCCacheServerKey("m", ranks, 0, tuple(IDS), 0, WHOLE, "r", cache_salt=salt)
        hashes = [ObjectKey.IntHash2Bytes(chunk) for chunk in range(WHOLE // BLOCK)]
        return ipc_key_to_object_keys(asked, hashes, [0])[0]

    def ask(self, context: Context) -> int:
        model = context & faces.MODEL
        if model not in self._servers:
            identity = identity_of_model(str(faces.written(self.folder, model)))
            self._servers[model] = open_server(self.url, identity)
        server = self._servers[model]
        keys = self.keys(context, self.salt(context))
        found = get(server, keys)
        for i, tensor in enumerate(found):
            assert torch.equal(tensor, content(context, i)), context
        if missing := keys[len(found) :]:
            ((_, adapter),) = server.l2_adapters()
            before = adapter.report_status()["written"]
            memory = server.reserve_write(missing, SHAPE)
            for i, key in enumerate(missing, len(found)):
                memory[key].tensor.copy_(content(context, i))
            server.finish_write(missing)
            until(lambda: adapter.report_status()["written"] == before + len(missing))
        until(lambda: server.delete_l1_keys(keys)[1] == 0)
        return BLOCK * len(found)

    def close(self) -> None:
        for server in self._servers.values():
            server.close()


def content(context: Context, chunk: int) -> torch.Tensor:
    """What a chunk has in a context."""
    seed = int.from_bytes(hashlib.sha256(repr((sorted(context), chunk)).encode()).digest()[:7])
    return torch.randn(SHAPE.shapes[0], generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@cells([OfServer])
def test_objects_of_the_server(
    face: Any, tier: str, dimension: str, walked: Any, record_property: Any
) -> None:
    check_cell(face, tier, dimension, walked, record_property)
