"""The tests that a peer ships for its own cache, run on ours.

``python -m benchmarks.peers_tests mlx-lm --source DIR``.

DIR is a checkout of the peer's public repository at the tag that is installed (for mlx-lm 0.32.2:
``git clone --branch v0.32.2 https://github.com/ml-explore/mlx-lm``). None of its code is copied: the test
file is run where it lies, with our classes in the places of those that we stand in for.
"""

from __future__ import annotations

import argparse
import io
import unittest
from pathlib import Path
from types import ModuleType

__all__ = ["main", "run"]


def run(module: ModuleType, used: dict[str, int]) -> list[tuple[str, str, str]]:
    """(test, outcome, reason) of every unittest in ``module``.

    ``used`` counts, by name, how often one of our classes was made; a test that makes none is "not ours".
    """
    found = []
    for case in unittest.defaultTestLoader.loadTestsFromModule(module):
        for test in case:  # type: ignore[union-attr]
            used.clear()
            result = unittest.TestResult()
            suite = unittest.TestSuite([test])
            suite.run(result)
            found.append((test.id().rpartition(".")[2], *_outcome(result, used)))
    return found


def _outcome(result: unittest.TestResult, used: dict[str, int]) -> tuple[str, str]:
    if not used:
        return "not ours", "makes none of the classes that we stand in for"
    wrong = [*result.failures, *result.errors]
    if not wrong:
        return "passed", ", ".join(f"{count} {name}" for name, count in sorted(used.items()))
    lines = io.StringIO(wrong[0][1]).read().strip().splitlines()
    message = next((line for line in lines if line[:1].isalpha() and "Error" in line), lines[-1])
    return "failed", message


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers_tests", description=__doc__)
    parser.add_argument("peer", choices=["mlx-lm"])
    parser.add_argument("--source", type=Path, required=True, help="a checkout of the peer's repository")
    options = parser.parse_args(arguments)
    from benchmarks.peers_mlx_lm import prepared

    module, used = prepared(options.source)
    outcomes = run(module, used)
    for name, outcome, reason in outcomes:
        print(f"{outcome:8}  {name}\n          {reason}")
    for kind in ("passed", "failed", "not ours"):
        print(f"{kind}: {sum(outcome == kind for _, outcome, _ in outcomes)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
