"""Stage e: a model of transformers with its own caches and with ours: eager, compiled, captured by hand."""

from __future__ import annotations

import functools
import shutil
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers

import ml
from benchmarks.gpu.record import Skipped, Stage
from benchmarks.models import RANDOM, SMALL
from benchmarks.transformers_update import CACHES
from kvcache import Batch, CausalCache

Step = Callable[[], object]
PROMPT = 40
STATIC = ("StaticCache", "HFStaticCache")
"""Caches that can be compiled and captured; a quick run compiles the second alone."""
WARM = 4
"""Tokens before the clock is started."""


def model_of(stage: Stage, dtype: torch.dtype = torch.float32) -> Any:
    """A Llama of random weights, far enough apart that rounding decides no token."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    shape = {key: value for key, value in (SMALL if stage.quick else RANDOM).items() if key != "torch_dtype"}
    shape["num_hidden_layers"] = 1 if stage.quick else shape["num_hidden_layers"]
    own = {"initializer_range": 0.1, "tie_word_embeddings": False, "attn_implementation": "sdpa"}
    config = transformers.LlamaConfig(**{**shape, **own})
    return transformers.LlamaForCausalLM(config).to(dtype=dtype, device=stage.options.device).eval()


class Loop:
    """Greedy decoding whose step reads its token from where the step before it has written it."""

    def __init__(self, model: Any, cache: Any, stage: Stage) -> None:
        self.model, self.cache, self.call = model, cache, model
        self.device, self.new = stage.device, 8 if stage.quick else 64
        prompt = torch.arange(3, 3 + PROMPT, device=self.device.torch).unsqueeze(0)
        self.token = self._next(model, prompt)
        self.prompted = self.logits.float()
        """The logits behind the prompt."""

    def _next(self, model: Any, tokens: torch.Tensor) -> torch.Tensor:
        self.logits = model(tokens, cache=self.cache, logits_to_keep=1).logits[:, -1]
        return self.logits.argmax(-1, keepdim=True)

    def step(self) -> None:
        self.token.copy_(self._next(self.call, self.token))

    def run(self, prepared: Callable[[Step], Step] = lambda step: step) -> tuple[list[int], float]:
        """The tokens, and milliseconds of each after the first ones; ``prepared`` makes the step of these."""
        found = [self.token.clone()]
        step: Step = self.step
        for i in range(self.new):
            if i == WARM:
                step = prepared(step)
                self.device.synchronize()
                began = time.perf_counter()
            step()
            found.append(self.token.clone())
        self.device.synchronize()
        spent = (time.perf_counter() - began) * 1e3 / (self.new - WARM)
        return torch.cat(found).flatten().tolist(), spent


def eager(stage: Stage) -> None:
    """Each cache, and attention by the cache: tokens are those of transformers' own, in F32.

    In BF16 the logits behind the prompt are compared with those in F32, and what a step launches is counted.
    """
    ways = {f"{name}, sdpa": (make, "sdpa") for name, make in CACHES.items()}
    ways["HFCache, kvcache"] = CACHES["HFCache"], "kvcache"
    exact: torch.Tensor | None = None
    for dtype in (torch.float32, torch.bfloat16):
        model = model_of(stage, dtype)
        reference = Loop(model, transformers.DynamicCache(config=model.config), stage)
        exact = reference.prompted if exact is None else exact
        wanted = reference.run()[0]
        for way, (make, attention) in ways.items():
            name = f"{way}, {dtype}"
            model.set_attn_implementation(attention)
            stage.attempt(name, functools.partial(_one, stage, name, wanted, exact, model, make))


def _one(
    stage: Stage,
    name: str,
    wanted: list[int],
    exact: torch.Tensor,
    model: Any,
    make: Callable[[Any, int], Any],
) -> None:
    loop = Loop(model, make(model.config, 256), stage)
    found = loop.run()
    kernels, waits = stage.device.kernels(loop.step)
    spent = sum(map(sum, kernels.values()))
    error = ((loop.prompted - exact).norm() / exact.norm()).item()
    further = {"kernel_us": spent, "launches": sum(map(len, kernels.values())), "waits": waits}
    _note(stage, name, wanted, found, further | {"error_of_prompt": error})


def _note(
    stage: Stage, name: str, wanted: list[int], found: tuple[list[int], float],
    further: dict[str, float] | None = None,
) -> None:  # fmt: skip
    """In BF16 ways that round differently may say different things: only F32 is held to it."""
    tokens, spent = found
    same = sum(a == b for a, b in zip(wanted, tokens, strict=True))
    stage.note(name, {"ms_per_token": spent, "tokens": len(tokens), "tokens_alike": same} | (further or {}))
    assert tokens == wanted or "bfloat16" in name, f"{name}: {tokens}; with DynamicCache {wanted}"


def compiled(stage: Stage) -> None:
    kind = "eager" if stage.quick else "inductor"
    if kind == "inductor" and not (shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")):
        raise Skipped("inductor needs a C compiler: none is on the PATH")

    def prepare(loop: Loop) -> None:
        torch._dynamo.reset()
        loop.call = torch.compile(loop.model, backend=kind, fullgraph=True)

    stage.note("compiler", kind)
    _static(stage, STATIC[stage.quick :], prepare, lambda step: step)


def captured(stage: Stage) -> None:
    """One step in a CUDA graph by hand, which is replayed for every further token."""
    _static(stage, STATIC, lambda loop: None, stage.device.captured)


def _static(
    stage: Stage, names: Sequence[str], prepare: Callable[[Loop], None], prepared: Callable[[Step], Step]
) -> None:
    model = model_of(stage)
    wanted = Loop(model, transformers.DynamicCache(config=model.config), stage).run()[0]
    for name in names:

        def one(name: str = name) -> None:
            loop = Loop(model, CACHES[name](model.config, 256), stage)
            prepare(loop)
            _note(stage, name, wanted, loop.run(prepared))

        stage.attempt(name, one)


def graph_rows(stage: Stage) -> None:
    """Put and attention over ``graph_rows``, captured for each context, which doubles."""
    config, graphs = ml.CacheConfig(fixed_context=4), 2 if stage.quick else 5
    device, (heads, dim, rows), steps = stage.device, (4, 64, 3), 8 if stage.quick else 60
    with device.open() as backend, backend.new_context() as ctx:
        fixed, plain = CausalCache(), CausalCache()
        fixed.set_config(config)
        for cache in (fixed, plain):
            cache.init(backend, ml.DType.F32, rows, 64, 64)
        random = torch.Generator(device.torch).manual_seed(0)
        query, key, value, out = torch.zeros(4, rows, heads, dim, device=device.torch)
        new = ctx.from_native(key)
        fixed.start_forward(ctx, Batch([0] * rows, range(rows)), reserve=True)
        fixed.put(ctx, new, new)  # a reserve pass fixes the layer's shapes
        replays: dict[tuple[int, ...], Step] = {}
        worst = 0.0
        for position in range(steps):
            batch = Batch([position] * rows, range(rows))
            drawn = torch.randn(3, rows, heads, dim, generator=random, device=device.torch)
            for target, source in zip((query, key, value), drawn, strict=True):
                target.copy_(source)
            fixed.start_forward(ctx, batch)
            natives = [tensor.native for tensor in fixed.graph_rows(ctx, 0)]
            where = tuple(native.data_ptr() for native in natives)
            if where not in replays:
                call = functools.partial(_attend, natives, query, key, value, out)
                call()  # what libraries set up when they are first used cannot be captured
                replays[where] = device.captured(call)
            replays[where]()
            plain.start_forward(ctx, batch)
            plain.put(ctx, ctx.from_native(key), ctx.from_native(value))
            wanted = plain.attend(ctx, ctx.from_native(query), dim**-0.5).native
            worst = max(worst, (out - wanted).abs().max().item())
        stage.note("steps", steps)
        stage.note("graphs", len(replays))
        stage.note("largest difference", worst)
        assert len(replays) == graphs
        assert worst < 1e-4


def _attend(natives: Any, query: Any, key: Any, value: Any, out: Any) -> None:
    keys, values, slots, cells, mask = natives
    keys.index_copy_(0, slots.long(), key)
    values.index_copy_(0, slots.long(), value)
    k, v = (x[cells].transpose(1, 2) for x in (keys, values))  # of each token by itself
    found = torch.nn.functional.scaled_dot_product_attention(
        query.unsqueeze(2), k, v, mask[:, None, None], scale=query.shape[-1] ** -0.5
    )
    out.copy_(found.squeeze(2))


STEPS = {
    step.__name__.replace("_", " "): torch.no_grad()(step) for step in (eager, compiled, captured, graph_rows)
}
