"""How an operation is carried out: checked once, by the backend that was chosen, where tensors are.

A family of operations is a module of this package. An operation is written there in two parts:

* the function that callers see. It checks what came (`vector`, `part`), makes the result where the
  caller gave none (`output`), and hands both on. This is done once, for all backends.
* its definition in plain torch, an `Operation`: it takes what was checked, by name, and fills what
  was made. A backend may have a kernel for it, with the same arguments and the same bytes.

A kernel may return the number of a fault that it found; the operation's `fault` makes an exception
of it. Kernels on a device put it into a flag there (`Flag`), which is read at once, or, inside
`core.faults.together`, for all kernels at the end: reading waits for the device.

This module imports no backend. They are found by name (`HOMES`) when the first kernel is needed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gcbench.core import faults
from gcbench.core.errors import PayloadError, UsageError, unknown

NAMES = ("reference", "cpu", "cuda")
HOMES = {"cpu": "gcbench.ops.native", "cuda": "gcbench.ops.cuda"}
"""The module of each backend: its `status()` says whether it can be used here, its `KERNELS` are
by the name of the operation that they serve."""
Kernel = Callable[..., Any]
Fault = Callable[[int, Mapping[str, Any]], Exception | None]
"""From the number of a fault and the operation's arguments to what is raised, if anything."""


# ---- what an operation is given ------------------------------------------------------------------


