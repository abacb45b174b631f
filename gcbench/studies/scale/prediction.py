"""What a step takes on a cluster: every method, at every number of workers, by closed forms.

step = forward and backward + encode + decode + communication that the backward pass does not hide

max(0, communication - overlap * backward). Computation is the cluster's (`clusters`), bytes are
those of `traffic`, encoding and decoding are `work`'s. Scaling is weak: a worker's batch stays, so
examples a second are N batch / step. A lone worker, or a lone node under `topology: nodes`, has
nothing to compress.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from gcbench.core import registry
from gcbench.core.compressor import Compressor
from gcbench.core.errors import UsageError
from gcbench.core.exchange import check_legal
from gcbench.reporting import figures, kernel_timings
from gcbench.reporting.analysis import Analysis, Ledger, Row, Shown, Table, provenance
from gcbench.studies import methods
from gcbench.studies.scale import networks, published_bars, traffic, work
from gcbench.studies.scale.clusters import BACKWARD, Cluster, links_text, rate_text
from gcbench.studies.scale.networks import Network, Shapes
from gcbench.training import progress

KIND = "scale"
STEPS_PRICED = 1000
LINKS = 71
"""Rates of a link that are tried for the break-even, ten a decade, before bisection."""
MOST_WORKERS = 100_000


class Settings(BaseModel):
    """What decides the prediction."""

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
    kernels: str = "assumed"
    threads: Annotated[int, Field(ge=1)]


def network_of(model: str, module: str | None) -> Network:
    """Return the built-in network, or that of a module.

    Raises:
        UsageError: see `networks`.
    """
    return networks.of_module(module) if module else networks.network(model)


# ---- one step ------------------------------------------------------------------------------------


class Step:
    """One method on one network and cluster: what each number of workers takes.

    `lanes`: shapes that are compressed, and those kept dense; `compute`: seconds of forward and
    backward; `rates`: of the method, and of the dense lane.
    """

    def __init__(
        self,
        method: Compressor,
        collective: str,
        lanes: tuple[Shapes, Shapes],
        compute: float,
        rates: work.Rates,
        dense: work.Rates,
    ) -> None:
        self.method, self.collective, self.lanes = method, collective, lanes
        self.compute, self.rates = compute, rates
        plain = registry.compressor("none")
        self.gradient = sum(map(traffic.dense_bytes, lanes))
        self.parts = [
            (rates, method, collective, traffic.dense_bytes(lanes[0]) / 4),
            (dense, plain, "allreduce", traffic.dense_bytes(lanes[1]) / 4),
        ]
        self._sent: dict[int, list[traffic.Message]] = {}

    def messages(self, workers: int) -> list[traffic.Message]:
        """Return what so many workers hand to collectives in a step; one hands over nothing."""
        if workers not in self._sent:
            alone = workers == 1
            self._sent[workers] = (
                [] if alone else traffic.exchange(self.method, self.collective, self.lanes, workers)
            )
        return self._sent[workers]

    def at(self, workers: int, cluster: Cluster) -> dict[str, Any]:
        """Return seconds and bytes of a step, in the fastest topology that the cluster allows.

        Raises:
            UsageError: the workers do not fill nodes, or the method refuses so many.
        """
        found, refused = [], []
        for way in cluster.topologies(workers):
            try:
                found.append(self._at(workers, cluster, way))
            except UsageError as error:
                refused.append(error)
        if not found:
            raise refused[0]
        return min(found, key=lambda way: way["step_seconds"])

    def _at(self, workers: int, cluster: Cluster, topology: str) -> dict[str, Any]:
        nodes = cluster.nodes_of(workers)
        inside, among, network = 1, workers, cluster
        communicate = 0.0
        if topology == "nodes":
            inside, among, network = workers // nodes, nodes, cluster.between()
            communicate = cluster.inside_seconds(self.gradient, workers)
        messages = self.messages(among)
        communicate += sum(network.seconds(sent.kind, sent.nbytes, among) for sent in messages)
        encode = decode = 0.0
        for rates, method, collective, n in self.parts if among > 1 else ():
            spent = work.step(rates, method, collective, n / inside, among)
            encode, decode = encode + spent[0], decode + spent[1]
        exposed = max(0.0, communicate - cluster.overlap * BACKWARD * self.compute)
        moved = traffic.total(messages, among)
        return {
            "topology": topology,
            "compute_seconds": self.compute,
            "encode_seconds": encode,
            "decode_seconds": decode,
            "communicate_seconds": communicate,
            "exposed_seconds": exposed,
            "step_seconds": self.compute + encode + decode + exposed,
            "payload_bytes_up": moved.up,
            "payload_bytes_down": moved.down,
            "wire_bytes": moved.wire,
        }


def pays(step: Step, plain: Step, workers: int, cluster: Cluster) -> list[tuple[float, float]]:
    """Return the network links, as ranges in Gbit/s, at which `step` is faster than `plain`.

    From 1 Mbit/s, which counts as 0, to 10 Tbit/s, which counts as infinite.
    """

    def gains(gbit: float) -> bool:
        wire = cluster.inter.model_copy(update={"gbit": gbit})
        there = cluster.model_copy(update={"inter": wire})
        own, dense = (one.at(workers, there)["step_seconds"] for one in (step, plain))
        return bool(own < dense * (1 - 1e-9))

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


def _rates(
    settings: Settings,
    chosen: Mapping[str, Compressor],
    shapes: Shapes,
    observer: progress.Observer,
    ledger: Ledger,
) -> dict[str, work.Rates]:
    """Return each method's rates, timing those that neither a file nor the ledger has."""
    timings = None
    if settings.kernels not in ("assumed", "measured"):
        timings = kernel_timings.load(Path(settings.kernels))
    n = max(1, round(traffic.dense_bytes(shapes) / 4))
    found: dict[str, work.Rates] = {}
    for place, (word, method) in enumerate(chosen.items()):
        key = repr(method)
        if settings.kernels == "assumed":
            found[word] = work.assumed(method, settings.cluster.device, shapes)
        elif timings and (rates := work.of_file(method, timings, n, settings.threads)):
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
    return found


