"""The links on which each method pays (`gcbench predict --links`).

Bytes are those of the method's default collective among N workers (`traffic`), times those of one
result of `gcbench bandwidth`, and the definition is `gcbench.profile.breakeven`: an exchange alone,
without a backward pass that hides it. For the measured number of workers the table equals that of
`gcbench bandwidth`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from gcbench.core import progress
from gcbench.core.compressor import Compressor
from gcbench.core.errors import UsageError
from gcbench.core.exchange import check_legal
from gcbench.predict import costs, traffic
from gcbench.predict.costs import Measured
from gcbench.profile.bandwidth.settings import size_text
from gcbench.profile.bandwidth.worker import shapes
from gcbench.profile.breakeven import FLOAT, Cost, covers, pays_fields
from gcbench.report import figures
from gcbench.report.analysis import Analysis, Ledger, Row, Shown, Table
from gcbench.training import methods

KIND = "links"
STORED = "assumed"
"""The measurement that is part of the package."""
MARKS = (1.0, 10.0, 100.0)
"""Links that the answer names and pictures mark, Gbit/s."""
ROUNDS = {"allreduce": 2, "reducescatter": 1, "allgather": 1, "alltoall": 1, "hops": 1}
"""Messages of a ring collective sent one after another, divided by (workers - 1)."""


class Settings(BaseModel):
    """The settings that decide the result."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kernels: str = STORED
    """`STORED`, or a file of `gcbench bandwidth --json`."""
    compressors: list[str]
    workers: list[Annotated[int, Field(ge=2, le=100_000)]]
    """Numbers of workers; empty: that of the measurement."""
    link_latency_us: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 50.0
    measured: str = ""
    """Name and time of the measurement, so that another one gives another analysis."""


def measurement(kernels: str) -> Measured:
    """Return the packaged measurement, or that of a file.

    Raises:
        UsageError: there is none.
    """
    if kernels != STORED:
        return costs.load(Path(kernels))
    measured = costs.stored()
    if measured is None:
        raise UsageError(
            "this package contains no measurement; run `gcbench bandwidth --json > m.json` and add "
            "--kernels m.json"
        )
    return measured


