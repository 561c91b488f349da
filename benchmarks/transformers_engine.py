"""The engine over a model of transformers and over our own of its weights, and ``generate_batch``.

    python -m benchmarks.transformers_engine [--clients 1 8 32] [--prefix 300 0] [--rounds 5]

One random Llama on one core, in turn. Of each: tokens/s, prompts included; the median of the times after
which requests have their first token (``generate_batch`` does not tell them). All by the process's own time,
which other programs on the machine do not lengthen.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import ml
from kvcache.integrations.transformers import TransformersModel
from kvcache_engine import Engine, EngineOptions, GenerationOptions, load_model
from kvcache_engine.requests import Token

OWN = 20
"""Tokens of a prompt behind its prefix."""
Prompts = Sequence[Sequence[int]]
Round = tuple[float, float, list[list[int]]]
"""Seconds, seconds to the first token of half of the requests (NaN: not told), and the answers."""


def llama(layers: int) -> Any:
    """57 million parameters in 10 layers."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=16000, hidden_size=640, intermediate_size=1792, num_hidden_layers=layers,
        num_attention_heads=10, num_key_value_heads=5, head_dim=64, max_position_embeddings=2048,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def prompts(clients: int, prefix: int) -> list[list[int]]:
    """They share the first ``prefix`` tokens; with none, all of as many are their own."""
    random = np.random.default_rng(5)
    shared = random.integers(3, 16000, prefix).tolist()
    return [shared + random.integers(3, 16000, OWN if prefix else 300 + OWN).tolist() for _ in range(clients)]


def by_engine(model: Any, wanted: Prompts, new: int) -> Round:
    first: dict[int, float] = {}
    with Engine(model, None, EngineOptions(max_sequences=len(wanted), capacity=512)) as engine:
        began = time.process_time()
        requests = [engine.submit(p, GenerationOptions(new, ignore_eos=True)) for p in wanted]
        while engine.busy:
            for event in engine.step():
                if isinstance(event, Token):
                    first.setdefault(event.request, time.process_time() - began)
        spent = time.process_time() - began
    answers = [[*request.tokens[len(p) :]] for request, p in zip(requests, wanted, strict=True)]
    return spent, statistics.median(first.values()), answers


def by_batch(model: Any, wanted: Prompts, new: int) -> Round:
    settings = transformers.GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1)
    paged = ContinuousBatchingConfig(num_blocks=1024, max_batch_tokens=1024)
    began = time.process_time()
    found = model.generate_batch([[*p] for p in wanted], settings, paged, warmup=False)
    spent = time.process_time() - began
    return spent, float("nan"), [[*found[f"req_{i}"].generated_tokens] for i in range(len(wanted))]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transformers_engine", description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prefix", type=int, nargs="+", default=[300, 0], help="tokens that all share")
    parser.add_argument("--new", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--batch-clients", type=int, nargs="*", help="those that generate_batch runs with")
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    theirs = llama(options.layers)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        own = load_model(Path(folder), ml.open_backend("torch"), ml.DType.F32)
        plain = transformers.LlamaForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    driven = TransformersModel(theirs)
    print("| clients | shared | | tokens/s | first token, s | same answers |\n|---|---|---|---|---|---|")
    for prefix in options.prefix:
        for clients in options.clients:
            wanted = prompts(clients, prefix)
            ways: dict[str, Callable[[], Round]] = {
                "engine, own model": lambda wanted=wanted: by_engine(own, wanted, options.new),
                "engine, transformers' model": lambda wanted=wanted: by_engine(driven, wanted, options.new),
            }
            if options.batch_clients is None or clients in options.batch_clients:
                ways["generate_batch"] = lambda wanted=wanted: by_batch(plain, wanted, options.new)
            rounds: dict[str, list[Round]] = {name: [] for name in ways}
            for i in range(options.rounds):
                for name, way in ways.items():
                    if name != "generate_batch" or i < 1:  # a round of it takes minutes
                        rounds[name].append(way())
            right = rounds["engine, own model"][0][2]
            for name, found in rounds.items():
                rate = clients * options.new / statistics.median(spent for spent, _, _ in found)
                first = statistics.median(first for _, first, _ in found)
                same = sum(a == b for a, b in zip(found[-1][2], right, strict=True))
                print(
                    f"| {clients} | {prefix} | {name} | {rate:,.1f} | {first:.2f} | {same} of {clients} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
