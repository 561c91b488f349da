"""The command that runs transformers' own tests on our caches: what passes, and what is not about ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

ROOT = Path(__file__).resolve().parents[1]
TESTS = """
import unittest
import torch
from transformers import (
    AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaConfig, NoLongerThere, StaticCache
)
from transformers.cache_utils import Cache

class Some(unittest.TestCase):
    def test_any_number_of_layers(self):
        for layers in (3, 1):
            cache = DynamicCache()
            for step in range(2):
                for layer in range(layers):
                    keys, _ = cache.update(torch.ones(1, 2, 4, 8), torch.ones(1, 2, 4, 8), layer)
            self.assertEqual(keys.shape, (1, 2, 8, 8))
            self.assertIsInstance(cache, DynamicCache)
            self.assertEqual(len(cache.layers), layers)

    def test_fixed(self):
        cache = StaticCache(config=LlamaConfig(num_attention_heads=4, hidden_size=32), max_cache_len=6)
        keys, _ = cache.update(torch.ones(1, 4, 1, 8), torch.ones(1, 4, 1, 8), 0)
        self.assertEqual(keys.shape, (1, 4, 6, 8))

    def test_generates(self):
        model = AutoModelForCausalLM.from_pretrained("a model that would be downloaded")
        found = model.generate(torch.tensor([[1, 2]]), max_new_tokens=3, do_sample=False,
                               return_dict_in_generate=True)
        self.assertIsInstance(found.past_key_values, DynamicCache)

    def test_text_of_a_real_model(self):
        model = AutoModelForCausalLM.from_pretrained("a model that would be downloaded")
        tokenizer = AutoTokenizer.from_pretrained("its tokenizer", padding_side="left")
        inputs = tokenizer(["One, two", "A"], padding=True, return_tensors="pt")
        found = model.generate(**inputs, max_new_tokens=8, do_sample=False)
        self.assertEqual(tokenizer.batch_decode(found, skip_special_tokens=True), ["One, two, three", "A"])

    def test_private(self):
        cache = DynamicCache()
        keys, _ = cache.update(torch.ones(1, 2, 4, 8), torch.ones(1, 2, 4, 8), 0)
        self.assertIs(keys, cache.layers[0].keys)

    def test_dropped(self):
        NoLongerThere()

    def test_no_cache(self):
        self.assertTrue(issubclass(Cache, object))

    def test_skipped(self):
        self.skipTest("no accelerator")
"""


def run(source: Path, check: bool) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.peers_tests", "transformers", "--source", str(source)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=check)


def test_tests_of_transformers_are_run_on_its_own_caches_and_then_on_ours(tmp_path: Path) -> None:
    (tmp_path / "tests" / "utils").mkdir(parents=True)
    (tmp_path / "tests" / "utils" / "test_cache_utils.py").write_text(TESTS, encoding="utf-8")
    done = run(tmp_path, check=True)
    assert [line for line in done.stdout.splitlines() if not line.startswith(" ")] == [
        "tests/utils/test_cache_utils.py:",
        "passed    test_any_number_of_layers",
        "theirs too  test_dropped",
        "passed    test_fixed",
        "passed    test_generates",
        "not ours  test_no_cache",
        "failed    test_private",
        "skipped   test_skipped",
        "alike     test_text_of_a_real_model",
        "passed: 3",
        "failed: 1",
        "not ours: 1",
        "alike: 1",
        "skipped: 1",
        "theirs too: 1",
    ]
    assert "has no NoLongerThere" in done.stdout
    assert "no accelerator" in done.stdout
    assert "2 HFCache" in done.stdout


def test_a_folder_without_tests_of_caches_is_named(tmp_path: Path) -> None:
    done = run(tmp_path, check=False)
    assert done.returncode == 1
    assert "test_cache_utils.py is not there" in done.stderr
