"""The command line of the server."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import uvicorn

import ml
from kvcache import HostTier
from kvcache.runner import Tokenizer, bundled_model, load_config, load_model
from kvcache.runner.engine import Engine, EngineOptions
from kvcache.stores import parse_bytes

from .app import make_app
from .template import template_of
from .worker import Worker

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        path = options.model or bundled_model()
        load_config(path)  # what is wrong with it is told before anything is opened
        template = template_of(path, Tokenizer.load(path))
        with Worker(lambda: opened(path, options), options.max_waiting) as worker:
            app = make_app(worker, options.name or path.resolve().name, template)
            uvicorn.run(app, host=options.host, port=options.port, ws="none", timeout_graceful_shutdown=5)
    except ml.MLError as error:
        print(f"server: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


@contextlib.contextmanager
def opened(path: Path, options: argparse.Namespace) -> Iterator[Engine]:
    """Backend, model and engine, in the thread that uses them."""
    dtype = ml.DType[options.dtype.upper()]
    stored = ml.DType[(options.cache_dtype or options.dtype).upper()]
    sizes = EngineOptions(
        options.max_sequences, options.capacity, options.prefill_chunk, stored, context=options.context
    )
    tiers = [HostTier(parse_bytes(options.host_memory)), *options.store]
    device = {} if options.device is None else {"device": options.device}
    with ml.open_backend(options.backend, **device) as backend:
        model = load_model(path, backend, dtype)
        with Engine(model, Tokenizer.load(path), sizes, tiers) as engine:
            yield engine


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "server", description="Serve a model with OpenAI's API; requests are batched and share prefixes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--model", type=Path, help="a Hugging Face folder (the bundled model)")
    add("--name", help="what clients call it (the folder's name)")
    add("--backend", default="numpy", help="see: kvcache backends")
    add("--device", help="as the backend names it")
    add("--dtype", default="f32", choices=["f32", "f16", "bf16"], help="of weights and activations")
    add("--cache-dtype", choices=["f32", "f16", "bf16", "q8_0", "q4_0"], help="of keys and values (--dtype)")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--max-sequences", type=int, default=8, help="requests that run at the same time")
    add("--max-waiting", type=int, default=64, help="requests that may wait; further ones get 429")
    add("--capacity", type=int, help="tokens of each sequence's share of the cache")
    add("--context", type=int, help="tokens that one request may hold, its share and more (--capacity)")
    add("--prefill-chunk", type=int, default=512, help="prompt tokens per forward pass")
    add("--host-memory", default="1GiB", help="for prefixes that the cache has no room for")
    add("--store", action="append", default=[], help="a store's URL, file:///var/cache/kv say; repeatable")
    return parser
