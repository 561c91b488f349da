"""Small random models of transformers, and the ways in which its ``generate`` is called."""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers

from kvcache import OrderError
from kvcache.stores import MemoryStore

WINDOW, PROMPT, NEW = 8, 13, 10
"""A prompt and what is generated are both longer than windows and chunks."""
torch.set_num_threads(1)  # same sums everywhere

_BASE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
    "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "truncate": False,
         "beta_fast": 32.0, "beta_slow": 1.0, "rope_theta": 10000.0}  # fmt: skip
_DECODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "Llama", {}),
    "gemma3": ("Gemma3", "Gemma3Text", {
        "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"],
    }),
    "gpt-oss": ("GptOss", "GptOss", {
        "sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": _YARN,
    }),
    "llama4": ("Llama4", "Llama4Text", {
        "attention_chunk_size": WINDOW, "num_local_experts": 2, "intermediate_size_mlp": 32,
        "no_rope_layer_interval": 2, "interleave_moe_layer_step": 2,
    }),
    "qwen3-next": ("Qwen3Next", "Qwen3Next", {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    }),
}  # fmt: skip
_OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma4": ("Gemma4", "Gemma4Text", {
        "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"],
        "global_head_dim": 16, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
    }),
    "gemma2": ("Gemma2", "Gemma2", {"sliding_window": WINDOW, "attn_logit_softcapping": 5.0}),
    "minimax": ("MiniMax", "MiniMax", {"block_size": 4, "num_local_experts": 4, "num_experts_per_tok": 1}),
    "mistral": ("Mistral", "Mistral", {"sliding_window": WINDOW}),
    "qwen3": ("Qwen3", "Qwen3", {}),
    "zaya": ("Zaya", "Zaya", {
        "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 1, "router_hidden_size": 16,
        "sliding_window": 5,
    }),
}  # fmt: skip
"""Made on request, and not among those that all modes run with."""
DECODERS = tuple(_DECODERS)
ENCODER_DECODERS = ("t5", "whisper")
MODELS = (*DECODERS, *ENCODER_DECODERS)


@functools.cache
def model(name: str, attention: str = "eager", seed: int = 0, **changes: Any) -> Any:
    """A model with random weights, the same for the same arguments; tuples become lists."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(seed)
    lists = {key: [*value] if isinstance(value, tuple) else value for key, value in changes.items()}
    made = _make(name, {"attn_implementation": attention, **lists})
    made.generation_config.max_length = None
    for path, parameter in made.eval().requires_grad_(False).named_parameters():
        if path.endswith(("A_log", "dt_bias")):  # states that remember: they decay by little per token
            parameter.fill_(-2.0)
    return made


def llama(layers: int, **changes: Any) -> Any:
    """One that nobody else has: it may be changed."""
    return model.__wrapped__("llama", num_hidden_layers=layers, **changes)


def _make(name: str, changes: dict[str, Any]) -> Any:
    if name == "t5":
        return transformers.T5ForConditionalGeneration(transformers.T5Config(**{
            "vocab_size": 97, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 3, "num_decoder_layers": 2,
            "num_heads": 4, "decoder_start_token_id": 0, "eos_token_id": None, "pad_token_id": 0,
            "initializer_factor": 1.0, **changes,
        }))  # fmt: skip
    if name == "whisper":
        made = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**{
            "vocab_size": 97, "d_model": 32, "encoder_layers": 3, "decoder_layers": 2,
            "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 40,
            "decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
            "suppress_tokens": None, "begin_suppress_tokens": None, "init_std": 0.3, **changes,
        }))  # fmt: skip
        made.generation_config.suppress_tokens = None
        return made
    family, config, own = (_DECODERS | _OTHERS)[name]
    settings = getattr(transformers, f"{config}Config")(**{**_BASE, **own, **changes})
    return getattr(transformers, f"{family}ForCausalLM")(settings)


def tokens(rows: int, count: int = PROMPT, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 97, (rows, count), generator=torch.Generator().manual_seed(1 + seed + rows))


def inputs(name: str, rows: int, padding: int = 0) -> dict[str, torch.Tensor]:
    """A batch; row i of it is padded by ``padding - 2 * i`` tokens on the left."""
    if name == "whisper":
        sound = torch.randn(rows, 8, 40, generator=torch.Generator().manual_seed(rows))
        return {"input_features": sound}
    ids = tokens(rows)
    mask = torch.ones_like(ids)
    for row in range(rows):
        ids[row, : max(0, padding - 2 * row)] = 0
        mask[row, : max(0, padding - 2 * row)] = 0
    return {"input_ids": ids, "attention_mask": mask}


@dataclass(frozen=True)
class Result:
    """The tokens of all sequences, and the logits of every step."""

    sequences: torch.Tensor
    logits: Sequence[torch.Tensor]
    cache: Any

    def distance(self, other: Result) -> float:
        """The largest difference of logits; infinite where tokens differ."""
        if not torch.equal(self.sequences, other.sequences) or len(self.logits) != len(other.logits):
            return float("inf")
        pairs = zip(self.logits, other.logits, strict=True)
        return max(float((one - two).abs().max()) for one, two in pairs)


def generate(made: Any, batch: dict[str, Any], cache: Any = None, **options: Any) -> Result:
    options = {"max_new_tokens": NEW, "do_sample": False, **options}
    if cache is not None:
        options["past_key_values"] = cache
    torch.manual_seed(7)
    found = made.generate(**batch, output_logits=True, return_dict_in_generate=True, **options)
    return Result(found.sequences, found.logits, found.past_key_values)


OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}


def plain(made: Any, ids: torch.Tensor) -> torch.Tensor:
    """The prompt and its answer, without a cache of ours."""
    return made.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **OPTIONS)


def feed(made: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits of new tokens (rows, tokens, vocabulary)."""
    with torch.no_grad():
        logits: torch.Tensor = made(input_ids=ids, past_key_values=cache, use_cache=cache is not None).logits
    return logits


