"""Chunks below vLLM's manager of tiers, under its own hashes: every context and pair that is kept apart."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.request import Request

from ....isolation import faces
from ....isolation.cells import cells, check_cell, walks
from ....isolation.contexts import BLOCK, DIMENSIONS, OF_PROMPT, WHOLE, Context, prompt_of
from .test_tier_manager import open_manager, rows, until

walked = walks()


@pytest.fixture(scope="module", autouse=True)
def hashes() -> None:
    init_none_hash(sha256)


class OfManager(faces.OfVLLMTier):
    """Each request with a manager and a host memory of its own: what it finds is our store's."""

    face = replace(
        faces.OfVLLMTier.face,
        tiers={name: ("folder",) for name in DIMENSIONS if name != "embeddings"},
        told={},
    )

    def ask(self, context: Context) -> int:
        request = self.of_vllm(context)
        keys = [make_offload_key(one, 0) for one in request.block_hashes[: WHOLE // BLOCK]]
        names = ReqContext("r")
        for i, key in enumerate(keys):
            names.set_offload_key_position(key, (i + 1) * BLOCK)
        manager = open_manager(
            self.folder, BLOCK, self.model(context)[0], "fp8" if "format" in context else "float32",
            1 + ("rank" in context),
        )  # fmt: skip
        try:
            self.named(manager.secondary_tiers[0], request)
            manager.on_new_request(names)
            found = self.loaded(manager, keys, names, context)
            if missing := keys[found:]:
                output = manager.prepare_store(missing, names)
                for i, row in enumerate(output.store_spec.chunk_ids, found):
                    rows(manager)[row] = content(context, i, rows(manager).shape[1])
                manager.complete_store(missing, names)
                until(manager, lambda: not manager.has_pending_work())
        finally:
            manager.shutdown()
        return BLOCK * found

    def of_vllm(self, context: Context) -> Request:
        asked = self.request(context)
        lora = LoRARequest(
            "two" if "adapter" in context else "one", 1, asked.lora_request.lora_path, load_inplace=True
        )
        hasher = get_request_block_hasher(BLOCK, sha256)
        return Request(
            "r", asked.all_token_ids, SamplingParams(max_tokens=1), None, cache_salt=asked.cache_salt,
            lora_request=lora, mm_features=asked.mm_features, block_hasher=hasher,
        )  # fmt: skip

    def named(self, tier: Any, request: Request) -> None:
        """As ``KVCacheOffloadingConnector`` does, for chunks that only vLLM can read."""
        tier.name_by_tokens({}).begin(request)

    def loaded(self, manager: Any, keys: list[Any], names: ReqContext, context: Context) -> int:
        """How many leading chunks are found, each of which must be of this context."""
        last: list[LookupResult] = []

        def answered() -> bool:
            last[:] = [manager.lookup(key, names) for key in keys]
            return not {LookupResult.RETRY, LookupResult.HIT_PENDING} & {*last}

        until(manager, answered)
        found = [*last, LookupResult.MISS].index(LookupResult.MISS)
        for i, row in enumerate(manager.prepare_load(keys[:found], names).chunk_ids if found else ()):
            assert np.array_equal(rows(manager)[row], content(context, i, rows(manager).shape[1])), context
        if found:
            manager.complete_load(keys[:found], names)
        return found


class OfHashes(OfManager):
    """Under vLLM's own connector, whose hashes have only the name of an adapter."""

    face = replace(
        OfManager.face,
        tiers={
            name: tiers for name, tiers in OfManager.face.tiers.items() if name not in ("version", "scale")
        },
    )

    def named(self, tier: Any, request: Request) -> None: ...


def content(context: Context, chunk: int, size: int) -> np.ndarray:
    """What a chunk has in a context: it depends on that, and on the prompt so far."""
    depends = sorted(context - OF_PROMPT), prompt_of(context)[: (chunk + 1) * BLOCK]
    seed = hashlib.sha256(repr(depends).encode()).digest()
    return np.random.default_rng([*seed]).integers(0, 256, size, np.uint8)


@cells([OfManager])
def test_chunks_under_the_names_of_our_connector(
    face: Any, tier: str, dimension: str, walked: Any, record_property: Any
) -> None:
    check_cell(face, tier, dimension, walked, record_property)


@cells([OfHashes])
def test_chunks_under_vllms_own_hashes(
    face: Any, tier: str, dimension: str, walked: Any, record_property: Any
) -> None:
    check_cell(face, tier, dimension, walked, record_property)


def test_a_tier_that_forgets_the_salt_is_found_out(tmp_path: Path) -> None:
    """The walk sees what another tenant has stored."""

    class Forgetful(OfManager):
        def named(self, tier: Any, request: Request) -> None:
            request.cache_salt = None
            super().named(tier, request)

    face = Forgetful("folder", tmp_path)
    assert [face.ask(context) for context in (frozenset[str](), frozenset(["adapter"]))] == [0, 0]
    with pytest.raises(AssertionError):
        face.ask(frozenset(["salt"]))
