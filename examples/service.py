"""A service for many users over transformers or mlx-lm, by FastAPI, whose prefixes outlive the process.

    pip install -e '.[transformers,engine]' fastapi uvicorn     # in a clone; or mlx-lm for transformers
    python examples/service.py FOLDER --store kept --budget 2GiB        # and --runtime mlx-lm, --system TEXT
    curl -N localhost:8000/chat -H 'content-type: application/json' -d '{"prompt": "Hello", "max_tokens": 32}'

All users are in the same passes of the model; common prefixes are computed once. Answers stream as
server-sent events, and a client that disconnects stops its generation. What was computed of an answer is in
the folder when it ends: a new process, even after kill -9, continues from there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import takewhile
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from jinja2 import TemplateError
from pydantic import BaseModel, Field
from transformers import AutoTokenizer

from kvcache import HostTier
from kvcache.stores import FileStore, parse_bytes
from kvcache_engine import Engine, EngineOptions, GenerationOptions, Token, Tokenizer

WAITING = 64
"""Requests that may wait for a place; more are told to come later."""


class Asked(BaseModel):
    """What a client sends: a prompt, or messages for the model's chat template."""

    prompt: str = ""
    messages: list[dict[str, str]] = Field(default_factory=list)
    max_tokens: int = Field(128, ge=1)
    temperature: float = Field(0.0, ge=0)
    user: str = ""  # whose request it is: others reuse nothing of what it computed, and cannot tell


def load(folder: str, runtime: str) -> Any:
    """The model as the engine drives it, computed by its own runtime."""
    if runtime == "mlx-lm":
        import mlx_lm

        from kvcache.integrations.mlx_lm import MLXModel

        loaded: Any = mlx_lm.load(folder, return_config=True)  # model, tokenizer and config
        return MLXModel(loaded[0], loaded[2])
    from transformers import AutoModelForCausalLM

    from kvcache.integrations.transformers import TransformersModel

    return TransformersModel(AutoModelForCausalLM.from_pretrained(folder).eval())


def make_app(
    folder: str, store: str, budget: str, runtime: str, system: str = "", users: int = 8, capacity: int = 4096
) -> FastAPI:
    """Of ``users`` requests run at a time, of ``capacity`` tokens each; ``store`` keeps ``budget`` bytes.

    Every prompt begins with ``system``, whose tokens are computed once for all users.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.templates = AutoTokenizer.from_pretrained(folder)
        model = load(folder, runtime)
        options = EngineOptions(max_sequences=users, capacity=capacity)
        kept = FileStore(store, parse_bytes(budget, "--budget"))
        with Engine(model, Tokenizer.load(folder), options, [HostTier("1GiB"), kept]) as app.state.engine:
            yield  # at the end, what the folder lacks is written

    app = FastAPI(lifespan=lifespan)

    @app.post("/chat")
    def chat(asked: Asked) -> StreamingResponse:  # in a thread: templates and tokenizers take their time
        engine: Engine = app.state.engine
        if len(engine.waiting) >= WAITING:
            raise HTTPException(429, "too many requests wait; try again later", {"retry-after": "1"})
        try:
            tokens = prompt_of(engine, asked)
            other = asked.model_copy(update={"prompt": "\n", "messages": []})
            if asked.messages:
                other.messages = [{"role": "user", "content": "\n"}]
            alike = takewhile(
                lambda pair: pair[0] == pair[1], zip(tokens, prompt_of(engine, other), strict=False)
            )
            shared = len([*alike]) if system else 0
            room = max(1, engine.limit - len(tokens))
            settings = GenerationOptions(min(asked.max_tokens, room), asked.temperature)
        except (ValueError, TemplateError) as error:  # there is no template, or it refuses the messages
            raise HTTPException(400, str(error)) from error
        streamed = events(app.state.engine.stream(tokens, settings, salt=asked.user, shared=shared))
        return StreamingResponse(streamed, media_type="text/event-stream")

    def prompt_of(engine: Engine, asked: Asked) -> list[int]:
        if not asked.messages:
            return engine.encode(system + asked.prompt)
        first = [{"role": "system", "content": system}] if system else []
        return list(
            app.state.templates.apply_chat_template(
                [*first, *asked.messages], add_generation_prompt=True, return_dict=False
            )
        )

    async def events(stream: AsyncIterator[Token]) -> AsyncIterator[str]:
        async for token in stream:
            yield f"data: {json.dumps({'text': token.text})}\n\n"
        yield "data: [DONE]\n\n"

    @app.get("/health")
    def health() -> dict[str, int]:
        engine: Engine = app.state.engine
        tokens = {"computed": engine.statistics.computed_tokens, "reused": engine.statistics.reused_tokens}
        return {"running": len(engine.running), "waiting": len(engine.waiting), **tokens}

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
