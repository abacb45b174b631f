"""The range-based float (Wang et al. 2020): codes by hand and by search, its range, its error."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gcbench import ops

FORMATS = [(10, 5), (10, 6), (8, 4), (10, 8), (6, 3), (3, 0), (2, 0), (12, 9), (16, 7)]
RANGES = [(-1.0, 1.0), (-0.3, 2.0), (-7.0, 0.01), (0.5, 4.0), (-3.0, -2.0), (-1e-30, 1e30)]
FLOAT_MAX = torch.finfo(torch.float32).max


def grid_of(low: float, high: float, bits: int, mantissa: int) -> torch.Tensor:
    return ops.rangefloat.grid_of(torch.tensor(low), torch.tensor(high), bits, mantissa)


def table(grid: torch.Tensor, bits: int, mantissa: int) -> torch.Tensor:
    """The value of every code, in the order of codes."""
    codes = torch.arange(1 << bits, dtype=torch.int32)
    return ops.rangefloat.decode(codes, grid, bits, mantissa)


def there_and_back(x: torch.Tensor, bits: int, mantissa: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One group: its grid and its decoded values."""
    grid = ops.rangefloat.grid_of(x.amin(), x.amax(), bits, mantissa)
    codes = ops.rangefloat.encode(x, grid, bits, mantissa)
    return grid, ops.rangefloat.decode(codes, grid, bits, mantissa)


def steps(value: float, mantissa: int) -> int:
    """u(value) from the bits of the float, without torch."""
    (bits,) = struct.unpack("<I", struct.pack("<f", abs(value)))
    return min((bits + (1 << (22 - mantissa))) >> (23 - mantissa), (255 << mantissa) - 1)


def test_codes_by_hand():
    """N = 4, m = 1 over [-1, 1]: two steps an octave, 7 codes up and 8 down."""
    grid = grid_of(-1.0, 1.0, 4, 1)
    up = [0.125, 0.1875, 0.25, 0.375, 0.5, 0.75, 1.0]
    assert int(grid) == (2 * (127 - 3)) << 4 | 7  # u(1/8) = 248 and P = 7
    assert table(grid, 4, 1).tolist() == [0.0, *up, *(-v for v in up), -1.5]
    x = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.62, 0.63, -0.0624, 0.0625, 0.15, 2.0, -9.0])
    codes = [0, 0, 7, 14, 5, 6, 0, 1, 1, 7, 15]
    assert ops.rangefloat.encode(x, grid, 4, 1).tolist() == codes


@pytest.mark.parametrize(("bits", "mantissa"), FORMATS)
@pytest.mark.parametrize(("low", "high"), RANGES)
def test_round_trip_is_the_identity_on_all_codes(low, high, bits, mantissa):
    grid = grid_of(low, high, bits, mantissa)
    values = table(grid, bits, mantissa)
    used = values.isfinite()
    codes = torch.arange(1 << bits, dtype=torch.int32)
    assert torch.equal(ops.rangefloat.encode(values, grid, bits, mantissa)[used], codes[used])
    positive = int(grid) & ((1 << bits) - 1)
    up, down = values[1 : positive + 1].double(), values[positive + 1 :].double()
    down = down[down.isfinite()]  # 16 bits span more octaves than floats have
    assert values[0] == 0
    assert (up > 0).all()
    assert (down < 0).all()
    assert (up.diff() > 0).all(), "values of positive codes rise"
    assert (down.diff() < 0).all(), "values of negative codes fall"
    assert used.all() or int(grid) >> bits == 1, "codes are unused only where floats end"


@pytest.mark.parametrize(("bits", "mantissa"), [(10, 5), (10, 6), (8, 4), (12, 9)])
def test_the_step_doubles_every_octave(bits, mantissa):
    grid = grid_of(-1.0, 1.0, bits, mantissa)
    positive = int(grid) & ((1 << bits) - 1)
    up = table(grid, bits, mantissa)[1 : positive + 1].double()
    octave = 1 << mantissa
    assert torch.equal(up[octave:], 2 * up[:-octave])
    assert torch.equal(up.diff()[octave:], 2 * up.diff()[:-octave])
    assert float((up.diff() / up[:-1]).max()) == 2.0**-mantissa
    # [eps, max] spans P - 1 steps, 2^m an octave; the symmetric range has half of all codes.
    octaves = (positive - 1) // octave
    assert float(ops.rangefloat.eps(grid, bits, mantissa)) == float(up[0])
    assert 2.0**octaves <= 1 / float(up[0]) < 2.0 ** (octaves + 1)
    assert abs(positive / octave - 2 ** (bits - 1 - mantissa)) <= 1 / octave


