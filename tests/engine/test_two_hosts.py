"""Two hosts over one store: a conversation goes on elsewhere, and only what is new is computed there."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import ml
from kvcache.stores import MemoryStore, open_store
from kvcache_engine.loading import bundled_model
from kvcache_engine.tokenizer import Tokenizer

from ..rigs.servers import ValkeyServer

pytest.importorskip("valkey")
pytest.importorskip("xxhash")
pytest.importorskip("safetensors")


from benchmarks import two_hosts_report as report
from benchmarks.hosts.host import Host
from benchmarks.hosts.network import Network, unavailable
from benchmarks.hosts.processes import Process, store_server
from benchmarks.two_hosts_report import Decided, Point, break_even_bandwidth, break_even_length
from benchmarks.wire import link_speed

from ..needs import NO_SERVER, need_program

TURNS = ("And it came to pass in those days, that God said unto Noah,", " And Noah said,", " And God said,")
COUNT = 9
"""Tokens of an answer."""
BYTES = 2 * 4 * 2 * 32 * 4
"""K and V of one token in the bundled model: two, layers, heads, dims, F32."""

needs_server = pytest.mark.skipif(ValkeyServer.program() is None, reason=NO_SERVER)


def need_namespaces() -> None:
    """Skip the test where there are no network namespaces."""
    need_program("ip")
    need_program("tc")
    if reason := unavailable():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    need_namespaces()
    with Network() as found:
        yield found


@pytest.fixture(scope="module")
def there() -> list[str]:
    """Backends, those first that a process imports in less time."""
    found = {info.name for info in ml.available_backends() if info.available}
    return [name for name in ("mlx", "numpy", "torch") if name in found]


@pytest.fixture(scope="module")
def alone() -> list[dict[str, Any]]:
    """What one host says that has the conversation to itself."""
    with ml.open_backend("numpy") as backend, contextlib.closing(host(backend)) as only:
        return talk([only])


def host(backend: ml.Backend, store: Any = None, path: Path | None = None) -> Host:
    return Host(backend, path or bundled_model(), store, capacity=128)


def talk(hosts: Sequence[Host | Process]) -> list[dict[str, Any]]:
    """The answers to TURNS, each asked of the next host with all that was said before."""
    answers: list[dict[str, Any]] = []
    for i, text in enumerate(TURNS):
        tokens = answers[-1]["tokens"] if answers else []
        asked = {"tokens": tokens, "text": text, "max_tokens": COUNT}
        one = hosts[i % len(hosts)]
        answers.append(one.ask(asked) if isinstance(one, Host) else one.ask(**asked))
    return answers


def check(answers: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> None:
    """The same text, and nothing computed that any host had evaluated before."""
    assert [answer["tokens"] for answer in answers] == [answer["tokens"] for answer in expected]
    assert [answer["text"] for answer in answers] == [answer["text"] for answer in expected]
    known = 0
    for answer in answers:
        assert answer["computed"] == answer["prompt_tokens"] - known
        assert answer["restored"] + answer["local"] == known
        known = len(answer["tokens"]) - 1  # of the last token nobody has K and V


# Processes.


@needs_server
def test_a_conversation_goes_from_torch_to_mlx_to_numpy_and_nothing_is_computed_twice(
    tmp_path: Path, alone: list[dict[str, Any]], there: list[str]
) -> None:
    """NumPy's host is this process."""
    names = [name for name in ("torch", "mlx") if name in there]
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(store_server(tmp_path))
        hosts = [stack.enter_context(Process("--backend", name, "--store", url)) for name in names]
        last = host(stack.enter_context(ml.open_backend("numpy")), open_store(url))
        stack.callback(last.close)
        answers = talk([*(one.ready() for one in hosts), last])
    check(answers, alone)
    if len(names) == 2:
        assert [answer["local"] for answer in answers] == [0, 0, 0]
        assert answers[1]["restored"] > 0


@needs_server
def test_it_goes_on_in_another_network_namespace_and_its_pages_come_over_the_wire(
    tmp_path: Path, network: Network, alone: list[dict[str, Any]], there: list[str]
) -> None:
    near, far = network.ends
    network.limit(50e6)
    with (
        store_server(tmp_path, inside=near) as url,
        Process("--backend", there[0], "--store", url, inside=near) as first,
        Process("--backend", there[0], "--store", url, inside=far) as second,
    ):
        answers = talk([first.ready(), second.ready()])
        check(answers, alone)
        restored, computed = (
            second.ask(tokens=answers[-1]["tokens"], max_tokens=1, keep=False, **how)
            for how in ({"forget": True}, {"alone": True})
        )
    assert restored["tokens"] == computed["tokens"]
    assert (restored["restored"], restored["computed"]) == (restored["prompt_tokens"] - 1, 1)
    assert (computed["restored"], computed["computed"]) == (0, computed["prompt_tokens"])
    payload = restored["restored"] * BYTES
    assert payload <= restored["bytes_received"] <= 1.3 * payload + 16384
    assert computed["bytes_received"] < 2048


# Hosts in this process.


