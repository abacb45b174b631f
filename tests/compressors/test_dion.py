"""Dion: compressed synchronization gives the parameters of uncompressed synchronization."""

from __future__ import annotations

import math

import pytest
import torch
from commands import invoke
from gcbench.compressors.dion import DecoupledMomentum
from gcbench.compressors.powersgd import right

import gcbench
from gcbench.core import memory
from gcbench.core.compressor import Context, Key, Segments
from gcbench.core.errors import UsageError
from gcbench.core.exchange import Exchange, lane_of
from gcbench.training.configuration import Config

SHAPES = [(24, 18), (7,), (9, 2, 7), (), (0,), (1, 5)]
PLACES = [slice(0, 432), slice(432, 439), slice(439, 565), slice(565, 566), slice(566, 571)]
N, WORKERS, LR, MU = 571, 4, 0.02, 0.95


def gradients(steps: int, workers: int = WORKERS) -> torch.Tensor:
    """A common part, and one of the worker that is three times as large."""
    draw = torch.Generator().manual_seed(4)
    return torch.randn(steps, 1, N, generator=draw) + 3 * torch.randn(
        steps, workers, N, generator=draw
    )


def exchange(simulated, clock, method, workers, carried=None):
    clock.start_step()
    carried = memory.of(method) if carried is None else carried
    lane = lane_of(SHAPES, 0, method, "allreduce", carried, exact=False)
    return Exchange(simulated(workers), [lane], 3, clock)


def test_the_factors_of_a_matrix_without_a_gradient_wait(simulated, clock):
    """An idle step had replaced them by a constant draw, the same at each of them."""
    method = gcbench.get_compressor("dion", rank_fraction=0.25)
    created = exchange(simulated, clock, method, WORKERS)
    matrices = method.matrices(Segments.of(SHAPES))
    created.mean(list(gradients(3)[0]), 0, LR)
    before = [q.clone() for q in right(created.joint[0]["state"], matrices)]
    for worker in created.workers:
        worker[0]["momentum"][PLACES[0]] = 0.0
    idle = [x.clone() for x in gradients(3)[1]]
    for x in idle:
        x[PLACES[0]] = 0.0
    created.mean(idle, 1, LR)
    after = right(created.joint[0]["state"], matrices)
    assert torch.equal(after[0], before[0])
    assert not torch.equal(after[1], before[1])


def test_a_memory_that_replaces_the_mean_is_refused():
    """The rule reads the factors of what was sent, and EF21 applies a sum of all that was."""
    with pytest.raises(UsageError, match="Remove --memory"):
        Config.make({"compressor": "dion", "memory": "ef21"})


def on_means(method, means: torch.Tensor) -> torch.Tensor:
    """Return the parameters of Dion on averaged gradients, float64."""
    theta = torch.zeros(N).double()
    for update in method.claims.synchronized(means, Context(Segments.of(SHAPES), key=Key(3, 0, 0))):
        theta -= LR * update
    return theta


def distance(theta: torch.Tensor, reference: torch.Tensor) -> float:
    return float((theta - reference).abs().max() / reference.abs().max())


@pytest.mark.parametrize("fields", [{}, {"orthonormal": True}, {"rank_fraction": 1.0}], ids=str)
def test_parameters_are_those_of_dion_on_averaged_gradients(simulated, clock, fields):
    """Up to rounding, over 25 steps on 4 workers, whose momenta differ by more than their size."""
    method, grads = gcbench.get_compressor("dion", **fields), gradients(25)
    running = exchange(simulated, clock, method, WORKERS)
    theta = torch.zeros(N)
    for step, xs in enumerate(grads):
        theta -= LR * running.mean(list(xs), step, LR)
    assert distance(theta, on_means(method, grads.double().mean(1))) < 1e-4
    carried = torch.stack([worker[0]["momentum"] for worker in running.workers])
    assert min(distance(one, carried.mean(0)) for one in carried) > 0.5


def test_powersgd_before_adam_is_not_adam_on_averaged_gradients(simulated, clock):
    """The check of the previous test, which error feedback before an optimizer does not pass."""
    grads, ends = gradients(25), []
    running = exchange(simulated, clock, gcbench.get_compressor("powersgd", rank=5), WORKERS)
    for compressed in (True, False):
        theta = torch.nn.Parameter(torch.zeros(N))
        optimizer = torch.optim.Adam([theta], lr=LR)
        for step, xs in enumerate(grads):
            theta.grad = running.mean(list(xs), step, LR).clone() if compressed else xs.mean(0)
            optimizer.step()
        ends.append(theta.detach())
    assert distance(*ends) > 0.1


