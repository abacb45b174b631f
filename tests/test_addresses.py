"""Addresses of payloads: asked of torch in C or one by one in Python, they and the errors agree."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from contextlib import suppress
from struct import unpack
from typing import Any

import pytest
import torch
from torch import Tensor

from gcbench import ops
from gcbench.core.compressor import Key, Segments
from gcbench.core.errors import PayloadError
from gcbench.ops import cpu
from gcbench.ops.cpu import library

pytestmark = pytest.mark.skipif(not cpu.status()[0], reason=cpu.status()[1])

N = 5000
SEGMENTS = Segments.of(((50, 100),), 500)
M = len(SEGMENTS)
WAYS = ("C", "Python")


class Named(Tensor):
    """A subclass that adds nothing."""


@pytest.fixture(autouse=True)
def _served():
    with ops.using("cpu"):
        yield


@pytest.fixture
def ask():
    """Yield what makes C ask torch by another table, or not at all, until the test ends."""
    yield library.c.ask
    library.c.ask(library.exchange())


@pytest.fixture(params=WAYS)
def way(request, ask):
    """Ask torch in C, or do not."""
    if request.param == "Python":
        assert not ask(None)
    return request.param


def places(*tensors: Tensor, dtype: torch.dtype = torch.float32) -> list[int]:
    (found,), kept = library.addresses(((tensors, dtype, tuple(map(Tensor.numel, tensors))),))
    assert kept
    return list(unpack(f"{len(tensors)}Q", found))


# ---- the function --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", library.DTYPES, ids=str)
def test_they_are_those_of_the_tensors(dtype, way):
    whole = torch.zeros(100, dtype=dtype)
    tensors = (whole, whole[3:40], whole[99:], whole[:0], whole[::200], whole[5:5])
    assert places(*tensors, dtype=dtype) == [tensor.data_ptr() for tensor in tensors]


def test_what_kind_of_tensor_it_is_does_not_matter(way):
    plain = torch.zeros(64)
    parameter = torch.nn.Parameter(plain[1:])
    result = torch.ones(8, requires_grad=True) * 2
    tensors = (plain.as_subclass(Named), parameter, result, torch._neg_view(plain))
    assert places(*tensors) == [tensor.data_ptr() for tensor in tensors]


def test_columns_come_one_by_one(way):
    floats, bytes_ = torch.zeros(2, 8).unbind(), torch.zeros(3, 4, dtype=torch.int8).unbind()
    columns = ((floats, torch.float32, (8, 8)), (bytes_, torch.int8, (4, 4, 4)))
    found, _ = library.addresses(columns)
    assert [len(array) for array in found] == [16, 24]
    assert unpack("2Q", found[0]) == tuple(tensor.data_ptr() for tensor in floats)
    assert unpack("3Q", found[1]) == tuple(tensor.data_ptr() for tensor in bytes_)


def test_what_is_not_contiguous_is_copied_and_kept(way):
    strided, flat = torch.arange(20.0)[::2], torch.zeros(10)
    (found,), kept = library.addresses((((flat, strided), torch.float32, (10, 10)),))
    first, second = unpack("2Q", found)
    assert first == flat.data_ptr()
    assert [*(ctypes.c_float * 10).from_address(second)] == strided.tolist()
    assert second in [tensor.data_ptr() for held in kept for tensor in held]


def test_other_shapes_of_as_many_elements_are_taken(way):
    table = torch.zeros(4, 5)
    assert places(table) == [table.data_ptr()]
    assert places(torch.zeros(()), table)[1] == table.data_ptr()


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "short": (lambda: torch.zeros(7), ValueError, "7 torch.float32 on cpu.*: 8 contiguous torch"),
    "long": (lambda: torch.zeros(9), ValueError, "9 torch.float32 on cpu.*: 8 contiguous torch"),
    "wide": (
        lambda: torch.zeros(8, 1).expand(8, 3),
        ValueError,
        r"24 torch.float32 on cpu, strides \(3, 1\): 8 contiguous torch",
    ),
    "double": (lambda: torch.zeros(8).double(), ValueError, "8 torch.float64 on cpu"),
    "integer": (lambda: torch.zeros(8).int(), ValueError, "8 torch.int32 on cpu"),
    "bits": (lambda: torch.zeros(8).half(), ValueError, "8 torch.float16 on cpu"),
    "no data": (lambda: torch.zeros(8, device="meta"), ValueError, "on meta, strides .1,.: 8 "),
    "sparse": (lambda: torch.zeros(8).to_sparse(), RuntimeError, "memory format"),
    "none": (lambda: None, AttributeError, "contiguous"),
    "number": (lambda: 1.5, AttributeError, "contiguous"),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("place", [0, 2])
def test_the_error_says_what_came(kind, place, way):
    make, error, said = WRONG[kind]
    tensors = [torch.zeros(8) for _ in range(3)]
    tensors[place] = make()
    with pytest.raises(error, match=said):
        library.addresses(((tuple(tensors), torch.float32, (8, 8, 8)),))


@pytest.mark.parametrize(("number", "said"), [(1, "shorter"), (3, "longer")])
def test_lengths_are_as_many_as_tensors(number, said, way):
    with pytest.raises(ValueError, match=said):
        library.addresses((((torch.zeros(8),) * 2, torch.float32, (8,) * number),))


def test_a_check_speaks_before_the_address(way):
    def check() -> None:
        raise IndexError("mine")

    with pytest.raises(IndexError, match="mine"):
        library.addresses((((torch.zeros(7),), torch.float32, (8,)),), check)
    if way == "C":  # and is not made where there is nothing to say
        assert library.addresses((((torch.zeros(8),), torch.float32, (8,)),), check)


# ---- of one tensor -------------------------------------------------------------------------------

CONTIGUOUS: dict[str, Callable[[], Tensor]] = {
    "a row": lambda: torch.zeros(12),
    "rows": lambda: torch.zeros(3, 4),
    "a part": lambda: torch.zeros(6, 4)[2:5],
    "of length 1": lambda: torch.zeros(12, 7)[:, :1].as_strided((1, 12, 1), (5, 1, 99)),
    "a parameter": lambda: torch.nn.Parameter(torch.zeros(2, 2, 3)),
}
OTHERWISE: dict[str, Callable[[], Tensor]] = {
    "short": lambda: torch.zeros(11),
    "of another dtype": lambda: torch.zeros(12).double(),
    "transposed": lambda: torch.zeros(4, 3).T,
    "strided": lambda: torch.zeros(24)[::2],
    "expanded": lambda: torch.zeros(1).expand(12),
    "elsewhere": lambda: torch.zeros(12, device="meta"),
}


@pytest.mark.parametrize("kind", CONTIGUOUS)
def test_any_contiguous_tensor_has_an_address(kind, way):
    tensor = CONTIGUOUS[kind]()
    assert library.c.gc_tensor_address(tensor, torch.float32, 12) == tensor.data_ptr()


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3)])
def test_what_holds_nothing_is_taken(shape, way):
    assert library.c.gc_tensor_address(torch.zeros(shape), torch.float32, 0) == 0


@pytest.mark.parametrize("kind", OTHERWISE)
def test_another_tensor_has_none(kind, way):
    with pytest.raises(ValueError, match="12 contiguous torch"):
        library.c.gc_tensor_address(OTHERWISE[kind](), torch.float32, 12)


# ---- of the payloads of a mean -------------------------------------------------------------------

LAYOUT = ((torch.int32, 3), (torch.float32, 8), (torch.float32, 8))


def coded(count: int) -> tuple[Any, ...]:
    words = torch.zeros(3, dtype=torch.int32)
    return words, (torch.zeros(8), torch.zeros(10)[1:9]), count


def test_a_mean_gets_columns_and_counts(way):
    payloads = [coded(1), coded(5), coded(2**24 + 1)]
    (words, low, high, counts, number, total), kept = library.summands(payloads, LAYOUT)
    for column, of in ((words, 0), (low, 1), (high, 2)):
        flat = [(first, *rest) for first, rest, _ in payloads]
        assert unpack("3Q", column) == tuple(payload[of].data_ptr() for payload in flat)
    assert unpack("3f", counts) == (1, 5, 2**24)  # float32, as the definition divides
    assert (number, total) == (3, 2**24 + 7)
    assert kept


BROKEN: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no payload": (lambda: [], ValueError, "no payloads"),
    "another dtype": (lambda: [(coded(1)[0].long(), *coded(1)[1:])], ValueError, "3 torch.int64"),
    "a short part": (
        lambda: [(coded(1)[0], (torch.zeros(8), torch.zeros(7)), 1)],
        ValueError,
        "7 torch.float32 on cpu",
    ),
    "a part less": (lambda: [(coded(1)[0], (torch.zeros(8),), 1)], ValueError, "shorter|longer"),
    "a part more": (lambda: [(torch.zeros(8), *coded(1))], ValueError, "shorter|longer"),
    "a list": (
        lambda: [(coded(1)[0], list(coded(1)[1])[:1], 1)],
        ValueError,
        "shorter|longer",
    ),
    "parts of one": (lambda: [coded(1), (coded(1)[0], 1)], ValueError, "shorter|longer"),
    "no count": (lambda: [coded(1)[:2]], ValueError, "shorter|longer"),
    "a word for a count": (lambda: [(*coded(1)[:2], "x")], Exception, "float|str"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_wrong_in_a_mean_is_said(kind, way):
    make, error, said = BROKEN[kind]
    with pytest.raises(error, match=said):
        library.summands(make(), LAYOUT)


def test_parts_of_a_mean_are_copied_where_they_are_not_contiguous(way):
    strided = torch.arange(6, dtype=torch.int32)[::2]
    (words, _, number, total), _kept = library.summands([(strided, 4)], ((torch.int32, 3),))
    (first,) = unpack("Q", words)
    assert [*(ctypes.c_int32 * 3).from_address(first)] == [0, 2, 4]
    assert (number, total) == (1, 4)


# ---- torch is asked, if it can be ----------------------------------------------------------------


def test_torch_is_asked_in_c(monkeypatch, ask):
    """Nothing falls back without being seen: this torch has the functions, and they serve."""
    monkeypatch.setattr(library, "address", None)
    monkeypatch.setattr(library, "_flat", None)
    assert ask(library.exchange())
    tensor = torch.zeros(8)
    assert places(tensor) == [tensor.data_ptr()]
    assert library.c.gc_tensor_address(tensor, torch.float32, 8) == tensor.data_ptr()
    assert library.summands([(tensor, 1)], ((torch.float32, 8),))


def test_nothing_is_left_behind():
    """Neither where tensors are taken nor where the second column is refused."""
    tensors = torch.zeros(8), torch.zeros(8)
    for dtype in (torch.float32, torch.int32):
        columns = ((tensors, torch.float32, (8, 8)), (tensors, dtype, (8, 8)))
        before = sys.getallocatedblocks()
        for _ in range(1000):
            library.c.gc_tensor_addresses(columns, 1)
            for count in (1, "x"):
                payloads = [(tensors[0], 1), (tensors[1], count)]
                library.c.gc_tensor_columns(payloads, ((dtype, 8),))
            with suppress(ValueError):
                library.c.gc_tensor_address(tensors[0], dtype, 8)
            library.c.ask(library.exchange())
        refused = (tensors[:1] * 2, torch.float32, (8, 7))
        for _ in range(1000):
            library.c.gc_tensor_addresses((refused,), 1)
        assert sys.getallocatedblocks() - before < 100


def test_a_torch_without_it_is_served(monkeypatch):
    isa, asked = library.c.isa, []
    with cpu.using_isa(isa), monkeypatch.context() as hidden:
        hidden.delattr(torch.Tensor, "__dlpack_c_exchange_api__")
        assert library.exchange() is None
        serve = library.address
        hidden.setattr(library, "address", lambda *args: asked.append(args) or serve(*args))
        library.c.load(isa)
        tensor = torch.zeros(8)
        assert places(tensor) == [tensor.data_ptr()]
        assert len(asked) == 1
    assert places(tensor) == [tensor.data_ptr()]
    assert len(asked) == 1


class Table(ctypes.Structure):
    """As DLPackExchangeAPI."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("older", ctypes.c_void_p),
        ("functions", ctypes.c_void_p * 5),
    )


