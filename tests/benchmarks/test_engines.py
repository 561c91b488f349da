"""``python -m benchmarks.engines``: the command, with contenders of both kinds, and its tables."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("torch")
pytest.importorskip("starlette")

from benchmarks import engines
from benchmarks.pages import load

OWN, SERVED = "engine, own model", "kvcache serve, transformers' model"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_contenders_take_turns_and_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--prompt", "12", "--new", "3", "--rounds", "1", "--layers", "1", "--out", str(tmp_path)]
    sizes = ["--clients", "1", "3", "--shared", "8", "0"]
    engines.main(["transformers", *sizes, *small, "--only", OWN, SERVED])
    found = load(tmp_path / engines.RECORD)["transformers"]["found"]
    assert [*found] == [OWN, SERVED]
    for one in found.values():
        assert [*one["rounds"]] == ["1/8", "3/8", "1/0", "3/0"]
        assert all(rate > 0 for [rates] in one["rounds"].values() for rate in rates[:2])
        assert (one["answers"], one["others"]) == (8, 0)
        assert one["peak"] > 50
    assert "8/8" in capsys.readouterr().out


def test_aims_are_held_against_the_worst_of_what_was_found() -> None:
    def of(rates: dict[str, float]) -> dict[str, object]:
        return {"rounds": {size: [[rate, rate, 0.5]] for size, rate in rates.items()}}

    own = of({"1/200": 10, "32/200": 100, "32/0": 20})
    theirs = of({"1/200": 9, "32/200": 90, "32/0": 16})
    batch = of({"1/200": 9, "32/200": 20, "32/0": 16})
    table = engines.aims({OWN: own, "engine, transformers' model": theirs, "generate_batch": batch})
    assert table.splitlines()[2:] == [
        "| engine, transformers' model | engine, own model | 0.85 | 0.80 | 32/0 | no |",
        "| engine, transformers' model | generate_batch | 4 | 4.50 | 32/200 | yes |",
    ]
