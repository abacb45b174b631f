"""The predicted time of a training step on a cluster, for every method and number of workers.

step = forward and backward + encode + decode + communication that the backward pass does not hide

The time of forward and backward comes from published throughput (`rates`), bytes from `traffic`.
Communication is cut into buckets, which hide under the backward pass as they become ready
(`Cluster.exposed`). With `sharded` (FSDP) the bf16 parameters are gathered before the forward pass
and again before the backward pass, and gradients are reduce-scattered; a method replaces that
reduce-scatter only. Every step is compared with two uncompressed ones, which reduce gradients in
fp32 and in bf16 (as DDP's `bf16_compress_hook`); a method has to beat the better of them. Times of
encoding and decoding are a range: from the floor that the device's memory bandwidth sets (`work`),
which makes the speedup an upper bound, to times measured inside exchanges (`codec`).

Scaling is weak: the batch of a worker is fixed, so examples a second are N batch / step. A single
worker, or a single node under `topology: nodes`, has nothing to compress.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from gcbench.core import progress, registry
from gcbench.core.compressor import Compressor
from gcbench.core.errors import UsageError
from gcbench.core.exchange import check_legal
from gcbench.report import figures, kernel_timings
from gcbench.report.analysis import Analysis, Ledger, Row, Shown, Table
from gcbench.studies import methods
from gcbench.studies.scale import codec, networks, rates, traffic, work
from gcbench.studies.scale.clusters import BACKWARD, Cluster, links_text, rate_text
from gcbench.studies.scale.networks import Network, Shapes

KIND = "scale"
STEPS_PRICED = 1000
LINKS = 71
"""Number of link rates that are tried for break-even before bisection, ten a decade."""
MOST_WORKERS = 100_000
HALF = "bf16 all-reduce"
"""The uncompressed step that reduces in bf16; with `sharded` it is a reduce-scatter."""
PARAMETER = 2
"""Bytes of a parameter that `sharded` gathers, bf16."""
ASSUMED, TIMED = "assumed", "measured"
"""Values of `kernels` that are no file."""

TIE = 0.05
"""Steps that differ by at most this share are tied, as the model's errors are not smaller."""
SIMPLE = (
    *("none", HALF, "bf16", "fp16", "int8", "natural", "qsgd", "terngrad", "signsgd"),
    *("randomk", "topk", "onebit", "efsignsgd", "powersgd", "demo", "fft"),
)
"""Of tied methods the first in this order wins; methods that are not in it come last. Casts come
first, then codes of every element, then methods that keep some elements or have a residual."""

Spend = Callable[[str, float, int], tuple[float, float]]
"""A function: collective, elements and workers -> a worker's seconds in encoding, in decoding."""


