"""The operations behind the contract, called by name; a backend serves them.

Same arguments, same bytes: a backend may only be faster than `gcbench.ops.reference`.
"""

from __future__ import annotations

from typing import NamedTuple

from gcbench.errors import UsageError, unknown
from gcbench.ops.reference import (
    TINY,
    clamp_,
    draws24,
    normal,
    pack,
    packed_words,
    philox,
    scale_,
    segment_absmax,
    segment_moments,
    segment_std,
    split_words,
    summand_bits,
    ternary_bits,
    ternary_decode,
    ternary_encode,
    ternary_pack,
    ternary_sum,
    ternary_summand,
    ternary_unpack,
    uniform,
    unpack,
)

__all__ = [
    "TINY",
    "Backend",
    "backends",
    "choose",
    "clamp_",
    "draws24",
    "normal",
    "pack",
    "packed_words",
    "philox",
    "scale_",
    "segment_absmax",
    "segment_moments",
    "segment_std",
    "split_words",
    "summand_bits",
    "ternary_bits",
    "ternary_decode",
    "ternary_encode",
    "ternary_pack",
    "ternary_sum",
    "ternary_summand",
    "ternary_unpack",
    "uniform",
    "unpack",
]


class Backend(NamedTuple):
    """A set of kernels: whether it can be used here, and the reason or what it is."""

    name: str
    available: bool
    detail: str


def backends() -> list[Backend]:
    """Return all backends, the ones that are missing with the reason."""
    return [
        Backend("reference", True, "plain torch, any device, the definition"),
        Backend("cpu", False, "this version has no native CPU kernels"),
        Backend("cuda", False, "this version has no CUDA kernels; reference runs on CUDA tensors"),
    ]


def choose(backend: str) -> str:
    """Return the name of the backend that serves `backend`; "auto" takes the best there is.

    Raises:
        UsageError: an unknown one, or one that is missing here, with the reason.
    """
    known = {found.name: found for found in backends()}
    if backend == "auto":
        return next(name for name in ("cuda", "cpu", "reference") if known[name].available)
    if backend not in known:
        raise unknown("backend", backend, ["auto", *known])
    if not known[backend].available:
        raise UsageError(f"backend {backend!r} is missing: {known[backend].detail}; use auto")
    return backend
