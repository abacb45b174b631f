"""The operations that compressors are made of, by family: `ops.ternary.encode`.

Each has a definition in plain torch, and backends may have faster kernels for it. The same
arguments give the same bytes on every backend.
"""

from __future__ import annotations

import warnings
from operator import attrgetter
from typing import Any

from gcbench.core.faults import together as faults_together
from gcbench.ops import (
    bitstream,
    dct,
    fp8,
    hadamard,
    half,
    int8,
    levels,
    lowrank,
    natural,
    packing,
    random,
    rangefloat,
    selection,
    sign,
    spectrum,
    statistics,
    ternary,
    transform,
)
from gcbench.ops.dispatch import NAMES as BACKENDS
from gcbench.ops.dispatch import Backend, backends, choose, use, using

__all__ = [
    "BACKENDS",
    "Backend",
    "backends",
    "bitstream",
    "choose",
    "dct",
    "faults_together",
    "fp8",
    "hadamard",
    "half",
    "int8",
    "levels",
    "lowrank",
    "natural",
    "packing",
    "random",
    "rangefloat",
    "selection",
    "sign",
    "spectrum",
    "statistics",
    "ternary",
    "transform",
    "use",
    "using",
]


def __getattr__(name: str) -> Any:
    from gcbench.ops._flat import FLAT

    if name not in FLAT:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        f"ops.{name} is ops.{FLAT[name]} now; the old name goes with the next release",
        DeprecationWarning,
        stacklevel=2,
    )
    return attrgetter(FLAT[name])(__import__(__name__, fromlist=["ops"]))
