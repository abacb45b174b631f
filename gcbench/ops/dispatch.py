"""Dispatch of operations to the kernels of the chosen backend, or to their definition.

A family of operations is a module of this package. An operation consists of two functions:

* the public function. It checks the arguments (`vector`, `part`), allocates the result unless the
  caller passes `out` (`output`), and calls the definition. All backends share it.
* the definition in plain torch, an `Operation`. It receives the checked arguments and fills the
  outputs. A backend may have a kernel for it, which receives the same arguments by name and writes
  the same bytes.

A kernel may return an error number, which the operation's `fault` turns into an exception. A GPU
kernel writes the number to a flag in device memory (`Flag`). Reading a flag synchronizes the
device, so flags are read after each kernel or, inside `core.faults.together`, once at the end.

Backends are imported by name (`HOMES`) when the first kernel is needed.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from gcbench.core import faults
from gcbench.core.errors import PayloadError, UsageError, unknown

NAMES = ("reference", "cpu", "cuda")
HOMES = {"cpu": "gcbench.ops.native", "cuda": "gcbench.ops.cuda"}
"""The module of each backend. `status()` returns whether it is usable on this machine; `KERNELS`
maps names of operations to functions."""
Kernel = Callable[..., Any]
Fault = Callable[[int, Mapping[str, Any]], Exception | None]
"""Maps an error number and the operation's arguments to the exception to raise, or None."""


# ---- arguments and outputs -----------------------------------------------------------------------


