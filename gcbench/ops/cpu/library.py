"""The native library: found, checked, loaded, called.

It is a plain C interface, built from `cuda/*.cpp` when the package is installed, once for each
instruction set; the best that the processor has is taken. `GCBENCH_ISA` takes another one.
"""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gcbench
from gcbench.compressor import Key
from gcbench.errors import GcbenchError
from gcbench.ops import sources

ISAS = ("baseline", "avx2", "avx512")
"""Instruction sets from the least to the most; other processors than x86-64 have the first."""
FOLDER = Path(gcbench.__file__).parent / "_native"
REBUILD = "pip install again (`pip install -e .` in a checkout) with a C++ compiler at hand"

_TYPES = {
    "p": ctypes.c_void_p,
    "l": ctypes.c_int64,
    "i": ctypes.c_int,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
    "Q": ctypes.c_uint64,
    "I": ctypes.c_uint32,
}
NO_MEMORY = -(2**63)  # in cuda/loops.hpp, too


def _checked(result: int, function: Any, arguments: Any) -> int:
    """Return what a C function returned, unless it found no memory."""
    if result == NO_MEMORY:
        raise MemoryError(
            f"{function.__name__} finds no memory for what it keeps meanwhile: "
            "free some, or pass smaller tensors"
        )
    return result


class Functions:
    """The C functions of one library at a time, as attributes.

    Each returns an int, or raises MemoryError.
    """

    def __init__(self) -> None:
        self.isa = ""

    def load(self, isa: str, signatures: Mapping[str, str]) -> None:
        """Take the functions of this instruction set's library in place of those before."""
        library = ctypes.CDLL(str(FOLDER / f"{isa}.so"))
        for name, letters in signatures.items():
            function = getattr(library, name)
            function.argtypes = [_TYPES[letter] for letter in letters]
            function.restype = ctypes.c_int64
            function.errcheck = _checked
            setattr(self, name, function)
        self.isa = isa

    def __getattr__(self, name: str) -> Callable[..., int]:
        raise AttributeError(f"the native library has no function {name}, or is not loaded")


c = Functions()
"""What the kernels call."""


class Missing(GcbenchError):
    """There is no native library for this machine, and why."""


def levels() -> tuple[str, ...]:
    """Return the instruction sets that were built and that this processor has, least first.

    Raises:
        Missing: none, or they were built from other sources than those that are installed.
    """
    base = FOLDER / "baseline.so"
    if not base.exists():
        raise Missing(f"it was not built; {REBUILD}")
    try:
        library = ctypes.CDLL(str(base))
    except OSError as error:
        raise Missing(f"it does not load: {error}; {REBUILD}") from None
    library.gc_sources.restype = ctypes.c_char_p
    if library.gc_sources().decode() != sources.digest(".cpp", ".hpp", ".cuh"):
        raise Missing(f"it was built from other sources than these; {REBUILD}")
    usable = ISAS[: 1 + library.gc_level()]
    return tuple(isa for isa in usable if (FOLDER / f"{isa}.so").exists())


def best() -> str:
    """Return the instruction set to use: the best of `levels`, or what GCBENCH_ISA says.

    Raises:
        Missing: there is none, or not that one.
    """
    found = levels()
    isa = os.environ.get("GCBENCH_ISA") or found[-1]
    if isa not in found:
        raise Missing(f"GCBENCH_ISA={isa}: this machine has {', '.join(found)}")
    return isa


def address(tensor: Tensor, dtype: torch.dtype, numel: int) -> int:
    """Return where the elements of a tensor lie, for a kernel that takes it on trust.

    Raises:
        ValueError: another dtype, length or device, or not contiguous.
    """
    if (
        tensor.dtype is not dtype
        or tensor.numel() != numel
        or not tensor.is_cpu
        or not tensor.is_contiguous()
    ):
        raise ValueError(
            f"{tensor.numel()} {tensor.dtype} on {tensor.device}, strides {tensor.stride()}: "
            f"{numel} contiguous {dtype} on the CPU expected"
        )
    return tensor.data_ptr()


def place(tensor: Tensor) -> int:
    """Return where the elements of a tensor lie that is contiguous and of the right dtype.

    Raises:
        ValueError: it lies on another device.
    """
    return tensor.data_ptr() if tensor.is_cpu else address(tensor, tensor.dtype, tensor.numel())


def output(given: Tensor | None, dtype: torch.dtype, numel: int) -> Tensor:
    """Return the tensor to write into: `given`, or a new one."""
    return torch.empty(numel, dtype=dtype) if given is None else given


def stream(key: Key) -> tuple[int, int, int, int]:
    """Return a key as the kernels take it: seed, offset, step, who.

    Raises:
        ValueError: see `Key.words`.
    """
    (low, high), step, who = key.words()
    return high << 32 | low, key.offset, step, who


def c_array(numbers: Iterable[int], kind: str = "q") -> array[int]:
    """Return a C array of int64, or of pointers, or of int32 with `kind` "i", or floats with "f".

    That takes a third of ctypes' time. A kernel gets it as `.buffer_info()[0]`, and the caller
    keeps it alive meanwhile.
    """
    return array(kind, numbers)


def addresses(
    tensors: Sequence[Tensor], dtype: torch.dtype, numel: int
) -> tuple[int, tuple[object, ...]]:
    """Return where a C array of the tensors' addresses lies, and what the caller keeps alive.

    Raises:
        ValueError: one has another dtype, length or device.
    """
    kept = [tensor.contiguous() for tensor in tensors]
    places = c_array([address(tensor, dtype, numel) for tensor in kept])
    return places.buffer_info()[0], (kept, places)


def summands(
    payloads: Sequence[tuple[Tensor, int]], dtype: torch.dtype, numel: int
) -> tuple[tuple[int, int, int, float], tuple[object, ...]]:
    """Return the C arguments of a mean, and what they point into: payloads, counts, number, sum.

    `payloads`: a tensor of `numel` elements of `dtype` each, and its number of workers.

    Raises:
        ValueError: there is none, or one has another dtype, length or device.
    """
    if not payloads:
        raise ValueError("the mean of no payloads: one at least expected")
    where, kept = addresses([payload for payload, _ in payloads], dtype, numel)
    counts = c_array([count for _, count in payloads], "f")
    total = float(sum(count for _, count in payloads))
    return (where, counts.buffer_info()[0], len(payloads), total), (kept, counts)


def pointers(addresses: list[int]) -> Any:
    """Return a C array of pointers."""
    return (ctypes.c_void_p * len(addresses))(*addresses)
