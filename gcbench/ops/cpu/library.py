"""The native library: found, checked, loaded, called.

It is built from `cuda/*.cpp` when the package is installed, once for each instruction set; the best
that the processor has is taken. `GCBENCH_ISA` takes another one. No Python.h is needed, and one
build serves every version of Python: see `cuda/python.hpp`.
"""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from struct import pack
from typing import Any

import torch
from torch import Tensor

import gcbench
from gcbench.core.compressor import Key
from gcbench.core.errors import GcbenchError
from gcbench.ops import sources
from gcbench.ops.backend import SEQUENCES

ISAS = ("baseline", "avx2", "avx512")
"""Instruction sets from the least to the most; other processors than x86-64 have the first."""
FOLDER = Path(gcbench.__file__).parent / "_native"
REBUILD = "pip install again (`pip install -e .` in a checkout) with a C++ compiler at hand"

DTYPES = {
    torch.int8: 0 | 8 << 8 | 1 << 16,
    torch.int32: 0 | 32 << 8 | 1 << 16,
    torch.int64: 0 | 64 << 8 | 1 << 16,
    torch.float16: 2 | 16 << 8 | 1 << 16,
    torch.float32: 2 | 32 << 8 | 1 << 16,
    torch.complex64: 5 | 64 << 8 | 1 << 16,
    torch.bfloat16: 4 | 16 << 8 | 1 << 16,
}
"""What kernels take, as DLPack has it: kind, bits, lanes (one element is one number)."""
Column = tuple[tuple[Tensor, ...], torch.dtype, tuple[int, ...]]
"""One tensor of each payload: they, their dtype, the elements of each."""


class Functions:
    """The C functions of one library at a time, as attributes: what `GC_CALLED` marks in C++.

    Each takes numbers, and addresses as ints or bytes (or None), releases the interpreter's lock,
    and returns an int; those about tensors take and return objects, and hold it.

    Raises:
        MemoryError: there is none for what a function keeps meanwhile.
        TypeError: too few or too many arguments, or one is no number.
        OverflowError: a number is wider than what C takes.
    """

    def __init__(self) -> None:
        self.isa = ""

    def ask(self, exchange: int | None) -> bool:
        """Ask torch about tensors in C, by the table that lies here, or in Python if None.

        Return whether the table is of use.
        """
        return bool(self.gc_tensors_ask(exchange, DTYPES, address))

    def load(self, isa: str) -> None:
        """Take the functions of this instruction set's library in place of those before."""
        library = ctypes.PyDLL(str(FOLDER / f"{isa}.so"))
        library.gc_functions.restype = ctypes.py_object
        self.__dict__.update(library.gc_functions())
        self.isa = isa
        self.ask(exchange())

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(f"the native library has no function {name}, or is not loaded")


def exchange() -> int | None:
    """Return where the table lies by which torch tells C about tensors, or None."""
    capsule = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return None
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.argtypes, pointer.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
    found: int = pointer(capsule, b"dlpack_exchange_api")
    return found


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

    Kernels call `c.gc_tensor_address`, which does the same in C where it can.

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


def _maker(dtype: torch.dtype) -> Callable[[int], Tensor]:
    """Return a function from a length to a tensor on the CPU, in two thirds of torch.empty's time.

    A device that the caller made the default one does not change where it is.
    """
    return torch.empty(0, dtype=dtype, device="cpu").new_empty


_makers = {dtype: _maker(dtype) for dtype in DTYPES}
"""Of outputs; new_int32(n) and the like are of what a kernel makes besides."""
new_int32, new_int64 = _makers[torch.int32], _makers[torch.int64]
new_float32, new_float64 = _makers[torch.float32], _maker(torch.float64)


def output(given: Tensor | None, dtype: torch.dtype, numel: int) -> Tensor:
    """Return the tensor to write into: `given`, or a new one."""
    return _makers[dtype](numel) if given is None else given


def stream(key: Key) -> tuple[int, int, int, int]:
    """Return a key as the kernels take it: seed, offset, step, who.

    Raises:
        ValueError: see `Key.words`.
    """
    (low, high), step, who = key.words()
    return high << 32 | low, key.offset, step, who


def c_array(numbers: Iterable[int]) -> bytes:
    """Return a C array of int64."""
    return array("q", numbers).tobytes()


def addresses(
    columns: tuple[Column, ...], check: Callable[[], object] | None = None
) -> tuple[tuple[bytes, ...], object]:
    """Return a C array of addresses for each column, and what the caller keeps alive meanwhile.

    Contiguous tensors that are as expected are looked at in C, and of one dimension where there is
    a `check`. If there is another one, and in a torch that C cannot ask, the check is made, and all
    are taken one by one.

    Raises:
        ValueError: a tensor has another dtype, length or device; and what `check` raises.
    """
    found = c.gc_tensor_addresses(columns, check is not None)
    if found:
        return found, columns
    if check is not None:
        check()
    kept = [[tensor.contiguous() for tensor in tensors] for tensors, _, _ in columns]
    return tuple(
        pack(
            f"{len(held)}Q",
            *(
                c.gc_tensor_address(each, dtype, numel)
                for each, numel in zip(held, lengths, strict=True)
            ),
        )
        for held, (_, dtype, lengths) in zip(kept, columns, strict=True)
    ), kept


def unzipped(payloads: Sequence[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Return the first parts of all payloads, the second ones, and so on.

    Raises:
        ValueError: there is no payload.
    """
    if not payloads:
        raise ValueError("the mean of no payloads: one at least expected")
    return zip(*payloads, strict=True)


def summands(
    payloads: Sequence[tuple[Any, ...]],
    layout: tuple[tuple[torch.dtype, int], ...],
    check: Callable[[], object] | None = None,
) -> tuple[tuple[Any, ...], object]:
    """Return the C arguments of a mean, and what the caller keeps alive meanwhile.

    The arguments are an array of addresses for each tensor of a payload, one of the numbers of
    workers as float32, the number of payloads, and the sum of workers.

    `payloads`: tuples of tensors, some of them in a tuple, and a number of workers. `layout`:
    dtype and elements of each tensor. `check`: see `addresses`.

    Raises:
        ValueError: there is none, or one has another dtype, length or device.
    """
    found = c.gc_tensor_columns(payloads, layout)
    if found:
        return found, payloads
    *tensors, counts = unzipped([tuple(_flat(payload)) for payload in payloads])
    number = len(counts)
    columns = tuple(
        (column, dtype, (numel,) * number)
        for column, (dtype, numel) in zip(tensors, layout, strict=True)
    )
    arrays, kept = addresses(columns, check)
    return (*arrays, pack(f"{number}f", *counts), number, sum(counts)), kept


def _flat(payload: Sequence[Any]) -> Iterator[Any]:
    for part in payload:
        if isinstance(part, SEQUENCES):
            yield from _flat(part)
        else:
            yield part
