"""Dispatch of operations to the kernels of the chosen backend, or to their definition.

A family of operations is a module of this package. An operation is written there in two parts:

* the function that callers use. It checks the arguments (`vector`, `part`), allocates the result
  if the caller gave no `out` (`output`), and calls the second part. All backends share it.
* the definition in plain torch, an `Operation`. It takes the checked arguments by name and fills
  the outputs. A backend may have a kernel for it, with the same arguments and the same bytes.

A kernel may return the number of a fault that it found, which the operation's `fault` turns into an
exception. A kernel on a device writes the number to a flag there (`Flag`). Flags are read after
each kernel, or, inside `core.faults.together`, all at the end, because the host has to wait for the
device to read them.

This module imports no backend; they are imported by name (`HOMES`) when the first kernel is needed.
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
"""The module of each backend. Its `status()` says whether it can be used on this machine; its
`KERNELS` are functions by the name of the operation that they compute."""
Kernel = Callable[..., Any]
Fault = Callable[[int, Mapping[str, Any]], Exception | None]
"""Takes the number of a fault and the operation's arguments, and returns the exception to raise;
None: nothing is raised."""


# ---- arguments and outputs -----------------------------------------------------------------------


def _shown(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"


def vector(tensor: Tensor, dtype: torch.dtype, numel: int, what: str = "x") -> Tensor:
    """Return `tensor`, made contiguous, if it has this dtype and `numel` elements.

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
    """A fault flag on a device: kernels lower it to the least number of the faults they find."""

    tensor: Tensor
    """int32, shape (1,), initially `UNRAISED`."""
    number: Callable[[int], int] = int
    """Maps the flag's value to the number that the operation's `fault` takes."""


UNRAISED = 2**31 - 1
"""The value of a flag if no fault was found."""


def _raise_if_raised(flag: Flag, operation: Operation, arguments: Mapping[str, Any]) -> None:
    if flag.tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return  # nothing can be read while a CUDA graph is captured
    number = int(flag.tensor)
    if number != UNRAISED:
        operation.check(flag.number(number), arguments)


class Operation:
    """The definition of an operation in plain torch, and the kernels that replace it.

    It is called with the device of its tensors and with keyword arguments that are already checked.
    """

    def __init__(self, definition: Callable[..., Any], fault: Fault | None = None) -> None:
        family = definition.__module__.rpartition(".")[2]
        self.name = f"{family}.{definition.__name__.lstrip('_')}"
        self.definition, self.fault = definition, fault
        self.serving: dict[str, Kernel] = {}
        """The kernels of the chosen backends, by type of device."""

    def __call__(self, device: torch.device, /, **arguments: Any) -> Any:
        """Run the kernel for this device, or the definition; return its result: a number, or None.

        Raises:
            ValueError: tensors are on several devices.
            Exception: what `fault` returns for a fault that the kernel found.
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
        """Raise what `fault` returns for a fault's number; 0 and None are no fault."""
        if found and self.fault is not None:
            error = self.fault(found, arguments)
            if error is not None:
                raise error


OPERATIONS: dict[str, Operation] = {}
"""All operations that may have kernels, by `family.operation`."""


class _Decorator(Protocol):
    def __call__(self, definition: Callable[..., Any], /) -> Operation: ...


def operation(fault: Fault | None = None) -> _Decorator:
    """Return a decorator that makes an `Operation` of a definition in plain torch.

    The operation is named `module.function`, without leading underscores. `fault`: see `Fault`.

    Raises:
        ValueError: there is already an operation of this name.
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
"""The backend for each type of device; None until one is chosen or an operation runs."""


def _home(backend: str) -> Any:
    return importlib.import_module(HOMES[backend])


def _serve(made: Operation, chosen: Mapping[str, str]) -> None:
    made.serving.clear()
    for device, backend in chosen.items():
        kernel = _home(backend).KERNELS.get(made.name)
        if kernel is not None:
            made.serving[device] = kernel


class Backend(NamedTuple):
    """A set of kernels; `detail` describes it, or says why it is not available on this machine."""

    name: str
    available: bool
    detail: str


def backends() -> list[Backend]:
    """Return all backends; the ones that are not available say why in `detail`."""
    return [
        Backend("reference", True, "plain torch, any device, the definition"),
        *(Backend(name, *_home(name).status()) for name in HOMES),
    ]


def choose(backend: str, device: str = "cpu") -> str:
    """Return the name of the backend that `backend` means on a device of type `device`.

    "auto" is the backend with kernels for that device if it is available, else "reference".

    Raises:
        UsageError: the backend is unknown, not available here, or for other devices.
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
    """Run all operations of this process by `backend` from now on: "auto" or one of `NAMES`.

    Raises:
        UsageError: see `choose`.
    """
    if backend == "auto":
        _take({found.name: found.name for found in backends()[1:] if found.available})
    else:
        name = choose(backend, backend)
        _take({name: name} if name in HOMES else {})


def _take(chosen: Mapping[str, str] | None) -> None:
    """Use these backends' kernels from now on, by type of device; None: "auto" at the next use."""
    global _chosen
    _chosen = chosen
    for made in OPERATIONS.values():
        _serve(made, chosen or {})


@contextmanager
def using(backend: str) -> Iterator[None]:
    """Run operations by `backend` inside a with statement."""
    before = _chosen
    use(backend)
    try:
        yield
    finally:
        _take(before)


@contextmanager
def serving(device: str, backend: str) -> Iterator[None]:
    """Run operations on devices of this type by this backend's kernels inside a with statement.

    For tests only, in which a CPU stands in for a GPU: otherwise a backend has kernels for its own
    device.
    """
    before = _chosen
    _take({device: backend})
    try:
        yield
    finally:
        _take(before)
