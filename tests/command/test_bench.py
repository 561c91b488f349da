"""`kvcache bench`, and the timing under it: who is called how often, what is dropped, what is the floor."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import ml
from benchmarks.timing import Foreign, joined, machine, processor_seconds
from kvcache.testing.bench import decoding as bench
from kvcache.testing.bench.batch import Case
from kvcache.testing.bench.timing import (
    Contender,
    Round,
    Trial,
    interleave,
)
from ml import DType


def recorded(names: str) -> tuple[dict[str, Contender], list[str]]:
    calls: list[str] = []

    def contender(name: str) -> Contender:
        return Contender(
            lambda: calls.append(name), lambda: calls.append(f"+{name}"), lambda: calls.append(f"-{name}")
        )

    return {name: contender(name) for name in names}, calls


def test_each_round_calls_everyone_once_and_the_order_turns() -> None:
    contenders, calls = recorded("abc")
    trial = interleave(contenders, rounds=4, warmup=2)
    rounds = len(calls) // 9
    assert rounds >= 6
    for i in range(rounds):
        order = [calls[9 * i + 3 * k + 1] for k in range(3)]
        assert sorted(order) == ["a", "b", "c"]
        assert order[0] == "abc"[i % 3]
        assert [calls[9 * i], calls[9 * i + 2]] == [f"+{order[0]}", f"-{order[0]}"]
    assert {len(times) for times in trial.times.values()} == {len(trial.times["a"])}
    assert len(trial.times["a"]) + trial.dropped == rounds - 2


def test_ratios_refer_to_the_faster_floor_and_are_taken_round_by_round() -> None:
    trial = Trial({"slow": [4.0, 8.0, 6.0], "fast": [1.0, 4.0, 2.0], "ours": [2.0, 4.0, 5.0]}, floor="fast")
    assert trial.sample("ours").ratio == 2.0
    assert trial.sample("ours").median == 4.0
    contenders = {"slow": Contender(lambda: time.sleep(0.002)), "fast": Contender(lambda: None)}
    assert interleave(contenders, 3, floors=("slow", "fast")).floor == "fast"
    assert interleave(contenders, 3).floor == "slow"


def test_trials_are_joined_round_by_round_and_have_one_floor() -> None:
    first = Trial({"a": [2.0], "b": [1.0], "ours": [3.0]}, dropped=1, floor="b")
    second = Trial({"a": [2.0, 2.0], "b": [9.0, 9.0], "ours": [2.0, 4.0]}, dropped=2, floor="a")
    both = joined([first, second], floors=("a", "b"))
    assert both.times == {"a": [2.0, 2.0, 2.0], "b": [1.0, 9.0, 9.0], "ours": [3.0, 2.0, 4.0]}
    assert (both.floor, both.dropped, both.sample("ours").ratio) == ("a", 3, 1.5)


def test_a_trial_ends_when_its_time_is_over_and_keeps_what_it_has() -> None:
    found = interleave({"a": Contender(lambda: time.sleep(0.01))}, rounds=10_000, warmup=0, seconds=0.05)
    assert 1 <= len(found.times["a"]) < 100


def test_time_in_which_nothing_is_computed_counts_as_lost() -> None:
    watch = Round()
    time.sleep(0.05)
    assert watch.disturbed()
    assert watch.lost() > 0.5


def test_the_load_of_others_is_a_number_where_the_system_tells() -> None:
    foreign = Foreign()
    sum(range(10_000))
    cores = foreign.cores()
    assert (cores is None) == (processor_seconds() is None)
    assert cores is None or cores >= 0
    assert "Python" in machine()


@pytest.mark.parametrize("window", [0, 8])
@pytest.mark.parametrize("grow", [True, False])
def test_decoding_steps_store_a_token_in_every_layer(window: int, grow: bool) -> None:
    with ml.open_backend("numpy") as backend:
        decoding = bench.Decoding(backend, 20, 1, DType.F32, grow, window, capacity=40)
        contender = decoding.contender()
        for i in range(3):
            contender.prepare()
            views: Any = contender.call()
            assert len(views) == bench.LAYERS - 1
            seen = window or 20 + 1 + (i if grow else 0)
            for key, value in views:
                assert key.shape == value.shape
                assert key.shape[0] >= seen
                assert np.count_nonzero(key == 1) == (i + 1 if grow else 1) * bench.HEADS * bench.DIM
            contender.finish()
        assert decoding.cache.positions(0)[-1] == (22 if grow else 19)


@pytest.mark.parametrize("name", ["numpy", "torch", "mlx"])
def test_what_is_measured_has_a_row_for_ours_and_for_the_floor(name: str) -> None:
    if name != "numpy":
        pytest.importorskip({"torch": "torch", "mlx": "mlx.core"}[name])
    options = {} if name == "numpy" else {"device": "cpu"}
    with ml.open_backend(name, **options) as backend:
        cases = (Case("shared", 64, (20,) * 4), Case("ragged", 0, (10, 30, 50)))
        rows = list(bench.measure(backend, DType.F32, True, (16,), 32, peers=False, cases=cases))
    ours = [row for row in rows if row.contender == "ours"]
    assert [row.measurement for row in ours] == [
        "put + get of 1 after 16",
        "put + get of 512 after 32",
        "start_forward of 1 after 1024",
        "start_forward of 1 after 32768",
        "shared",
        "ragged",
    ]
    shared, ragged = (row.reads for row in ours[-2:])
    assert shared is not None
    assert (shared.cells, shared.shared, shared.saved, shared.gathered) == (64 + 4 * 20, 64, 64 * 3, 0)
    assert ragged is not None
    assert ragged.cells >= 10 + 30 + 50
    assert ragged.shared == 0
    assert all(f"reads {row.reads.cells:,} cells" in bench.shown(row) for row in ours if row.reads)
    floors = [row for row in rows if row.contender.startswith("floor")]
    assert {row.measurement for row in floors} == {row.measurement for row in ours[:2]}
    assert all((row.ratio is None) == bool(row.no_floor) for row in rows)
    assert [row.measurement for row in rows if row.no_floor] == [row.measurement for row in ours[2:]]
    compared = [row for row in rows if row.contender == bench.APART]
    assert [row.measurement for row in compared] == ["shared", "ragged"]
    assert all("x one pass" in bench.shown(row) for row in compared)
    assert all(row.no_floor in bench.shown(row) for row in rows)
    assert all(row.low <= row.median <= row.high for row in rows)
    assert all(row.contender in bench.shown(row) for row in rows)


@pytest.mark.parametrize(
    "options", [(), ("--dtype", "f16", "--cache-type-v", "q4_0")], ids=["plain", "stored"]
)
def test_the_command_prints_rows_as_json(monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]) -> None:
    from kvcache_engine.command.app import app

    monkeypatch.setattr(bench, "_LENGTHS", (8, 16, 24))
    original = bench.measure
    monkeypatch.setattr(
        bench, "measure", lambda *args, **options: original(*args, prompted=8, cases=(), **options)
    )
    result = CliRunner().invoke(app, ["bench", "--quick", "--json", *options])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.output)
    assert rows[0]["measurement"] == "put + get of 1 after 8"
    assert rows[0]["median"] > 0


def test_no_contender_writes_where_another_does() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from kvcache.integrations import bench_torch

    floors = bench_torch.floors(8, 2, heads=2, dim=4, dtype="float32", grow=False)
    views = [view for floor in floors.values() for pair in floor.call() for view in pair]
    assert len({view.untyped_storage().data_ptr() for view in views}) == len(views)
