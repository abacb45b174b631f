"""Calls of a method's functions, with the checks and output buffers that all methods need.

The exchange, `compress` and all checks call methods through this module. It rejects inputs of the
wrong dtype or length, provides the buffers of `Context`, checks results against the declared
layout, and copies them to the caller's buffer unless the method wrote there itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gcbench.core.errors import GcbenchError, PayloadError, UsageError
from gcbench.core.payload import Context, Layout, Payload, Prepared, Segments, layout_bytes
from gcbench.core.sparse import Entries

if TYPE_CHECKING:
    from gcbench.core.compressor import Compressor


def name_of(method: Compressor) -> str:
    """Return the method's name, or that of its class if it is not registered."""
    return method.name or type(method).__name__


# ---- the wire format -----------------------------------------------------------------------------


def layout(method: Compressor, segments: Segments, count: int = 1) -> Layout | None:
    """Return the declared layout of a payload merged from `count` workers, computed once."""
    key = id(method), count
    cached = segments.layouts.get(key)
    if cached is None or cached[0] is not method:
        cached = segments.layouts[key] = method, method.layout(segments, count)
    return cached[1]


def bits(method: Compressor, segments: Segments, count: int = 1) -> int | None:
    """Return the size in bits that the layout declares; None if there is no layout."""
    declared = layout(method, segments, count)
    return None if declared is None else 8 * layout_bytes(declared)


def check(method: Compressor, payload: Payload, segments: Segments) -> None:
    """Check that a payload has the declared layout.

    Raises:
        PayloadError: the number, dtype or length of its parts differs, or its count is below 1.
    """
    if payload.count < 1:
        raise PayloadError(f"{name_of(method)}: payload has count {payload.count}: at least 1")
    declared = layout(method, segments, payload.count)
    if declared is not None and not _fits(payload, declared):
        raise PayloadError(
            f"{name_of(method)}: payload has layout {payload.layout}; expected {declared} for "
            f"{segments.numel} elements and {payload.count} worker(s)"
        )


# ---- one worker's gradient -----------------------------------------------------------------------


def prepare(method: Compressor, x: Tensor, ctx: Context) -> Prepared:
    """Return the worker's statistic, and intermediate results for its encoder.

    Raises:
        UsageError: x is not float32, or its length differs from that of its segments.
    """
    _check_input(method, "prepare", x, ctx)
    return method.prepare(x, ctx)


def agree(method: Compressor, xs: Sequence[Tensor], ctx: Context) -> tuple[Tensor, list[Any]]:
    """Return `ctx.shared` for these workers, and what each `prepare` cached for its encoder.

    `xs`: their gradients, float32, shape (n,) each. `ctx`: segments and key.
    """
    drawn = method.draw_shared(ctx._replace(key=ctx.key._replace(rank=0)))
    if drawn is not None:
        return drawn.to(xs[0].device), [None] * len(xs)
    prepared = [prepare(method, x, ctx) for x in xs]
    statistics = [each.statistic for each in prepared]
    shared = torch.stack(statistics).amax(0) if statistics[0].numel() else statistics[0]
    return shared, [each.cached for each in prepared]


def encode(method: Compressor, x: Tensor, ctx: Context, *, copy: bool = True) -> Payload:
    """Return the payload of one worker, in `ctx.parts` if given.

    `copy=False`: do not copy parts that the method returned as new tensors.

    Raises:
        UsageError: x is not float32, or its length differs from that of its segments.
        GcbenchError: the method did not return 1-D tensors.
        PayloadError: the payload does not have the declared layout.
    """
    _check_input(method, "encode", x, ctx)
    inner = _with_parts(method, x.device, ctx, 1)
    return _payload(method, "encode", method.encode(x, inner), inner, ctx.parts if copy else None)


def feedback(method: Compressor, x: Tensor, residual: Tensor, ctx: Context) -> Payload:
    """Like `encode` for x + residual; `residual`, (n,), becomes the error of the payload."""
    _check_input(method, "encode_feedback", x, ctx)
    inner = _with_parts(method, x.device, ctx, 1)
    parts = method.encode_feedback(x, residual, inner)
    return _payload(method, "encode_feedback", parts, inner, ctx.parts)


