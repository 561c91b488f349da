"""Models and their generation loop, written once on ml.nn: the Llama family, and those of families.py.

>>> import ml
>>> from kvcache.runner import Generator, GenerationOptions, Tokenizer, bundled_model, load_model
>>> with ml.open_backend("numpy") as backend:
...     model = load_model(bundled_model(), backend)
...     with Generator(model, Tokenizer.load(bundled_model())) as generator:
...         answers = generator.complete(["And God said", "And God saw"], GenerationOptions(max_new_tokens=8))
>>> [answer.reused for answer in answers]  # BOS, "And" and "God" are computed once
[0, 3]
"""

from kvcache.runner.checkpoints.source import WeightSource
from kvcache.runner.checkpoints.weights import open_weights
from kvcache.runner.config import ModelConfig
from kvcache.runner.conversations import Conversation, ConversationFullError, Conversations
from kvcache.runner.engine import Engine, EngineOptions, Failed, Request
from kvcache.runner.errors import CapacityError, ModelError, RequestError, RunnerError
from kvcache.runner.generate import Generator
from kvcache.runner.kept import KeptConversations
from kvcache.runner.language_model import LanguageModel, Prompt
from kvcache.runner.loading import bundled_model, check_weights, load_config, load_model
from kvcache.runner.memory import cache_bytes, check_memory
from kvcache.runner.models.families import SUPPORTED_ARCHITECTURES, expected_shapes, parse_config
from kvcache.runner.models.llama import Llama
from kvcache.runner.options import SpeculativeOptions
from kvcache.runner.requests import (
    Event,
    Finished,
    FinishReason,
    GenerationOptions,
    Prefilled,
    Started,
    Statistics,
    Token,
)
from kvcache.runner.sampling import Logprobs, Sampler
from kvcache.runner.saved import ConversationError, SavedConversation
from kvcache.runner.tokenizer import StreamDecoder, Tokenizer

__all__ = [
    "SUPPORTED_ARCHITECTURES",
    "CapacityError",
    "Conversation",
    "ConversationError",
    "ConversationFullError",
    "Conversations",
    "Engine",
    "EngineOptions",
    "Event",
    "Failed",
    "FinishReason",
    "Finished",
    "GenerationOptions",
    "Generator",
    "KeptConversations",
    "LanguageModel",
    "Llama",
    "Logprobs",
    "ModelConfig",
    "ModelError",
    "Prefilled",
    "Prompt",
    "Request",
    "RequestError",
    "RunnerError",
    "Sampler",
    "SavedConversation",
    "SpeculativeOptions",
    "Started",
    "Statistics",
    "StreamDecoder",
    "Token",
    "Tokenizer",
    "WeightSource",
    "bundled_model",
    "cache_bytes",
    "check_memory",
    "check_weights",
    "expected_shapes",
    "load_config",
    "load_model",
    "open_weights",
    "parse_config",
]
