"""The command that runs a peer's tests on our entries: what passes, what fails, what is not about us."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")

ROOT = Path(__file__).resolve().parents[1]
TESTS = """
import unittest
import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.utils import load

class Some(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.model, _ = load("a model that would be downloaded")

    def test_stores(self):
        cache = KVCache()
        cache.update_and_fetch(mx.zeros((1, 2, 3, 4)), mx.zeros((1, 2, 3, 4)))
        self.assertEqual(cache.offset, 3)
        self.assertIsInstance(cache, KVCache)

    def test_counts_wrong(self):
        self.assertFalse(hasattr(RotatingKVCache(max_size=8), "rows"))

    def test_model(self):
        self.assertIsInstance(make_prompt_cache(self.model)[0], KVCache)

    def test_theirs(self):
        ArraysCache(2)

    def test_text_of_a_real_model(self):
        cache = make_prompt_cache(self.model)
        logits = self.model(mx.array([[1, 2, 3]]), cache=cache)
        self.assertEqual(logits[0, -1].argmax().item(), -1)

    def test_wrong_on_theirs(self):
        self.assertTrue(hasattr(KVCache(), "rows"))
        raise ValueError("and for another reason on ours")
"""


def test_a_peers_tests_are_run_with_our_classes_in_place(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_prompt_cache.py").write_text(TESTS, encoding="utf-8")
    command = [sys.executable, "-m", "benchmarks.peers_tests", "mlx-lm", "--source", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [
        "tests/test_prompt_cache.py:",
        "failed    test_counts_wrong",
        "passed    test_model",
        "passed    test_stores",
        "alike     test_text_of_a_real_model",
        "not ours  test_theirs",
        "theirs too  test_wrong_on_theirs",
        "passed: 2",
        "failed: 1",
        "not ours: 1",
        "alike: 1",
        "theirs too: 1",
    ]
    assert "AssertionError: True is not false" in done.stdout
    assert "1 make_prompt_cache" in done.stdout


def test_a_folder_without_the_tests_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.peers_tests", "mlx-lm", "--source", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "test_prompt_cache.py is not there" in done.stderr
