"""Distributed Lion: signs of interpolated momenta, their vote and their average."""

from __future__ import annotations

import math

import pytest
import torch
from gcbench.compressors.dlion import LionMomentum

import gcbench
from gcbench.core import codec, memory
from gcbench.core.compressor import Context, Key, Payload, Segments
from gcbench.core.errors import PayloadError, UsageError
from gcbench.core.exchange import Exchange, lane_of
from gcbench.training.configuration import Config

AGGREGATES = ("vote", "average")
B1, B2 = 0.9, 0.99


def dlion(aggregate="vote"):
    return gcbench.get_compressor("dlion", aggregate=aggregate)


def gradients(steps: int, workers: int, n: int) -> torch.Tensor:
    return torch.randn(steps, workers, n, generator=torch.Generator().manual_seed(6))


def exchange(simulated, clock, aggregate, workers, n, collective="twoshot", *, exact=False):
    method = dlion(aggregate)
    lane = lane_of([(n,)], 0, method, collective, memory.of(method), exact=exact)
    clock.start_step()
    return Exchange(simulated(workers), [lane], 0, clock)


def lion(grads):
    """Lion written out (Chen et al. 2023), with sign(0) = +1: the direction of each step."""
    m, path = torch.zeros(grads.shape[-1]), []
    for g in grads:
        path.append(torch.where(torch.lerp(m, g, 1 - B1) >= 0, 1.0, -1.0))
        m = torch.lerp(m, g, 1 - B2)
    return path


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_one_worker_is_lion(simulated, clock, aggregate, exact):
    """Bit for bit, with the codec and in fp32."""
    grads = gradients(20, 1, 1500)
    collective = "allreduce" if exact else "twoshot"
    created = exchange(simulated, clock, aggregate, 1, 1500, collective, exact=exact)
    for step, direction in enumerate(lion(grads[:, 0])):
        assert torch.equal(created.mean([grads[step, 0]], step), direction)


@pytest.mark.parametrize("workers", [2, 3, 7])
@pytest.mark.parametrize("collective", ["twoshot", "allgather"])
@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_several_workers_by_the_definition(simulated, clock, aggregate, collective, workers):
    """D = sign(sum d_i), of ties +1, or sum d_i / N, exactly."""
    grads = gradients(6, workers, 2100)
    created = exchange(simulated, clock, aggregate, workers, 2100, collective)
    signs = [lion(grads[:, rank]) for rank in range(workers)]
    for step in range(6):
        total = torch.stack([local[step] for local in signs]).sum(0)
        expected = total / workers if aggregate == "average" else torch.where(total >= 0, 1.0, -1.0)
        assert torch.equal(created.mean(list(grads[step]), step), expected)


def test_equal_gradients_are_lion(simulated, clock):
    grads = gradients(5, 1, 600).expand(5, 4, 600)
    for aggregate in AGGREGATES:
        created = exchange(simulated, clock, aggregate, 4, 600)
        for step, direction in enumerate(lion(grads[:, 0])):
            assert torch.equal(created.mean(list(grads[step]), step), direction)


@pytest.mark.parametrize(("aggregate", "down"), [("vote", 1), ("average", 3)])
def test_bits_up_and_down(aggregate, down):
    """One bit up; down the vote, or the count of 0 to 5 positive signs in 3 bits."""
    method, segments = dlion(aggregate), Segments.of([(1024,)])
    xs = torch.randn(5, 1024, generator=torch.Generator().manual_seed(0)).sign()
    sent = [codec.encode(method, x, Context(segments, key=Key(0, 0, r))) for r, x in enumerate(xs)]
    merged = codec.merge(method, sent, Context(segments))
    assert 8 * sent[0].nbytes == 1024
    assert 8 * merged.nbytes == 1024 * down
    assert merged.count == 5


def test_zeros_count_as_plus(simulated, clock):
    """Which Lion has as 0: an element without gradient drifts."""
    created = exchange(simulated, clock, "vote", 1, 4)
    assert created.mean([torch.zeros(4)], 0).tolist() == [1.0] * 4


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_corrupt_payloads_are_refused(aggregate):
    method, segments = dlion(aggregate), Segments.of([(100,)])
    words = codec.encode(method, torch.ones(100), Context(segments)).parts[0]
    for wrong in (Payload((words[1:],)), Payload((words, words)), Payload((words,), 0)):
        with pytest.raises(PayloadError, match="dlion"):
            codec.decode(method, wrong, Context(segments))
    if aggregate == "average":
        merged = codec.merge(method, [Payload((words,))] * 4, Context(segments))
        many = Payload((torch.full_like(merged.parts[0], -1),), 4)  # 7 of 4 signs
        with pytest.raises(PayloadError, match=r"dlion: .*workers"):
            codec.decode(method, many, Context(segments))


def test_parameters_stay_within_one_over_the_decay(simulated, clock):
    """Phase 1 of the paper: |theta| falls to 1 / lambda, and stays."""
    created, decay, lr = exchange(simulated, clock, "vote", 3, 64), 0.5, 0.1
    theta = torch.full((64,), 20.0)
    for step, grads in enumerate(gradients(120, 3, 64)):
        theta = theta - lr * (created.mean(list(grads), step, lr) + decay * theta)
        if step > 80:
            assert float(theta.abs().max()) <= 1 / decay + 1e-5
    assert math.isfinite(float(theta.sum()))


def test_a_run_applies_it_by_plain_sgd():
    config = Config.make({"compressor": "dlion", "task": "digits"})
    assert (config.optimizer, config.momentum, config.decay) == ("sgd", 0.0, "update")
    assert config.memory == "dlion"
    assert config.make_memory() == LionMomentum()


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_dense_tensors_follow_the_same_rule(simulated, clock, aggregate):
    """In fp32 the mean of the signs travels, and the rule takes its sign for the vote."""
    grads = gradients(4, 4, 300)
    created = exchange(simulated, clock, aggregate, 4, 300, "allreduce", exact=True)
    signs = [lion(grads[:, rank]) for rank in range(4)]
    for step in range(4):
        total = torch.stack([local[step] for local in signs]).sum(0)
        assert bool((total == 0).any()), "ties are +1"
        expected = total / 4 if aggregate == "average" else torch.where(total >= 0, 1.0, -1.0)
        assert torch.equal(created.mean(list(grads[step]), step), expected)


@pytest.mark.parametrize("fields", [{"beta1": 5.0}, {"beta2": 1.0}, {"beta1": -0.1}])
def test_betas_are_checked(fields):
    with pytest.raises(UsageError, match=f"{next(iter(fields))}=.*expected"):
        memory.of(gcbench.get_compressor("dlion"), fields)
