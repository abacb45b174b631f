"""Building blocks of compressors, by family: `ops.ternary.encode`.

Each operation has a definition in plain torch, and backends may have faster kernels. Equal
arguments give equal bytes on every backend.
"""

from __future__ import annotations

from gcbench.core.faults import together as faults_together
from gcbench.ops import (
    bitstream,
    blockfloat,
    dct,
    eden,
    fp8,
    hadamard,
    half,
    int8,
    levels,
    lossless,
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
    u8bit,
)
from gcbench.ops.dispatch import NAMES as BACKENDS
from gcbench.ops.dispatch import Backend, backends, choose, use, using

__all__ = [
    "BACKENDS",
    "Backend",
    "backends",
    "bitstream",
    "blockfloat",
    "choose",
    "dct",
    "eden",
    "faults_together",
    "fp8",
    "hadamard",
    "half",
    "int8",
    "levels",
    "lossless",
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
    "u8bit",
    "use",
    "using",
]
