"""The command line of the server."""

from __future__ import annotations

import argparse
import contextlib
import functools
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette

import ml
from kvcache import HostTier
from kvcache.formats import format_names
from kvcache.runner import Tokenizer, bundled_model, load_config, load_model
from kvcache.runner.engine import Engine, EngineOptions
from kvcache.stores import parse_bytes

from .app import make_app
from .template import template_of
from .worker import Worker

__all__ = ["main"]


INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        path = options.model or bundled_model()
        load_config(path)  # what is wrong with it is told before anything is opened
        template = template_of(path)
        make = functools.partial(opened, path, options)
        with _ended_by_signals(), Worker(make, options.max_waiting, options.write_interval) as worker:
            app = make_app(
                worker, options.name or path.resolve().name, template, not options.hide_cached_tokens
            )
            _serve(app, options)
    except ml.MLError as error:
        print(f"server: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("server: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


class _Ended(BaseException):
    """A signal that ends the server, where uvicorn has not taken it."""


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does, so that what is kept goes to the stores.

    uvicorn takes SIGTERM itself while it serves, and raises it anew when it has stopped.
    """

    def end(number: int, frame: object) -> None:
        raise _Ended

    def hang_up(number: int, frame: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    wanted = {"SIGTERM": end, "SIGHUP": hang_up}
    before: dict[int, Any] = {}
    for name, handler in wanted.items():
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            before[number] = signal.signal(number, handler)
    try:
        with contextlib.suppress(_Ended):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _serve(app: Starlette, options: argparse.Namespace) -> None:
    try:
        uvicorn.run(app, host=options.host, port=options.port, ws="none", timeout_graceful_shutdown=5)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one ends nothing half-written
        if options.store:
            print("server: writing what is kept to the stores; Ctrl-C leaves it undone", file=sys.stderr)


@contextlib.contextmanager
def opened(path: Path, options: argparse.Namespace) -> Iterator[Engine]:
    """Backend, model and engine, in the thread that uses them."""
    dtype = ml.DType[options.dtype.upper()]
    both = options.cache_dtype or options.dtype
    stored = options.cache_type_k or both, options.cache_type_v or both
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
    formats = [name.lower() for name in format_names()]
    add("--cache-dtype", choices=formats, metavar="FORMAT", help="of keys and values (--dtype)")
    add("--cache-type-k", choices=formats, metavar="FORMAT", help="of keys (--cache-dtype)")
    add("--cache-type-v", choices=formats, metavar="FORMAT", help="of values (--cache-dtype)")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--max-sequences", type=int, default=8, help="requests that run at the same time")
    add("--max-waiting", type=int, default=64, help="requests that may wait; further ones get 429")
    add("--capacity", type=int, help="tokens of each sequence's share of the cache")
    add("--context", type=int, help="tokens that one request may hold, its share and more (--capacity)")
    add("--prefill-chunk", type=int, default=512, help="prompt tokens per forward pass")
    add("--host-memory", default="1GiB", help="for prefixes that the cache has no room for")
    add("--store", action="append", default=[], help="a store's URL, file:///var/cache/kv say; repeatable")
    add(
        "--write-interval",
        type=seconds,
        default=60.0,
        help="seconds between two times that stores are given what is new",
    )
    add("--hide-cached-tokens", action="store_true", help="tell no client how much of its prompt was there")
    return parser


def seconds(text: str) -> float:
    found = float(text)
    if not found > 0:
        raise ValueError
    return found