def test_octaves_of_the_usual_formats():
    """Symmetric range: eps = 1.6e-5 max for (10, 5), .004 max for (10, 6) and for (8, 4).

    P = 2^(N-1) - 1 values have P - 1 steps: two fewer than whole octaves.
    """
    for (bits, mantissa), octaves in {(10, 5): 16, (10, 6): 8, (8, 4): 8}.items():
        eps = float(ops.rangefloat.eps(grid_of(-1.0, 1.0, bits, mantissa), bits, mantissa))
        assert eps == 2.0**-octaves * (1 + 2 / 2**mantissa)


@pytest.mark.parametrize(("bits", "mantissa"), [(6, 3), (5, 0), (7, 2), (8, 4)])
@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (-0.3, 2.0), (-7.0, 0.01), (0.5, 4.0)])
def test_every_value_goes_to_the_nearest_code(low, high, bits, mantissa):
    """Against a search over all codes, on a fine grid of values beyond the range on both sides."""
    grid = grid_of(low, high, bits, mantissa)
    values = table(grid, bits, mantissa).double()
    magnitude = torch.logspace(-12, 4, 5000, base=2, dtype=torch.float64)
    x = torch.cat([-magnitude, magnitude]).float()
    mine = ops.rangefloat.decode(
        ops.rangefloat.encode(x, grid, bits, mantissa), grid, bits, mantissa
    )
    best = (values - x.double()[:, None]).abs().amin(1)
    torch.testing.assert_close((mine.double() - x.double()).abs(), best, rtol=0, atol=0)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.sampled_from(FORMATS),
)
def test_the_range_is_covered_by_the_smallest_base(a, b, form):
    """Both ends have a code, no smaller base has enough codes for both, and the grid is valid."""
    bits, mantissa = form
    low, high = min(a, b), max(a, b)
    grid = grid_of(low, high, *form)
    base, positive = int(grid) >> bits, int(grid) & ((1 << bits) - 1)
    up = steps(high, mantissa) + 1 if high > 0 else 1
    down = steps(low, mantissa) + 1 if low < 0 else 1

    def codes(smallest: int) -> int:
        return max(0, up - smallest) + max(0, down - smallest)

    assert ops.rangefloat.valid(grid, *form)
    assert codes(base) < 1 << bits
    assert base == 1 or codes(base - 1) >= 1 << bits
    assert positive == max(0, up - base)
    ends = torch.tensor([low, high])
    back = ops.rangefloat.decode(ops.rangefloat.encode(ends, grid, *form), grid, *form)
    eps = float(ops.rangefloat.eps(grid, *form))
    for x, y in zip(ends.tolist(), back.tolist(), strict=True):
        if abs(x) >= max(eps, 2.0**-126):
            assert abs(y - x) <= abs(x) * 2.0 ** -(mantissa + 1)
        else:
            assert abs(y - x) <= min(abs(x), eps) + 2.0**-149


@pytest.mark.parametrize(("bits", "mantissa"), FORMATS)
def test_error_bound(bits, mantissa):
    """|q(x) - x| <= 2^-(m+1) |x| from eps on, and at most |x| below: rounded to 0 or to eps."""
    generator = torch.Generator().manual_seed(bits)
    sign = torch.randint(0, 2, (20_000,), generator=generator) * 2 - 1
    x = sign * torch.exp2(torch.rand(20_000, generator=generator) * 60 - 40)
    grid, back = there_and_back(x, bits, mantissa)
    error = (back.double() - x.double()).abs()
    eps = float(ops.rangefloat.eps(grid, bits, mantissa))
    above = x.abs() >= eps
    assert above.any() or bits == 2
    assert float((error / x.abs() * above).max()) <= 2.0 ** -(mantissa + 1)
    below = x.abs() < eps
    expected = torch.where(x.abs() >= eps / 2, x.sign() * eps, 0.0)
    if bits > 2:  # with three codes one sign may have none
        assert torch.equal(back[below], expected[below])
    assert (error <= x.abs()).all()


def test_groups_that_are_not_gaussian():
    form = (10, 6)
    zero = torch.zeros(5)
    assert there_and_back(zero, *form)[1].tolist() == [0.0] * 5
    assert int(there_and_back(zero, *form)[0]) == 1 << 10  # base 1, no positive codes
    positive = torch.logspace(-3, 0, 50)
    grid, back = there_and_back(positive, *form)
    assert int(grid) & 1023 == 1023, "without negative values all codes are positive"
    assert float((back / positive - 1).abs().max()) <= 2.0**-7
    grid, back = there_and_back(-positive, *form)
    assert int(grid) & 1023 == 0
    assert float((back / -positive - 1).abs().max()) <= 2.0**-7
    for value in (1.0, -3.7, 1e30, -1e-30, FLOAT_MAX, -FLOAT_MAX):
        x = torch.tensor([value])
        assert float((there_and_back(x, *form)[1] / x - 1).abs()) <= 2.0**-7
    # Denormals: steps of 2^-132 at worst, which is 2^-126 / 2^6.
    tiny = torch.tensor([1e-38, -1e-39, 1e-40, 3e-45])
    assert float((there_and_back(tiny, *form)[1].double() - tiny).abs().max()) <= 2.0**-133
    # One sign is so small that the other takes all codes.
    lopsided = torch.tensor([1.0, 0.5, -1e-9])
    grid, back = there_and_back(lopsided, *form)
    assert int(grid) & 1023 == 1023
    assert back.tolist() == [1.0, 0.5, 0.0]


