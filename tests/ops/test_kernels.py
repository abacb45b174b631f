"""Every kernel returns the bytes of the plain torch that defines its operation.

For every instruction set that this machine has, one and two threads; and the CUDA kernels on the
shim in both orders of threads, on a GPU where there is one. The inputs are in `kernel_cases`.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import random
import struct
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle, product
from operator import attrgetter
from typing import Any

import kernel_cases
import kernel_cases.selection
import pytest
import torch
from cusim import cuda_device, shim  # noqa: F401  # fixtures
from kernel_cases import Call, bits, returned
from torch import Tensor

from gcbench import ops
from gcbench.core.compressor import TILE, Key, Segments
from gcbench.core.errors import GcbenchError, PayloadError
from gcbench.ops import cuda, native, sources
from gcbench.ops.dispatch import OPERATIONS, Operation
from gcbench.ops.selection import gaps_low_bits
from gcbench.ops.transform import turns

FAMILIES = kernel_cases.families()
NATIVE = native.status()
if not NATIVE[0] and os.environ.get("GCBENCH_REQUIRE_NATIVE", "0") != "0":
    raise RuntimeError(
        f"GCBENCH_REQUIRE_NATIVE is set, and the native kernels are missing: {NATIVE[1]}"
    )


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def outcome(call: Call, number: int = 1) -> Any:
    """Return what a call returns on `number` threads, or the type of what it raises."""
    try:
        with threads(number):
            result = attrgetter(call.op)(ops)(*call.args, **call.kwargs)
        return bits(result)
    except GcbenchError as error:
        return type(error)


needs_native = pytest.mark.skipif(not NATIVE[0], reason=NATIVE[1])


def sample(calls: Iterable[Call], every: int) -> list[Call]:
    """Return each operation's first call and a random 1 / `every` of the others."""
    draws, seen, selected = random.Random(every), set[str](), []
    for call in calls:
        if call.op not in seen or draws.random() * every < 1:
            selected.append(call)
        seen.add(call.op)
    return selected


