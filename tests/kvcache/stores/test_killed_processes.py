"""Processes that are killed (kill -9) after an answer: the next one finds what was answered before."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
COMMON = """
import sys, time
store, turns = sys.argv[1], int(sys.argv[2])
OPTIONS = {"capacity": 128, "identity": {"model": "m"}, "block_size": 8}

def say(prefix, answer):
    text = list(range(3, 30))
    for _ in range(turns):
        text += [*answer(text), 5, 6, 7]
        while prefix.nbytes["writing"]:  # no call of ours: the thread writes by itself
            time.sleep(0.002)
    print(prefix.stats.store, flush=True)
    sys.stdin.read()  # it is killed here
"""
KINDS = {
    "HFPrefixCache": (
        "transformers",
        """
import torch
from kvcache.integrations.transformers import HFPrefixCache
from tests.rigs import hf_models as hf
cache = HFPrefixCache(hf.model("llama"), tiers=[store], **OPTIONS)

def answer(text):
    ids = torch.tensor([text])
    return cache.generate(ids, max_new_tokens=4, do_sample=False)[0, len(text):].tolist()

say(cache.prefix, answer)
""",
    ),
    "MLXPrefixCache": (
        "mlx_lm",
        """
from kvcache.integrations.mlx_lm import MLXPrefixCache
from tests.rigs import mlx_lm_models as models
cache = MLXPrefixCache(models.shared("llama"), tiers=[store], **OPTIONS)
say(cache.prefix, lambda text: [token for token, _ in cache.generate(text, max_tokens=4)])
""",
    ),
    "Engine": (
        "numpy",
        """
import ml
from kvcache_engine import Engine, EngineOptions, GenerationOptions, bundled_model, load_model
options = EngineOptions(capacity=128, block_size=8, fetch="always")
engine = Engine(load_model(bundled_model(), ml.open_backend("numpy")), None, options, [store])
wanted = GenerationOptions(max_new_tokens=4, ignore_eos=True)
say(engine.prefix, lambda text: engine.complete([text], wanted)[0].tokens[len(text):])
""",
    ),
}


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGKILL")
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_answered_before_a_process_was_killed_is_found_by_the_next(
    kind: str, tmp_path: Path
) -> None:
    needs, script = KINDS[kind]
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    found = []
    for turns in (2, 1):
        command = [sys.executable, "-c", COMMON + script, (tmp_path / "kept").as_uri(), str(turns)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        ) as process:
            assert process.stdout is not None
            found.append(process.stdout.readline())
            process.kill()
    assert found[0] == "0\n"
    assert int(found[1]) >= 24, "all whole blocks of the first prompt, or more"