def pays_fields(step: Step, plain: Step, workers: int, cluster: Cluster) -> Row:
    """Return the links on which a method pays as fields of a row; none of them in a lone node.

    `pays_on` in words; `pays_from_gbit`, `pays_to_gbit` the slowest range of them, None for the
    upper end where it has none, both None where there is no such link.
    """
    if cluster.nodes_of(workers) == 1:
        return {"pays_on": None, "pays_from_gbit": None, "pays_to_gbit": None}
    found = pays(step, plain, workers, cluster)
    low, high = found[0] if found else (None, math.inf)
    return {
        "pays_on": links_text(found),
        "pays_from_gbit": low,
        "pays_to_gbit": None if math.isinf(high) else high,
    }


def _legal(method: Compressor, settings: Settings, word: str, *, every: bool) -> tuple[str, ...]:
    """Return the collectives to predict; the dense one is an all-reduce whatever was asked for.

    Raises:
        UsageError: the method has not the collective that was asked for.
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
    batch: int
    compute: float
    """Seconds of forward and backward."""
    steps: Mapping[tuple[str, str], Step]
    """By word and collective; ("none", "allreduce") is always there."""
    notes: Sequence[str]
    """What was assumed, for the reader."""

    @property
    def plain(self) -> Step:
        """The uncompressed step."""
        return self.steps["none", "allreduce"]


def prepare(
    settings: Settings, observer: progress.Observer, ledger: Ledger, *, every: bool = False
) -> Prepared:
    """Return the steps of the methods and `none`: by their collective, or by `every` legal one.

    Raises:
        UsageError: an unknown name, an illegal collective, workers that do not fill nodes.
    """
    network = network_of(settings.model, settings.module)
    cluster = settings.cluster
    for workers in settings.workers:
        cluster.nodes_of(workers)
    batch = settings.batch or network.batch
    if settings.compute_ms is not None:
        compute, how = settings.compute_ms / 1e3, "given"
    else:
        compute, how = cluster.compute_seconds(network.name, network.macs, batch)
    chosen = methods.all_of(",".join(dict.fromkeys(["none", *settings.compressors])))
    cases = [
        (word, method, collective)
        for word, method in chosen.items()
        for collective in _legal(method, settings, word, every=every)
    ]
    lanes = network.split(dense_last=settings.dense_last, dense_below=settings.dense_below)
    if not lanes[0]:
        raise UsageError(f"--dense-below {settings.dense_below} leaves no tensor to compress")
    rates = _rates(settings, chosen, network.shapes, observer, ledger)
    steps = {
        (word, collective): Step(
            method,
            collective,
            lanes if word != "none" else (network.shapes, ()),
            compute,
            rates[word],
            rates["none"],
        )
        for word, method, collective in cases
    }
    links = f"{rate_text(cluster.inter.gbit)} and {cluster.inter.latency_us:g} us between nodes"
    if published_bars.place(cluster):
        links += " (effective: what a ring needs for the fp32 bars of TernGrad's Fig. 5)"
    if cluster.gpus_per_node > 1:
        links += (
            f", {cluster.gpus_per_node} {cluster.device.name} in a node by "
            f"{rate_text(cluster.intra.gbit)} and {cluster.intra.latency_us:g} us"
        )
    sources = dict.fromkeys(rates[word].source for word in chosen)
    notes = [
        f"Forward and backward {1e3 * compute:.4g} ms ({how}). Links: {links}; "
        f"{cluster.overlap:.0%} of the backward pass hides communication; rounds: "
        f"{cluster.algorithm}, topology: {cluster.topology}. Kernels: {'; '.join(sources)}.",
    ]
    return Prepared(network, batch, compute, steps, notes)


def run(settings: Settings, command: str, observer: progress.Observer, ledger: Ledger) -> Analysis:
    """Predict every method at every number of workers.

    Raises:
        UsageError: see `prepare`.
    """
    found = prepare(settings, observer, ledger)
    cluster, network, batch = settings.cluster, found.network, found.batch
    steps = {word: step for (word, _), step in found.steps.items()}
    rows = list(_rows(steps, settings.workers, cluster, batch, priced=True))
    beside: list[Row] = []
    if settings.compute_ms is None and not settings.dense_below:
        beside = published_bars.compare(cluster, network, batch, rows)
    most = max(settings.workers)
    curve = list(_rows(steps, _spread(cluster, most), cluster, batch, priced=False))
    title = (
        f"{network.title}, {network.numel:,} parameters, batch {batch} a worker, cluster "
        f"{cluster.name}"
    )
    notes = [
        *found.notes,
        "Predicted, nothing here was run. speedup: step of `none` by all-reduce / step. "
        "efficiency: forward and backward / step. pays on links: those between nodes with which "
        "the step is shorter than that of `none`, of 1 Mbit/s to 10 Tbit/s. way: all workers "
        "exchange payloads (flat, bytes of a worker), or nodes whose gradients are added first "
        "(nodes, bytes of a node).",
    ]
    if cluster.price is not None:
        notes[-1] += f" cost: of {STEPS_PRICED:,} steps at {cluster.price:g} a device and hour."
    refused = dict.fromkeys(str(row["refused"]) for row in rows if row["refused"])
    notes += [f"Refused: {said}." for said in refused]
    return Analysis(
        kind=KIND,
        settings=settings.model_dump(mode="json"),
        command=command,
        provenance=provenance(),
        conclusions=[*_conclusions(rows), *published_bars.conclusions(beside)],
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
            *([published_bars.table(network, beside)] if beside else []),
            Table(name="curve", title=title, rows=curve),
        ],
    )


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
    Shown(field="speedup", heading="speedup"),
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
    steps: Mapping[str, Step], counts: Sequence[int], cluster: Cluster, batch: int, *, priced: bool
) -> Iterator[Row]:
    plain = steps["none"]
    for workers, (word, step) in itertools.product(counts, steps.items()):
        nodes = cluster.nodes_of(workers)
        row: Row = {
            "workers": workers,
            "nodes": nodes,
            "method": word,
            "compressor": repr(step.method),
            "collective": step.collective,
            "kernels": step.rates.source,
        }
        base = plain.at(workers, cluster)["step_seconds"]
        try:
            found = step.at(workers, cluster)
        except UsageError as error:
            yield {**row, "topology": "refused", "refused": str(error)}
            continue
        seconds = found["step_seconds"]
        row |= found
        row["examples_per_second"] = workers * batch / seconds
        row["speedup"] = base / seconds
        row["efficiency"] = step.compute / seconds
        if priced and word != "none":
            row |= pays_fields(step, plain, workers, cluster)
        if priced and cluster.price is not None:
            row["cost"] = cluster.price * workers * seconds * STEPS_PRICED / 3600
        row["refused"] = None
        yield row


def _number(row: Row, field: str) -> float:
    value = row.get(field)
    return float(value) if isinstance(value, int | float) else math.nan


def _conclusions(rows: Sequence[Row]) -> list[str]:
    """Return who is fastest at each number of workers."""
    said = []
    for workers in dict.fromkeys(_number(row, "workers") for row in rows):
        alike = [row for row in rows if row["workers"] == workers and row["refused"] is None]
        best = min(alike, key=lambda row: _number(row, "step_seconds"))
        gain = _number(best, "speedup")
        if gain <= 1:
            said.append(f"{workers:,.0f} workers: no method is faster than `none`.")
        else:
            said.append(
                f"{workers:,.0f} workers: {best['method']} is fastest, {gain:.3g} times as fast as "
                f"`none`, {100 * _number(best, 'efficiency'):.3g} % of the time computes."
            )
    return said


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
    """Draw what is left to compute over workers, and what a step consists of at the most."""
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
        how = str(last[0]["kernels"]).partition(":")[0] if last else ""
        left.set_title(f"overlap {settings['cluster']['overlap']:.0%}, kernels: {how}")
        handles = left.get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower left", ncols=5, fontsize="small")
        parts = right.get_legend_handles_labels()
        figure.legend(*parts, loc="outside lower right", ncols=2, fontsize="small")
        figure.suptitle(f"{table.title} (predicted)", fontsize="medium")
        figures.save(figure, path)


_CUT = 3.0
"""Bars end at so many times the step of `none`: slower methods are cut, their times written."""


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
