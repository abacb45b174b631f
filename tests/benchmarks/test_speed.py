"""Time every case on every backend, between copies of the same tensor.

Nothing is asserted about time. Before each call of a row `copy_` of the same elements is timed,
so that what else the machine does meets both; a row keeps the median of these copies.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

from benchmarks.cases import CASES, Gradient, Timed
from benchmarks.sizes import SIZES
from gcbench import ops
from gcbench.ops import cuda, native
from gcbench.training import configuration

ROUNDS = 100
"""At most; and at least `FEWEST`, but one where a call alone takes longer than a row may."""
FEWEST = 5
SHORT = 1e-4
"""Seconds of a call below which what lies around its C++ functions is timed, too."""
FLUSHED = 8 * 2**26
"""Bytes that are written between two calls on a GPU: they push all else out of its L2."""


class Row(NamedTuple):
    """One row of the table."""

    size: str
    case: str
    backend: str
    device: str
    threads: int

    def __str__(self) -> str:
        threads = f"-{self.threads}t" if self.device == "cpu" else ""
        return f"{self.case}-{self.backend.replace(' ', '-')}-{self.device}-{self.size}{threads}"


# ---- which rows ----------------------------------------------------------------------------------


def _backends(row: Row, isas: list[str]) -> Iterator[str]:
    """Yield the backends of a row that have something of their own to time.

    The definition is timed on one thread. Whole methods are timed with the best instruction set;
    in plain torch, which takes seconds for more, with 1e6 elements on one thread.
    """
    case = CASES[row.case]
    if case.name == "copy_":
        yield "torch"
        return
    alone = row.threads == 1
    slow = bool(case.op) or (alone and row.size == "1e6")
    if alone and slow:
        yield "reference"
    if row.device == "cuda":
        if cuda.status()[0] and (case.op is None or case.op in cuda.KERNELS):
            yield "cuda"
    elif case.op is None or case.op in native.KERNELS:
        yield from (f"cpu {isa}" for isa in (isas if case.op else isas[-1:]))
    if case.eager and slow:
        yield "eager"


def _rows(config: pytest.Config) -> Iterator[Row]:
    isas = config.getoption("--isas")
    if isas is None:
        isas = list(native.isas()[-2:]) if native.status()[0] else []
    threads = config.getoption("--threads") or sorted({1, configuration.cores()})
    places = [("cpu", int(number)) for number in threads]
    if torch.cuda.is_available():
        places.append(("cuda", 1))
    for size in config.getoption("--sizes"):
        if size not in SIZES:
            raise pytest.UsageError(f"--sizes {size}: allowed are {', '.join(SIZES)}")
        for case in CASES.values():
            if size in case.sizes:
                for device, number in places:
                    row = Row(size, case.name, "", device, number)
                    for backend in _backends(row, isas):
                        yield row._replace(backend=backend)


def pytest_generate_tests(metafunc):
    rows = list(_rows(metafunc.config))
    metafunc.parametrize("row", rows, ids=map(str, rows))


# ---- how -----------------------------------------------------------------------------------------


class Kept:
    """What the next row may need, too: one gradient, one prepared call, and how long calls took."""

    def __init__(self) -> None:
        self._gradient: tuple[Any, Gradient] | None = None
        self._timed: tuple[Any, Timed] | None = None
        self._eager: tuple[Any, Callable[[], Any]] | None = None
        self.seconds: dict[Any, float] = {}

    def gradient(self, row: Row) -> Gradient:
        key = row.size, row.device
        if self._gradient is None or self._gradient[0] != key:
            self._gradient = self._timed = self._eager = None
            self._gradient = key, Gradient(SIZES[row.size], row.device)
        return self._gradient[1]

    def timed(self, row: Row) -> Timed:
        key, gradient = (row.case, row.size, row.device), self.gradient(row)
        if self._timed is None or self._timed[0] != key:
            self._timed = None
            with ops.using("auto"):  # all backends return the same bytes
                self._timed = key, CASES[row.case].prepare(gradient)
        return self._timed[1]

    def eager(self, row: Row) -> Callable[[], Any]:
        key, gradient, make = (row.case, row.size, row.device), self.gradient(row), None
        if self._eager is None or self._eager[0] != key:
            self._eager = None
            make = CASES[row.case].eager
            assert make
            self._eager = key, make(gradient)
        return self._eager[1]


KEPT = Kept()


class Moment:
    """An event on the GPU's stream; the difference of two is seconds."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def __sub__(self, before: Moment) -> float:
        self.event.synchronize()
        return before.event.elapsed_time(self.event) / 1e3