@pytest.fixture(
    scope="module",
    params=list(product(FAMILIES, kernel_cases.SIZES)),
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def defined(request) -> tuple[int, list[tuple[Call, Any]]]:
    """A size, and a family's calls of that size, each with what its definition makes of it.

    One at a time: pytest runs the tests of a value one after the other, on whatever backend.
    """
    family, size = request.param
    with threads(1):
        calls = sample(FAMILIES[family].cases(size), kernel_cases.SIZES[size])
    with ops.using("reference"), threads(1):
        return size, [(call, outcome(call)) for call in calls]


@needs_native
def test_the_definition_is_met(defined):
    size, calls = defined
    numbers = (1, 2) if size >= kernel_cases.SHARED_FROM else (1,)
    for isa, number in product(native.isas(), numbers):
        with ops.using("cpu"), native.using_isa(isa):
            for call, want in calls:
                received = outcome(call, number)
                assert received == want, f"{call}: {isa}, {number} thread(s), n = {size}"


def on_cuda(family: str) -> bool:
    """Return whether an operation of these cases has CUDA kernels."""
    families = {name.partition(".")[0] for name in cuda.KERNELS}
    with ops.using("reference"):
        return any(call.op.partition(".")[0] in families for call in FAMILIES[family].cases(33))


@pytest.mark.parametrize(
    "defined",
    [(family, size) for family in FAMILIES if on_cuda(family) for size in kernel_cases.SIZES],
    indirect=True,
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def test_cuda_returns_the_same_bytes(defined, cuda_device):  # noqa: F811
    size, calls = defined
    families = {name.partition(".")[0] for name in cuda.KERNELS}
    calls = [(call, want) for call, want in calls if call.op.partition(".")[0] in families]
    assert calls
    wanted = {id(call): want for call, want in calls}
    # The shim is slow, and smaller sizes have made the calls.
    every = 1 + size // 1500 if cuda_device.type == "cpu" else 1
    for call in sample((call for call, _ in calls), every):
        assert returned(call, cuda_device) == wanted[id(call)], f"{call}: n = {size}"


def large(n: int) -> Iterator[Call]:
    """Yield calls with outputs that are written past the caches: only large ones are."""
    x, key = torch.randn(n, generator=torch.Generator().manual_seed(1)), Key(1, 2, 3, 500)
    whole, groups = Segments((0, n)), Segments.of([(n,)], 512)
    for name, segments in (("model", whole), ("groups", groups)):
        limit, scale = ops.ternary.scales(x, segments, 2.5)
        words = ops.ternary.encode(x, limit, scale, segments, key)
        for count in (1, 5):
            yield Call("ternary.mean", f"{name} {count}", ([(words, 1)] * count, scale, segments))
        yield Call(
            "sign.class_decode", name, (*ops.sign.class_encode(x, segments), segments, "method")
        )
        yield Call(
            "sign.scaled_decode", name, (*ops.sign.scaled_encode(x, segments), segments, "method")
        )
        signs = [(words, values, 2) for words, *values in [ops.sign.class_encode(x, segments)]]
        yield Call("sign.mean", name, (signs * 2, segments, "method"))
        norms = ops.levels.norms(x, segments, "max", 7)
        yield Call("levels.codes", name, (x, norms, 7, segments, key))
        coded = ops.levels.encode(x, norms, 7, "fixed", segments, key)
        yield Call("levels.decode", name, (coded, norms, "max", 7, "fixed", segments))
        yield Call("levels.mean", name, ([(coded, norms, 1)] * 2, "max", 7, "fixed", segments))
        coded = ops.int8.encode(x, segments, "nearest", key)
        yield Call("int8.decode", name, (*coded, segments))
        yield Call("int8.mean", name, ([(*coded, 1), (*coded, 2)], segments))
        for family in (ops.fp8, ops.u8bit):
            what = family.__name__.rpartition(".")[2]
            yield Call(f"{what}.decode", name, (*family.encode(x, segments), segments, "x"))
        runs = ops.selection.kept_runs(segments, 0.01)
        places, selected = ops.selection.largest_elements(x, runs)
        yield Call("selection.scatter", name, (selected, places, n))
        yield Call("selection.scatter_mean", name, ([(selected, places)] * 2, n, 2))
    for dtype in (torch.float16, torch.bfloat16):
        yield Call("half.encode", f"{dtype}", (x, dtype))
        yield Call("half.mean", f"{dtype}", ([(x.to(dtype), 1), (x.flip(0).to(dtype), 2)], "x"))
    words = ops.natural.encode(x, key)
    yield Call("natural.mean", "", ([(words, 1), (words, 4)], n, "x"))
    for width in (1, 2):
        yield Call("sign.decode", f"{width}", (ops.sign.pack(x, width), width, n, "method"))
    yield Call("random.draws24", "", (key, n), {"device": x.device})
    yield Call(
        "packing.unpack",
        "",
        (ops.packing.pack(ops.levels.codes(x, norms, 7, segments, key) + 7, 4), 4, n),
    )
    spectra = torch.view_as_complex(x[: n // 2 * 2].view(-1, 2))
    for inverse in (False, True):
        h = len(spectra) - inverse
        yield Call("transform.fold", "", (spectra, turns(2 * h), 0.3), {"inverse": inverse})
    selected = torch.arange(0, n, 7)
    sparse = [(selected, x[: 2 * len(selected)].view(-1, 2))] * 2
    yield Call("spectrum.mean", "", (sparse, [0.5, 0.3], n))
    for name, edges in (("model", (0, n)), ("unaligned", (0, 6, 2**21 + 10, n // 2 * 2))):
        segments = Segments(edges)
        unit = 2.0 ** torch.arange(len(segments))
        for half in (False, True):
            yield Call(
                "spectrum.scaled", name, (x[: edges[-1]], segments, 1.0, 0.1), {"half": half}
            )
        yield Call("spectrum.restored", name, (x[: edges[-1]], unit, segments))
        if edges[-1] % 2 == 0:
            yield Call("spectrum.unscaled", name, (x[: edges[-1]], unit, segments))
    groups = ((1, n - 5), (5, 1))
    yield Call(
        "rangefloat.unpack", "", (*ops.rangefloat.pack(x, groups, 10, 6), groups, 10, 6, "x")
    )


@needs_native
@pytest.mark.parametrize("family", FAMILIES)
def test_the_default_dtype_does_not_matter(family):
    """A buffer for float32 is one, whatever the user has told torch."""
    calls = sample(FAMILIES[family].cases(33), 4)
    wanted = [outcome(call) for call in calls]
    assert not all(isinstance(want, type) for want in wanted)
    torch.set_default_dtype(torch.float64)
    try:
        for call, want in zip(calls, wanted, strict=True):
            assert outcome(call) == want, call
    finally:
        torch.set_default_dtype(torch.float32)


def takes_output(call: kernel_cases.Call) -> bool:
    """Return whether an operation has an output argument that the call does not use."""
    takes = "out" in inspect.signature(attrgetter(call.op)(ops)).parameters
    return takes and "out" not in call.kwargs


def several(call: kernel_cases.Call) -> bool:
    """Tell whether an operation takes an output for each part of a payload."""
    out = inspect.signature(attrgetter(call.op)(ops)).parameters["out"]
    return "Tensor | None" not in str(out.annotation).replace("Sequence[Tensor] | None", "")


def spoiled(like: Tensor) -> Tensor:
    """Return a buffer of that shape and dtype, full of something else."""
    return torch.empty_like(like).view(torch.uint8).fill_(0x5A).view(like.dtype)


@needs_native
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_output_buffer_is_filled(family, backend):
    """And refused if it is too long."""
    results = 0
    with ops.using(backend):
        for call in sample(filter(takes_output, FAMILIES[family].cases(1025)), 8):
            run = partial(attrgetter(call.op)(ops), *call.args, **call.kwargs)
            try:
                fresh = run()
            except GcbenchError:  # a corrupt payload
                continue
            results += 1
            whole = [fresh] if isinstance(fresh, Tensor) else list(fresh)
            many = several(call)
            parts = whole[: 1 if not many else -1 if call.op.endswith("_feedback") else None]
            buffers = [spoiled(part) for part in parts]
            settings = run(out=buffers if many else buffers[0])
            filled = [settings] if isinstance(settings, Tensor) else list(settings)
            for buffer, part in zip(buffers, filled, strict=False):
                assert part.data_ptr() == buffer.data_ptr(), call
            assert bits(settings) == bits(fresh), call
            longer = buffers[0].new_empty(buffers[0].numel() + 1)
            with pytest.raises(ValueError, match="expected"):
                run(out=[longer, *buffers[1:]] if many else longer)
    assert results or not any(filter(takes_output, FAMILIES[family].cases(1025)))


def off_the_line(call: Call) -> Call:
    """Return a call that writes where no line of a cache begins."""
    result = attrgetter(call.op)(ops)(*call.args, **call.kwargs)
    first = result if isinstance(result, Tensor) else result[0]
    place = first.new_empty(first.numel() + 3)[3:].view(first.shape)
    return call._replace(kwargs={**call.kwargs, "out": place})


@needs_native
def test_large_outputs_are_the_same():
    for call in large(2**22 + 1031):
        with ops.using("reference"):
            want = outcome(call)
        assert not isinstance(want, type), f"{call} raises {want}"
        for isa in native.isas():
            with ops.using("cpu"), native.using_isa(isa):
                assert outcome(call, 2) == want, f"{call}: {isa}"
        if takes_output(call) and not several(call):
            with ops.using("cpu"):
                assert outcome(off_the_line(call), 2) == want, call


@needs_native
def test_threads_select_the_same():
    """However many look through one segment together."""
    for call in kernel_cases.selection.long(200_003):
        with ops.using("reference"):
            want = outcome(call)
        with ops.using("cpu"):
            for isa, number in zip(native.isas(), cycle((3, 2)), strict=False):
                with native.using_isa(isa):
                    assert outcome(call, number) == want, f"{call}: {isa}, {number} thread(s)"


@needs_native
@pytest.mark.parametrize("number", [1, 2])
def test_positions_increase_where_threads_meet(number):
    n, total = 70_007, 10_500
    selected, runs, low = (
        torch.arange(total),
        [ops.selection.KeptRun(0, 1, n, total)],
        gaps_low_bits(n, total),
    )
    _, high = ops.selection.pack_positions(selected, n, "gaps")
    with ops.using("cpu"), threads(number):
        for last in range(TILE - 1, total - 1, TILE):  # one of them is a thread's last
            codes, twice = torch.zeros(total, dtype=torch.int32), selected.clone()
            codes[last], twice[last + 1] = 1, last
            with pytest.raises(PayloadError, match="positions"):
                ops.selection.unpack_positions(
                    (ops.packing.pack(codes, low), high), n, "gaps", runs, "x"
                )
            with pytest.raises(IndexError, match="positions"):
                ops.selection.pack_positions(twice, n, "bitmap")


@needs_native
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_positions_out_of_order_are_refused(backend, number):
    """Also where they belong to the tiles of another thread than the one that meets them."""
    n, many = 100_000, torch.arange(0, 80_000, 2)
    many[5] = many[4]  # in the coding of gaps, only the low bits differ
    two = [torch.tensor(places) for places in ([90_000, 10], [10, -1], [10, n], [7, 7], [-1, 10])]
    with ops.using(backend), threads(number):
        for places in (*two, many, many.flip(0)):
            values = torch.ones(len(places))
            for coding in ("bitmap", "gaps"):
                with pytest.raises(IndexError, match="positions"):
                    ops.selection.pack_positions(places, n, coding)
            with pytest.raises(IndexError, match="positions"):
                ops.selection.scatter(values, places, n)
            right = torch.ones(2), torch.tensor([0, n - 1])
            with pytest.raises(IndexError, match="positions"):
                ops.selection.scatter_mean([right, (values, places), right], n, 3)
            with pytest.raises(IndexError, match="bins"):
                ops.spectrum.mean([(places, torch.ones(len(places), 2))], [1.0], n)


HUGE = 2**57
"""Segments, groups, tensors: no machine has so much memory, and nothing else is looked at."""


@needs_native
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("gc_level_norms", (None, "segments", 1, 7, None)),
        ("gc_spectrum_scaled", (None, "segments", 1.0, 0.0, 0, None, None, None)),
        ("gc_spectrum_mean", (None, None, None, None, HUGE, None, 2**16)),
        ("gc_segment_statistics", (None, "tiles", None, None, None)),
        ("gc_ternary_scales", (None, "tiles", 2.5, 0, None, None)),
        ("gc_range_pack", (None, 0, None, HUGE, 10, 6, None, None)),
        ("gc_random_positions", (bytes(32), "run", 1, None)),
        ("gc_hadamard_encode", (None, 1024, "tiles", None, None)),
        ("gc_lowrank_orthonormalize", (None, HUGE, 1, 0.5)),  # and `out`
        ("gc_scatter_mean", (None, None, None, HUGE, 1.0, None, 2**16)),
    ],
)
def test_without_memory_a_kernel_raises(name, arguments, number):
    ends = array("q", [0, HUGE])  # of a segment: elements, and tiles
    place, _ = ends.buffer_info()
    tables = {
        "tiles": struct.pack("QQq", place, place, 1),
        "segments": struct.pack("QQq", place, place, HUGE),
        "run": [0, 1, 2**50, 2**49],
    }
    settings = [tables[x] if isinstance(x, str) else x for x in arguments]
    for isa in native.isas():
        with native.using_isa(isa), pytest.raises(MemoryError, match=f"{name} cannot allocate"):
            native.library.functions[name](*settings, number)


def test_every_kernel_has_an_operation_and_inputs(monkeypatch):
    tried = set()
    serve = Operation.__call__

    def noted(self: Operation, *args: Any, **kwargs: Any) -> Any:
        tried.add(self.name)
        return serve(self, *args, **kwargs)

    monkeypatch.setattr(Operation, "__call__", noted)
    for family in FAMILIES.values():
        for call in sample(family.cases(33), 4):
            outcome(call)
    kernels = set(native.KERNELS) | set(cuda.KERNELS)
    assert kernels <= set(OPERATIONS)
    assert kernels <= tried


@needs_native
def test_a_library_of_other_sources_is_refused(monkeypatch):
    monkeypatch.setattr(sources, "digest", lambda *suffixes: "another")
    with pytest.raises(native.Missing, match="pip install"):
        native.isas()


@needs_native
def test_every_instruction_sets_library_is_checked(tmp_path, monkeypatch):
    """The best one is loaded, so a good baseline says nothing about it."""
    whole = {isa: (native.FOLDER / f"{isa}.so").read_bytes() for isa in native.isas()}
    digest = sources.digest(".cpp", ".hpp", ".cuh").encode()
    bad = {
        "is damaged": lambda good: good[: len(good) * 9 // 10],
        "cannot be loaded": lambda good: b"no library",
        "other sources": lambda good: good.replace(digest, digest[::-1]),
    }
    for (reason, change), isa in product(bad.items(), whole):
        monkeypatch.setattr(native, "FOLDER", folder := tmp_path / f"{isa} {reason}")
        folder.mkdir()
        for name, good in whole.items():
            content = change(good) if name == isa else good
            of = good if reason == "is damaged" else content
            (folder / f"{name}.so").write_bytes(content)
            (folder / f"{name}.sha256").write_text(hashlib.sha256(of).hexdigest())
        with pytest.raises(native.Missing, match=f"{reason}.*delete"):
            native.Library().load(isa)
    (folder / f"{isa}.sha256").unlink()  # the build was interrupted
    with pytest.raises(native.Missing, match=r"sha256.*delete"):
        native.Library().load(isa)


@needs_native
def test_an_instruction_set_can_be_asked_for(monkeypatch):
    monkeypatch.setenv("GCBENCH_ISA", "baseline")
    assert native.best() == "baseline"
    monkeypatch.setenv("GCBENCH_ISA", "avx1024")
    with pytest.raises(native.Missing, match=r"GCBENCH_ISA=avx1024.*baseline"):
        native.best()
