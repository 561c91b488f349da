"""Tensor parallelism on this machine: what an exchange costs, and tokens per second by number of ranks.

python -m benchmarks.tensor_parallel [--quick]

Ranks are processes with ``--threads`` threads each. Runs of one and of two ranks take turns, so that what
else the machine does falls on both.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import ml
from benchmarks.models import RANDOM, RandomWeights, random_llama
from kvcache.cache import Batch
from kvcache_engine.loading import bundled_model, load_model
from kvcache_engine.models.families import parse_config
from kvcache_engine.models.llama import Llama
from kvcache_engine.parallel import join, share_of
from kvcache_engine.rank import LOST, job_of_rank, leave
from kvcache_engine.ranks import run_ranks

ENGINES = ("torch", "mlx")
KIBIBYTES = (8, 64, 1024)
SHALLOW = {**RANDOM, "num_hidden_layers": 8}
MODELS = {"the bundled model": None, "random Llama, 8 layers of 1,024": SHALLOW}
PROMPT, DECODED = 64, 48


# In a rank.


def rank_main() -> None:
    job = json.loads(job_of_rank())
    kind = job.get("device", "cpu")
    device = f"cuda:{os.environ['LOCAL_RANK']}" if kind == "cuda" else kind
    with ml.open_backend(job["backend"], device=device) as backend:
        group = join(backend, job["size"])
        found: dict[str, Any] = {}
        if job["what"] in ("exchange", "both"):
            found |= exchanges(backend, group, job)
        if job["what"] in ("decode", "both"):
            found |= decoding(backend, group, job)
        group.barrier()
        if group.rank == 0:
            Path(job["out"]).write_text(json.dumps(found), encoding="utf-8")
        group.barrier()
        if group.rank == job.get("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif "killed" in job:
            try:
                group.barrier()
            except ml.GroupError:
                leave(LOST)
    leave(0)


def exchanges(backend: Any, group: Any, job: Any) -> dict[str, dict[str, float]]:
    """Microseconds of one sum, by size: the framework's own call, and ours, in turn."""
    found: dict[str, dict[str, float]] = {}
    with backend.new_context() as ctx:
        for size in KIBIBYTES:
            tensor = ctx.full((size * 256,), 1.0, ml.DType.F32)
            calls = {"framework": raw_sum(backend, group, tensor), "ours": ours_sum(ctx, group, tensor)}
            times: dict[str, list[float]] = {name: [] for name in calls}
            for i in range(job["rounds"] + 10):
                for name, call in calls.items():
                    began = time.perf_counter()
                    call()
                    if i >= 10:
                        times[name].append(time.perf_counter() - began)
            found[str(size)] = {name: statistics.median(all_) * 1e6 for name, all_ in times.items()}
    return found


def raw_sum(backend: Any, group: Any, tensor: Any) -> Callable[[], object]:
    if backend.name == "torch":
        import torch.distributed as dist

        array = tensor.native.clone()
        return lambda: (dist.all_reduce(array), _wait(array))
    import mlx.core as mx

    native, stream = group._native, backend.work.stream
    array = tensor.native
    return lambda: mx.eval(mx.distributed.all_sum(array, group=native, stream=stream))


def _wait(array: Any) -> None:
    """Until a GPU has done it; on a CPU it is done."""
    if array.is_cuda:
        import torch

        torch.cuda.synchronize(array.device)


def ours_sum(ctx: Any, group: Any, tensor: Any) -> Callable[[], object]:
    def call() -> None:
        found = group.all_reduce(ctx, tensor)
        ctx.compute(found)
        if ctx.backend.name == "torch":
            _wait(found.native)
        if ctx.backend.name == "mlx":
            import mlx.core as mx

            mx.synchronize(ctx.backend.work.stream)

    return call


