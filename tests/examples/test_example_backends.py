"""The example plugins, installed as third parties install theirs and held to the shipped suites."""

from __future__ import annotations

import ast
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ..rigs.kept_programs import kept_programs

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PUBLIC = {"ml", "ml.base", "ml.strided", "ml.testing"}
LIMITS = {"ml-backend-jax": 400, "ml-backend-list": 200, "ml-backend-paddle": 300}
SUITES = ("ml.testing", "kvcache.testing")

LONG = "ML_LONG" in os.environ
long = pytest.mark.skipif(not LONG, reason="takes minutes, as XLA compiles for each shape: set ML_LONG=1")

SHORTER = """
import ml
from kvcache.testing import CacheTests
from ml.testing import BackendTests

class TestBackend(BackendTests):
    backend_name = "jax"
    examples = 4
    case_stride = 40

class TestCaches(CacheTests):
    backend_name = "jax"

def test_a_write_leaves_the_buffer_where_it_is_while_views_are_held():
    with ml.open_backend("jax") as backend, backend.new_context() as ctx:
        cache, token = ctx.zeros((8, 4096, 64), ml.DType.F32), ctx.full((1, 8, 64), 1, ml.DType.F32)
        rows = cache.permute(ctx, 1, 0, 2)
        held, places = [], set()
        for n in range(6):
            token.copy(ctx, rows.slice(ctx, 0, n, n + 1))
            rows.set_rows(ctx, token, [100 + n])
            held.append(rows.slice(ctx, 0, 0, 256))
            places.add(cache.storage.array.unsafe_buffer_pointer())
        assert len(places) == 1, places
        snapshot = cache.native
        token.copy(ctx, rows.slice(ctx, 0, 9, 10))
        assert snapshot.sum() == 12 * 512
        assert cache.to_numpy().sum() == 13 * 512
        assert held[0].to_numpy().sum() == 13 * 512
"""

SAMPLE = {
    "TestBackend": [
        "functions_match_float64", "results_are_exact", "cast_converts_exactly_as_the_contract_says",
        "compare_gives_bool_by_symbol_and_by_name", "where_chooses_one_of_two",
        "any_walk_of_views_and_writes_agrees_with_flat_memory",
        "copy_writes_what_the_destination_shows_and_nothing_else", "rows_gathers_along_any_axis",
        "set_rows_scatters_along_any_axis", "concat_and_repeat_read_strided_operands",
        "attention_matches_float64_with_and_without_a_mask", "sinks_take_part_in_the_softmax_and_are_dropped",
        "attention_refuses_what_does_not_fit", "attention_refuses_tensors_of_other_backends",
        "native_of_one_tensor_becomes_another_through_from_native",
    ],
    "TestCaches": [
        "every_token_is_found_again[token major-window]", "layers_keep_apart[elided and padded-causal]",
        "a_query_sees_exactly[one sequence]",
        "what_was_put_is_read_bit_for_bit[BF16-of fixed shapes]",
        "what_was_put_is_read_bit_for_bit[F16-permuted v]",
        "what_follows_moves_down_with_its_keys_re_encoded[causal-token major, permuted v]",
        "columns_of_padding_do_no_harm_whatever_they_hold[4-head_major-window]",
        "a_snapshot_fits_any_arrangement_of_the_same_cache[F32-of fixed shapes]",
    ],
}  # fmt: skip
"""Of both suites what runs every kernel of the plugin in the fewest shapes."""


@pytest.fixture(scope="module", params=LIMITS)
def sources(request: pytest.FixtureRequest) -> list[Path]:
    files = sorted((EXAMPLES / request.param).rglob("*.py"))
    assert files
    return files


def test_each_example_is_short(sources: list[Path]) -> None:
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in sources)
    project = next(name for name in LIMITS if name in sources[0].parts)
    assert lines < LIMITS[project]


def test_examples_use_public_names_only(sources: list[Path]) -> None:
    """Of ours the four public modules; and no underscored name of anybody else's object."""
    for path in sources:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            for module in _imported(node):
                ours = module.partition(".")[0] in ("ml", "kvcache", "backends")
                assert not ours or module in PUBLIC, f"{path.name}:{node.lineno} imports {module}"
                assert "._" not in module, f"{path.name}:{node.lineno} imports {module}"
            if isinstance(node, ast.ImportFrom):
                assert not any(alias.name.startswith("_") for alias in node.names)
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
                owner = ast.unparse(node.value)
                assert owner in ("self", "super()"), f"{path.name}:{node.lineno} uses {owner}.{node.attr}"


def _imported(node: Any) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


@pytest.fixture(scope="module")
def installed(plugins: Any) -> Any:
    for name in LIMITS:
        plugins.install(EXAMPLES / name)
    return plugins


@pytest.mark.parametrize(
    ("suite", "sample"), [("ml.testing", 1 if LONG else 3), ("kvcache.testing", 1 if LONG else 32)]
)
def test_lists_pass_the_suite(installed: Any, suite: str, sample: int) -> None:
    """A third of the one and a 32nd of the other: with ML_LONG=1 all, which takes Python lists a minute."""
    command = [sys.executable, "-m", "pytest", "--pyargs", suite, "--ml-backend=list"]
    assert " passed" in installed.run(command, sample)


def test_jax_passes_a_sample_of_both_suites(installed: Any, tmp_path: Path) -> None:
    """Every 40th case of those tables: each shape is compiled, so all of it takes minutes (``ML_LONG=1``).

    And what the suites do not ask: into a large cache a token is written where it is.
    """
    pytest.importorskip("jax")
    (installed.path / "test_jax.py").write_text(SHORTER, encoding="utf-8")
    chosen = [f"test_jax.py::{area}::test_{name}" for area, names in SAMPLE.items() for name in names]
    chosen.append("test_jax.py::test_a_write_leaves_the_buffer_where_it_is_while_views_are_held")
    with kept_programs(tmp_path):
        assert f"{len(chosen)} passed" in installed.run([sys.executable, "-m", "pytest", *chosen])


@pytest.mark.parametrize("suite", SUITES if LONG else ["ml.testing"])
def test_paddle_passes_the_suite(installed: Any, suite: str) -> None:
    """The quick part of the backends' suite; with ``ML_LONG=1`` (``make test-paddle``) both suites whole."""
    if find_spec("paddle") is None:
        pytest.skip("paddle is not installed: make test-paddle")
    options = ["--ml-backend=paddle", "-Wdefault", *([] if LONG else ["--ml-quick"])]  # its import warns
    assert " passed" in installed.run([sys.executable, "-m", "pytest", "--pyargs", suite, *options])


@long
@pytest.mark.parametrize("suite", SUITES)
def test_jax_passes_the_whole_suite(installed: Any, suite: str) -> None:
    pytest.importorskip("jax")
    command = [sys.executable, "-m", "pytest", "--pyargs", suite, "--ml-backend=jax"]
    assert " passed" in installed.run(command)
