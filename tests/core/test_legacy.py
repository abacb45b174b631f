"""Plug-ins written for the contract of version 0.1 run for one more release, and say so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import gcbench
from gcbench.core.compressor import Compressor, Key, MultiRoundCompressor, Payload, Segments
from gcbench.core.exchange import Exchange, Lane
from gcbench.core.memory import NoMemory, Residual
from gcbench.studies import conformance


def deprecated(make):
    with pytest.warns(DeprecationWarning, match=r"contract of gcbench 0\.1") as seen:
        cls = make()
    return cls, str(seen[0].message)


def halves():
    @dataclass(frozen=True)
    class Halves(Compressor):
        collectives: ClassVar[tuple[str, ...]] = ("allgather", "twoshot")
        contractive = True
        exact_for = ("signs", "ternary", "integers", "bytes", "sparse")

        def error_bound(self, x, segments):
            return float(x.double().square().sum()) * 2.0**-20 + 1e-9

        def encode(self, x, segments, shared, key):
            return Payload((x.clamp(-65504, 65504).half(),))

        def decode(self, payload, segments, shared):
            self.check(payload, segments)
            return self.check_finite(payload.parts[0].float())

        def layout(self, segments, count=1):
            return ((torch.float16, segments.numel),)

    return Halves


def test_a_codec_of_the_old_contract_is_held_to_what_it_declares():
    cls, said = deprecated(halves)
    for named in (
        "encode takes `out`",
        "decode takes `out`",
        "contractive, error_bound, exact_for",
    ):
        assert named in said
    method = cls()
    assert method.claims.contractive
    assert not method.claims.unbiased, "what it does not declare is as it was"
    assert method.claims.error_bound(torch.ones(4), Segments((0, 4))) == 4 * 2.0**-20 + 1e-9
    for check in ("purity", "outputs", "buffers", "bytes", "exact small integers"):
        assert conformance.run(method, check).verdict == "holds", check
    # 1e30 is beyond float16: the old declaration is judged, and found wrong.
    assert conformance.run(method, "contraction").verdict == "fails"


def test_old_and_new_exchange_alike(simulated, clock):
    cls, _ = deprecated(halves)
    clock.start_step()
    xs = [torch.randn(3000, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    for collective in ("allgather", "twoshot"):
        means = []
        for method in (cls(), gcbench.get_compressor("fp16")):
            lane = Lane(method, collective, 0, Segments.of([(3000,)]), Residual())
            exchange = Exchange(simulated(3), [lane], 0, clock)
            means.append([exchange.mean(xs, step).clone() for step in range(3)])
        assert all(map(torch.equal, *means))


def test_a_statistic_of_the_old_contract_is_agreed_on(simulated, clock):
    def make():
        class Scaled(Compressor):
            def statistic(self, x, segments):
                return x.abs().amax().reshape(1)

            def encode(self, x, segments, shared, key):
                return Payload(((x / shared * 127).round().to(torch.int8),))

            def decode(self, payload, segments, shared):
                return payload.parts[0].float() * (shared / 127)

        return Scaled

    cls, said = deprecated(make)
    assert "`prepare`" in said
    clock.start_step()
    exchange = Exchange(simulated(2), [Lane(cls(), "allgather", 0, Segments((0, 2)))], 0, clock)
    mean = exchange.mean([torch.tensor([1.0, 0.5]), torch.tensor([-127.0, 2.0])], 0)
    assert mean.tolist() == [-63.0, 1.0], "0.5 of the scale 127 rounds to 0"


def test_rounds_of_the_old_contract_are_one_generator(simulated, clock):
    def make():
        class Sum(MultiRoundCompressor):
            rounds: ClassVar[int] = 2

            def initial_state(self, segments, key):
                return torch.zeros(1)

            def contribute(self, x, segments, state, means):
                return means[0] + x if means else 2 * x

            def reconstruct(self, means, segments):
                return means[1]

            def next_state(self, means, segments, key):
                return torch.full((1,), float(key.step))

            def layout(self, segments, count=1):
                return ((torch.float32, segments.numel),) * 2

        return Sum

    cls, said = deprecated(make)
    assert "in_rounds" in said
    clock.start_step()
    lane = Lane(cls(), "allreduce", 0, Segments((0, 2)), NoMemory())
    exchange = Exchange(simulated(2), [lane], 0, clock)
    xs = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]
    assert exchange.mean(xs, 0).tolist() == [6.0, 9.0]
    assert exchange.joint[0]["state"].tolist() == [1.0]
    payload = cls().encode(xs[0], lane.segments, torch.empty(0), Key(0, 0, 0))
    assert cls().decode(payload, lane.segments, torch.empty(0)).tolist() == [3.0, 6.0]


def test_what_cannot_be_adapted_is_refused():
    with pytest.raises(TypeError, match="declare `cuttable`"):

        class Shards(Compressor):
            def encode_shards(self, x, segments, shared, key, bounds):
                return []


def test_the_present_contract_warns_of_nothing(recwarn):
    class Present(Compressor):
        def encode(self, x, segments, shared, key, **how):
            return Payload((x,))

        def decode(self, payload, segments, shared, *, out=None):
            return payload.parts[0]

    assert not recwarn.list
