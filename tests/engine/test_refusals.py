"""What engines, generators and drafts refuse: a table of calls for each, with the error and how it begins.

Nothing is computed before, and nothing of what was refused is left.
"""

from __future__ import annotations

import functools
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache import ClosedError, InvalidRangeError
from kvcache.stores import MemoryStore
from kvcache_engine.drafts import ModelDraft, prompt_lookup
from kvcache_engine.engine import Engine, EngineOptions
from kvcache_engine.errors import CapacityError, ModelError, RequestError
from kvcache_engine.generate import Generator
from kvcache_engine.options import SpeculativeOptions
from kvcache_engine.requests import GenerationOptions

from ..rigs.refusals import Table, check_refused, refuses

IDS = "it must be a text or a sequence of token ids"
MAKING: Table = {
    ModelError: {
        "Engine: model: a object has no backend; pass": lambda m: Engine(object()),  # type: ignore[arg-type]
        "Engine: tokenizer: a dict cannot stream;": lambda m: Engine(m, {}),  # type: ignore[arg-type]
        "Llama was not loaded from files, so that it cannot be identified; pass identity=": lambda m: Engine(
            m, tiers=[MemoryStore()]
        ),
    },
    RequestError: {
        "Engine: options={'capacity': 64}; it must be": lambda m: Engine(m, options={"capacity": 64}),  # type: ignore[arg-type]
        "EngineOptions: context=513; it must be in [1, 512]": lambda m: Engine(
            m, options=EngineOptions(max_sequences=2, capacity=256, context=513)
        ),
        "Generator: draft= needs options=SpeculativeOptions(...)": lambda m: Generator(
            m, None, options=EngineOptions(), draft=prompt_lookup
        ),
        "ModelDraft: sequences=0": lambda m: ModelDraft(m, sequences=0),
    },
    CapacityError: {"a cache of 4 x 100000": lambda m: Engine(m, options=EngineOptions(capacity=10**12))},
    InvalidRangeError: {
        "PrefixCache: tiers=PosixPath('kept'); it must be a list, such as [Path('kept')]": lambda m: Engine(
            m,
            tiers=Path("kept"),
            identity={"model": "small"},  # type: ignore[arg-type]
        ),
    },
}
ASKING: dict[str, tuple[Any, dict[str, Any]]] = {
    "the prompt is empty": ([], {}),
    "the prompt has token 400; the model's ids are 0 to 258": ([1, 400], {}),
    "the prompt has token -1": ([-1], {}),
    "the prompt has 65 tokens, more than the capacity of 64": ([5] * 65, {}),
    "the prompt has 300 tokens, more than the model's 256 positions": ([5] * 300, {}),
    "the prompt is text and there is no tokenizer": ("text", {}),
    "the prompt is {'input_ids': [1]}; " + IDS + ": pass its ['input_ids']": ({"input_ids": [1]}, {}),
    "settings={'seed': 3}; it must be GenerationOptions": ([5], {"settings": {"seed": 3}}),
    "stop=['x'] is text and there is no tokenizer": ([5], {"settings": GenerationOptions(stop=["x"])}),
    "draft= needs an engine with SpeculativeOptions": ([5], {"draft": prompt_lookup}),
    "salt='\\ud800': ": ([5], {"salt": "\ud800"}),
    "salt=7; it must be a string": ([5], {"salt": 7}),
    "shared=3; the prompt has 2 tokens": ([5, 6], {"shared": 3}),
    "retention=3; it must be a Retention": ([5], {"retention": 3}),
    "session_id=3; it must be a string": ([5], {"session_id": 3}),
    "next_use=-1; it must be a number of at least 0": ([5], {"next_use": -1}),
    "next_use=nan; it must be": ([5], {"next_use": math.nan}),
}  # fmt: skip
NO_PROMPTS: list[Any] = [
    *([1.7, 2.2], ["5", "6"], ["text"], [None], [True], [[1, 2]], np.array([[1, 2]]), np.array([1.5])),
    *(b"abc", {5, 6}, {1: 2}, None, 5),
]
GENERATING: Table = {
    RequestError: {
        "the prompt has token 259; the model's ids are 0 to 258": lambda g: g.generate([[1, 2], [1, 259]]),
        "generate: prompts is a string; it must be a sequence of prompts": lambda g: g.generate("text"),
        "complete: prompts is a string": lambda g: g.engine.complete("text"),
        "stop=['x'] is text": lambda g: g.generate([[1, 2]], GenerationOptions(stop=("x",))),
    },
}
CLOSED: Table = {
    ClosedError: {
        "submit: the engine is closed": lambda e: e.submit([1]),
        "stream: the engine is closed": lambda e: e.stream([1]),
        "step: the engine is closed": lambda e: e.step(),
    },
}
OPTIONS: dict[type, dict[str, list[Any]]] = {
    GenerationOptions: {
        "max_new_tokens": [0, 2.5, True, "3", None, math.nan, math.inf],
        "logprobs": [-1, 1.5, True, "x", math.nan],
        "stop": ["x", ["a", ""], [5], [b"a"], b"a", 5, None],
        "ignore_eos": ["no", 1, None],
        "temperature": [-1.0, math.nan, np.float32("inf"), 10**400, "0", None, True],
        "top_k": [-1, 2.5, True, "5", None],
        "top_p": [0.0, 1.5, math.nan, "1", None, True],
        "min_p": [-0.1, 1.1, math.nan, "0", None],
        "seed": [-3, 1.5, "a", True],
    },
    EngineOptions: {
        "max_sequences": [0, 1.5, True, None],
        "capacity": [0, 10.5, True],
        "context": [0, 2.5],
        "prefill_chunk": [0, 2.5, None],
        "block_size": [0, 2.5],
        "budget": [-1, 1.5, "many", True],
        "read_ahead": [-1, 1.5, "many", None],
        "backlog": [-1, 1.5, "many", None],
        "fetch": ["never", None],
    },
    SpeculativeOptions: {"tokens": [0, 2.5], "width": [0, 1.5], "acceptance": ["typical"]},
}