def _shown(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"


def vector(tensor: Tensor, dtype: torch.dtype, numel: int, what: str = "x") -> Tensor:
    """Return a contiguous tensor of that dtype and so many elements, `tensor` itself where it is.

    Raises:
        ValueError: it has another dtype or another number of elements.
    """
    if tensor.dtype is not dtype or tensor.numel() != numel:
        raise ValueError(f"{what}: {_shown(tensor)}; {numel} {dtype} expected")
    return tensor.contiguous()


def part(tensor: Tensor, dtype: torch.dtype, numel: int, what: str) -> Tensor:
    """Return a part of a payload as `vector` does; it must have one dimension.

    Raises:
        PayloadError: it has another dtype or another shape.
    """
    if tensor.dtype is not dtype or tensor.shape != (numel,):
        raise PayloadError(f"{what}: {_shown(tensor)}; {numel} {dtype} expected")
    return tensor.contiguous()


def output(
    given: Tensor | None, dtype: torch.dtype, numel: int, device: torch.device, what: str = "out"
) -> Tensor:
    """Return the tensor to write to: `given`, or a new one of shape (numel,).

    Raises:
        ValueError: `given` has another dtype, number of elements or device, or is not contiguous.
    """
    if given is None:
        return torch.empty(numel, dtype=dtype, device=device)
    if given.dtype is not dtype or given.numel() != numel or given.device != device:
        raise ValueError(f"{what}: {_shown(given)}; {numel} {dtype} on {device} expected")
    if not given.is_contiguous():
        raise ValueError(f"{what}: strides {given.stride()}; a contiguous tensor expected")
    return given


# ---- operations ----------------------------------------------------------------------------------


class Flag(NamedTuple):
    """Where a kernel on a device leaves the least number of a fault, and what number that is."""

    tensor: Tensor
    """int32, shape (1,): `UNRAISED` before."""
    number: Callable[[int], int] = int
    """From what the kernel leaves to the number that the operation's `fault` knows."""


UNRAISED = 2**31 - 1


def _raise_if_raised(flag: Flag, operation: Operation, arguments: Mapping[str, Any]) -> None:
    if flag.tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return  # nothing can be read while a CUDA graph is captured
    number = int(flag.tensor)
    if number != UNRAISED:
        operation.check(flag.number(number), arguments)


class Operation:
    """The definition of an operation, in plain torch, and the kernels that may serve it.

    Called with a device and the arguments by name, which are checked: it trusts them.
    """

    def __init__(self, definition: Callable[..., Any], fault: Fault | None = None) -> None:
        family = definition.__module__.rpartition(".")[2]
        self.name = f"{family}.{definition.__name__.lstrip('_')}"
        self.definition, self.fault = definition, fault
        self.serving: dict[str, Kernel] = {}
        """The kernels that were chosen, by the type of the device."""

    def __call__(self, device: torch.device, /, **arguments: Any) -> Any:
        """Return what the definition or the kernel returns: a number, or None.

        Raises:
            ValueError: tensors lie on several devices.
            Exception: what `fault` makes of the number of a fault.
        """
        if _chosen is None:
            use("auto")
        for name, value in arguments.items():
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if isinstance(tensor, Tensor) and tensor.device != device:
                    raise ValueError(
                        f"{self.name}: {name} is on {tensor.device}; {device} expected"
                    )
        kernel = self.serving.get(device.type)
        if kernel is None:
            return self.definition(**arguments)
        found = kernel(**arguments)
        if isinstance(found, Flag):
            faults.look(partial(_raise_if_raised, found, self, arguments))
        elif self.fault is None:
            return found
        else:
            self.check(found, arguments)
        return None

    def check(self, found: int | None, arguments: Mapping[str, Any]) -> None:
        """Raise what `fault` makes of the number that a kernel found; 0 and None are no fault."""
        if found and self.fault is not None:
            error = self.fault(found, arguments)
            if error is not None:
                raise error


OPERATIONS: dict[str, Operation] = {}
"""All operations that kernels may serve, by `family.operation`."""


class _Decorator(Protocol):
    def __call__(self, definition: Callable[..., Any], /) -> Operation: ...


def operation(fault: Fault | None = None) -> _Decorator:
    """Make an `Operation` of a definition in plain torch; its name is that of module and function.

    Raises:
        ValueError: there is an operation of this name.
    """

    def make(definition: Callable[..., Any]) -> Operation:
        made = Operation(definition, fault)
        if made.name in OPERATIONS:
            raise ValueError(f"operation {made.name} is defined twice")
        if _chosen is not None:
            _serve(made, _chosen)
        OPERATIONS[made.name] = made
        return made

    return make


# ---- backends ------------------------------------------------------------------------------------

_chosen: Mapping[str, str] | None = None
"""The backend that serves each type of device; None until one is chosen or an operation runs."""


def _home(backend: str) -> Any:
    return importlib.import_module(HOMES[backend])


def _serve(made: Operation, chosen: Mapping[str, str]) -> None:
    made.serving.clear()
    for device, backend in chosen.items():
        kernel = _home(backend).KERNELS.get(made.name)
        if kernel is not None:
            made.serving[device] = kernel


class Backend(NamedTuple):
    """A set of kernels: whether it can be used here, and the reason or what it is."""

    name: str
    available: bool
    detail: str


def backends() -> list[Backend]:
    """Return all backends, the ones that are missing with the reason."""
    return [
        Backend("reference", True, "plain torch, any device, the definition"),
        *(Backend(name, *_home(name).status()) for name in HOMES),
    ]


def choose(backend: str, device: str = "cpu") -> str:
    """Return the name of the backend that serves `backend` on a device of type `device`.

    "auto" takes the native kernels of that device if there are any, else the reference.

    Raises:
        UsageError: an unknown one, or one that is missing here, or serves other devices.
    """
    if backend not in ("auto", *NAMES):
        raise unknown("backend", backend, ["auto", *NAMES])
    if backend == "reference":
        return backend
    known = {found.name: found for found in backends()}
    if backend == "auto":
        return device if device in known and known[device].available else "reference"
    if not known[backend].available:
        raise UsageError(f"backend {backend!r} is missing: {known[backend].detail}; or use auto")
    if backend != device:
        raise UsageError(f"backend {backend!r} serves {backend} tensors, and these are on {device}")
    return backend


def use(backend: str) -> None:
    """Serve all operations of this process by `backend` from here on: "auto" or one of `NAMES`.

    Raises:
        UsageError: see `choose`.
    """
    if backend == "auto":
        _take({found.name: found.name for found in backends()[1:] if found.available})
    else:
        name = choose(backend, backend)
        _take({name: name} if name in HOMES else {})


def _take(chosen: Mapping[str, str] | None) -> None:
    """Serve operations by these backends' kernels from here on; by "auto" if it is None."""
    global _chosen
    _chosen = chosen
    for made in OPERATIONS.values():
        _serve(made, chosen or {})


@contextmanager
def using(backend: str) -> Iterator[None]:
    """Serve operations by `backend` inside a with statement."""
    before = _chosen
    use(backend)
    try:
        yield
    finally:
        _take(before)


@contextmanager
def serving(device: str, backend: str) -> Iterator[None]:
    """Serve operations on devices of this type by this backend's kernels inside a with statement.

    Only a stand-in needs that: kernels serve the tensors of their own devices.
    """
    before = _chosen
    _take({device: backend})
    try:
        yield
    finally:
        _take(before)