def entry_count(method: Compressor, segments: Segments) -> int:
    """Return k, the number of entries that a worker sends by collective "sparse".

    Raises:
        GcbenchError: the method declares no layout.
    """
    declared = layout(method, segments)
    if not declared:
        raise GcbenchError(f"{name_of(method)} lists collective sparse, but declares no layout")
    return declared[-1][1]


def entries(method: Compressor, x: Tensor, ctx: Context) -> Entries:
    """Return the elements that one worker sends by collective "sparse".

    Raises:
        UsageError: x is not float32, or its length differs from that of its segments.
        GcbenchError: dtypes, their number or the order of the positions is wrong.
    """
    _check_input(method, "entries", x, ctx)
    result, k = Entries(*method.entries(x, ctx)), entry_count(method, ctx.segments)
    positions, values = result
    dtypes = (positions.dtype, values.dtype) == (torch.int64, torch.float32)
    if not dtypes or not positions.shape == values.shape == (k,):
        shown = [f"{each.dtype} of shape {tuple(each.shape)}" for each in result]
        raise GcbenchError(
            f"{name_of(method)}.entries returned {' and '.join(shown)}: expected {k} int64 and {k} "
            "float32, as many as the last part of the layout has"
        )
    if not bool((positions[1:] > positions[:-1]).all()):
        raise GcbenchError(f"{name_of(method)}.entries: positions must increase")
    return result


# ---- payloads ------------------------------------------------------------------------------------


def decode(method: Compressor, payload: Payload, ctx: Context) -> Tensor:
    """Return the mean over the payload's workers, float32, shape (n,), in `ctx.out` if given.

    Raises:
        PayloadError: no encoder of this configuration can have produced the payload.
        GcbenchError: the method did not return such a tensor.
    """
    check(method, payload, ctx.segments)
    return _decoded(method, "decode", payload, payload, ctx)


def decode_sum(method: Compressor, payload: Payload, ctx: Context) -> Tensor:
    """Like `decode`, for the sum of `payload.count` workers' summands."""
    return _decoded(method, "decode_sum", payload, payload, ctx)


def mean(method: Compressor, payloads: Sequence[Payload], ctx: Context) -> Tensor:
    """Like `decode`, for the mean of the payloads of several workers."""
    _check_all(method, payloads, ctx)
    return _decoded(method, "mean", payloads, payloads[0], ctx)


def trimmed_mean(
    method: Compressor, payloads: Sequence[Payload], trim: int, ctx: Context
) -> Tensor:
    """Like `mean`, without the `trim` largest and smallest decoded values of each element.

    Each payload is of one worker; there are more than 2 * trim. Yin et al., ICML 2018,
    arXiv:1803.01498, definition 2.
    """
    rows = [decode(method, payload, ctx._replace(out=None)).clone() for payload in payloads]
    for turn in range(len(rows)):  # sort each element over the workers, by neighbours
        for i in range(turn % 2, len(rows) - 1, 2):
            low = torch.minimum(rows[i], rows[i + 1])
            rows[i], rows[i + 1] = low, torch.maximum(rows[i], rows[i + 1])
    middle = rows[trim : len(rows) - trim]
    return torch.mean(torch.stack(middle), 0, out=ctx.out)


def merge(method: Compressor, payloads: Sequence[Payload], ctx: Context) -> Payload:
    """Return one payload for the mean of several, in `ctx.parts` if given.

    Raises:
        PayloadError: no encoder of this configuration can have produced one of them.
        GcbenchError: the method did not return 1-D tensors.
    """
    _check_all(method, payloads, ctx)
    count, device = sum(payload.count for payload in payloads), _device(payloads[0], ctx)
    inner = _with_parts(method, device, ctx, count)
    try:
        merged = method.merge(payloads, inner)
    except PayloadError as error:
        raise _named(method, error) from None
    return _payload(method, "merge", merged, inner, ctx.parts, count)


# ---- checks and buffers --------------------------------------------------------------------------