@refuses(MAKING)
def test_making_one_is_refused(small: Any, error: Any, says: str, call: Any) -> None:
    small.origin = None
    check_refused(error, says, call, small)


@pytest.mark.parametrize("op", ["submit", "stream"])
def test_a_request_that_cannot_be_served_is_refused_when_it_is_asked_for(small: Any, op: str) -> None:
    with Engine(small, None, EngineOptions(capacity=64)) as engine:
        rows = [*ASKING.items(), *((f"the prompt is {each!r:.60}; {IDS}", (each, {})) for each in NO_PROMPTS)]
        for says, (prompt, options) in rows:
            call = functools.partial(getattr(engine, op), prompt, **options)
            check_refused(RequestError, f"{op}: {says}", call)
        assert not engine.busy


@refuses(GENERATING)
def test_a_generator_refuses(small: Any, error: Any, says: str, call: Any) -> None:
    with Generator(small, None, options=EngineOptions(capacity=32)) as generator:
        check_refused(error, says, call, generator)
        assert generator.cache.nbytes == 0


@refuses(CLOSED)
def test_a_closed_engine_says_so(small: Any, error: Any, says: str, call: Any) -> None:
    engine = Engine(small, options=EngineOptions(capacity=16))
    engine.submit([1, 2])
    engine.step()
    engine.close()
    engine.close()
    assert not engine.busy
    check_refused(error, says, call, engine)


@pytest.mark.parametrize(
    ("kind", "option"), [(kind, option) for kind, each in OPTIONS.items() for option in each]
)
def test_options_of_another_type_or_range_are_refused_by_name(kind: Any, option: str) -> None:
    for value in OPTIONS[kind][option]:
        with pytest.raises(RequestError, match=re.escape(f"{option}={value!r}; it must be")):
            kind(**{option: value})


@pytest.mark.parametrize("number", [np.int64, np.uint8])
def test_options_given_as_numbers_of_numpy_are_ints(number: Any) -> None:
    """Which do not overflow: 3 sequences of 100 tokens are more than 8 bits hold."""
    names = ("capacity", "max_sequences", "prefill_chunk", "block_size", "context", "backlog")
    given: Any = {name: number(100) for name in names}
    options = EngineOptions(**given)
    assert [type(getattr(options, name)) for name in names] == [int] * len(names)
    asked = GenerationOptions(max_new_tokens=number(9), logprobs=number(2), top_k=number(5), seed=number(1))
    assert (type(asked.max_new_tokens), type(asked.logprobs)) == (int, int)
    assert type(asked.sampler().top_k) is type(asked.sampler().settings(1.0)[1]) is int
