"""Storage, and opening and closing a backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Any, ClassVar, NoReturn, Self

from ml.backend_spec import Features
from ml.devices import BackendMemory, DeviceInfo, DeviceMemory
from ml.dtypes import DType
from ml.errors import ClosedError, DTypeError, NotSupportedError, ShapeError
from ml.protocols import Context
from ml.strided import integers

DEFAULT_GRAPH_NODES = 8192


class Storage:
    """One allocation: the framework's array of ``size`` elements, shared by all views of it.

    ``array`` may have any form that the backend chooses, flat or not. ``owned`` storage of ``nbytes`` is
    counted in ``Backend.memory()`` for ``device`` until it is dropped; arrays from ``from_native`` are not
    counted. Functional frameworks replace ``array`` on every write.
    """

    __slots__ = ("__weakref__", "array", "backend", "device", "owned", "size")

    def __init__(
        self, backend: BaseBackend, array: Any, size: int, nbytes: int, device: int = 0, owned: bool = True
    ) -> None:
        self.backend = backend
        self.array = array
        self.size = size
        self.device = device
        self.owned = owned
        if owned:
            backend.allocations[id(self)] = (device, nbytes)

    def __del__(self) -> None:
        if hasattr(self, "backend"):  # an interrupt may come before __init__ begins
            self.backend.allocations.pop(id(self), None)


class BaseBackend(ABC):
    """The name, devices, opening and closing of a backend, and its count of bytes; subclasses add contexts
    and options.
    """

    features: ClassVar[Features] = Features()
    """The features declared in the record: other dtypes are refused wherever a tensor is created."""

    def __init__(self, name: str, devices: Sequence[DeviceInfo], dtype: DType | str = DType.F32) -> None:
        found = DType.__members__.get(dtype.upper()) if isinstance(dtype, str) else dtype
        if not isinstance(found, DType) or not found.is_float:
            raise DTypeError(
                f"open_backend: dtype={dtype!r:.60}; the default dtype must be F32, F16 or BF16 of ml.DType, "
                "or one of these names"
            )
        self._name = name
        self._devices = tuple(devices)
        self._dtype = found
        self.closed = False
        """Whether ``close`` was called. Read it; ``close`` sets it."""
        self.allocations: dict[int, tuple[int, int]] = {}  # dict operations are atomic: no lock in __del__
        """(device index, bytes) by ``id`` of each counted storage; maintained by the storages."""

    @property
    def name(self) -> str:
        return self._name

    @property
    def devices(self) -> tuple[DeviceInfo, ...]:
        return self._devices

    @property
    def dtype(self) -> DType:
        """The float dtype to which ``from_numpy`` converts float64 and Python floats."""
        return self._dtype

    def new_context(self, max_graph_nodes: int | None = None) -> Context:
        self.check("new_context")
        wanted = DEFAULT_GRAPH_NODES if max_graph_nodes is None else max_graph_nodes
        (nodes,) = integers("new_context", wanted)
        if nodes < 1:
            raise ShapeError(f"new_context: max_graph_nodes={nodes}; it must be at least 1")
        return self._new_context(nodes)

    @abstractmethod
    def _new_context(self, max_graph_nodes: int) -> Context:
        """A context on the first device; ``max_graph_nodes`` >= 1 is a hint where graphs are built."""

    def memory(self) -> BackendMemory:
        self.check("memory")
        used = [0] * len(self._devices)
        for device, nbytes in list(self.allocations.values()):
            used[device] += nbytes
        return BackendMemory(
            tuple(self._device_memory(i, device, used[i]) for i, device in enumerate(self._devices))
        )

    def _device_memory(self, index: int, device: DeviceInfo, allocated: int) -> DeviceMemory:
        """The memory of ``devices[index]``; overridden to add free and total bytes if the framework reports
        them.
        """
        return DeviceMemory(device.name, allocated)

    def close(self) -> None:
        """Refuse all further operations. A backend calls this first, then frees what tensors still hold."""
        self.closed = True

    def check(self, op: str) -> None:
        """Raise ClosedError unless this backend is open; ``to_numpy`` and ``native`` call it."""
        if self.closed:
            raise ClosedError(f"{op}: backend {self._name!r} is closed; open it again with ml.open_backend")

    def check_dtype(self, op: str, dtype: DType) -> None:
        """Raise DTypeError for an invalid dtype, NotSupportedError for one that this backend lacks."""
        if not isinstance(dtype, DType):
            raise DTypeError(f"{op}: dtype {dtype!r} is not an ml.DType")
        if dtype not in self.features.dtypes:
            _ = dtype.numpy  # refuses the block formats
            raise NotSupportedError(f"{op}: backend {self._name!r} does not support {dtype!r}")

    def __enter__(self) -> Self:
        self.check("enter")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise NotSupportedError(f"pickle: backend {self._name!r} cannot be pickled; open one in each process")

    def __repr__(self) -> str:
        state = "closed" if self.closed else ", ".join(device.name for device in self._devices)
        return f"<ml backend {self._name!r} ({state})>"