def decoding(backend: Any, group: Any, job: Any) -> dict[str, float]:
    """Tokens per second of a prompt, and of what follows it token by token."""
    model = model_of(job["model"], backend, group)
    cache = model.make_cache()
    cache.init(backend, ml.DType.F32, 1, 512, PROMPT)
    tokens = [int(token) for token in np.random.default_rng(0).integers(3, 2000, PROMPT)]
    seconds: list[float] = []
    at = 0
    for step in range(job["rounds"] + 3):
        batch = Batch(
            range(at, at + len(tokens)), [0] * len(tokens), inputs=tokens, outputs=[len(tokens) - 1]
        )
        began = time.perf_counter()
        with backend.new_context() as ctx:
            cache.start_forward(ctx, batch)
            row = model.forward(ctx, batch, cache).to_numpy()[0]
        taken = time.perf_counter() - began
        at += len(tokens)
        if step == 0:
            cache.remove(0, 0)  # the first prompt warms up
            at = 0
        elif step == 1:
            prompt, tokens = PROMPT / taken, [int(row.argmax())]
        else:
            tokens = [int(row.argmax())]
            seconds.append(taken)
    return {"prompt": prompt, "decode": 1 / statistics.median(seconds[1:])}


def model_of(name: str, backend: Any, group: Any) -> Any:
    raw = MODELS[name]
    if raw is None:
        return load_model(bundled_model(), backend, group=group)
    if group.size == 1:
        return random_llama(backend, raw)
    config: Any = parse_config(raw)
    weights: Any = RandomWeights(Llama.shapes(config))
    share = share_of(config, group)
    return Llama(
        backend, share.config(config), share.weights(weights, config.head_dim), ml.DType.F32, None, share
    )


# In the command.


def measured(job: dict[str, Any], threads: int, found: dict[str, Any] | None = None) -> Any:
    """What the ranks of a job have measured; in ``found`` too, also where one of them is lost then."""
    found = {} if found is None else found
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [
            sys.executable,
            "-P",
            "-c",
            "from benchmarks.tensor_parallel import rank_main; rank_main()",
        ]
        environ = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        launcher = ml.backend_specs()[job["backend"]].launcher
        assert launcher is not None
        text = json.dumps({**job, "out": str(out)})
        try:
            run_ranks(launcher(job["size"]), command, job["size"], text.encode(), 120.0, environ)
        finally:
            if out.is_file():
                found.update(json.loads(out.read_text(encoding="utf-8")))
        return found


def exchange_table(quick: bool) -> Iterator[str]:
    yield "| sum between 2 ranks | " + " | ".join(f"{size} KiB" for size in KIBIBYTES) + " |"
    yield "|---|" + "---|" * len(KIBIBYTES)
    for engine in ENGINES:
        job = {"backend": engine, "what": "exchange", "size": 2, "rounds": 40 if quick else 400}
        runs = [measured(job, 1) for _ in range(1 if quick else 3)]
        for who in ("framework", "ours"):
            cells = [min(run[str(size)][who] for run in runs) for size in KIBIBYTES]
            name = {"torch": "gloo", "mlx": "MLX's ring"}[engine] if who == "framework" else "ours"
            yield f"| {engine}, {name} | " + " | ".join(f"{cell:.0f} µs" for cell in cells) + " |"


def decode_table(quick: bool, threads: int) -> Iterator[str]:
    yield "| decoding, tokens/s | 1 rank | 2 ranks | 2 against 1 | prompt of 64, 2 against 1 |"
    yield "|---|---|---|---|---|"
    for engine in ENGINES:
        for model in MODELS:
            found: dict[int, list[dict[str, float]]] = {1: [], 2: []}
            job = {"backend": engine, "what": "decode", "model": model, "rounds": DECODED}
            for _ in range(1 if quick else 5):
                for size, runs in found.items():
                    runs.append(measured({**job, "size": size}, threads))
            one, two = (
                {key: statistics.median(run[key] for run in runs) for key in ("prompt", "decode")}
                for runs in found.values()
            )
            cells = [f"{one['decode']:.1f}", f"{two['decode']:.1f}"]
            cells += [f"{two[key] / one[key]:.2f}x" for key in ("decode", "prompt")]
            yield f"| {engine}, {model} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tensor_parallel", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round; a glance, no result")
    parser.add_argument("--threads", type=int, default=1, help="of each rank (default: 1)")
    options = parser.parse_args()
    for table in (exchange_table(options.quick), decode_table(options.quick, options.threads)):
        for line in table:
            print(line, flush=True)
        print()


if __name__ == "__main__":
    main()
