"""What is to be run where a GPU is at hand, run small on the CPU: each stage, and what goes wrong in one."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ml
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import suites
from benchmarks.gpu.record import ROOT, Options, Skipped, Stage
from benchmarks.models import STORIES

pytest.importorskip("torch")
pytest.importorskip("transformers")
CUPY = next(info for info in ml.available_backends() if info.name == "cupy").available
STEPS = {
    "a": ["versions", "properties", "chosen attention", "bandwidth", "decode profile"],
    "b": ["shipped suites", "test files"],
    "c": ["shipped suites", "test files"],
    "d": ["bundled, torch", "bundled, cupy", "known text, torch", "known text, cupy",
          "layers over CPU and device"],
    "e": ["eager", "compiled", "captured", "graph rows"],
    "f": ["attend", "start_forward", "put + get", "engine", "paged"],
    "g": ["pages", "beside decoding"],
    "h": ["layers", "ranks"],
}  # fmt: skip
GOALS = {
    "f": ["put + attend, 3", "attend, 3", "launches per layer", "waits per layer",
          "waits between sampled tokens"],
    "g": ["page-out of", "page-in of"],
}  # fmt: skip
NEED_CUPY = [("c", "shipped suites"), ("d", "bundled, cupy"), ("d", "known text, cupy")]


def run(out: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code, and the records by stage."""
    code = command.main([*arguments, "--out", str(out), "--device", "cpu", "--quick"])
    return code, {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in out.glob("*.json")}


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from numbers(item)
    elif isinstance(value, int | float):
        yield value


def timed(value: Any) -> Iterator[dict[str, float]]:
    """What ``Device.compare`` has measured."""
    for item in value.values() if isinstance(value, dict) else ():
        if isinstance(item, dict) and "wall_us" in item:
            yield item
        else:
            yield from timed(item)


@pytest.mark.filterwarnings("default", "ignore:.*past_key_values.*:FutureWarning")
@pytest.mark.parametrize("letter", STEPS)
def test_a_stage_runs_on_the_cpu_and_its_figures_make_sense(letter: str, tmp_path: Path) -> None:
    code, records = run(tmp_path, "--stage", letter)
    record = records[letter]
    assert {name: step["errors"] for name, step in record["steps"].items() if step["errors"]} == {}
    assert (record["device"], record["quick"]) == ("cpu", True)
    assert list(record["steps"]) == STEPS[letter]
    absent = [name for of, name in NEED_CUPY if of == letter and not CUPY]
    absent += ["known text, torch"] * (letter == "d" and not STORIES.is_dir())
    for name, step in record["steps"].items():
        assert step["result"].startswith("skipped: " if name in absent else "ok"), name
        assert bool(step["found"]) is not (name in absent), name
    assert code == (5 if absent else 0)
    assert record["result"].startswith("ok, skipped: " if absent else "ok")
    assert all(name in record["result"] for name in absent)
    found = {name: step["found"] for name, step in record["steps"].items()}
    assert all(math.isfinite(number) and number >= 0 for number in numbers(found))
    for times in timed(found):
        assert 0 < times["wall_low_us"] <= times["wall_us"] <= times["wall_high_us"]
        assert 0 < times["event_least_us"] <= times["event_us"]
        assert min(times["event_ratio"], times["wall_ratio"]) > 0
    goals = record["goals"]
    for goal, start in zip(goals, GOALS.get(letter, []), strict=True):
        assert goal["goal"].startswith(start)
        assert goal["met"] in (True, False)
    WHAT.get(letter, lambda found: None)(found)


def of_machine(found: Any) -> None:
    assert found["versions"]["packages"]["torch"]
    assert ["torch", True] in [backend[:2] for backend in found["versions"]["backends"]]
    assert len(found["chosen attention"]) == 3 * 3 * 2
    assert {name.startswith("_scaled_dot_product") for name in found["chosen attention"].values()} == {True}
    assert min(numbers(found["bandwidth"])) > 0
    names = [name for name, _, _ in found["decode profile"]["kernels"]]
    assert "aten::matmul" in names


def of_suites(found: Any) -> None:
    for step in found.values():
        if step:
            assert step["passed"] > 1
            assert (step["failed"], step["failures"]) == (0, {})


def of_models(found: Any) -> None:
    for way, step in found["eager"].items():
        assert step["tokens_alike"] == step["tokens"] or "bfloat16" in way
    assert len(found["eager"]) == 2 * 5
    assert {"StaticCache", "HFStaticCache"} <= found["captured"].keys()
    assert "HFStaticCache" in found["compiled"]
    assert found["graph rows"]["graphs"] == 2


def of_tables(found: Any) -> None:
    cases = {name: case for name, case in found["attend"].items() if "times" in case}
    assert len(cases) == 2
    for case in cases.values():
        assert case["bytes_per_s"].keys() == case["times"].keys()
        assert len(case["times"]) == 4, (
            "on a CPU the floor is one that stands beside FlashAttention elsewhere"
        )
        assert case["times"]["sdpa, equal lengths"]["event_ratio"] == 1
    assert found["start_forward"]["4 sequences: a further layer"]["launches"] > 1
    assert found["paged"]["ours"]["tokens_per_s"] > 0


def of_pages(found: Any) -> None:
    (case,) = found["pages"].values()
    assert min(*case["bytes_per_s"].values(), *case["memcpy"].values()) > 0
    assert found["beside decoding"]["a decode step"]["steps_beside"] >= 4


