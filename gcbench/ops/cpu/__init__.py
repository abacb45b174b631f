"""The native CPU kernels: one module a family, each a thin layer over the C functions.

To add a kernel: write it in `cuda/<family>.cpp` (over `cuda/loops.hpp` and the element codecs in
`cuda/<family>.cuh`) with `GC_CALLED` after its C function, put a Python function of the operation's
name and arguments into the family's `KERNELS`, and its inputs into `tests/kernel_cases`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gcbench.core.errors import GcbenchError
from gcbench.ops.backend import Kernels
from gcbench.ops.cpu import (
    bitstream,
    blocks,
    half,
    levels,
    library,
    natural,
    packing,
    rangefloat,
    selection,
    signs,
    spectrum,
    statistics,
    ternary,
)
from gcbench.ops.cpu.library import c

FAMILIES: tuple[Any, ...] = (
    bitstream,
    blocks,
    half,
    levels,
    natural,
    packing,
    rangefloat,
    selection,
    signs,
    spectrum,
    statistics,
    ternary,
)
KERNELS: Kernels = {name: call for family in FAMILIES for name, call in family.KERNELS.items()}

_status: tuple[bool, str] | None = None


def status() -> tuple[bool, str]:
    """Return whether the kernels can be used here, and what they are or why not; loads them."""
    global _status
    if _status is None:
        try:
            c.load(library.best())
            _status = True, f"native kernels, {c.isa}"
        except GcbenchError as error:
            _status = False, f"no native library: {error}"
    return _status


@contextmanager
def using_isa(isa: str) -> Iterator[None]:
    """Serve the kernels by another instruction set's library inside a with statement."""
    before = c.isa
    c.load(isa)
    try:
        yield
    finally:
        c.load(before)