def _check_input(method: Compressor, function: str, x: Tensor, ctx: Context) -> None:
    n = ctx.segments.numel
    if x.dtype != torch.float32 or x.shape != (n,):
        remedy, default = "", torch.get_default_dtype()
        if x.dtype == default:
            remedy = f". The default dtype is {default}: torch.set_default_dtype(torch.float32)"
        raise UsageError(
            f"{name_of(method)}: {function} received x of {x.dtype}, shape {tuple(x.shape)}; "
            f"expected float32, shape ({n},), the length of its segments{remedy}"
        )


def _check_all(method: Compressor, payloads: Sequence[Payload], ctx: Context) -> None:
    if not payloads:
        raise UsageError(f"{name_of(method)}: mean and merge need at least one payload")
    for payload in payloads:
        check(method, payload, ctx.segments)


def _with_parts(method: Compressor, device: torch.device, ctx: Context, count: int) -> Context:
    """Return the context with the declared layout, and with new buffers if it has none."""
    declared, parts = layout(method, ctx.segments, count), ctx.parts
    if parts is not None:
        return ctx if ctx.layout is declared else ctx._replace(layout=declared)
    if declared is not None:
        parts = tuple(torch.empty(n, dtype=dtype, device=device) for dtype, n in declared)
    return ctx._replace(layout=declared, parts=parts)


def _device(payload: Payload, ctx: Context) -> torch.device:
    return payload.parts[0].device if payload.parts else ctx.shared.device


def _payload(
    method: Compressor,
    function: str,
    returned: Any,
    ctx: Context,
    parts: tuple[Tensor, ...] | None,
    count: int = 1,
) -> Payload:
    """Check the payload that a method returned, and copy it to `parts` if given."""
    tensors = (returned,) if isinstance(returned, Tensor) else returned
    if isinstance(returned, Payload):
        tensors = returned.parts
    if type(tensors) is not tuple or not all(
        isinstance(part, Tensor) and part.ndim == 1 for part in tensors
    ):
        raise GcbenchError(
            f"{method!r}: {function} returned {_shown(returned)}; expected the parts of the "
            "payload, a 1-D tensor or a tuple of 1-D tensors"
        )
    payload = Payload(tensors, count)
    if ctx.layout is not None and not _fits(payload, ctx.layout):
        raise PayloadError(
            f"{method!r}: {function} returned a payload of layout {payload.layout} for "
            f"{ctx.segments.numel} elements; its declared layout is {ctx.layout}"
        )
    if parts is None:
        return payload
    for place, part in zip(parts, tensors, strict=True):
        if place is not part:
            place.copy_(part)
    return Payload(parts, count)


def _fits(payload: Payload, declared: Layout) -> bool:
    """Return whether a payload has the declared layout."""
    parts = payload.parts
    if len(parts) != len(declared):
        return False
    for part, (dtype, numel) in zip(parts, declared, strict=True):
        if part.dtype is not dtype or part.numel() != numel:
            return False
    return True


def _named(method: Compressor, error: PayloadError) -> PayloadError:
    """Prefix an error that a method raised with the method's name."""
    name = name_of(method)
    return error if str(error).startswith(f"{name}: ") else PayloadError(f"{name}: {error}")


def _decoded(
    method: Compressor, function: str, received: Any, first: Payload, ctx: Context
) -> Tensor:
    """Call a decoding function of a method, check its result, and copy it to `ctx.out` if given."""
    numel, out = ctx.segments.numel, ctx.out
    inner = ctx
    if out is None:
        room = torch.empty(numel, dtype=torch.float32, device=_device(first, ctx))
        inner = ctx._replace(out=room)
    try:
        result = getattr(method, function)(received, inner)
    except PayloadError as error:
        raise _named(method, error) from None
    if out is not None and result is out:
        return out
    # A copy alone would convert dtypes and broadcast a shorter tensor.
    if not isinstance(result, Tensor) or result.dtype != torch.float32 or result.shape != (numel,):
        raise GcbenchError(
            f"{method!r}: {function} returned {_shown(result)}; expected float32, shape ({numel},)"
        )
    return result if out is None else out.copy_(result)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype}, shape {tuple(value.shape)}"
    if type(value) is tuple:
        return f"({', '.join(map(_shown, value))})"
    return f"a {type(value).__name__}"
