"""The native CPU kernels: the shared library, and a table that maps operations to C functions.

The library is built from `cuda/*.cpp` when the package is installed, once for each instruction set
(ISA). The best one that the processor has is loaded, or the one that `GCBENCH_ISA` names. It is
called by ctypes and does not use Python's C API, so one build works for every version of Python.

To add a kernel: write it in `cuda/<family>.cpp` (over `cuda/loops.hpp` and the element codecs in
`cuda/<family>.cuh`) with `GC_CALLED` after its C function, add its row to `ROWS`, and its inputs to
`tests/kernel_cases`.
"""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import gcbench
from gcbench.core.compressor import Key
from gcbench.core.errors import GcbenchError
from gcbench.ops import sources
from gcbench.ops.dispatch import Kernel

ROWS = {
    "bitstream.omega_dense_read": "gc_omega_dense_read words #words n levels codes info",
    "bitstream.omega_dense_write": "gc_omega_dense_write codes n levels out",
    "bitstream.omega_sparse_read": "gc_omega_sparse_read words #words n levels codes info",
    "bitstream.omega_sparse_write": "gc_omega_sparse_write codes n levels out",
    "dct.forward": "gc_dct_forward x chunks #chunks matrices out threads",
    "dct.inverse": "gc_dct_inverse x chunks #chunks matrices out threads",
    "fp8.decode": "gc_fp8_decode codes scales n table m out threads",
    "fp8.encode": "gc_fp8_encode x n table m codes scales threads",
    "hadamard.decode": "gc_hadamard_decode words scales n table m out threads",
    "hadamard.encode": "gc_hadamard_encode x n table m words scales threads",
    "hadamard.rotate": "gc_hadamard x table m out threads",
    "half.encode": "gc_half_encode x n brain out threads",
    "half.mean": "gc_half_mean codes counts #codes workers n brain out threads",
    "int8.decode": "gc_int8_decode codes scales n table m onto count out threads",
    "int8.encode": "gc_int8_encode x n table m stochastic key codes scales threads",
    "int8.mean": "gc_int8_mean codes scales counts #codes workers n table m out threads",
    "levels.codes": "gc_level_codes x n table m norms levels key out threads",
    "levels.decode": (
        "gc_level_decode words bits norms exact levels n table m onto count out threads"
    ),
    "levels.encode": "gc_level_encode x n table m norms levels bits key out threads",
    "levels.encode_max": "gc_level_encode_max x n table m levels bits key norms out threads",
    "levels.mean": (
        "gc_level_mean words norms counts #words workers bits exact levels n table m out threads"
    ),
    "levels.norms": "gc_level_norms x table m two levels out threads",
    "lowrank.orthonormalize": "gc_lowrank_orthonormalize vectors r n collapsed out",
    "lowrank.product": "gc_lowrank_product left right rank rows columns out threads",
    "natural.encode": "gc_natural_encode x n key out threads",
    "natural.mean": "gc_natural_mean words counts #words workers n out threads",
    "packing.pack": "gc_pack codes size n bits out threads",
    "packing.unpack": "gc_unpack words rows n bits out threads",
    "random.draws24": "gc_draws24 key n out threads",
    "rangefloat.pack": "gc_range_pack values n groups m bits mantissa grids out threads",
    "rangefloat.unpack": "gc_range_unpack words grids m n groups bits mantissa out threads",
    "selection.gather": "gc_gather x n positions total out threads",
    "selection.largest_elements": "gc_largest_elements x runs #runs positions values threads",
    "selection.pack_bitmap": "gc_pack_bitmap positions total n words threads",
    "selection.pack_gaps": "gc_pack_gaps positions total n low codes words threads",
    "selection.random_positions": "gc_random_positions key runs #runs out threads",
    "selection.scatter": "gc_scatter values positions total out n threads",
    "selection.scatter_mean": (
        "gc_scatter_mean values positions totals #values count out n threads"
    ),
    "selection.unpack_bitmap": "gc_unpack_bitmap words n runs #runs total out threads",
    "selection.unpack_gaps": "gc_unpack_gaps codes words low n runs #runs total out threads",
    "selection.unpack_int32": "gc_unpack_int32 indices runs #runs total out threads",
    "sign.decode": "gc_sign_decode words n bits out threads",
    "sign.encode": "gc_sign_encode x residual table m words low high lost threads",
    "sign.mean": "gc_sign_mean words low high counts #words workers table m out threads",
    "sign.pack": "gc_sign_pack x n bits out threads",
    "sign.pack_above": "gc_sign_pack_above x table m square factor out threads",
    "sign.values": "gc_sign_values words table m low high total count out threads",
    "sign.vote": (
        "gc_sign_vote words counts bits #words voters n width quorum toss key out threads"
    ),
    "spectrum.mean": "gc_spectrum_mean values kept totals weights #values out bins threads",
    "spectrum.restored": "gc_spectrum_restored x unit table m places out threads",
    "spectrum.scaled": "gc_spectrum_scaled x table m peak tiny half places unit out threads",
    "spectrum.unscaled": "gc_spectrum_unscaled bins unit table m places out energy threads",
    "statistics.absmax": "gc_segment_absmax x table m out threads",
    "statistics.moments": "gc_segment_statistics x table m nothing total square threads",
    "ternary.encode": "gc_ternary_encode x n table m limit scale key out threads",
    "ternary.mean": ("gc_ternary_mean words bits tops #words workers scale n table m out threads"),
    "ternary.merge": "gc_ternary_merge words bits tops #words n width out threads",
    "ternary.scales": "gc_ternary_scales x table m clip at_limit limit scale threads",
    "transform.fold": "gc_spectrum_fold waves factors scale h inverse out threads",
}
"""For each operation the C function, and its arguments by their names in the operation.

`n`, `m` and `table` are taken from `segments` if the operation has no such argument. A key is
passed as four numbers. `#name` is the length of the argument `name`, `threads` the number of
torch's threads, and `nothing` a null pointer.
"""

