"""Exchanges over a simulated world: exact means, and bytes counted from what was handed over."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

import gcbench
from gcbench import ops
from gcbench.core import codec, memory, purposes, registry
from gcbench.core.compressor import (
    TILE,
    Compressor,
    Context,
    Key,
    MultiRoundCompressor,
    Payload,
    Segments,
    cuttable,
)
from gcbench.core.errors import PayloadError, UsageError
from gcbench.core.exchange import (
    Exchange,
    Lane,
    check_legal,
    classifier,
    dense_tensors,
    shard_bounds,
)


@dataclass(frozen=True)
class Sparse(Compressor):
    """Sends the nonzero entries: a method whose payload sizes depend on the data."""

    name = "sparse"
    collectives: ClassVar[tuple[str, ...]] = ("allgather", "twoshot")

    def encode(self, x, ctx):
        places = x.nonzero().view(-1)
        return Payload((places.int(), x[places]))

    def decode(self, payload, ctx):
        places, values = payload.parts
        if places.numel() != values.numel():
            raise PayloadError("as many places as values expected")
        return torch.zeros(ctx.segments.numel).index_put((places.long(),), values)


def integers(workers: int, n: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(n + workers)
    return [torch.randint(-3, 4, (n,), generator=generator).float() for _ in range(workers)]


def run(simulated, clock, method, collective, xs, shapes=None, granularity="tensor"):
    world = simulated(len(xs))
    segments = Segments.of(shapes or [(len(xs[0]),)], granularity)
    exchange = Exchange(world, [Lane(method, collective, 0, segments)], 0, clock)
    clock.start_step()
    mean = exchange.mean(xs, step=1)
    clock.end_step()
    return mean, world


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 8, 64])
@pytest.mark.parametrize("collective", ["allreduce", "allgather", "twoshot", "ring"])
def test_no_compression_gives_the_exact_mean(simulated, clock, workers, collective):
    xs = integers(workers, 5000)
    mean, _ = run(simulated, clock, gcbench.get_compressor("none"), collective, xs)
    assert torch.equal(mean, sum(xs) / workers)


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8, 64])
def test_terngrad_is_the_same_in_every_collective(simulated, clock, workers):
    xs = [torch.randn(7000, generator=torch.Generator().manual_seed(i)) for i in range(workers)]
    shapes = [(100, 40), (3000,)]
    method = gcbench.get_compressor("terngrad")
    means = [
        run(simulated, clock, method, collective, xs, shapes)[0]
        for collective in ("twoshot", "allreduce", "allgather")
    ]
    assert torch.equal(means[0], means[1])
    assert torch.equal(means[0], means[2])
    assert means[0].unique().numel() > 3


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("collective", ["allgather", "twoshot"])
def test_sizes_that_depend_on_the_data_travel_and_count(simulated, clock, workers, collective):
    xs = integers(workers, 3000)
    for rank, x in enumerate(xs):
        x[rank * 100 :: 2 + rank] = 0
    mean, world = run(simulated, clock, Sparse(), collective, xs)
    torch.testing.assert_close(mean, sum(xs) / workers, rtol=1e-6, atol=1e-6)
    headers = 2 * 8 * (1 if collective == "allgather" else workers)
    for x, traffic in zip(xs, world.traffic, strict=True):
        assert traffic.payload_up == 8 * int((x != 0).sum()) + headers


def words(n: int, bits: int) -> int:
    return 4 * ops.packing.packed_words(n, bits)


def test_bytes_of_terngrad(simulated, clock):
    """Every number by hand: payloads, the agreement on scales, and what crosses the wire."""
    n, workers, segments = 10_000, 4, 2
    xs = [torch.randn(n, generator=torch.Generator().manual_seed(i)) for i in range(workers)]
    shapes = [(50, 100), (5000,)]
    method = gcbench.get_compressor("terngrad")
    scales = 4 * segments
    agreed = 2 * (workers - 1) / workers * scales

    _, world = run(simulated, clock, method, "allgather", xs, shapes)
    for traffic in world.traffic:
        assert traffic.payload_up == words(n, 2) + scales
        assert traffic.payload_down == workers * words(n, 2) + scales
        assert traffic.wire == (workers - 1) * words(n, 2) + agreed

    _, world = run(simulated, clock, method, "allreduce", xs, shapes)
    for traffic in world.traffic:
        assert traffic.payload_up == traffic.payload_down == words(n, 4) + scales
        assert traffic.wire == 1.5 * words(n, 4) + agreed

    _, world = run(simulated, clock, method, "twoshot", xs, shapes)
    bounds = shard_bounds(n, workers)
    sizes = [b - a for a, b in itertools.pairwise(bounds)]
    for traffic, local in zip(world.traffic, sizes, strict=True):
        assert traffic.payload_up == words(n, 2) + scales
        assert traffic.payload_down == words(n, 4) + scales
        sent = words(n, 2) - words(local, 2) + (workers - 1) * words(local, 4)
        assert traffic.wire == sent + agreed


def test_bytes_of_no_compression(simulated, clock):
    xs = integers(4, 4096)
    method = gcbench.get_compressor("none")
    for collective, down, wire in (
        ("allreduce", 1, 1.5),
        ("allgather", 4, 3),
        ("twoshot", 1, 1.5),
        ("ring", 1, 1.5),
    ):
        _, world = run(simulated, clock, method, collective, xs)
        for traffic in world.traffic:
            assert traffic.payload_up == 4 * 4096
            assert traffic.payload_down == down * 4 * 4096
            assert traffic.wire == wire * 4 * 4096


def test_the_count_is_the_length_of_the_tensors(simulated, clock, monkeypatch):
    """Weigh what reaches the transport, and compare with what was counted."""
    seen = []
    world_type = type(simulated(1))
    for name in ("_all_reduce", "_all_gather", "_all_to_all"):
        original = getattr(world_type, name)

        def weigh(self, tensors, *rest, _original=original):
            flat = [t for row in tensors for t in (row if isinstance(row, list) else [row])]
            seen.append(sum(t.numel() * t.element_size() for t in flat))
            return _original(self, tensors, *rest)

        monkeypatch.setattr(world_type, name, weigh)
    xs = [torch.randn(9000, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    _, world = run(simulated, clock, gcbench.get_compressor("terngrad"), "twoshot", xs)
    agreement, shards, _ = seen
    assert sum(t.payload_up for t in world.traffic) == agreement + shards
    ratio = 4 * 9000 / world.traffic[0].payload_up
    assert 15.9 < ratio <= 16


def test_modelled_time_follows_the_link(simulated, clock):
    xs = integers(4, 1_000_000)
    _, world = run(simulated, clock, gcbench.get_compressor("none"), "allreduce", xs)
    assert world.modelled_seconds == pytest.approx(6 * 50e-6 + 1.5 * 4e6 * 8 / 10e9)


@pytest.mark.parametrize("workers", [2, 4])
def test_a_broadcast_takes_as_long_as_its_root_sends(simulated, workers):
    """The mean over workers of what they send had been taken: half of it between two."""
    world = simulated(workers)
    world.broadcast(torch.zeros(1_000_000))
    assert world.modelled_seconds == pytest.approx((workers - 1) * 50e-6 + 4e6 * 8 / 10e9)


def test_dense_lane_rides_beside(simulated, clock):
    """What a policy keeps dense arrives exactly; the rest is ternary."""
    xs = [torch.randn(3000, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    world = simulated(4)
    lanes = [
        Lane(gcbench.get_compressor("terngrad"), "twoshot", 0, Segments.of([(2900,)])),
        Lane(gcbench.get_compressor("none"), "allreduce", 2900, Segments.of([(100,)])),
    ]
    mean = Exchange(world, lanes, 0, clock).mean(xs, 0)
    expected = ((xs[0] + xs[1] + xs[2] + xs[3]) / 4)[2900:]
    assert torch.equal(mean[2900:], expected)
    assert mean[:2900].unique().numel() <= 9
    assert world.traffic[0].payload_up == words(2900, 2) + 4 + 400


def test_dense_policy():
    names, shapes = ["a.weight", "a.bias", "b.weight"], [(30, 10), (30,), (5, 30)]
    assert dense_tensors(names, shapes, 0, []) == [False, False, False]
    assert dense_tensors(names, shapes, 151, ["b.weight"]) == [False, True, True]
    with pytest.raises(UsageError, match=r"dense_last: the last layer, c\.weight, is not trained"):
        dense_tensors(names, shapes, 0, ["c.weight"])


class Tied(nn.Module):
    """A language model whose head has the weight of its embedding, or one of its own."""

    def __init__(self, *, tied: bool, bias: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 10, bias=bias)
        if tied:
            self.head.weight = self.words.weight


@pytest.mark.parametrize(
    ("tied", "bias", "last"),
    [
        (False, False, ["head.weight"]),
        (True, False, ["words.weight"]),
        (True, True, ["words.weight", "head.bias"]),
    ],
)
def test_the_last_layer_is_named_as_the_models_parameters_are(tied, bias, last):
    """A head that is tied to the embedding is the embedding's weight, and stays dense as that."""
    model = Tied(tied=tied, bias=bias)
    assert classifier(model) == last
    assert classifier(nn.Linear(2, 3)) == ["weight", "bias"]
    names = [name for name, _ in model.named_parameters()]
    dense = dense_tensors(names, [(8,)] * len(names), 0, classifier(model))
    assert [name for name, selected in zip(names, dense, strict=True) if selected] == last


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
@pytest.mark.parametrize("n", [0, 1, 1023, 1024, 1025, 5000])
def test_shard_bounds_cover_everything_in_whole_tiles(workers, n):
    bounds = shard_bounds(n, workers)
    assert bounds[0] == 0
    assert bounds[-1] == n
    assert len(bounds) == workers + 1
    assert all(a <= b for a, b in itertools.pairwise(bounds))
    assert all(bound % TILE == 0 or bound == n for bound in bounds)


