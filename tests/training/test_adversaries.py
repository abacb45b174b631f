"""Adversaries, stragglers and the trimmed mean: by hand, in both engines, and what is refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from commands import invoke
from test_engines import SAME, trainer  # noqa: F401 - a fixture

import gcbench
from gcbench.core import codec
from gcbench.core.compressor import Context, Key, Segments
from gcbench.core.errors import UsageError
from gcbench.training import train
from gcbench.training.configuration import Config


def config(**settings) -> Config:
    common = {"task": "digits", "workers": 7, "batch": 70, "steps": 60, "compressor": "none"}
    return Config.make({**common, **settings})


def sent(trainer, monkeypatch, **settings) -> list[torch.Tensor]:  # noqa: F811
    """Return what the workers hand to the exchange in the first step."""
    job, seen = trainer(config(**settings)), []
    real = job.exchange.mean

    def watch(buckets, *rest):
        seen.extend(bucket.clone() for bucket in buckets)
        return real(buckets, *rest)

    monkeypatch.setattr(job.exchange, "mean", watch)
    job.train_step()
    return seen


@pytest.mark.parametrize(("kind", "factor"), [("flip", -1.0), ("scale", -100.0)])
def test_the_last_ranks_attack(trainer, monkeypatch, kind, factor):  # noqa: F811
    honest = sent(trainer, monkeypatch)
    attacked = sent(trainer, monkeypatch, adversaries=2, attack=kind)
    for rank, (a, b) in enumerate(zip(honest, attacked, strict=True)):
        assert torch.equal(b, factor * a if rank >= 5 else a)


def test_random_factors_are_uniform_and_have_an_address():
    x = torch.ones(100_000)
    draws = []
    for key in (Key(0, 0, 1), Key(0, 0, 1), Key(0, 1, 1), Key(0, 0, 2), Key(1, 0, 1)):
        draws.append(x.clone())
        train.attack(draws[-1], "random", key)
    assert torch.equal(draws[0], draws[1])
    assert not any(torch.equal(draws[0], other) for other in draws[2:])
    assert -1 <= float(draws[0].min()) < -0.999
    assert 0.999 < float(draws[0].max()) < 1
    assert abs(float(draws[0].mean())) < 5 / (3 * 100_000) ** 0.5  # five standard errors


@pytest.mark.parametrize(("workers", "trim"), [(3, 1), (7, 2), (7, 3), (8, 1)])
def test_a_trimmed_mean_by_hand(workers, trim):
    method, n = gcbench.get_compressor("none"), 500
    xs = torch.randn(workers, n, generator=torch.Generator().manual_seed(workers))
    ctx = Context(Segments.of([(n,)]))
    payloads = [codec.encode(method, x, ctx) for x in xs]
    before = [payload.parts[0].clone() for payload in payloads]
    mean = codec.trimmed_mean(method, payloads, trim, ctx)
    ordered = xs.double().numpy()
    ordered.sort(axis=0)
    expected = torch.from_numpy(ordered[trim : workers - trim].mean(0))
    torch.testing.assert_close(mean.double(), expected, rtol=1e-6, atol=1e-7)
    assert all(
        torch.equal(payload.parts[0], b) for payload, b in zip(payloads, before, strict=True)
    )


def accuracy(**settings) -> float:
    """Return the accuracy of a short run; 0 if it diverges."""
    words = ("run", "--task", "digits", "--workers", 7, "--batch", 70, "--steps", 60, "--lr", 0.01)
    flags = itertools.chain(*((f"--{key}", value) for key, value in settings.items()))
    done = invoke(*words, *flags, "--json")
    return done.json["test_accuracy"] if done.code == 0 else 0.0


def test_one_worker_that_scales_breaks_the_mean_and_nothing_else(tmp_path):
    attack = {"adversaries": 1, "attack": "scale", "results": tmp_path}
    none = {"compressor": "none", "collective": "allgather"}
    assert accuracy(**none, **attack) < 0.3
    assert accuracy(**none, trim=1, **attack) > 0.7
    assert accuracy(compressor="signsgd", **attack) > 0.7


@pytest.mark.parametrize(("count", "low", "high"), [(3, 0.7, 1.0), (4, 0.0, 0.3)])
def test_a_vote_survives_less_than_half_of_the_workers(tmp_path, count, low, high):
    assert low < accuracy(compressor="signsgd", adversaries=count, results=tmp_path) < high


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("compressor", ["none", "int8"])
def test_processes_and_a_simulation_end_in_the_same_bits(tmp_path, compressor):
    """All-gather, and two-shot with owners that trim; dense tensors are trimmed, too."""
    words = ("run", "--task", "digits", "--workers", 3, "--batch", 48, "--steps", 6)
    attack = ("--adversaries", 1, "--attack", "random", "--trim", 1, "--dense-last")
    way = ("--collective", "allgather" if compressor == "none" else "twoshot")
    grid = ("--engine", "simulate,spawn", "--straggler", "1:1.5", "--results", tmp_path)
    here, there = invoke(*words, "--compressor", compressor, *way, *attack, *grid, "--json").json
    assert {key: here[key] for key in SAME} == {key: there[key] for key in SAME}


def test_the_mean_of_dense_tensors_is_trimmed(trainer):  # noqa: F811
    job = trainer(config(trim=2, collective="allgather", compressor="int8", dense_last=True))
    assert [(lane.collective, lane.trim) for lane in job.exchange.lanes] == [("allgather", 2)] * 2


def test_a_straggler_takes_longer(trainer, monkeypatch):  # noqa: F811
    waits, seconds = list[float](), itertools.count()
    monkeypatch.setattr(train.time, "sleep", waits.append)
    for settings, slept, modelled in (
        ({"straggler": {2: 3.5, 4: 2}, "engine": "spawn"}, [2.5, 1], 0),
        ({"straggler": {2: 3.5, 4: 2}}, [], 2.5),
        ({}, [], 0),
    ):
        job = trainer(config(**settings))
        monkeypatch.setattr(job.clock, "read", lambda: float(next(seconds)))  # 1 s per gradient
        waits.clear()
        job._gradients()
        assert waits == slept
        assert job.world.modelled_seconds == modelled


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"adversaries": 7}, "adversaries=7 of 7 workers: expected at most 6"),
        ({"attack": "scale"}, "attack=scale without adversaries"),
        ({"attack": "lie", "adversaries": 1}, "attack='lie'"),
        ({"trim": 4, "collective": "allgather"}, "trim=4 .*at most 3"),
        ({"trim": 1}, "trim=1: .* by allreduce .*--collective allgather"),
        ({"trim": 1, "collective": "twoshot"}, "by twoshot .*--collective allgather"),
        ({"trim": 1, "compressor": "int8", "collective": "ring"}, "by ring"),
        ({"trim": 1, "compressor": "signsgd"}, "other than a mean"),
        ({"trim": 1, "compressor": "powersgd"}, "by allreduce"),
        ({"trim": 1, "compressor": "int8", "memory": "ef21"}, "other than a mean"),
        ({"straggler": {7: 2}}, "straggler=.*expected ranks below 7"),
        ({"straggler": {1: 0.5}}, "straggler.1=0.5: .*greater than or equal to 1"),
        ({"straggler": "two"}, "straggler='two': .*RANK:FACTOR"),
        ({"straggler": 1}, "straggler=1: .*RANK:FACTOR"),
        ({"straggler": {1: 2}, "gradients": "batched"}, "gradients=loop"),
        ({"adversaries": 1, "engine": "ddp"}, "adversaries: engine ddp"),
        ({"straggler": {1: 2}, "engine": "ddp"}, "straggler: engine ddp"),
    ],
)
def test_what_has_no_meaning_is_refused(settings, error):
    with pytest.raises(UsageError, match=error):
        config(**settings)


def test_defaults_do_not_change_a_hash():
    plain = config()
    assert config(trim=0, adversaries=0, straggler={}).hash == plain.hash
    assert config(adversaries=1).hash != plain.hash
