"""An inference engine for models written once on ml.nn: the Llama family, and those of families.py.

>>> import ml
>>> from kvcache_engine import Generator, GenerationOptions, Tokenizer, bundled_model, load_model
>>> with ml.open_backend("numpy") as backend:
...     model = load_model(bundled_model(), backend)
...     with Generator(model, Tokenizer.load(bundled_model())) as generator:
...         answers = generator.complete(["And God said", "And God saw"], GenerationOptions(max_new_tokens=8))
>>> [answer.reused for answer in answers]  # BOS, "And" and "God" are computed once
[0, 3]
"""

from kvcache_engine.checkpoints.source import WeightSource
from kvcache_engine.checkpoints.weights import open_weights
from kvcache_engine.config import ModelConfig
from kvcache_engine.conversations import Conversation, ConversationFullError, Conversations
from kvcache_engine.engine import Engine, EngineOptions, Failed, Request
from kvcache_engine.errors import CapacityError, ModelError, RequestError, RunnerError
from kvcache_engine.generate import Generator
from kvcache_engine.kept import KeptConversations
from kvcache_engine.language_model import LanguageModel, Prompt
from kvcache_engine.loading import bundled_model, check_weights, load_config, load_model
from kvcache_engine.memory import cache_bytes, check_memory
from kvcache_engine.models.families import SUPPORTED_ARCHITECTURES, expected_shapes, parse_config
from kvcache_engine.models.llama import Llama
from kvcache_engine.options import SpeculativeOptions
from kvcache_engine.requests import (
    Event,
    Finished,
    FinishReason,
    GenerationOptions,
    Prefilled,
    Started,
    Statistics,
    Token,
)
from kvcache_engine.sampling import Logprobs, Sampler
from kvcache_engine.saved import ConversationError, SavedConversation
from kvcache_engine.tokenizer import StreamDecoder, Tokenizer

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