class Settings(BaseModel):
    """The settings that decide the prediction."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    module: str | None = None
    compressors: list[str]
    collective: str | None = None
    workers: list[Annotated[int, Field(ge=1, le=MOST_WORKERS)]]
    cluster: Cluster
    batch: Annotated[int, Field(ge=1)] | None = None
    compute_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    dense_last: bool = False
    dense_below: Annotated[int, Field(ge=0)] = 0
    sharded: bool = False
    """Whether parameters and gradients are sharded over all workers, as by FSDP."""
    kernels: str = ASSUMED
    threads: Annotated[int, Field(ge=1)]


def network_of(model: str, module: str | None) -> Network:
    """Return the built-in network, or that of a module.

    Raises:
        UsageError: see `networks`.
    """
    return networks.of_module(module) if module else networks.network(model)


# ---- one step ------------------------------------------------------------------------------------


class Step:
    """A training step with one way of exchanging the gradients of one network.

    `lanes`: shapes that are compressed, and those exchanged in fp32; `compute`: seconds of forward
    and backward; `floor` and `measured`: times of encoding and decoding the compressed tensors, the
    latter None if not known; `frozen`: parameters without a gradient, which `sharded` gathers, too.
    """

    def __init__(
        self,
        method: Compressor,
        collective: str,
        lanes: tuple[Shapes, Shapes],
        compute: float,
        floor: Spend,
        measured: Spend | None = None,
        *,
        sharded: bool = False,
        frozen: int = 0,
    ) -> None:
        self.method, self.collective, self.lanes = method, collective, lanes
        self.compute, self.floor, self.measured, self.sharded = compute, floor, measured, sharded
        self.numel = sum(map(traffic.dense_bytes, lanes)) / work.FLOAT
        self.elements = traffic.dense_bytes(lanes[0]) / work.FLOAT
        self.frozen = frozen
        self.width = work.FLOAT
        """Bytes an element of gradients that are added inside a node before they are encoded."""
        self.cut = True
        """Whether each device of a node encodes only its share of the node's sum."""
        self._sent: dict[int, list[traffic.Message]] = {}

    def _exchange(self, workers: int) -> list[traffic.Message]:
        """Return the messages of a step among `workers` workers, at least two."""
        sent = traffic.exchange(self.method, self.collective, self.lanes, workers)
        if not self.sharded:
            return sent
        own = traffic.exchange(self.method, self.collective, (self.lanes[0], ()), workers)
        kept = [message for message in own if not message.aggregated]
        dense = traffic.dense_bytes(self.lanes[1])
        return [*kept, *([traffic.Message("reducescatter", dense)] if dense else [])]

    def messages(self, workers: int) -> list[traffic.Message]:
        """Return the messages of a step among `workers` workers; none for a single one."""
        if workers not in self._sent:
            self._sent[workers] = [] if workers == 1 else self._exchange(workers)
        return self._sent[workers]

    def at(
        self, workers: int, cluster: Cluster, *, measured: bool = False, longer: float = 1.0
    ) -> dict[str, Any]:
        """Return seconds and bytes of a step, in the fastest topology that the cluster allows.

        `measured`: take measured kernels, if there are any, and not the floor; `longer`: factor of
        forward and backward, for another batch.

        Raises:
            UsageError: the workers do not fill nodes, or the method refuses so many.
        """
        found, refused = [], []
        spend = self.measured if measured and self.measured else self.floor
        for way in cluster.topologies(workers):
            try:
                found.append(self._at(workers, cluster, way, spend, longer * self.compute))
            except UsageError as error:
                refused.append(error)
        if not found:
            raise refused[0]
        return min(found, key=lambda way: way["step_seconds"])

    def seconds(
        self, workers: int, cluster: Cluster, *, measured: bool = False, longer: float = 1.0
    ) -> float:
        """Return the seconds of a step: see `at`."""
        found = self.at(workers, cluster, measured=measured, longer=longer)
        return float(found["step_seconds"])

    def _at(
        self, workers: int, cluster: Cluster, topology: str, spend: Spend, compute: float
    ) -> dict[str, Any]:
        nodes = cluster.nodes_of(workers)
        pieces = cluster.pieces(work.FLOAT * self.numel)
        cluster = cluster.model_copy(update={"buckets": pieces})
        inside, among, network = 1, workers, cluster
        communicate = gather = 0.0
        if topology == "nodes":
            inside, among, network = workers // nodes, nodes, cluster.between()
            kind = "reducescatter" if self.sharded else "allreduce"
            communicate = cluster.inside_seconds(self.width * self.numel, workers, kind)
        messages = self.messages(among)
        communicate += sum(network.seconds(sent.kind, sent.nbytes, among) for sent in messages)
        encode = decode = 0.0
        if among > 1:
            way = "reducescatter" if self.sharded else self.collective
            encode, decode = spend(way, self.elements / (inside if self.cut else 1), among)
        exposed = 0.0
        if self.sharded:
            own = PARAMETER * (self.numel + self.frozen) / workers
            gather = cluster.seconds("allgather", own, workers)
            exposed = cluster.exposed(gather, (1 - BACKWARD) * compute, pieces)
        exposed += cluster.exposed(gather + communicate, BACKWARD * compute, pieces)
        moved = traffic.total(messages, among)
        return {
            "topology": topology,
            "compute_seconds": compute,
            "encode_seconds": encode,
            "decode_seconds": decode,
            "communicate_seconds": communicate + 2 * gather,
            "gather_seconds": 2 * gather,
            "exposed_seconds": exposed,
            "step_seconds": compute + encode + decode + exposed,
            "payload_bytes_up": moved.up,
            "payload_bytes_down": moved.down,
            "wire_bytes": moved.wire,
        }


def simplest(gains: Mapping[str, float], margin: float = TIE) -> str:
    """Return the simplest (`SIMPLE`) of the methods that are tied with the fastest.

    `gains`: speedups by method; those within `margin` of the largest are tied.
    """
    most = max(gains.values())
    tied = [word for word, gain in gains.items() if gain * (1 + margin) >= most]
    order = {name: place for place, name in enumerate(SIMPLE)}
    return min(tied, key=lambda word: order.get(word.partition(":")[0], len(order)))


class Plain(Step):
    """An uncompressed step, which reduces gradients in elements of `width` bytes.

    `casts`: seconds an element of both casts together. With a `width` of 0 the exchange is free.
    """

    def __init__(
        self,
        shapes: Shapes,
        compute: float,
        width: int,
        casts: float,
        *,
        sharded: bool,
        frozen: int = 0,
    ) -> None:
        def spend(collective: str, n: float, workers: int) -> tuple[float, float]:
            return casts * n / 2, casts * n / 2

        super().__init__(
            methods.parse("none"),
            "allreduce",
            (shapes, ()),
            compute,
            spend,
            sharded=sharded,
            frozen=frozen,
        )
        self.width, self.cut = width, False  # casts come before all additions

    def _exchange(self, workers: int) -> list[traffic.Message]:
        if not self.width:
            return []
        kind = "reducescatter" if self.sharded else "allreduce"
        return [traffic.Message(kind, self.width * self.numel)]


