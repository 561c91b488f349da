"""LMCache's own keys of chunks, under ours: every context and pair that its names tell apart."""

from __future__ import annotations

from typing import Any

import torch
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.token_database import ChunkedTokenDatabase

from ....isolation import faces
from ....isolation.cells import cells, check_cell, walks
from ....isolation.contexts import BLOCK, IDS, WHOLE, Context

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