ISAS = ("baseline", "avx2", "avx512")
"""Instruction sets, each containing the one before; processors other than x86-64 have the first."""
FOLDER = Path(gcbench.__file__).parent / "_native"
REBUILD = "pip install again (`pip install -e .` in a checkout) with a C++ compiler at hand"
NO_MEMORY = -(2**63)
"""What a C function returns if it cannot allocate its intermediate results."""


# ---- the library ---------------------------------------------------------------------------------

_CTYPES: dict[str, Any] = {
    "f": ctypes.c_float,
    "d": ctypes.c_double,
    "i": ctypes.c_int32,
    "I": ctypes.c_uint32,
    "q": ctypes.c_int64,
    "Q": ctypes.c_uint64,
}


class Function(NamedTuple):
    """A C function, and the types of its arguments as letters, which cuda/called.hpp defines."""

    name: str
    call: Any
    kinds: tuple[str, ...]

    def __call__(self, *values: Any) -> int:
        """Call the function, without the interpreter's lock, and return its result.

        `values`: numbers; for a pointer a tensor (its dtype and size are not checked), a sequence
        of tensors or of numbers, an address, bytes, or None.

        Raises:
            MemoryError: the function cannot allocate its intermediate results.
            TypeError: too few or too many arguments, or one is of another type.
        """
        kept = []
        given: list[Any] = []
        for value, kind in zip(values, self.kinds, strict=True):
            if isinstance(value, Tensor):
                given.append(value.data_ptr())
            elif isinstance(value, list | tuple):
                if kind == "*P":
                    column = array("Q", [tensor.data_ptr() for tensor in value])
                elif value and isinstance(value[0], tuple):
                    column = array(kind[1], chain.from_iterable(value))
                else:
                    column = array(kind[1], value)
                kept.append(column)
                given.append(column.buffer_info()[0])
            else:
                given.append(value)
        found: int = self.call(*given)
        if found == NO_MEMORY:
            raise MemoryError(
                f"{self.name} cannot allocate its intermediate results: free memory, or pass "
                "smaller tensors"
            )
        return found