def test_illegal_combinations_name_the_legal_ones():
    local = gcbench.get_compressor("terngrad", share=False)
    assert check_legal(local) == "allgather"
    with pytest.raises(UsageError, match=r"allreduce: its mean would be wrong. Legal: allgather"):
        check_legal(local, "allreduce")
    with pytest.raises(UsageError, match="allreduce, allgather, twoshot, ring"):
        check_legal(local, "tree")


def test_random_numbers_follow_rank_and_place(simulated, clock):
    """A bucket at an offset draws the same numbers as inside one large bucket."""
    x = torch.ones(4 * TILE)
    method = gcbench.get_compressor("terngrad", clip=0)
    segments = Segments.of([(4 * TILE,)])
    shared = torch.tensor([2.0])
    whole = codec.encode(method, x, Context(segments, shared, Key(1, 1, 0)))
    part, _ = segments.shard(TILE, 4 * TILE)
    late = codec.encode(method, x[TILE:], Context(part, shared, Key(1, 1, 0, offset=TILE)))
    expected = codec.decode(method, whole, Context(segments, shared))[TILE:]
    assert torch.equal(codec.decode(method, late, Context(part, shared)), expected)


def low_rank_errors(simulated, clock, steps: int, **options) -> list[float]:
    """Return the relative errors of PowerSGD on one constant matrix, step by step."""
    generator = torch.Generator().manual_seed(4)
    left, _ = torch.linalg.qr(torch.randn(60, 40, generator=generator))
    right, _ = torch.linalg.qr(torch.randn(40, 40, generator=generator))
    x = (left @ torch.diag(1 / torch.arange(1.0, 41)) @ right.T).reshape(-1)
    method = gcbench.get_compressor("powersgd", **options)
    lane = Lane(method, "allreduce", 0, Segments.of([(60, 40)]))
    exchange = Exchange(simulated(3), [lane], 0, clock)
    clock.start_step()
    means = [exchange.mean([x, x, x], step).clone() for step in range(steps)]
    return [float((mean - x).norm() / x.norm()) for mean in means]


