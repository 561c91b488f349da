"""Our stores as a tier below vLLM's own host memory, scheduled by vLLM's OffloadingConnector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig

from kvcache import InvalidRangeError

from .engines import BLOCK, Engine, engine, tokens_of
from .models import prompt, write_model
from .test_runtimes import with_transformers
from .test_serving import LONG

CHUNK = 2 * BLOCK


def tiers(store: str, connector: str = "KVCacheOffloadingConnector", chunk: int = CHUNK, **tier: Any) -> Any:
    """vLLM's tiers over a store; vLLM's own connector names chunks by its hashes."""
    ours = connector == "KVCacheOffloadingConnector"
    return KVTransferConfig(
        kv_connector=connector, kv_connector_module_path="kvcache.integrations.vllm" if ours else None,
        kv_role="kv_both",
        kv_connector_extra_config={
            "spec_name": "CPUTieringSpec",
            "spec_module_path": "tests.integrations.vllm.running.cpu_offloading",
            "cpu_bytes_to_use": 64 << 20, "blocks_per_chunk": chunk // BLOCK,
            "secondary_tiers": [
                {"type": "KVCacheTier", "module_path": "kvcache.integrations.vllm", "store": store, **tier}
            ],
        },
    )  # fmt: skip


OWN: dict[str, Any] = {"connector": "OffloadingConnector", "identity": {"model": "m"}}


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"file://{tmp_path / 'store'}?durable=no"


@pytest.fixture(scope="module")
def alone(llama: Path) -> list[list[int]]:
    with engine(llama) as plain:
        return plain.tokens(LONG)


def keep(one: Engine, prompts: list[list[int]], count: int = 12, **options: Any) -> list[Any]:
    """As ``generate``; what was computed is in the stores then, and in vLLM's memory."""
    answers = one.generate(prompts, count, **options)
    one.generate([prompt(99, 5)], 4)  # vLLM copies what a step computed in the next one
    for tier in one.connector.scheduler.manager.secondary_tiers:
        with tier._changed:
            assert tier._changed.wait_for(lambda tier=tier: not tier._running, 20)
    return answers


@pytest.mark.parametrize("how", [{}, OWN], ids=["ours", "vLLM's"])
def test_a_second_engine_finds_what_the_first_has_stored(
    llama: Path, store: str, alone: list[list[int]], how: dict[str, Any]
) -> None:
    for stored in ([0, 0], [256, 192]):
        with engine(llama, tiers(store, **how)) as one:
            answers = keep(one, LONG)
            assert tokens_of(answers) == alone
            assert [answer.cached for answer in answers[:2]] == stored


def test_a_conversation_goes_on_in_transformers_and_back(tmp_path: Path, store: str) -> None:
    """Chunks of a model whose K and V are transformers' are pages of our caches."""
    folder, page, start = write_model(tmp_path / "model", "llama"), 4 * BLOCK, prompt(7, 300)
    with engine(folder) as plain:
        (answer,) = plain.tokens([start], 120)
    with engine(folder, tiers(store, chunk=page)) as one:
        assert keep(one, [start], 1)[0].cached == 0
    middle = [*start, *answer[:100]]
    found, restored = with_transformers(folder, store, start, 100)
    assert [*start, *found] == middle
    assert restored == 256
    with engine(folder, tiers(store, chunk=page)) as one:
        (last,) = one.generate([middle], 20)
        assert last.tokens == answer[100:]
        assert last.cached == 384, "of which transformers has stored the end"


def test_windows_beside_full_attention_keep_groups_of_their_own(tmp_path: Path, store: str) -> None:
    folder = write_model(
        tmp_path / "model",
        "gemma3_text",
        sliding_window=96,
        layer_types=["sliding_attention", "full_attention"],
    )
    with engine(folder) as plain:
        expected = plain.tokens(LONG)
    for some in (False, True):
        with engine(folder, tiers(store)) as one:
            assert len(one.connector.scheduler.manager.secondary_tiers[0].tokens) == 2
            answers = keep(one, LONG)
            assert tokens_of(answers) == expected
            assert (answers[0].cached > 0) == some


def test_tenants_and_other_models_find_nothing(llama: Path, store: str) -> None:
    with engine(llama, tiers(store)) as one:
        keep(one, LONG[:1], salts=["a"])
    with engine(llama, tiers(store)) as one:
        found = [one.generate(LONG[:1], salts=[salt])[0].cached for salt in ("b", None, "a")]
        assert found == [0, 0, 256]
    with engine(llama, tiers(store, identity={"model": "of other weights"})) as one:
        assert one.generate(LONG[:1], salts=["a"])[0].cached == 0


def test_damaged_chunks_are_computed_again(
    llama: Path, store: str, tmp_path: Path, alone: list[list[int]]
) -> None:
    with engine(llama, tiers(store)) as one:
        keep(one, LONG)
    damaged: dict[Path, bytes] = {}
    for file in (tmp_path / "store").rglob("*.entry"):
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)
        damaged[file] = bytes(raw)
    with engine(llama, tiers(store)) as one:
        answers = keep(one, LONG)
        assert tokens_of(answers) == alone
        assert answers[0].cached == 0
    assert damaged
    assert all(file.read_bytes() != raw for file, raw in damaged.items()), "they were written again"


def test_after_a_reset_nothing_earlier_is_found(llama: Path, store: str, alone: list[list[int]]) -> None:
    with engine(llama, tiers(store)) as one:
        keep(one, LONG)
        assert one.llm.reset_prefix_cache(reset_connector=True)
        answers = keep(one, LONG)
        assert tokens_of(answers) == alone
        assert answers[0].cached == 0
    with engine(llama, tiers(store)) as one:
        assert keep(one, LONG)[0].cached == 256, "another process still finds what was stored before"


def test_a_connector_without_a_tier_of_ours_is_refused(llama: Path, store: str) -> None:
    config = tiers(store)
    config.kv_connector_extra_config["secondary_tiers"] = []
    with (
        pytest.raises(InvalidRangeError, match="secondary_tiers names no KVCacheTier"),
        engine(llama, config),
    ):
        pass
