"""Micro-benchmarks: their arithmetic by hand, real processes, wrong results, interruptions."""

from __future__ import annotations

import itertools
import json
import math
import os
import shlex
import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from commands import PATIENCE, ROOT, end, invoke, members, start, wait_for

from gcbench.checks import inputs
from gcbench.core import codec as calls
from gcbench.core import registry
from gcbench.core.clock import Clock
from gcbench.core.errors import UsageError
from gcbench.predict import costs, links
from gcbench.profile import bandwidth, breakeven
from gcbench.profile.bandwidth import picture, settings, tables, transfers, worker
from gcbench.profile.bandwidth.transfers import BOUNDS, PLAIN, Item, Loopback, Probe, pattern
from gcbench.report import analysis as measuring
from gcbench.report import kinds

pytestmark = pytest.mark.usefixtures("forked")

CPU = torch.device("cpu")

# ---- arithmetic ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [("4", 4), ("4K", 4096), ("1.5k", 1536), ("16M", 2**24), ("1G", 2**30), ("64KB", 65536)],
)
def test_sizes_are_read_as_nccl_tests_reads_them(text, size):
    assert settings.size_of(text) == size


@pytest.mark.parametrize("text", ["", "K", "-4", "4T", "1e6", "4 4"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(UsageError, match=f"size {text!r}"):
        settings.size_of(text)


def test_lists_of_sizes():
    assert settings.listed("1M,4K, 4099") == (4096, 2**20)
    assert [settings.size_text(n) for n in (4, 4096, 6144, 2**20, 3 * 2**30)] == [
        *("4", "4K", "6K", "1M", "3G")
    ]


def test_percentiles_lie_between_neighbours():
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert tables.percentile(values, 0.5) == 3
    assert tables.percentile(values, 0.95) == pytest.approx(4.8)
    assert tables.percentile(values, 0.99) == pytest.approx(4.96)
    assert tables.percentile([7.0], 0.99) == 7


def test_luck_is_the_coins_probability():
    lower = [1.0] * 9 + [3.0]
    assert tables.p_value(lower, [2.0] * 10) == 11 / 1024  # 9 or 10 heads of 10
    assert tables.p_value([1.0] * 7, [2.0] * 7) == 1 / 128 < tables.LEVEL
    assert tables.p_value([1.0] * 6, [2.0] * 6) == 1 / 64 > tables.LEVEL
    assert tables.p_value([2.0] * 5, [2.0] * 5) == 1  # ties do not win


def test_links_by_hand():
    """4 MB plain; 1 MB in 4 ms of work: 24e6 bits are saved for 4 ms, below 6 Gbit/s."""
    plain = breakeven.Cost(0.0, 4e6, 2)
    mine = breakeven.Cost(4e-3, 1e6, 2)
    low, high = breakeven.pays_on(plain, mine, 50e-6)
    assert (low, high) == (0, pytest.approx(6e9))
    # At the border both take the same time, 5 1/3 ms of wire and two messages against 4 + 1 1/3.
    for cost in (plain, mine):
        seconds = cost.work + cost.rounds * 50e-6 + 8 * cost.wire / high
        assert seconds == pytest.approx(5.4333e-3, rel=1e-4)
    # Two more messages cost 100 µs: 24e6 / 4.1e-3.
    high = breakeven.pays_on(plain, mine._replace(rounds=4), 50e-6)[1]
    assert high == pytest.approx(24e6 / 4.1e-3)
    assert breakeven.pays_on(plain, plain, 50e-6) is None
    assert breakeven.pays_on(plain, mine._replace(wire=4e6), 50e-6) is None
    assert breakeven.pays_on(plain, breakeven.Cost(1e-6, 1e6, 1), 50e-6) == (0, math.inf)
    # More bytes in fewer messages: on fast links only, 8e6 bits for 50 µs.
    above = breakeven.pays_on(plain, breakeven.Cost(0, 5e6, 1), 50e-6)
    assert above == (pytest.approx(160e9), math.inf)
    row = {"pays_on_from": 160e9, "pays_on_to": None}
    assert not breakeven.covers(row, 100e9)
    assert breakeven.covers(row, 400e9)


def test_the_better_of_two_baselines_by_hand():
    """4 MB among 2: 4 MB by fp32; 2 MB by bf16 and 1e6 elements of 1.5 copies of 1 ns."""
    fp32, bf16 = breakeven.baselines(4e6, 2, 1e-9)
    assert fp32 == (0.0, 4e6, 2.0)
    assert bf16 == (pytest.approx(1.5e-3), 2e6, 2.0)
    mine = breakeven.Cost(4e-3, 1e6, 2)
    row = breakeven.pays_fields(mine, 4e6, 2, 1e-9, 50e-6)
    assert row["pays_on_to"] == pytest.approx(6e9)
    # over bf16: 8e6 bits saved for 2.5 ms more work
    assert row["pays_on_to_better"] == pytest.approx(3.2e9)
    assert (row["links"], row["links_better"]) == ("below 6 Gbit/s", "below 3.2 Gbit/s")
    # as many bytes as bf16 and more work: over fp32 it pays, over the better one never
    row = breakeven.pays_fields(breakeven.Cost(2e-3, 2e6, 2), 4e6, 2, 1e-9, 50e-6)
    assert row["links"] == "below 8 Gbit/s"
    assert (row["links_better"], row["pays_on_from_better"]) == ("no link", None)
    assert not breakeven.covers(row, 1e9, "_better")
    assert breakeven.intersection((0, 3.0), (5.0, math.inf)) is None


def test_an_interval_of_ratios_by_hand():
    """Of 9 pairs the 2nd to the 8th: a coin is outside with 2 (1 + 9) / 512 = 3.9 %."""
    mine, plain = [1.0] * 9, [float(k) for k in range(1, 10)]
    assert tables.interval(mine, plain) == (5.0, 2.0, 8.0, pytest.approx(1 - 20 / 512))
    assert tables.interval([1.0] * 3, [2.0, 3.0, 1.0]) == (2.0, 1.0, 3.0, pytest.approx(0.75))
    assert tables.interval([1.0], [2.0]) == (2.0, 2.0, 2.0, 0.0)


def test_noise_is_told_and_quiet_times_are_not():
    quiet = [1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.01]
    assert tables.noise(quiet) == []
    assert tables.noise([*quiet[:-1], 3.0]) == ["1 outlier of 7"]
    assert tables.noise([1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.5]) == ["spread 33%"]
    assert tables.noise([1.0, 9.0]) == []  # too few to tell


def judged(mine, plain, n=20):
    """Return the conclusions about one exchange of 4 KB with such times."""
    result = settings.Settings(compressors=("none",), sizes=(4096,), iterations=n, plain=())
    phases = {part: [1e-6] * n for part in transfers.PARTS}
    record = {"bytes": 4096, "wire": 4096.0, "seconds": mine, "wrong": 0, "checked": "exact"}
    both = {**record, "payload_up": 1.0, "payload_down": 1.0, "rounds": 2.0, "phases": phases}
    both |= {"plain": plain, "plain_wire": 4096.0}
    records = {(4096, Item("bound", name, "-")): record for name in BOUNDS}
    records[4096, Item("library", "gloo", "all_reduce")] = record
    records[4096, Item("exchange", "none", "allreduce")] = both
    output = tables.summarize(result, records)
    (row,) = output.table("crossovers").rows
    return " ".join([*output.answer, *output.conclusions]), row


def test_nothing_is_concluded_from_too_few_iterations():
    """Six wins of six are more than 1 % of chance; a verdict needs seven."""
    assert tables.LEAST == 7
    text, row = judged([1.0] * 6, [2.0] * 6, n=6)
    assert text.startswith("No verdict from n = 6: the sign test needs 7 iterations")
    assert (row["pays_from"], row["pays_from_bytes"]) == ("no verdict", None)
    assert (row["speed_low"], row["speed_high"]) == (2.0, 2.0)
    text, row = judged([1.0] * 7, [2.0] * 7, n=7)
    assert text.startswith("1 of 1 exchanges pay here at 4K")
    assert row["pays_from"] == "4K"


def test_a_lead_within_chance_is_told_as_one():
    """Half of the pairs won, by much: the median is ahead, and nothing is shown."""
    text, row = judged([1.0] * 20, [1.7] * 11 + [0.9] * 9)
    assert row["speed"] == 1.7
    assert text.startswith("None of 1 exchanges is shown to pay")
    assert "p = 0.41 in 20 pairs" in text


def test_the_speed_lies_inside_its_interval():
    """The ratio of the two medians is 0.95; the median of the paired ratios is just above 1."""
    mine = [1.0 + 0.1 * k for k in range(20)]
    plain = [value + 0.001 for value in mine[:16]] + [0.5] * 4
    assert np.median(plain) / np.median(mine) < 1
    _, row = judged(mine, plain)
    assert row["speed"] == np.median([b / a for a, b in zip(mine, plain, strict=True)])
    assert 1 < row["speed_low"] <= row["speed"] <= row["speed_high"]
    assert row["pays_from"] == "4K"


def test_it_pays_from_a_size_on_if_it_pays_at_every_larger_one():
    sizes = (4, 8, 16, 32)
    assert tables.pays_from(sizes, {4: True, 8: False, 16: True, 32: True}) == 16
    assert tables.pays_from(sizes, dict.fromkeys(sizes, True)) == 4
    assert tables.pays_from(sizes, {4: True, 8: True, 16: True, 32: False}) is None
    assert tables.pays_from(sizes, {16: True}) is None  # the largest failed


def test_gradients_are_a_matrix_and_the_rest():
    assert worker.shapes(1024) == [(32, 32)]
    assert worker.shapes(2**19) == [(512, 1024)]
    assert worker.shapes(1000) == [(16, 62), (8,)]
    assert worker.shapes(1) == [(1, 1)]
    for count in range(1, 200):
        assert sum(map(math.prod, worker.shapes(count))) == count


# ---- probes --------------------------------------------------------------------------------------


def fake(rank: int, size: int) -> SimpleNamespace:
    return SimpleNamespace(ranks=range(rank, rank + 1), size=size, device=CPU)


def test_factors_are_those_of_nccl_tests():
    """busbw / algbw, from its PERFORMANCE.md, for 4 workers; sizes are of all shards."""
    result = {name: make(fake(1, 4), 1000) for name, make in PLAIN.items()}
    assert {name: probe.wire / probe.nbytes for name, probe in result.items()} == {
        "all_reduce": 1.5,
        "reduce_scatter": 0.75,
        "all_gather": 0.75,
        "alltoall": 0.75,
        "broadcast": 1,
        "sendrecv": 1,
    }
    assert {probe.nbytes for probe in result.values()} == {4000}
    assert PLAIN["alltoall"](fake(0, 4), 1003).nbytes == 4000  # four equal shards
    assert PLAIN["all_gather"](fake(0, 4), 1).nbytes == 16  # at least one element each


@pytest.mark.parametrize("name", [*PLAIN, "memcpy", "loopback"])
def test_a_transfer_that_did_not_happen_counts_as_wrong(name):
    """No process group here: what was not received is not the exact answer."""
    for rank in (0, 2):
        probe = (PLAIN | BOUNDS)[name](fake(rank, 3), 3000)
        probe.before()
        wrong = probe.wrong()
        probe.close()
        silent = (name, rank) in (("loopback", 2), ("broadcast", 0))
        assert wrong == 0 if silent else wrong > 900


def test_one_wrong_element_is_counted_once(monkeypatch):
    expected = sum(pattern(rank, 0, 500, CPU) for rank in range(3))

    def all_reduce(out):
        out.copy_(expected)
        out[17] += 1

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    probe = PLAIN["all_reduce"](fake(1, 3), 500)
    probe.before()
    probe.call()
    assert probe.wrong() == 1


def test_patterns_tell_ranks_and_places_apart():
    rows = torch.stack([pattern(rank, 0, 251, CPU) for rank in range(8)])
    for a, b in itertools.combinations(rows, 2):
        assert not (a == b).any()
    assert (rows.sort().values == torch.arange(-125.0, 126)).all()
    assert torch.equal(pattern(3, 100, 200, CPU), pattern(3, 0, 200, CPU)[100:])


def test_loopback_carries_bytes():
    data = torch.arange(3_000_000).remainder(256).to(torch.uint8)
    wire = Loopback(data.numel())
    for turn in range(3):
        wire.send(data.roll(turn))
        assert torch.equal(wire.received, data.roll(turn))
    wire.close()


def test_bits_are_compared():
    a = torch.tensor([0.0, 1.0, math.nan, 2.0])
    assert worker.differing(a, a.clone()) == 0
    assert worker.differing(a, torch.tensor([-0.0, 1.0, math.nan, 3.0])) == 2
    assert worker.differing(a, a[:2]) == 4


def test_the_slowest_worker_decides_and_subjects_take_turns(monkeypatch):
    """Two warm-up turns are left out; of the others, the other worker is slower in the second."""
    monkeypatch.setattr(dist, "barrier", lambda: text.append("barrier"))
    text: list[str] = []
    clocks = [Clock(CPU), Clock(CPU)]
    probes = [
        Probe(0, 0, lambda name=name: text.append(name), lambda: 0, lambda: text.append("before"))
        for name in ("own", "plain")
    ]

    def collect(values):
        (steps,) = values
        assert len(steps) == 3
        other = [[*step[:-1], step[-1] + (1 if i == 1 else -1)] for i, step in enumerate(steps)]
        return [steps, other]

    world = SimpleNamespace(collect=collect, together=nullcontext)
    mine, plain = worker.timed(world, list(zip(clocks, probes, strict=True)), 2, 3)
    assert text == ["before", "barrier", "own", "before", "barrier", "plain"] * 5
    assert [step[-1] for step in mine] == [
        clocks[0].steps[0][-1],
        clocks[0].steps[1][-1] + 1,
        clocks[0].steps[2][-1],
    ]
    assert len(plain) == 3


# ---- settings ------------------------------------------------------------------------------------


def test_what_cannot_be_measured_is_refused(tmp_path):
    for words, text in [
        (["--engine", "simulate"], "--engine spawn"),
        (["--engine", "torchrun"], "torchrun --nproc-per-node"),
        (["--engine", "mpi"], "unknown engine 'mpi'"),
        (["--workers", 1], "--workers 1: "),
        (["--sizes", "1Q"], "size '1Q'"),
        (["--sizes", "2"], "--sizes 2"),
        (["--compressor", "topc"], "Did you mean 'topk'"),
        (["--collective", "tree"], "unknown collective 'tree'"),
        (["--compressor", "fft", "--collective", "twoshot"], "Legal: allgather"),
        (["--plain", "allreduce"], "Did you mean 'all_reduce'"),
        (["--backend", "cuda"], "backend 'cuda'"),
        (["--device", "cuda"], "no CUDA device"),
        (["--link-latency-us", "inf"], "--link-latency-us inf"),
        (["--plot", "x.gif"], ".png"),
        (["-n", 0], "-n"),
        (["--seed", -1], "--seed"),
        (["--seed", 2**32], "--seed"),
    ]:
        done = invoke("bandwidth", *words, "--results", tmp_path)
        assert done.code == 2, words
        assert text in done.err.replace("\n", " "), (words, done.err)
    assert not list(tmp_path.iterdir())


def example(**options) -> settings.Settings:
    defaults = {
        **dict.fromkeys(("compressors", "collectives", "plain", "workers", "engine", "threads")),
        "sizes": (4096,),
    }
    return settings.make(**{**defaults, **options})


def test_what_is_measured():
    result = settings.items(example(compressors="none,fft", collectives="all", plain="sendrecv"))
    assert result == (
        Item("bound", "memcpy", "-"),
        Item("bound", "loopback", "-"),
        Item("library", "gloo", "all_reduce"),  # the yardstick comes unasked
        Item("library", "gloo", "sendrecv"),
        *(Item("exchange", "none", name) for name in ("allreduce", "allgather", "twoshot", "ring")),
        Item("exchange", "fft", "allgather"),
    )
    both = example(compressors="none,fft", collectives="twoshot")
    assert [i for i in settings.items(both) if i.kind == "exchange"] == [
        Item("exchange", "none", "twoshot")
    ]
    assert any("fft by twoshot" in note for note in tables._notes(both))
    everything = settings.items(example())
    assert {i.method for i in everything if i.kind == "exchange"} == set(registry.compressors())
    assert {i.collective for i in everything if i.kind == "library"} == set(PLAIN)


def test_the_command_makes_the_same_settings_again(monkeypatch):
    asked = []
    monkeypatch.setattr(bandwidth, "run", lambda settings, *_, **__: asked.append(settings))
    first = ["--sizes", "4K,8K,1M", "-n", 7, "-w", 0, "--compressor", "none,topk:ratio=1"]
    more = ["--collective", "allgather", "--plain", "all_gather", "--seed", 3, "--workers", 3]
    last = ["--no-memory", "--link-latency-us", 5, "--threads", 2, "--backend", "reference"]
    for words in (["bandwidth"], ["bandwidth", *first, *more, *last]):
        assert invoke(*words).code == 0
        again = shlex.split(settings.command(asked[-1]))
        assert invoke(*again[1:]).code == 0
        assert asked[-1] == asked[-2]
    assert asked[-1].sizes == (2**12, 2**13, 2**20)
    assert asked[-1].plain == ("all_reduce", "all_gather")


# ---- real processes ------------------------------------------------------------------------------

WORDS = ("bandwidth", "--sizes", "4K,40004", "-n", 8, "-w", 1)
METHODS = "none,terngrad,topk,signsgd,powersgd"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return tmp_path_factory.mktemp("analyses")


@pytest.fixture(scope="module")
def two(results):
    """Two gloo processes on this machine, every legal collective."""
    words = (*WORDS, "--compressor", METHODS, "--collective", "all")
    return invoke(*words, "--results", results, "--json", pictures=True).json


def table(document: dict, name: str) -> list[dict]:
    return next(t["rows"] for t in document["tables"] if t["name"] == name)


def test_every_result_of_real_processes_is_right(two):
    rows = table(two, "transfers")
    exchanges = [row for row in rows if row["kind"] == "exchange"]
    pairs = [
        (name, collective)
        for name in METHODS.split(",")
        for collective in registry.compressor(name).legal_collectives()
    ]
    assert [(row["method"], row["collective"]) for row in exchanges] == pairs * 2
    assert len(rows) == 2 * (2 + len(PLAIN) + len(pairs))
    assert {row["wrong"] for row in rows} == {0}
    assert {row["n"] for row in rows} == {8}
    for row in exchanges:
        claims = registry.compressor(row["method"]).claims
        exact = claims.exact_for and claims.aggregate != "other"
        assert row["checked"] == ("bits, exact" if exact else "bits"), row["method"]
    assert not two["failed"]
    assert f"All {len(rows)} results are correct." in two["answer"]


def test_times_and_bandwidths_follow_from_the_iterations(two):
    by = {}
    for row in table(two, "iterations"):
        by.setdefault((row["size"], row["method"], row["collective"]), []).append(row)
    for row in table(two, "transfers"):
        mine = by[row["size"], row["method"], row["collective"]]
        seconds = [each["seconds"] for each in mine]
        for percent in (50, 95, 99):
            assert row[f"p{percent}"] == pytest.approx(np.percentile(seconds, percent))
        assert row["min"] <= row["p50"] <= row["p95"] <= row["p99"]
        assert row["algbw"] == pytest.approx(4 * row["count"] / row["p50"])
        if row["kind"] == "exchange":
            ratios = [each["plain"] / each["seconds"] for each in mine]
            assert row["speed"] == pytest.approx(np.median(ratios))
            for each in mine:
                phases = sum(each[name] for name in transfers.PARTS)
                assert 0 < phases <= each["seconds"]
        else:
            factor = 0.5 if row["collective"] in ("reduce_scatter", "all_gather", "alltoall") else 1
            assert row["busbw"] == pytest.approx(factor * row["algbw"])


def test_bytes_and_messages_are_those_of_the_exchange(two):
    """Two workers, n = 10,001: a ring sends half of it twice, TernGrad 2 bits per element."""
    result = {
        (row["method"], row["collective"]): row
        for row in table(two, "phases")
        if row["size"] == 40004
    }
    assert {row["plain_wire_bytes"] for row in result.values()} == {40004}
    for collective, messages in (("allreduce", 2), ("allgather", 1), ("twoshot", 2)):
        row = result["none", collective]
        assert (row["wire_bytes"], row["messages"]) == (40004, messages)
        assert row["payload_bytes_up"] == 40004
        assert row["links"] in ("no link", "any link")  # no byte is saved
    method = registry.compressor("signsgd")
    segments = worker.Segments.of(worker.shapes(10_001), method.granularity)
    sent = calls.bits(method, segments) / 8
    assert result["signsgd", "allgather"]["wire_bytes"] == sent
    assert result["signsgd", "allgather"]["messages"] == 1
    tern = result["terngrad", "allgather"]
    scales = len(worker.Segments.of(worker.shapes(10_001), "tensor"))
    # Scales are agreed by an all-reduce, which a ring of two sends once; the payload has none.
    method = registry.compressor("terngrad")
    segments = worker.Segments.of(worker.shapes(10_001), method.granularity)
    assert tern["wire_bytes"] == calls.bits(method, segments) / 8 + 4 * scales
    assert tern["messages"] == 2 + 1


def test_predictions_follow_from_the_measured_phases(two):
    for row in table(two, "phases"):
        work = row["statistic"] + row["encode"] + row["decode"]
        spent = work + (row["messages"] - 2) * 50e-6  # two messages of the plain one
        saved = 8 * (row["plain_wire_bytes"] - row["wire_bytes"])
        if saved > 0 and spent > 0:
            assert row["pays_on_from"] == 0
            assert row["pays_on_to"] == pytest.approx(saved / spent)
        else:
            assert row["links"] in ("no link", "any link")
    last = {r["method"]: r for r in table(two, "crossovers") if r["collective"] == "allgather"}
    assert last["none"]["ratio_wire"] == 1
    assert last["signsgd"]["ratio_up"] == pytest.approx(32, rel=0.01)


def test_the_table_of_links_is_that_of_the_measurement(two):
    """One definition and one cost model: `predict --links` has the numbers of `bandwidth`."""
    defaults = costs.of_analysis(measuring.parse(two, Path("two.json")))
    size = two["settings"]["sizes"][-1]
    text = {(r["method"], r["collective"]): r for r in table(two, "phases") if r["size"] == size}
    chosen = {word: registry.compressor(word) for word, _ in text if word != "none"}
    result = links.rows(defaults, chosen, two["settings"]["workers"], 50e-6)
    assert len(result) == len(chosen) > 1
    for row in result:
        there = text[row["method"], row["collective"]]
        for field in ("wire_bytes", "messages", "pays_on_to", "pays_on_to_better"):
            assert row[field] == pytest.approx(there[field]), (row["method"], field)
        assert [row[f"links{end}"] for end in ("", "_better")] == [
            there[f"links{end}"] for end in ("", "_better")
        ]


def test_the_same_command_finds_it_measured(two, results):
    words = (*WORDS, "--compressor", METHODS, "--collective", "all", "--results", results)
    done = invoke(*words)
    assert done.code == 0
    assert "--force" in done.err
    assert len(done.out.splitlines()) <= 25
    detailed = invoke(*words, "--details").out
    assert "40004 (40,004 bytes, 10,001 floats)" in detailed
    narrow = measuring.render(measuring.load(next(results.iterdir())), width=60)
    assert max(map(len, narrow.splitlines())) <= 60


def test_the_picture_shows_the_saved_rows(two, results, tmp_path, monkeypatch):
    saved = measuring.load(next(results.iterdir()))
    assert (next(results.iterdir()) / "bandwidth.png").stat().st_size > 20_000
    drawn = []
    monkeypatch.setattr(picture.figures, "save", lambda figure, path: drawn.append(figure))
    kinds.draw(saved, tmp_path / "x.svg")
    left, right = drawn[0].axes
    rows = table(two, "transfers")
    names = picture.fastest(rows)
    assert {name.split(",")[0] for name in names} == set(METHODS.split(","))
    lines = {line.get_label(): line for line in left.get_lines()}
    assert set(lines) == {*PLAIN, *BOUNDS, "fastest exchange"}
    memcpy = [row["algbw"] / 1e9 for row in rows if row["method"] == "memcpy"]
    assert list(lines["memcpy"].get_ydata()) == pytest.approx(memcpy)
    assert [text.get_text() for text in right.get_yticklabels()] == names
    assert len(right.texts) == 2 * len(names)
    last = {picture._name(row): row for row in rows if row["size"] == 40004}
    assert right.texts[1].get_text() == f"{last[names[0]]['speed']:.2g}"


def test_torchrun_is_found_from_the_environment(programs, tmp_path):
    words = ("--nproc-per-node", 2, "-m", "gcbench", "bandwidth", "--sizes", "4K", "-n", 2)
    rest = ("--compressor", "qsgd", "--plain", "all_reduce", "--results", tmp_path, "--json")
    command = shlex.join(map(str, ("torchrun", *words, *rest)))
    done = programs.shell(command, ROOT, PATIENCE, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)  # one: worker 0 alone prints
    assert document["settings"]["engine"] == "torchrun"
    assert document["command"].startswith("torchrun --nproc-per-node 2 -m gcbench bandwidth")
    assert [row["wrong"] for row in table(document, "transfers")] == [0] * 4
    assert done.stderr.count("wrote ") == 1


# ---- what is wrong, and what is stopped ----------------------------------------------------------

THEIRS = '''
"""Methods with a fault each."""

import os
from typing import ClassVar

import torch

from gcbench.core.claims import Claims
from gcbench.core.compressor import Compressor


class Drifting(Compressor):
    """Decodes differently in every process."""

    def encode(self, x, ctx):
        return x.clone()

    def decode(self, payload, ctx):
        return payload.parts[0] + int(os.environ.get("RANK", 0))


class Deserting(Drifting):
    """Fails in worker 1 alone, while the others wait for it."""

    def decode(self, payload, ctx):
        if os.environ.get("RANK") == "1":
            raise ValueError("not me")
        return payload.parts[0]


class SignsArrive(Claims):
    exact_for = ("signs",)


class Doubling(Drifting):
    """Decodes the double of what it says to carry exactly."""

    @property
    def claims(self):
        return SignsArrive(self)

    def decode(self, payload, ctx):
        return 2 * payload.parts[0]


class Raising(Doubling):
    """Does not like large gradients."""

    def encode(self, x, ctx):
        if x.numel() > 1024:
            raise RuntimeError("too large for me")
        return x.clone()

    def decode(self, payload, ctx):
        return payload.parts[0]


class Forgetful(Doubling):
    """Leaves the last worker out of the mean."""

    def decode(self, payload, ctx):
        return payload.parts[0]

    def mean(self, payloads, ctx):
        return super().mean(payloads[:-1] or payloads, ctx)


class Diverging(Raising):
    """Ends in numbers that are none."""

    def decode(self, payload, ctx):
        return payload.parts[0] / 0.0
'''


@pytest.fixture
def site(tmp_path):
    """A folder with somebody's package as pip would leave it, to be put on PYTHONPATH."""
    info = tmp_path / "site" / "somebodys-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys\nVersion: 1.0\n")
    names = ("Drifting", "Deserting", "Doubling", "Raising", "Diverging", "Forgetful")
    points = "\n".join(f"{name.lower()} = somebodys:{name}" for name in names)
    (info / "entry_points.txt").write_text(f"[gcbench.compressors]\n{points}\n")
    (info.parent / "somebodys.py").write_text(THEIRS)
    return str(info.parent)


def test_wrong_results_are_found_and_fail_the_command(site, third_party, tmp_path):
    """By the bits of the simulation, by integers that must arrive, by what a method says."""
    third_party(site)
    words = ("bandwidth", "--sizes", "4K,8K", "-n", 2, "-w", 0, "--plain", "all_reduce")
    names = ("--compressor", "drifting,doubling,raising,diverging,none")
    command = (*words, *names, "--results", tmp_path / "r")
    done = invoke(*command, "--json")
    assert done.code == 1
    assert done.out, done.err
    document = json.loads(done.out)
    assert document["failed"]
    rows = {(row["method"], row["size"]): row for row in table(document, "transfers")}
    # Worker 1 is wrong in each of the two steps checked, and unlike worker 0 after the last.
    assert rows["drifting", 4096]["wrong"] == 3 * 1024
    # On both workers, where two random signs do not cancel.
    segments = worker.Segments.of(worker.shapes(2048))
    signs = [inputs.EXACT["signs"](segments, rank) for rank in range(2)]
    assert rows["doubling", 8192]["wrong"] == 2 * int((sum(signs) != 0).sum()) > 1800
    assert rows["raising", 4096]["wrong"] == 0
    assert rows["raising", 8192]["wrong"] is None
    assert rows["raising", 8192]["failed"] == "RuntimeError: too large for me"
    assert rows["diverging", 4096]["failed"] == "its mean is not finite"
    assert rows["none", 8192]["wrong"] == 0
    assert document["answer"][-1].startswith("7 of 16 results are WRONG: drifting by allgather")
    last = table(document, "crossovers")
    result = {row["method"]: row["pays_from"] for row in last}
    assert result["raising"] == result["diverging"] == "failed"
    assert result["drifting"] == result["doubling"] == "wrong"
    assert "none by allreduce" in document["answer"][0]
    again = invoke(*command)  # found as it was
    assert again.code == 1
    assert "too large for me" in again.out
    assert "--force" in again.err


def test_a_method_is_compared_with_the_definition_and_not_with_itself(site, third_party, tmp_path):
    third_party(site)
    words = ("bandwidth", "--sizes", "4K", "-n", 1, "-w", 0, "--plain", "all_reduce")
    done = invoke(*words, "--compressor", "forgetful", "--results", tmp_path / "r", "--json")
    assert done.code == 1
    (row,) = (r for r in table(json.loads(done.out), "transfers") if r["method"] == "forgetful")
    assert row["failed"].startswith("it is not the definition: mean")


def test_a_worker_that_fails_alone_is_named_and_no_one_waits_for_it(site, third_party, tmp_path):
    third_party(site)
    words = ("bandwidth", "--sizes", "4K", "-n", 1, "-w", 0, "--plain", "all_reduce")
    done = invoke(*words, "--compressor", "deserting", "--results", tmp_path / "r")
    assert done.code == 1
    text = "worker 1, deserting by allgather, 4,096 bytes: ValueError: not me"
    assert f"gcbench: {text}" in done.err.splitlines()
    assert len(records(tmp_path / "r")) == 3  # the others are kept


def records(folder: Path) -> list[str]:
    """Return the lines of the ledger, without the first, which tells when it was begun."""
    result = list(folder.glob("*/ledger.jsonl"))
    return result[0].read_text().splitlines()[1:] if result else []


def test_kills_and_ctrl_c_keep_what_is_measured_and_leave_no_process(tmp_path):
    words = ("bandwidth", "--sizes", "4K,64K", "-n", 60, "-w", 0, "--compressor", "none,topk")
    command = (*words, "--plain", "all_reduce", "--results", tmp_path, "--json")
    for sign, reached in ((signal.SIGKILL, 2), (signal.SIGINT, 5)):
        process = start(*command)
        wait_for(lambda reached=reached: len(records(tmp_path)) >= reached, process)
        if sign == signal.SIGINT:
            os.killpg(process.pid, sign)
        else:
            process.send_signal(sign)
        process.wait(PATIENCE)
        wait_for(lambda process=process: not members(process.pid))
        done = end(process)
        assert done.out == ""
    assert done.code == 130
    assert "Traceback" not in done.err
    remaining = records(tmp_path)
    assert 5 <= len(remaining) < 10
    document = invoke(*command).json
    rows = table(document, "iterations")
    for line in remaining[:5]:
        entry = json.loads(line)
        mine = [
            row["seconds"]
            for row in rows
            if Item(row["kind"], row["method"], row["collective"]).key(row["size"]) == entry["key"]
        ]
        assert mine == entry["record"]["seconds"]
    assert not records(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    done = invoke(*WORDS, "--compressor", "none", "--results", tmp_path / "file")
    assert done.code == 1
    assert "choose another folder with --results" in done.err
