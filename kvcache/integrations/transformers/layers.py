"""One layer of the cache as transformers sees it."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from kvcache.integrations.transformers.kinds import Kind
from kvcache.integrations.transformers.rows import Rows
from kvcache.integrations.transformers.states import States

__all__ = ["AttentionLayer", "CrossLayer", "LinearLayer"]


class AttentionLayer(CacheLayerMixin):  # type: ignore[misc]
    """K and V of one layer, in the cache of its kind."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, rows: Rows, layer: int, kind: Kind) -> None:
        self.rows, self.layer, self.kind = rows, layer, kind
        self.is_sliding = kind.size > 0

    @property
    def is_initialized(self) -> bool:
        return self.rows.seen[self.layer] > 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: buffers are allocated by the first ``put``."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store K and V (rows, heads, new tokens, dim); all that the new tokens may see."""
        return self.rows.update(self.layer, self.kind, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys that ``update`` will return, position of the first one)."""
        self.rows.expected = query_length
        seen = self.rows.seen[self.layer]
        first = max(0, seen - self.kind.size + 1) if self.kind.size else 0
        return seen - first + query_length, first

    def get_seq_length(self) -> int:
        return self.rows.seen[self.layer]

    def get_max_length(self) -> int:
        """-1: no limit per row. All rows share ``max_sequences * capacity`` cells."""
        return self.kind.size or -1

    @property
    def keys(self) -> torch.Tensor | None:
        """All keys (rows, heads, tokens, head_dim) that later tokens may see; None before the first."""
        return self._held(0)

    @property
    def values(self) -> torch.Tensor | None:
        return self._held(1)

    def _held(self, which: int) -> torch.Tensor | None:
        found = self.rows.peek(self.layer, self.kind)
        return None if found is None else found[which]


class CrossLayer(CacheLayerMixin):  # type: ignore[misc]
    """K and V of the encoder's output in one layer, stored once and read by every later token."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False
    is_sliding = False

    def __init__(self, rows: Rows, layer: int) -> None:
        self.rows, self.layer = rows, layer

    @property
    def is_initialized(self) -> bool:
        return self.keys is not None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: ``update`` allocates."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store K and V (rows, heads, length, dim) of the encoder's output; returns what is stored."""
        self.rows.put_encoded(self.layer, key_states, value_states)
        found = self.rows.encoded(self.layer)
        assert found is not None
        return found

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length(), 0

    def get_seq_length(self) -> int:
        keys = self.keys
        return 0 if keys is None else int(keys.shape[2])

    def get_max_length(self) -> int:
        return -1

    @property
    def keys(self) -> torch.Tensor | None:
        found = self.rows.encoded(self.layer)
        return None if found is None else found[0]

    @property
    def values(self) -> torch.Tensor | None:
        found = self.rows.encoded(self.layer)
        return None if found is None else found[1]


class LinearLayer(LinearAttentionCacheLayerMixin):  # type: ignore[misc]
    """The convolution and recurrent states of one layer, in the recurrent cache."""

    is_compileable = False
    is_croppable = False
    supports_early_init = False
    record_past = False
    number_of_states = 1

    def __init__(self, states: States, layer: int) -> None:
        self.states, self.layer = states, layer

    @property
    def is_initialized(self) -> bool:
        return self.states.started(self.layer)

    @property
    def has_previous_state(self) -> dict[int, bool]:
        return {0: self.states.started(self.layer)}

    @property
    def conv_states(self) -> dict[int, torch.Tensor]:
        """A view of the convolution states: what is written into it is stored."""
        return {0: self.states.conv(self.layer)}

    @property
    def recurrent_states(self) -> dict[int, torch.Tensor]:
        return {0: self.states.recurrent(self.layer)}

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: buffers are allocated by the first state."""

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Take new inputs (rows, channels, tokens); those before them and they themselves are returned."""
        return self.states.update_conv(self.layer, conv_states, conv_kernel_size)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        return self.states.update_recurrent(self.layer, recurrent_states)

    def activate_past_recording(self) -> None:
        """Nothing to do: a state goes back to a checkpoint or not at all, which ``crop`` says."""
