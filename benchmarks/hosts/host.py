"""One host that serves a model over a store which others share: a line of JSON in, a line of JSON out.

    python -m benchmarks.hosts.host --backend torch --store valkey://10.0.0.1:6379/0

    {"text": "In the beginning", "max_tokens": 8}
    {"tokens": [...], "text": "...", "computed": 4, "restored": 0, ...}

An answer's ``tokens`` are the whole conversation: with more of them behind, they are the next question, to
this host or to another one. What that one finds in the store it does not compute.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO, get_args

import ml
from kvcache.stores import SnapshotStore, open_store
from kvcache_engine import GenerationOptions, Token, Tokenizer, bundled_model, load_model
from kvcache_engine.engine import Engine, EngineOptions, Failed
from kvcache_engine.options import Fetch


class Host:
    """A model on a backend, and conversations with it, kept in ``store`` for other hosts."""

    def __init__(
        self,
        backend: ml.Backend,
        path: Path,
        store: SnapshotStore | None,
        capacity: int,
        fetch: Fetch = "always",
    ) -> None:
        """``fetch``: ask the store for everything, or where that was seen to be faster than computing."""
        self.model = load_model(path, backend)
        self.tokenizer = Tokenizer.load(path) if (path / "tokenizer.json").is_file() else None
        self.store = store
        self.options = EngineOptions(max_sequences=1, capacity=capacity, fetch=fetch, write_through=False)
        self.identity = None if store is None else Engine(self.model, None, self.options).identity
        self.engine, self.alone = self._engine(store), False

    def _engine(self, store: SnapshotStore | None) -> Engine:
        tiers = [] if store is None else [store]
        return Engine(self.model, self.tokenizer, self.options, tiers, self.identity)

    def ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Go on with ``tokens``, or ``text`` behind them, by ``max_tokens``.

        ``forget`` drops what this host itself still has of conversations; ``alone`` asks no store either;
        ``keep`` False leaves nothing behind.
        """
        alone = bool(asked.get("alone"))
        if alone or (self.alone and asked.get("forget")):
            self.engine.close(flush=False)
            self.engine, self.alone = self._engine(None if alone else self.store), alone
        elif asked.get("forget"):
            self.engine.forget()  # but not how fast the store is
        tokens = [*asked.get("tokens", ()), *self._encode(asked.get("text", ""), not asked.get("tokens"))]
        before, wire = self._counts(), received()
        answer, first, whole = self._generate(tokens, int(asked.get("max_tokens", 8)))
        arrived = received() - wire
        began = time.perf_counter()
        if asked.get("keep", True):
            self.engine.prefix.flush()
        after = self._counts()
        return {
            "tokens": [*tokens, *answer],
            "text": "" if self.tokenizer is None else self.tokenizer.decode([*tokens, *answer]),
            "prompt_tokens": len(tokens),
            **{name: after[name] - before[name] for name in after},
            "seconds_to_first": first,
            "seconds": whole,
            "seconds_to_store": time.perf_counter() - began,
            "bytes_received": arrived,
        }

    def _encode(self, text: str, first: bool) -> list[int]:
        if not text:
            return []
        if self.tokenizer is None:
            raise ValueError("text for a model without a tokenizer; give tokens")
        return self.tokenizer.encode(text, bos=first)

    def _counts(self) -> dict[str, int]:
        """Tokens: computed in prompts, restored from the store, and taken from what this host still had.

        Of those computed, the store was not asked for ``spared``: that would have taken longer.
        """
        found = self.engine.prefix.stats
        return {
            "computed": self.engine.statistics.computed_tokens,
            "restored": found.store,
            "local": found.device + found.live,
            "spared": found.spared,
        }

    def _generate(self, tokens: Sequence[int], count: int) -> tuple[list[int], float, float]:
        """The answer, and the seconds to its first token and to its end."""
        began, first = time.perf_counter(), 0.0
        request = self.engine.submit(tokens, GenerationOptions(count, ignore_eos=True))
        answer: list[int] = []
        while not request.done:
            for event in self.engine.step():
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Token) and event.token is not None:
                    first = first or time.perf_counter() - began
                    answer.append(event.token)
        return answer, first, time.perf_counter() - began

    def close(self) -> None:
        self.engine.close()


def received() -> int:
    """Bytes that this network namespace's interfaces have received so far, loopback not counted (Linux)."""
    files = Path("/sys/class/net").glob("*/statistics/rx_bytes")
    return sum(int(file.read_text()) for file in files if file.parts[4] != "lo")


def serve(host: Host, lines: TextIO, out: TextIO) -> None:
    """Answer line by line until there are no more; a question that fails is answered by its error."""
    for line in lines:
        try:
            answer = host.ask(json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=out, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosts.host", description=__doc__)
    parser.add_argument("--backend", default="numpy")
    parser.add_argument("--model", type=Path, default=bundled_model())
    parser.add_argument("--store", help="a URL that all hosts share; none: each for itself")
    parser.add_argument("--capacity", type=int, default=512, help="tokens of a conversation")
    parser.add_argument("--fetch", choices=get_args(Fetch), default="always", help="when to ask the store")
    options = parser.parse_args()
    try:
        run(options)
    except ml.MLError as error:  # a backend or a store that is not here, say, and what to install
        print(f"host: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:  # what a terminal sends to all of its processes: who started us says so
        sys.exit(130)


def run(options: argparse.Namespace) -> None:
    with contextlib.ExitStack() as stack:
        store = None
        if options.store is not None:
            store = stack.enter_context(contextlib.closing(open_store(options.store)))
        backend = stack.enter_context(ml.open_backend(options.backend))
        made = Host(backend, options.model, store, options.capacity, options.fetch)
        host = stack.enter_context(contextlib.closing(made))
        print(json.dumps({"ready": options.backend}), flush=True)
        serve(host, sys.stdin, sys.stdout)


if __name__ == "__main__":
    main()
