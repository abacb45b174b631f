"""The native CPU kernels: the shared library, and a table that maps operations to C++ functions.

The library is built from `cuda/*.cpp` when the package is installed, once per instruction set
(ISA). The best ISA of the processor is loaded, or the one in `GCBENCH_ISA`. ctypes calls it without
Python's C API, so one build works for every version of Python.

To add a kernel: write it in `cuda/<family>.cpp` (over `cuda/loops.hpp` and the element codecs in
`cuda/<family>.cuh`) with `GC_CALLED` after its function, add its row to `ROWS`, and its inputs to
`tests/kernel_cases`.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import gcbench
from gcbench.core.compressor import Key, Segments
from gcbench.core.errors import GcbenchError
from gcbench.ops import sources
from gcbench.ops.dispatch import Kernel
from gcbench.ops.spectrum import Rows

ROWS = {
    "bitstream.omega_dense_read": "gc_omega_dense_read words #words n levels codes info",
    "bitstream.omega_dense_write": "gc_omega_dense_write codes n levels out",
    "bitstream.omega_sparse_read": "gc_omega_sparse_read words #words n levels codes info",
    "bitstream.omega_sparse_write": "gc_omega_sparse_write codes n levels out",
    "blockfloat.decode_mx": "gc_mx_decode words scales n segments bits out threads",
    "blockfloat.decode_nv": "gc_nv_decode words scales tops n segments out threads",
    "blockfloat.encode_mx": "gc_mx_encode x n segments bits stochastic key words scales threads",
    "blockfloat.encode_nv": "gc_nv_encode x n segments stochastic key words scales tops threads",
    "dct.forward": "gc_dct_forward x chunks #chunks matrices out threads",
    "dct.inverse": "gc_dct_inverse x chunks #chunks matrices out threads",
    "eden.decode": (
        "gc_eden_decode words scales address n segments bits positive rotations out threads"
    ),
    "eden.encode": (
        "gc_eden_encode x n segments address bits positive rotations least words scales threads"
    ),
    "fp8.decode": "gc_fp8_decode codes scales n segments out threads",
    "fp8.encode": "gc_fp8_encode x n segments codes scales threads",
    "hadamard.decode": "gc_hadamard_decode words scales n segments out threads",
    "hadamard.encode": "gc_hadamard_encode x n segments words scales threads",
    "hadamard.rotate": "gc_hadamard x segments out threads",
    "half.encode": "gc_half_encode x n brain out threads",
    "half.mean": "gc_half_mean codes counts #codes +counts n brain out threads",
    "int8.decode": "gc_int8_decode codes scales n segments onto count out threads",
    "int8.encode": "gc_int8_encode x n segments stochastic key codes scales threads",
    "int8.mean": "gc_int8_mean codes scales counts #codes +counts n segments out threads",
    "levels.codes": "gc_level_codes x n segments norms levels key out threads",
    "levels.decode": (
        "gc_level_decode words bits norms exact levels n segments onto count out threads"
    ),
    "levels.encode": "gc_level_encode x n segments norms levels bits key out threads",
    "levels.encode_max": ("gc_level_encode_max x n segments levels bits key norms out threads"),
    "levels.mean": (
        "gc_level_mean words norms counts #words +counts bits exact levels n segments out threads"
    ),
    "levels.norms": "gc_level_norms x segments two levels out threads",
    "lossless.join": (
        "gc_lossless_join fractions words tops escaped #escaped single n segments out"
    ),
    "lossless.split": "gc_lossless_split values single n segments fractions words tops escaped",
    "lowrank.orthonormalize": "gc_lowrank_orthonormalize vectors r n collapsed out",
    "lowrank.product": "gc_lowrank_product left right rank rows columns out threads",
    "natural.encode": "gc_natural_encode x n key out threads",
    "natural.mean": "gc_natural_mean words counts #words +counts n out threads",
    "packing.pack": "gc_pack codes size n bits out threads",
    "packing.unpack": "gc_unpack words rows n bits out threads",
    "random.draws24": "gc_draws24 key x n out threads",
    "rangefloat.pack": "gc_range_pack values n groups m bits mantissa grids out threads",
    "rangefloat.unpack": "gc_range_unpack words grids m n groups bits mantissa out threads",
    "selection.gather": "gc_gather x n positions total out threads",
    "selection.largest_elements": "gc_largest_elements x runs #runs positions values threads",
    "selection.limits": "gc_limits x segments bound limits threads",
    "selection.pack_bitmap": "gc_pack_bitmap positions total n words threads",
    "selection.pack_gaps": "gc_pack_gaps positions total n low codes words threads",
    "selection.random_positions": "gc_random_positions key runs #runs out threads",
    "selection.reaching": "gc_reaching x segments limits positions values threads",
    "selection.scatter": "gc_scatter values positions total out n threads",
    "selection.scatter_mean": (
        "gc_scatter_mean values positions totals #values count out n threads"
    ),
    "selection.unpack_bitmap": "gc_unpack_bitmap words n runs #runs total out threads",
    "selection.unpack_gaps": "gc_unpack_gaps codes words low n runs #runs total out threads",
    "selection.unpack_int32": "gc_unpack_int32 indices runs #runs total out threads",
    "sign.decode": "gc_sign_decode words n bits out threads",
    "sign.encode": "gc_sign_encode x residual segments words low high lost threads",
    "sign.mean": "gc_sign_mean words low high counts #words +counts segments out threads",
    "sign.pack": "gc_sign_pack x n bits out threads",
    "sign.pack_above": "gc_sign_pack_above x segments square factor out threads",
    "sign.values": "gc_sign_values words segments low high total count out threads",
    "sign.vote": (
        "gc_sign_vote words counts bits #words voters n width quorum toss key out threads"
    ),
    "spectrum.mean": "gc_spectrum_mean values indices totals weights #values out bins threads",
    "spectrum.restored": "gc_spectrum_restored x unit segments rows out threads",
    "spectrum.scaled": "gc_spectrum_scaled x segments peak tiny half rows unit out threads",
    "spectrum.unscaled": "gc_spectrum_unscaled bins unit segments rows out energy threads",
    "statistics.absmax": "gc_segment_absmax x segments out threads",
    "statistics.moments": "gc_segment_statistics x segments nothing total square threads",
    "ternary.encode": "gc_ternary_encode x n segments limit scale key out threads",
    "ternary.mean": ("gc_ternary_mean words bits tops #words workers scale n segments out threads"),
    "ternary.merge": "gc_ternary_merge words bits tops #words n width out threads",
    "ternary.scales": "gc_ternary_scales x segments clip at_limit limit scale threads",
    "transform.fold": "gc_spectrum_fold waves factors scale h inverse out threads",
    "u8bit.decode": "gc_u8bit_decode codes scales n segments values out threads",
    "u8bit.encode": "gc_u8bit_encode x n segments steps codes scales threads",
}
"""The C++ function of each operation, and its arguments by their names in the operation.

