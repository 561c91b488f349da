"""Tokens per second of the engine where all requests begin alike, and of transformers' paged attention."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import ml
from benchmarks.models import SMALL, random_model
from benchmarks.report import Row, summary
from kvcache_engine import Engine, EngineOptions, GenerationOptions, load_model


def prompts(vocabulary: int, count: int, prefix: int, own: int) -> list[list[int]]:
    """Prompts that begin with the same tokens."""
    random = np.random.default_rng(5)
    first = random.integers(3, vocabulary, prefix).tolist()
    return [first + random.integers(3, vocabulary, own).tolist() for _ in range(count)]


def generate(running: Engine, wanted: list[list[int]], new: int) -> tuple[float, float, list[list[int]]]:
    """Tokens per second, prompts included, and while decoding; the answers."""
    running.forget()
    stats = running.statistics
    before, began = (stats.decoded_tokens, stats.decode_seconds), time.perf_counter()
    answers = running.complete(wanted, GenerationOptions(max_new_tokens=new, ignore_eos=True))
    spent = time.perf_counter() - began
    decoding = (stats.decoded_tokens - before[0]) / (stats.decode_seconds - before[1])
    return len(wanted) * new / spent, decoding, [list(answer.tokens) for answer in answers]


def engine(backend: ml.Backend, folder: Path, quick: bool) -> Iterator[Row]:
    """32 requests that begin with the same 300 tokens, 20 of their own and 64 new ones each."""
    model = load_model(folder, backend, ml.DType.F32)
    wanted = prompts(model.config.vocab_size, 32, 300, 20)
    options = EngineOptions(max_sequences=32, capacity=400)
    with Engine(model, None, options) as running:
        rounds = [generate(running, wanted, 64)[:2] for _ in range(2 if quick else 6)][1:]
    name = f"engine, {folder.name}, 32 requests on one prefix"
    for label, values in zip(("ours", "ours, while decoding"), zip(*rounds, strict=True), strict=True):
        yield summary(f"{backend.name} float32", name, label, values, unit="tokens/s")


def peers(backend: ml.Backend, quick: bool, count: int = 32, new: int = 64) -> Iterator[Row]:
    """The same by transformers' continuous batching with paged attention, on one random Llama."""
    import torch
    from transformers import GenerationConfig, LlamaForCausalLM
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    group, name = f"{backend.name} float32", f"engine, random Llama, {count} requests on one prefix"
    with tempfile.TemporaryDirectory() as folder:
        path = random_model(Path(folder), SMALL, 0.2)
        theirs = LlamaForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        theirs.to(backend.devices[0].name)
        model = load_model(path, backend, ml.DType.F32)
    wanted = prompts(model.config.vocab_size, count, 60 if quick else 300, 20)
    settings = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1)
    paged = ContinuousBatchingConfig(num_blocks=64 if quick else 1024, max_batch_tokens=1024)
    rates: dict[str, list[float]] = {"ours": [], "transformers, paged": []}
    same = 0
    with Engine(model, None, EngineOptions(max_sequences=count, capacity=400)) as running:
        for _ in range(2 if quick else 4):
            rate, _, mine = generate(running, wanted, new)
            rates["ours"].append(rate)
            began = time.perf_counter()
            found = theirs.generate_batch(wanted, settings, paged, warmup=False)
            spent = time.perf_counter() - began
            answers = [list(found[f"req_{i}"].generated_tokens) for i in range(len(wanted))]
            rates["transformers, paged"].append(sum(map(len, answers)) / spent)
            same = sum(a == b for a, b in zip(mine, answers, strict=True))
    for label, values in rates.items():
        ratio = statistics.median(values[1:]) / statistics.median(rates["transformers, paged"][1:])
        note = f"{same} of {count} answers are the same" if label != "ours" else ""
        row = summary(group, name, label, values[1:], unit="tokens/s", note=note)
        yield dataclasses.replace(row, ratio=ratio)