def test_the_state_of_a_method_in_rounds_is_kept(simulated, clock):
    """Warm start: power iteration goes on over the steps, to the best approximation of rank 2."""
    errors = low_rank_errors(simulated, clock, 8)
    spectrum = 1 / torch.arange(1.0, 41)
    best = float(spectrum[2:].norm() / spectrum.norm())
    assert errors[0] > 1.1 * best
    assert errors == sorted(errors, reverse=True)
    assert best * (1 - 1e-5) < errors[-1] < 1.01 * best


def test_a_method_in_rounds_may_draw_anew_at_every_step(simulated, clock):
    errors = low_rank_errors(simulated, clock, 6, warm_start=False)
    assert len(set(errors)) == 6


@dataclass(frozen=True)
class Rounds(MultiRoundCompressor):
    """Sends the gradient in a number of rounds that its layout may not have."""

    sent: int = 1
    name = "rounds"

    def initial_state(self, ctx):
        return torch.empty(0)

    def in_rounds(self, x, state, ctx):
        mean = x
        for _ in range(self.sent):
            mean = yield x
        return mean, state

    def layout(self, segments, count=1):
        return ((torch.float32, segments.numel),) * 2


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (0, "rounds: fewer rounds than the 2 of its layout"),
        (1, "rounds: fewer rounds than the 2 of its layout"),
        (3, "rounds: more rounds than the 2 of its layout"),
    ],
)
def test_rounds_that_the_layout_does_not_have_are_an_error(simulated, clock, sent, message):
    lane = Lane(Rounds(sent), "allreduce", 0, Segments.of([(5,)]))
    exchange = Exchange(simulated(3), [lane], 0, clock)
    clock.start_step()
    with pytest.raises(UsageError, match=message):
        exchange.mean(integers(3, 5), 0)
    lane = Lane(Rounds(2), "allreduce", 0, Segments.of([(5,)]))
    exchange = Exchange(simulated(3), [lane], 0, clock)
    assert torch.equal(exchange.mean(integers(3, 5), 0), sum(integers(3, 5)) / 3)


