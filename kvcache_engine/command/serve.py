"""``kvcache serve``: OpenAI's API on a model."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

import ml
from kvcache import HostTier, TenantBudget
from kvcache.cache import InvalidRangeError
from kvcache.stores import parse_bytes
from kvcache_engine.command.completing import stores
from kvcache_engine.command.drafting import Drafting
from kvcache_engine.command.grouped import ungrouped
from kvcache_engine.command.options import BatchInvariant, Debug, Dtypes, Place, finite, named_store
from kvcache_engine.command.progress import draws
from kvcache_engine.command.reporting import reported
from kvcache_engine.engine import Engine, EngineOptions, Tier
from kvcache_engine.errors import RequestError
from kvcache_engine.loading import load_config
from kvcache_engine.runtimes import Runtime, sampling_defaults
from kvcache_engine.tokenizer import Tokenizer
from kvcache_engine.warm_up import warm_up

if TYPE_CHECKING:
    from kvcache_engine.serve.worker import Worker

__all__ = ["serve"]


def _above_zero(value: float) -> float:
    if not value > 0:
        raise typer.BadParameter("Input should be above 0")
    return value


@dataclass(frozen=True, slots=True)
class Address:
    """The server's address, and the model's name for clients."""

    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0: all addresses.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="The port to listen on; 0: a free one.", min=0, max=65535)] = 8000
    name: Annotated[
        str | None, typer.Option(help="The model's name for clients.", show_default="its folder's name")
    ] = None
    api_key: Annotated[
        str | None,
        typer.Option(
            help="The key that clients must send; the environment variable keeps it out of the process list.",
            envvar="KVCACHE_API_KEY",
            show_default="none is required",
        ),
    ] = None
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Another Host name that clients may use, for example a proxy's; *: any. Repeatable."
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class Room:
    """The size of the cache."""

    max_sequences: Annotated[int, typer.Option(help="Requests that run at the same time.", min=1)] = 8
    capacity: Annotated[
        int | None, typer.Option(help="Tokens per sequence.", min=2, show_default="the model's, at most 4096")
    ] = None
    context: Annotated[
        int | None,
        typer.Option(
            help="Maximum tokens of one request; may exceed --capacity.",
            min=2,
            show_default="--capacity",
        ),
    ] = None
    prefill_chunk: Annotated[int, typer.Option(help="Prompt tokens per forward pass.", min=1)] = 512
    host_memory: Annotated[
        str, typer.Option(help="Host memory for prefixes that do not fit in the cache.")
    ] = "1GiB"
    store: Annotated[
        list[str] | None,
        typer.Option(
            help="A folder or a store's URL that keeps prefixes; repeatable. A folder takes at most a tenth "
            "of its disk; file:kept?budget=64MiB sets another limit.",
            autocompletion=stores,
        ),
    ] = None

    block_size: Annotated[
        int, typer.Option(help="Tokens per entry of a store, and per block in KV events.", min=1)
    ] = 128
    batch_invariant: BatchInvariant = False
    always_fetch: Annotated[
        bool, typer.Option("--always-fetch", help="Ask stores even if computing has proved faster.")
    ] = False
    read_ahead: Annotated[
        str, typer.Option(help="Host memory for prefixes read from stores while requests wait.")
    ] = "256MiB"
    backlog: Annotated[
        str, typer.Option(help="Host memory for content that waits to be written to stores.")
    ] = "256MiB"

    tenant_budget: Annotated[
        str | None,
        typer.Option(
            help="Maximum kept per cache_salt, as DEVICE/HOST: 64MiB/1GiB.",
            show_default="no limit",
        ),
    ] = None

    def engine_options(self, dtypes: Dtypes) -> EngineOptions:
        """The engine's options. Raises InvalidRangeError for invalid sizes."""
        sizes = self.max_sequences, self.capacity, self.prefill_chunk, dtypes.cache
        device, _, host = (self.tenant_budget or "").partition("/")
        if self.tenant_budget and ("/" in host or not (device or host)):
            raise InvalidRangeError(
                f"serve: --tenant-budget is {self.tenant_budget!r}; it must be DEVICE/HOST, a size for the "
                "cache, for host memory, or for both: 64MiB/1GiB, 64MiB or /1GiB"
            )
        return EngineOptions(
            *sizes,
            context=self.context,
            block_size=self.block_size,
            batch_invariant=self.batch_invariant,
            tenant_budget=TenantBudget(device or None, host or None) if self.tenant_budget else None,
            fetch="always" if self.always_fetch else "measured",
            read_ahead=parse_bytes(self.read_ahead, "--read-ahead"),
            backlog=parse_bytes(self.backlog, "--backlog"),
        )


