"""Stage h: layers over several devices, an exchange between ranks, and a rank that is killed."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks import tensor_parallel
from benchmarks.gpu.answers import over_devices
from benchmarks.gpu.record import Skipped, Stage, needs_backend
from kvcache_engine.rank import RanksError


def _devices(stage: Stage) -> list[str]:
    """Two of them: GPUs, or places on the CPU."""
    needs_backend("torch")
    if stage.options.device == "cpu":
        return ["cpu:0", "cpu:1"]
    if (count := torch.cuda.device_count()) < 2:
        raise Skipped(f"{count} GPU is here; two are needed")
    return ["cuda:0", "cuda:1"]


def layers(stage: Stage) -> None:
    over_devices(stage, _devices(stage))


def ranks(stage: Stage) -> None:
    """Microseconds of a sum over two ranks, NCCL's or gloo's and ours; tokens per second; one is killed."""
    _devices(stage)
    model = list(tensor_parallel.MODELS)[0 if stage.quick else 1]
    kind = "cpu" if stage.options.device == "cpu" else "cuda"
    job = {"backend": "torch", "device": kind, "model": model, "rounds": 4 if stage.quick else 200}
    found: dict[str, Any] = {}
    told, began = "nothing", time.perf_counter()
    try:
        tensor_parallel.measured({**job, "what": "both", "size": 2, "killed": 1}, 1, found)
    except RanksError as error:
        told = str(error)
    stage.note("seconds in all", time.perf_counter() - began)
    stage.note("two ranks: microseconds by KiB, and tokens per second", found)
    stage.note("told of the rank that was killed", told)
    assert "rank 1 of 2 was killed" in told
    assert "decode" in found
    if not stage.quick:
        stage.note("one rank", tensor_parallel.measured({**job, "what": "decode", "size": 1}, 1))


STEPS = {"layers": layers, "ranks": ranks}
