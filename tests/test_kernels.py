"""Every kernel returns the bytes of the plain torch that defines its operation.

For every instruction set that this machine has, one and two threads; the inputs are in
`kernel_cases`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import kernel_cases
import pytest
import torch
from torch import Tensor

from gcbench import ops
from gcbench.errors import GcbenchError
from gcbench.ops import cpu
from gcbench.ops.backend import DEFINITIONS
from gcbench.ops.cpu import library

FAMILIES = kernel_cases.families()
NATIVE = cpu.status()


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


def outcome(call: kernel_cases.Call) -> Any:
    """Return what a call returns, or the type of what it raises."""
    try:
        return bits(getattr(ops, call.op)(*call.args, **call.kwargs))
    except GcbenchError as error:
        return type(error)


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


needs_native = pytest.mark.skipif(not NATIVE[0], reason=NATIVE[1])


@needs_native
@pytest.mark.parametrize("size", kernel_cases.SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_definition_is_met(family, size):
    with ops.using("reference"):
        calls = list(FAMILIES[family].cases(size))
        wanted = [outcome(call) for call in calls]
    for isa, number in product(library.levels(), (1, 2)):
        with ops.using("cpu"), cpu.using_isa(isa), threads(number):
            for call, want in zip(calls, wanted, strict=True):
                assert outcome(call) == want, f"{call}: {isa}, {number} thread(s), n = {size}"


def test_every_kernel_has_an_operation_and_inputs():
    tried = {call.op for family in FAMILIES.values() for call in family.cases(1025)}
    assert set(cpu.KERNELS) <= set(DEFINITIONS)
    assert set(cpu.KERNELS) <= tried
