"""How well the model predicts measured times (`gcbench predict --validate`).

`data/measured.csv` has one row per measured collective or step, with its source and licence: public
measurements over NCCL, and our own over gloo between network namespaces (results/netlab). A row is
"fitted" if the numbers in data/transports.yaml come from it; the others test them.

The largest error of the tests at the rate nearest to a cluster's link is the cluster's error band:
`gcbench predict` and `advise` do not rank steps whose times differ by less. Uncompressed and
compressed steps have a band each. Compressed steps were measured over gloo only, so their band
serves all libraries; their time without communication is measured, so an error of encoding times is
not in it.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from gcbench.core import files, progress
from gcbench.predict.clusters import BACKWARD, Cluster, Device, Link
from gcbench.predict.transport import ACHIEVED, LARGE
from gcbench.profile.breakeven import rate_text
from gcbench.report import figures
from gcbench.report.analysis import Analysis, Ledger, Row, Shown, Table

KIND = "validation"
MEASURED = Path(__file__).parent / "data" / "measured.csv"
LEAST_BAND = 0.05
"""Steps whose predicted times differ by less than this are never ranked."""


class Settings(BaseModel):
    """The settings that decide the result."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rows: str
    """The SHA-256 of the file of measured rows, so that other rows give another analysis."""


class Measured(BaseModel):
    """One measured collective or step, a row of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    licence: str
    transport: str
    kind: str
    """A collective; "exchange", which is an all-to-all and an all-gather; "ddp", a step; or, as
    "int8 step", the step of a method."""
    gbit: float
    """Rate of each worker's link, one worker per node."""
    workers: int
    message_bytes: str
    """Bytes that a worker contributes to each message, in order; in a method's step each with its
    collective, as "allgather=4096"."""
    broadcast_bytes: float
    """Buffers that DDP broadcasts per step."""
    compute_ms: float
    """Computation in the time; DDP hides messages under two thirds of it."""
    seconds: float
    """Median of the measured times."""
    n: int
    fitted: bool
    note: str

    @property
    def messages(self) -> list[tuple[str, float]]:
        """The collective, "" if it is that of `kind`, and the bytes of each message."""
        parts = (each.rpartition("=") for each in self.message_bytes.split())
        return [(collective, float(size)) for collective, _, size in parts]

    @property
    def total(self) -> float:
        """Bytes that a worker contributes to all messages."""
        return sum(size for _, size in self.messages)

    @property
    def cluster(self) -> Cluster:
        """The measured links, in rings without latency."""
        link, device = Link(gbit=self.gbit), Device(name="any", tflops=1, memory_gbyte=1)
        return Cluster(
            name="row",
            gpus_per_node=1,
            device=device,
            intra=link,
            inter=link,
            transport=self.transport,
            algorithm="ring",
        )

    def predict(self) -> float:
        """Return the predicted seconds."""
        cluster, total, compute = self.cluster, self.total, self.compute_ms / 1e3
        if self.kind == "ddp":
            spent = cluster.seconds("allreduce", total, self.workers)
            parts = [size / total for _, size in self.messages]
            buffers = cluster.seconds("broadcast", self.broadcast_bytes, self.workers)
            return compute + buffers + cluster.exposed(spent, BACKWARD * compute, parts)
        if self.compressed:
            return compute + sum(cluster.seconds(*one, self.workers) for one in self.messages)
        if self.kind == "exchange":
            shards = cluster.seconds("allgather", total / self.workers, self.workers)
            return compute + cluster.seconds("alltoall", total, self.workers) + shards
        return compute + cluster.seconds(self.kind, total, self.workers)

    @property
    def compressed(self) -> bool:
        """Whether it is the step of a method."""
        return "=" in self.message_bytes

    @property
    def method(self) -> str:
        """The method whose step it is; "" for others."""
        return self.kind.removesuffix(" step") if self.compressed else ""

    @property
    def tests(self) -> bool:
        """Whether its error counts: not fitted; a method's step, or at least 1 MiB."""
        return not self.fitted and (self.compressed or self.total >= LARGE)

    @property
    def error(self) -> float:
        """The predicted time divided by the measured one, minus 1."""
        return self.predict() / self.seconds - 1


@cache
def measured() -> tuple[Measured, ...]:
    """Return the packaged rows."""
    with MEASURED.open(newline="") as file:
        return tuple(Measured.model_validate(row) for row in csv.DictReader(file))


class Bands(NamedTuple):
    """The errors of predicted step times on the links between a cluster's nodes."""

    plain: float = LEAST_BAND
    """Of uncompressed steps: how much longer the longer of predicted and measured time is, a
    fraction of the shorter."""
    source: str = ""
    """The tests that it comes from, as text; "" if no link between nodes is used."""

    def of(self, method: str) -> float:
        """Return the error of a method's steps; `LEAST_BAND` if no link between nodes is used."""
        return method_error(method) if self.source else LEAST_BAND

    @property
    def text(self) -> str:
        """Both as a sentence; "" if no link between nodes is used."""
        if not self.source:
            return ""
        steps = [one for one in measured() if one.compressed]
        errors = {one.method: method_error(one.method) for one in steps}
        least, most = (pick(errors, key=errors.__getitem__) for pick in (min, max))
        over = ", ".join(sorted({one.transport for one in steps}))
        slow, fast = (rate_text(1e9 * pick(one.gbit for one in steps)) for pick in (min, max))
        return (
            f"Error band: uncompressed {self.plain:.0%} ({self.source}), methods "
            f"{errors[least]:.0%} ({least}) to {errors[most]:.0%} ({most}; {len(steps)} tests over "
            f"{over} at {slow} to {fast})."
        )