@dataclass(frozen=True, slots=True)
class Events:
    """The KV events published for routers."""

    kv_events: Annotated[
        str | None, typer.Option(help="Publish KV events over ZeroMQ here, as vLLM does: tcp://*:5557.")
    ] = None
    kv_events_replay: Annotated[
        str | None, typer.Option(help="Where subscribers request missed events: tcp://*:5558.")
    ] = None
    kv_events_topic: Annotated[str, typer.Option(help="The topic of the events.")] = ""

    @contextlib.contextmanager
    def published(self, engine: Engine) -> Iterator[None]:
        """The publisher. Raises NotSupportedError without the packages, InvalidRangeError for an unusable
        address.
        """
        if self.kv_events is None:
            yield
            return
        try:
            import zmq

            from kvcache import ZmqPublisher

            publisher = ZmqPublisher(self.kv_events, self.kv_events_replay, self.kv_events_topic)
        except ImportError as error:
            raise ml.NotSupportedError(
                f"serve: --kv-events needs pyzmq and msgspec: pip install 'ml-kvcache[events]' ({error})"
            ) from error
        except zmq.ZMQError as error:
            where = ", ".join(filter(None, (self.kv_events, self.kv_events_replay)))
            raise InvalidRangeError(f"serve: --kv-events: {where} cannot be used ({error})") from error
        with publisher:
            engine.prefix.publish_events(publisher)
            yield
            engine.prefix.publish_events(None)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of the server, and what it reports."""

    max_waiting: Annotated[
        int, typer.Option(help="Requests that may wait for a sequence; further ones get 429.", min=0)
    ] = 64
    max_body: Annotated[str, typer.Option(help="The largest body of a request; larger ones get 413.")] = (
        "8MiB"
    )
    request_timeout: Annotated[
        float, typer.Option(help="Seconds until a request is cancelled.", callback=_above_zero)
    ] = 600.0
    shutdown_timeout: Annotated[
        float,
        typer.Option(help="Seconds for requests to finish at shutdown.", min=0, callback=finite),
    ] = 20.0
    write_interval: Annotated[
        float,
        typer.Option(
            help="Seconds until prefixes that the stores did not accept are offered again.",
            callback=_above_zero,
        ),
    ] = 60.0
    client_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds for a client to send a request's headers, and for each pause in its body.",
            callback=_above_zero,
        ),
    ] = 30.0
    hide_cached_tokens: Annotated[
        bool, typer.Option("--hide-cached-tokens", help="Do not report how many prompt tokens were cached.")
    ] = False


@ungrouped
def serve(
    place: Place,
    dtypes: Dtypes,
    address: Address,
    room: Room,
    limits: Limits,
    events: Events,
    drafting: Drafting,
    live: Annotated[
        bool, typer.Option("--live", help="Show requests, cells and tiers on the terminal as they change.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Serve a model with OpenAI's API; requests are batched, and common prefixes are computed once.

    Ctrl-C, SIGTERM and SIGHUP stop it: running requests may finish, and stores are written.

    Example: kvcache serve --backend torch --port 8000 --store kept
    """
    with reported(debug):
        try:
            import kvcache_engine.serve as server
        except ModuleNotFoundError as error:
            name = str(error.name).partition(".")[0]
            if name in ("kvcache", "kvcache_engine", "ml"):
                raise
            raise ml.NotSupportedError(f"serve needs {name}: pip install 'ml-kvcache[server]'") from error
        if live and not draws(sys.stdout):
            raise RequestError("serve: --live requires a terminal; /metrics has the same figures")
        path = place.path
        name = _name(address.name, place.model, path)
        if place.chosen is Runtime.OWN:
            load_config(path)  # reports its errors before anything is opened
        options = server.ServeOptions(
            address.host,
            address.port,
            limits.max_waiting,
            parse_bytes(limits.max_body, "--max-body"),
            limits.request_timeout,
            limits.shutdown_timeout,
            limits.write_interval,
            not limits.hide_cached_tokens,
            limits.client_timeout,
            address.api_key,
            tuple(address.allowed_host or ()),
            sampling_defaults(path),
        )
        server.serve(
            functools.partial(_opened, place, dtypes, room, events, drafting),
            name,
            server.template_of(path),
            options,
            lambda line: typer.echo(f"kvcache: {line}", err=True),
            _watching if live else None,
        )


def _watching(worker: Worker) -> AbstractContextManager[None]:
    from kvcache_engine.command.live import watching  # it needs the server's packages

    return watching(worker, Console(highlight=False))


def _name(requested: str | None, model: Path | None, path: Path) -> str:
    """The value of --name, else OWNER/NAME on the Hub, else the name of the folder or file. Raises
    RequestError for a name that is not valid UTF-8.
    """
    on_hub = model is not None and not model.expanduser().exists()
    name = requested or (str(model) if on_hub else path.resolve().name)
    try:
        name.encode()
    except UnicodeEncodeError:
        raise RequestError(
            f"serve: the model's name is {name!r}; it must be valid UTF-8 text; set one with --name"
        ) from None
    return name


@contextlib.contextmanager
def _opened(place: Place, dtypes: Dtypes, room: Room, events: Events, drafting: Drafting) -> Iterator[Engine]:
    """Open backend, model and engine in the thread that uses them."""
    path = place.path
    host = HostTier(parse_bytes(room.host_memory, "--host-memory"))
    tiers: list[Tier] = [host, *map(named_store, room.store or ())]
    with place.loaded(dtypes.weights, mtp=drafting.mtp) as model:
        warm_up(model.backend)
        options = drafting.options(room.engine_options(dtypes))
        with (
            drafting.opened(model, dtypes.weights, options) as draft,
            Engine(model, Tokenizer.load(path), options, tiers) as engine,
            events.published(engine),
        ):
            engine.draft = draft
            yield engine
