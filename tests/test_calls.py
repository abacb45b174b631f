"""C functions as functions of Python: what they take, what they refuse, and what they hold."""

from __future__ import annotations

import re
import threading
import time
from struct import pack

import pytest
import torch

from gcbench import ops
from gcbench.core.compressor import Key
from gcbench.ops import cpu, sources
from gcbench.ops.cpu.library import c

pytestmark = pytest.mark.skipif(not cpu.status()[0], reason=cpu.status()[1])

OF_THE_LOADER = {"gc_level", "gc_sources", "gc_functions"}


def test_all_functions_of_the_sources_are_there():
    found = set()
    for path in sources.kernel_sources().glob("*.cpp"):
        found |= set(re.findall(r"^GC_API .*?(gc_\w+)\(", path.read_text(), re.MULTILINE))
    there = {name for name in vars(c) if name.startswith("gc_")}
    assert there == found - OF_THE_LOADER
    assert len(there) > 30


def test_another_name_is_no_function():
    with pytest.raises(AttributeError, match="no function gc_nothing, or is not loaded"):
        c.gc_nothing()


def test_numbers_come_as_they_are():
    """The widest of each type: a seed of 64 bits, a step of 32, a length of 63."""
    key = Key(2**64 - 1, 2**32 - 1, 7)
    out = torch.zeros(5, dtype=torch.int32)
    (low, high), step, who = key.words()
    c.gc_draws24(high << 32 | low, key.offset, step, who, 5, out.data_ptr(), 1)
    with ops.using("reference"):
        assert out.tolist() == ops.draws24(key, 5).tolist()


def test_addresses_are_ints_bytes_or_none():
    first, second = torch.ones(4).half(), torch.full((4,), 2.0).half()
    out = torch.zeros(4)
    places, counts = pack("2Q", first.data_ptr(), second.data_ptr()), pack("2f", 1, 3)
    assert c.gc_half_mean(places, counts, 2, 2.0, 4, False, out.data_ptr(), 1) == 0
    assert out.tolist() == [3.5] * 4
    assert c.gc_half_mean(places, counts, 2, 2, 0, False, None, 1) == 0  # an int for a float


DRAWS = (1, 0, 0, 0, 0, None, 1)


@pytest.mark.parametrize(
    ("place", "given", "error", "said"),
    [
        (0, 2**64, OverflowError, "too (big|large)"),
        (0, -1, OverflowError, "negative"),
        (2, 2**32, OverflowError, "4294967296 does not fit 32 bits"),
        (6, 2**31, OverflowError, "2147483648 does not fit 32 bits"),
        (6, -(2**31) - 1, OverflowError, "-2147483649 does not fit 32 bits"),
        (4, 2**63, OverflowError, "too (big|large)"),
        (4, 1.5, TypeError, "int"),
        (4, None, TypeError, "int"),
        (5, "text", TypeError, "int"),
        (5, 1.5, TypeError, "int"),
        (5, torch.zeros(1), TypeError, "int"),
        (5, 2**64, OverflowError, "too (big|large)"),
    ],
)
def test_what_is_no_argument_is_refused(place, given, error, said):
    assert c.gc_draws24(*DRAWS) == 0
    with pytest.raises(error, match=said):
        c.gc_draws24(*DRAWS[:place], given, *DRAWS[place + 1 :])


@pytest.mark.parametrize("number", [0, 6, 8])
def test_arguments_are_counted(number):
    with pytest.raises(TypeError, match=f"gc_draws24 takes 7 arguments, {number} were given"):
        c.gc_draws24(*(*DRAWS, 1)[:number])


def test_a_float_must_be_one():
    with pytest.raises(TypeError, match="real number"):
        c.gc_half_mean(None, None, 0, "1", 0, 0, None, 1)


def test_others_run_meanwhile():
    """The interpreter's lock is released: this thread runs in the middle of another's call."""
    codes, out, calls = torch.ones(10**6).bfloat16(), torch.zeros(10**6), []
    number = 600
    places, counts = pack("Q", codes.data_ptr()) * number, pack("f", 1) * number

    def call() -> None:
        began = time.perf_counter()
        c.gc_half_mean(places, counts, number, 1.0, 10**6, True, out.data_ptr(), 1)
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
