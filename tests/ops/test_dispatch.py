"""Operations: checks before a kernel runs, arguments of C++ functions, and error flags."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from operator import attrgetter
from typing import Any

import kernel_cases
import pytest
import torch
from cusim import on_shim, shim  # noqa: F401  # fixture
from kernel_cases import Call
from torch import Tensor

from gcbench import ops
from gcbench.core import faults
from gcbench.core.compressor import Key, Segments
from gcbench.core.errors import GcbenchError, PayloadError
from gcbench.ops import dispatch, native, sources

needs_native = pytest.mark.skipif(not native.status()[0], reason=native.status()[1])


def function(name: str) -> native.Function:
    return native.library.functions[name]


# ---- rows and C++ functions ----------------------------------------------------------------------


@needs_native
def test_all_functions_of_the_sources_are_there():
    result = set()
    for path in sources.kernel_sources().glob("*.cpp"):
        result |= set(re.findall(r"^int64_t (gc_\w+)\(", path.read_text(), re.MULTILINE))
    assert set(native.library.functions) == result
    assert len(result) > 40


@needs_native
@pytest.mark.parametrize("operation", native.ROWS)
def test_a_row_has_an_argument_for_each_of_its_function(operation):
    name, *words = native.ROWS[operation].split()
    assert operation in dispatch.OPERATIONS
    assert len(words) == len(function(name).kinds)
    assert all(
        expected in native._CTYPES or expected[0] == "*" for expected in function(name).kinds
    )


@needs_native
def test_numbers_come_as_they_are():
    """The widest of each type: a seed of 64 bits, a step of 32, a length of 63."""
    key = Key(2**64 - 1, 2**32 - 1, 7)
    with ops.using("reference"):
        wanted = ops.random.draws24(key, 5)
    with ops.using("cpu"):
        assert torch.equal(ops.random.draws24(key, 5), wanted)


@needs_native
def test_pointers_are_tensors_sequences_or_none():
    first, second = torch.ones(4).half(), torch.full((4,), 2.0).half()
    out = torch.zeros(4)
    mean = function("gc_half_mean")
    assert mean([first, second], [1, 3], 2, 2.0, 4, False, out, 1) == 0
    assert out.tolist() == [3.5] * 4
    assert mean([], [], 0, 2, 0, False, None, 1) == 0  # an int for a float


@needs_native
@pytest.mark.parametrize("number", [0, 4, 6])
def test_arguments_are_counted(number):
    with pytest.raises(ValueError, match="zip"):
        function("gc_draws24")(*(bytes(32), None, 0, None, 1, 1)[:number])


@needs_native
def test_a_row_asks_for_what_it_is_given():
    kernel = native._row("gc_pack codes size n bits out threads")
    with pytest.raises(TypeError, match="gc_pack: no argument bits among codes, size, n"):
        kernel(codes=torch.zeros(1), size=4, n=1)


@needs_native
def test_others_run_meanwhile():
    """The interpreter's lock is released: this thread runs in the middle of another's call."""
    codes, out, calls = torch.ones(10**6).bfloat16(), torch.zeros(10**6), []
    number = 600

    def call() -> None:
        began = time.perf_counter()
        function("gc_half_mean")([codes] * number, [1.0] * number, number, 1.0, 10**6, 1, out, 1)
        calls.append((began, time.perf_counter()))

    thread = threading.Thread(target=call)
    thread.start()
    seen = []
    while thread.is_alive():
        seen.append(time.perf_counter())
    began, ended = calls[0]
    quarter = (ended - began) / 4
    assert any(began + quarter < moment < ended - quarter for moment in seen)
    assert out[0] == number


# ---- what is checked -----------------------------------------------------------------------------


def changed(value: Any, change: Callable[[Tensor], Tensor]) -> Iterator[Any]:
    """Yield a value with one of its tensors changed, for each of its tensors."""
    if isinstance(value, Tensor):
        yield change(value)
    elif isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        for i, item in enumerate(value):
            for other in changed(item, change):
                yield type(value)((*value[:i], other, *value[i + 1 :]))


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "longer": lambda tensor: torch.cat([tensor, tensor[:1]]),
    "shorter": lambda tensor: tensor[:-1],
    "double": lambda tensor: tensor.cdouble() if tensor.is_complex() else tensor.double(),
    "elsewhere": lambda tensor: tensor.to("meta"),
}
SIZE_IS_FREE = {
    *("half.encode", "half.decode", "natural.encode", "packing.pack", "sign.pack", "half.mean"),
    *("selection.gather", "selection.pack_positions", "transform.fold", "selection.scatter_mean"),
    *("bitstream.omega_dense_write", "bitstream.omega_sparse_write"),
    *("bitstream.omega_dense_read", "bitstream.omega_sparse_read", "spectrum.mean"),
    *("selection.largest_elements", "lowrank.orthonormalize"),
}
"""A tensor alone says how many elements there are, or the bits of a stream where it ends."""


FAMILIES = kernel_cases.families()
of_each_family = pytest.mark.parametrize("family", FAMILIES)


@cache
def samples(family: str) -> list[Call]:
    """Return two calls of each operation of a family, with tensors, that return something."""
    result: dict[str, list[Call]] = {}
    with ops.using("reference"):
        for call in FAMILIES[family].cases(1025):
            expected = result.setdefault(call.op, [])
            if len(expected) < 2 and any(True for _ in changed(call.args, torch.clone)):
                try:
                    attrgetter(call.op)(ops)(*call.args, **call.kwargs)
                except GcbenchError:
                    continue
                expected.append(call)
    return [call for calls in result.values() for call in calls]


def wrong_in(call: Call, way: str) -> bool:
    """Return whether a tensor changed this way makes the call invalid."""
    if way in ("longer", "shorter"):
        return call.op not in SIZE_IS_FREE
    return way != "elsewhere" or sum(1 for _ in changed(call.args, torch.clone)) > 1


def wrong_calls(call: Call) -> Iterator[tuple[str, Any]]:
    """Yield ways to make a call invalid, each with the arguments."""
    for way, change in WRONG.items():
        if wrong_in(call, way):
            for args in changed(call.args, change):
                yield way, args


def test_each_family_but_the_generator_has_samples():
    without = {family for family in FAMILIES if not samples(family)}
    assert without == {"random"}  # its operations take keys alone


@needs_native
@of_each_family
def test_arguments_are_checked_before_a_kernel_runs(family):
    """Another dtype or length would be read, or written, outside of a buffer."""
    tried = 0
    with ops.using("cpu"):
        for call in samples(family):
            for way, args in wrong_calls(call):
                tried += 1
                try:
                    attrgetter(call.op)(ops)(*args, **call.kwargs)
                except (ValueError, PayloadError):
                    continue
                pytest.fail(f"{call} accepts tensors that are {way}")
    assert tried or not samples(family)


def strided(tensor: Tensor) -> Tensor:
    return tensor.repeat_interleave(2, dim=0)[::2]


class Named(Tensor):
    """A subclass that adds nothing."""


LAID_OUT: dict[str, Callable[[Tensor], Tensor]] = {
    "strided": strided,
    "parameter": lambda tensor: (
        torch.nn.Parameter(tensor, requires_grad=False) if tensor.is_floating_point() else tensor
    ),
    "subclass": lambda tensor: tensor.as_subclass(Named),
    "off the line": lambda tensor: torch.cat([tensor[:1], tensor])[1:],
}


@needs_native
@of_each_family
def test_how_a_tensor_lies_changes_nothing(family):
    with ops.using("cpu"):
        for call in samples(family):
            run = attrgetter(call.op)(ops)
            wanted = kernel_cases.bits(run(*call.args, **call.kwargs))
            for way, lay in LAID_OUT.items():
                for args in changed(call.args, lay):
                    assert kernel_cases.bits(run(*args, **call.kwargs)) == wanted, f"{call}: {way}"


@pytest.mark.parametrize(
    "call",
    [
        lambda: ops.ternary.mean([], torch.ones(1), Segments((0, 64))),
        lambda: ops.ternary.merge([], 64),
        lambda: ops.levels.mean([], "max", 7, "fixed", Segments((0, 64))),
        lambda: ops.int8.mean([], Segments((0, 64))),
        lambda: ops.half.mean([], ""),
        lambda: ops.natural.mean([], 64, ""),
        lambda: ops.sign.mean([], Segments((0, 64)), ""),
        lambda: ops.sign.vote([], [], [], 64, "", width=1),
        lambda: ops.selection.scatter_mean([], 64, 1),
        lambda: ops.spectrum.mean([], [], 64),
    ],
)
def test_no_payloads_are_refused(call):
    with pytest.raises(ValueError, match="payload"):
        call()


def test_votes_have_a_count_and_bits_each():
    words = [ops.sign.pack(torch.ones(50))] * 3
    for numbers, bits in (([1] * 2, [1] * 3), ([1] * 3, [1] * 2), ([1] * 4, [1] * 3)):
        with pytest.raises(ValueError, match="counts"):
            ops.sign.vote(words, numbers, bits, 50, "", width=1)


def test_a_part_of_a_payload_has_one_dimension():
    """Other tensors may have any shape with the same number of elements."""
    table = torch.zeros(2, 4)
    assert dispatch.vector(table, torch.float32, 8) is table
    with pytest.raises(PayloadError, match=r"scales: .* of shape \(2, 4\)"):
        dispatch.part(table, torch.float32, 8, "scales")


# ---- faults --------------------------------------------------------------------------------------


def test_faults_are_told_together(shim):  # noqa: F811
    """The first one that was made, when all have run; and at once outside."""
    segments, good, ran = Segments((0, 64)), torch.zeros(64, dtype=torch.int8), []
    scale, bad_code, bad_scale = torch.ones(1), good.clone().fill_(-128), -torch.ones(1)
    with on_shim(shim):
        with pytest.raises(PayloadError, match="-128"):  # noqa: PT012, SIM117
            with ops.faults_together():
                ops.int8.decode(good, scale, segments)
                ops.int8.decode(bad_code, scale, segments)
                ops.int8.decode(good, bad_scale, segments)
                ran.append(True)
        with pytest.raises(PayloadError, match="scale"):
            ops.int8.decode(good, bad_scale, segments)
        with ops.faults_together():  # no error remains
            ops.int8.decode(good, scale, segments)
    assert ran


def test_an_error_inside_is_told_before_flags(shim):  # noqa: F811
    def fail() -> None:
        with ops.faults_together():
            ops.int8.decode(torch.full((64,), -128).char(), torch.ones(1), Segments((0, 64)))
            raise KeyError("mine")

    with on_shim(shim), pytest.raises(KeyError):
        fail()
    assert faults._waiting.checks is None


def test_an_operation_is_defined_once():
    def _thing() -> None: ...

    created = dispatch.operation()(_thing)
    try:
        with pytest.raises(ValueError, match=r"operation test_dispatch\.thing is defined twice"):
            dispatch.operation()(_thing)
    finally:
        del dispatch.OPERATIONS[created.name]


@pytest.mark.parametrize(
    ("isa", "explicit"), [("none", ""), ("none", "ops.use('auto');"), ("", "")]
)
def test_a_missing_native_library_causes_one_warning(isa, explicit):
    """One warning, with the reason, unless the program chose its backend or there are kernels."""
    if not isa and not native.status()[0]:
        pytest.skip(native.status()[1])
    code = (
        f"import gcbench, torch; from gcbench import ops; {explicit}"
        "x = torch.ones(9); m = gcbench.get_compressor('terngrad'); [m.compress(x) for _ in 'ab']"
    )
    environment = os.environ | {"GCBENCH_ISA": isa}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stderr.count("RuntimeWarning") == bool(isa and not explicit)
    assert ("GCBENCH_ISA=none: this machine has" in done.stderr) == bool(isa and not explicit)
