"""Which backend serves an operation: the one that was chosen, where the tensors are.

An operation is a function in plain torch, its definition, decorated with `op`. A backend has
kernels for some of them, with the same arguments and the same bytes; the others stay in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from gcbench.core.errors import UsageError, unknown

P = ParamSpec("P")
R = TypeVar("R")
Kernels = Mapping[str, Callable[..., Any]]

NAMES = ("reference", "cpu", "cuda")
SEQUENCES = (list, tuple)
DEFINITIONS: dict[str, Callable[..., Any]] = {}
"""Every operation that kernels may serve, by name, in plain torch."""

_serving: dict[str, Kernels] | None = None
"""Device type to kernels; None until a backend is chosen or the first operation runs."""
_served: dict[str, dict[str, Callable[..., Any]]] = {}
"""The same the other way round, for calls: an operation's name to device types to kernels."""


class Backend(NamedTuple):
    """A set of kernels: whether it can be used here, and the reason or what it is."""

    name: str
    available: bool
    detail: str


def backends() -> list[Backend]:
    """Return all backends, the ones that are missing with the reason."""
    from gcbench.ops import cpu, cuda

    return [
        Backend("reference", True, "plain torch, any device, the definition"),
        Backend("cpu", *cpu.status()),
        Backend("cuda", *cuda.status()),
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


def _kernels(name: str) -> Kernels:
    from gcbench.ops import cpu, cuda

    return cpu.KERNELS if name == "cpu" else cuda.KERNELS


def use(backend: str) -> None:
    """Serve all operations of this process by `backend` from here on: "auto" or one of `NAMES`.

    Raises:
        UsageError: see `choose`.
    """
    if backend == "auto":
        native = [found.name for found in backends() if found.available][1:]
    else:
        native = [name for name in (choose(backend, backend),) if name != "reference"]
    _serve({name: _kernels(name) for name in native})


def _serve(serving: dict[str, Kernels] | None) -> None:
    """Serve operations by these kernels from here on; by "auto" if it is None."""
    global _serving
    _serving = serving
    for name, kernels in _served.items():
        kernels.clear()
        if serving:
            kernels.update({place: own[name] for place, own in serving.items() if name in own})


@contextmanager
def using(backend: str) -> Iterator[None]:
    """Serve operations by `backend` inside a with statement."""
    before = _serving
    use(backend)
    try:
        yield
    finally:
        _serve(before)


def _place(argument: Any) -> str | None:
    """Return the type of the device on which an argument lies; None if it lies on none."""
    while isinstance(argument, SEQUENCES) and argument:
        argument = argument[0]
    if isinstance(argument, Tensor):
        return "cpu" if argument.is_cpu else argument.device.type
    if isinstance(argument, torch.device):
        return argument.type
    return None


def op(definition: Callable[P, R]) -> Callable[P, R]:
    """Make a function in plain torch an operation that backends may serve.

    The device is that of the first argument, a tensor or a sequence of them; functions that take
    none have a keyword `device`.
    """
    name = definition.__name__
    if name in DEFINITIONS:
        raise ValueError(f"operation {name} is defined twice")
    served = _served.setdefault(name, {})

    @wraps(definition)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if _serving is None:
            use("auto")
        if not served:
            return definition(*args, **kwargs)
        first = args[0]
        place = "cpu" if isinstance(first, Tensor) and first.is_cpu else _place(first)
        if place is None:
            place = torch.device(cast(str, kwargs.get("device", "cpu"))).type
        kernel: Callable[P, R] = served.get(place, definition)
        return kernel(*args, **kwargs)

    DEFINITIONS[name] = definition
    return call
