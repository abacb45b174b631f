"""PowerSGD's algebra: linearity, projection, convergence to the best approximation, averages."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

import gcbench
from gcbench import ops
from gcbench.core import codec
from gcbench.core.compressor import Context, Key, MultiRoundCompressor, Payload, Segments
from gcbench.core.errors import PayloadError, UsageError
from gcbench.ops.lowrank import orthonormalize

NOTHING = torch.empty(0)
SHAPES = [(40, 30), (7,), (16, 3, 5, 5), (), (0,), (0, 5), (1, 9), (2, 2)]
"""Matrices of 40 x 30 and 16 x 75; the rest has nothing to gain from rank 2 and travels raw."""


def method(**fields) -> MultiRoundCompressor:
    created = gcbench.get_compressor("powersgd", **fields)
    assert isinstance(created, MultiRoundCompressor)
    return created


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exchange(powersgd, xs, segments, state, step=0):
    """One step of all workers: the mean reconstruction of each replica, and the next state."""
    replicas = [torch.empty_like(x) for x in xs]
    ctx = Context(segments, key=Key(0, step, 0))
    workers = [
        powersgd.in_rounds(x, state, ctx._replace(out=out))
        for x, out in zip(xs, replicas, strict=True)
    ]
    summands, states = [next(worker) for worker in workers], []
    while not states:
        total = summands[0].clone()
        for summand in summands[1:]:
            total += summand
        summands = []
        for worker in workers:
            try:
                summands.append(worker.send(total / len(xs)))
            except StopIteration as end:
                states.append(end.value[1])
    assert all(torch.equal(replica, replicas[0]) for replica in replicas)
    assert all(torch.equal(state, states[0]) for state in states)
    return replicas[0], states[0]


def harmonic(n: int, m: int, seed: int = 0) -> torch.Tensor:
    """A matrix with the singular values 1, 1/2, 1/3, ..."""
    k = min(n, m)
    left = torch.linalg.qr(normal(n, k, seed=seed).double())[0]
    right = torch.linalg.qr(normal(m, k, seed=seed + 1).double())[0]
    return ((left / torch.arange(1, k + 1)) @ right.T).float()


def relative(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x.double() - y.double()).norm() / x.double().norm())


def best(matrix: torch.Tensor, rank: int) -> float:
    """Eckart and Young's relative error of the best approximation of that rank."""
    squares = torch.linalg.svdvals(matrix.double()).square()
    return float((squares[rank:].sum() / squares.sum()).sqrt())


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_linear_in_the_workers(workers, rank):
    """Workers {M_i} give what their mean gives, step after step, to the rounding of float32."""
    powersgd, segments = method(rank=rank), Segments.of(SHAPES)
    state = alone = powersgd.initial_state(Context(segments, key=Key(1, 0, 0)))
    for step in range(3):
        xs = [normal(segments.numel, seed=10 * step + rank) for rank in range(workers)]
        mean = sum(xs[1:], xs[0]) / workers
        received, state = exchange(powersgd, xs, segments, state)
        expected, alone = exchange(powersgd, [mean], segments, alone)
        torch.testing.assert_close(received, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("workers", [2, 4])
def test_averages_and_does_not_sum(workers):
    """N workers with one gradient give what one gives: a sum would be N times that."""
    powersgd, segments = method(), Segments.of(SHAPES)
    x, state = normal(segments.numel), powersgd.initial_state(Context(segments, key=Key(1, 0, 0)))
    one, _ = exchange(powersgd, [x], segments, state)
    many, _ = exchange(powersgd, [x] * workers, segments, state)
    torch.testing.assert_close(many, one)
    assert 0.1 < float(one.norm() / x.norm()) < 1


def test_tensors_with_nothing_to_gain_travel_as_they_are():
    """Vectors, scalars and r (n + m) >= n m: exact bits; at rank min(n, m) every matrix is one."""
    powersgd, segments = method(), Segments.of(SHAPES)
    x = normal(segments.numel)
    out, _ = exchange(
        powersgd, [x], segments, powersgd.initial_state(Context(segments, key=Key(1, 0, 0)))
    )
    selected = torch.ones(segments.numel, dtype=torch.bool)
    selected[:1200] = selected[1207 : 1207 + 1200] = False
    assert torch.equal(out[selected], x[selected])
    assert (out[~selected] != x[~selected]).all()
    assert method().layout(Segments.of([(4, 4)])) == ((torch.float32, 16), (torch.float32, 0))
    assert method().layout(Segments.of([(4, 5)])) == ((torch.float32, 8), (torch.float32, 10))
    full, segments = method(rank=30), Segments.of([(40, 30)])
    x = normal(1200)
    out, _ = exchange(full, [x], segments, full.initial_state(Context(segments, key=Key(1, 0, 0))))
    assert torch.equal(out, x)


@pytest.mark.parametrize("granularity", ["tensor", "model", "column", 7])
def test_tensors_do_not_depend_on_the_segments(granularity):
    powersgd, x = method(), normal(Segments.of(SHAPES).numel)
    segments = Segments.of(SHAPES, granularity)
    state = powersgd.initial_state(Context(segments, key=Key(1, 0, 0)))
    expected, _ = exchange(powersgd, [x], Segments.of(SHAPES), state)
    assert torch.equal(exchange(powersgd, [x], segments, state)[0], expected)


def test_a_convolution_is_its_output_channels_by_the_rest():
    x = normal(16 * 75)
    outs = []
    for shape in ((16, 3, 5, 5), (16, 75)):
        segments = Segments.of([shape])
        state = method().initial_state(Context(segments, key=Key(1, 0, 0)))
        outs.append(exchange(method(), [x], segments, state)[0])
    assert torch.equal(outs[0], outs[1])


@pytest.mark.parametrize(("rank", "ratio"), [(1, 461), (2, 230), (4, 115)])
def test_compression_ratio_of_the_paper(rank, ratio):
    """512 x 4608 at rank 1, 2, 4: bytes of both rounds counted."""
    segments = Segments.of([(512, 512, 3, 3)])
    payload = codec.encode(
        method(rank=rank), normal(segments.numel), Context(segments, NOTHING, Key(1, 0, 0))
    )
    assert payload.nbytes == 4 * rank * (512 + 4608)
    assert 4 * segments.numel / payload.nbytes == pytest.approx(ratio, abs=0.5)
    assert [part.numel() for part in payload.parts] == [512 * rank, 4608 * rank]


def test_the_wire_by_hand():
    """Rank 1 of [[3, 0, 0, 0], ...] = 3 u v^T: P = M q, then M^T p, in the order of tensors."""
    segments = Segments.of([(2,), (4, 4), (1,)])
    matrix = torch.zeros(4, 4)
    matrix[1, 2] = -3.0
    x = torch.cat([torch.tensor([5.0, 6.0]), matrix.view(-1), torch.tensor([7.0])])
    key = Key(9, 4, 3, 11)
    q = ops.random.normal(key._replace(rank=0), 4)
    first, second = codec.encode(method(rank=1), x, Context(segments, NOTHING, key)).parts
    assert first.tolist() == [5.0, 6.0, 0.0, float(-3 * q[2]), 0.0, 0.0, 7.0]
    sign = -math.copysign(1.0, float(q[2]))
    assert second.tolist() == [0.0, 0.0, -3.0 * sign, 0.0]
    decoded = codec.decode(method(rank=1), Payload((first, second)), Context(segments, NOTHING))
    assert torch.equal(decoded, x)


@pytest.mark.parametrize("rank", [2, 3, 5])
def test_low_rank_gradients_are_exact_from_the_first_step(rank):
    """rank(M) <= r: the range of M Q is M's, also where columns of Q are to spare."""
    powersgd = method(rank=5)
    segments = Segments.of([(40, 30)])
    state = powersgd.initial_state(Context(segments, key=Key(1, 0, 0)))
    for step in range(3):
        x = (normal(40, rank, seed=step) @ normal(rank, 30, seed=step + 10)).view(-1)
        out, state = exchange(powersgd, [x], segments, state)
        assert relative(x, out) < 2e-6


@pytest.mark.parametrize("shape", [(97, 120), (120, 97), (300, 97)])
def test_warm_start_converges_to_the_best_approximation(shape):
    """Harmonic spectrum, rank 2: Eckart and Young's error, from above, within seven steps.

    Each step multiplies the surplus by about (sigma_3 / sigma_2)^4 = 0.2, so it shrinks from 0.2
    to 1e-4. Every step is compared with numpy's own power iteration from the same draws.
    """
    powersgd, segments = method(), Segments.of([shape])
    x = harmonic(*shape).view(-1)
    state = powersgd.initial_state(Context(segments, key=Key(3, 0, 0)))
    matrix, q = x.view(shape).double().numpy(), state.view(2, -1).double().numpy().T
    optimum = best(x.view(shape), 2)
    errors = []
    for _ in range(7):
        out, state = exchange(powersgd, [x], segments, state)
        errors.append(relative(x, out))
        p = np.linalg.qr(matrix @ q)[0]
        q = matrix.T @ p
        expected = np.linalg.norm(matrix - p @ q.T) / np.linalg.norm(matrix)
        assert errors[-1] == pytest.approx(expected, abs=1e-5)
    assert all(error > optimum - 1e-6 for error in errors)
    assert errors[0] > optimum + 1e-2
    assert all(later < earlier for earlier, later in itertools.pairwise(errors))
    assert errors[-1] == pytest.approx(optimum, abs=1e-3)
    assert optimum == pytest.approx(0.4851, abs=1e-4)


def test_without_warm_start_every_step_draws_anew():
    """The error does not settle: its mean stays where the first step's is, and no two are equal."""
    powersgd, segments = method(warm_start=False), Segments.of([(97, 97)])
    x = harmonic(97, 97).view(-1)
    state = powersgd.initial_state(Context(segments, key=Key(3, 0, 0)))
    states, errors = [state], []
    for step in range(12):
        out, state = exchange(powersgd, [x], segments, state, step)
        states.append(state)
        errors.append(relative(x, out))
    assert len({tuple(state.tolist()) for state in states}) == 13
    assert sum(errors) / 12 > best(x.view(97, 97), 2) + 0.05
    draws = torch.cat(states)
    assert abs(float(draws.mean())) < 5 / len(draws) ** 0.5
    assert float(draws.square().mean()) == pytest.approx(1, abs=5 * (2 / len(draws)) ** 0.5)


@pytest.mark.parametrize("shape", [(12, 9), (9, 12), (6, 200)])
@pytest.mark.parametrize("rank", [1, 3])
def test_a_normal_q_keeps_its_share_in_the_mean(shape, rank):
    """E||M - M'||^2 <= (1 - r / min(n, m)) ||M||^2, with equality for equal singular values."""
    powersgd, segments = method(rank=rank), Segments.of([shape])
    k = min(shape)
    rotation = torch.linalg.qr(normal(max(shape), k).double())[0].float()
    flat = (rotation if shape[0] > shape[1] else rotation.T).contiguous()
    for x in (flat.view(-1), normal(shape[0] * shape[1])):
        bound = powersgd.claims.error_bound(x, Context(segments))
        energy = float(x.double().square().sum())
        assert bound == pytest.approx((1 - rank / k) * energy, rel=1e-4)
        errors = []
        for step in range(60):
            payload = codec.encode(powersgd, x, Context(segments, NOTHING, Key(2, step, 0)))
            error = x.double() - codec.decode(powersgd, payload, Context(segments, NOTHING))
            errors.append(float(error.square().sum()))
            assert errors[-1] <= energy * (1 + 1e-6)
        assert sum(errors) / 60 <= bound
    payload = codec.encode(powersgd, flat.view(-1), Context(segments, NOTHING, Key(2, 0, 0)))
    error = flat.view(-1).double() - codec.decode(powersgd, payload, Context(segments, NOTHING))
    assert float(error.square().sum()) == pytest.approx(k - rank, abs=1e-4)


def test_warm_start_survives_zeros():
    """After a gradient of zeros the next one is met as from fresh draws, not with a Q of zeros."""
    powersgd, segments = method(), Segments.of([(40, 30)])
    state = powersgd.initial_state(Context(segments, key=Key(1, 0, 0)))
    out, state = exchange(powersgd, [torch.zeros(1200)], segments, state)
    assert not out.any()
    x = (normal(40, 2) @ normal(2, 30, seed=1)).view(-1)
    out, _ = exchange(powersgd, [x], segments, state)
    assert relative(x, out) < 2e-6


def test_a_collapsed_column_comes_back():
    """A gradient of rank 1 must not leave a Q of rank 1: the next, of rank 2, is exact."""
    powersgd, segments = method(), Segments.of([(40, 30)])
    state = powersgd.initial_state(Context(segments, key=Key(1, 0, 0)))
    x = torch.outer(normal(40), normal(30, seed=1)).view(-1)
    _, state = exchange(powersgd, [x], segments, state)
    assert float(torch.linalg.svdvals(state.view(2, 30))[-1]) == pytest.approx(1, abs=1e-5)
    x = (normal(40, 2, seed=2) @ normal(2, 30, seed=3)).view(-1)
    out, _ = exchange(powersgd, [x], segments, state)
    # Rounding decides which column takes the place, and so how well P is conditioned.
    assert relative(x, out) < 1e-4


def near_copies() -> torch.Tensor:
    base = normal(50)
    return torch.stack([base, base * (1 + 2**-23), base + 1e-6 * normal(50, seed=1)])


@pytest.mark.parametrize(
    "vectors",
    [
        normal(3, 50),
        normal(1, 1),
        normal(5, 5),
        normal(4, 4097) * 1e30,
        normal(2, 33) * 1e-42,
        torch.zeros(3, 50),
        torch.ones(3, 50),
        torch.cat([torch.zeros(1, 50), normal(2, 50), torch.zeros(2, 50)]),
        torch.eye(8)[[3, 3, 0]],
        torch.full((2, 9), 3.4e38),
        near_copies(),
    ],
)
def test_orthonormal_vectors(vectors):
    """V V^T = I in every case, spanning what came in; sums agree with a plain QR in float64."""
    out = orthonormalize(vectors)
    assert out.dtype == torch.float32
    wide = out.double()
    identity = torch.eye(len(out), dtype=torch.float64)
    torch.testing.assert_close(wide @ wide.T, identity, rtol=0, atol=1e-6)
    settings = vectors.double()
    lost = settings - settings @ wide.T @ wide
    assert float(lost.norm()) <= 3e-7 * float(settings.norm()) + 1e-50
    again = torch.cat([vectors.clone()])
    assert torch.equal(orthonormalize(again), out)


def test_orthonormalize_keeps_the_first_direction():
    vectors = torch.tensor([[3.0, 4.0, 0.0], [0.0, 5.0, 0.0]])
    expected = torch.tensor([[0.6, 0.8, 0.0], [-0.8, 0.6, 0.0]])
    torch.testing.assert_close(orthonormalize(vectors), expected)
    with pytest.raises(ValueError, match="3 vectors of 2 elements"):
        orthonormalize(torch.ones(3, 2))


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("value", [0.0, 1e30, 3e38, 1e-42, -1.0])
def test_special_values(rank, value):
    """Constants of every size, one nonzero, both signs: finite and, up to 1e30, exact (rank 1)."""
    powersgd, segments = method(rank=rank), Segments.of(SHAPES)
    constant = torch.full((segments.numel,), value)
    spike = torch.zeros(segments.numel)
    spike[1300] = value
    alternating = constant * torch.tensor([1.0, -1.0]).repeat(segments.numel)[: segments.numel]
    for x in (constant, spike, alternating):
        workers = [x] if abs(value) > 1e38 else [x, x]  # the sum of two is beyond float32
        state = powersgd.initial_state(Context(segments, key=Key(1, 0, 0)))
        out, state = exchange(powersgd, workers, segments, state)
        assert out.isfinite().all()
        assert state.isfinite().all()
        if abs(value) < 1e38:
            torch.testing.assert_close(out, x, rtol=1e-5, atol=4e-45)


@pytest.mark.parametrize("shapes", [[()], [(0,)], [(5,), (0, 3)], [(1, 7)], [(31, 1)]])
def test_models_without_a_matrix_send_an_empty_second_round(shapes):
    powersgd, segments = method(), Segments.of(shapes)
    x = normal(segments.numel)
    payload = codec.encode(powersgd, x, Context(segments, NOTHING, Key(1, 0, 0)))
    assert payload.layout == ((torch.float32, segments.numel), (torch.float32, 0))
    assert payload.layout == powersgd.layout(segments)
    assert torch.equal(codec.decode(powersgd, payload, Context(segments, NOTHING)), x)
    for each in (powersgd, method(warm_start=False)):
        assert exchange(each, [x], segments, NOTHING)[1].shape == (0,)


def test_the_first_q_is_shared_and_keyed():
    """The draws do not depend on the rank, but on seed, step and place in the bucket."""
    powersgd, segments = method(), Segments.of(SHAPES)
    x, key = normal(segments.numel), Key(1, 0, 0)
    first = codec.encode(powersgd, x, Context(segments, NOTHING, key)).parts[0]
    assert torch.equal(
        codec.encode(powersgd, x, Context(segments, NOTHING, key._replace(rank=5))).parts[0], first
    )
    for other in (Key(2, 0, 0), Key(1, 1, 0), Key(1, 0, 0, 64)):
        assert not torch.equal(
            codec.encode(powersgd, x, Context(segments, NOTHING, other)).parts[0], first
        )
    state = powersgd.initial_state(Context(segments, key=key))
    assert torch.equal(state, ops.random.normal(key, 2 * (30 + 75)))


def test_corrupt_payloads_are_refused():
    powersgd, segments = method(), Segments.of(SHAPES)
    p, q = codec.encode(
        powersgd, normal(segments.numel), Context(segments, NOTHING, Key(1, 0, 0))
    ).parts
    for part, place in ((0, 0), (0, 85), (1, 3)):
        for value in (math.nan, math.inf):
            parts = [p.clone(), q.clone()]
            parts[part][place] = value
            with pytest.raises(PayloadError, match="powersgd"):
                codec.decode(powersgd, Payload(tuple(parts)), Context(segments, NOTHING))
    for parts in [(p,), (p, q[:-1]), (p, q, q), (p.double(), q), (q, p)]:
        with pytest.raises(PayloadError, match="powersgd"):
            codec.decode(powersgd, Payload(parts), Context(segments, NOTHING))


def test_a_product_beyond_float32_saturates():
    """(e1 + e2) / sqrt 2 and (e1 - e2) / sqrt 2, each times 3e38: 4.2e38 at e1, 0 at e2."""
    powersgd, segments = method(), Segments.of([(4, 50)])
    left = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, -1.0, 0.0, 0.0])
    payload = Payload((left, torch.full((100,), 3e38)))
    rows = codec.decode(powersgd, payload, Context(segments, NOTHING)).view(4, 50)
    assert (rows[0] == torch.finfo(torch.float32).max).all()
    assert not rows[2:].any()


def test_bad_ranks_are_refused():
    with pytest.raises(UsageError, match=r"powersgd.*rank=0"):
        gcbench.get_compressor("powersgd", rank=0)
