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
folder, turns = sys.argv[1], int(sys.argv[2])

def options(kind):
    return {"tiers": [f"{folder}/{kind}"], "capacity": 128, "identity": {"model": "m"}, "block_size": 8}

def say(kind, prefix, answer):
    text = list(range(3, 30))
    for _ in range(turns):
        text += [*answer(text), 5, 6, 7]
        while prefix.nbytes["writing"]:  # no call of ours: the thread writes by itself
            time.sleep(0.002)
    print(kind, prefix.stats.store, flush=True)
"""
KINDS = {
    "transformers": """
import torch
from kvcache.integrations.transformers import HFPrefixCache
from tests.rigs import hf_models as hf
hf_cache = HFPrefixCache(hf.model("llama"), **options("transformers"))

def answer(text):
    ids = torch.tensor([text])
    return hf_cache.generate(ids, max_new_tokens=4, do_sample=False)[0, len(text):].tolist()

say("transformers", hf_cache.prefix, answer)
""",
    "mlx_lm": """
from kvcache.integrations.mlx_lm import MLXPrefixCache
from tests.rigs import mlx_lm_models as models
mlx_cache = MLXPrefixCache(models.shared("llama"), **options("mlx_lm"))
say("mlx_lm", mlx_cache.prefix, lambda text: [token for token, _ in mlx_cache.generate(text, max_tokens=4)])
""",
    "numpy": """
import ml
from kvcache_engine import Engine, EngineOptions, GenerationOptions, bundled_model, load_model
settings = EngineOptions(capacity=128, block_size=8, fetch="always")
model = load_model(bundled_model(), ml.open_backend("numpy"))
engine = Engine(model, None, settings, options("numpy")["tiers"])
wanted = GenerationOptions(max_new_tokens=4, ignore_eos=True)
say("numpy", engine.prefix, lambda text: engine.complete([text], wanted)[0].tokens[len(text):])
""",
}


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGKILL")
def test_what_was_answered_before_a_process_was_killed_is_found_by_the_next(tmp_path: Path) -> None:
    """By an engine, and by the caches inside those runtimes that are installed."""
    here = [kind for kind in KINDS if importlib.util.find_spec(kind)]
    script = "".join([COMMON, *map(KINDS.get, here), "sys.stdin.read()  # it is killed here\n"])
    found = []
    for turns in (2, 1):
        command = [sys.executable, "-c", script, tmp_path.as_uri(), str(turns)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        ) as process:
            assert process.stdout is not None
            found.append(dict(process.stdout.readline().split() for _ in here))
            process.kill()
    assert found[0] == dict.fromkeys(here, "0")
    for kind in here:
        assert int(found[1][kind]) >= 24, f"{kind}: all whole blocks of the first prompt, or more"
