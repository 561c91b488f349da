"""Stage f: put, get, attend and start_forward on a device, beside floors written by hand and other caches."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

import ml
from benchmarks.attention import ROOM, SCALE, Filled, filled
from benchmarks.gpu.device import Device
from benchmarks.gpu.record import Skipped, Stage, needs
from benchmarks.models import RANDOM, SMALL, random_llama
from benchmarks.put_get import DTYPES, GROUPS, LENGTHS, Case
from kvcache import Batch
from kvcache.testing.bench import DIM, HEADS, LAYERS, Contender, Decoding, floors_for
from kvcache_engine import Engine, EngineOptions, GenerationOptions

GOALS = (64, 8192), (3, 130)
"""Sequences, and tokens of each, that goals are about; the second of a quick run."""
LARGEST_COPY = 1 << 32
"""Bytes of K and V up to which transformers' StaticCache, whose attention copies them, is measured too."""


@dataclass(frozen=True)
class Packed:
    """The tokens of a filled cache as FlashAttention's variable lengths take them: (tokens, heads, dim)."""

    query: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sequences: int
    each: int

    def varlen(self) -> tuple[str, Callable[[], torch.Tensor]]:
        """The best call for variable lengths that is here; on a CPU there is none: one over equal lengths."""
        ends = torch.arange(self.sequences + 1, dtype=torch.int32, device=self.k.device)
        shape = (self.query, self.k, self.v, ends, ends * self.each, 1, self.each)
        if not self.k.is_cuda:
            return "sdpa, equal lengths", self.sdpa
        if importlib.util.find_spec("flash_attn"):
            from flash_attn import flash_attn_varlen_func

            return "flash_attn_varlen_func", lambda: flash_attn_varlen_func(*shape, softmax_scale=SCALE)
        from torch.nn.attention.varlen import varlen_attn

        own = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
        return "torch varlen_attn", lambda: varlen_attn(*shape, **own)

    @property
    def rows(self) -> list[torch.Tensor]:
        """(sequences, heads, tokens, dim) each."""
        tensors = self.query, self.k, self.v
        return [x.view(self.sequences, -1, *x.shape[1:]).transpose(1, 2) for x in tensors]

    def sdpa(self) -> torch.Tensor:
        found = torch.nn.functional.scaled_dot_product_attention(*self.rows, scale=SCALE, enable_gqa=True)
        return found.transpose(1, 2).flatten(0, 1)

    def static(self) -> Callable[[], torch.Tensor]:
        """transformers' StaticCache, and its attention by SDPA; a step writes the last token again."""
        from transformers import LlamaConfig, StaticCache
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        config = LlamaConfig(num_hidden_layers=1, hidden_size=HEADS * DIM, num_attention_heads=HEADS,
                             num_key_value_heads=HEADS)  # fmt: skip
        cache, (query, k, v) = StaticCache(config=config, max_cache_len=self.each + ROOM), self.rows
        cache.update(k, v, 0)
        mask = (torch.arange(self.each + ROOM, device=k.device) < self.each).expand(self.sequences, 1, 1, -1)
        module = SimpleNamespace(num_key_value_groups=GROUPS, is_causal=True)
        last = k[:, :, -1:], v[:, :, -1:]

        def step() -> torch.Tensor:
            cache.layers[0].cumulative_length.sub_(1)
            found = sdpa_attention_forward(module, query, *cache.update(*last, 0), mask, scaling=SCALE)
            return found[0].flatten(0, 1)

        return step


def packed(made: Filled, sequences: int, query: ml.Tensor) -> Packed:
    key = torch.cat([part.native for seq in range(sequences) for part in made.stored(seq)])
    return Packed(query.native, key, key.clone(), sequences, made.each)


def attend(stage: Stage) -> None:
    """One layer of a decode step: times, and bytes of K and V per second beside the memory's."""
    device = stage.device
    peaks = device.peak()
    stage.note("memory, bytes per second", peaks)
    for each in (130,) if stage.quick else (1024, 8192, 32768):
        for sequences in (1, 3) if stage.quick else (1, 8, 64, 256):
            name = f"{sequences} sequences of {each}"
            case = functools.partial(_attend, stage, device, name, sequences, each, max(peaks.values()))
            stage.attempt(name, case)


