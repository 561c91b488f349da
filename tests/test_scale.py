"""The scale simulation: traffic, policies with answers known by hand, and the page computed from it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import scale, scale_report
from benchmarks.pages import filled
from benchmarks.scale_constants import measure
from benchmarks.scale_model import DESIGNS, SHAPES, Design, Load, Shape, demands
from benchmarks.scale_simulation import POLICIES, Fleet, by_budget, ideal, run, serve
from benchmarks.scale_traffic import Request, Traffic, requests, system_prompts

DOCS = Path(__file__).resolve().parents[1] / "docs"
SMALL = Traffic(count=70, applications=6, documents=4, open=10, seed=5)
SHIPPED, _, _, SHALLOWEST, FIFO = POLICIES


@pytest.fixture(scope="module")
def stream() -> list[Request]:
    return list(requests(SMALL))


@pytest.fixture(scope="module")
def recorded() -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads((DOCS / "benchmarks" / "scale.json").read_text(encoding="utf-8"))
    return found


# Traffic.


def test_traffic_comes_from_its_seed_alone(stream: list[Request]) -> None:
    again, other = list(requests(SMALL)), list(requests(Traffic(count=70, applications=6, open=10, seed=6)))
    assert all(np.array_equal(one.prompt, two.prompt) for one, two in zip(stream, again, strict=True))
    assert not all(np.array_equal(one.prompt, two.prompt) for one, two in zip(stream, other, strict=True))


def test_applications_are_chosen_by_zipfs_law() -> None:
    traffic = Traffic(count=3000, applications=8, documents=2, turns=1.0, open=1, system=8, document=2)
    heads = {tuple(prompt.tolist()): rank for rank, prompt in enumerate(system_prompts(traffic))}
    sizes = {len(head) for head in heads}
    chosen = Counter(
        next(heads[head] for size in sizes if (head := tuple(request.prompt[:size].tolist())) in heads)
        for request in requests(traffic)
    )
    harmonic = sum(1 / k for k in range(1, 9))
    for rank in range(8):
        expected = 3000 / harmonic / (rank + 1)
        assert abs(chosen[rank] - expected) < 4 * expected**0.5, (rank, chosen[rank], expected)


def test_a_conversation_goes_on_where_it_was_or_where_it_parted(stream: list[Request]) -> None:
    history: dict[int, np.ndarray] = {}
    on, parted = 0, 0
    for request in stream:
        if request.conversation in history:
            last = history[request.conversation]
            size = min(last.size, request.prompt.size)
            agreed = np.array_equal(last[:size], request.prompt[:size])
            on += agreed
            parted += not agreed
        history[request.conversation] = np.concatenate((request.prompt, request.answer))
    assert on > 10 * parted > 0


# What is found.


@pytest.mark.parametrize("policy", list(POLICIES))
def test_with_no_limit_a_run_finds_what_a_dictionary_of_all_prefixes_does(
    policy: str, stream: list[Request]
) -> None:
    hits, _ = ideal(stream, system_prompts(SMALL))
    assert run(SMALL, stream, policy, None).hits == hits


@pytest.mark.parametrize("policy", list(POLICIES))
def test_with_less_room_less_is_found(policy: str) -> None:
    rates = by_budget(SMALL, policy, (0.02, 0.1, 0.4))
    assert rates[0] < rates[1] < rates[2] < rates[3] < 1


def test_a_run_repeats_itself(stream: list[Request]) -> None:
    assert run(SMALL, stream, SHIPPED, 600) == run(SMALL, stream, SHIPPED, 600)


def by_hand(*prompts: list[int]) -> list[Request]:
    return [Request(i, np.array(prompt), np.zeros(0, np.int64)) for i, prompt in enumerate(prompts)]


NONE = Traffic(applications=0)
"""No system prompts are served before."""


def line(first: int, size: int) -> list[int]:
    return list(range(first, first + size))


@pytest.mark.parametrize(("policy", "hits"), [(SHIPPED, 9 + 9), (FIFO, 9)])
def test_what_was_used_again_outlives_what_came_first_only_by_recency(policy: str, hits: int) -> None:
    """Room for two of ten tokens: a, b, a again, c. LRU then has a still, first in, first out has not."""
    a, b, c = line(100, 10), line(200, 10), line(300, 10)
    assert run(NONE, by_hand(a, b, a, c, a), policy, 20).hits == hits


@pytest.mark.parametrize(("policy", "hits"), [(SHIPPED, 10 + 10), (SHALLOWEST, 10)])
def test_of_one_path_the_deepest_goes_first_and_what_is_left_is_of_use(policy: str, hits: int) -> None:
    root = line(100, 10)
    one, two, new = root + line(200, 10), root + line(300, 10), line(400, 20)
    # Room for 40. Root, one and two take 30; new is 10 too many, and one's branch goes. The next 10 are too
    # many again: now root and two are the oldest, used together, and the order among equals decides.
    stream = by_hand(one, two, new, line(500, 10), root + line(600, 5))
    assert run(NONE, stream, policy, 40).hits == hits


def test_pinned_system_prompts_stay_where_they_would_have_gone() -> None:
    traffic = Traffic(applications=1, system=10)
    (prompt,) = system_prompts(traffic)
    size = prompt.size
    stream = by_hand(line(100_000, 30), line(200_000, 30), [*prompt.tolist(), 7])
    unpinned, pinned = (run(traffic, stream, policy, size + 30).hits for policy in list(POLICIES)[:2])
    assert (unpinned, pinned) == (0, size)


def test_a_shared_store_makes_up_for_turns_that_move_and_a_small_one_for_fewer() -> None:
    hits, _ = ideal(list(requests(SMALL)))
    alone, shared, home = (
        serve(SMALL, fleet) for fleet in (Fleet(store=0), Fleet(), Fleet(stays=1.0, store=0))
    )
    assert alone.remote == home.remote == 0
    assert alone.hits < home.hits < hits
    assert alone.hits < shared.hits <= hits
    assert shared.remote > 0
    assert shared.nbytes > 0
    assert serve(SMALL, Fleet()) == shared
    part = serve(SMALL, Fleet(store=shared.nbytes // 5))
    assert part.nbytes <= shared.nbytes // 5
    assert part.remote < shared.remote


# Arithmetic.


def test_a_token_weighs_what_its_models_shape_says() -> None:
    assert {shape.name: shape.token for shape in SHAPES} == {
        "Llama-3-8B": 128 * 1024,
        "Llama-3-70B": 320 * 1024,
        "Llama-3.1-405B": 504 * 1024,
    }
    assert SHAPES[0].quantized().token == 68 * 1024


CONSTANTS = {
    "memory": {"node": 100.0, "token": 10.0},
    "match": {"node": 1e-3, "token": 1e-6},
    "begin": {"found": 2e-3},
    "key": {"token": 1e-6},
    "stores": {"here": {"put": 1e6, "get": 2e6, "prefix": 0.5}},
}


def test_demands_are_what_one_computes_by_hand() -> None:
    load = Load(
        hosts=10, conversations=1000, interval=10.0, context=100, new=50, length=200, turns=4,
        fabric=1e6, memory=1e6,
    )  # fmt: skip
    shape = Shape("tiny", 1, 1, 2)  # 8 bytes a token
    found = {
        demand.resource: demand.needed
        for demand in demands(load, shape, Design("half", 0.5, 1.0), CONSTANTS, "here")
    }
    reads, writes = 100 * 50 * 8, 100 * 50 * 8  # 100 requests per second
    assert found == pytest.approx(
        {
            "the fabric": (reads + writes) / 1e9,
            "servers of the shared tier": reads / 2e6 + writes / 1e6,
            "their directory": 50.0,
            "room for K and V": 1000 * 200 * 8 / 1e12,
            "a host: its radix tree": 100 * (4 * 100 + 200 * 10) / 1e9,
            "a host: walks through it": 10 * (4 * 1e-3 + 100 * 1e-6),
            "a host: begin and close": 10 * 2e-3,
            "a host: keys": 10 * 150 * 1e-6,
            "one radix tree for all hosts": 1000 * (4 * 100 + 200 * 10) / 1e9,
            "walks through that": 100 * (4 * 1e-3 + 100 * 1e-6),
        }
    )


def test_each_design_asks_no_more_of_the_fabric_and_of_room_than_the_one_before() -> None:
    for resource in (0, 3):
        shares = [demands(Load(), SHAPES[0], design, CONSTANTS, "here")[resource].share for design in DESIGNS]
        assert shares == sorted(shares, reverse=True)


# The page.


def test_the_tables_of_the_page_are_computed_from_what_was_recorded(recorded: Mapping[str, Any]) -> None:
    page = (DOCS / "scaling.md").read_text(encoding="utf-8")
    assert filled(page, scale_report.tables(recorded)) == page
    assert set(re.findall(r"<!-- table: ([a-z-]+) -->", page)) == set(scale_report.TABLES)


def test_what_was_recorded_is_no_glance_and_holds_together(recorded: Mapping[str, Any]) -> None:
    assert recorded["quick"] is False
    for seeds in recorded["simulation"]["policies"].values():
        assert all(rates == sorted(rates) for rates in seeds)


def test_constants_are_measured() -> None:
    found = measure(quick=True)
    assert 200 < found["memory"]["node"] < 20_000
    assert 8 <= found["memory"]["token"] < 200  # the edge's own tokens are 8 bytes each
    assert found["match"]["node"] > 0
    assert found["key"]["token"] > 0
    assert found["begin"]["found"] > 0
    for figures in found["stores"].values():
        assert figures["put"] > 0
        assert figures["get"] > 0


def test_one_command_writes_record_and_tables(
    tmp_path: Path, recorded: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.scale_constants.measure", lambda quick: recorded["constants"])
    monkeypatch.setattr(scale, "Traffic", lambda count, open: Traffic(count=6, applications=2, open=4))
    page, record = tmp_path / "scaling.md", tmp_path / "benchmarks" / "scale.json"
    page.write_text("<!-- table: policies -->\n<!-- end -->\n", encoding="utf-8")
    scale.main(["--quick", "--docs", str(tmp_path)])
    written = page.read_text(encoding="utf-8"), record.read_text(encoding="utf-8")
    assert SHIPPED in written[0]
    scale.main(["--write", "--docs", str(tmp_path)])
    assert (page.read_text(encoding="utf-8"), record.read_text(encoding="utf-8")) == written