def _shown(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"


def vector(tensor: Tensor, dtype: torch.dtype, numel: int, what: str = "x") -> Tensor:
    """Check dtype and number of elements of `tensor`, and return it contiguous.

    Raises:
        ValueError: the dtype or number of elements differs.
    """
    if tensor.dtype is not dtype or tensor.numel() != numel:
        raise ValueError(f"{what} is {_shown(tensor)}: expected {numel} {dtype}")
    return tensor.contiguous()


def part(tensor: Tensor, dtype: torch.dtype, numel: int, what: str) -> Tensor:
    """Check dtype and shape (numel,) of a part of a payload, and return it contiguous.

    Raises:
        PayloadError: the dtype or shape differs.
    """
    if tensor.dtype is not dtype or tensor.shape != (numel,):
        raise PayloadError(f"{what}: {_shown(tensor)}; expected {numel} {dtype}")
    return tensor.contiguous()


def output(
    tensor: Tensor | None, dtype: torch.dtype, numel: int, device: torch.device, what: str = "out"
) -> Tensor:
    """Return the output tensor: `tensor`, or a new one of shape (numel,) if it is None.

    Raises:
        ValueError: dtype, number of elements or device of `tensor` differs, or it is not
            contiguous.
    """
    if tensor is None:
        return torch.empty(numel, dtype=dtype, device=device)
    if tensor.dtype is not dtype or tensor.numel() != numel or tensor.device != device:
        raise ValueError(f"{what} is {_shown(tensor)}: expected {numel} {dtype} on {device}")
    if not tensor.is_contiguous():
        raise ValueError(f"{what} has strides {tensor.stride()}: expected a contiguous tensor")
    return tensor


def outputs(
    tensors: Sequence[Tensor] | None, device: torch.device, *parts: tuple[torch.dtype, int]
) -> list[Tensor]:
    """Return one output tensor per part, a (dtype, numel): those in `tensors`, or new ones if None.

    Raises:
        ValueError: the number of `tensors` differs from that of the parts, or see `output`.
    """
    slots: Sequence[Tensor | None] = [None] * len(parts) if tensors is None else tensors
    if len(slots) != len(parts):
        raise ValueError(f"out has {len(slots)} tensors: expected {len(parts)}")
    return [output(slot, *part, device) for slot, part in zip(slots, parts, strict=True)]


def payload_faults(
    messages: Mapping[int, str],
) -> Callable[[int, Mapping[str, Any]], PayloadError]:
    """Return a `Fault` that makes a `PayloadError` from `messages`, keyed by error number.

    The message is prefixed with the operation's argument `name`, if it has one.
    """

    def fault(number: int, arguments: Mapping[str, Any]) -> PayloadError:
        name = arguments.get("name")
        return PayloadError(messages[number] if name is None else f"{name}: {messages[number]}")

    return fault


# ---- operations ----------------------------------------------------------------------------------


class Flag(NamedTuple):
    """An error flag in device memory: kernels set it to the smallest error number they detect."""

    tensor: Tensor
    """int32, shape (1,), initially `UNRAISED`."""
    number: Callable[[int], int] = int
    """Maps the flag's value to the error number for the operation's `fault`."""


UNRAISED = 2**31 - 1
"""The value of a flag without an error."""


def _raise_if_raised(
    flag: Flag, operation: Operation[..., Any], arguments: Mapping[str, Any]
) -> None:
    if flag.tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return  # nothing can be read while a CUDA graph is captured
    number = int(flag.tensor)
    if number != UNRAISED:
        operation.check(flag.number(number), arguments)


P = ParamSpec("P")
R = TypeVar("R")


class Operation(Generic[P, R]):
    """The definition of an operation in plain torch, and the kernels that replace it.

    Call it as its definition, with checked arguments.
    """

    def __init__(self, definition: Callable[P, R], fault: Fault | None = None) -> None:
        family = definition.__module__.rpartition(".")[2]
        self.name = f"{family}.{definition.__name__.lstrip('_')}"
        self.definition, self.fault = definition, fault
        self.parameters = tuple(inspect.signature(definition).parameters)
        self.serving: dict[str, Kernel] = {}
        """The kernels of the chosen backends, by type of device."""
        self.independent: set[Kernel] = set()
        """Those that cannot correlate the draws of several workers, `Key.workers`."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the kernel for the tensors' device, or the definition; return its result.

        Raises:
            ValueError: tensors are on different devices.
            Exception: the kernel returned an error number; `fault` provides the exception.
        """
        implicit = _chosen is None
        if implicit:
            use("auto")
        arguments: dict[str, Any] = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
        device = self._device(arguments)
        if implicit and device is not None and device.type == "cpu":
            _warn_without_kernels()
        kernel = self.serving.get(device.type) if device else None
        key = arguments.get("key")
        if kernel is None or (key is not None and key.workers > 1 and kernel in self.independent):
            return self.definition(*args, **kwargs)
        result: Any = kernel(**arguments)
        if isinstance(result, Flag):
            faults.look(partial(_raise_if_raised, result, self, arguments))
        elif self.fault is None:
            return cast("R", result)
        else:
            self.check(result, arguments)
        return cast("R", None)

    def _device(self, arguments: Mapping[str, Any]) -> torch.device | None:
        """Return the device of all tensors of the arguments; None if there are none."""
        device: torch.device | None = None
        for name, value in arguments.items():
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if isinstance(tensor, Tensor):
                    device = device or tensor.device
                    if tensor.device != device:
                        raise ValueError(
                            f"{self.name}: {name} is on {tensor.device}: expected {device}"
                        )
        return device

    def check(self, number: int | None, arguments: Mapping[str, Any]) -> None:
        """Raise the exception for an error number; 0 and None mean success."""
        if number and self.fault is not None:
            error = self.fault(number, arguments)
            if error is not None:
                raise error


OPERATIONS: dict[str, Operation[..., Any]] = {}
"""All operations that may have kernels, by `family.operation`."""


def operation(fault: Fault | None = None) -> Callable[[Callable[P, R]], Operation[P, R]]:
    """Return a decorator that turns a definition in plain torch into an `Operation`.

    Its name is `module.function`, without leading underscores. `fault`: see `Fault`.

    Raises:
        ValueError: an operation of this name exists.
    """

    def make(definition: Callable[P, R]) -> Operation[P, R]:
        op = Operation(definition, fault)
        if op.name in OPERATIONS:
            raise ValueError(f"operation {op.name} is defined twice")
        if _chosen is not None:
            _serve(op, _chosen)
        OPERATIONS[op.name] = op
        return op

    return make


# ---- backends ------------------------------------------------------------------------------------

_chosen: Mapping[str, str] | None = None
"""The backend of each device type; None until one is chosen or an operation runs."""


def _home(backend: str) -> Any:
    return importlib.import_module(HOMES[backend])


def _serve(op: Operation[..., Any], chosen: Mapping[str, str]) -> None:
    op.serving.clear()
    op.independent.clear()
    for device, backend in chosen.items():
        kernel = _home(backend).KERNELS.get(op.name)
        if kernel is not None:
            op.serving[device] = kernel
            if backend == "cuda":
                op.independent.add(kernel)


class Backend(NamedTuple):
    """A set of kernels; `detail` describes it, or the reason why it is unavailable here."""

    name: str
    available: bool
    detail: str


def backends() -> list[Backend]:
    """Return all backends, including those that are unavailable here."""
    return [
        Backend("reference", True, "plain torch, any device, the definition"),
        *(Backend(name, *_home(name).status()) for name in HOMES),
    ]


def choose(backend: str, device: str = "cpu") -> str:
    """Return the name of the backend to use for a device of type `device`.

    "auto" is the backend of that device type if it is available, else "reference".

    Raises:
        UsageError: the backend is unknown, unavailable here, or for other devices.
    """
    if backend not in ("auto", *NAMES):
        raise unknown("backend", backend, ["auto", *NAMES])
    if backend == "reference":
        return backend
    by_name = {each.name: each for each in backends()}
    if backend == "auto":
        return device if device in by_name and by_name[device].available else "reference"
    if not by_name[backend].available:
        raise UsageError(
            f"backend {backend!r} is unavailable: {by_name[backend].detail}; or use auto"
        )
    if backend != device:
        raise UsageError(
            f"backend {backend!r} is for {backend} tensors, and these are on {device}; use auto"
        )
    return backend


def use(backend: str) -> None:
    """Select the backend of all operations of this process: "auto" or one of `NAMES`.

    Raises:
        UsageError: see `choose`.
    """
    if backend == "auto":
        _take({each.name: each.name for each in backends()[1:] if each.available})
    else:
        name = choose(backend, backend)
        _take({name: name} if name in HOMES else {})


def _warn_without_kernels() -> None:
    (native,) = (each for each in backends() if each.name == "cpu")
    if not native.available:
        warnings.warn(
            f"{native.detail}. Plain torch computes the same bytes instead, many times slower.",
            RuntimeWarning,
            stacklevel=4,
        )


def _take(chosen: Mapping[str, str] | None) -> None:
    """Select the kernels by device type; None: choose "auto" at the next use."""
    global _chosen
    _chosen = chosen
    for op in OPERATIONS.values():
        _serve(op, chosen or {})


@contextmanager
def using(backend: str) -> Iterator[None]:
    """Use `backend` inside a with block."""
    before = _chosen
    use(backend)
    try:
        yield
    finally:
        _take(before)
