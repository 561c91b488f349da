"""CUDA devices that are not there, for the code that runs on them: real values, and a log of every transfer.

Inside ``cuda_double(n)`` torch has ``n`` devices. A tensor on one of them says so (``device``, ``is_cuda``),
keeps its values on the host, and is computed by torch's CPU kernels; it refuses operands of another device,
as CUDA does. Its address is none of the host's: a kernel of the CPU that is given it crashes. What is noted:
copies between devices, and all that makes the host wait for one.

FlashAttention and the memory-efficient kernel, which the CPU lacks, are their definitions here, with the
shapes and alignments that they ask for. A sort of BOOL is refused, as CUDA refuses it.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from backends.torch import ragged, store

HOST = torch.device("cpu")
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "bincount"}
"""Operations whose result, or its shape, the host has to know."""
WHOLE = {torch.matmul, torch.Tensor.matmul, torch.rms_norm, functional.rms_norm}
"""What torch makes of other operations, with changes of shape in place that a double cannot follow."""


AWAY = 1 << 55
"""From where the values lie to the address that a tensor on a device gives: no process has memory there."""


class _DeviceStorage:
    """The memory of a tensor on a device that is not there."""

    def __init__(self, inner: torch.UntypedStorage) -> None:
        self.nbytes, self._inner = inner.nbytes, inner

    def data_ptr(self) -> int:
        return self._inner.data_ptr() + AWAY


class DeviceTensor(torch.Tensor):
    """A tensor on a device that is not there; ``inner`` has its values."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: torch.device) -> DeviceTensor:
        options = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        with torch.inference_mode(False):
            make: Any = torch.Tensor._make_wrapper_subclass
            made: DeviceTensor = make(cls, inner.size(), device=device, **options)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} of a tensor on a double's device, outside of cuda_double()")

    # Torch's bindings of these ask CUDA itself, where the device is CUDA's.

    def data_ptr(self) -> int:
        return self.inner.data_ptr() + AWAY

    def untyped_storage(self) -> Any:
        return _DeviceStorage(self.inner.untyped_storage())

    def is_inference(self) -> bool:
        return self.inner.is_inference()

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
        return self if self.inner.is_contiguous() else self.clone(memory_format=memory_format)

    def cpu(self) -> torch.Tensor:
        return self.to("cpu")

    def nonzero(self) -> torch.Tensor:
        found: torch.Tensor = torch.ops.aten.nonzero(self)
        return found

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def float(self) -> torch.Tensor:
        return self.to(torch.float32)

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> DeviceTensor:
        torch.ops.aten.copy_(self, source, non_blocking)
        return self

    def __getitem__(self, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        if any(isinstance(part, torch.Tensor) for part in parts):
            return torch.ops.aten.index(self, [None if isinstance(p, slice) else p for p in parts])
        shown = self.inner[index]
        return torch.as_strided(self, shown.size(), shown.stride(), shown.storage_offset())

    def __setitem__(self, index: Any, value: Any) -> None:
        parts = index if isinstance(index, tuple) else (index,)
        if any(isinstance(part, torch.Tensor) for part in parts):
            torch.ops.aten.index_put_(self, [None if isinstance(p, slice) else p for p in parts], value)
        elif isinstance(value, torch.Tensor):
            torch.ops.aten.copy_(self[index], value)
        else:
            torch.ops.aten.fill_(self[index], value)


@dataclass(frozen=True)
class Transfer:
    """What was noted: "upload", "download", "crossing", or "wait"; of what, and how."""

    kind: str
    operation: str
    device: str
    """Of the destination; of a wait, the device that is waited for."""
    nbytes: int = 0
    pinned: bool = False
    blocking: bool = True


@dataclass
class Transfers:
    """What went between host and devices, in order, and which operations ran."""

    log: list[Transfer] = field(default_factory=list)
    operations: list[str] = field(default_factory=list)
    copied: int = 0
    """Elements of the largest copy into another dtype."""

    def of(self, kind: str) -> list[Transfer]:
        return [noted for noted in self.log if noted.kind == kind]

    def clear(self) -> None:
        self.log.clear()
        self.operations.clear()
        self.copied = 0

    @property
    def waits(self) -> list[Transfer]:
        """All that stops the host: downloads, uploads that block, those from memory that is not pinned."""
        uploads = [noted for noted in self.of("upload") if noted.blocking or not noted.pinned]
        return self.of("wait") + self.of("download") + uploads


class _Bindings(TorchFunctionMode):
    """What torch's bindings, or operations made of others, would ask CUDA itself for."""

    def __init__(self, devices: _Devices) -> None:
        super().__init__()
        self._devices = devices

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.to:
            return self._to(*args, **kwargs)
        if func is functional.scaled_dot_product_attention and isinstance(args[0], DeviceTensor):
            self._devices.transfers.operations.append(func.__name__)
        if func in WHOLE and isinstance(args[0], DeviceTensor):
            with torch._C.DisableTorchFunction():
                return self._devices.whole(func, args, kwargs)
        return func(*args, **kwargs)

    def _to(self, x: torch.Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> torch.Tensor:
        memory_format = kwargs.pop("memory_format", None)
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        device, dtype = device or x.device, dtype or x.dtype
        if not copy and (device, dtype) == (x.device, x.dtype):
            return x
        how = {"non_blocking": non_blocking, "memory_format": memory_format}
        made: torch.Tensor = torch.ops.aten._to_copy(x, dtype=dtype, device=device, **how)
        return made


class _Devices(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.transfers = Transfers()
        self._pinned: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name.removeprefix("aten::"), dict(kwargs or {})
        tensors: list[torch.Tensor] = []
        tree_map(lambda x: tensors.append(x) if isinstance(x, torch.Tensor) else None, (args, kwargs))
        self.transfers.operations.append(name)
        special = getattr(self, f"_on_{name}", None)
        if special is not None:
            return special(func, args, kwargs)
        device = self._common(name, tensors)
        if name in WAITS and device.type == "cuda":
            self._note("wait", name, device)
        return self._run(func, args, kwargs, device)

    def whole(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation that torch makes of others, as one."""
        self.transfers.operations.append(func.__name__)
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        with _disable_current_modes():
            return self._run(func, args, kwargs, self._common(func.__name__, tensors))

    def _common(self, name: str, tensors: list[torch.Tensor]) -> torch.device:
        """The one device of these; numbers of the host may stand beside any."""
        found = {x.device for x in tensors if x.dim() or x.device != HOST} or {HOST}
        if len(found) > 1:
            raise RuntimeError(f"{name}: Expected all tensors on one device, found {sorted(map(str, found))}")
        return found.pop()

    def _run(self, func: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
        """``func`` on the values; what it makes lies on ``device``, or where ``kwargs`` say."""
        if (asked := kwargs.get("device")) is not None:
            device = torch.device(asked)
            kwargs["device"] = HOST
        pin = kwargs.pop("pin_memory", None)
        owners: dict[int, torch.Tensor] = {}

        def inner(x: Any) -> Any:
            if isinstance(x, DeviceTensor):
                owners[id(x.inner)] = x
                return x.inner
            return x

        def outer(x: Any) -> Any:
            if not isinstance(x, torch.Tensor) or isinstance(x, DeviceTensor) or device.type != "cuda":
                return x
            return owners.get(id(x)) if id(x) in owners else DeviceTensor(x, device)

        found = func(*tree_map(inner, args), **tree_map(inner, kwargs))
        if pin:
            self._pin(found)
        return tree_map(outer, found)

    def _note(self, kind: str, name: str, device: torch.device, **how: Any) -> None:
        self.transfers.log.append(Transfer(kind, name, str(device), **how))

    def _move(self, name: str, source: torch.Tensor, target: torch.device, non_blocking: bool) -> None:
        if source.device == target:
            return
        kind = {"cpu": "upload", "cuda": "crossing"}[source.device.type] if target != HOST else "download"
        pinned = source.device == HOST and source.untyped_storage().data_ptr() in self._pinned
        self._note(kind, name, target, nbytes=source.nbytes, pinned=pinned, blocking=not non_blocking)

    def _pin(self, made: torch.Tensor) -> torch.Tensor:
        self._pinned[made.untyped_storage().data_ptr()] = made
        return made

    # Operations with rules of their own.

    def _on__to_copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        target = torch.device(kwargs.get("device") or args[0].device)
        self.transfers.copied = max(self.transfers.copied, args[0].numel())
        self._move("_to_copy", args[0], target, bool(kwargs.pop("non_blocking", False)))
        return self._run(func, args, {**kwargs, "device": target}, target)

    def _on_copy_(self, func: Any, args: Any, kwargs: Any) -> Any:
        target, source, *rest = args
        self._move("copy_", source, target.device, bool(rest and rest[0]) or bool(kwargs.get("non_blocking")))
        values = [x.inner if isinstance(x, DeviceTensor) else x for x in (target, source)]
        func(*values)
        return target

    def _on__pin_memory(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self._pin(args[0].clone())

    def _on_is_pinned(self, func: Any, args: Any, kwargs: Any) -> Any:
        return args[0].untyped_storage().data_ptr() in self._pinned

    def _on_index(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self._indexed(func, args, kwargs)

    def _on_index_put_(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self._indexed(func, args, kwargs)

    def _indexed(self, func: Any, args: Any, kwargs: Any) -> Any:
        device = args[0].device
        for index in args[1]:
            if index is not None and device.type == "cuda":
                self._move("index", index, device, False)
                if index.dtype is torch.bool:
                    self._note("wait", "nonzero", device)
        return self._run(func, args, kwargs, device)

    def _on_sort(self, func: Any, args: Any, kwargs: Any) -> Any:
        if args[0].is_cuda and args[0].dtype is torch.bool:
            raise RuntimeError("Sort currently does not support bool dtype on CUDA")
        return self._run(func, args, kwargs, args[0].device)

    def _on__scaled_dot_product_flash_attention(self, func: Any, args: Any, kwargs: Any) -> Any:
        q, k, v, _, causal = (*args, 0.0, False)[:5] if len(args) < 5 else args[:5]
        _need(q.dtype is not torch.float32, q.shape[3] == k.shape[3] == v.shape[3] <= 256)
        out, lse = self._attention(q, k, v, None, kwargs["scale"], bottom_right=bool(causal))
        unused = DeviceTensor(torch.empty(0), out.device)
        return out, lse, unused, unused, 0, 0, unused, unused, unused

    def _on__efficient_attention_forward(self, func: Any, args: Any, kwargs: Any) -> Any:
        q, k, v = (DeviceTensor(x.inner.transpose(1, 2), x.device) for x in args[:3])
        bias, lists, kind, with_lse = args[3], args[4:8], args[9], args[10]
        _need(with_lse, all(x is None for x in lists), kind in (0, 2))  # 2: from the bottom right
        out, lse = self._attention(q, k, v, bias, kwargs["scale"], bottom_right=kind == 2)
        out = DeviceTensor(out.inner.transpose(1, 2), out.device)
        return out, *self._with_state(lse), q.shape[2], k.shape[2]

    def _with_state(self, lse: DeviceTensor) -> tuple[DeviceTensor, ...]:
        """The log-sum-exp, its rows in multiples of 32 as that kernel gives it; what dropout would use."""
        rows = lse.shape[2]
        padded = lse.inner.new_full((*lse.shape[:2], -(-rows // 32) * 32), torch.inf)
        padded[:, :, :rows] = lse.inner
        unused = DeviceTensor(torch.empty(0), lse.device)
        return DeviceTensor(padded, lse.device), unused, unused

    def _attention(
        self, q: Any, k: Any, v: Any, bias: Any, scale: float, bottom_right: bool
    ) -> tuple[DeviceTensor, DeviceTensor]:
        device = self._common("attention", [x for x in (q, k, v, bias) if x is not None])
        for x in (q, k, v):
            _need(x.dtype is q.dtype, x.stride(-1) == 1, x.shape[-1] * x.element_size() % 16 == 0)
        q, k, v = (x.inner for x in (q, k, v))
        group = q.shape[1] // k.shape[1]
        scores = q.double() @ k.double().repeat_interleave(group, 1).transpose(-1, -2) * scale
        if bias is not None:
            _need(bias.shape == scores.shape, bias.dtype is q.dtype, bias.stride(-1) == 1)
            _need(*(step * bias.element_size() % 16 == 0 for step in bias.stride()[:-1]))
            scores += bias.inner.double()
        if bottom_right:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(k.shape[2] - q.shape[2] + 1)
            scores.masked_fill_(hidden, -torch.inf)
        lse = scores.logsumexp(-1)
        out = (scores - lse.unsqueeze(-1)).exp() @ v.double().repeat_interleave(group, 1)
        return DeviceTensor(out.to(q.dtype), device), DeviceTensor(lse.float(), device)


def _need(*held: bool) -> None:
    if not all(held):
        raise RuntimeError("the kernel does not take these")


@contextlib.contextmanager
def _no_kernels() -> Iterator[None]:
    """Where there is a GPU, Triton's would be run on the host's memory."""
    asked = ragged.kernels_on, ragged._multiprocessors
    with mock.patch.object(torch.version, "cuda", None):
        for cached in asked:
            getattr(cached, "cache_clear", lambda: None)()
        yield
    for cached in asked:
        getattr(cached, "cache_clear", lambda: None)()


@contextlib.contextmanager
def cuda_double(count: int = 1) -> Iterator[Transfers]:
    """``count`` CUDA devices; what goes to and from them is noted. Backends are opened and used inside."""
    properties = types.SimpleNamespace(multi_processor_count=2, total_memory=1 << 34, name="double")
    replaced = {
        "is_available": lambda: True,
        "device_count": lambda: count,
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: "double",
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (9, 0),
        "mem_get_info": lambda device=None: (1 << 33, 1 << 34),
        "empty_cache": lambda: None,
        "is_current_stream_capturing": lambda: False,
        "_lazy_init": lambda: None,
    }
    with contextlib.ExitStack() as stack:
        for name, body in replaced.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, body))
        stack.enter_context(_no_kernels())
        # It makes a view past every dispatch.
        stack.enter_context(mock.patch.object(store, "alias", store._strided))
        devices = stack.enter_context(_Devices())
        stack.enter_context(_Bindings(devices))
        yield devices.transfers