@dataclass(frozen=True)
class Gains:
    """The speedups of a step over the uncompressed ones."""

    fp32: tuple[float | None, float]
    """By measured kernels (None without), and by the floor, which is an upper bound."""
    bf16: tuple[float | None, float]

    @property
    def better(self) -> tuple[float | None, float]:
        """The speedups over the better of the two uncompressed steps."""
        return min(self.fp32, self.bf16, key=lambda pair: pair[1])

    @property
    def sure(self) -> float:
        """The speedup over the better of the two, by measured kernels, else by the floor."""
        low, high = self.better
        return high if low is None else low

    def fields(self) -> Row:
        """Return them as fields of a row: numbers, and each range in words."""
        row: Row = {}
        for name, (low, high) in (("fp32", self.fp32), ("bf16", self.bf16)):
            row |= {f"over_{name}_low": low, f"over_{name}_high": high}
            row[f"over_{name}"] = range_text(low, high)
        return row


def range_text(low: float | None, high: float) -> str:
    """Return a speedup in words: "1.2 to 3.4"; "up to 3.4" where only the bound is known."""
    if low is None:
        return f"up to {high:.3g}"
    low, high = sorted((low, high))
    told = f"{low:.3g}", f"{high:.3g}"
    return told[0] if told[0] == told[1] else " to ".join(told)


def pays(
    step: Step,
    plain: Sequence[Step],
    workers: int,
    cluster: Cluster,
    *,
    measured: bool = False,
    margin: float = 0.0,
) -> list[tuple[float, float]]:
    """Return the links between nodes, as ranges in Gbit/s, on which `step` beats every `plain`.

    It has to be faster by at least `margin`, a share. Links from 1 Mbit/s, which counts as 0, to 10
    Tbit/s, which counts as infinite, are tried.
    """

    def gains(gbit: float) -> bool:
        wire = cluster.inter.model_copy(update={"gbit": gbit})
        there = cluster.model_copy(update={"inter": wire})
        own = step.seconds(workers, there, measured=measured)
        base = min(one.seconds(workers, there) for one in plain)
        return own * (1 + margin) < base * (1 - 1e-9)

    rates = [10 ** (-3 + 7 * place / (LINKS - 1)) for place in range(LINKS)]
    found = [gains(rate) for rate in rates]
    edges = [0.0] if found[0] else []
    for place in range(1, LINKS):
        if found[place] != found[place - 1]:
            low, high = rates[place - 1], rates[place]
            for _ in range(20):
                middle = math.sqrt(low * high)
                low, high = (middle, high) if gains(middle) == found[place - 1] else (low, middle)
            edges.append(low)
    if found[-1]:
        edges.append(math.inf)
    return list(zip(edges[::2], edges[1::2], strict=True))


# ---- the analysis --------------------------------------------------------------------------------


class Times(NamedTuple):
    """Measured times of encoding and decoding."""

    spends: Mapping[str, Spend]
    """By method; those without measured times are missing."""
    source: str
    """Where they come from, as text."""
    left: Sequence[str] = ()
    """Sentences on what was measured and is not taken."""


def _measured(
    settings: Settings,
    chosen: Mapping[str, Compressor],
    shapes: Shapes,
    observer: progress.Observer,
    ledger: Ledger,
) -> Times:
    """Return the measured times of each method.

    Methods that are neither in the file nor in the ledger are timed, unless `kernels` is `ASSUMED`
    or a file of `gcbench bandwidth`: then a method may have no measured times.

    Raises:
        UsageError: the file cannot be read, or was made on another machine and lacks a method.
    """
    n = max(1, round(traffic.dense_bytes(shapes) / work.FLOAT))
    path = Path(settings.kernels)
    if settings.kernels == ASSUMED or (path.is_file() and codec.is_measurement(path)):
        known = codec.stored() if settings.kernels == ASSUMED else codec.load(path)
        observer.step(len(chosen))
        if known is None:
            return Times({}, "none")
        left = known.told(chosen.values())
        own = {word: known.of(method, n) for word, method in chosen.items()}
        if settings.kernels == ASSUMED:
            device = settings.cluster.device
            own = {word: one and one.on(device) for word, one in own.items()}
        spends: dict[str, Spend] = {
            word: partial(one.seconds, chosen[word]) for word, one in own.items() if one is not None
        }
        if settings.kernels != ASSUMED:
            return Times(spends, known.source, left)
        source = (
            f"as many times a copy of the gradient as {known.source}, on the memory of "
            f"{settings.cluster.device.name}"
        )
        return Times(spends, source, left)
    timings = None if settings.kernels == TIMED else kernel_timings.load(path)
    found: dict[str, work.Rates] = {}
    for place, (word, method) in enumerate(chosen.items()):
        key = f"{method.name} {registry.call(method)} {registry.source_digest(method.name)}"
        if timings and (rates := work.of_file(method, timings, n, settings.threads)):
            found[word] = rates
        elif key in ledger:
            found[word] = work.Rates(**ledger[key])
        else:
            if timings:
                work.check_machine(timings, settings.kernels)
            observer.step(place, f"timing {word}")
            found[word] = work.measure(method, shapes, settings.threads)
            ledger[key] = {"parts": found[word].parts, "source": found[word].source}
        observer.step(place + 1)
    told = dict.fromkeys(one.source for one in found.values())
    return Times({word: _spend(one, chosen[word]) for word, one in found.items()}, "; ".join(told))