def test_only_the_known_version_is_used(ask):
    """A newer one leads to an older; one that has not this function is not asked."""
    exchange = library.exchange()
    assert exchange
    known = Table.from_address(exchange)
    assert known.major == 1
    newer = Table(major=2, older=exchange)
    only = Table(major=2, functions=known.functions)
    without = Table.from_buffer_copy(known)
    without.functions[3] = None
    tensor = torch.zeros(8)
    columns = (((tensor,), torch.float32, (8,)),)
    for table, found in ((known, True), (newer, True), (only, False), (without, False)):
        assert ask(ctypes.addressof(table)) is found
        given = library.c.gc_tensor_addresses(columns, 1)
        assert given == ((tensor.data_ptr().to_bytes(8, "little"),) if found else ())


class View(ctypes.Structure):
    """As DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("dimensions", ctypes.c_int32),
        ("kind", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    )


LOOK = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(View))


@pytest.mark.parametrize(
    ("change", "moved"),
    [
        ({}, 0),
        ({"offset": 12}, 12),
        ({"device": (ctypes.c_int32 * 2)(2, 0)}, None),
        ({"kind": 0}, None),
        ({"bits": 16}, None),
        ({"lanes": 2}, None),
        ({"dimensions": 2}, None),
        ({"strides": None}, None),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_all_of_a_view_is_read(change, moved, ask):
    """Of a GPU's, and of what no torch says yet."""
    exchange = library.exchange()
    assert exchange
    table = Table.from_buffer_copy(Table.from_address(exchange))
    real = ctypes.cast(table.functions[3], LOOK)

    def look(tensor, view):
        failed = real(tensor, view)
        for field, value in change.items():
            setattr(view.contents, field, value)
        return failed

    kept = LOOK(look)
    table.functions[3] = ctypes.cast(kept, ctypes.c_void_p).value
    tensor = torch.zeros(8)
    assert ask(ctypes.addressof(table))
    given = library.c.gc_tensor_addresses((((tensor,), torch.float32, (8,)),), 1)
    if moved is None:
        assert given == ()
    else:
        assert given == ((tensor.data_ptr() + moved).to_bytes(8, "little"),)