def _attend(stage: Stage, device: Device, name: str, sequences: int, each: int, peak: float) -> None:
    dtype = "bfloat16" if device.cuda else "float32"
    nbytes = 2 * sequences * each * HEADS * DIM * DTYPES[dtype].itemsize
    if 2.5 * nbytes > device.free():
        raise Skipped(f"{2.5 * nbytes / 1e9:.0f} GB are needed, {device.free() / 1e9:.0f} GB are free")
    with device.open() as backend, torch.inference_mode():
        made = filled(backend, sequences, each, DTYPES[dtype])
        cache, ctx, token = made.cache, made.ctx, made.token(sequences)
        torch.manual_seed(0)
        drawn = torch.randn(sequences, HEADS * GROUPS, DIM, device=device.torch)
        query = ctx.from_native(drawn.to(token.native))
        floor = packed(made, sequences, query)
        label, varlen = floor.varlen()

        def ours() -> Any:
            _again(cache)
            cache.put(ctx, token, token)
            return cache.attend(ctx, query, SCALE).native

        calls: dict[str, Callable[[], Any]] = {label: varlen, "sdpa, equal lengths": floor.sdpa}
        calls |= {"ours, put + attend": ours, "ours, attend": lambda: cache.attend(ctx, query, SCALE).native}
        if nbytes <= LARGEST_COPY and importlib.util.find_spec("transformers"):
            calls["transformers StaticCache, sdpa"] = floor.static()
        first = {key: stage.attempt(f"{name}: {key}", call) for key, call in calls.items()}
        results = {key: found.float() for key, found in first.items() if found is not None}
        label = label if label in results else "sdpa, equal lengths"
        largest = results[label].abs().max()
        off = {key: ((found - results[label]).abs().max() / largest).item() for key, found in results.items()}
        stage.note(f"{name}: largest differences, as a share of {label}'s largest value", off)
        assert max(off.values()) < 0.02, f"not the same attention: {off}"  # BF16's last bits are less
        calls = {key: calls[key] for key in results}
        times = device.compare({key: Contender(call) for key, call in calls.items()}, floors=(label,))
        rates = {key: nbytes / found["event_us"] * 1e6 for key, found in times.items()}
        stage.note(name, {"bytes": nbytes, "bytes_per_s": rates, "times": times})
        if (sequences, each) in GOALS:
            ratio, share = times["ours, put + attend"]["event_ratio"], rates["ours, attend"] / peak
            stage.goal(f"put + attend, {name}, in times of {label}", ratio, 1.15)
            stage.goal(f"attend, {name}, as a share of the memory's speed", share, 0.8, at_most=False)


def _again(cache: Any) -> None:
    """Let the layer be put once more in this pass, as a further one of the same shapes would be."""
    held = cache.storage.buffers[0]
    held.stamp -= held.stamp % 2


def put_get(stage: Stage) -> None:
    """One token and a chunk, and views of all, beside slice writes by hand and transformers' StaticCache."""
    device = stage.device
    dtype = "bfloat16" if device.cuda else "float32"
    lengths = (64,) if stage.quick else LENGTHS
    cases = [Case(f"put + get, 1 token, {n}", dtype, n, 1) for n in lengths]
    cases.append(Case(f"put + get, 512 tokens, {lengths[-1]}", dtype, lengths[-1], 512, grow=False))
    with device.open() as backend:
        for case in cases:
            stage.attempt(case.name, functools.partial(_put_get, stage, device, backend, case))


def _put_get(stage: Stage, device: Device, backend: ml.Backend, case: Case) -> None:
    with torch.device(device.torch):  # where they are made; it would slow what is timed
        hand = floors_for("torch")
        contenders = dict(hand.floors(*case.shape))
        peers = {name: peer for name, peer in hand.peers(*case.shape).items() if "StaticCache" in name}
    ours = Decoding(backend, case.history, case.new, DTYPES[case.dtype], case.grow)
    contenders |= {"ours": ours.contender()} | peers
    stage.note(f"{case.name}, {LAYERS - 1} layers", device.compare(contenders, floors=hand.FLOORS))