@needs_server
def test_a_host_whose_store_has_died_computes_the_rest_and_says_the_same(
    tmp_path: Path, alone: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    with ml.open_backend("numpy") as backend, contextlib.ExitStack() as stack:
        with store_server(tmp_path) as url:
            first, second = (
                stack.enter_context(contextlib.closing(host(backend, open_store(url)))) for _ in range(2)
            )
            begun = first.ask({"text": TURNS[0], "max_tokens": COUNT})
        answer = second.ask({"tokens": begun["tokens"], "text": TURNS[1], "max_tokens": COUNT})
        assert sum("its content is computed again" in record.getMessage() for record in caplog.records) == 1
    assert answer["tokens"] == alone[1]["tokens"]
    assert (answer["restored"], answer["computed"]) == (0, answer["prompt_tokens"])


def test_a_host_forgets_goes_alone_and_leaves_nothing_behind_when_told() -> None:
    store, tokens = MemoryStore(), Tokenizer.load(bundled_model()).encode(TURNS[0])
    asked = {"tokens": tokens, "max_tokens": 2}
    with ml.open_backend("numpy") as backend, contextlib.closing(host(backend, store)) as one:
        fresh = one.ask({**asked, "keep": False})
        assert store.usage().entries == 0
        again = one.ask(asked)
        assert (fresh["computed"], fresh["local"]) == (len(tokens), 0)
        assert (again["computed"], again["local"]) == (1, len(tokens) - 1)
        assert store.usage().entries > 0
        longer = {"tokens": again["tokens"], "max_tokens": 2}
        found = [one.ask({**longer, **how}) for how in ({"forget": True}, {"alone": True})]
        counts = [(answer["computed"], answer["restored"]) for answer in found]
        assert counts == [(1, len(tokens) + 1), (len(tokens) + 2, 0)]
        assert found[0]["tokens"] == found[1]["tokens"]


# The network.


def test_a_limited_cable_carries_no_more_than_its_limit(network: Network) -> None:
    network.limit(40e6)
    slow = link_speed(network, 40e6)
    network.limit(None)
    assert slow < 1.1 * 40e6
    assert link_speed(network, 4e9) > slow


def test_namespaces_are_gone_when_their_block_ends() -> None:
    need_namespaces()
    with pytest.raises(KeyError), Network() as found:
        assert {end.name for end in found.ends} <= {*names_of(os.getpid())}
        raise KeyError
    assert not {end.name for end in found.ends} & {*names_of(os.getpid())}


def names_of(pid: int) -> list[str]:
    """The namespaces that a process has made."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split() if name.startswith(f"kv{pid:x}-")]


# Figures.

POINTS = [
    Point(10, 1000, 1.0, {8e3: 4.0, None: 2.0}),
    Point(20, 2000, 2.0, {8e3: 5.0, None: 1.0}),
    Point(40, 4000, 6.0, {8e3: 5.0, None: 1.5}),
]


DECIDED = [Decided(0.05, 40, 0, 6.0, 9.0, 6.5), Decided(1.0, 40, 39, 1.0, 1.5, 6.5)]


def test_break_even_lengths_lie_where_the_lines_cross() -> None:
    assert break_even_length(POINTS, None) == 15.0  # the gap goes from -1 to 1 between 10 and 20
    assert break_even_length(POINTS, 8e3) == 35.0  # from -3 to 1 between 20 and 40
    assert break_even_length(POINTS[:2], 8e3) is None
    assert break_even_length(POINTS[1:], None) == 0.0
    dips = [Point(n, 1, 2.0, {None: seconds}) for n, seconds in ((1, 1.0), (2, 3.0), (3, 1.0))]
    assert break_even_length(dips, None) == 2.5


def test_break_even_bandwidth_is_what_makes_the_transfer_as_long_as_what_it_saves() -> None:
    assert break_even_bandwidth(POINTS[0]) is None
    assert break_even_bandwidth(POINTS[1]) == 8 * 2000 / 1.0
    assert break_even_bandwidth(POINTS[2]) == 8 * 4000 / 4.5


def test_tables_and_plots_are_those_of_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(report, "LINKS", (8e3, None))
    rows = [report.row_of(point) for point in POINTS]
    record = {
        "title": "a model", "backend": "torch", "machine": "a machine", "foreign_cores": 0.25, "rounds": 3,
        "new_tokens": 9, "links": [{"gigabits": 8e3, "measured": 0.1}, {"gigabits": None, "measured": 16.0}],
        "points": rows,
        "decisions": {
            "machine": "another", "foreign_cores": 0.5, "rounds": 3,
            "rows": [asdict(row) for row in DECIDED],
        },
    }  # fmt: skip
    report.write(tmp_path, {"models": {"one": record}})
    text = report.tables(report.load(tmp_path))
    assert text.startswith("### A model\n")
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert [{row.count("|") for row in rows} for rows in tables] == [{7}, {7}]
    assert "| 40 | 3.9 KiB | 6,000.0 | 5,000.0 | 1,500.0 | 7.11e-06 Gb/s |" in text
    assert "Restoring pays from: 35 tokens at 8000 Gb/s; 15 tokens at no limit." in text
    assert "| 0.05 Gb/s | 40 | recomputed | 6,000.0 | 9,000.0 | 6,500.0 |" in text
    assert "| 1 Gb/s | 40 | fetched 39 | 1,000.0 | 1,500.0 | 6,500.0 |" in text
    assert report.plot(record).count(b"<svg") == 1
    assert report.load(tmp_path) == json.loads(json.dumps({"models": {"one": record}}))


def test_of_what_is_recorded_slow_links_were_spared_and_no_others() -> None:
    for record in report.load(Path(__file__).resolve().parents[2] / "docs")["models"].values():
        rows = [Decided(**row) for row in record["decisions"]["rows"]]
        assert {(row.gigabits < 0.1, row.restored == 0) for row in rows} == {(True, True), (False, False)}
        for point in report.points_of(record):
            assert point.nbytes > point.tokens * BYTES