# ---- the operations ------------------------------------------------------------------------------

SCALE, KEY = torch.ones(M), Key(1, 2, 0)
Call = Callable[[list[Any]], Any]


def gradient(rank: int) -> Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(rank))


def ternary(rank: int, bits: int = 2) -> Tensor:
    return ops.pack(torch.randint(0, 3, (N,), generator=torch.Generator().manual_seed(rank)), bits)


def counts(number: int) -> list[int]:
    return [1 + (i == 1) for i in range(number)]


OPERATIONS: dict[str, tuple[Callable[[int], Any], Call]] = {
    "ternary_mean": (
        ternary,
        lambda words: ops.ternary_mean([(word, 1) for word in words], SCALE, SEGMENTS),
    ),
    "ternary_merge": (
        ternary,
        lambda words: ops.ternary_merge([(word, 1) for word in words], N),
    ),
    "ternary_merge of sums": (
        lambda rank: ternary(rank, 3 if rank == 1 else 2),
        lambda words: ops.ternary_merge(list(zip(words, counts(len(words)), strict=True)), N),
    ),
    "sign_vote": (
        lambda rank: ops.sign_pack(gradient(rank)),
        lambda words: ops.sign_vote(words, counts(len(words)), [1] * len(words), N, "", width=1),
    ),
    "sign_vote of votes": (
        lambda rank: ops.sign_pack(gradient(rank), 1 + rank % 2),
        lambda words: ops.sign_vote(
            words, [1] * len(words), [1 + i % 2 for i in range(len(words))], N, "", width=2
        ),
    ),
    "sign_mean": (
        lambda rank: ops.class_encode(gradient(rank), SEGMENTS),
        lambda coded: ops.sign_mean(
            [
                (words, (low, high), count)
                for (words, low, high), count in zip(coded, counts(len(coded)), strict=True)
            ],
            SEGMENTS,
            "",
        ),
    ),
    "int8_mean": (
        lambda rank: ops.int8_encode(gradient(rank), SEGMENTS, "nearest", KEY),
        lambda coded: ops.int8_mean(
            [(*parts, count) for parts, count in zip(coded, counts(len(coded)), strict=True)],
            SEGMENTS,
        ),
    ),
    "half_mean": (
        lambda rank: gradient(rank).bfloat16(),
        lambda codes: ops.half_mean(list(zip(codes, counts(len(codes)), strict=True)), ""),
    ),
    "natural_mean": (
        lambda rank: ops.natural_encode(gradient(rank), KEY),
        lambda words: ops.natural_mean(list(zip(words, counts(len(words)), strict=True)), N, ""),
    ),
    "scatter_mean": (
        lambda rank: (gradient(rank)[: 40 + rank], torch.arange(40 + rank) * 7 + rank),
        lambda sparse: ops.scatter_mean(sparse, N, 3),
    ),
}


