"""The tests that a peer ships for its own cache, run on ours.

``python -m benchmarks.peers_tests {mlx-lm,transformers} --source DIR``.

DIR is a checkout of the peer's public repository at the tag that is installed (for mlx-lm 0.32.2:
``git clone --branch v0.32.2 https://github.com/ml-explore/mlx-lm``, for transformers 5.23.0:
``git clone --depth 1 --branch v5.23.0 https://github.com/huggingface/transformers``, whose tests need
``pip install parameterized``). None of its code is copied: the test files are run where they lie, with our
classes in the places of those that we stand in for.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import unittest
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType

__all__ = ["main", "run"]

KINDS = ("passed", "failed", "not ours")
"""Always counted; "skipped" and "theirs too" where they occur."""

FILES = {
    "mlx-lm": ("ml-explore/mlx-lm", ["tests/test_prompt_cache.py"]),
    "transformers": (
        "huggingface/transformers",
        ["tests/utils/test_cache_utils.py", "tests/test_executorch.py"],  # the second is in its sdist too
    ),
}
"""The repository of each peer on GitHub, and its tests of caches: those that are there are run."""

Place = Callable[[], AbstractContextManager[None]]


def run(
    module: ModuleType,
    used: dict[str, int],
    ours: Place = contextlib.nullcontext,
    theirs: Place | None = None,
) -> list[tuple[str, str, str]]:
    """(test, outcome, reason) of every unittest in ``module``.

    ``used`` counts, by name, how often one of our classes was made; a test that makes none is "not ours".
    With ``theirs`` every test runs on the peer's own classes first; one that fails on them says nothing
    of ours, and is "theirs too". ``ours`` is what puts ours in place.
    """
    found = []
    for case in unittest.defaultTestLoader.loadTestsFromModule(module):
        for test in case:  # type: ignore[union-attr]
            name = test.id().rpartition(".")[2]
            if theirs is not None and (wrong := _run(test, theirs)).unsuccessful:
                found.append((name, "theirs too", wrong.message))
                continue
            used.clear()
            result = _run(test, ours)
            found.append((name, *_outcome(result, used)))
    return found


class _Result(unittest.TestResult):
    @property
    def unsuccessful(self) -> bool:
        return bool(self.failures or self.errors)

    @property
    def message(self) -> str:
        """The line that names the first failure."""
        lines = io.StringIO([*self.failures, *self.errors][0][1]).read().strip().splitlines()
        return next((line for line in lines if line[:1].isalpha() and "Error" in line), lines[-1])


def _run(test: unittest.TestCase | unittest.TestSuite, place: Place) -> _Result:
    result = _Result()
    with place():
        unittest.TestSuite([test]).run(result)
    return result


def _outcome(result: _Result, used: dict[str, int]) -> tuple[str, str]:
    if result.skipped:
        return "skipped", result.skipped[0][1]
    if not used:
        return "not ours", "makes none of the classes that we stand in for"
    if result.unsuccessful:
        return "failed", result.message
    return "passed", ", ".join(f"{count} {name}" for name, count in sorted(used.items()))


def _outcomes(peer: str, source: Path) -> list[tuple[str, str, str]]:
    repository, names = FILES[peer]
    paths = [source / name for name in names if (source / name).is_file()]
    if not paths:
        raise SystemExit(
            f"{source / names[0]} is not there; --source is a checkout of github.com/{repository}"
        )
    if peer == "mlx-lm":
        from benchmarks import peers_mlx_lm

        return run(*peers_mlx_lm.prepared(paths[0]))
    from benchmarks import peers_transformers

    modules, used = peers_transformers.prepared(paths)
    places = peers_transformers.ours, peers_transformers.theirs
    return [line for module in modules for line in run(module, used, *places)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers_tests", description=__doc__)
    parser.add_argument("peer", choices=FILES)
    parser.add_argument("--source", type=Path, required=True, help="a checkout of the peer's repository")
    options = parser.parse_args(arguments)
    outcomes = _outcomes(options.peer, options.source)
    for name, outcome, reason in outcomes:
        print(f"{outcome:8}  {name}\n          {reason}")
    others = sorted({outcome for _, outcome, _ in outcomes} - {*KINDS})
    for kind in (*KINDS, *others):
        print(f"{kind}: {sum(outcome == kind for _, outcome, _ in outcomes)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
