"""What is timed: one entry for each operation, and four or five for each method.

An operation's entry is a function that prepares one call: inputs, preallocated outputs, and the
bytes that it has to move. A method is timed through the contract, so a new one needs no entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import eager
from benchmarks.sizes import SIZES, Shapes, numel
from compressors import demo
from gcbench import ops
from gcbench.core import codec, registry
from gcbench.core.compressor import (
    Compressor,
    Context,
    Key,
    MultiRoundCompressor,
    Payload,
    Segments,
    fuses_feedback,
    layout_bytes,
)

KEY = Key(1, 2, 0)
WORKERS = 8
CLIP = 2.5
LEVELS, BUCKET = 7, 512  # QSGD in 4 bits
BLOCK = 256  # of int8 and fp8
ROTATED = 128  # elements that are rotated together
RATIO = 0.01
REACHED = 2.5758  # by the magnitudes of 1 % of normal numbers
RANGE = 10, 6  # bits, and those of the mantissa
TWICE = 8
"""Bytes per element that are read again where a mean of a whole tensor decides about a residual."""


class Gradient:
    """One worker's gradient, normally distributed, as a flat tensor and as a list of tensors."""

    def __init__(self, shapes: Shapes, device: str = "cpu") -> None:
        self.shapes, self.n, self.device = shapes, numel(shapes), device
        generator = torch.Generator().manual_seed(self.n)
        self.x = torch.randn(self.n, generator=generator).to(device)
        self.copied = torch.zeros_like(self.x)

    @cached_property
    def tensors(self) -> list[Tensor]:
        """Views of `x`, one a tensor."""
        pieces = torch.split(self.x, [numel((shape,)) for shape in self.shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def segments(self, granularity: str | int = "tensor") -> Segments:
        return Segments.of(self.shapes, granularity)

    def of_worker(self, rank: int) -> Tensor:
        """Another worker's gradient: the same values elsewhere."""
        return self.x.roll(4099 * rank)

    def empty(self, dtype: torch.dtype, count: int) -> Tensor:
        """Return an output whose pages have been touched."""
        return torch.zeros(count, dtype=dtype, device=self.device)


class Timed(NamedTuple):
    """A call, and the bytes that it must at least read and write."""

    call: Callable[[], Any]
    moved: int
    reset: Callable[[], Any] | None = None
    """Puts back what the call changes, before each row."""


Prepare = Callable[[Gradient], Timed]
Eager = Callable[[Gradient], Callable[[], Any]]


class Case(NamedTuple):
    """One entry: how to prepare the call, and the same in eager torch."""

    name: str
    prepare: Prepare
    eager: Eager | None = None
    op: str | None = None
    """The operation that it times; None: a method through the contract."""
    sizes: Sequence[str] = tuple(SIZES)


CASES: dict[str, Case] = {}
KINDS = ("class", "scaled")


SERVED_BY = {
    **{f"dct_{part}": f"dct.{part}" for part in ("forward", "inverse")},
    **{f"lowrank_{part}": f"lowrank.{part}" for part in ("product", "orthonormalize")},
    **{f"fp8_{part}": f"fp8.{part}" for part in ("encode", "decode")},
    **{f"u8bit_{part}": f"u8bit.{part}" for part in ("encode", "decode")},
    **{f"hadamard_{part}": f"hadamard.{part}" for part in ("rotate", "encode", "decode")},
    "half.decode": "half.mean",
    "natural.decode": "natural.mean",
    "selection.pack_positions": "selection.pack_gaps",
    "selection.unpack_positions": "selection.unpack_gaps",
    **{f"sign.{kind}_{part}": "sign.encode" for kind in KINDS for part in ("encode", "feedback")},
    **{f"sign.{kind}_decode": "sign.values" for kind in KINDS},
}
"""What callers call, and the operation behind it, where the names differ."""


def case(
    name: str, eager: Eager | None = None, *, op: str | None = None
) -> Callable[[Prepare], Prepare]:
    """Register a preparing function as `name`.

    `op`: the operation that it times. None: its family is the part of `name` before the first _,
    and a number at the end says how many payloads it takes.
    """
    called = op or name.rstrip("0123456789").replace("_", ".", 1)

    def enter(prepare: Prepare) -> Prepare:
        CASES[name] = Case(name, prepare, eager, SERVED_BY.get(called, called))
        return prepare

    return enter


def nbytes(*parts: Any) -> int:
    """Return the bytes of tensors, payloads, and sequences of them."""
    return sum(
        part.nbytes if isinstance(part, Tensor | Payload) else nbytes(*part)
        for part in parts
        if part is not None
    )


def each(function: Callable[..., Any], *coders: Callable[[Tensor], Any]) -> Eager:
    """Return eager torch that calls `function` for every tensor, one after the other.

    Its arguments are what the `coders` make of the tensor before the clock starts; without
    coders, the tensor itself.
    """

    def make(gradient: Gradient) -> Callable[[], Any]:
        inputs = [
            tuple(coder(tensor) for coder in coders) or (tensor,) for tensor in gradient.tensors
        ]
        return lambda: [function(*arguments) for arguments in inputs]

    return make


def itself(tensor: Tensor) -> Tensor:
    return tensor


def eight(coder: Callable[[Tensor], Any]) -> Callable[[Tensor], list[Any]]:
    """Return what makes the payloads of eight workers from one tensor."""
    return lambda tensor: [coder(tensor.roll(4099 * rank)) for rank in range(WORKERS)]


# ---- operations ----------------------------------------------------------------------------------


@case("copy_", op="copy_")
def _copy(g: Gradient) -> Timed:
    return Timed(lambda: g.copied.copy_(g.x), 2 * nbytes(g.x))


@case("draws24", op="random.draws24")
def _draws(g: Gradient) -> Timed:
    out = g.empty(torch.int32, g.n)
    return Timed(lambda: ops.random.draws24(KEY, g.n, device=g.device, out=out), nbytes(g.x))


@case("random_words", op="selection.random_words")
def _random_words(g: Gradient) -> Timed:
    return Timed(lambda: ops.selection.random_words(KEY, g.n, device=g.device), nbytes(g.x))


@case("pack", op="packing.pack")
def _pack(g: Gradient) -> Timed:
    codes = (g.x * 4).int().clamp_(-7, 7).add_(7)
    out = ops.packing.pack(codes, 4)
    return Timed(lambda: ops.packing.pack(codes, 4, out=out), nbytes(codes, out))


@case("unpack", op="packing.unpack")
def _unpack(g: Gradient) -> Timed:
    words = ops.packing.pack((g.x * 4).int().clamp_(-7, 7).add_(7), 4)
    out = g.empty(torch.int32, g.n)
    return Timed(lambda: ops.packing.unpack(words, 4, g.n, out=out), nbytes(words, g.x))


# statistics


@case("segment_absmax", each(eager.absmax), op="statistics.absmax")
def _absmax(g: Gradient) -> Timed:
    segments = g.segments()
    return Timed(lambda: ops.statistics.absmax(g.x, segments), nbytes(g.x))


@case("segment_moments", each(eager.moments), op="statistics.moments")
def _moments(g: Gradient) -> Timed:
    segments = g.segments()
    return Timed(lambda: ops.statistics.moments(g.x, segments), nbytes(g.x))


# ternary codes


@case("ternary_scales", each(eager.clipped_max))
def _ternary_scales(g: Gradient) -> Timed:
    segments = g.segments()
    return Timed(lambda: ops.ternary.scales(g.x, segments, CLIP), nbytes(g.x))


@case(
    "ternary_encode",
    each(
        eager.ternary_encode,
        itself,
        lambda tensor: eager.clipped_max(tensor)[0],
        lambda tensor: eager.clipped_max(tensor)[1],
    ),
)
def _ternary_encode(g: Gradient) -> Timed:
    segments = g.segments()
    limit, scale = ops.ternary.scales(g.x, segments, CLIP)
    out = g.empty(torch.int32, ops.packing.packed_words(g.n, 2))
    return Timed(
        lambda: ops.ternary.encode(g.x, limit, scale, segments, KEY, out=out),
        nbytes(g.x, limit, scale, out),
    )


def _ternary_payloads(g: Gradient, count: int) -> tuple[list[tuple[Tensor, int]], Tensor]:
    segments = g.segments()
    limit, scale = ops.ternary.scales(g.x, segments, CLIP)
    return [
        (ops.ternary.encode(g.of_worker(rank), limit, scale, segments, KEY._replace(rank=rank)), 1)
        for rank in range(count)
    ], scale


def _ternary_mean(g: Gradient, count: int) -> Timed:
    payloads, scale = _ternary_payloads(g, count)
    segments, out = g.segments(), g.empty(torch.float32, g.n)
    return Timed(
        lambda: ops.ternary.mean(payloads, scale, segments, out=out),
        nbytes([words for words, _ in payloads], scale, out),
    )


def _terngrad_decode(coded: tuple[Tensor, Tensor]) -> Tensor:
    return eager.ternary_decode(*coded)


_terngrad_mean = eager.mean_of(_terngrad_decode)
case("ternary_mean", each(_terngrad_decode, eager.terngrad))(partial(_ternary_mean, count=1))
case("ternary_mean8", each(_terngrad_mean, eight(eager.terngrad)))(
    partial(_ternary_mean, count=WORKERS)
)


@case("ternary_merge8")
def _ternary_merge(g: Gradient) -> Timed:
    payloads, _ = _ternary_payloads(g, WORKERS)
    out = g.empty(torch.int32, ops.packing.packed_words(g.n, ops.ternary.bits(WORKERS)))
    return Timed(
        lambda: ops.ternary.merge(payloads, g.n, out=out),
        nbytes([words for words, _ in payloads], out),
    )


# signs


@case("sign_pack", each(eager.sign_encode))
def _sign_pack(g: Gradient) -> Timed:
    out = g.empty(torch.int32, ops.packing.packed_words(g.n, 1))
    return Timed(lambda: ops.sign.pack(g.x, out=out), nbytes(g.x, out))


@case("sign_pack_above")
def _sign_pack_above(g: Gradient) -> Timed:
    segments, out = g.segments(), g.empty(torch.int32, ops.packing.packed_words(g.n, 2))
    return Timed(
        lambda: ops.sign.pack_above(g.x, 0.5, segments, out=out), 2 * nbytes(g.x) + nbytes(out)
    )


@case("sign_decode", each(eager.sign_decode, eager.sign_encode))
def _sign_decode(g: Gradient) -> Timed:
    words, out = ops.sign.pack(g.x), g.empty(torch.float32, g.n)
    return Timed(lambda: ops.sign.decode(words, 1, g.n, "", out=out), nbytes(words, out))


@case("sign_vote8", each(eager.vote, eight(eager.sign_encode)))
def _sign_vote(g: Gradient) -> Timed:
    words = [ops.sign.pack(g.of_worker(rank)) for rank in range(WORKERS)]
    ones, out = [1] * WORKERS, g.empty(torch.int32, ops.packing.packed_words(g.n, 1))
    return Timed(
        lambda: ops.sign.vote(words, ones, ones, g.n, "", width=1, out=out), nbytes(words, out)
    )


@case("scaled_encode", each(eager.ef_sign), op="sign.scaled_encode")
def _scaled_encode(g: Gradient) -> Timed:
    segments = g.segments()
    return Timed(
        lambda: ops.sign.scaled_encode(g.x, segments),
        nbytes(g.x, ops.sign.scaled_encode(g.x, segments)),
    )


@case("scaled_decode", each(eager.ef_sign_decode, eager.ef_sign), op="sign.scaled_decode")
def _scaled_decode(g: Gradient) -> Timed:
    segments, out = g.segments(), g.empty(torch.float32, g.n)
    words, scale = ops.sign.scaled_encode(g.x, segments)
    return Timed(
        lambda: ops.sign.scaled_decode(words, scale, segments, "", out=out),
        nbytes(words, scale, out),
    )


@case(
    "scaled_feedback",
    each(eager.ef_sign_feedback, itself, torch.zeros_like),
    op="sign.scaled_feedback",
)
def _scaled_feedback(g: Gradient) -> Timed:
    segments, residual = g.segments(), torch.zeros_like(g.x)
    coded = ops.sign.scaled_encode(g.x, segments)
    return Timed(
        lambda: ops.sign.scaled_feedback(g.x, residual, segments, "", lost=residual),
        nbytes(g.x, residual, residual, coded) + TWICE * g.n,
        residual.zero_,
    )


@case("class_encode", each(eager.onebit), op="sign.class_encode")
def _class_encode(g: Gradient) -> Timed:
    columns = g.segments("column")
    return Timed(
        lambda: ops.sign.class_encode(g.x, columns),
        nbytes(g.x, ops.sign.class_encode(g.x, columns)),
    )


@case("class_decode", each(eager.onebit_decode, eager.onebit), op="sign.class_decode")
def _class_decode(g: Gradient) -> Timed:
    columns, out = g.segments("column"), g.empty(torch.float32, g.n)
    coded = ops.sign.class_encode(g.x, columns)
    return Timed(lambda: ops.sign.class_decode(*coded, columns, "", out=out), nbytes(coded, out))


@case(
    "class_feedback",
    each(eager.onebit_feedback, itself, torch.zeros_like),
    op="sign.class_feedback",
)
def _class_feedback(g: Gradient) -> Timed:
    columns, residual = g.segments("column"), torch.zeros_like(g.x)
    return Timed(
        lambda: ops.sign.class_feedback(g.x, residual, columns, "", lost=residual),
        nbytes(g.x, residual, residual, ops.sign.class_encode(g.x, columns)),
        residual.zero_,
    )


@case("sign_mean8", each(eager.mean_of(eager.onebit_decode), eight(eager.onebit)))
def _sign_mean(g: Gradient) -> Timed:
    columns, out = g.segments("column"), g.empty(torch.float32, g.n)
    coded = [ops.sign.class_encode(g.of_worker(rank), columns) for rank in range(WORKERS)]
    payloads = [(words, (low, high), 1) for words, low, high in coded]
    return Timed(lambda: ops.sign.mean(payloads, columns, "", out=out), nbytes(coded, out))


# levels and blocks


@case("level_norms", op="levels.norms")
def _level_norms(g: Gradient) -> Timed:
    buckets = g.segments(BUCKET)
    norms = ops.levels.norms(g.x, buckets, "max", LEVELS)
    return Timed(lambda: ops.levels.norms(g.x, buckets, "max", LEVELS), nbytes(g.x, norms))


@case("level_codes", op="levels.codes")
def _level_codes(g: Gradient) -> Timed:
    buckets = g.segments(BUCKET)
    norms = ops.levels.norms(g.x, buckets, "max", LEVELS)
    out = g.empty(torch.int32, g.n)
    return Timed(
        lambda: ops.levels.codes(g.x, norms, LEVELS, buckets, KEY, out=out),
        nbytes(g.x, out, norms),
    )


def _level_words(x: Tensor, buckets: Segments) -> tuple[Tensor, Tensor]:
    norms = ops.levels.norms(x, buckets, "max", LEVELS)
    return ops.levels.encode(x, norms, LEVELS, "fixed", buckets, KEY), norms


@case("level_encode", each(eager.qsgd), op="levels.encode")
def _level_encode(g: Gradient) -> Timed:
    buckets = g.segments(BUCKET)
    out, norms = _level_words(g.x, buckets)
    return Timed(
        lambda: ops.levels.encode(g.x, norms, LEVELS, "fixed", buckets, KEY, out=out),
        nbytes(g.x, norms, out),
    )


@case("levels.encode_max", each(eager.qsgd), op="levels.encode_max")
def _level_encode_max(g: Gradient) -> Timed:
    buckets = g.segments(BUCKET)
    out, norms = _level_words(g.x, buckets)
    return Timed(
        lambda: ops.levels.encode_max(g.x, LEVELS, buckets, KEY, out=out),
        nbytes(g.x, norms, out),
    )


@case("level_decode", each(eager.qsgd_decode, eager.qsgd), op="levels.decode")
def _level_decode(g: Gradient) -> Timed:
    buckets, out = g.segments(BUCKET), g.empty(torch.float32, g.n)
    words, norms = _level_words(g.x, buckets)
    return Timed(
        lambda: ops.levels.decode(words, norms, "max", LEVELS, "fixed", buckets, out=out),
        nbytes(words, norms, out),
    )


@case("level_mean8", each(eager.mean_of(eager.qsgd_decode), eight(eager.qsgd)), op="levels.mean")
def _level_mean(g: Gradient) -> Timed:
    buckets, out = g.segments(BUCKET), g.empty(torch.float32, g.n)
    coded = [_level_words(g.of_worker(rank), buckets) for rank in range(WORKERS)]
    payloads = [(words, norms, 1) for words, norms in coded]
    code = ("max", LEVELS, "fixed", buckets)
    return Timed(lambda: ops.levels.mean(payloads, *code, out=out), nbytes(coded, out))


def _omega(g: Gradient, op: str) -> Timed:
    """Prepare writing or reading the stream of codes of 4 levels of the 2-norm."""
    kind = "dense" if "dense" in op else "sparse"
    buckets = g.segments(BUCKET)
    codes = ops.levels.codes(g.x, ops.levels.norms(g.x, buckets, "2", 4), 4, buckets, KEY)
    words = getattr(ops.bitstream, f"omega_{kind}_write")(codes, 4)
    call, arguments = getattr(ops.bitstream, op), (codes, 4) if "write" in op else (words, g.n, 4)
    return Timed(lambda: call(*arguments), nbytes(codes, words))


for _op in ("omega_dense_write", "omega_dense_read", "omega_sparse_write", "omega_sparse_read"):
    case(_op, op=f"bitstream.{_op}")(partial(_omega, op=_op))


@case("int8_encode", each(eager.int8))
def _int8_encode(g: Gradient) -> Timed:
    blocks = g.segments(BLOCK)
    out = coded = ops.int8.encode(g.x, blocks, "nearest", KEY)
    return Timed(lambda: ops.int8.encode(g.x, blocks, "nearest", KEY, out=out), nbytes(g.x, coded))


@case("int8_decode", each(eager.int8_decode, eager.int8))
def _int8_decode(g: Gradient) -> Timed:
    blocks, out = g.segments(BLOCK), g.empty(torch.float32, g.n)
    coded = ops.int8.encode(g.x, blocks, "nearest", KEY)
    return Timed(lambda: ops.int8.decode(*coded, blocks, out=out), nbytes(coded, out))


@case("int8_mean8", each(eager.mean_of(eager.int8_decode), eight(eager.int8)))
def _int8_mean(g: Gradient) -> Timed:
    blocks, out = g.segments(BLOCK), g.empty(torch.float32, g.n)
    coded = [ops.int8.encode(g.of_worker(rank), blocks, "nearest", KEY) for rank in range(WORKERS)]
    payloads = [(codes, scales, 1) for codes, scales in coded]
    return Timed(lambda: ops.int8.mean(payloads, blocks, out=out), nbytes(coded, out))


@case("fp8_encode")
def _fp8_encode(g: Gradient) -> Timed:
    blocks = g.segments(BLOCK)
    out = ops.fp8.encode(g.x, blocks)
    return Timed(lambda: ops.fp8.encode(g.x, blocks, out=out), nbytes(g.x, out))


@case("fp8_decode")
def _fp8_decode(g: Gradient) -> Timed:
    blocks, out = g.segments(BLOCK), g.empty(torch.float32, g.n)
    coded = ops.fp8.encode(g.x, blocks)
    return Timed(lambda: ops.fp8.decode(*coded, blocks, "", out=out), nbytes(coded, out))


@case("u8bit_encode")
def _u8bit_encode(g: Gradient) -> Timed:
    segments = g.segments()
    out = ops.u8bit.encode(g.x, segments)
    return Timed(lambda: ops.u8bit.encode(g.x, segments, out=out), nbytes(g.x, g.x, out))


@case("u8bit_decode")
def _u8bit_decode(g: Gradient) -> Timed:
    segments, out = g.segments(), g.empty(torch.float32, g.n)
    coded = ops.u8bit.encode(g.x, segments)
    return Timed(lambda: ops.u8bit.decode(*coded, segments, "", out=out), nbytes(coded, out))


def _blockfloat(g: Gradient, kind: str, decode: bool) -> Timed:
    """Prepare encoding or decoding in 4 bits."""
    segments, out = g.segments(BLOCKS[kind]), g.empty(torch.float32, g.n)
    code = (ops.blockfloat.E2M1,) if kind == "mx" else ()
    encode = partial(getattr(ops.blockfloat, f"encode_{kind}"), g.x, *code, segments)
    coded = encode()
    if not decode:
        return Timed(lambda: encode(out=coded), nbytes(g.x, coded))
    decoder = partial(getattr(ops.blockfloat, f"decode_{kind}"), coded, *code, segments, "")
    return Timed(lambda: decoder(out=out), nbytes(coded, out))


BLOCKS: Mapping[str, str | int] = {"mx": 32, "nv": "tensor"}
for _kind in BLOCKS:
    for _part in ("encode", "decode"):
        _name = f"blockfloat.{_part}_{_kind}"
        case(_name, op=_name)(partial(_blockfloat, kind=_kind, decode=_part == "decode"))


# rotations


@case("hadamard_rotate")
def _hadamard_rotate(g: Gradient) -> Timed:
    blocks, out = g.segments(ROTATED), g.empty(torch.float32, g.n)
    return Timed(lambda: ops.hadamard.rotate(g.x, blocks, out=out), nbytes(g.x, out))


@case("hadamard_encode")
def _hadamard_encode(g: Gradient) -> Timed:
    blocks = g.segments(ROTATED)
    out = ops.hadamard.encode(g.x, blocks)
    return Timed(lambda: ops.hadamard.encode(g.x, blocks, out=out), nbytes(g.x, out))


@case("hadamard_decode")
def _hadamard_decode(g: Gradient) -> Timed:
    blocks, out = g.segments(ROTATED), g.empty(torch.float32, g.n)
    coded = ops.hadamard.encode(g.x, blocks)
    return Timed(lambda: ops.hadamard.decode(*coded, blocks, "", out=out), nbytes(coded, out))


def _eden_code(g: Gradient) -> tuple[Segments, Any]:
    """Return the blocks, and the call that encodes in 4 bits with two rotations."""
    blocks = g.segments(1024)
    return blocks, partial(ops.eden.encode, g.x, 4, 2, False, blocks, KEY)


@case("eden_encode")
def _eden_encode(g: Gradient) -> Timed:
    _, encode = _eden_code(g)
    out = encode()
    return Timed(lambda: encode(out=out), nbytes(g.x, out))


@case("eden_decode")
def _eden_decode(g: Gradient) -> Timed:
    (blocks, encode), out = _eden_code(g), g.empty(torch.float32, g.n)
    coded = encode()
    return Timed(lambda: ops.eden.decode(coded, 4, 2, blocks, "", out=out), nbytes(coded, out))


@case("dct_forward")
def _dct_forward(g: Gradient) -> Timed:
    return _dct(g, ops.dct.forward)


@case("dct_inverse")
def _dct_inverse(g: Gradient) -> Timed:
    return _dct(g, ops.dct.inverse)


def _dct(g: Gradient, transform: Callable[..., Tensor]) -> Timed:
    chunks = [ops.dct.Chunks(*cut[:5]) for cut in demo.cut_chunks(g.segments(), 64, 32)]
    out = g.empty(torch.float32, g.n)
    return Timed(lambda: transform(g.x, chunks, out=out), nbytes(g.x, out))


@case("lowrank_product")
def _lowrank_product(g: Gradient) -> Timed:
    """Rank 2, with rows of 1000 elements."""
    left, right = g.x[: g.n // 1000 * 2].view(2, -1), g.x[:2000].view(2, -1)
    out = g.empty(torch.float32, g.n // 1000 * 1000)
    return Timed(lambda: ops.lowrank.product(left, right, out=out), nbytes(left, right, out))


@case("lowrank_orthonormalize")
def _lowrank_orthonormalize(g: Gradient) -> Timed:
    """Two vectors, each of half of the elements."""
    rows, out = g.x[: g.n // 2 * 2].view(2, -1), g.empty(torch.float32, g.n // 2 * 2)
    return Timed(lambda: ops.lowrank.orthonormalize(rows, out=out), nbytes(rows, out))


# formats of floats


@case("half_encode", each(torch.Tensor.half))
def _half_encode(g: Gradient) -> Timed:
    out = g.empty(torch.float16, g.n)
    return Timed(lambda: ops.half.encode(g.x, torch.float16, out=out), nbytes(g.x, out))


@case("half_decode", each(torch.Tensor.float, torch.Tensor.half))
def _half_decode(g: Gradient) -> Timed:
    codes, out = ops.half.encode(g.x, torch.float16), g.empty(torch.float32, g.n)
    return Timed(lambda: ops.half.decode(codes, "", out=out), nbytes(codes, out))


@case("half_mean8", each(eager.mean_of(torch.Tensor.float), eight(torch.Tensor.half)))
def _half_mean(g: Gradient) -> Timed:
    payloads = [(ops.half.encode(g.of_worker(rank), torch.float16), 1) for rank in range(WORKERS)]
    out = g.empty(torch.float32, g.n)
    return Timed(
        lambda: ops.half.mean(payloads, "", out=out), nbytes([codes for codes, _ in payloads], out)
    )


@case("lossless_encode", op="lossless.split")
def _lossless_encode(g: Gradient) -> Timed:
    values, blocks = g.x.bfloat16(), g.segments(4096)
    coded = ops.lossless.encode(values, blocks)
    return Timed(lambda: ops.lossless.encode(values, blocks), nbytes(values, coded))


@case("lossless_decode", op="lossless.join")
def _lossless_decode(g: Gradient) -> Timed:
    values, blocks = g.x.bfloat16(), g.segments(4096)
    coded, out = ops.lossless.encode(values, blocks), g.empty(torch.bfloat16, g.n)
    return Timed(lambda: ops.lossless.decode(coded, blocks, "", out=out), nbytes(values, coded))


@case("natural_encode", each(eager.natural))
def _natural_encode(g: Gradient) -> Timed:
    out = g.empty(torch.int32, ops.packing.packed_words(g.n, ops.natural.BITS))
    return Timed(lambda: ops.natural.encode(g.x, KEY, out=out), nbytes(g.x, out))


@case("natural_decode")
def _natural_decode(g: Gradient) -> Timed:
    words, out = ops.natural.encode(g.x, KEY), g.empty(torch.float32, g.n)
    return Timed(lambda: ops.natural.decode(words, g.n, "", out=out), nbytes(words, out))


@case("natural_mean8")
def _natural_mean(g: Gradient) -> Timed:
    payloads = [(ops.natural.encode(g.of_worker(rank), KEY), 1) for rank in range(WORKERS)]
    out = g.empty(torch.float32, g.n)
    return Timed(
        lambda: ops.natural.mean(payloads, g.n, "", out=out),
        nbytes([words for words, _ in payloads], out),
    )


# selection


def _selected(g: Gradient) -> tuple[Sequence[ops.selection.KeptRun], Tensor, Tensor]:
    """Return the runs, and positions and values of the largest 1 % of each tensor."""
    runs = ops.selection.kept_runs(g.segments(), RATIO)
    return runs, *ops.selection.largest_elements(g.x, runs)


@case("largest_elements", each(eager.topk), op="selection.largest_elements")
def _largest_elements(g: Gradient) -> Timed:
    runs, positions, values = _selected(g)
    return Timed(lambda: ops.selection.largest_elements(g.x, runs), nbytes(g.x, positions, values))


@case("reaching", op="selection.reaching")
def _reaching(g: Gradient) -> Timed:
    segments = g.segments()
    selected = ops.selection.reaching(g.x, segments, REACHED)
    return Timed(lambda: ops.selection.reaching(g.x, segments, REACHED), nbytes(g.x, g.x, selected))


@case("random_positions", op="selection.random_positions")
def _random_positions(g: Gradient) -> Timed:
    runs, positions, _ = _selected(g)
    return Timed(
        lambda: ops.selection.random_positions(KEY, runs, device=g.device), nbytes(positions)
    )


@case("gather", op="selection.gather")
def _gather(g: Gradient) -> Timed:
    _, positions, values = _selected(g)
    return Timed(lambda: ops.selection.gather(g.x, positions), nbytes(positions, values, values))


@case("scatter", each(eager.topk_decode, eager.topk), op="selection.scatter")
def _scatter(g: Gradient) -> Timed:
    _, positions, values = _selected(g)
    out = g.empty(torch.float32, g.n)
    return Timed(
        lambda: ops.selection.scatter(values, positions, g.n, out=out),
        nbytes(positions, values, out),
    )


@case(
    "scatter_mean8",
    each(eager.mean_of(eager.topk_decode), eight(eager.topk)),
    op="selection.scatter_mean",
)
def _scatter_mean(g: Gradient) -> Timed:
    runs, out = ops.selection.kept_runs(g.segments(), RATIO), g.empty(torch.float32, g.n)
    sparse = [
        (values, positions)
        for positions, values in (
            ops.selection.largest_elements(g.of_worker(rank), runs) for rank in range(WORKERS)
        )
    ]
    return Timed(
        lambda: ops.selection.scatter_mean(sparse, g.n, WORKERS, out=out), nbytes(*sparse, out)
    )


@case("pack_positions", op="selection.pack_positions")
def _pack_positions(g: Gradient) -> Timed:
    _, positions, _ = _selected(g)
    parts = ops.selection.pack_positions(positions, g.n, "smallest")
    return Timed(
        lambda: ops.selection.pack_positions(positions, g.n, "smallest"), nbytes(positions, parts)
    )


@case("unpack_positions", op="selection.unpack_positions")
def _unpack_positions(g: Gradient) -> Timed:
    runs, positions, _ = _selected(g)
    parts = ops.selection.pack_positions(positions, g.n, "smallest")
    return Timed(
        lambda: ops.selection.unpack_positions(parts, g.n, "smallest", runs, ""),
        nbytes(positions, parts),
    )


@case("range_pack", op="rangefloat.pack")
def _range_pack(g: Gradient) -> Timed:
    groups = [(1, g.n)]
    out, grids = ops.rangefloat.pack(g.x, groups, *RANGE)
    return Timed(
        lambda: ops.rangefloat.pack(g.x, groups, *RANGE, out=(out, grids)),
        nbytes(g.x, g.x, out, grids),
    )


@case("range_unpack", op="rangefloat.unpack")
def _range_unpack(g: Gradient) -> Timed:
    coded, out = ops.rangefloat.pack(g.x, [(1, g.n)], *RANGE), g.empty(torch.float32, g.n)
    return Timed(
        lambda: ops.rangefloat.unpack(*coded, [(1, g.n)], *RANGE, "", out=out), nbytes(coded, out)
    )


# ---- spectra -------------------------------------------------------------------------------------


def halves(g: Gradient) -> Tensor:
    """Return the gradient as n // 2 complex numbers."""
    return torch.view_as_complex(g.x[: g.n // 2 * 2].view(-1, 2))


@case("spectrum_scaled")
def _spectrum_scaled(g: Gradient) -> Timed:
    segments, out = g.segments(), g.empty(torch.float32, g.n)
    return Timed(
        lambda: ops.spectrum.scaled(g.x, segments, 1.0, 0.0, out=out), nbytes(g.x, g.x, out)
    )


@case("spectrum_unscaled")
def _spectrum_unscaled(g: Gradient) -> Timed:
    bins = torch.view_as_real(halves(g)).reshape(-1)
    segments, unit = Segments((0, len(bins))), torch.ones(1, device=g.x.device)
    out, energy = torch.zeros_like(bins), g.empty(torch.float32, len(bins) // 2)
    return Timed(
        lambda: ops.spectrum.unscaled(bins, unit, segments, out=out, energy=energy),
        nbytes(bins, out) + nbytes(bins) // 2,
    )


@case("spectrum_restored")
def _spectrum_restored(g: Gradient) -> Timed:
    segments = g.segments()
    unit = torch.ones(len(segments), device=g.x.device)
    out = g.empty(torch.float32, g.n)
    return Timed(lambda: ops.spectrum.restored(g.x, unit, segments, out=out), nbytes(g.x, out))


@case("spectrum_mean")
def _spectrum_mean(g: Gradient) -> Timed:
    """Return the sum of four spectra, of which 15 % of the bins are kept."""
    bins = g.n // 2
    values = halves(g)[::7]
    selected = torch.arange(0, bins, 7, device=g.x.device)
    sparse = [(selected, torch.view_as_real(values).contiguous())] * 4
    out = g.empty(torch.float32, 2 * bins).view(bins, 2)
    return Timed(lambda: ops.spectrum.mean(sparse, [0.25] * 4, bins, out=out), nbytes(*sparse, out))


@case("spectrum_fold", op="transform.fold")
def _spectrum_fold(g: Gradient) -> Timed:
    x = halves(g)
    factors, out = torch.ones_like(x[: len(x) // 2 + 1]), x.new_empty(len(x) + 1)
    return Timed(lambda: ops.transform.fold(x, factors, 0.5, out=out), nbytes(x, factors, out))


# ---- methods -------------------------------------------------------------------------------------

AGAIN: Mapping[str, int] = {"efsignsgd.encode_feedback": TWICE}
"""Bytes per element that are read again, as a statistic of a whole tensor decides about each."""

EAGER: Mapping[str, Eager] = {
    "bf16.encode": each(torch.Tensor.bfloat16),
    "bf16.decode": each(torch.Tensor.float, torch.Tensor.bfloat16),
    "efsignsgd.encode": each(eager.ef_sign),
    "efsignsgd.encode_feedback": each(eager.ef_sign_feedback, itself, torch.zeros_like),
    "efsignsgd.decode": each(eager.ef_sign_decode, eager.ef_sign),
    "efsignsgd.mean8": each(eager.mean_of(eager.ef_sign_decode), eight(eager.ef_sign)),
    "fft.encode": each(eager.fft),
    "fp16.encode": each(torch.Tensor.half),
    "fp16.decode": each(torch.Tensor.float, torch.Tensor.half),
    "int8.encode": each(eager.int8),
    "int8.decode": each(eager.int8_decode, eager.int8),
    "int8.mean8": each(eager.mean_of(eager.int8_decode), eight(eager.int8)),
    "natural.encode": each(eager.natural),
    "onebit.encode": each(eager.onebit),
    "onebit.encode_feedback": each(eager.onebit_feedback, itself, torch.zeros_like),
    "onebit.decode": each(eager.onebit_decode, eager.onebit),
    "onebit.mean8": each(eager.mean_of(eager.onebit_decode), eight(eager.onebit)),
    "qsgd.encode": each(eager.qsgd),
    "qsgd.decode": each(eager.qsgd_decode, eager.qsgd),
    "qsgd.mean8": each(eager.mean_of(eager.qsgd_decode), eight(eager.qsgd)),
    "randomk.encode": each(eager.randomk),
    "randomk.decode": each(eager.topk_decode, eager.randomk),
    "signsgd.encode": each(eager.sign_encode),
    "signsgd.decode": each(eager.sign_decode, eager.sign_encode),
    "signsgd.mean8": each(eager.vote_values, eight(eager.sign_encode)),
    "signsgd.merge8": each(eager.vote, eight(eager.sign_encode)),
    "terngrad.statistic": each(eager.clipped_max),
    "terngrad.agree_encode": each(eager.terngrad),
    "terngrad.decode": each(_terngrad_decode, eager.terngrad),
    "terngrad.mean8": each(_terngrad_mean, eight(eager.terngrad)),
    "topk.encode": each(eager.topk),
    "topk.encode_feedback": each(eager.topk_feedback, itself, torch.zeros_like),
    "topk.decode": each(eager.topk_decode, eager.topk),
    "topk.mean8": each(eager.mean_of(eager.topk_decode), eight(eager.topk)),
}
"""The methods' parts that research repositories write in a few lines of torch."""


FIELDS: Mapping[str, Mapping[str, Any]] = {"threshold": {"threshold": REACHED}}
"""Hyper-parameters, where a default is for gradients much smaller than normal numbers."""


class Method:
    """A method with what its parts take, as an exchange calls them: outputs exist."""

    def __init__(self, name: str, gradient: Gradient) -> None:
        self.name, self.g = name, gradient
        self.method: Compressor = registry.compressor(name, **FIELDS.get(name, {}))
        self.segments = gradient.segments(self.method.granularity)
        ctx = Context(self.segments, key=KEY)
        shared, (prepared,) = codec.agree(self.method, [gradient.x], ctx)
        self.ctx = ctx._replace(shared=shared, prepared=prepared)
        self.out = gradient.empty(torch.float32, gradient.n)

    def slots(self, count: int = 1) -> tuple[Tensor, ...] | None:
        layout = self.method.layout(self.segments, count)
        if layout is None:
            return None
        return Payload.over(self.g.empty(torch.uint8, layout_bytes(layout)), layout, count).parts

    def payloads(self, count: int) -> list[Payload]:
        return [
            codec.encode(
                self.method,
                self.g.of_worker(rank),
                self.ctx._replace(key=KEY._replace(rank=rank), prepared=None),
            )
            for rank in range(count)
        ]

    def statistic(self) -> Timed:
        return Timed(
            lambda: codec.prepare(self.method, self.g.x, Context(self.segments)), nbytes(self.g.x)
        )

    def _encode(self) -> Payload:
        return codec.encode(self.method, self.g.x, self.ctx._replace(parts=self.sent))

    def encode(self) -> Timed:
        (payload,) = self.payloads(1)
        self.sent = self.slots()
        return Timed(self._encode, nbytes(self.g.x, payload))

    def agree_encode(self) -> Timed:
        """Return what a worker does before it sends: the statistic, and the payload by it."""
        (payload,) = self.payloads(1)
        self.sent = self.slots()

        def call() -> Payload:
            selected = codec.prepare(self.method, self.g.x, Context(self.segments)).cached
            ctx = self.ctx._replace(prepared=selected, parts=self.sent)
            return codec.encode(self.method, self.g.x, ctx)

        return Timed(call, nbytes(self.g.x, self.g.x, payload))

    def encode_feedback(self) -> Timed:
        """Return what a worker with a residual does before it sends."""
        (payload,) = self.payloads(1)
        again = AGAIN.get(f"{self.name}.encode_feedback", 0) * self.g.n
        residual = torch.zeros_like(self.g.x)
        ctx = self.ctx._replace(parts=self.slots(), prepared=None)

        def fused() -> Any:
            codec.feedback(self.method, self.g.x, residual, ctx)

        def in_steps() -> Any:
            residual.add_(self.g.x)
            payload = codec.encode(self.method, residual, ctx)
            codec.decode(self.method, payload, self.ctx._replace(out=self.out))
            residual.sub_(self.out)

        def in_rounds() -> Any:
            assert isinstance(self.method, MultiRoundCompressor)
            residual.add_(self.g.x)
            rounds = self.method.in_rounds(
                residual, self.ctx.shared, self.ctx._replace(out=self.out)
            )
            with suppress(StopIteration):  # it sends to itself what it would get back
                summand = next(rounds)
                while True:
                    summand = rounds.send(summand)
            residual.sub_(self.out)

        call = fused if fuses_feedback(self.method) else in_steps
        return Timed(
            in_rounds if isinstance(self.method, MultiRoundCompressor) else call,
            nbytes(self.g.x, residual, residual, payload) + again,
            residual.zero_,
        )

    def decode(self) -> Timed:
        (payload,) = self.payloads(1)
        return Timed(
            lambda: codec.decode(self.method, payload, self.ctx._replace(out=self.out)),
            nbytes(payload, self.g.x),
        )

    def mean8(self) -> Timed:
        payloads = self.payloads(WORKERS)
        return Timed(
            lambda: codec.mean(self.method, payloads, self.ctx._replace(out=self.out)),
            nbytes(payloads, self.g.x),
        )

    def merge8(self) -> Timed:
        payloads, slots = self.payloads(WORKERS), self.slots(WORKERS)
        ctx = self.ctx._replace(prepared=None)
        merged = codec.merge(self.method, payloads, ctx)
        return Timed(
            lambda: codec.merge(self.method, payloads, ctx._replace(parts=slots)),
            nbytes(payloads, merged),
        )


def _parts(method: Compressor) -> list[str]:
    """Return the parts that an exchange of this method has."""
    legal = method.legal_collectives()
    parts = ["encode", "decode"]
    x, one = torch.ones(1), Segments((0, 1))
    if (
        method.draw_shared(Context(one, key=KEY)) is None
        and codec.prepare(method, x, Context(one)).statistic.numel()
    ):
        parts = ["statistic", "agree_encode", *parts]
    if method.memory == "residual":
        parts.append("encode_feedback")
    if legal != ("allreduce",):
        parts.append("mean8")
    if "twoshot" in legal:
        parts.append("merge8")
    return parts


def _method(name: str, part: str) -> Case:
    def prepare(gradient: Gradient) -> Timed:
        timed: Timed = getattr(Method(name, gradient), part)()
        return timed

    full = f"{name}.{part}"
    sizes = ("1e6",) if part.endswith("8") else ("1e6", "resnet50")
    return Case(full, prepare, EAGER.get(full), sizes=sizes)


for _entry in registry.compressors().values():
    if _entry.source == "built-in" and _entry.name != "none":  # which has nothing to encode
        for _part in _parts(registry.compressor(_entry.name)):
            _built = _method(_entry.name, _part)
            CASES[_built.name] = _built