class Greedy(type(gcbench.get_compressor("signsgd"))):
    """Ignores where it is to write."""

    def decode(self, payload, ctx):
        return super().decode(payload, ctx._replace(out=None))


def largest_allocation(simulated, clock, method, collective) -> int:
    """Return the bytes of the largest tensor that 8 workers' third step makes."""
    n = 2**17
    carried = memory.make(method.memory, method.memory_options)
    lane = Lane(method, collective, 0, Segments.of([(2**8, 2**9)], method.granularity), carried)
    exchange = Exchange(simulated(8), [lane], 0, clock)
    xs = [torch.randn(n, generator=torch.Generator().manual_seed(rank)) for rank in range(8)]
    for step in range(2):
        exchange.mean(xs, step)
    with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as profiled:
        exchange.mean(xs, 2)
    assert profiled.kineto_results is not None
    events = profiled.kineto_results.events()
    return max((e.nbytes() for e in events if e.name() == "[memory]"), default=0)


@pytest.mark.parametrize("name", registry.compressors())
def test_nothing_large_is_made_after_the_second_step(simulated, clock, name):
    """Neither by an exchange nor by the method, unless it says so: then it does."""
    method = gcbench.get_compressor(name)
    clock.start_step()
    collectives = set(method.legal_collectives()) - {"allreduce"}
    if not collectives:
        pytest.skip("a sum of floats has no buffer of the exchange's own")
    created = {each: largest_allocation(simulated, clock, method, each) for each in collectives}
    assert (max(created.values()) >= 2**17) == method.scratch, created


