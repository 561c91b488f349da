"""Tokens are those of vLLM alone, and what is stored is not computed again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from vllm.config import PoolerConfig

from kvcache import InvalidRangeError, NotSupportedError
from kvcache.stores import open_store

from .engines import (
    NEEDS_FP8,
    Answer,
    answer,
    beside_rejecting,
    engine,
    sampling,
    tokens_of,
    transfer,
    worker,
)
from .models import prompt, write_model

PAGE = 64


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"file://{tmp_path / 'store'}?durable=no"


LONG = [prompt(1, 300), prompt(2, 200), [*prompt(1, 130), *prompt(3, 90)], prompt(4, 40)]


@pytest.fixture(scope="module")
def alone(llama: Path) -> dict[str, list[list[int]]]:
    with engine(llama) as plain:
        return {"LONG": plain.tokens(LONG), "LONG 80": plain.tokens(LONG, 80)}


def twice(model: Path, store: Any, expected: list[list[int]], **options: Any) -> Iterator[list[Answer]]:
    """The answers to LONG of an engine, and of another one after it."""
    for _ in range(2):
        with engine(model, store, **options) as one:
            found = one.keep(LONG)
        assert tokens_of(found) == expected
        yield found


def test_a_second_engine_computes_only_the_rest(
    llama: Path, store: str, alone: dict[str, list[list[int]]]
) -> None:
    with engine(llama, store) as first:
        found = first.keep(LONG)
        assert tokens_of(found) == alone["LONG"]
        assert found[0].cached == 0
    with engine(llama, store) as second:
        found = second.generate(LONG)
        assert tokens_of(found) == alone["LONG"]
        assert [one.cached for one in found] == [256, 192, 192, 0]
        counts = second.counts()
        assert counts["tokens_found"] == 256 + 192 + 192
        assert counts["pages_lost"] == counts["lookups_timed_out"] == 0


def test_another_config_beside_the_same_weights_is_another_model(
    llama: Path, store: str, tmp_path: Path
) -> None:
    with engine(llama, store) as first:
        first.keep(LONG[:1])
    config = json.loads((llama / "config.json").read_text(encoding="utf-8"))
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 100.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with engine(llama, store, hf_config_path=str(tmp_path)) as second:
        assert second.generate(LONG[:1])[0].cached == 0


def test_a_mean_of_all_tokens_is_computed_of_all_tokens(llama: Path, store: str, tmp_path: Path) -> None:
    words = models.WordLevel({f"w{i}": i for i in range(512)}, unk_token="w0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="w0", pad_token="w1")
    shutil.copytree(llama, tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    options = {"runner": "pooling", "convert": "embed", "skip_tokenizer_init": False}
    pooler, given = PoolerConfig(seq_pooling_type="MEAN"), [{"prompt_token_ids": LONG[0]}]
    with engine(tmp_path / "model", store, pooler_config=pooler, **options) as one:
        found = []
        for _ in range(2):
            found.append(one.llm.embed(given, use_tqdm=False)[0].outputs.embedding)
            one.written()
    assert found[0] == found[1]


RUN = """
import json, sys
sys.path.insert(0, {folder!r})
import conftest
from pathlib import Path
from engines import engine
if __name__ == "__main__":
    with engine(Path({model!r}), {store!r}, **{options!r}) as one:
        print("FOUND", json.dumps([[a.tokens, a.cached] for a in one.generate({prompts!r})]))