class Library:
    """The library of one instruction set at a time."""

    def __init__(self) -> None:
        self.isa = ""
        self.functions: dict[str, Function] = {}

    def load(self, isa: str) -> None:
        """Load this instruction set's library, and use its functions from now on."""
        library = ctypes.CDLL(str(FOLDER / f"{isa}.so"))
        library.gc_functions.restype = ctypes.c_char_p
        functions = {}
        for line in library.gc_functions().decode().splitlines():
            name, *kinds = line.split()
            call = library[name]
            call.restype = ctypes.c_int64
            call.argtypes = [_CTYPES.get(kind, ctypes.c_void_p) for kind in kinds]
            functions[name] = Function(name, call, tuple(kinds))
        self.functions, self.isa = functions, isa


library = Library()
"""The library that the kernels call."""


class Missing(GcbenchError):
    """There is no usable native library; the message says why."""


def isas() -> tuple[str, ...]:
    """Return the instruction sets that were built and that this processor has, in `ISAS`' order.

    Raises:
        Missing: there are none, or they were built from other sources than the installed ones.
    """
    base = FOLDER / "baseline.so"
    if not base.exists():
        raise Missing(f"it was not built; {REBUILD}")
    try:
        found = ctypes.CDLL(str(base))
    except OSError as error:
        raise Missing(f"it does not load: {error}; {REBUILD}") from None
    found.gc_sources.restype = ctypes.c_char_p
    if found.gc_sources().decode() != sources.digest(".cpp", ".hpp", ".cuh"):
        raise Missing(f"it was built from other sources than these; {REBUILD}")
    usable = ISAS[: 1 + found.gc_level()]
    return tuple(isa for isa in usable if (FOLDER / f"{isa}.so").exists())


def best() -> str:
    """Return the instruction set to use: the last of `isas()`, or the one in GCBENCH_ISA.

    Raises:
        Missing: there are none, or not the one in GCBENCH_ISA.
    """
    found = isas()
    isa = os.environ.get("GCBENCH_ISA") or found[-1]
    if isa not in found:
        raise Missing(f"GCBENCH_ISA={isa}: this machine has {', '.join(found)}")
    return isa


_status: tuple[bool, str] | None = None


def status() -> tuple[bool, str]:
    """Load the kernels if possible; return whether it was, and what they are or why not."""
    global _status
    if _status is None:
        try:
            library.load(best())
            _status = True, f"native kernels, {library.isa}"
        except GcbenchError as error:
            _status = False, f"no native library: {error}"
    return _status


@contextmanager
def using_isa(isa: str) -> Iterator[None]:
    """Use another instruction set's library inside a with statement."""
    before = library.isa
    library.load(isa)
    try:
        yield
    finally:
        library.load(before)


# ---- kernels -------------------------------------------------------------------------------------


def _row(text: str) -> Kernel:
    """Return the kernel for an entry of `ROWS`: it takes the operation's arguments by name."""
    name, *words = text.split()

    def kernel(**given: Any) -> int:
        segments = given.get("segments")
        values: list[Any] = []
        for word in words:
            if word in given:
                value = given[word]
                if isinstance(value, Key):
                    (low, high), step, who = value.words()
                    values += (high << 32 | low, value.offset, step, who)
                else:
                    values.append(value)
            elif word == "threads":
                values.append(torch.get_num_threads())
            elif word == "nothing":
                values.append(None)
            elif word[0] == "#":
                values.append(len(given[word[1:]]))
            elif segments is None:
                raise TypeError(f"{name}: no argument {word} among {', '.join(given)}")
            elif word == "n":
                values.append(segments.numel)
            elif word == "m":
                values.append(len(segments))
            else:
                assert word == "table", word
                values.append(segments.table)
        return library.functions[name](*values)

    return kernel


KERNELS = {operation: _row(text) for operation, text in ROWS.items()}
"""The kernels by the name of their operation."""