def rows(
    measured: Measured,
    chosen: Mapping[str, Compressor],
    workers: int,
    latency: float,
) -> list[Row]:
    """Return a row per method except `none`, by its default collective, in the given order.

    The gradient has the largest of the measured sizes. `latency`: seconds per message. `links` is
    "not measured" for a method without times, and "refused" for a method that refuses this many
    workers; the field `refused` has the reason.
    """
    size = int(measured.analysis.settings["sizes"][-1])
    n = size / FLOAT
    table: list[Row] = []
    for spec, method in chosen.items():
        if spec == "none":
            continue
        collective = check_legal(method)
        row: Row = {"workers": workers, "method": spec, "collective": collective, "size": size}
        lanes = (tuple(shapes(size // FLOAT)), ())
        try:
            sent = traffic.exchange(method, collective, lanes, workers)
        except UsageError as error:
            links = dict.fromkeys(("links", "links_better"), "refused")
            table.append({**row, **links, "refused": str(error)})
            continue
        wire = traffic.total(sent, workers).wire
        rounds = float(sum(ROUNDS[message.kind] for message in sent) * (workers - 1))
        row |= {"wire_bytes": wire, "messages": rounds}
        row["wire_ratio"] = 2 * (workers - 1) / workers * size / wire
        times = measured.of(method, n)
        if times is None:
            table.append({**row, "links": "not measured", "links_better": "not measured"})
            continue
        encode, decode = times.seconds(method, collective, n, workers)
        cost = Cost(encode + decode, wire, rounds)
        row |= {"encode_seconds_per_byte": encode / size, "decode_seconds_per_byte": decode / size}
        table.append(row | pays_fields(cost, float(size), workers, times.copy, latency))
    return table


SHOWN = [
    Shown(field="method", heading="method"),
    Shown(field="collective", heading="collective"),
    Shown(field="wire_ratio", heading="wire\nratio"),
    Shown(field="messages", heading="messages"),
    Shown(field="encode_seconds_per_byte", heading="encode\ns/GB", scale=1e9),
    Shown(field="decode_seconds_per_byte", heading="decode\ns/GB", scale=1e9),
    Shown(field="links", heading="pays\nover fp32"),
    Shown(field="links_better", heading="and\nover bf16"),
]


def notes(
    measured: Measured, chosen: Mapping[str, Compressor], latency_us: float, table: Sequence[Row]
) -> list[str]:
    """Return the footnotes of a table of these methods."""
    size = int(measured.analysis.settings["sizes"][-1])
    specs = {spec: method for spec, method in chosen.items() if spec != "none"}
    missing = [spec for spec in specs if measured.of(specs[spec], size / FLOAT) is None]
    refused = dict.fromkeys(str(row["refused"]) for row in table if row.get("refused"))
    scaled = [spec for spec, method in specs.items() if traffic.depends_on_scale(method)]
    how = f"Not measured: {', '.join(missing)}. To measure them: {costs.how_to_measure(specs)}."
    return [
        f"Encode and decode were measured {measured.source}, for a gradient of {size_text(size)}B, "
        "in seconds per GB of fp32 gradient; more workers mean more payloads to decode.",
        "pays: links on which the exchange alone is faster than a ring all-reduce of fp32, and "
        "also of bf16 (half the bytes, two casts at the speed of a copy), with "
        f"{latency_us:g} us per message and no overlap with a backward pass. wire ratio: bytes "
        "sent with fp32 divided by the method's; below 1 the method never pays.",
        *measured.warnings(chosen.values()),
        *([how] if missing else []),
        *(f"Refused: {reason}." for reason in refused),
        *(
            f"{spec}: its bytes depend on how large gradients are; these are for normal values of "
            "variance 1, and smaller ones take fewer."
            for spec in scaled
        ),
    ]


def run(settings: Settings, command: str, observer: progress.Observer, ledger: Ledger) -> Analysis:
    """Return the analysis, with one table per number of workers.

    Raises:
        UsageError: no measurement, or an unknown method.
    """
    measured = measurement(settings.kernels)
    chosen = methods.all_of(",".join(settings.compressors))
    counts = settings.workers or [int(measured.analysis.settings["workers"])]
    table: list[Row] = []
    for position, workers in enumerate(counts, 1):
        table += rows(measured, chosen, workers, settings.link_latency_us * 1e-6)
        observer.step(position)
    title = "Links on which an exchange alone pays"
    most = [row for row in table if row["workers"] == counts[-1]]
    best = sorted(most, key=lambda row: float(row.get("pays_on_to_better") or 0), reverse=True)
    columns = ("method", "collective", "wire_ratio", "links", "links_better")
    return Analysis.of(
        KIND,
        settings,
        command,
        answer=_answers(table, counts),
        tables=[
            Table(
                name="methods",
                title=f"{title}, by workers",
                shown=SHOWN,
                which=2,
                by="workers",
                notes=notes(measured, chosen, settings.link_latency_us, table),
                rows=table,
            ),
            Table(
                name="brief",
                brief=True,
                title=f"{title}: {counts[-1]:,} workers",
                shown=[shown for shown in SHOWN if shown.field in columns],
                which=2,
                rows=best[:8],
            ),
        ],
    )


def _answers(table: Sequence[Row], counts: Sequence[int]) -> list[str]:
    sentences = []
    for workers in counts:
        timed = [row for row in table if row["workers"] == workers and "pays_on_from" in row]
        faster = [
            f"{sum(covers(row, 1e9 * mark, '_better') for row in timed)} at {mark:g} Gbit/s"
            for mark in MARKS
        ]
        sentences.append(
            f"{workers:,} workers: of {len(timed)} methods, these beat both fp32 and bf16 "
            f"all-reduce: {', '.join(faster)}."
        )
    return sentences


# ---- the picture ---------------------------------------------------------------------------------


def draw(analysis: Analysis, path: Path) -> None:
    """Draw the fastest link of each method, one panel per number of workers."""
    table = analysis.table("methods").rows
    counts = list(dict.fromkeys(row["workers"] for row in table))
    most = max(sum(row["workers"] == count for row in table) for count in counts)
    size = (1.0 + 6.2 * len(counts), max(4.0, 2.0 + 0.33 * most))
    with figures.canvas(*size) as figure:
        panels = figure.subplots(1, len(counts), squeeze=False)[0]
        for axes, count in zip(panels, counts, strict=True):
            bars(axes, [row for row in table if row["workers"] == count], table)
            axes.set(title=f"{count:,} workers", xlabel="pays below, Gbit/s")
        figure.suptitle("Where an exchange alone stops paying", fontsize="medium")
        figures.save(figure, path)


def bars(axes: Any, rows: Sequence[Row], every: Sequence[Row] = ()) -> None:
    """Draw the fastest link on which each method pays, the fastest at the top.

    Light bars: over fp32; dark bars: over the faster of fp32 and bf16. A method that does not pay
    on slow links has its text instead of a bar. `every`: the rows of all panels, which share their
    limits; default `rows`.
    """
    ends = {"pays_on_to": "over fp32", "pays_on_to_better": "and over bf16"}
    speeds = [1e-9 * float(row.get(end) or 0) for row in every or rows for end in ends]
    if not any(speeds):
        text = "no method saves time"
        if not any("pays_on_to" in row for row in rows):
            unknown = any(row.get("links") in ("refused", "not measured") for row in rows)
            text = "not measured" if unknown else "not in this file: repeat its command"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center")
        return

    def reach(row: Row, end: str = "pays_on_to") -> float:
        from_zero = row.get(end.replace("_to", "_from")) == 0
        return 1e-9 * float(row.get(end) or 0) if from_zero else 0.0

    ordered = sorted((row for row in rows if "pays_on_to" in row), key=reach)
    names = [f"{row['method']}, {row['collective']}" for row in ordered]
    low = 10 ** math.floor(math.log10(min(*filter(None, speeds), *MARKS) / 1.5))
    for (end, label), colour in zip(ends.items(), ("0.8", "0.45"), strict=True):
        widths = [max(0.0, reach(row, end) - low) for row in ordered]
        axes.barh(names, widths, left=low, color=colour, label=label)
    style = {"textcoords": "offset points", "va": "center", "fontsize": "small"}
    for name, row in zip(names, ordered, strict=True):
        text = f"{reach(row):.3g}" if reach(row) else str(row["links"])
        axes.annotate(text, (max(reach(row), low), name), (4, 0), **style)
    for mark in MARKS:
        axes.axvline(mark, color="0.4", linewidth=1, linestyle=":")
    axes.set_xscale("log")
    axes.set_xlim(low, 3 * max(*speeds, *MARKS))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.tick_params(axis="y", labelsize="small")
    axes.grid(axis="y", visible=False)
    axes.legend(loc="lower right", fontsize="small")