def strided(tensor: Tensor) -> Tensor:
    return tensor.repeat_interleave(2)[::2]


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "none": lambda tensor: tensor,
    "strided": strided,
    "parameter": lambda tensor: torch.nn.Parameter(tensor, requires_grad=False),
    "subclass": lambda tensor: tensor.as_subclass(Named),
    "short": lambda tensor: tensor[1:],
    "empty": lambda tensor: tensor[:0],
    "a row": lambda tensor: tensor[None],
    "double": lambda tensor: tensor.double(),
    "meta": lambda tensor: tensor.to("meta"),
}


def outcome(call: Call, payloads: list[Any]) -> Any:
    """Return the bytes that come, or what is raised, with its message."""
    try:
        result = call(payloads)
    except Exception as error:
        return type(error), str(error)
    tensors = [result] if isinstance(result, Tensor) else [result[0]]
    return [tensor.numpy().tobytes() for tensor in tensors]


def cases() -> list[Any]:
    found = []
    for name, (make, _) in OPERATIONS.items():
        parts = 1 if isinstance(make(0), Tensor) else len(make(0))
        found += [pytest.param(name, part, id=f"{name} {part}") for part in range(parts)]
    return found


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("name", "part"), cases())
def test_operations_do_the_same_both_ways(name, part, change, ask):
    """Bytes or error; and what is only laid out otherwise changes no byte."""
    make, call = OPERATIONS[name]
    payloads = [make(rank) for rank in range(3)]
    right = outcome(call, payloads)
    assert isinstance(right, list)
    changed = payloads[1]
    if isinstance(changed, Tensor):
        payloads[1] = CHANGES[change](changed)
    else:
        payloads[1] = tuple(
            CHANGES[change](tensor) if i == part else tensor for i, tensor in enumerate(changed)
        )
    fast = outcome(call, payloads)
    assert not ask(None)
    assert outcome(call, payloads) == fast
    if change in ("none", "strided", "parameter", "subclass"):
        assert fast == right
    elif change != "a row":
        assert isinstance(fast, tuple)
        if part == 0 and change != "meta" and name.startswith(("ternary", "sign", "natural")):
            assert fast[0] is PayloadError


@pytest.mark.parametrize("name", [name for name in OPERATIONS if "vote" not in name])
def test_no_payloads_are_refused(name):
    with pytest.raises((ValueError, IndexError), match=r"no payloads|out of range"):
        OPERATIONS[name][1]([])


def test_votes_have_a_count_and_bits_each():
    words = [ops.sign_pack(gradient(rank)) for rank in range(3)]
    for numbers, bits in (([1] * 2, [1] * 3), ([1] * 3, [1] * 2), ([1] * 4, [1] * 3)):
        with pytest.raises(Exception, match=r"shorter|longer|expected [23]"):
            ops.sign_vote(words, numbers, bits, N, "", width=1)
