"""The range-based float of Wang et al. 2020: N-bit floats whose codes cover the group's range.

u(a) = round(float_bits(a) / 2^(23 - m)) rounds a magnitude a to its exponent and m bits of
mantissa, as an integer. u is monotone, and an increment of u is a step of relative size 2^-m or
less. A group has a grid (base, P): codes 1..P are the positive values with u = base, base + 1, ...;
codes P + 1..2^N - 1 are the negative values with the same u; code 0 is zero. So the step doubles
every 2^m codes, the positive codes cover P / 2^m octaves, and the smallest magnitude is eps, the
value with u = base.

Let A = u(max) + 1, or 1 if there are no positive values, B = u(-min) + 1, or 1 if there are no
negative ones, and M = 2^N - 1. Then
    base = max(1, A - M, B - M, ceil((A + B - M) / 2)),  P = min(max(A - base, 0), M)
is the smallest base whose codes cover min to max. The last term is the usual one. It is rounded up;
rounded down, every second range would lack one code, and min would saturate. A - M and B - M are
for ranges almost entirely on one side of zero. base = 1 means that the codes include the smallest
denormals; some codes may then be unused.

Error: |q(x) - x| <= |x| 2^-(m+1) for |x| >= eps, if eps is a normal float. Below eps it is at most
|x|: x is rounded to the nearer of 0 and eps (to 0 if its sign has no codes). Values outside
[min, max], rounded, saturate, and so do those that would round up to infinity.
Wire: codes of N bits, and per group one int32, base * 2^N + P.
Source: Wang et al., HPDC 2020, doi:10.1145/3369583.3392681. The paper computes eps by iteration
from .002; the closed form is its limit (tests/ops/test_rangefloat.py::test_iteration).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gcbench.core.errors import PayloadError
from gcbench.ops import packing
from gcbench.ops.dispatch import operation, output, outputs, vector
from gcbench.ops.packing import packed_words

BITS = 16
"""Maximum bits per code, that of `packing.pack`."""
WIRE = 23
"""Maximum bits of code and mantissa together: a grid's 8 + m + N bits must fit in an int32."""

Groups = Sequence[tuple[int, int]]
"""Consecutive nonempty groups of values, as (number of groups, values per group)."""


def check(bits: int, mantissa: int) -> None:
    """Check the format of a range float.

    Raises:
        ValueError: fewer than 2 or more than 16 bits, a negative mantissa, or more than 23 in all.
    """
    if not (2 <= bits <= BITS and mantissa >= 0 and bits + mantissa <= WIRE):
        raise ValueError(
            f"bits={bits}, mantissa={mantissa}: expected 2 to {BITS} bits, a mantissa of at least "
            f"0, and at most {WIRE} together"
        )


def _steps(x: Tensor, mantissa: int) -> Tensor:
    """Return u(|x|), int32, limited to the largest u of a finite float."""
    half = 1 << (22 - mantissa)
    steps = ((x.view(torch.int32) & 0x7FFFFFFF) + half) >> (23 - mantissa)
    return steps.clamp_(max=(255 << mantissa) - 1)


def _values(steps: Tensor, mantissa: int) -> Tensor:
    """Return the floats with u = `steps`, int32; infinity beyond the finite floats."""
    return (steps.clamp(max=255 << mantissa) << (23 - mantissa)).view(torch.float32)


def grid_of(low: Tensor, high: Tensor, bits: int, mantissa: int) -> Tensor:
    """Return the encoded grid of each group, int32: base * 2^bits + P.

    `low`, `high`: smallest and largest value of each group, float32, of one shape. An infinity
    counts as the largest float of its sign.
    """
    codes = (1 << bits) - 1
    up = _steps(high.clamp(min=0), mantissa) + 1
    down = _steps(low.clamp(max=0), mantissa) + 1
    base = torch.maximum(torch.maximum(up, down) - codes, (up + down - codes + 1) >> 1)
    base.clamp_(min=1)
    return base << bits | (up - base).clamp_(0, codes)


def valid(grid: Tensor, bits: int, mantissa: int) -> Tensor:
    """Return, for each group, whether `grid_of` can have produced `grid`, bool."""
    base, positive = grid >> bits, grid & ((1 << bits) - 1)
    return (base >= 1) & (base + positive <= 255 << mantissa)


def eps(grid: Tensor, bits: int, mantissa: int) -> Tensor:
    """Return the smallest positive magnitude of each group's grid, float32."""
    return _values(grid >> bits, mantissa)


def encode(values: Tensor, grid: Tensor, bits: int, mantissa: int) -> Tensor:
    """Return the code of each value, int32, in [0, 2^bits), of the shape of `values`.

    `values`: float32, not NaN; `grid`: int32, broadcast against it, such as (groups, 1).
    """
    base, positive = grid >> bits, grid & ((1 << bits) - 1)
    negative = torch.signbit(values)
    code = _steps(values, mantissa).sub_(base - 1)
    # For magnitudes of at least eps / 2, eps is nearer than 0, even if u is below base.
    near = (values.abs() >= eps(grid, bits, mantissa) * 0.5).int()
    torch.maximum(code, near, out=code)
    top = torch.where(negative, (1 << bits) - 1 - positive, positive)
    torch.minimum(code, top, out=code)
    return code.add_(torch.where(negative & (code > 0), positive, 0))