def of_several(found: Any) -> None:
    assert found["layers"]["devices"] == ["cpu:0", "cpu:1"]
    assert "rank 1 of 2 was killed" in found["ranks"]["told of the rank that was killed"]
    measured = found["ranks"]["two ranks: microseconds by KiB, and tokens per second"]
    assert {"framework", "ours"} == measured["8"].keys()
    assert min(measured["prompt"], measured["decode"]) > 0


WHAT: dict[str, Callable[[Any], None]] = {
    "a": of_machine, "b": of_suites, "e": of_models, "f": of_tables, "g": of_pages, "h": of_several,
}  # fmt: skip


# What goes wrong.


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Those of stage b, in place of its own."""
    planted: dict[str, Any] = {}
    monkeypatch.setattr(suites, "TORCH", planted)
    return planted


def test_a_step_that_fails_leaves_what_it_found_and_its_traceback_and_the_others_go_on(
    steps: Any, tmp_path: Path
) -> None:
    def breaks(stage: Stage) -> None:
        stage.note("before", 1.5)
        stage.attempt("part", lambda: [][1])
        stage.note("after the part", 2)
        raise RuntimeError("an illegal memory access")

    steps |= {"first": lambda stage: stage.note("found", 1), "breaks": breaks, "last": steps_note}
    code, records = run(tmp_path, "--stage", "b")
    assert (code, records["b"]["result"]) == (1, "failed")
    first, broken, last = records["b"]["steps"].values()
    assert (first["result"], last["result"], broken["result"]) == ("ok", "ok", "failed")
    assert broken["found"] == {"before": 1.5, "after the part": 2}
    assert "in breaks" in broken["errors"]["breaks"]
    assert "RuntimeError: an illegal memory access" in broken["errors"]["breaks"]
    assert "IndexError" in broken["errors"]["part"]


def steps_note(stage: Stage) -> None:
    stage.note("last", 3)
    stage.goal("as small as can be", 2.0, 1.0)


def test_a_goal_that_is_missed_is_told_and_no_failure(
    steps: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps["last"] = steps_note
    code, records = run(tmp_path, "--stage", "b")
    assert (code, [goal["met"] for goal in records["b"]["goals"]]) == (0, [False])
    assert "as small as can be: 2, at most 1: MISSED" in capsys.readouterr().out


def test_what_cannot_run_is_skipped_with_its_reason_and_is_no_pass(steps: Any, tmp_path: Path) -> None:
    def absent(stage: Stage) -> None:
        raise Skipped("no GPU")

    steps["absent"] = absent
    assert run(tmp_path, "--stage", "b")[0] == 5
    steps["there"] = steps_note
    code, records = run(tmp_path, "--stage", "b")
    assert (code, records["b"]["result"]) == (5, "ok, skipped: absent")
    assert records["b"]["steps"]["absent"]["result"] == "skipped: no GPU"
    code, records = run(tmp_path, "--stage", "b", "--seconds", "0")
    assert code == 5
    assert "0 seconds of the stage are over" in records["b"]["result"]


def test_a_stage_whose_package_is_missing_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "benchmarks.gpu.embedded", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, records = run(tmp_path, "--stage", "e")
    assert (code, records["e"]["result"]) == (5, "skipped: transformers is not installed")


def test_what_was_measured_survives_a_kill(tmp_path: Path) -> None:
    body = (
        "import os, pathlib, sys; from benchmarks.gpu.record import *\n"
        "def step(stage): stage.note('measured', 1); os.kill(os.getpid(), 9)\n"
        "Stage('a', Options(pathlib.Path(sys.argv[1]))).run({'long': step})"
    )
    done = subprocess.run([sys.executable, "-c", body, str(tmp_path)], cwd=ROOT, check=False)
    assert done.returncode == -9
    record = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert (record["result"], record["steps"]["long"]["result"]) == ("running", "running")
    assert record["steps"]["long"]["found"] == {"measured": 1}


def test_tests_that_fail_or_are_out_of_time_fail_their_step(tmp_path: Path) -> None:
    file = tmp_path / "test_planted.py"
    planted = {"tests": lambda stage: suites._pytest(stage, "tests", [str(file)])}

    def step(body: str, seconds: float) -> dict[str, Any]:
        file.write_text(body, encoding="utf-8")
        stage = Stage("b", Options(tmp_path, "cpu", True, seconds))
        assert stage.run(planted) == "failed"
        return stage.steps["tests"]

    bad = step("def test_good(): pass\ndef test_bad(): assert 1 == 2\n", 500.0)["found"]
    assert (bad["tests"], bad["passed"], bad["failed"]) == (2, 1, 1)
    assert list(bad["failures"].values()) == ["assert 1 == 2"]
    assert "out of time" in step("import time\ntime.sleep(600)\n", suites.GRACE)["errors"]["tests"]


def test_stages_go_on_after_one_that_fails(tmp_path: Path) -> None:
    """Each in a process of its own. Here the first is told of a folder that is not there."""
    stages = ["--stage", "d", "--stage", "b", "--step", "known text, torch"]
    code, records = run(tmp_path, *stages, "--stories", str(tmp_path / "gone"))
    assert code == 1
    results = {letter: record["result"].partition(":")[0] for letter, record in records.items()}
    assert results == {"d": "failed", "b": "skipped"}
    assert "FileNotFoundError" in records["d"]["steps"]["known text, torch"]["errors"]["known text, torch"]


def test_the_list_names_every_stage(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert [line[0] for line in shown.splitlines()] == list(STEPS) == list(command.STAGES)
    assert shown in (ROOT / "docs" / "devices.md").read_text(encoding="utf-8")