def fresh(made: Any, *pieces: torch.Tensor) -> torch.Tensor:
    """Logits of the last piece, all fed one after another to transformers' own cache."""
    cache = transformers.DynamicCache(config=made.config)
    return [feed(made, cache, piece) for piece in pieces][-1]


def close(found: torch.Tensor, expected: torch.Tensor, most: float = 1e-4) -> None:
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) < most


@contextlib.contextmanager
def failing(module: torch.nn.Module) -> Iterator[None]:
    """What calls the module in the block ends with a MemoryError."""
    hook = module.register_forward_pre_hook(Mock(side_effect=MemoryError("the device is full")))
    try:
        with pytest.raises(MemoryError, match="the device is full"):
            yield
    finally:
        hook.remove()


def take_advice(cache: Any, go_on: Callable[[], Any]) -> None:
    """Do what the error says that ``go_on`` ends with behind a pass that failed."""
    with pytest.raises(OrderError, match="did not reach all layers") as caught:
        go_on()
    advice = re.search(r"Call crop\((-\d+)\)", str(caught.value))
    assert advice is not None, str(caught.value)
    cache.crop(int(advice[1]))


def others_of(cache: Any, empty: Any) -> list[Any]:
    """A fork of a cache, a copy of it, and ``empty`` with what a store has got of it."""
    store = MemoryStore()
    assert cache.save(store, "key")
    assert empty.load(store, "key")
    return [cache.fork(), copy.deepcopy(cache), empty]


Mode = Callable[[str, Any, Any], Result]


def _chat(name: str, made: Any, cache: Any) -> Result:
    """Three turns: what was said and answered so far is given again, and the cache of the turn before."""
    batch = inputs(name, 2, 3)
    cache = transformers.DynamicCache(config=made.config) if cache is None else cache
    turn = generate(made, batch, cache, max_new_tokens=6)
    logits = [*turn.logits]
    for seed in (1, 2):
        ids = torch.cat((turn.sequences, tokens(2, 5, seed)), 1)
        later = torch.ones(2, ids.shape[1] - PROMPT, dtype=torch.long)
        mask = torch.cat((batch["attention_mask"], later), 1)
        turn = generate(made, {"input_ids": ids, "attention_mask": mask}, cache, max_new_tokens=5)
        logits += turn.logits
    return Result(turn.sequences, logits, turn.cache)


def _lookup(name: str, made: Any, cache: Any) -> Result:
    """A prompt that repeats itself, so that candidates are found, and turned down."""
    batch = inputs(name, 1)
    if "input_ids" in batch:
        ids = torch.cat((batch["input_ids"], batch["input_ids"][:, :6]), 1)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return generate(made, batch, cache, prompt_lookup_num_tokens=4, max_matching_ngram_size=1)


def _assisted(name: str, made: Any, cache: Any) -> Result:
    assistant = model(name, made.config._attn_implementation, seed=1)
    return generate(made, inputs(name, 1), cache, assistant_model=assistant)


MODES: dict[str, Mode] = {
    "sampling": lambda name, made, cache: generate(made, inputs(name, 2), cache, do_sample=True),
    "beams": lambda name, made, cache: generate(made, inputs(name, 2), cache, num_beams=3),
    "left padding": lambda name, made, cache: generate(made, inputs(name, 3, 5), cache),
    "padded beams": lambda name, made, cache: generate(made, inputs(name, 2, 5), cache, num_beams=3),
    "chunked prefill": lambda name, made, cache: generate(
        made, inputs(name, 2, 3), cache, prefill_chunk_size=4
    ),
    "chat": _chat,
    "prompt lookup": _lookup,
    "assisted": _assisted,
}


def applies(name: str, mode: str) -> bool:
    """Whether transformers itself has the mode for the model."""
    if name == "qwen3-next":  # "assisted generation is not supported with stateful models"
        return mode not in ("prompt lookup", "assisted")
    if name == "t5":  # a decoder starts from one token
        return mode not in ("chat", "chunked prefill")
    if name == "whisper":
        return mode not in ("chat", "chunked prefill", "left padding", "padded beams")
    return True


@functools.cache
def expected(name: str, mode: str, attention: str = "eager") -> Result:
    """What transformers' own cache gives, once for all that is compared with it."""
    found = MODES[mode](name, model(name, attention), None)
    return Result(found.sequences, found.logits, None)