def test_a_decoder_that_makes_its_own_tensor_is_seen(simulated, clock):
    clock.start_step()
    assert largest_allocation(simulated, clock, Greedy(), "allgather") >= 4 * 2**17


# ---- the first half of a two-shot exchange -------------------------------------------------------

SHARDED = [
    name
    for name in registry.compressors()
    if "twoshot" in gcbench.get_compressor(name).legal_collectives()
]


@pytest.mark.parametrize("edges", [(), (0, 700, 700, 5000)])
@pytest.mark.parametrize("name", SHARDED)
def test_a_shard_is_the_mean_of_what_each_worker_sent_of_it(simulated, clock, name, edges):
    """At edges inside a tile and with an empty shard, too; computed by hand of the codec."""
    method, shapes = gcbench.get_compressor(name), [(14, 50), (56, 50), (1500,)]
    xs = [torch.randn(5000, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    segments = Segments.of(shapes, method.granularity)
    lane = Lane(method, "twoshot", 64, segments, edges=edges)
    exchange = Exchange(simulated(3), [lane], 7, clock)
    clock.start_step()
    shards = [shard.clone() for shard in exchange.lane_shards(0, xs, step=2)]
    clock.end_step()
    bounds = edges or shard_bounds(5000, 3)
    assert [shard.numel() for shard in shards] == [b - a for a, b in itertools.pairwise(bounds)]
    shared = torch.stack([codec.prepare(method, x, Context(segments)).statistic for x in xs]).amax(
        0
    )
    for r, (a, b) in enumerate(itertools.pairwise(bounds)):
        local, which = segments.shard(a, b)
        agreed = shared[which.start : which.stop] if shared.numel() else shared
        payloads = []
        for rank, x in enumerate(xs):
            key = Key(7, 2, rank, 64, purposes.ENCODE)
            if cuttable(method) and not edges:
                payloads.append(
                    method.cut(codec.encode(method, x, Context(segments, shared, key)), bounds)[r]
                )
            else:
                there = key._replace(offset=64 + a)
                payloads.append(codec.encode(method, x[a:b], Context(local, agreed, there)))
        assert torch.equal(shards[r], codec.mean(method, payloads, Context(local, agreed)))


def test_edges_of_shards_lie_between_segments():
    """A segment that an edge cuts would have another scale on each side than was agreed on."""
    method, segments = gcbench.get_compressor("terngrad"), Segments.of([(10,), (20,)])
    Lane(method, "twoshot", 0, segments, edges=(0, 10, 30))
    with pytest.raises(ValueError, match="edges"):
        Lane(method, "twoshot", 0, segments, edges=(0, 15, 30))


@pytest.mark.parametrize("name", ["none", "terngrad", "signsgd"])
def test_where_the_owner_loses_nothing_shards_are_the_two_shot_mean(simulated, clock, name):
    xs = [torch.randn(5000, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    method = gcbench.get_compressor(name)
    whole, world = run(simulated, clock, method, "twoshot", xs)
    lane = Lane(method, "twoshot", 0, Segments.of([(5000,)]))
    half = Exchange(simulated(3), [lane], 0, clock)
    clock.start_step()
    assert torch.equal(torch.cat(half.lane_shards(0, xs, step=1)), whole)
    clock.end_step()
    assert half.world.traffic[0].payload_up == world.traffic[0].payload_up
    assert half.world.traffic[0].wire < world.traffic[0].wire, "nothing travels down"


def carrying(simulated, clock):
    """An exchange of two workers, 2048 elements in two shards, with residuals on both levels."""
    lane = Lane(
        *(gcbench.get_compressor("onebit"), "twoshot", 0, Segments.of([(1500,), (548,)])),
        memory.make("residual", {}),
    )
    created = Exchange(simulated(2), [lane], 0, clock)
    created.divide([[slice(0, 1500), slice(1500, 2048)]])
    for step in range(2):
        created.follow([[1.0, 1.0]])
        created.mean([torch.randn(2048) for _ in range(2)], step, 1.0)
    return created


@dataclass(frozen=True)
class Scaled(Sparse):
    """Sends the update: the gradient times the learning rate."""

    name = "scaled"

    def encode(self, x, ctx):
        return super().encode(x * ctx.lr, ctx)


def test_a_method_reads_the_rate_of_its_lane_or_is_refused(simulated, clock):
    """Rates may differ between lanes, and part of a lane may have none."""
    x, segments = torch.tensor([1.0, 2.0]), Segments.of([(1,), (1,)])
    lanes = [Lane(Scaled(), "allgather", start, segments) for start in (0, 2)]
    created = Exchange(simulated(1), lanes, 0, clock)
    created.divide([[slice(0, 1), slice(1, 2)]] * 2)
    clock.start_step()
    assert created.lane_mean(0, [x], 0).tolist() == [1.0, 2.0], "without a rate it is 1"
    created.follow([[0.5, 0.5], [None, 0.25]])
    assert created.lane_mean(0, [x], 0).tolist() == [0.5, 1.0]
    assert created.lane_mean(1, [x], 0).tolist() == [0.25, 0.5]
    created.follow([[0.5, 0.125], [0.25, 0.25]])
    with pytest.raises(UsageError, match="different learning rates"):
        created.lane_mean(0, [x], 1)
    assert created.lane_mean(1, [x], 1).tolist() == [0.25, 0.5]


def test_each_part_follows_its_own_rate(simulated, clock):
    """Rates 1 -> 0.5 and 0.25; None and 0 change nothing."""
    created = carrying(simulated, clock)
    for rates, factors in (
        ([[0.5, 0.25]], (2.0, 4.0)),
        ([[None, 0.0]], (1.0, 1.0)),
        ([[0.5, 0.5]], (1.0, 0.5)),
    ):
        whole = torch.cat([torch.full((1500,), factors[0]), torch.full((548,), factors[1])])
        before = [{k: v.clone() for k, v in local[0].items()} for local in created.workers]
        created.follow(rates)
        for rank, (old, local) in enumerate(zip(before, created.workers, strict=True)):
            assert torch.equal(local[0]["residual"], old["residual"] * whole)
            shard = whole[1024 * rank : 1024 * (rank + 1)]
            assert torch.equal(local[0]["owner"], old["owner"] * shard)
    assert created.lr == 0.5
    created.assume([[0.125, None]])
    assert created.rates == [[0.125, 0.5]]


WRONG_STATES = {
    "rank": lambda state: {**state, "rank": 1},
    "world size": lambda state: {**state, "world_size": 3},
    "place": lambda state: {**state, "places": [[0, 2049]]},
    "rate": lambda state: {**state, "rates": [[1.0, float("nan")]]},
    "traffic": lambda state: {**state, "traffic": [1.0, 2.0]},
    "name": lambda state: {**state, "tensors": {**state["tensors"], "memory 7 residual": 0}},
    "other": lambda state: {**state, "tensors": {**state["tensors"], "memory 0 x": torch.ones(1)}},
    "no tensors": lambda state: {k: v for k, v in state.items() if k != "tensors"},
    "flipped": lambda state: {
        **state,
        "tensors": {k: v + 1 if "owner" in k else v for k, v in state["tensors"].items()},
    },
}


@pytest.mark.parametrize("wrong", WRONG_STATES)
def test_a_state_comes_back_to_the_bit_or_is_refused(simulated, clock, wrong):
    created, again = carrying(simulated, clock), carrying(simulated, clock)
    state = created.state_dict(0)
    before = again.state_dict(0)
    with pytest.raises(UsageError, match="the saved state"):
        again.load_state_dict(WRONG_STATES[wrong](state), 0)
    assert again.state_dict(0)["digest"] == before["digest"], "nothing was changed"
    again.load_state_dict(state, 0)
    assert again.state_dict(0)["digest"] == state["digest"] != before["digest"]