def test_the_largest_values_saturate_at_a_finite_one():
    """What would round up to infinity gets the largest code; infinite limits count as such."""
    top = (2 - 2.0**-6) * 2.0**127
    x = torch.tensor([FLOAT_MAX, -FLOAT_MAX, math.inf, -math.inf, 1e38])
    _, back = there_and_back(x, 10, 6)
    assert back[:4].tolist() == [top, -top, top, -top]
    assert float(back[4]) == pytest.approx(1e38, rel=2.0**-7)


def test_a_base_of_one_leaves_codes_unused():
    """A range below the normal floats: base 1 and unused codes, which no decoder takes for values.

    With N = 16, m = 6 the codes span 512 octaves, more than floats have.
    """
    form = (16, 6)
    x = torch.tensor([FLOAT_MAX, 1.0, 1e-40, -1.0])
    grid, back = there_and_back(x, *form)
    assert int(grid) >> 16 == 1
    error = (back.double() - x).abs()
    assert (error <= (x.double().abs() * 2.0**-7).clamp(min=2.0**-133)).all()
    values = table(grid, *form)
    assert int(values.isinf().sum()) > 10_000
    assert (~values.isnan()).all()


def test_saturation():
    grid = grid_of(-1.0, 2.0, 10, 6)
    x = torch.tensor([2.0, 3.0, 1e38, -1.0, -5.0, -math.inf])
    back = ops.rangefloat.decode(ops.rangefloat.encode(x, grid, 10, 6), grid, 10, 6)
    assert back[:3].tolist() == [2.0] * 3
    # One code may be to spare at the negative end.
    assert -1.0 - 2.0**-6 <= float(back[4]) == float(back[5]) <= -1.0


def test_groups_do_not_see_each_other():
    """A matrix of groups is coded as its rows are, one by one."""
    generator = torch.Generator().manual_seed(5)
    scale = torch.logspace(-20, 20, 7)[:, None]
    x = torch.randn(7, 300, generator=generator) * scale
    x[3] = 0
    x[4].abs_()
    grids = ops.rangefloat.grid_of(x.amin(1), x.amax(1), 10, 5)
    codes = ops.rangefloat.encode(x, grids[:, None], 10, 5)
    back = ops.rangefloat.decode(codes, grids[:, None], 10, 5)
    for row in range(7):
        grid, local = there_and_back(x[row], 10, 5)
        assert int(grid) == int(grids[row])
        assert torch.equal(local, back[row])
    assert int(codes.amin()) >= 0
    assert int(codes.amax()) < 1024


def test_the_unit_moves_the_base_alone():
    """A power of two shifts the base by 2^m an octave and changes no code."""
    x = torch.randn(1000, generator=torch.Generator().manual_seed(6))
    grid = ops.rangefloat.grid_of(x.amin(), x.amax(), 10, 6)
    codes = ops.rangefloat.encode(x, grid, 10, 6)
    for power in (-60, -1, 3, 100):
        scaled = x * 2.0**power
        moved = ops.rangefloat.grid_of(scaled.amin(), scaled.amax(), 10, 6)
        assert int(moved) == int(grid) + (power << 6 << 10)
        assert torch.equal(ops.rangefloat.encode(scaled, moved, 10, 6), codes)


def iterated(low: float, high: float, bits: int, mantissa: int) -> int:
    """The paper's search for eps: from .002, down where the lowest code lies below min, else up."""
    eps, factor = 0.002, 4.0
    direction = 0
    for _ in range(400):
        base = steps(eps, mantissa)
        positive = steps(high, mantissa) - base + 1
        lowest = base + (1 << bits) - 2 - positive  # u of code 1...1, in magnitude
        below = lowest > steps(low, mantissa)
        if lowest == steps(low, mantissa):
            break
        turn = -1 if below else 1
        if direction and turn != direction:
            factor = 1 + (factor - 1) / 2
        direction = turn
        eps *= factor**turn
    return base


