"""mlx_lm.server, on loopback, with its own defaults, over pools that are too small for them."""

from __future__ import annotations

import gc
import http.client
import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")

import mlx_lm
from mlx_lm import server
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import LRUPromptCache

from kvcache.integrations.mlx_lm import install
from kvcache.integrations.mlx_lm.loops import incoming
from kvcache.integrations.mlx_lm.sequences import SequencePool

from ...rigs import mlx_lm_models

WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}


@dataclass
class Running:
    """A server, the pool of its model, and what that model says with mlx-lm's own caches."""

    address: tuple[str, int]
    asked: dict[str, Any]
    pool: Any
    kept: LRUPromptCache
    model: Any
    said: Callable[[str, int], str]

    def ask(self, prompt: str, max_tokens: int = 6, **options: Any) -> tuple[int, dict[str, Any]]:
        """Status and answer; status 0 where the connection ends without one."""
        connection = http.client.HTTPConnection(*self.address, timeout=60)
        try:
            body = {"prompt": prompt, "max_tokens": max_tokens, **self.asked, **options}
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        except http.client.RemoteDisconnected:
            return 0, {}
        finally:
            connection.close()

    def text(self, prompt: str, max_tokens: int = 6, **options: Any) -> str:
        status, answer = self.ask(prompt, max_tokens, **options)
        assert status == 200, answer
        return str(answer["choices"][0]["text"])


@pytest.fixture
def serving(
    tmp_path: Path, make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    @contextmanager
    def start(
        config: dict[str, Any], when_asked: bool = False, flags: Sequence[str] = (), **pool: Any
    ) -> Iterator[Running]:
        """``when_asked``: the server loads its model for the first request, and not before."""
        folder = make_model()
        told = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps({**told, **config}), encoding="utf-8")
        tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer), encoding="utf-8")
        own, words = mlx_lm.load(str(folder))
        made: Queue[Any] = Queue()

        def load(*arguments: Any, **options: Any) -> Any:
            model, *others = mlx_lm.load(*arguments, **options)
            made.put(install(model, **pool))
            return model, *others

        providers: list[server.ModelProvider] = []
        monkeypatch.setattr(server, "load", load)
        monkeypatch.setattr(server, "run", lambda host, port, provider: providers.append(provider))
        named = () if when_asked else ("--model", str(folder))
        monkeypatch.setattr(sys, "argv", ["mlx_lm.server", *named, *flags])
        server.main()
        kept = LRUPromptCache(providers[0].cli_args.prompt_cache_size)
        generator = server.ResponseGenerator(providers[0], kept)
        httpd = ThreadingHTTPServer(
            ("127.0.0.1", 0), lambda *a, **k: server.APIHandler(generator, *a, system_fingerprint="", **k)
        )
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield Running(
                ("127.0.0.1", httpd.server_port),
                {"model": str(folder)} if when_asked else {},
                None if when_asked else made.get(timeout=60),
                kept,
                own,
                lambda prompt, count: mlx_lm.generate(own, words, prompt, max_tokens=count),
            )
            assert generator.is_healthy
        finally:
            httpd.shutdown()
            thread.join()
            httpd.server_close()
            generator.stop_and_join()

    return start


BATCHED_AND_ALONE = pytest.mark.parametrize("options", [{}, {"seed": 3}], ids=["batched", "alone"])


def prompts(count: int) -> list[str]:
    return [f"{'abcdefghijkl'[i] * (3 + i)} once upon" for i in range(count)]