`n` is the number of elements of `segments` if the operation has no such argument. Keys, segments
and rows are passed as pointers (`_POINTERS`). `#name` is the length of the argument `name`, `+name`
the sum of its numbers, `threads` the number of torch's threads, and `nothing` a null pointer.
"""

ISAS = ("baseline", "avx2", "avx512")
"""Instruction sets, each a superset of the previous; non-x86-64 processors have only the first."""
FOLDER = Path(gcbench.__file__).parent / "_native"
REBUILD = (
    f"delete {FOLDER} if it exists, and reinstall gcbench (`pip install -e .` in a checkout) with "
    "a C++ compiler available"
)
NO_MEMORY = -(2**63)
"""Return value of a C++ function that cannot allocate its intermediate results."""


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
    """A C++ function, and the types of its arguments as letters defined in cuda/called.hpp."""

    name: str
    call: Any
    kinds: tuple[str, ...]

    def __call__(self, *values: Any) -> int:
        """Call the function without the interpreter's lock and return its result.

        `values`: numbers; or for a pointer a tensor (its dtype and size are not checked), a
        sequence of tensors or of numbers, an address, bytes, or None.

        Raises:
            MemoryError: the function cannot allocate its intermediate results.
            TypeError: the number or type of the arguments is wrong.
        """
        columns = []
        converted: list[Any] = []
        for value, kind in zip(values, self.kinds, strict=True):
            if isinstance(value, Tensor):
                converted.append(value.data_ptr())
            elif isinstance(value, list | tuple):
                if kind == "*P":
                    column = array("Q", [tensor.data_ptr() for tensor in value])
                elif value and isinstance(value[0], tuple):
                    column = array(kind[1], chain.from_iterable(value))
                else:
                    column = array(kind[1], value)
                columns.append(column)
                converted.append(column.buffer_info()[0])
            else:
                converted.append(value)
        result: int = self.call(*converted)
        if result == NO_MEMORY:
            raise MemoryError(
                f"{self.name} cannot allocate its intermediate results: free memory, or pass "
                "smaller tensors"
            )
        return result


class Library:
    """The library of one instruction set at a time."""

    def __init__(self) -> None:
        self.isa = ""
        self.functions: dict[str, Function] = {}

    def load(self, isa: str) -> None:
        """Load the library of this instruction set; raise Missing: see `_opened`."""
        library = _opened(isa)
        library.gc_functions.restype = ctypes.c_char_p
        functions = {}
        for line in library.gc_functions().decode().splitlines():
            name, address, *kinds = line.split()
            types = [_CTYPES.get(kind, ctypes.c_void_p) for kind in kinds]
            call = ctypes.CFUNCTYPE(ctypes.c_int64, *types)(int(address))
            functions[name] = Function(name, call, tuple(kinds))
        self.functions, self.isa = functions, isa


library = Library()
"""The library that the kernels call."""


class Missing(GcbenchError):
    """There is no usable native library; the message states the reason."""


def _opened(isa: str) -> ctypes.CDLL:
    """Return the library of an instruction set.

    Raises:
        Missing: it is damaged, or was built from sources other than the installed ones.
    """
    path = FOLDER / f"{isa}.so"
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        # The loader does not notice a library that is cut short: it ends the process (SIGBUS).
        if path.with_suffix(".sha256").read_bytes() != digest.encode():
            raise Missing(f"the library {path.name} is damaged; {REBUILD}")
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise Missing(f"the library cannot be loaded: {error}; {REBUILD}") from None
    library.gc_sources.restype = ctypes.c_char_p
    if library.gc_sources().decode() != sources.digest(".cpp", ".hpp", ".cuh"):
        raise Missing(f"the library {isa}.so was built from other sources; {REBUILD}")
    return library


def isas() -> tuple[str, ...]:
    """Return the instruction sets that were built and that this processor has, as in `ISAS`.

    Raises:
        Missing: there are none, or see `_opened`.
    """
    if not (FOLDER / "baseline.so").exists():
        raise Missing(f"the library was not built; {REBUILD}")
    usable = ISAS[: 1 + _opened("baseline").gc_level()]
    return tuple(isa for isa in usable if (FOLDER / f"{isa}.so").exists())


def best() -> str:
    """Return the instruction set to use: the last of `isas()`, or the one in GCBENCH_ISA.

    Raises:
        Missing: see `isas`, or the one in GCBENCH_ISA is not among them.
    """
    available = isas()
    isa = os.environ.get("GCBENCH_ISA") or available[-1]
    if isa not in available:
        raise Missing(f"GCBENCH_ISA={isa}: this machine has {', '.join(available)}")
    return isa


_status: tuple[bool, str] | None = None


def status() -> tuple[bool, str]:
    """Load the kernels; return whether that succeeded, and a description or the reason."""
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
    """Use another instruction set inside a with block."""
    before = library.isa
    library.load(isa)
    try:
        yield
    finally:
        library.load(before)


# ---- kernels -------------------------------------------------------------------------------------


def _key(key: Key) -> bytes:
    """Return `gc::Key` of common.cuh."""
    (low, high), step, who = key.words()
    offset = key.offset & 0xFFFFFFFFFFFFFFFF
    return struct.pack("QQIII4x", high << 32 | low, offset, step, who, key.workers)


def _segments(segments: Segments) -> bytes:
    """Return `gc::Segments` of loops.hpp, which refers to the memory of `segments.table`."""
    start, count = segments.table.data_ptr(), len(segments)
    return struct.pack("QQq", start, start + 8 * (count + 1), count)


_POINTERS: dict[type, Callable[[Any], bytes | int]] = {
    Key: _key,
    Segments: _segments,
    Rows: lambda rows: rows.table.data_ptr(),
}
"""How arguments of these types become pointers: structures as bytes, `Rows` as its table's address.

The addresses stay valid during the call, because `Segments.table` and `Rows.table` are cached.
"""


def _row(text: str) -> Kernel:
    """Return the kernel for an entry of `ROWS`; it receives the operation's arguments by name."""
    name, *names = text.split()

    def kernel(**arguments: Any) -> int:
        values: list[Any] = []
        for argument in names:
            if argument in arguments:
                value = arguments[argument]
                pointer = _POINTERS.get(type(value))
                values.append(pointer(value) if pointer else value)
            elif argument == "threads":
                values.append(torch.get_num_threads())
            elif argument == "nothing":
                values.append(None)
            elif argument[0] == "#":
                values.append(len(arguments[argument[1:]]))
            elif argument[0] == "+":
                values.append(sum(arguments[argument[1:]]))
            elif argument == "n" and "segments" in arguments:
                values.append(arguments["segments"].numel)
            else:
                raise TypeError(f"{name}: no argument {argument} among {', '.join(arguments)}")
        return library.functions[name](*values)

    return kernel


KERNELS = {operation: _row(text) for operation, text in ROWS.items()}
"""The kernels by name of the operation."""