@contextmanager
def _served(backend: str) -> Iterator[None]:
    name, _, isa = backend.partition(" ")
    with ExitStack() as stack:
        stack.enter_context(ops.using(name if name in ops.BACKENDS else "reference"))
        if isa:
            stack.enter_context(native.using_isa(isa))
        yield


@contextmanager
def _clocked() -> Iterator[list[float]]:
    """Yield a list of the seconds that each call of a C++ function takes meanwhile."""
    inside: list[float] = []

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = function(*arguments)
            inside.append(time.perf_counter() - began)
            return result

        return call

    functions = native.library.functions
    native.library.functions = {
        name: function._replace(call=timed(function.call)) for name, function in functions.items()
    }
    try:
        yield inside
    finally:
        native.library.functions = functions


def _around(call: Callable[[], Any], copy: Callable[[], None]) -> float:
    """Return the median of the seconds that a call spends outside of C++ functions.

    The clock's share of a C++ function that does nothing is subtracted.
    """
    with _clocked() as inside:

        def outside(call: Callable[[], Any]) -> float:
            matches = []
            for _ in range(ROUNDS):
                copy()
                inside.clear()
                began = time.perf_counter()
                call()
                matches.append(time.perf_counter() - began - sum(inside))
            return statistics.median(matches)

        nothing = native.library.functions["gc_draws24"].call
        return outside(call) - outside(partial(nothing, bytes(32), None, 0, None, 1))


def test_speed(row: Row, benchmark, request):
    torch.set_num_threads(row.threads)
    gradient, timed = KEPT.gradient(row), KEPT.timed(row)
    call = KEPT.eager(row) if row.backend == "eager" else timed.call
    on_gpu = row.device == "cuda"
    clock: Callable[[], Any] = Moment if on_gpu else time.perf_counter
    benchmark._timer = clock
    flushed = torch.empty(FLUSHED if on_gpu else 0, dtype=torch.uint8, device=row.device)
    copies: list[float] = []

    def copy() -> None:
        if on_gpu:
            flushed.zero_()
        else:  # what the call left in the caches shall not slow the copy down
            gradient.copied.copy_(gradient.x)
        began = clock()
        gradient.copied.copy_(gradient.x)
        copies.append(clock() - began)
        if on_gpu:
            flushed.zero_()

    with _served(row.backend):
        if timed.reset:
            timed.reset()
        budget = request.config.getoption("--seconds")
        rounds = _rounds(row, call, gradient.n, budget)
        copy()
        copies.clear()
        benchmark.pedantic(call, setup=copy, rounds=rounds)
        native = row.backend.startswith("cpu") and CASES[row.case].op
        short = benchmark.stats and benchmark.stats.stats.median < SHORT
        around = _around(call, copy) if native and short else None
    if not benchmark.stats:
        return  # --benchmark-disable: each call is made once
    median = benchmark.stats.stats.median
    KEPT.seconds[row._replace(size="")] = median / gradient.n
    benchmark.extra_info |= {
        "op": row.case,
        "backend": row.backend,
        "device": row.device,
        "size": row.size,
        "elements": gradient.n,
        "tensors": len(gradient.shapes),
        "threads": row.threads,
        "bytes_per_element": round(timed.moved / gradient.n, 4),
        "gb_per_second": 4e-9 * gradient.n / median,
        "copy_seconds": statistics.median(copies),
        "around_seconds": around,
    }


def _rounds(row: Row, call: Callable[[], Any], n: int, budget: float) -> int:
    """Return how often to time a call; make one before, unless a smaller size says it is slow."""
    guess = KEPT.seconds.get(row._replace(size=""), 0.0) * n
    if guess <= budget:
        began = time.perf_counter()
        call()
        guess = time.perf_counter() - began
    if guess > budget:
        return 1
    return max(FEWEST, min(ROUNDS, int(budget / guess)))