def _spend(rates: work.Rates, method: Compressor) -> Spend:
    def spend(collective: str, n: float, workers: int) -> tuple[float, float]:
        return work.step(rates, method, collective, n, workers)

    return spend


def pays_fields(
    found: Prepared, step: Step, workers: int, cluster: Cluster, margin: float = 0.0
) -> Row:
    """Return the links on which a method pays as fields of a row, by measured kernels if any.

    `pays_on` in words; `pays_from_gbit`, `pays_to_gbit` the lowest range of them: the upper end is
    None if there is none, both are None if there is no such link. All are None within one node.
    """
    if cluster.nodes_of(workers) == 1:
        return {"pays_on": None, "pays_from_gbit": None, "pays_to_gbit": None}
    links = pays(step, found.baselines, workers, cluster, measured=True, margin=margin)
    low, high = links[0] if links else (None, math.inf)
    return {
        "pays_on": links_text(links),
        "pays_from_gbit": low,
        "pays_to_gbit": None if math.isinf(high) else high,
    }


def _legal(method: Compressor, settings: Settings, word: str, *, every: bool) -> tuple[str, ...]:
    """Return the collectives to predict; for `none` it is an all-reduce, whatever was asked for.

    Raises:
        UsageError: the collective that was asked for is not legal for the method.
    """
    if word == "none" or (settings.collective is None and not every):
        return (check_legal(method),)
    if settings.collective is not None:
        return (check_legal(method, settings.collective),)
    return method.legal_collectives()


@dataclass(frozen=True)
class Prepared:
    """A network and a cluster with the steps of all methods."""

    network: Network
    batch: int | None
    """Examples of a worker; None: not known (then `compute` was given)."""
    compute: float
    """Seconds of forward and backward."""
    plain: Plain
    """The uncompressed step that reduces in fp32."""
    half: Plain
    """The uncompressed step that reduces in bf16."""
    steps: Mapping[tuple[str, str], Step]
    """The compressed steps, by method and collective."""
    notes: Sequence[str]
    """The assumptions, as sentences."""
    refused: Mapping[str, str]
    """Methods that cannot be used with these settings -> the reason."""
    free: Plain
    """The step if the exchange took no time: a bound for all methods."""
    by_measured: bool
    """Whether times in rows are by measured kernels, where there are any; else by the floor."""

    def kernels(self, step: Step) -> str:
        """Return by what the times in a step's row are: `TIMED`, or `ASSUMED` for the floor."""
        return TIMED if self.by_measured and step.measured is not None else ASSUMED

    @property
    def baselines(self) -> tuple[Plain, Plain]:
        """The steps that a method has to beat."""
        return self.plain, self.half

    def gains(self, step: Step, workers: int, cluster: Cluster, longer: float = 1.0) -> Gains:
        """Return the speedups of a step over the uncompressed ones.

        Raises:
            UsageError: see `Step.at`.
        """
        own = step.seconds(workers, cluster, longer=longer)
        low = None
        if step.measured is not None:
            low = step.seconds(workers, cluster, measured=True, longer=longer)
        first, second = (one.seconds(workers, cluster, longer=longer) for one in self.baselines)
        return Gains((low and first / low, first / own), (low and second / low, second / own))


SHARDED_LACKS = (
    "with FSDP each worker gets the mean of its own shard, which is the first half of a two-shot "
    "exchange: it has none"
)


