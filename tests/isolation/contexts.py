"""What K and V depend on beside a prompt's text, and who asks for one prompt in all such contexts.

A context is the set of what is *other* in it than in the plain one. ``walk`` asks a face for the prompt in
every context that differs in up to two dimensions, so that each of them, and each pair, meets all others:
first nothing may be found but what two prompts begin with alike, then everything must be.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

DIMENSIONS = {
    "salt": "salt of a tenant",
    "adapter": "adapter (LoRA)",
    "version": "other weights under an adapter's name",
    "scale": "an adapter's scale",
    "image": "image",
    "place": "an image's place",
    "embeddings": "prompt embeddings",
    "model": "model",
    "weights": "weights of a model",
    "rope": "rope settings",
    "dtype": "dtype of the computation",
    "format": "storage format of K and V",
    "rank": "rank of tensor parallelism",
}
IN_PROCESS = frozenset(["salt", "adapter", "version", "scale", "image", "place", "embeddings"])
"""What may be other from one request to the next; the rest takes another process."""
TIERS = ("device", "host", "folder")
NAMES = ("names",)

Context = frozenset[str]
Item = int | str
"""Of a prompt: a token id, or what names an image or an embedding."""
Ask = Callable[[Context], int]
"""How many tokens of the prompt in this context were found; afterwards all of them are there."""

BLOCK, WHOLE = 4, 12
"""Tokens of a stored block, and of the prompt but its last, which is always computed."""


def contexts(dimensions: Iterable[str]) -> list[Context]:
    """Those that differ from the plain one in nothing, in one dimension, and in two."""
    names = [*dimensions]
    some = [frozenset(one) for size in range(3) for one in itertools.combinations(names, size)]
    return sorted(some, key=lambda context: sorted(context - IN_PROCESS))  # those of one process together


def prompt_of(context: Context, images: bool = True) -> list[Item]:
    """WHOLE + 1 items: an image behind the first block, or the second, and ids."""
    prompt: list[Item] = [*range(10, 10 + WHOLE + 1)]
    if images:
        prompt[2 * BLOCK if "place" in context else BLOCK] = "image " + "ab"["image" in context]
    if "embeddings" in context:
        prompt[0] = "embedding"
    return prompt


IDS = [item for item in prompt_of(frozenset(), images=False) if isinstance(item, int)]
OF_PROMPT = {"image", "place", "embeddings"}
"""What makes another prompt, of which what comes before may be shared."""


def alike(one: Context, other: Context, images: bool) -> int:
    """How many tokens of the two prompts are the same in every respect, in whole blocks."""
    if one - OF_PROMPT != other - OF_PROMPT:
        return 0
    pairs = zip(prompt_of(one, images), prompt_of(other, images), strict=True)
    same = len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)])
    return min(same, WHOLE) // BLOCK * BLOCK


@dataclass(frozen=True)
class Walk:
    """What was found in each context: when it was first asked for, what it may share, and the second time."""

    first: Mapping[Context, int]
    allowed: Mapping[Context, int]
    again: Mapping[Context, int]

    def leaks(self, dimension: str) -> dict[tuple[str, ...], tuple[int, int]]:
        """By context with this dimension: found and allowed, where these differ."""
        return {
            tuple(sorted(context)): (found, self.allowed[context])
            for context, found in self.first.items()
            if dimension in context and found != self.allowed[context]
        }

    def lost(self, dimension: str) -> dict[tuple[str, ...], int]:
        """By context with this dimension, and the plain one: what was found of a whole that was there."""
        return {
            tuple(sorted(context)): found
            for context, found in self.again.items()
            if (dimension in context or not context) and found != WHOLE
        }


def walk(ask: Ask, dimensions: Iterable[str]) -> Walk:
    """Ask twice in every context of these dimensions, all over the same stores."""
    asked = contexts(dimensions)
    images = bool(OF_PROMPT & {*dimensions})
    allowed = {
        context: max((alike(context, before, images) for before in asked[:i]), default=0)
        for i, context in enumerate(asked)
    }
    first = {context: ask(context) for context in asked}
    return Walk(first, allowed, {context: ask(context) for context in asked})


@dataclass(frozen=True)
class Face:
    """What one face is asked: ``tiers`` by dimension, and why the other dimensions are not among them.

    The tier "names": of a runtime's pages, which are found by the names that our side gives them.
    ``refused``: dimensions that cannot occur on it, ``open``: those that it does not keep apart, each with
    the reason; ``told``: what users have to do or leave for the others to be kept apart.
    """

    name: str
    tiers: Mapping[str, tuple[str, ...]]
    refused: Mapping[str, str] = field(default_factory=dict)
    told: Mapping[str, str] = field(default_factory=dict)
    open: Mapping[str, str] = field(default_factory=dict)

    def dimensions(self, tier: str) -> list[str]:
        return [name for name in DIMENSIONS if tier in self.tiers.get(name, ())]