def bands(cluster: Cluster, workers: int) -> Bands:
    """Return the error bands of `workers` workers of a cluster."""
    if cluster.nodes_of(workers) == 1:
        return Bands()
    return bands_over(cluster.transport, cluster.inter.gbit)


@cache
def bands_over(transport: str, gbit: float) -> Bands:
    """Return the error bands from the uncompressed tests of a library at the nearest rate.

    Links of rates that were achieved ("achieved") use the tests of NCCL.
    """
    name = "nccl" if transport == ACHIEVED else transport
    plain = [one for one in measured() if one.tests and not one.compressed]
    tests = [one for one in plain if one.transport == name]
    nearest = min((one.gbit for one in tests), key=lambda rate: abs(math.log(rate / gbit)))
    here = [one for one in tests if one.gbit == nearest]
    text = f"{len(here)} tests over {here[0].transport} at {rate_text(1e9 * nearest)}"
    return Bands(_largest(here), text)


@cache
def method_error(method: str) -> float:
    """Return the largest error of a method's steps, or of all steps if it was not measured."""
    tests = [one for one in measured() if one.compressed]
    return _largest([one for one in tests if one.method == method] or tests)


def _largest(tests: Sequence[Measured]) -> float:
    worst = max(max(1 + one.error, 1 / (1 + one.error)) for one in tests) - 1
    return max(LEAST_BAND, worst)


# ---- the analysis --------------------------------------------------------------------------------


def settings() -> Settings:
    """Return the settings for the packaged rows."""
    return Settings(rows=files.hash_file(MEASURED))


def run(settings: Settings, command: str, observer: progress.Observer, ledger: Ledger) -> Analysis:
    """Predict every measured row and compare."""
    rows = [_row(one) for one in measured()]
    observer.step(len(rows))
    errors = list(_errors(measured()))
    notes = dict.fromkeys(f"{one.source} ({one.licence}): {one.note}." for one in measured())
    quantity = [Shown(field="transport", heading="library"), Shown(field="kind", heading="what")]
    return Analysis.of(
        KIND,
        settings,
        command,
        answer=[
            "Predicted against measured times; the tests are rows to which nothing was fitted.",
        ],
        tables=[
            Table(
                name="rows",
                title="Measured and predicted",
                shown=[
                    *quantity,
                    Shown(field="link", heading="link"),
                    Shown(field="workers", heading="workers"),
                    Shown(field="bytes", heading="MB", scale=1e-6),
                    Shown(field="measured", heading="measured\ns"),
                    Shown(field="predicted", heading="predicted\ns"),
                    Shown(field="error", heading="error\n%", scale=100),
                    Shown(field="fitted", heading="fitted"),
                ],
                which=2,
                notes=[
                    "fitted: the library's share of the link comes from this row; the others are "
                    "tests.",
                    *notes,
                ],
                rows=rows,
            ),
            Table(
                name="brief",
                brief=True,
                title="Errors of the tests",
                shown=[
                    *quantity,
                    Shown(field="n", heading="rows"),
                    Shown(field="median", heading="median\n%", scale=100),
                    Shown(field="largest", heading="largest\n%", scale=100),
                    Shown(field="largest_at", heading="at"),
                ],
                rows=errors,
            ),
        ],
    )


def _row(one: Measured) -> Row:
    return {
        "transport": one.transport,
        "kind": one.kind,
        "compressed": one.compressed,
        "link": rate_text(1e9 * one.gbit),
        "gbit": one.gbit,
        "workers": one.workers,
        "bytes": one.total,
        "measured": one.seconds,
        "predicted": one.predict(),
        "error": one.error,
        "n": one.n,
        "fitted": "yes" if one.fitted else "no",
        "source": one.source,
        "licence": one.licence,
    }


def _errors(rows: Sequence[Measured]) -> Iterator[Row]:
    """Yield the median and the largest error of the tests of each library and kind."""
    tests: dict[tuple[str, str], list[Measured]] = {}
    for one in rows:
        if not one.fitted:
            kind = one.kind + " < 1 MiB" * (not one.tests)
            kind = "compressed step" if one.compressed else kind
            tests.setdefault((one.transport, kind), []).append(one)
    for (transport, kind), here in tests.items():
        worst = max(here, key=lambda one: abs(one.error))
        yield {
            "transport": transport,
            "kind": kind,
            "n": len(here),
            "median": statistics.median(abs(one.error) for one in here),
            "largest": worst.error,
            "largest_at": rate_text(1e9 * worst.gbit),
        }


def draw(analysis: Analysis, path: Path) -> None:
    """Draw predicted over measured time by library and kind, with the diagonal and 15 %."""
    rows = analysis.table("rows").rows
    labels = [
        f"{row['transport']}, {'compressed step' if row['compressed'] else row['kind']}"
        for row in rows
    ]
    names = list(dict.fromkeys(labels))
    styles = figures.styles(names)
    with figures.canvas(8.5, 6) as figure:
        axes = figure.subplots()
        for name in names:
            points = [
                (float(row["measured"] or 0), float(row["predicted"] or 0))
                for row, label in zip(rows, labels, strict=True)
                if label == name
            ]
            look = {"color": styles[name]["color"], "markersize": 8, "alpha": 0.85}
            axes.plot(*zip(*points, strict=True), styles[name]["marker"], label=name, **look)
        ends = [float(row[key] or 0) for row in rows for key in ("measured", "predicted")]
        low, high = min(ends) / 2, max(ends) * 2
        for factor, line in ((1.0, "-"), (0.85, ":"), (1.15, ":")):
            axes.plot([low, high], [low * factor, high * factor], line, color="0.5", linewidth=1)
        axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
        axes.set(xlabel="measured, s", ylabel="predicted, s", title="dotted: 15 %")
        figure.legend(loc="outside right upper", fontsize="small")
        figures.save(figure, path)