@pytest.mark.parametrize(("config", "sequences"), [({}, 1), (WINDOW, 3)], ids=["full", "sliding"])
def test_twelve_requests_at_once_are_all_answered_from_a_pool_for_a_few(
    serving: Callable[..., Any], config: dict[str, Any], sequences: int
) -> None:
    with serving(config, capacity=192 // sequences, max_sequences=sequences) as running:
        with ThreadPoolExecutor(12) as clients:
            said = list(clients.map(running.text, prompts(12)))
        assert said == [running.said(prompt, 6) for prompt in prompts(12)]
        assert running.text("and after that") == running.said("and after that", 6)


@pytest.mark.parametrize(
    ("options", "when_asked"), [({}, True), ({"seed": 3}, False)], ids=["batched", "alone"]
)
def test_a_prompt_that_can_never_fit_is_refused_by_itself(
    serving: Callable[..., Any], options: dict[str, Any], when_asked: bool
) -> None:
    with serving({}, when_asked, capacity=64, max_sequences=3) as running:
        status, answer = running.ask("x" * 191, **options)
        assert status == 404
        assert "a prompt of 192 tokens; the pool of its model has room for 192" in answer["error"]
        assert running.text("x" * 30) == running.said("x" * 30, 6)


@BATCHED_AND_ALONE
def test_an_answer_ends_where_the_room_ends(
    serving: Callable[..., Any], caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    with serving({}, capacity=16, max_sequences=3) as running:
        status, answer = running.ask("abcdefg", max_tokens=512, **options)
        assert status == 200
        assert answer["usage"] == {**answer["usage"], "prompt_tokens": 8, "completion_tokens": 40}
        assert answer["choices"][0]["finish_reason"] == "length"
        assert "up to 512 tokens will end after 40" in caplog.text
        assert running.text("abcdefg") == running.said("abcdefg", 6)


@pytest.mark.parametrize("config", [{}, WINDOW], ids=["full", "sliding"])
def test_conversations_that_are_kept_give_way_the_oldest_first(
    serving: Callable[..., Any], config: dict[str, Any]
) -> None:
    """Prompts grow out of one another or begin alike: some find what is kept, all get the same answers."""
    with serving(config, capacity=96, max_sequences=3) as running:
        for prompt in (
            *prompts(4),
            *(f"{prompt} and" for prompt in prompts(4)),
            "aaa",
            "aaa once",
            "aaa once",
        ):
            assert running.text(prompt) == running.said(prompt, 6)
        assert 1 <= len(running.kept) <= 3
        _, answer = running.ask("aaa once upon")
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= (0 if config else 8)


def test_nothing_gives_way_in_a_pool_as_large_as_the_page_says(
    serving: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded, read, kept = 2, 3, 3
    flags = (f"--decode-concurrency={decoded}", f"--prompt-concurrency={read}", f"--prompt-cache-size={kept}")
    gave_way: list[bool] = []
    relieve = SequencePool.relieve
    monkeypatch.setattr(SequencePool, "relieve", lambda pool: gave_way.append(relieve(pool)) or gave_way[-1])
    with serving({}, flags=flags, capacity=64, max_sequences=decoded + read + kept + 2) as running:
        with ThreadPoolExecutor(decoded + read) as clients:  # nobody waits with a conversation found for them
            said = list(clients.map(running.text, prompts(12)))
        assert said == [running.said(prompt, 6) for prompt in prompts(12)]
        latest = prompts(12)[-1]
        again = [running.text(prompt) for prompt in (latest, f"{latest} and", *prompts(2))]
        assert again == [running.said(prompt, 6) for prompt in (latest, f"{latest} and", *prompts(2))]
        assert (len(running.kept), gave_way) == (kept, [])


def test_a_prompt_of_the_very_tokens_that_are_kept_is_answered(serving: Callable[..., Any]) -> None:
    """mlx-lm's own server ends here: it has nothing left to feed."""
    with serving({}, capacity=64, max_sequences=4) as running:
        prompt = next(text for text in prompts(12) if running.said(text, 2).isascii())
        whole = prompt + running.text(prompt, 2)
        assert running.text(whole) == running.said(whole, 6)


@BATCHED_AND_ALONE
def test_long_prompts_are_cut_into_passes_that_sliding_layers_have_room_for(
    serving: Callable[..., Any], options: dict[str, Any]
) -> None:
    with serving(WINDOW, capacity=300, max_sequences=3, max_batch=20, rollback=0) as running:
        with ThreadPoolExecutor(3) as clients:
            long = [letter * 250 for letter in "abc"]
            said = list(clients.map(lambda prompt: running.text(prompt, **options), long))
        assert said == [running.said(prompt, 6) for prompt in long]


def test_who_else_holds_the_sequences_makes_requests_fail_and_not_the_server(
    serving: Callable[..., Any],
) -> None:
    with serving({}, capacity=64, max_sequences=1) as running:
        strange = running.pool.make_prompt_cache()
        mlx_lm_models.greedy(running.model, [5, 6, 7], 2, strange)
        assert running.ask("abc")[0] == 0
        del strange
        assert running.text("abc") == running.said("abc", 6)


def test_a_request_that_fails_half_way_holds_nothing(serving: Callable[..., Any]) -> None:
    with serving({}, capacity=32, max_sequences=2) as running:
        strange = running.pool.make_prompt_cache()
        mlx_lm_models.greedy(running.model, mlx_lm_models.prompt_of(20), 1, strange)
        gc.disable()
        try:
            assert running.ask("a" * 35, max_tokens=20, seed=3)[0] == 0
            del strange
            assert running.text("b" * 55, seed=3) == running.said("b" * 55, 6)
        finally:
            gc.enable()


def test_a_conversation_found_by_a_request_that_waits_takes_no_room_from_those_that_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, own = mlx_lm_models.make_llama(), mlx_lm_models.make_llama()
    install(model, capacity=60, max_sequences=6, rollback=0)
    monkeypatch.setattr(incoming, "serving", True, raising=False)
    generator, kept = BatchGenerator(model), LRUPromptCache(10)
    ended: dict[int, Any] = {}

    def put(tokens: list[int], most: int) -> int:
        cache, rest = kept.fetch_nearest_cache("", tokens)
        begun = tokens[: len(tokens) - len(rest)]
        return int(generator.insert_segments([[rest]], [most], [cache], [begun])[0])

    def run(count: int) -> None:
        while len(ended) < count:
            for answer in generator.next()[1]:
                if answer.finish_reason:
                    ended[answer.uid] = answer
                    kept.insert_cache("", answer.all_tokens[:], answer.prompt_cache)

    put([5] * 100, 1)
    run(1)
    asked = {put([7] * 150, 140): ([7] * 150, 140)}
    generator.next()
    for tokens, most in (([5] * 101, 60), ([5] * 100 + [9] * 20, 60)):
        asked[put(tokens, most)] = (tokens, most)
    run(4)
    for uid, (tokens, most) in asked.items():
        assert ended[uid].finish_reason == "length"
        assert ended[uid].all_tokens == [*tokens, *mlx_lm_models.greedy(own, tokens, most, None)]
