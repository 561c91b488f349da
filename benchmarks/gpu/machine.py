"""Stage a: versions, the device, what SDPA takes, memory's speed, where the time of a decode step goes."""

from __future__ import annotations

import importlib.metadata
import itertools
import sys
from typing import Any

import torch

import ml
from benchmarks.gpu.device import Device
from benchmarks.gpu.record import Stage
from benchmarks.models import RANDOM, SMALL, random_llama
from benchmarks.put_get import GROUPS
from benchmarks.timing import machine
from benchmarks.whole_model import Ours
from kvcache.testing.bench import DIM, HEADS

PACKAGES = (
    "ml-kvcache", "numpy", "ml_dtypes", "pluggy", "torch", "triton", "cupy-cuda13x", "cupy-cuda12x",
    "transformers", "safetensors", "tokenizers", "flash-attn", "pytest", "hypothesis", "pytest-xdist",
)  # fmt: skip
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def versions(stage: Stage) -> None:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    stage.note("packages", found)
    stage.note("python", sys.version)
    stage.note("host", machine())
    stage.note("CUDA of torch", torch.version.cuda)
    backends = [(info.name, info.available, info.reason, info.version) for info in ml.available_backends()]
    stage.note("backends", backends)


def properties(stage: Stage) -> None:
    device = stage.device
    if device.cuda:
        found = torch.cuda.get_device_properties(device.torch)
        names = (name for name in dir(found) if not name.startswith("_"))
        stage.note("properties", {name: str(getattr(found, name)) for name in names})
        stage.note("devices", torch.cuda.device_count())
    stage.note("free", device.free())


def chosen_attention(stage: Stage) -> None:
    """What SDPA takes for shapes of ours: a query over a history, many rows, a mask, and grouped heads."""
    device = stage.device
    history = 256 if stage.quick else 8192
    rows, queries = (2, 8) if stage.quick else (64, 512)
    cases = {"1 query": (1, 1, False), "rows of 1": (rows, 1, False), "queries, a mask": (1, queries, True)}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for dtype, (name, case), grouped in itertools.product(DTYPES, cases.items(), (True, False)):
            query, key, mask = _inputs(device, dtype, history, *case)
            keys = key if grouped else key.repeat_interleave(GROUPS, 1)
            label = f"{name}, {dtype}, {'grouped' if grouped else 'repeated'} heads"
            with torch.profiler.record_function(label):
                torch.nn.functional.scaled_dot_product_attention(query, keys, keys, mask, enable_gqa=grouped)
    start = "aten::_scaled_dot_product"
    for event in profile.events():
        if event.name.startswith(start):
            above = event
            while above.cpu_parent is not None:
                above = above.cpu_parent
            stage.note(above.name, event.name.removeprefix("aten::"))


def _inputs(device: Device, dtype: torch.dtype, history: int, rows: int, queries: int, masked: bool) -> Any:
    kind: Any = {"dtype": dtype, "device": device.torch}
    query = torch.zeros(rows, HEADS * GROUPS, queries, DIM, **kind)
    key = torch.zeros(1, HEADS, history, DIM, **kind).expand(rows, -1, -1, -1)
    return query, key, torch.zeros(queries, history, **kind) if masked else None


def bandwidth(stage: Stage) -> None:
    """Bytes per second, read and written; to and from the host by the size of a page."""
    device = stage.device
    stage.note("peak", device.peak())
    for mib in (1,) if stage.quick else (1, 16, 256, 2048):
        stage.note(f"copies of {mib} MiB", device.copies(mib << 20))


def decode_profile(stage: Stage) -> None:
    """The kernels of a decode step of the runner's own Llama, by their time."""
    device, history = stage.device, 64 if stage.quick else 2048
    with device.open() as backend:
        ours = Ours(random_llama(backend, SMALL if stage.quick else RANDOM), history).fill(history)
        for _ in range(3):
            ours.step()
        found, waits = device.kernels(ours.step)
        kernels = sorted(found.items(), key=lambda item: -sum(item[1]))
        stage.note("kernels", [(name, len(times), sum(times)) for name, times in kernels[:25]])
        stage.note("launches", sum(map(len, found.values())))
        stage.note("waits", waits)
        stage.note("kernel time of a step, us", sum(map(sum, found.values())))
        stage.note("step", device.compare({"step": ours.contender()})["step"])


STEPS = {
    step.__name__.replace("_", " "): step
    for step in (versions, properties, chosen_attention, bandwidth, decode_profile)
}