def test_full_rank_spans_the_momentum(simulated, clock):
    """P R^T = M; M has the column and row space of the direction."""
    method = gcbench.get_compressor("dion", rank_fraction=1.0)
    running, xs = exchange(simulated, clock, method, 2), gradients(1, 2)[0]
    direction = running.mean(list(xs), 0)
    left = torch.stack([worker[0]["momentum"] for worker in running.workers]).mean(0)
    torch.testing.assert_close(left, MU * xs.mean(0), rtol=1e-4, atol=1e-5)
    for place, m in ((PLACES[0], 18), (PLACES[2], 14), (PLACES[4], 5)):
        d = direction[place].view(-1, m).double()
        whole = xs.mean(0)[place].view(-1, m).double()
        inverse = torch.linalg.pinv(d)
        torch.testing.assert_close(d @ (inverse @ whole), whole, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close((whole @ inverse) @ d, whole, rtol=1e-4, atol=1e-4)


def test_a_low_rank_does_not_span_the_momentum(simulated, clock):
    method = gcbench.get_compressor("dion", rank_fraction=0.5)
    xs = gradients(1, 1)[0]
    direction = exchange(simulated, clock, method, 1).mean(list(xs), 0)[PLACES[0]].view(24, 18)
    assert int(torch.linalg.matrix_rank(direction)) == 9
    assert int(torch.linalg.matrix_rank(xs[0][PLACES[0]].view(24, 18))) == 18


def test_an_orthonormal_direction_has_equal_singular_values(simulated, clock):
    method = gcbench.get_compressor("dion", orthonormal=True, rank_fraction=0.5)
    direction = exchange(simulated, clock, method, 2).mean(list(gradients(1, 2)[0]), 0)
    values = torch.linalg.svdvals(direction[PLACES[0]].view(24, 18))
    torch.testing.assert_close(values[:9], torch.full((9,), math.sqrt(24 / 18)))
    assert float(values[9:].max()) < 1e-5


@pytest.mark.parametrize("fields", [{}, {"orthonormal": True}], ids=str)
def test_parameters_without_gradients_do_not_move(simulated, clock, fields):
    """Neither matrices nor vectors; a gradient that comes later moves them."""
    running = exchange(simulated, clock, gcbench.get_compressor("dion", **fields), 2)
    for step in range(2):
        assert not running.mean([torch.zeros(N)] * 2, step).any()
    assert running.mean(list(gradients(1, 2)[0]), 2).ne(0).all()


def test_buckets_do_not_matter(simulated, clock):
    """The first Q depends on the shape alone, so other lanes differ by rounding only."""
    method = gcbench.get_compressor("dion")
    carried, xs = memory.of(method), gradients(3, 2)
    whole = exchange(simulated, clock, method, 2)
    parts = [PLACES[2], PLACES[0]]
    lanes = [
        lane_of([shape], start, method, "allreduce", carried, exact=False)
        for shape, start in (((9, 2, 7), 0), ((24, 18), 126))
    ]
    split = Exchange(simulated(2), lanes, 3, clock)
    for step, pair in enumerate(xs):
        mean = whole.mean(list(pair), step)
        actual = split.mean([torch.cat([x[part] for part in parts]) for x in pair], step)
        expected = torch.cat([mean[part] for part in parts])
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("forked")
def test_simulation_processes_and_ddp_train_the_same_parameters(tmp_path):
    words = ("run", "--task", "digits", "--compressor", "dion", "--steps", 12, "--workers", 2)
    words = (*words, "--results", tmp_path, "--json", "--progress", "none")
    runs = invoke(*words, "--engine", "simulate,spawn,ddp").json
    assert len(runs) == 3
    assert len({run["params_sha256"] for run in runs}) == 1


def test_fields_reach_memory_and_configuration():
    method = gcbench.get_compressor("dion", mu=0.9)
    assert memory.of(method) == DecoupledMomentum(0.9)
    config = Config.make({"compressor": "dion", "task": "digits"})
    assert (config.optimizer, config.momentum, config.decay, config.lr) == (
        *("sgd", 0.0, "update"),
        0.01,
    )


@pytest.mark.parametrize(
    ("fields", "value"),
    [
        ({"rank_fraction": 0.0}, "rank_fraction=0"),
        ({"rank_fraction": 1.5}, "1.5"),
        ({"mu": 1.0}, "1.0"),
    ],
)
def test_values_out_of_range_are_refused(fields, value):
    with pytest.raises(UsageError, match=value):
        gcbench.get_compressor("dion", **fields)


@pytest.mark.parametrize("mu", [7.0, 1.0, -0.5])
def test_the_memorys_mu_is_checked(mu):
    with pytest.raises(UsageError, match=r"mu=.*expected"):
        memory.of(gcbench.get_compressor("dion"), {"mu": mu})
