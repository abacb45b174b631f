"""On which links each method pays, from times measured inside exchanges.

Bytes are those of the method's own collective among N workers (`traffic`), times those of one run
of `gcbench bandwidth`, and the definition is that of `codec`: an exchange alone, without a backward
pass that hides it. For the measured number of workers the table is that of `gcbench bandwidth`.
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
from gcbench.report import figures
from gcbench.report.analysis import Analysis, Ledger, Row, Shown, Table
from gcbench.studies import methods
from gcbench.studies.bandwidth.settings import size_text
from gcbench.studies.bandwidth.worker import shapes
from gcbench.studies.scale import codec, traffic
from gcbench.studies.scale.codec import Measured

KIND = "scale-pays"
STORED = "stored"
"""The measurement that is part of the package."""
MARKS = (1.0, 10.0, 100.0)
"""Links that conclusions name and pictures mark, Gbit/s."""
ROUNDS = {"allreduce": 2, "reducescatter": 1, "allgather": 1, "alltoall": 1}
"""Messages one after the other of a ring collective, divided by (workers - 1)."""


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
    """Return the stored measurement, or that of a file.

    Raises:
        UsageError: there is none.
    """
    if kernels != STORED:
        if kernels == "measured":
            raise UsageError(
                "--kernels measured: a codec is measured inside exchanges; run `gcbench bandwidth "
                "--json > mine.json`, and give that file"
            )
        return codec.load(Path(kernels))
    found = codec.stored()
    if found is None:
        raise UsageError(
            "the package brings no measurement; run `gcbench bandwidth --json > mine.json`, and "
            "give that file with --kernels"
        )
    return found


def rows(
    known: Measured,
    chosen: Mapping[str, Compressor],
    workers: int,
    latency: float,
    size: int | None = None,
) -> list[Row]:
    """Return a row for each method but `none`, by its first collective, in the order given.

    `size`: bytes of the gradient, one of the measured sizes; the largest unless given. `latency`:
    seconds a message. A method that was not measured has "not measured" as its links; one that
    refuses so many workers "refused", and the reason in the field `refused`.
    """
    size = size or int(known.analysis.settings["sizes"][-1])
    n = size / codec.FLOAT
    made: list[Row] = []
    for word, method in chosen.items():
        if word == "none":
            continue
        collective = check_legal(method)
        row: Row = {"workers": workers, "method": word, "collective": collective, "size": size}
        lanes = (tuple(shapes(size // codec.FLOAT)), ())
        try:
            sent = traffic.exchange(method, collective, lanes, workers)
        except UsageError as error:
            links = dict.fromkeys(("links", "links_better"), "refused")
            made.append({**row, **links, "refused": str(error)})
            continue
        wire = traffic.total(sent, workers).wire
        rounds = float(sum(ROUNDS[message.kind] for message in sent) * (workers - 1))
        row |= {"wire_bytes": wire, "messages": rounds}
        row["wire_ratio"] = 2 * (workers - 1) / workers * size / wire
        own = known.of(method, n)
        if own is None:
            made.append({**row, "links": "not measured", "links_better": "not measured"})
            continue
        encode, decode = own.seconds(method, collective, n, workers)
        cost = codec.Cost(encode + decode, wire, rounds)
        row |= {"encode_seconds_per_byte": encode / size, "decode_seconds_per_byte": decode / size}
        made.append(row | codec.pays_fields(cost, float(size), workers, own.copy, latency))
    return made


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
    known: Measured, chosen: Mapping[str, Compressor], latency_us: float, found: Sequence[Row]
) -> list[str]:
    """Return the notes of a table of these methods, with the rows `found`."""
    size = int(known.analysis.settings["sizes"][-1])
    every = {word: method for word, method in chosen.items() if word != "none"}
    left = [word for word in every if known.of(every[word], size / codec.FLOAT) is None]
    refused = dict.fromkeys(str(row["refused"]) for row in found if row.get("refused"))
    measure = f"Not measured: {', '.join(left)}. To measure them: {codec.measuring(every)}."
    return [
        f"Encode and decode were measured {known.source}, on a gradient of {size_text(size)}B, in "
        "seconds a GB of the fp32 gradient; with more workers there are more payloads to decode.",
        "pays: the links on which the exchange alone is faster than a ring all-reduce of fp32, and "
        "than one of bf16, too, which has half the bytes and two casts at the speed of a copy; "
        f"with {latency_us:g} us a message, and no overlap with a backward pass. wire ratio: the "
        "bytes that leave a worker with fp32, divided by the method's; below 1 no kernel helps.",
        *known.told(chosen.values()),
        *([measure] if left else []),
        *(f"Refused: {reason}." for reason in refused),
    ]


def run(settings: Settings, command: str, observer: progress.Observer, ledger: Ledger) -> Analysis:
    """Return the analysis, with a table for each number of workers.

    Raises:
        UsageError: no measurement, an unknown method.
    """
    known = measurement(settings.kernels)
    chosen = methods.all_of(",".join(settings.compressors))
    counts = settings.workers or [int(known.analysis.settings["workers"])]
    made: list[Row] = []
    for place, workers in enumerate(counts, 1):
        made += rows(known, chosen, workers, settings.link_latency_us * 1e-6)
        observer.step(place)
    return Analysis.of(
        KIND,
        settings,
        command,
        conclusions=_conclusions(made, counts),
        tables=[
            Table(
                name="methods",
                title="Links on which an exchange alone pays, by workers",
                shown=SHOWN,
                which=2,
                by="workers",
                notes=notes(known, chosen, settings.link_latency_us, made),
                rows=made,
            )
        ],
    )


def _conclusions(made: Sequence[Row], counts: Sequence[int]) -> list[str]:
    said = []
    for workers in counts:
        own = [row for row in made if row["workers"] == workers and "pays_on_from" in row]
        told = [
            f"{sum(codec.covers(row, 1e9 * link, '_better') for row in own)} at {link:g} Gbit/s"
            for link in MARKS
        ]
        said.append(
            f"{workers:,} workers: of {len(own)} exchanges are faster than the better all-reduce "
            f"of fp32 and bf16: {', '.join(told)}."
        )
    return said


# ---- the picture ---------------------------------------------------------------------------------


def draw(analysis: Analysis, path: Path) -> None:
    """Draw the fastest link of each method, a panel for each number of workers."""
    found = analysis.table("methods").rows
    counts = list(dict.fromkeys(row["workers"] for row in found))
    most = max(sum(row["workers"] == count for row in found) for count in counts)
    size = (1.0 + 6.2 * len(counts), max(4.0, 2.0 + 0.33 * most))
    with figures.canvas(*size) as figure:
        panels = figure.subplots(1, len(counts), squeeze=False)[0]
        for axes, count in zip(panels, counts, strict=True):
            bars(axes, [row for row in found if row["workers"] == count], found)
            axes.set(title=f"{count:,} workers", xlabel="pays below, Gbit/s")
        figure.suptitle("Where an exchange alone stops paying", fontsize="medium")
        figures.save(figure, path)


def bars(axes: Any, found: Sequence[Row], every: Sequence[Row] = ()) -> None:
    """Draw the fastest link on which each method pays, the fastest on top.

    Light bars: over fp32; dark bars: over the better of fp32 and bf16. A method that does not pay
    from the slowest links on has words in place of a bar. `every`: the rows of all panels, which
    share their limits; none: those of `found`.
    """
    ends = {"pays_on_to": "over fp32", "pays_on_to_better": "and over bf16, too"}
    known = [1e-9 * float(row.get(end) or 0) for row in every or found for end in ends]
    if not any(known):
        told = "no method saves time"
        if not any("pays_on_to" in row for row in found):
            unknown = any(row.get("links") in ("refused", "not measured") for row in found)
            told = "not measured" if unknown else "not in this file: run its command again"
        axes.text(0.5, 0.5, told, transform=axes.transAxes, ha="center")
        return

    def reach(row: Row, end: str = "pays_on_to") -> float:
        from_zero = row.get(end.replace("_to", "_from")) == 0
        return 1e-9 * float(row.get(end) or 0) if from_zero else 0.0

    ordered = sorted((row for row in found if "pays_on_to" in row), key=reach)
    names = [f"{row['method']}, {row['collective']}" for row in ordered]
    low = 10 ** math.floor(math.log10(min(*filter(None, known), *MARKS) / 1.5))
    for (end, label), colour in zip(ends.items(), ("0.8", "0.45"), strict=True):
        widths = [max(0.0, reach(row, end) - low) for row in ordered]
        axes.barh(names, widths, left=low, color=colour, label=label)
    for name, row in zip(names, ordered, strict=True):
        axes.annotate(
            f"{reach(row):.3g}" if reach(row) else row["links"],
            (max(reach(row), low), name),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize="small",
        )
    for mark in MARKS:
        axes.axvline(mark, color="0.4", linewidth=1, linestyle=":")
    axes.set_xscale("log")
    axes.set_xlim(low, 3 * max(*known, *MARKS))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.tick_params(axis="y", labelsize="small")
    axes.grid(axis="y", visible=False)
    axes.legend(loc="lower right", fontsize="small")
