"""The command that runs a peer's tests on our caches: what passes, what fails, what is not about us."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from benchmarks import pages, peers_sources, peers_tests, peers_transformers

MLX_LM = """
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
TRANSFORMERS = """
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
FILES = {"mlx-lm": "test_prompt_cache.py", "transformers": "utils/test_cache_utils.py"}
OUTCOMES = {
    "mlx-lm": """
failed    Some.test_counts_wrong
passed    Some.test_model
passed    Some.test_stores
alike     Some.test_text_of_a_real_model
not ours  Some.test_theirs
theirs too  Some.test_wrong_on_theirs
passed: 2
failed: 1
not ours: 1
alike: 1
theirs too: 1
""",
    "transformers": """
passed    Some.test_any_number_of_layers
theirs too  Some.test_dropped
passed    Some.test_fixed
passed    Some.test_generates
not ours  Some.test_no_cache
failed    Some.test_private
skipped   Some.test_skipped
alike     Some.test_text_of_a_real_model
passed: 3
failed: 1
not ours: 1
alike: 1
skipped: 1
theirs too: 1
""",
}
TOLD = {
    "mlx-lm": ("AssertionError: True is not false", "1 make_prompt_cache", "test_server.py is not there"),
    "transformers": (
        "has no NoLongerThere",
        "no accelerator",
        "2 HFCache",
        "test_executorch.py is not there",
    ),
}


@pytest.mark.filterwarnings("ignore")  # the peers' own
@pytest.mark.parametrize(("peer", "tests"), [("mlx-lm", MLX_LM), ("transformers", TRANSFORMERS)])
def test_a_peers_tests_run_on_its_own_classes_and_then_on_ours(
    peer: str, tests: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tests" / FILES[peer]
    file.parent.mkdir(parents=True)
    file.write_text(tests, encoding="utf-8")
    assert peers_tests.main([peer, "--source", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    lines = [line for line in told.splitlines() if not line.startswith((" ", "not run: "))]
    (time,) = (line for line in lines if re.fullmatch(r"\d+ s of the processor", line))
    lines.remove(time)
    assert lines == [f"tests/{FILES[peer]}:", *OUTCOMES[peer].strip().splitlines()]
    assert [text for text in TOLD[peer] if text not in told] == []


GENERATION = """
import unittest
from tests.named_by_the_other import TOKENS

class GenerationTesterMixin:
    def test_generates(self):
        (kind,) = self.all_generative_model_classes
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        found = kind(config).generate(**inputs, max_new_tokens=TOKENS)
        self.assertEqual(found.shape, (4, 7 + TOKENS))

    def test_generates_compiled(self):
        raise AssertionError("left out")
"""


@pytest.mark.filterwarnings("ignore")
def test_what_transformers_mixes_into_each_models_tests_runs_on_some_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They import the package ``tests`` of their own folder; the record has every test."""
    (tmp_path / "tests" / "generation").mkdir(parents=True)
    (tmp_path / "tests" / "named_by_the_other.py").write_text("TOKENS = 3")
    (tmp_path / "tests" / "generation" / "test_utils.py").write_text(GENERATION)
    (tmp_path / peers_tests.PAGE).write_text("<!-- table: own-tests -->\n\n<!-- end -->")
    monkeypatch.setattr(pages, "DOCS", tmp_path)
    monkeypatch.setattr(peers_transformers, "GENERATING", ("llama", "mistral", "qwen3_next"))
    cases = ["--case", "llama", "--case", "qwen3_next"]
    assert peers_tests.main(["transformers", "--source", str(tmp_path), "--record", *cases]) == 0
    record = json.loads((tmp_path / peers_tests.RECORD).read_text())["transformers"]
    assert record["generation/test_utils.py"]["tests"] == {
        "passed": {f"{name}.test_generates": "1 HFCache" for name in ("llama", "qwen3_next")},
        "left out": dict.fromkeys(
            ("llama.test_generates_compiled", "qwen3_next.test_generates_compiled"),
            peers_transformers.LEFT_OUT["test_*compil*"],
        ),
    }
    assert "`generation/test_utils.py` | 2 | 0 | 0 | 2 |" in (tmp_path / peers_tests.PAGE).read_text()


def test_the_page_shows_the_record() -> None:
    page = (pages.DOCS / peers_tests.PAGE).read_text(encoding="utf-8")
    record = pages.load(pages.DOCS / peers_tests.RECORD)
    assert pages.filled(page, {"own-tests": peers_tests.table_of(record)}) == page


