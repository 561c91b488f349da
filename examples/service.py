"""A FastAPI service for many users on a model of transformers or mlx-lm; its prefixes outlive the process.

    pip install -e '.[transformers,engine]' fastapi uvicorn     # in a clone; or mlx-lm for transformers
    python examples/service.py FOLDER --store kept --budget 2GiB        # and --runtime mlx-lm, --system TEXT
    curl -N localhost:8000/chat -H 'content-type: application/json' -d '{"prompt": "Hello", "max_tokens": 32}'

The requests of all users are batched, and common prefixes are computed once. Answers stream as server-sent
events, and generation stops when the client disconnects. When an answer ends, a thread writes what was
computed for it into the folder, and a new process continues from there: ``kill -9`` loses the running answers
and what has not been written yet.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import takewhile
from typing import Any, Self

import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from jinja2 import TemplateError
from pydantic import BaseModel, Field, model_validator
from transformers import AutoTokenizer

from kvcache import HostTier
from kvcache.stores import FileStore
from kvcache_engine import Engine, EngineOptions, Finished, GenerationOptions, Token, Tokenizer

WAITING = 64
"""Requests that may wait for a sequence; further ones get 429."""


class Message(BaseModel, extra="forbid"):
    role: str
    content: str


class Asked(BaseModel, extra="forbid"):
    """What a client sends: a prompt, or messages for the model's chat template."""

    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    max_tokens: int = Field(128, ge=1)
    temperature: float = Field(0.0, ge=0)
    user: str = "anonymous"  # the salt: others reuse nothing that was computed for it, and cannot detect it

    @model_validator(mode="after")
    def one_of_two(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


def load(folder: str, runtime: str) -> Any:
    """The model, run through its own runtime, as the engine expects it."""
    if runtime == "mlx-lm":
        import mlx_lm

        from kvcache.integrations.mlx_lm import MLXModel

        loaded: Any = mlx_lm.load(folder, return_config=True)  # model, tokenizer and config
        return MLXModel(loaded[0], loaded[2])
    from transformers import AutoModelForCausalLM

    from kvcache.integrations.transformers import TransformersModel

    return TransformersModel(AutoModelForCausalLM.from_pretrained(folder).eval())


async def events(stream: AsyncIterator[Token | Finished]) -> AsyncIterator[str]:
    """The texts of the tokens, then why the answer ended and how much of its prompt was reused."""
    try:
        async for event in stream:
            record: dict[str, Any] = {"text": event.text}
            if isinstance(event, Finished):
                record = {"finish_reason": event.reason, "cached_tokens": event.reused}
            yield f"data: {json.dumps(record)}\n\n"
    except Exception as error:  # a pass failed, after the headers were sent
        logging.getLogger("uvicorn.error").exception("a request failed")
        yield f"data: {json.dumps({'error': str(error)})}\n\n"
        return
    yield "data: [DONE]\n\n"


def make_app(
    folder: str, store: str, budget: str, runtime: str, system: str = "", users: int = 8, capacity: int = 4096
) -> FastAPI:
    """Up to ``users`` requests of ``capacity`` tokens run at a time; ``store`` keeps ``budget`` bytes.

    Every prompt begins with ``system``, whose tokens are computed once for all users.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.templates = AutoTokenizer.from_pretrained(folder)
        model = load(folder, runtime)
        options = EngineOptions(max_sequences=users, capacity=capacity)
        kept = FileStore(store, budget)
        with Engine(model, Tokenizer.load(folder), options, [HostTier("1GiB"), kept]) as app.state.engine:
            yield  # closing writes what the folder lacks

    app = FastAPI(lifespan=lifespan)

    @app.post("/chat")
    def chat(asked: Asked) -> StreamingResponse:  # in a thread: templates and tokenizers take their time
        engine: Engine = app.state.engine
        if len(engine.waiting) >= WAITING:
            raise HTTPException(429, f"{WAITING} requests are waiting; try again later", {"retry-after": "1"})
        try:
            tokens = prompt_of(engine, asked)
            other = Asked(prompt="\n")
            if asked.messages is not None:
                other = Asked(messages=[Message(role="user", content="\n")])
            alike = takewhile(
                lambda pair: pair[0] == pair[1], zip(tokens, prompt_of(engine, other), strict=False)
            )
            shared = len([*alike]) if system else 0
            settings = GenerationOptions(asked.max_tokens, asked.temperature)
            stream = engine.stream(tokens, settings, salt=asked.user, shared=shared, include_finished=True)
        except (ValueError, TemplateError) as error:  # too long, or the template refuses the messages
            raise HTTPException(400, str(error)) from error
        return StreamingResponse(events(stream), media_type="text/event-stream")

    def prompt_of(engine: Engine, asked: Asked) -> list[int]:
        if asked.messages is None:
            return engine.encode(f"{system}{asked.prompt}")
        messages = [{"role": "system", "content": system}] if system else []
        messages += [message.model_dump() for message in asked.messages]
        text = app.state.templates.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert engine.tokenizer is not None
        return engine.encode(engine.tokenizer.encode(text, bos=False, most=engine.limit))

    @app.get("/health")
    def health() -> dict[str, Any]:
        engine: Engine = app.state.engine
        statistics, stats = engine.statistics, engine.prefix.stats
        return {
            "running": len(engine.running),
            "waiting": len(engine.waiting),
            "computed": statistics.computed_tokens,
            "reused": statistics.reused_tokens,
            "reused_from": {tier: getattr(stats, tier) for tier in ("live", "device", "host", "store")},
        }

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Serve a model to many users.")
    parser.add_argument("folder", help="a model's folder, with its tokenizer")
    parser.add_argument("--runtime", choices=["transformers", "mlx-lm"], default="transformers")
    parser.add_argument("--store", default="kept", help="the folder that keeps prefixes")
    parser.add_argument("--budget", default="2GiB", help="bytes of that folder")
    parser.add_argument("--system", default="", help="a text that every prompt begins with")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    app = make_app(given.folder, given.store, given.budget, given.runtime, given.system)
    uvicorn.run(app, port=given.port)