class Steps:
    """Decode steps of one layer over sequences that grow, and are cut back when their room is full."""

    def __init__(self, backend: ml.Backend, sequences: int, each: int) -> None:
        self.made, self.sequences, self.grown = filled(backend, sequences, each, ml.DType.BF16), sequences, 0
        self.token = self.made.token(sequences)
        self.query = self.made.ctx.full((sequences, HEADS * GROUPS, DIM), 0.1, ml.DType.BF16)

    def room(self, steps: int = 1) -> None:
        if self.grown + steps > ROOM:
            for seq in range(self.sequences):
                self.made.cache.remove(seq, self.made.each)
            self.grown = 0

    def start(self) -> None:
        position = self.made.each + self.grown
        self.grown += 1
        self.made.cache.start_forward(
            self.made.ctx, Batch([position] * self.sequences, range(self.sequences))
        )

    def layer(self) -> None:
        _again(self.made.cache)
        self.made.cache.put(self.made.ctx, self.token, self.token)
        self.made.cache.attend(self.made.ctx, self.query, SCALE)

    def first(self) -> None:
        self.start()
        self.layer()


def start_forward(stage: Stage) -> None:
    """A pass before its first layer, with it, and each further layer; launches and waits of these."""
    device = stage.device
    counts: dict[int, dict[str, float]] = {}
    each, numbers = (32, (1, 2, 4)) if stage.quick else (1024, (1, 8, 64, 256))
    for sequences in numbers:
        with device.open() as backend, torch.inference_mode():
            steps = Steps(backend, sequences, each)
            ways = {
                "start_forward": Contender(steps.start, steps.room, steps.layer),
                "start_forward and the first layer": Contender(steps.first, steps.room),
                "a further layer": Contender(steps.layer),
            }
            stage.note(f"{sequences} sequences", device.compare(ways))
            counts[sequences] = device.per_step(steps.layer)
            stage.note(f"{sequences} sequences: a further layer", counts[sequences])
            steps.room(ROOM)
            stage.note(f"{sequences} sequences: a pass of one layer", device.per_step(steps.first))
    most, few = counts[numbers[-1]], counts[numbers[1]]
    growth = most["launches"] - few["launches"]
    stage.goal(f"launches per layer, {numbers[-1]} sequences less {numbers[1]}", growth, 0)
    stage.goal(
        "waits per layer", max(max(found["waits"], found["waits_told"]) for found in counts.values()), 0
    )


def engine(stage: Stage) -> None:
    """Waits between one sampled token and the next, of eight requests at once."""
    device, rows = stage.device, 2 if stage.quick else 8
    with device.open() as backend:
        options = EngineOptions(max_sequences=rows, capacity=256)
        with Engine(random_llama(backend, SMALL if stage.quick else RANDOM), None, options) as running:
            settings = GenerationOptions(max_new_tokens=200, ignore_eos=True)
            for row in range(rows):
                running.submit([3 + row, *range(20, 40 + 3 * row)], settings)
            while any(request.prefilling for request in (*running.waiting, *running.running)):
                running.step()
            found = device.per_step(running.step)
            stage.note("a step", found | device.compare({"step": Contender(running.step)})["step"])
    stage.goal("waits between sampled tokens", max(found["waits"], found["waits_told"]), 1)


def paged(stage: Stage) -> None:
    """The engine's tokens per second, and those of transformers' continuous batching with paged attention."""
    needs("transformers", "safetensors")
    from benchmarks.ragged_engine import peers

    with stage.device.open() as backend:
        for row in peers(backend, stage.quick, *((3, 6) if stage.quick else (64, 128))):
            stage.note(row.contender, {"tokens_per_s": row.median, "ratio": row.ratio, "note": row.note})


STEPS = {
    "attend": attend, "start_forward": start_forward, "put + get": put_get, "engine": engine, "paged": paged,
}  # fmt: skip