"""


def run(model: Path, store: str, environment: dict[str, str] | None = None, **options: Any) -> list[Any]:
    """Tokens and cached tokens of LONG, in processes of their own."""
    text = RUN.format(
        folder=str(Path(__file__).parent), model=str(model), store=store, prompts=LONG, options=options
    )
    done = subprocess.run(
        [sys.executable, "-c", text],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "FOUND" in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.split("FOUND", 1)[1].splitlines()[0])


def test_a_second_process_computes_only_the_rest(
    llama: Path, store: str, alone: dict[str, list[list[int]]]
) -> None:
    for together in ([0, 0, 128, 0], [256, 192, 192, 0]):
        found = run(llama, store)
        assert [tokens for tokens, _ in found] == alone["LONG"]
        assert [cached for _, cached in found] == together


def test_two_ranks_that_each_have_pages_of_their_own(
    llama: Path, tmp_path: Path, alone: dict[str, list[list[int]]]
) -> None:
    folder = tmp_path / "store"
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    for cached in ([0, 0, 128, 0], [256, 192, 192, 0]):
        found = run(llama, f"file://{folder}?durable=no", environment, tensor_parallel_size=2)
        assert [tokens for tokens, _ in found] == alone["LONG"]
        assert [count for _, count in found] == cached
    (pages := [*(folder / "pages").glob("*.entry")]).sort(key=lambda file: file.stat().st_mtime)
    assert len(pages) == 2 * (4 + 3 + 1)
    assert len({file.read_bytes()[-1500:-512] for file in pages}) == len(pages)  # other heads


def test_what_was_generated_is_stored_too(llama: Path, store: str, alone: dict[str, list[list[int]]]) -> None:
    with engine(llama, store) as one:
        tokens = one.keep(LONG[:1], 80)[0].tokens
        assert tokens == alone["LONG 80"][0]
        later = one.generate([[*LONG[0], *tokens]])[0]
        assert later.cached == (300 + 80 - 1) // PAGE * PAGE
        assert one.generate([[*LONG[0], *tokens]])[0].tokens == later.tokens


def test_a_prefix_in_part_in_vllm_and_in_part_in_the_store(
    llama: Path, store: str, alone: dict[str, list[list[int]]]
) -> None:
    with engine(llama, store) as one:
        one.keep([LONG[0]])
        one.tokens([LONG[0][:101]])  # vLLM has three blocks of 32 again: half a page more than one
        found = one.generate([LONG[0]])[0]
        assert (found.tokens, found.cached) == (alone["LONG"][0], 256)


def test_salts_are_kept_apart(llama: Path, store: str) -> None:
    with engine(llama, store) as one:
        for salt in ("a", None):
            one.keep([LONG[0]], salts=[salt])
            assert one.keep([LONG[0]], salts=["b"])[0].cached == (0 if salt == "a" else 256)
        for salt in ("a", "b", None):
            assert one.generate([LONG[0]], salts=[salt])[0].cached == 256
            one.forget()
        assert one.generate([LONG[0]], salts=["c"])[0].cached == 0


@pytest.mark.parametrize("options", [{"max_num_batched_tokens": 48}, {"max_num_seqs": 2}], ids=str)
def test_prompts_in_parts_and_few_at_a_time(
    llama: Path, store: str, alone: dict[str, list[list[int]]], options: dict[str, int]
) -> None:
    for answers, least in zip(twice(llama, store, alone["LONG"], **options), (128, 640), strict=True):
        assert sum(answer.cached for answer in answers) >= least


def test_preempted_requests_go_on(llama: Path, store: str, alone: dict[str, list[list[int]]]) -> None:
    for _ in range(2):
        with engine(llama, store, num_gpu_blocks_override=20, max_model_len=512) as one:
            assert tokens_of(one.keep(LONG, 80)) == alone["LONG 80"]
            assert any(
                metric.value for metric in one.llm.get_metrics() if metric.name == "vllm:num_preemptions"
            )
            assert one.tokens(LONG, 80) == alone["LONG 80"]


def test_aborted_requests_leave_nothing_behind(
    llama: Path, store: str, alone: dict[str, list[list[int]]]
) -> None:
    with engine(llama, store) as one:
        one.keep(LONG)
        front = one.llm.llm_engine
        for number in range(12):
            front.add_request(f"{number}", {"prompt_token_ids": LONG[number % 3]}, sampling(12))
        front.abort_request(["0", "5"])
        answers = {}
        steps = 0
        while front.has_unfinished_requests():
            for output in front.step():
                answers[output.request_id] = answer(output)
            steps += 1
            if steps in (1, 2, 3):
                front.abort_request([str(steps)])
        kept = {str(number) for number in range(12)} - {"0", "5", "1", "2", "3"}
        assert {name: answers[name].tokens for name in kept} == {
            name: alone["LONG"][int(name) % 3] for name in kept
        }
        planner = one.connector._planner
        while one.core.scheduler.has_requests():  # loads of what was aborted end by themselves
            one.core.step()
        assert not planner._tracked
        assert not worker()._worker.transfers._loading
        pool = one.core.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_and_dtypes(llama: Path, store: str, dtype: str, block: int) -> None:
    config = transfer(store, page_tokens=128)
    with engine(llama, dtype=dtype, block_size=block) as plain:
        expected = plain.tokens(LONG)
    _, found = twice(llama, config, expected, dtype=dtype, block_size=block)
    assert [answer.cached for answer in found[:2]] == [256, 128]


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"kv_cache_dtype": "fp8"}, marks=NEEDS_FP8)], ids=["auto", "fp8"]
)
def test_raw_pages(llama: Path, store: str, options: dict[str, str]) -> None:
    config = transfer(store, pages="raw")
    with engine(llama, **options) as plain:
        expected = plain.tokens(LONG)
    assert [found[0].cached for found in twice(llama, config, expected, **options)] == [0, 256]


@pytest.mark.parametrize(
    "options",
    [{"dtype": "float32"}, pytest.param({"dtype": "bfloat16", "kv_cache_dtype": "fp8"}, marks=NEEDS_FP8)],
    ids=["float32", "fp8"],
)
def test_pages_of_another_cache_dtype_are_another_cache(
    llama: Path, store: str, options: dict[str, str]
) -> None:
    with engine(llama, store, dtype="bfloat16") as one:
        one.keep(LONG[:1])
    with engine(llama, store, **options) as one:
        assert one.generate(LONG[:1])[0].cached == 0


def test_other_weights_are_another_model(llama: Path, store: str, tmp_path: Path) -> None:
    with engine(llama, store) as one:
        one.keep(LONG[:1])
    other = write_model(tmp_path / "other", "llama", rms_norm_eps=1e-4)
    with engine(other, store) as one:
        assert one.generate(LONG[:1])[0].cached == 0


def test_roles_that_only_read_and_only_write(llama: Path, store: str) -> None:
    with engine(llama, transfer(store, role="kv_producer")) as one:
        one.keep(LONG[:1])
        assert one.generate(LONG[:1])[0].cached == 0
    with engine(llama, transfer(store, role="kv_consumer")) as one:
        assert one.generate(LONG[:2])[0].cached == 256
        assert one.counts()["pages_stored"] == 0


def test_reset_finds_nothing_again_and_nobody_else_what_comes_after(llama: Path, store: str) -> None:
    with engine(llama, store) as one:
        one.keep(LONG[:1])
        assert one.llm.reset_prefix_cache(reset_connector=True)
        assert one.generate(LONG[:2])[0].cached == 0
        one.written()
        one.forget()
        assert one.generate(LONG[:2])[1].cached == 192
    with engine(llama, store) as one:
        assert [found.cached for found in one.generate(LONG[:2])] == [256, 0]


def test_several_tiers(llama: Path, tmp_path: Path) -> None:
    urls = [f"file://{tmp_path / name}?durable=no" for name in ("near", "far")]
    with engine(llama, transfer(urls)) as one:
        one.keep(LONG[:1])
    for url in urls:
        with open_store(url) as held:
            assert held.usage().entries == 300 // PAGE
    with engine(llama, transfer([f"file://{tmp_path / 'new'}?durable=no", urls[1]])) as one:
        assert one.generate(LONG[:1])[0].cached == 256


def test_host_memory_where_one_process_does_all(llama: Path) -> None:
    with engine(llama, "memory:?budget=64MiB") as one:
        one.keep(LONG[:1])
        assert one.generate(LONG[:1])[0].cached == 256


def test_a_page_that_was_lost_is_written_again_from_what_vllm_still_has(llama: Path, store: str) -> None:
    with engine(llama, store) as one:
        one.tokens(LONG[:1])
        one.written()
        with open_store(store) as held:
            keys = one.keys(LONG[0], 256)
            assert held.delete(keys[1])
        found = one.generate([[*LONG[0][:150], *prompt(9, 100)]])[0]  # the store has one page of it now
        assert found.cached == 128
        one.written()
        with open_store(store) as held:
            assert held.prefix(keys) == 4


def test_windows_beside_full_attention_are_served_and_windows_alone_refused(
    store: str, tmp_path: Path
) -> None:
    mixed = write_model(
        tmp_path / "mixed",
        "gemma3_text",
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"],
    )
    with engine(mixed) as plain:
        expected = plain.tokens(LONG)
    assert [found[0].cached for found in twice(mixed, store, expected)] == [0, 256]
    windows = write_model(tmp_path / "windows", "mistral", sliding_window=64)
    said = "a KV cache of SlidingWindowSpec is not supported"
    with pytest.raises(NotSupportedError, match=said), engine(windows, store):
        raise AssertionError("it was served")


def test_options_that_are_none_are_said_at_the_start(llama: Path) -> None:
    wrong = transfer("memory:", storage="file:///x")
    with pytest.raises(InvalidRangeError, match="'storage' is not an option"), engine(llama, wrong):
        raise AssertionError("it was served")


def test_handshake_metadata_of_another_connector_are_refused(llama: Path) -> None:
    behind = beside_rejecting("memory:", first=False, handshake=True)
    said = "handshake metadata are Handshake: .*; name KVCacheConnector before that one"
    with pytest.raises(NotSupportedError, match=said), engine(llama, behind):
        raise AssertionError("it was served")
