"""Bringing the package's client up: its library, its limits, and whether there is anyone to talk to."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import socket
from typing import Any

from kvcache.stores.errors import StoreUnavailableError
from kvcache.stores.mooncake.options import MooncakeOptions

__all__ = ["LIMITS", "connect", "knock", "load", "replicated", "set_limits", "version"]

LIMITS = (
    "MC_RPC_TIMEOUT_MS",
    "MC_RPC_CONNECT_TIMEOUT_MS",
    "MC_TCP_STATUS_TIMEOUT_SEC",
    "MC_TCP_PROGRESS_TIMEOUT_SEC",
    "MC_STORE_CLIENT_SETUP_RETRIES",
)

_KNOCK = 1.0
"""Seconds for a connection to the master; the package's own attempts take four even where it is refused."""
_SCRATCH = 1 << 20
"""Bytes of the package's own buffer, which nothing of ours goes through."""


def load() -> Any:
    """The module ``mooncake.store``. StoreUnavailableError, with the reason, where it does not load."""
    os.environ.setdefault(
        "MC_LOG_LEVEL", "WARNING"
    )  # it writes to standard error, and reads this when loaded
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:  # a missing shared library is one too
        raise StoreUnavailableError(
            f"MooncakeStore: the package mooncake-transfer-engine does not load ({error}); "
            "pip install 'ml-kvcache[mooncake]', and the system's libibverbs1, libnuma1 and libcurl4"
        ) from error


def replicated(settings: MooncakeOptions) -> Any:
    """How entries are to be kept, in the package's own terms; None: as it does by itself."""
    if settings.replicas == 1:
        return None
    config = load().ReplicateConfig()
    config.replica_num = settings.replicas
    return config


def version() -> str | None:
    """Of the package that brings the module: there is one for each kind of device."""
    brought = importlib.metadata.packages_distributions().get("mooncake", [])
    return importlib.metadata.version(brought[0]) if brought else None


def knock(settings: MooncakeOptions) -> str | None:
    """None where something listens at the master's address, else the reason why not; returns soon."""
    try:
        socket.create_connection((settings.host, settings.port), min(_KNOCK, settings.timeout)).close()
    except OSError as error:
        return f"no master at {settings.url}: {error}"
    return None


def connect(settings: MooncakeOptions) -> Any:
    """A client that is set up. StoreUnavailableError where the master is not there or refuses."""
    module = load()
    if reason := knock(settings):
        raise StoreUnavailableError(f"MooncakeStore: {reason}")
    set_limits(settings.timeout)
    native = module.MooncakeDistributedStore()
    code = native.setup(
        settings.address or _own_address(settings),
        settings.metadata,
        settings.segment,
        _SCRATCH,
        settings.protocol,
        settings.devices,
        settings.master,
    )
    if code:
        raise StoreUnavailableError(f"MooncakeStore: setting up for {settings.url} failed with code {code}")
    return native


def set_limits(timeout: float) -> None:
    """The package takes its limits from the environment, for the whole process; what is set there stays."""
    milliseconds, seconds = str(round(timeout * 1000)), str(max(1, round(timeout)))
    for name, value in zip(LIMITS, (milliseconds, milliseconds, seconds, seconds, "2"), strict=True):
        os.environ.setdefault(name, value)


def _own_address(settings: MooncakeOptions) -> str:
    """The address of this host from which packets to the master leave; none is sent."""
    try:
        kind, _, _, _, where = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise StoreUnavailableError(f"MooncakeStore: {settings.url}: {error}; give address=") from error