@pytest.mark.parametrize(("bits", "mantissa"), [(10, 5), (10, 6), (8, 4)])
def test_iteration(bits, mantissa):
    """The iteration of the paper ends at the closed form, or one step beside it.

    Where A + B - M is odd no base makes the lowest code meet min: ours has a code to spare.
    """
    generator = torch.Generator().manual_seed(7)
    met = 0
    for _ in range(60):
        high, low = (torch.rand(2, generator=generator) * 0.9 + 0.1).tolist()
        base = int(grid_of(-low, high, bits, mantissa)) >> bits
        assert abs(iterated(-low, high, bits, mantissa) - base) <= 1
        met += iterated(-low, high, bits, mantissa) == base
    assert met >= 20


def relative_error(x: torch.Tensor, back: torch.Tensor) -> float:
    return float((back.double() - x.double()).square().sum() / x.double().square().sum())


def uniform(x: torch.Tensor, bits: int) -> torch.Tensor:
    """The plain quantizer over [min, max] with the same number of codes."""
    low, high = x.amin(), x.amax()
    step = (high - low) / ((1 << bits) - 1)
    return ((x - low) / step).round() * step + low


def test_it_beats_uniform_codes_for_heavy_tails_only():
    """Relative squared error with N = 10: a Gaussian and its spectrum are better off uniform.

    Samples of 1e6. A uniform step follows the extremes, so those figures hold to a third, and for
    Student's t, whose extremes have no mean, to their order; the range float's to a tenth.
    """
    generator = torch.Generator().manual_seed(8)
    n = 1_000_000
    gauss = torch.randn(n, generator=generator)
    u = torch.rand(n, generator=generator).clamp_(2.0**-24, 1 - 2.0**-24) - 0.5
    laplace = -u.sign() * (1 - 2 * u.abs()).log()
    chi = torch.randn(3, n, generator=generator).square().mean(0)
    student = gauss / chi.sqrt()
    bins = torch.view_as_real(torch.fft.rfft(gauss, norm="ortho"))
    energy = bins.square().sum(1)
    limit = energy.kthvalue(round(0.85 * len(energy))).values
    selected = bins[energy > limit].view(-1)
    limit = gauss.abs().kthvalue(round(0.85 * n)).values
    largest = gauss[gauss.abs() > limit]
    rows = [
        # values, mantissa, error, tolerance, uniform error, tolerance, which is better
        (gauss, 6, 1.15e-5, 0.1, 7.3e-6, 0.33, "uniform"),
        (laplace, 6, 1.7e-5, 0.1, 2.5e-5, 0.33, "range"),
        (student, 5, 4.4e-5, 0.1, 1.7e-3, 0.9, "range"),
        (selected, 6, 1.0e-5, 0.1, 2.4e-6, 0.33, "uniform"),
        (largest, 8, 6.6e-7, 0.1, 1.9e-6, 0.33, "range"),
    ]
    for x, mantissa, error, near, plain, nearly, better in rows:
        mine = relative_error(x, there_and_back(x, 10, mantissa)[1])
        other = relative_error(x, uniform(x, 10))
        assert mine == pytest.approx(error, rel=near)
        assert other == pytest.approx(plain, rel=nearly)
        assert ("range" if mine < other else "uniform") == better


@pytest.mark.parametrize(("bits", "mantissa"), [(1, 0), (17, 0), (10, -1), (10, 14), (16, 8)])
def test_formats_that_do_not_exist(bits, mantissa):
    with pytest.raises(ValueError, match=f"bits={bits}, mantissa={mantissa}"):
        ops.rangefloat.check(bits, mantissa)


@pytest.mark.parametrize(("bits", "mantissa"), [(2, 21), (16, 7), (10, 13)])
def test_the_widest_formats_fit_the_grid(bits, mantissa):
    """The largest base fills, and does not overflow, its share of an int32."""
    ops.rangefloat.check(bits, mantissa)
    x = torch.tensor([FLOAT_MAX])
    grid, back = there_and_back(x, bits, mantissa)
    assert int(grid) > 0
    assert float((back / x - 1).abs().max()) <= 2.0 ** -(mantissa + 1)


def test_grids_that_no_group_has():
    form = (10, 6)
    limit = 255 << 6
    good = [1 << 10, 1 << 10 | 1023, (limit - 1) << 10 | 1, limit << 10]
    bad = [0, 1023, -1, -(1 << 20), (limit - 1) << 10 | 2, limit << 10 | 1, 2**31 - 1]
    assert ops.rangefloat.valid(torch.tensor(good, dtype=torch.int32), *form).tolist() == [True] * 4
    assert ops.rangefloat.valid(torch.tensor(bad, dtype=torch.int32), *form).tolist() == [False] * 7
    # A code beyond the finite floats: an infinity, which the caller refuses.
    grid = torch.tensor((limit - 2) << 10 | 2, dtype=torch.int32)
    codes = torch.tensor([0, 1, 2, 3, 4, 5, 1023], dtype=torch.int32)
    values = ops.rangefloat.decode(codes, grid, *form)
    assert values.isfinite().tolist() == [True] * 5 + [False] * 2
