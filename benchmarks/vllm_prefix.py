"""Time to the first token in vLLM, with our store and without: ``python -m benchmarks.vllm_prefix``.

Run it with a Python that has vLLM (``.venv-vllm/bin/python``, see ``make test-vllm``). Each row is a process
of its own, which has computed other prompts when the clock starts, and waited for the disk to have written
them; a second process begins with what the first has stored. All have to say the same tokens. Beside ours
stands vLLM's ExampleConnector, which stores to disk too; its OffloadingConnector runs on GPUs only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.models import transformers_llama
from benchmarks.timing import machine

SIZES = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 4096, "max_position_embeddings": 8192,
}  # fmt: skip
NEW = 16
RESULT = "RESULT "


@dataclass(frozen=True)
class Found:
    """Of one process: seconds to the first token, by the clock and of the processor; tokens of the prompt
    that were not computed; the answer."""

    first: float
    own: float
    cached: int
    tokens: list[int]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm_prefix", description=__doc__)
    parser.add_argument("--tokens", type=int, default=2000, help="of the prompt")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each row; the median is shown")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--page-tokens", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(RESULT + json.dumps(one(**options.one)), flush=True)
        return
    with tempfile.TemporaryDirectory() as temporary:
        compare(options, Path(temporary))


def compare(options: argparse.Namespace, folder: Path) -> None:
    transformers_llama(**SIZES, initializer_range=0.05).save_pretrained(folder / "model")
    given = {"model": str(folder / "model"), "length": options.tokens, "dtype": options.dtype}
    rows: dict[str, list[Found]] = {}
    for number in range(options.rounds):
        rows.setdefault("vLLM alone", []).append(ask(given))
        for size in options.page_tokens:
            store = {"store": f"file://{folder}/store{number}-{size}", "page_tokens": size}
            for name in ("computes and stores", "reads"):
                rows.setdefault(f"ours, pages of {size}, {name}", []).append(ask({**given, "ours": store}))
        theirs = {"shared_storage_path": f"{folder}/example{number}"}
        for name in ("computes and stores", "reads"):
            rows.setdefault(f"ExampleConnector, {name}", []).append(ask({**given, "example": theirs}))
    expected = rows["vLLM alone"][0].tokens
    alone = statistics.median(found.own for found in rows["vLLM alone"])
    model = f"a Llama of {SIZES['num_hidden_layers']} layers of {SIZES['hidden_size']}"
    print(f"\n{machine()}; {model}, {options.dtype}, a prompt of {options.tokens}, {options.rounds} rounds\n")
    head = ("", "first token, s", "of the processor", "of vLLM alone", "not computed", "tokens")
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for name, found in rows.items():
        clock = statistics.median(one.first for one in found)
        seconds = sorted(one.own for one in found)
        middle = statistics.median(seconds)
        same = "equal" if all(one.tokens == expected for one in found) else "**others**"
        spread = f"{middle:.2f} ({seconds[0]:.2f} to {seconds[-1]:.2f})"
        print(f"| {name} | {clock:.2f} | {spread} | {middle / alone:.2f} | {found[0].cached} | {same} |")


def ask(given: dict[str, Any]) -> Found:
    command = [sys.executable, "-m", "benchmarks.vllm_prefix", "--one", json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    if not lines:
        raise SystemExit(
            f"benchmarks.vllm_prefix: a process failed\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
    found = Found(**json.loads(lines[0].removeprefix(RESULT)))
    kind = "ours" if "ours" in given else "example" if "example" in given else "alone"
    print(f"{kind}: {found.first:.3f} s, {found.cached} not computed", flush=True)
    return found


def one(
    model: str,
    length: int,
    dtype: str,
    ours: dict[str, Any] | None = None,
    example: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What this process does; everything of vLLM is here."""
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    os.environ.update(settings, VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1")
    from vllm import LLM
    from vllm.config import KVTransferConfig

    transfer: dict[str, Any] = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    if ours is not None:
        transfer |= {"kv_connector": "KVCacheConnector", "kv_connector_extra_config": ours}
        transfer |= {"kv_connector_module_path": "kvcache.integrations.vllm"}
    elif example is not None:
        transfer |= {"kv_connector": "ExampleConnector", "kv_connector_extra_config": example}
    alone = ours is None and example is None
    llm = LLM(
        model=model, dtype=dtype, skip_tokenizer_init=True, enforce_eager=True, block_size=128,
        max_model_len=length + 256, kv_transfer_config=None if alone else KVTransferConfig(**transfer),
    )  # fmt: skip
    engine = llm.llm_engine
    for seed in (3, 5):  # what is done for the first time, full passes and short ones
        generate(
            engine,
            f"warm{seed}",
            [(i * seed + os.getpid()) % SIZES["vocab_size"] for i in range(length // seed)],
        )
        generate(engine, f"again{seed}", [seed] * 40)
    time.sleep(3)  # what is stored of these has left the queue
    os.sync()
    first, own, cached, tokens = generate(
        engine, "prompt", [(i * 7919 + 13) % SIZES["vocab_size"] for i in range(length)]
    )
    engine.engine_core.shutdown()
    return {"first": first, "own": own, "cached": cached, "tokens": tokens}


def generate(engine: Any, name: str, prompt: list[int]) -> tuple[float, float, int, list[int]]:
    from vllm import SamplingParams

    settings = SamplingParams(temperature=0, max_tokens=NEW, detokenize=False, ignore_eos=True)
    clock, own = time.perf_counter(), time.process_time()
    engine.add_request(name, {"prompt_token_ids": prompt}, settings)
    first, found = (0.0, 0.0), None
    while engine.has_unfinished_requests():
        for output in engine.step():
            if found is None:
                first = time.perf_counter() - clock, time.process_time() - own
            found = output
    assert found is not None
    return *first, found.num_cached_tokens or 0, [*found.outputs[0].token_ids]


if __name__ == "__main__":
    main()