def decode(codes: Tensor, grid: Tensor, bits: int, mantissa: int) -> Tensor:
    """Return the value of each code, float32, of the shape of `codes`.

    `codes`: int32, in [0, 2^bits); `grid`: int32, broadcast against it. Codes beyond the finite
    floats, which no encoder sends, become infinity.
    """
    base, positive = grid >> bits, grid & ((1 << bits) - 1)
    negative = codes > positive
    steps = codes - torch.where(negative, positive, 0)
    values = _values(steps.add_(base - 1), mantissa).masked_fill_(codes == 0, 0.0)
    return torch.where(negative, -values, values)


# ---- packed --------------------------------------------------------------------------------------


def grouped_values(groups: Groups) -> int:
    """Return the number of values of all groups."""
    return sum(rows * length for rows, length in groups)


def grouped_grids(groups: Groups) -> int:
    """Return the number of groups."""
    return sum(rows for rows, _ in groups)


def _spread(grids: Tensor, groups: Groups) -> Tensor:
    """Repeat the groups' grids, shape (m,), for each value, shape (n,)."""
    table = torch.tensor(list(groups), dtype=torch.int64).view(-1, 2).to(grids.device)
    rows, length = table.unbind(1)
    return grids.repeat_interleave(length.repeat_interleave(rows))


def _fault(number: int, arguments: Mapping[str, Any]) -> PayloadError:
    reason = {
        1: "no encoder sends such a grid",
        2: f"a bit is set after the last of {arguments['n']} codes",
        3: "a payload contains values that are not finite",
    }[number]
    return PayloadError(f"{arguments['name']}: {reason}")


@operation()
def _pack(
    values: Tensor,
    n: int,
    groups: Groups,
    m: int,
    bits: int,
    mantissa: int,
    grids: Tensor,
    out: Tensor,
) -> None:
    limits = [values.new_empty(2, 0)]
    start = 0
    for count, length in groups:
        rows = values[start : start + count * length].view(count, length)
        limits.append(torch.stack((rows.amin(1), rows.amax(1))))
        start += count * length
    low, high = torch.cat(limits, dim=1)
    grids.copy_(grid_of(low, high, bits, mantissa))
    packing.pack(encode(values, _spread(grids, groups), bits, mantissa), bits, out=out)


def pack(
    values: Tensor,
    groups: Groups,
    bits: int,
    mantissa: int,
    *,
    fixed: Tensor | None = None,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the packed codes of `values`, int32 words, and the grid of each group, int32.

    `values`: float32, not NaN, shape (n,), group by group. `fixed`: grids to use, int32, shape
    (m,), with which values may saturate; None: compute them from the groups' values. `out`: output
    tensors for words and grids.

    Raises:
        ValueError: `fixed` contains a grid that `grid_of` never returns.
    """
    check(bits, mantissa)
    n, m = grouped_values(groups), grouped_grids(groups)
    values = vector(values, torch.float32, n, "values")
    sizes = (torch.int32, packed_words(n, bits)), (torch.int32, m)
    words, grids = outputs(out, values.device, *sizes)
    if fixed is not None:
        grids.copy_(vector(fixed, torch.int32, m, "grids"))
        if not valid(grids, bits, mantissa).all():
            raise ValueError("`fixed` has a grid that `grid_of` never returns")
        packing.pack(encode(values, _spread(grids, groups), bits, mantissa), bits, out=words)
        return words, grids
    _pack(values, n, tuple(groups), m, bits, mantissa, grids, words)
    return words, grids


@operation(_fault)
def _unpack(
    words: Tensor,
    grids: Tensor,
    groups: Groups,
    n: int,
    m: int,
    bits: int,
    mantissa: int,
    name: str,
    out: Tensor,
) -> None:
    arguments = {"n": n, "name": name}
    if not valid(grids, bits, mantissa).all():
        raise _fault(1, arguments)
    codes = packing.unpack(words, bits, packed_words(n, bits) // bits * 32)
    if codes[n:].any():
        raise _fault(2, arguments)
    values = decode(codes[:n], _spread(grids, groups), bits, mantissa)
    if not values.isfinite().all():
        raise _fault(3, arguments)
    out.copy_(values)


def unpack(
    words: Tensor,
    grids: Tensor,
    groups: Groups,
    bits: int,
    mantissa: int,
    name: str,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Decode the results of `pack` to values, float32, finite, shape (n,).

    `words`, `grids`: int32, of the sizes that `pack` returns. `out`: the output tensor.

    Raises:
        PayloadError: `pack` never returns such a grid, code or unused bit; the message starts with
            `name`.
    """
    check(bits, mantissa)
    n, m = grouped_values(groups), grouped_grids(groups)
    words = vector(words, torch.int32, packed_words(n, bits), f"{name}: codes")
    grids = vector(grids, torch.int32, m, f"{name}: grids")
    out = output(out, torch.float32, n, words.device)
    _unpack(words, grids, tuple(groups), n, m, bits, mantissa, name, out)
    return out