def prepare(
    settings: Settings, observer: progress.Observer, ledger: Ledger, *, every: bool = False
) -> Prepared:
    """Return the steps of all methods, by each method's collective, or by `every` legal one.

    Raises:
        UsageError: an unknown name, an illegal collective, workers that do not fill nodes, a module
            whose computation is not known.
    """
    network = network_of(settings.model, settings.module)
    cluster = settings.cluster
    for workers in settings.workers:
        cluster.nodes_of(workers)
    batch = settings.batch or network.batch
    if settings.compute_ms is not None:
        known = rates.Compute(settings.compute_ms / 1e3, "given")
    else:
        known = rates.compute(cluster, network, batch or 1)
    compute = known.seconds
    chosen = {
        word: method
        for word, method in methods.all_of(",".join(settings.compressors)).items()
        if word != "none"
    }
    lanes = network.split(dense_last=settings.dense_last, dense_below=settings.dense_below)
    if not lanes[0]:
        raise UsageError(f"--dense-below {settings.dense_below} leaves no tensor to compress")
    cases: list[tuple[str, Compressor, str]] = []
    refused: dict[str, str] = {}
    for word, method in chosen.items():
        legal = _legal(method, settings, word, every=every)
        if settings.sharded:
            if "twoshot" not in method.legal_collectives():
                refused[word] = f"{word}: {SHARDED_LACKS}"
                continue
            legal = ("twoshot",)
        cases += [(word, method, collective) for collective in legal]
    times = _measured(settings, chosen, network.shapes, observer, ledger)
    steps = {
        (word, collective): Step(
            method,
            collective,
            lanes,
            compute,
            _spend(work.assumed(method, cluster.device, network.shapes), method),
            times.spends.get(word),
            sharded=settings.sharded,
            frozen=network.frozen,
        )
        for word, method, collective in cases
    }
    casts = 0.0 if settings.sharded else 2 * codec.CAST / (cluster.device.memory_gbyte * 1e9)
    plain, half, free = (
        Plain(
            network.shapes,
            compute,
            width,
            each,
            sharded=settings.sharded,
            frozen=network.frozen,
        )
        for width, each in ((work.FLOAT, 0.0), (work.FLOAT // 2, casts), (0, 0.0))
    )
    return Prepared(
        network,
        batch,
        compute,
        plain,
        half,
        steps,
        [
            *_assumptions(settings, network, batch, known, times.source),
            *times.left,
            *_unmeasured(steps),
        ],
        refused,
        free,
        settings.kernels != ASSUMED,
    )


def _unmeasured(steps: Mapping[tuple[str, str], Step]) -> Iterator[str]:
    """Yield a sentence on the methods whose kernels were not measured, if there are some."""
    if left := dict.fromkeys(word for (word, _), step in steps.items() if step.measured is None):
        every = dict.fromkeys(word for word, _ in steps)
        yield (
            f"Kernels not measured, so that times are by the floor, and speedups and links upper "
            f"bounds: {', '.join(left)}. To measure them: {codec.measuring(every)}."
        )


def _assumptions(
    settings: Settings, network: Network, batch: int | None, known: rates.Compute, source: str
) -> list[str]:
    """Return sentences on the assumptions of the prediction."""
    cluster = settings.cluster
    links = f"{rate_text(cluster.inter.gbit)} and {cluster.inter.latency_us:g} us between nodes"
    if cluster.note:
        links += f" ({cluster.note})"
    if cluster.gpus_per_node > 1:
        links += (
            f", {cluster.gpus_per_node} {cluster.device.name} in a node by "
            f"{rate_text(cluster.intra.gbit)} and {cluster.intra.latency_us:g} us"
        )
    pieces = cluster.pieces(work.FLOAT * network.numel)
    hidden = "no communication hides under the backward pass (overlap 0)"
    if cluster.overlap:
        hidden = (
            f"{pieces} bucket{'s' * (pieces > 1)}, of which all but the last hide under "
            f"{'' if cluster.overlap == 1 else f'{cluster.overlap:.0%} of '}the backward pass"
        )
    if batch is None:
        said = "Forward and backward of a worker's batch"
    else:
        usual = "" if settings.batch else ", the default: --batch says another"
        said = f"Batch {batch:,} a GPU ({network.examples}{usual}): forward and backward"
    said += f" {1e3 * known.seconds:.4g} ms ({known.how})."
    if known.batch is not None and batch is not None and 4 * batch <= known.batch:
        said += (
            f" The rate is of batch {known.batch}; at {batch} a GPU reaches less, so steps are "
            "longer than this and compression gains less."
        )
    notes = [
        f"{said} Links: {links}; {hidden}; rounds: {cluster.algorithm}, topology: "
        f"{cluster.topology}."
    ]
    if network.frozen:
        gathered = " FSDP gathers them, too." if settings.sharded else ""
        notes.append(
            f"{network.frozen:,} of {network.frozen + network.numel:,} parameters are frozen "
            f"(requires_grad is false): they have no gradient, and are left out.{gathered}"
        )
    if settings.sharded:
        notes.append(
            "Sharded (FSDP): bf16 parameters are gathered before the forward pass and again before "
            "the backward pass, whatever the method; gradients are reduced and scattered, in fp32, "
            "in bf16, or as payloads."
        )
    floor = f"floor of {cluster.device.memory_gbyte:g} GB/s"
    notes.append(
        f"A speedup is a range: from kernels as measured ({source}) to the {floor}, where every "
        "byte is read or written once, which is its upper bound."
    )
    return notes


def run(settings: Settings, command: str, observer: progress.Observer, ledger: Ledger) -> Analysis:
    """Predict every method at every number of workers.

    Raises:
        UsageError: see `prepare`.
    """
    found = prepare(settings, observer, ledger)
    cluster, network, batch = settings.cluster, found.network, found.batch
    rows = list(_rows(found, settings.workers, cluster, priced=True))
    most = max(settings.workers)
    curve = list(_rows(found, _spread(cluster, most), cluster, priced=False))
    title = (
        f"{network.title}, {network.numel:,} parameters, {batch_text(batch)}, cluster "
        f"{cluster.name}{', sharded' * settings.sharded}"
    )
    by = "measured kernels where there are any" if found.by_measured else "the floor"
    notes = [
        *found.notes,
        f"All of this is predicted, nothing was run; times are by {by}. over fp32 and over bf16: "
        "the uncompressed step that reduces in that format divided by this step, from measured "
        "kernels to the upper bound. efficiency: the time of forward and backward divided by that "
        "of the step.",
        "pays on links: the links between nodes, of 1 Mbit/s to 10 Tbit/s, with which the step is "
        "shorter than both uncompressed ones, by measured kernels where there are any. way: flat, "
        "if all workers exchange payloads (bytes of a worker), or nodes, if the gradients of a "
        "node are added first and nodes exchange payloads (bytes of a node).",
    ]
    if cluster.price is not None:
        notes.append(f"cost: {STEPS_PRICED:,} steps at {cluster.price:g} a device and hour.")
    refused = dict.fromkeys(str(row["refused"]) for row in rows if row["refused"])
    notes += [f"Refused: {said}." for said in [*found.refused.values(), *refused]]
    return Analysis.of(
        KIND,
        settings,
        command,
        conclusions=[
            *_conclusions(rows),
            *_sensitivity(found, most, cluster),
        ],
        tables=[
            Table(
                name="predictions",
                title=title,
                shown=_SHOWN,
                which=2,
                by="workers",
                notes=notes,
                rows=rows,
            ),
            Table(name="curve", title=title, rows=curve),
        ],
    )


def batch_text(batch: int | None) -> str:
    """Return the batch of a worker in words."""
    return "batch not given" if batch is None else f"batch {batch:,} a GPU"


_SHOWN = [
    Shown(field="method", heading="method"),
    Shown(field="collective", heading="collective"),
    Shown(field="topology", heading="way"),
    Shown(field="payload_bytes_up", heading="up\nMB", scale=1e-6),
    Shown(field="payload_bytes_down", heading="down\nMB", scale=1e-6),
    Shown(field="wire_bytes", heading="wire\nMB", scale=1e-6),
    Shown(field="encode_seconds", heading="encode\nms", scale=1e3),
    Shown(field="decode_seconds", heading="decode\nms", scale=1e3),
    Shown(field="communicate_seconds", heading="comm.\nms", scale=1e3),
    Shown(field="exposed_seconds", heading="exposed\nms", scale=1e3),
    Shown(field="step_seconds", heading="step\nms", scale=1e3),
    Shown(field="over_fp32", heading="over\nfp32"),
    Shown(field="over_bf16", heading="over\nbf16"),
    Shown(field="efficiency", heading="efficiency\n%", scale=100),
    Shown(field="pays_on", heading="pays on links"),
    Shown(field="cost", heading="cost"),
]


def _spread(cluster: Cluster, most: int) -> list[int]:
    """Return powers of two that fill nodes, from 1 to the first that reaches `most`."""
    each = cluster.gpus_per_node
    inside = [1 << k for k in range(each.bit_length()) if 1 << k < each]
    across = [each << k for k in range(64) if k == 0 or each << (k - 1) < most]
    return [n for n in [*inside, *across] if n <= max(most, 1)] or [1]


def _rows(
    found: Prepared, counts: Sequence[int], cluster: Cluster, *, priced: bool
) -> Iterator[Row]:
    """Yield the rows of the uncompressed steps and of the methods, at each number of workers.

    `speedup` is over the uncompressed step that reduces in fp32, by the times in the row.
    """
    steps: list[tuple[str, Step]] = [("none", found.plain), (HALF, found.half)]
    steps += [(word, step) for (word, _), step in found.steps.items()]
    for workers, (word, step) in itertools.product(counts, steps):
        row: Row = {
            "workers": workers,
            "nodes": cluster.nodes_of(workers),
            "method": word,
            "compressor": registry.call(step.method),
            "collective": "reducescatter" if step.sharded else step.collective,
            "kernels": found.kernels(step),
        }
        try:
            made = step.at(workers, cluster, measured=found.by_measured)
            gains = found.gains(step, workers, cluster)
        except UsageError as error:
            yield {**row, "topology": "refused", "refused": str(error)}
            continue
        seconds = made["step_seconds"]
        row |= made
        row["examples_per_second"] = (
            None if found.batch is None else workers * found.batch / seconds
        )
        row["speedup"] = found.plain.seconds(workers, cluster) / seconds
        row |= gains.fields()
        row["efficiency"] = step.compute / seconds
        if isinstance(step, Plain):  # it has no range, and is itself what others have to beat
            row["over_fp32"] = "1" if word == "none" else f"{row['over_fp32_high']:.3g}"
            row["over_bf16"] = "1" if word == HALF else f"{row['over_bf16_high']:.3g}"
        elif priced:
            row |= pays_fields(found, step, workers, cluster)
        if priced and cluster.price is not None:
            row["cost"] = cluster.price * workers * seconds * STEPS_PRICED / 3600
        row["refused"] = None
        yield row


def _number(row: Row, field: str) -> float:
    value = row.get(field)
    return float(value) if isinstance(value, int | float) else math.nan


def _conclusions(rows: Sequence[Row]) -> list[str]:
    """Return a sentence for each number of workers: which way is fastest, and what is tied with it.

    Ways are compared by measured kernels, as in `_sensitivity`.
    """
    counts = dict.fromkeys(_number(row, "workers") for row in rows)
    return [
        f"{workers:,.0f} workers: "
        + _fastest([row for row in rows if row["workers"] == workers and row["refused"] is None])
        for workers in counts
    ]


def _fastest(rows: Sequence[Row]) -> str:
    """Return in words the simplest of what is tied with the fastest, of rows of equal workers."""
    by = {str(row["method"]): row for row in rows}
    gains = {word: _sure(row) for word, row in by.items() if not math.isnan(_sure(row))}
    bounds = {word: _number(row, "over_fp32_high") for word, row in by.items() if word not in gains}
    most, choice = max(gains.values()), simplest(gains)
    tied = [word for word, gain in gains.items() if gain * (1 + TIE) >= most]
    best = by[choice]
    speed = (
        f"{best['over_fp32']} times as fast as reducing in fp32 and {best['over_bf16']} as in bf16"
    )
    if choice in ("none", HALF):
        which = " with measured kernels" if bounds else ""
        told = f"no method{which} is more than {TIE:.0%} faster than {_plain_text(best)}"
    elif len(tied) == 1:
        told = f"{choice} is fastest, {speed}"
    else:
        first = max(gains, key=lambda word: gains[word])
        told = (
            f"{len(tied)} methods are tied within {TIE:.0%}, of which {first} is fastest; the "
            f"simplest of them is {choice}, {speed}"
        )
    computes = (
        _number(best, "compute_seconds") * gains[choice] / _number(by["none"], "step_seconds")
    )
    said = f"{told}; {100 * computes:.3g} % of it computes."
    perhaps = [f"{word}, {by[word]['over_fp32']}" for word in bounds if bounds[word] > most]
    if perhaps:
        said += f" Not measured, and by its upper bound faster: {'; '.join(perhaps)}."
    return said


def _sure(row: Row) -> float:
    """Return a row's speedup over reducing in fp32, by measured kernels; NaN without any."""
    plain = row["method"] in ("none", HALF)
    return _number(row, "over_fp32_high" if plain else "over_fp32_low")


def _plain_text(row: Row) -> str:
    return "reducing in bf16" if row["method"] == HALF else "`none`, reducing in fp32"


# ---- what would change the answer ----------------------------------------------------------------

CHANGES: Sequence[tuple[str, float, float]] = (
    ("links {gbit}", 1 / 4, 1.0),
    ("links {gbit}", 4.0, 1.0),
    ("batch {batch}", 1.0, 1 / 4),
    ("batch {batch}", 1.0, 4.0),
)
"""Changes that are tried: their text, the factor of the links between nodes, that of the batch."""


def varied(found: Prepared, cluster: Cluster) -> Iterator[tuple[str, Cluster, float]]:
    """Yield the changes that are tried: name, changed cluster, factor of the computation."""
    for text, links, longer in CHANGES:
        gbit = cluster.inter.gbit * links
        there = cluster
        if links != 1:
            wire = cluster.inter.model_copy(update={"gbit": gbit})
            there = cluster.model_copy(update={"inter": wire})
        batch = "a quarter" if longer < 1 else f"{longer:g} times"
        if found.batch is not None:
            count = found.batch * longer
            if count < 1:
                continue
            batch = f"{count:,.0f}"
        yield text.format(gbit=f"of {rate_text(gbit)}", batch=batch), there, longer
    if cluster.overlap:
        yield "no overlap", cluster.model_copy(update={"overlap": 0.0}), 1.0
    else:
        yield "overlap", cluster.model_copy(update={"overlap": 1.0, "buckets": None}), 1.0


def sensitivity(
    found: Prepared, cluster: Cluster, answer: Callable[[Cluster, float], tuple[str, float]]
) -> str:
    """Return the answer in words, and which changes of links, batch or overlap would change it.

    `answer` returns, for a cluster and a factor of the computation, what to do, and its gain.
    """
    now, least = answer(cluster, 1.0)
    other, same = [], []
    for name, there, longer in varied(found, cluster):
        what, gain = answer(there, longer)
        if what == now:
            same.append(f"{name} ({gain:.3g}x)")
        else:
            other.append(f"{name}: {_word(what)} ({gain:.3g}x)")
    changes = "; ".join(other) or "nothing of what was tried"
    gained = "" if now == "none" else f", {least:.3g} times as fast as reducing in fp32"
    said = f"The answer is {_word(now)}{gained}. What would change it: {changes}."
    return said + (f" The same with {', '.join(same)}." if same else "")


def _word(answer: str) -> str:
    return "not to compress" if answer == "none" else answer


def _sensitivity(found: Prepared, workers: int, cluster: Cluster) -> list[str]:
    if cluster.nodes_of(workers) == 1:
        return []
    measured = {word: step for (word, _), step in found.steps.items() if step.measured is not None}
    left = [word for word, _ in found.steps if word not in measured]
    if left and not measured:
        return [f"There is no answer by measured kernels: of {', '.join(left)} none were measured."]

    def answer(there: Cluster, longer: float) -> tuple[str, float]:
        """Return the simplest of the fastest ways, and its gain over reducing in fp32."""
        base = found.plain.seconds(workers, there, longer=longer)
        gains = {"none": 1.0, HALF: base / found.half.seconds(workers, there, longer=longer)}
        for word, step in measured.items():
            with suppress(UsageError):
                own = step.seconds(workers, there, measured=True, longer=longer)
                gains[word] = base / own
        word = simplest(gains)
        return word, gains[word]

    said = (
        f"By measured kernels at {workers:,} workers, the simplest of what is within {TIE:.0%} of "
        f"the fastest: {sensitivity(found, cluster, answer)}"
    )
    if left:
        said += f" Left out, as their kernels were not measured: {', '.join(left)}."
    return [said]


# ---- the picture ---------------------------------------------------------------------------------

_PARTS = (
    ("compute_seconds", "forward + backward"),
    ("encode_seconds", "encode"),
    ("decode_seconds", "decode"),
    ("exposed_seconds", "exposed communication"),
)


def _short(value: float, _: object = None) -> str:
    """Return a number of workers in few letters: 65536 is 64k."""
    return f"{value / 1024:.0f}k" if value >= 1024 else f"{value:.0f}"


def draw(analysis: Analysis, path: Path) -> None:
    """Draw the efficiency over workers, and the parts of a step at the most workers."""
    curve, table = analysis.table("curve").rows, analysis.table("predictions")
    words = list(dict.fromkeys(str(row["method"]) for row in curve))
    styles = figures.styles(words)
    most = max(_number(row, "workers") for row in table.rows)
    last = [row for row in table.rows if row["workers"] == most and row["refused"] is None]
    settings = analysis.settings
    with figures.canvas(13, max(5.8, 3.2 + 0.36 * len(words))) as figure:
        left, right = figure.subplots(1, 2)
        for word in words:
            own = [row for row in curve if row["method"] == word and row["refused"] is None]
            counts = [_number(row, "workers") for row in own]
            shares = [100 * _number(row, "efficiency") for row in own]
            left.plot(counts, shares, **styles[word], label=word, markersize=5)
        left.set_xscale("log", base=2)
        left.xaxis.set_major_formatter(_short)
        left.set(xlabel="workers", ylabel="forward + backward, % of a step", ylim=(0, 104))
        _stacked(right, last)
        right.set(xlabel="ms", title=f"a step at {most:,.0f} workers, speedup over none")
        how = _kernels_text(last)
        left.set_title(f"overlap {settings['cluster']['overlap']:.0%}, kernels: {how}")
        handles = left.get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower left", ncols=5, fontsize="small")
        parts = right.get_legend_handles_labels()
        figure.legend(*parts, loc="outside lower right", ncols=2, fontsize="small")
        figure.suptitle(f"{table.title} (predicted)", fontsize="medium")
        figures.save(figure, path)


def _kernels_text(rows: Sequence[Row]) -> str:
    """Return by which kernels the methods in a table's rows are."""
    kinds = {row["kernels"] for row in rows if row["method"] not in ("none", HALF)}
    floor = "the memory's floor"
    return floor if TIMED not in kinds else TIMED if len(kinds) == 1 else f"{TIMED} or {floor}"


_CUT = 3.0
"""Bars longer than so many times the step of `none` are cut, and their times written out."""


def _stacked(axes: Any, rows: Sequence[Row]) -> None:
    """Draw a bar a method, the fastest on top, in its parts."""
    import seaborn

    ordered = sorted(rows, key=lambda row: -_number(row, "step_seconds"))
    names = [str(row["method"]) for row in ordered]
    base = next(_number(row, "step_seconds") for row in rows if row["method"] == "none")
    end = 1e3 * min(_CUT * base, max(_number(row, "step_seconds") for row in rows))
    starts = [0.0] * len(ordered)
    palette = seaborn.color_palette("colorblind")
    colours: list[Any] = ["0.75", palette[2], palette[1], palette[0]]
    for (field, label), colour in zip(_PARTS, colours, strict=True):
        widths = [1e3 * _number(row, field) for row in ordered]
        axes.barh(names, widths, left=starts, color=colour, label=label)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    for name, stop, row in zip(names, starts, ordered, strict=True):
        text = f"{_number(row, 'speedup'):.3g}x"
        if stop > end:
            text += f", to {stop:,.0f} ms"
            axes.annotate(text, (end, name), (-6, 0), textcoords="offset points", va="center",
                          ha="right", color="white", fontsize="small")  # fmt: skip
        else:
            axes.annotate(text, (stop, name), (4, 0), textcoords="offset points", va="center",
                          fontsize="small")  # fmt: skip
    axes.set_xlim(0, end * (1.0 if max(starts) > end else 1.16))
    axes.grid(axis="y", visible=False)