@pytest.mark.parametrize("peer", FILES)
def test_a_folder_without_the_tests_is_named(peer: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"\.py is not there; --source is the source of github"):
        peers_tests.main([peer, "--source", str(tmp_path)])


PYTEST = """
import pytest
import peer_double
from tests.named_by_the_other import THEIRS

@pytest.fixture
def made():
    return peer_double.make()

def test_takes_either(made):
    assert made

@pytest.mark.parametrize("kind", [THEIRS])
def test_takes_one(made, kind):
    assert made == kind

def test_of_a_real_model(made):
    raise ValueError("another text")

def test_broken():
    raise ValueError("always")

def test_skipped():
    pytest.skip("no accelerator")

def test_left_out_on_purpose():
    raise AssertionError("is not run")

class TestNothing:
    def test_makes_none(self):
        pass
"""


def test_tests_of_pytest_run_on_a_peers_classes_and_then_on_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    double = SimpleNamespace(make=None)
    monkeypatch.setitem(sys.modules, "peer_double", double)  # type: ignore[arg-type]
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "named_by_the_other.py").write_text("THEIRS = 'theirs'")
    path = tmp_path / "tests" / "test_some.py"
    path.write_text(PYTEST)
    used: Counter[str] = Counter()

    @contextlib.contextmanager
    def side(name: str) -> Iterator[None]:
        def make() -> str:
            used[name] += name == "ours"
            return name

        monkeypatch.setattr(double, "make", make)
        yield

    left_out = {"test_left_out_*": "on purpose"}
    peer: Any = SimpleNamespace(LEFT_OUT=left_out, theirs=partial(side, "theirs"), ours=partial(side, "ours"))
    assert {
        name: (outcome, why) for name, outcome, why in peers_tests.run_pytest(peer, path, tmp_path, used)
    } == {
        "test_takes_either": ("passed", "1 ours"),
        "test_takes_one[theirs]": ("failed", "E   AssertionError: assert 'ours' == 'theirs'"),
        "test_of_a_real_model": ("alike", "E   ValueError: another text"),
        "test_broken": ("theirs too", "E   ValueError: always"),
        "test_skipped": ("skipped", "Skipped: no accelerator"),
        "test_left_out_on_purpose": ("left out", "on purpose"),
        "TestNothing.test_makes_none": ("not ours", "makes none of the classes that we stand in for"),
    }
    chosen = peers_tests.run_pytest(peer, path, tmp_path, used, ["test_takes_one", "TestNothing"])
    assert [name for name, *_ in chosen] == ["test_takes_one[theirs]", "TestNothing.test_makes_none"]


def test_sources_are_checkouts_and_what_has_none_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(command: list[str], **environment: str) -> str:
        raise peers_sources.NoSourceError(f"{command[0]}: no network")

    monkeypatch.setenv("PEERS_SRC", str(tmp_path))
    monkeypatch.setattr(peers_sources, "FETCHED", tmp_path / "fetched")
    monkeypatch.setattr(peers_sources, "_run", refused)
    monkeypatch.setattr(peers_sources, "version", lambda package: "1.0")
    assert peers_tests.main(["sglang"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("not run: ")
    (tmp_path / "sglang").mkdir()
    assert peers_sources.source_of("sglang") == tmp_path / "sglang"
    with pytest.raises(SystemExit, match="is not there; --source is"):
        peers_tests.main(["sglang"])


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_tag_is_cloned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a repository on this machine, in the place of the one on GitHub."""
    repository = tmp_path / "github" / peers_sources.REPOSITORIES["sglang"]
    repository.mkdir(parents=True)

    def git(*words: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", str(repository), *identity, *words], check=True, capture_output=True)

    git("init")
    for release in ("1.0", "2.0"):
        (repository / "release").write_text(release)
        git("add", ".")
        git("commit", "-m", release)
        git("tag", f"v{release}")
    github = f"url.file://{tmp_path}/github/.insteadOf"
    for name, value in (("COUNT", "1"), ("KEY_0", github), ("VALUE_0", "https://github.com/")):
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)
    monkeypatch.delenv("PEERS_SRC", raising=False)
    monkeypatch.setattr(peers_sources, "FETCHED", tmp_path / "fetched")
    monkeypatch.setattr(peers_sources, "version", lambda package: "1.0")
    source = peers_sources.source_of("sglang")
    assert (source / "release").read_text() == "1.0"
    assert peers_sources.described(source) == ""  # of the installed version
    shutil.rmtree(repository)
    assert peers_sources.source_of("sglang") == source
    assert [path.name for path in (tmp_path / "fetched").iterdir()] == ["sglang-v1.0"]
