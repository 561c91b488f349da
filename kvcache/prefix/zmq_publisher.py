"""Events over ZeroMQ, as vLLM's ZmqEventPublisher sends them. Needs the extra ``[events]``."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections import deque
from typing import Any

from kvcache.prefix.events import EventBatch, encode
from kvcache.stores.closing import Closing

_lacking: ImportError | None = None
"""Raised when a publisher is made, so that ``from kvcache import *`` works without the extra."""
try:
    import msgspec
    import zmq
except ImportError as error:
    _lacking = error

__all__ = ["ZmqPublisher"]

log = logging.getLogger("kvcache")

END = (-1).to_bytes(8, "big", signed=True)
"""The sequence number of the message that ends a replay; its payload is empty."""
_PAUSE = 0.05
"""Seconds between two checks for replay requests."""


class ZmqPublisher(Closing):
    """Publishes event batches: ``prefix.publish_events(ZmqPublisher("tcp://*:5557"))``.

    A message consists of topic, sequence number (8 bytes, big-endian, from 0) and batch in msgpack.
    ``endpoint`` is bound if it contains ``*`` or ``::``, or uses ipc or inproc; otherwise it is connected to.
    A DEALER socket that sends a sequence number to ``replay_endpoint`` (always bound) receives number and
    batch of each message kept from there on, at most ``replayed`` of them, and then the number -1 without a
    batch. They wait in memory until it reads them.

    A thread encodes and sends. While ``waiting`` batches are queued, further ones are dropped together with
    their numbers: ``lost`` counts them, and a subscriber that sees a gap that no replay fills must start
    again. Messages sent without subscribers can be replayed. There is no encryption and no password: use it
    only among hosts that may know the content.

    Raises zmq.ZMQError for an invalid address; nothing is open then.
    """

    def __init__(
        self,
        endpoint: str = "tcp://*:5557",
        replay_endpoint: str | None = None,
        topic: str = "",
        *,
        replayed: int = 10_000,
        waiting: int = 100_000,
    ) -> None:
        if _lacking is not None:
            raise ImportError(
                "ZmqPublisher needs the packages pyzmq and msgspec: pip install 'ml-kvcache[events]' "
                f"({_lacking})"
            ) from _lacking
        self.lost = 0
        self._topic = topic.encode()
        self._numbers = itertools.count()
        self._queue: queue.Queue[tuple[int, EventBatch]] = queue.Queue(waiting)
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=replayed)
        self._encoder = msgspec.msgpack.Encoder()
        context: Any = zmq.Context.instance()
        self._pub: Any = context.socket(zmq.PUB)
        self._replay: Any = None
        try:
            bound = any(part in endpoint for part in ("*", "::")) or endpoint.startswith(("ipc:", "inproc:"))
            (self._pub.bind if bound else self._pub.connect)(endpoint)
            if replay_endpoint is not None:
                self._replay = context.socket(zmq.ROUTER)
                self._replay.sndhwm = 0  # a ROUTER silently drops messages above it
                self._replay.bind(replay_endpoint)
        except BaseException:
            self._close_sockets()
            raise
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name="kvcache-events", daemon=True)
        self._thread.start()

    def __call__(self, batch: EventBatch) -> None:
        """Queue a batch for sending; never blocks."""
        number = next(self._numbers)
        try:
            self._queue.put_nowait((number, batch))
        except queue.Full:
            self.lost += 1

    def close(self) -> None:
        """Send the queued batches, and close the sockets."""
        if not self._ending.is_set():
            self._ending.set()
            self._thread.join()
            self._close_sockets()

    def _close_sockets(self) -> None:
        for socket in (self._pub, self._replay):
            if socket is not None:
                socket.close(linger=1000)

    def _work(self) -> None:
        while not (self._ending.is_set() and self._queue.empty()):
            try:
                self._send(*self._queue.get(timeout=_PAUSE))
            except queue.Empty:
                pass
            except Exception:
                log.exception("events: a batch was not sent")
            try:
                if self._replay is not None and self._replay.poll(0):
                    self._answer(self._replay)
            except Exception:
                log.exception("events: a replay was not sent")

    def _send(self, number: int, batch: EventBatch) -> None:
        message = number.to_bytes(8, "big"), self._encoder.encode(encode(batch))
        self._sent.append(message)
        self._pub.send_multipart((self._topic, *message))

    def _answer(self, replay: Any) -> None:
        frames = replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            log.warning("events: a replay request was ignored; it must be one number of 8 bytes")
            return
        client, _, start = frames
        for number, payload in [*self._sent]:
            if number >= start:  # big-endian: bytes sort like the numbers
                replay.send_multipart((client, b"", number, payload))
        replay.send_multipart((client, b"", END, b""))
