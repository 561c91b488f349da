"""Backend and Context on JAX."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from ml import CAUSAL, CacheConfig, DeviceError, DeviceInfo, DeviceMemory, DType, DTypeError
from ml.base import BaseBackend, BaseContext, check_attention
from ml_backend_jax.kernels import KERNELS
from ml_backend_jax.tensor import Box, JaxTensor


class JaxBackend(BaseBackend):
    """``open_backend("jax", device=None, dtype=DType.F32)``; device is a platform of JAX: cpu, gpu, tpu."""

    def __init__(self, device: str | None = None, dtype: DType = DType.F32) -> None:
        try:
            self.device = jax.devices(device)[0]
        except RuntimeError as error:
            raise DeviceError(f"open_backend: jax has no device {device!r}: {error}") from error
        info = DeviceInfo(self.device.platform, self.device.platform, f"JAX {jax.__version__}")
        super().__init__("jax", (info,), dtype)
        self.on_host = self.device.platform == "cpu"
        self.boxes: weakref.WeakSet[Box] = weakref.WeakSet()
        self._lock = threading.RLock()

    @contextmanager
    def dispatching(self, op: str) -> Iterator[None]:
        """Around every use of JAX: 64-bit integers for us alone, and no array given up under a reader."""
        with self._lock, jax.enable_x64(True):
            try:
                yield
            except (RuntimeError, ValueError, MemoryError) as error:
                raise DeviceError(f"{op}: JAX failed: {error}") from error

    def run(self, kernel: str, *operands: Any) -> Any:
        """New tensors from a kernel on the arrays of the moment."""
        with self.dispatching(kernel):
            arrays = [x.read() if isinstance(x, JaxTensor) else x for x in operands]
            result = KERNELS[kernel](*arrays)
            if isinstance(result, tuple):
                return tuple(map(self.own, result))
            # JAX hands an argument back where the program is the identity.
            return self.own(result.copy() if any(result is array for array in arrays) else result)

    def own(self, array: jax.Array, ours: bool = True) -> JaxTensor:
        return JaxTensor.whole(Box(self, array, ours), DType.from_numpy(array.dtype), array.shape)

    def _new_context(self, max_graph_nodes: int) -> JaxContext:
        return JaxContext(self, max_graph_nodes)

    def _device_memory(self, index: int, device: DeviceInfo, allocated: int) -> DeviceMemory:
        known = self.device.memory_stats() or {}
        total, used = known.get("bytes_limit"), known.get("bytes_in_use", 0)
        return DeviceMemory(device.name, allocated, None if total is None else total - used, total)

    def close(self) -> None:
        super().close()
        for box in list(self.boxes):
            box.array = None  # frees the memory, whoever still holds a tensor

    def cache_config(self) -> CacheConfig:
        """XLA compiles for each length of the history: hand it out in steps of 64."""
        return CacheConfig(cache_padding=64, elide_mask=True)

    def attention(
        self, ctx: Any, query: Any, key: Any, value: Any, mask: Any, scale: float, sinks: Any = None
    ) -> Any:
        ctx.check("attention")
        check_attention("attention", self, query, key, value, mask, sinks)
        matrix = None if mask is CAUSAL else mask
        return self.run("attention", query, key, value, matrix, sinks, scale, mask is CAUSAL)


class JaxContext(BaseContext):
    """JAX starts work when it is told to and waits in ``to_numpy``: compute has nothing to do."""

    backend: JaxBackend

    def _from_array(self, array: np.ndarray, dtype: DType) -> JaxTensor:
        with self.backend.dispatching("allocate"):
            return self.backend.own(jax.device_put(np.array(array, order="C"), self.backend.device))

    def _from_native(self, array: Any) -> JaxTensor:
        if not isinstance(array, jax.Array):
            raise DTypeError(f"from_native: {type(array).__name__} is no jax.Array; use from_numpy")
        return self.backend.own(array, ours=False)
