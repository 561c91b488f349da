"""One conversation that several runtimes continue through one store: ``python -m examples.many_runtimes``.

Each turn is a new process of another runtime, which starts from what the earlier ones have stored. A second
process computes the whole prompt, and both must generate the same tokens. ``--vllm PYTHON`` adds a turn in
vLLM, with that interpreter (``.venv-vllm/bin/python``, see ``make test-vllm``).

``--runtimes transformers mlx-lm --store valkey://HOST`` separates prefill from decoding: PyTorch fills the
pages, which go to a Valkey (or Redis) server, and mlx-lm decodes from them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PAGE = 128
VOCABULARY = 512
RESULT = "RESULT "
Turn = tuple[list[int], int, float]
"""Tokens of the answer, how many of the prompt came from the store, seconds to the first token."""


def write_model(folder: Path, **sizes: Any) -> Path:
    """A Llama with random weights, which says something else for each prompt."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = {
        "vocab_size": VOCABULARY, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": False,
        "max_position_embeddings": 4096, "initializer_range": 0.05,
    }  # fmt: skip
    LlamaForCausalLM(LlamaConfig(**config | sizes)).save_pretrained(folder)
    return folder


def in_transformers(folder: Path, store: str, warm: list[int], tokens: list[int], count: int) -> Turn:
    import torch
    from transformers import AutoModelForCausalLM

    from kvcache.integrations.transformers import HFPrefixCache

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with HFPrefixCache(model, max_sequences=1, **_options(folder, store)) as cache:

        def said(prompt: list[int], new: int) -> list[int]:
            out = cache.generate(
                torch.tensor([prompt]), max_new_tokens=new, do_sample=False, eos_token_id=None
            )
            return list(out[0, len(prompt) :].tolist())

        return _timed(said, warm, tokens, count, lambda: cache.prefix.stats.store)


def in_mlx_lm(folder: Path, store: str, warm: list[int], tokens: list[int], count: int) -> Turn:
    from mlx_lm.utils import load_model

    from kvcache.integrations.mlx_lm import MLXPrefixCache

    model, _ = load_model(folder)
    with MLXPrefixCache(model, max_sequences=1, **_options(folder, store)) as cache:

        def said(prompt: list[int], new: int) -> list[int]:
            return [token for token, _ in cache.generate(prompt, max_tokens=new)]

        return _timed(said, warm, tokens, count, lambda: cache.prefix.stats.store)


def in_engine(
    folder: Path, store: str, warm: list[int], tokens: list[int], count: int, backend: str = "torch"
) -> Turn:
    import ml
    from kvcache_engine import Engine, EngineOptions, GenerationOptions, load_model

    options = EngineOptions(max_sequences=1, capacity=4096, block_size=PAGE, fetch="always")
    with ml.open_backend(backend, device="cpu") as opened:
        model = load_model(folder, opened)
        with Engine(model, None, options, tiers=[store] if store else []) as engine:

            def said(prompt: list[int], new: int) -> list[int]:
                (found,) = engine.complete([prompt], GenerationOptions(new, ignore_eos=True))
                return list(found.tokens)

            return _timed(said, warm, tokens, count, lambda: engine.prefix.stats.store)


def in_vllm(folder: Path, store: str, warm: list[int], tokens: list[int], count: int) -> Turn:
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1")
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    connector: dict[str, Any] = {
        "kv_connector": "KVCacheConnector", "kv_connector_module_path": "kvcache.integrations.vllm",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": store, "page_tokens": PAGE},
    }  # fmt: skip
    llm = LLM(
        model=str(folder), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, block_size=32,
        max_model_len=4096, kv_transfer_config=KVTransferConfig(**connector) if store else None,
    )  # fmt: skip
    cached = 0

    def said(prompt: list[int], new: int) -> list[int]:
        nonlocal cached
        sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        (found,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        cached += found.num_cached_tokens or 0
        return list(found.outputs[0].token_ids)

    try:
        return _timed(said, warm, tokens, count, lambda: cached)
    finally:
        llm.llm_engine.engine_core.shutdown()  # what waits to be written is


RUNTIMES = {"transformers": in_transformers, "mlx-lm": in_mlx_lm, "engine": in_engine, "vllm": in_vllm}


def _options(folder: Path, store: str) -> dict[str, Any]:
    import ml
    from kvcache.stores import identity_of

    stored = {"tiers": [store], "identity": identity_of(folder, ml.DType.F32)} if store else {}
    return {"capacity": 4096, "block_size": PAGE, **stored}


def _timed(said: Any, warm: list[int], tokens: list[int], count: int, restored: Any) -> Turn:
    """``warm``: another prompt, so that the clock does not measure what starts once."""
    said(warm, 1)
    before, began = restored(), time.perf_counter()
    said(tokens, 1)
    first, found = time.perf_counter() - began, restored() - before
    return said(tokens, count), found, first


def turn(runtime: str, folder: Path, store: str, tokens: list[int], count: int) -> Turn:
    """A turn of the conversation in this process; ``store`` "": on its own."""
    warm = [(7 * token + 3) % VOCABULARY for token in tokens[: max(8, len(tokens) // 4)]]
    return RUNTIMES[runtime](folder, store, warm, tokens, count)


def _elsewhere(python: str, runtime: str, folder: Path, store: str, tokens: list[int], count: int) -> Turn:
    """As ``turn``, in a process of its own."""
    asked = json.dumps([runtime, str(folder), store, tokens, count])
    command = [python, "-m", "examples.many_runtimes", "--turn"]
    done = subprocess.run(command, input=asked, text=True, stdout=subprocess.PIPE, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith(RESULT))
    answer, restored, first = json.loads(line.removeprefix(RESULT))
    return answer, restored, first


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.many_runtimes", description=__doc__)
    parser.add_argument("--tokens", type=int, default=2000, help="of the prompt")
    parser.add_argument("--runtimes", nargs="+", choices=RUNTIMES, metavar="RUNTIME", help=" ".join(RUNTIMES))
    parser.add_argument("--store", metavar="URL", help="default: a new folder")
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vLLM")
    parser.add_argument("--turn", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.turn:
        runtime, folder, store, tokens, count = json.loads(sys.stdin.read())
        print(RESULT + json.dumps(turn(runtime, Path(folder), store, tokens, count)))
        return
    order = options.runtimes or ["transformers", "mlx-lm", "engine", "transformers"]
    if options.vllm and "vllm" not in order:
        order = ["vllm", *order]
    with tempfile.TemporaryDirectory() as place:
        folder, store = (
            write_model(Path(place) / "model"),
            options.store or f"file://{place}/store?durable=no",
        )
        tokens = [(31 * i * i + 17 * i) % VOCABULARY for i in range(options.tokens)]
        print("| turn in | computed, s | restored, s | tokens restored |\n|---|---|---|---|")
        for runtime in order:
            python = options.vllm if runtime == "vllm" else sys.executable
            expected, _, alone = _elsewhere(python, runtime, folder, "", tokens, 16)
            answer, restored, first = _elsewhere(python, runtime, folder, store, tokens, 16)
            if answer != expected:
                raise SystemExit(f"{runtime}: {answer} with the store, {expected} without")
            print(f"| {runtime} | {alone:.2f} | {first:.2f} | {restored:,} of {len(tokens):,} |", flush=True)
            tokens += answer


if __name__ == "__main__":
    main()
