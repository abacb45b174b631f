"""The operations behind the contract, called by name; a backend serves them.

Same arguments, same bytes: a backend may only be faster than `gcbench.ops.reference`.
"""

from __future__ import annotations

from typing import NamedTuple

from gcbench.errors import UsageError, unknown
from gcbench.ops.bitstream import (
    OMEGA_MAX,
    omega_codes,
    omega_dense_read,
    omega_dense_write,
    omega_read,
    omega_sparse_read,
    omega_sparse_write,
    write_codes,
)
from gcbench.ops.dct import (
    Chunks,
    dct_chunks,
    dct_forward,
    dct_inverse,
    dct_kept,
    dct_largest,
    dct_matrix,
    dct_pack,
    dct_unpack,
    dct_words,
)
from gcbench.ops.lowrank import orthonormalize
from gcbench.ops.quantize import (
    LEVEL_CODINGS,
    LEVEL_NORMS,
    level_bits,
    level_codes,
    level_norms,
    level_pack,
    level_unpack,
    level_values,
    level_variance,
)
from gcbench.ops.rangefloat import (
    range_check,
    range_decode,
    range_encode,
    range_eps,
    range_grid,
    range_valid,
)
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
    ternary_scales,
    ternary_sum,
    ternary_summand,
    ternary_unpack,
    ternary_unsum,
    uniform,
    unpack,
)
from gcbench.ops.selection import (
    POSITION_CODINGS,
    VALUE_CODINGS,
    KeptRun,
    dropped_energy,
    kept_runs,
    kept_total,
    kept_values,
    largest,
    magnitude_order,
    position_coding,
    random_words,
    scatter,
    sparse_layout,
    sparse_pack,
    sparse_unpack,
    value_error,
)
from gcbench.ops.sign import (
    class_counts,
    class_means,
    class_moments,
    mean_error,
    sign_pack,
    sign_pack_above,
    sign_unpack,
    sign_values,
    sign_votes,
)
from gcbench.ops.spectrum import (
    spectrum_bins,
    spectrum_error,
    spectrum_forward,
    spectrum_inverse,
    spectrum_largest,
    spectrum_layout,
    spectrum_pack,
    spectrum_runs,
    spectrum_unpack,
    spectrum_weight,
)

__all__ = [
    "LEVEL_CODINGS",
    "LEVEL_NORMS",
    "OMEGA_MAX",
    "POSITION_CODINGS",
    "TINY",
    "VALUE_CODINGS",
    "Backend",
    "Chunks",
    "KeptRun",
    "backends",
    "choose",
    "clamp_",
    "class_counts",
    "class_means",
    "class_moments",
    "dct_chunks",
    "dct_forward",
    "dct_inverse",
    "dct_kept",
    "dct_largest",
    "dct_matrix",
    "dct_pack",
    "dct_unpack",
    "dct_words",
    "draws24",
    "dropped_energy",
    "kept_runs",
    "kept_total",
    "kept_values",
    "largest",
    "level_bits",
    "level_codes",
    "level_norms",
    "level_pack",
    "level_unpack",
    "level_values",
    "level_variance",
    "magnitude_order",
    "mean_error",
    "normal",
    "omega_codes",
    "omega_dense_read",
    "omega_dense_write",
    "omega_read",
    "omega_sparse_read",
    "omega_sparse_write",
    "orthonormalize",
    "pack",
    "packed_words",
    "philox",
    "position_coding",
    "random_words",
    "range_check",
    "range_decode",
    "range_encode",
    "range_eps",
    "range_grid",
    "range_valid",
    "scale_",
    "scatter",
    "segment_absmax",
    "segment_moments",
    "segment_std",
    "sign_pack",
    "sign_pack_above",
    "sign_unpack",
    "sign_values",
    "sign_votes",
    "sparse_layout",
    "sparse_pack",
    "sparse_unpack",
    "spectrum_bins",
    "spectrum_error",
    "spectrum_forward",
    "spectrum_inverse",
    "spectrum_largest",
    "spectrum_layout",
    "spectrum_pack",
    "spectrum_runs",
    "spectrum_unpack",
    "spectrum_weight",
    "split_words",
    "summand_bits",
    "ternary_bits",
    "ternary_decode",
    "ternary_encode",
    "ternary_pack",
    "ternary_scales",
    "ternary_sum",
    "ternary_summand",
    "ternary_unpack",
    "ternary_unsum",
    "uniform",
    "unpack",
    "value_error",
    "write_codes",
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
