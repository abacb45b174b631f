"""Inputs for the operations that kernels serve, one module a family.

A module has `cases(n)`, which yields the calls that are made with tensors of n elements. A call is
made in plain torch and with every kernel there is, and all must return the same bytes.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gcbench import ops
from gcbench.core.compressor import Key, Segments
from gcbench.core.errors import GcbenchError
from gcbench.ops.cuda import compile, launch

SIZES = {0: 4, 1: 4, 33: 3, 1024: 6, 1025: 1, 5000: 5, 70_007: 2}
"""No tile, part of one, one, more, and enough for two threads; one of how many calls is made."""
SHARED_FROM = 5000
"""The least of them whose tiles two threads share."""

KEYS = (Key(3, 5, 2), Key(2**63 + 11, 2**32 - 1, 7, 2**37 + 4321, 1))
"""The first draws from the beginning of tiles, the second from within them, beyond 2^32 lanes."""
CORRELATED = tuple(
    KEYS[i]._replace(rank=rank, workers=workers)
    for i, rank, workers in ((0, 2, 4), (1, 77, 6), (1, 3, 4096), (0, 0, 2**20 - 1))
)
"""Draws that are correlated among workers: of numbers that are powers of two, and others."""


class Call(NamedTuple):
    """One call of an operation."""

    op: str
    what: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = MappingProxyType({})

    def __str__(self) -> str:
        return f"{self.op}: {self.what}"


def values(n: int) -> Iterator[tuple[str, Tensor]]:
    """Yield named inputs, float32, shape (n,): random ones, and those that break careless code."""
    generator = torch.Generator().manual_seed(n)

    def normal() -> Tensor:
        return torch.randn(n, generator=generator)

    yield "normal", normal()
    yield "heavy", normal() / normal().abs().clamp(min=1e-6) ** 2
    yield "ties", normal().mul(2).round().div(2)
    yield "constant", torch.full((n,), -0.3)
    yield "zeros", torch.zeros(n).copysign(normal())
    yield "minus zero", torch.full((n,), -0.0)
    scales = torch.randint(-60, 60, (n,), generator=generator)
    yield "unlike", normal() * 2.0**scales  # sums depend on their order
    yield "denormal", normal() * 1e-41
    yield "tiny", normal() * 2.0**-101
    yield "huge", normal().clamp(-1, 1) * 3e38
    mixed = normal()
    mixed[::7] = 0.0
    mixed[1::7] = -0.0
    mixed[2::7] *= 1e-42
    mixed[3::7] *= 1e36
    yield "mixed", mixed


def nonfinite(n: int) -> Iterator[tuple[str, Tensor]]:
    """Yield inputs with infinities and NaN."""
    for name, value in (("inf", torch.inf), ("-inf", -torch.inf), ("nan", torch.nan)):
        x = torch.randn(n, generator=torch.Generator().manual_seed(n))
        x[n // 3 :: 1500] = value
        yield name, x


def segmentations(n: int) -> Iterator[tuple[str, Segments]]:
    """Yield ways to cut n elements: one segment, groups, columns, tensors and empty ones."""
    yield "model", Segments((0, n))
    yield "groups", Segments.of([(n,)], 512)
    yield "columns", Segments.of([(n // 27, 27), (n % 27,)], "column")
    edges = [0, 0, 1, 3, 3, 40, 552, 1064, 1576, 3624, 3624, 8191, 20_000]
    yield "tensors", Segments((*(edge for edge in edges if edge < n), n, n))


def bits(value: Any) -> Any:
    """Return what must be equal: bytes of tensors, NaN as one value, and all else as it is."""
    if isinstance(value, Tensor):
        data = value.contiguous()
        if data.is_floating_point():
            data = torch.where(data.isnan(), torch.nan, data)
        raw = data.view(torch.uint8).numpy().tobytes() if data.numel() else b""
        return value.dtype, tuple(value.shape), raw
    if isinstance(value, list | tuple):
        return [bits(item) for item in value]
    return value


def moved(value: Any, device: torch.device) -> Any:
    """Return arguments with their tensors on `device`."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, torch.device):
        return device
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(moved(item, device) for item in value)
    if isinstance(value, dict):
        return {
            name: device if name == "device" else moved(item, device)
            for name, item in value.items()
        }
    return value


def returned(call: Call, device: torch.device) -> Any:
    """Return what a call returns with its tensors on `device`, or the type of what it raises."""
    args, kwargs = moved(call.args, device), moved(dict(call.kwargs), device)
    try:
        return bits(moved(attrgetter(call.op)(ops)(*args, **kwargs), torch.device("cpu")))
    except GcbenchError as error:
        if isinstance(error, launch.LaunchError | compile.CompileError):
            raise
        return type(error)


def families() -> dict[str, Any]:
    """Return the modules of this package."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {name: importlib.import_module(f"{__name__}.{name}") for name in names}
