"""The links on which compression pays: the cost model of FFT sparsification, equations (1) to (4).

A gradient has M bytes, the link transfers Tcomm bytes per second, and the payload is k times
smaller. The stages have throughputs in bytes of M per second: Tm (conversion of numbers, twice: to
fp16 and to range-based floats), Tf (transform), Tp (packing), Ts (selection):

    (1) compress     M (2 / Tm + 1 / Tf + 1 / Tp + 1 / Ts)
    (2) communicate  M / (k Tcomm)
    (3) saved        (M / Tcomm) (1 - 1 / k)
    (4) it pays where (3) exceeds compressing and decompressing, S seconds per byte in total:

        k_min = 1 / (1 - Tcomm S) while Tcomm S < 1, else no ratio pays: 1 / S is the fastest link

There are several estimates of S. `symmetric` assumes that decompressing takes as long as (1);
`exact` omits the selection, which decompressing does not need; the paper's "about 30 at 56 Gbit/s"
also implies an S. k_min is ill-conditioned, d ln k / d ln S = k - 1, so compare 1 / S. The table of
methods uses the bytes and times of their own collectives among N workers
(`gcbench.profile.breakeven`), as `gcbench predict --links` does.
Source: Wang et al., HPDC 2020, section 4.4 of arXiv:1811.08596; its formulas were derived again,
because their text was not available.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import torch
from _paper import Choices, Columns, main, table, values
from pydantic import Field, field_validator

from gcbench import ops
from gcbench.core import progress, registry
from gcbench.core.compressor import Compressor, Segments
from gcbench.predict import costs, traffic
from gcbench.predict import links as pays
from gcbench.profile.breakeven import FLOAT, links_text
from gcbench.report import figures
from gcbench.report.analysis import Analysis, Ledger, Row, Table
from gcbench.training import grid, methods

KIND = "fft-breakeven"
STAGES = ("Tm", "Tf", "Tp", "Ts")
STAGE_NAMES = {
    "Tm": "conversion",
    "Tf": "transform",
    "Tp": "packing",
    "Ts": "selection",
}
COMPRESS = {"Tm": 2, "Tf": 1, "Tp": 1, "Ts": 1}
"""Passes of each stage in compression, equation (1)."""
DECOMPRESS = {"Tm": 2, "Tf": 1, "Tp": 1, "Ts": 0}
CLAIM = (30.0, 56.0)
"""The paper's claim: it takes a ratio of about 30 at 56 Gbit/s."""
WHOLE = "inside an exchange"
"""The estimate of S measured as a whole, not added up from stages."""
SLOWED = 2.0
"""If the stages take this multiple of the whole, their timing was disturbed."""
ROUNDS = 7
COLUMNS = 1000
"""Number of columns of the matrix that is the timed gradient."""
Gigabytes = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Settings(Choices):
    """The settings that decide the result."""

    theta: float = Field(default=0.85, description="Share of the bins to drop.")
    bits: int = Field(default=10, description="Bits per code.")
    mantissa: int = Field(default=5, description="Bits of its mantissa.")
    granularity: str = Field(
        default="model", description="model (as published), tensor, or a group size."
    )
    elements: int = Field(
        default=1_000_000, ge=10 * COLUMNS, le=100_000_000, description="Gradient size to time."
    )
    threads: int = Field(default=1, ge=1, description="Threads of the kernels.")
    throughput: list[Gigabytes] = Field(
        default=[],
        description=f"GB/s of the stages {', '.join(STAGES)}, all four; empty: timed here.",
    )
    links: list[Gigabytes] = Field(
        default=[1.0, 10.0, 25.0, 40.0, 56.0, 100.0, 400.0], description="Links in Gbit/s."
    )
    workers: int = Field(default=8, ge=2, le=100_000, description="GPUs in the table of methods.")
    compressor: list[str] = Field(
        default=[], description="Methods in that table, e.g. topk,qsgd; empty: all."
    )
    kernels: str = Field(
        default=pays.STORED,
        description="Encoding times: assumed (the packaged measurement), or a file of "
        "`gcbench bandwidth --json`.",
    )
    link_latency_us: float = Field(
        default=50.0, ge=0, allow_inf_nan=False, description="Latency of the link, microseconds."
    )

    @field_validator("throughput")
    @classmethod
    def _all_or_none(cls, values: list[float]) -> list[float]:
        if len(values) not in (0, len(STAGES)):
            raise ValueError(
                f"{len(values)} numbers; give all of {', '.join(STAGES)}, or none to time them"
            )
        return values


# ---- the equations -------------------------------------------------------------------------------


def compress_seconds(throughput: Mapping[str, float], passes: Mapping[str, int]) -> float:
    """Return equation (1) for M = 1 in seconds per byte; `passes`: number of passes by stage."""
    return sum(passes[stage] / throughput[stage] for stage in STAGES)


def least_ratio(link: float, seconds: float) -> float | None:
    """Return k_min of equation (4); None where no ratio pays.

    `link`: bytes per second; `seconds`: S, seconds per byte of compressing and decompressing.
    """
    return 1 / (1 - link * seconds) if link * seconds < 1 else None


def seconds_of(ratio: float, link: float) -> float:
    """Return the S (seconds per byte) at which `ratio` just pays on `link` (bytes per second)."""
    return (1 - 1 / ratio) / link


def fastest_link(ratio: float, seconds: float) -> float:
    """Return the fastest link (bytes per second) on which a ratio pays; `seconds` is S."""
    return (1 - 1 / ratio) / seconds


# ---- timings -------------------------------------------------------------------------------------


def _method(settings: Settings) -> Compressor:
    return registry.compressor(
        "fft",
        theta=settings.theta,
        code_bits=settings.bits,
        mantissa=settings.mantissa,
        granularity=grid.value(settings.granularity),
    )


def median(call: Callable[[], object]) -> float:
    """Return the median seconds of `ROUNDS` calls after one to warm up, with cold caches.

    As after a backward pass, the caches hold other data: kernels then take several times as long as
    in a tight loop.
    """
    crowd = torch.zeros(2**24)
    seconds = []
    for _ in range(ROUNDS + 1):
        crowd.add_(1)
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def stages(settings: Settings) -> dict[str, float]:
    """Time each stage on a normal gradient; return median seconds.

    Packing is gcbench's: bitmap, gathering and coding of the kept bins are one operation.
    """
    n = settings.elements // COLUMNS * COLUMNS
    segments = Segments.of([(n // COLUMNS, COLUMNS)], grid.value(settings.granularity))
    x = torch.randn(n, generator=torch.Generator().manual_seed(0))
    runs = ops.spectrum.runs_of(segments, settings.theta)
    bins, energy = ops.spectrum.forward(x, segments)
    largest = ops.spectrum.largest(energy, runs)
    form = settings.bits, settings.mantissa, 1
    calls = {
        "Tm": x.half,
        "Tf": lambda: ops.spectrum.forward(x, segments),
        "Tp": lambda: ops.spectrum.pack(bins, largest, runs, *form),
        "Ts": lambda: ops.spectrum.largest(energy, runs),
    }
    before = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        return {stage: median(call) for stage, call in calls.items()}
    finally:
        torch.set_num_threads(before)


# ---- the analysis --------------------------------------------------------------------------------


def run(settings: Settings, command: str, observer: progress.Observer, ledger: Ledger) -> Analysis:
    """Evaluate the equations for each estimate of S, and the fastest link of each method.

    Raises:
        UsageError: an unknown method or field, or timings that cannot be read.
    """
    method = _method(settings)
    n = settings.elements // COLUMNS * COLUMNS
    shapes = ((n // COLUMNS, COLUMNS),)
    nbytes = 4.0 * n
    chosen = methods.all_of(",".join(settings.compressor) or None)
    measurement = pays.measurement(settings.kernels)

    readings: dict[str, float] = {"the paper's claim": seconds_of(CLAIM[0], CLAIM[1] * 1e9 / 8)}
    if settings.throughput:
        speed = {stage: 1e9 * rate for stage, rate in zip(STAGES, settings.throughput, strict=True)}
    else:
        if "stages" not in ledger:
            observer.step(0, "timing stages")
            ledger["stages"] = stages(settings)
        observer.step(1)
        speed = {stage: nbytes / ledger["stages"][stage] for stage in STAGES}
    forth = compress_seconds(speed, COMPRESS)
    back = compress_seconds(speed, DECOMPRESS)
    readings["symmetric"] = 2 * forth
    readings["exact"] = forth + back
    if cost := measurement.of(method, n):
        readings[WHOLE] = (cost.encode + cost.each) / FLOAT

    ratio = nbytes / traffic.gradient_bytes(method, shapes)
    nominal = 32 / (method.claims.nominal_bits or 32)
    return Analysis.of(
        KIND,
        settings,
        command,
        conclusions=_conclusions(readings, ratio, forth, back, timed=not settings.throughput),
        tables=[
            _stage_table(settings, speed, forth, n),
            _reading_table(readings, ratio, nominal),
            _link_table(settings, readings, ratio),
            _method_table(settings, chosen, measurement),
            _together(settings, readings, ratio, method, measurement),
            Table(name="curve", title="", rows=_curve(readings)),
        ],
    )


def _stage_table(settings: Settings, speed: Mapping[str, float], forth: float, n: int) -> Table:
    rows: list[Row] = [
        {
            "stage": f"{stage}, {STAGE_NAMES[stage]}",
            "bytes_per_second": speed[stage],
            "compress": COMPRESS[stage],
            "decompress": DECOMPRESS[stage],
            "seconds_per_byte": COMPRESS[stage] / speed[stage],
            "share": COMPRESS[stage] / speed[stage] / forth,
        }
        for stage in STAGES
    ]
    how = f"{n:,} elements, medians of {ROUNDS}, {_threads(settings)}"
    if settings.throughput:
        how = "given"
    columns: Columns = {
        "stage": "stage",
        "bytes_per_second": ("GB/s", 1e-9),
        "compress": "times in\ncompress",
        "decompress": "times in\ndecompress",
        "seconds_per_byte": ("compress\ns/GB", 1e9),
        "share": ("share\n%", 100.0),
    }
    return table("stages", f"Stages of equation (1), {how}", columns, rows)


def _threads(settings: Settings) -> str:
    return f"{settings.threads} thread{'s' * (settings.threads > 1)}"


def _reading_table(readings: Mapping[str, float], ratio: float, nominal: float) -> Table:
    rows: list[Row] = [
        {
            "reading": name,
            "seconds_per_byte": seconds,
            "fastest_bytes_per_second": 1 / seconds,
            "fastest_gbit": 8e-9 / seconds,
            "ratio": ratio,
            "own_gbit": 8e-9 * fastest_link(ratio, seconds),
        }
        for name, seconds in readings.items()
    ]
    columns: Columns = {
        "reading": "estimate of S",
        "seconds_per_byte": ("S\ns/GB", 1e9),
        "fastest_bytes_per_second": ("1/S\nGB/s", 1e-9),
        "fastest_gbit": "1/S\nGbit/s",
        "own_gbit": "at its own ratio\nGbit/s",
    }
    notes = [
        f"The method's ratio is {ratio:.4g} as packed, {nominal:.4g} without the bitmap. The paper "
        f"claims a k_min of about {CLAIM[0]:g} at {CLAIM[1]:g} Gbit/s. '{WHOLE}' uses encode and "
        "decode of `fft` as measured in exchanges, with one pass over a payload; the others add up "
        "the stages above."
    ]
    heading = "Break-even: no ratio pays on a link faster than 1/S"
    return table("readings", heading, columns, rows, notes=notes)


def _link_table(settings: Settings, readings: Mapping[str, float], ratio: float) -> Table:
    rows: list[Row] = []
    for name, seconds in readings.items():
        for gbit in settings.links:
            least = least_ratio(gbit * 1e9 / 8, seconds)
            pays = "never" if least is None else "yes" if ratio >= least else "no"
            sensitivity = None if least is None else least - 1
            row: Row = {"reading": name, "link_gbit": gbit, "least_ratio": least}
            rows.append({**row, "sensitivity": sensitivity, "pays": pays})
    columns: Columns = {
        "link_gbit": "link\nGbit/s",
        "least_ratio": "k_min",
        "sensitivity": "d ln k\n/ d ln S",
        "pays": f"k = {ratio:.3g}\npays",
    }
    return table("links", "The least ratio that pays", columns, rows, by="reading")


def _method_table(
    settings: Settings, chosen: Mapping[str, Compressor], measurement: costs.Measured
) -> Table:
    rows = pays.rows(measurement, chosen, settings.workers, settings.link_latency_us * 1e-6)
    return Table(
        name="methods",
        title=f"Links on which an exchange alone pays, {settings.workers} workers",
        shown=pays.SHOWN,
        which=2,
        notes=pays.notes(measurement, chosen, settings.link_latency_us, rows),
        rows=rows,
    )


def _together(
    settings: Settings,
    readings: Mapping[str, float],
    ratio: float,
    method: Compressor,
    measurement: costs.Measured,
) -> Table:
    """Return the links on which `method` stops paying, with the assumptions of each number.

    They are those of equation (4), by each estimate of S, and of exchanges among the measured and
    the requested number of workers.
    """
    alone = f"stages timed alone here, {_threads(settings)}"
    if settings.throughput:
        alone = "given throughputs"
    inside = measurement.source
    times = {
        "the paper's claim": f"implied by {CLAIM[0]:g} at {CLAIM[1]:g} Gbit/s (GPU)",
        "symmetric": f"{alone}; decompressing as compressing",
        "exact": f"{alone}; decompressing without selection",
        WHOLE: f"encode and decode {inside}; one payload decoded",
    }
    rows: list[Row] = [
        {
            "reading": f"equation (4), {name}",
            "links": links_text([(0.0, 8 * fastest_link(ratio, seconds))]),
            "workers": "not counted",
            "against": "fp32, sent once",
            "times": times[name],
        }
        for name, seconds in readings.items()
    ]
    counts = dict.fromkeys((int(measurement.analysis.settings["workers"]), settings.workers))
    latency = settings.link_latency_us * 1e-6
    for workers in counts:
        (exchange,) = pays.rows(measurement, {"fft": method}, workers, latency)
        for field, against in (("links", "fp32"), ("links_better", "fp32 and bf16")):
            rows.append(
                {
                    "reading": f"an exchange by {exchange['collective']}",
                    "links": exchange[field],
                    "workers": f"{workers:,}",
                    "against": f"ring all-reduce of {against}",
                    "times": f"encode and decode {inside}; one payload per worker decoded",
                }
            )
    columns = {"reading": "number", "links": "pays", "workers": "workers", "against": "against"}
    notes = [
        *(f"Times of {', '.join(names)}: {text}." for text, names in _by_times(rows).items()),
        "Equation (4) has no workers, collective or messages: a gradient crosses the link once, "
        "in fp32 or as a payload. In an exchange more workers mean more payloads to gather and "
        f"decode. Each message costs {settings.link_latency_us:g} us. bf16 halves the baseline.",
        "README and `gcbench predict --links` show the exchange among "
        f"{next(iter(counts)):,} workers. Nothing here assumes the lower bound of a device's "
        "memory, or overlap with a backward pass, as `gcbench predict` and `advise` do.",
    ]
    heading = "The links on which FFT pays, by assumption"
    return table("break_even", heading, columns, rows, notes=notes)


def _by_times(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return times -> the numbers in the table that assume them."""
    names: dict[str, list[str]] = {}
    for row in rows:
        group = names.setdefault(str(row["times"]), [])
        if row["reading"] not in group:
            group.append(str(row["reading"]))
    return names


def _curve(readings: Mapping[str, float]) -> list[Row]:
    """Return k_min over links for the picture."""
    rows: list[Row] = []
    for name, seconds in readings.items():
        top = 1 / seconds
        shares = [10 ** (-3 + k / 40) for k in range(120)]
        shares += [1 - 10 ** (-k / 10) for k in range(1, 31)]
        for share in sorted(share for share in shares if share < 1):
            least = least_ratio(share * top, seconds)
            rows.append({"reading": name, "link_gbit": 8e-9 * share * top, "least_ratio": least})
    return rows


def _conclusions(
    readings: Mapping[str, float], ratio: float, forth: float, back: float, *, timed: bool
) -> list[str]:
    claim = readings["the paper's claim"]
    sentences = [
        f"The claim, {CLAIM[0]:g} at {CLAIM[1]:g} Gbit/s, is S = {1e9 * claim:.4f} s/GB: no ratio "
        f"pays above {8e-9 / claim:.3g} Gbit/s. There 1 % of speed moves k_min by about "
        f"{CLAIM[0] - 1:.0f} %: compare 1/S.",
    ]
    if WHOLE in readings:
        whole = readings[WHOLE]
        sentences.append(
            f"The stages add up to {1e9 * (forth + back):.3g} s/GB; in an exchange the calls take "
            f"{1e9 * whole:.3g}, {whole / (forth + back):.2g} times as much. By equation (4) the "
            f"method then pays below {8e-9 * fastest_link(ratio, whole):.3g} Gbit/s; the table of "
            "methods adds its collective, messages and a bf16 baseline."
        )
        if timed and forth + back > SLOWED * whole:
            sentences.append(
                f"The stages took {(forth + back) / whole:.2g} times as long as the whole that "
                "contains them: the machine was busy, or threads waited for each other. "
                "'symmetric' and 'exact' are too low; time them on an idle machine, or with "
                "--threads 1."
            )
    return sentences


# ---- the picture ---------------------------------------------------------------------------------


def draw(analysis: Analysis, path: Path) -> None:
    """Draw k_min over the link, and the fastest link of each method."""
    curve, methods_rows = analysis.table("curve").rows, analysis.table("methods").rows
    ratio = float(analysis.table("readings").rows[0]["ratio"] or 1)
    names = list(dict.fromkeys(str(row["reading"]) for row in curve))
    styles = figures.styles(names)
    with figures.canvas(13, max(5.6, 2.4 + 0.33 * len(methods_rows))) as figure:
        left, right = figure.subplots(1, 2)
        for name in names:
            line = [row for row in curve if row["reading"] == name]
            style = {k: v for k, v in styles[name].items() if k != "marker"}
            left.plot(values(line, "link_gbit"), values(line, "least_ratio"), **style, label=name)
        left.axhline(ratio, color="0.4", linewidth=1)
        left.annotate(
            f"the method's own ratio, {ratio:.3g}",
            (0.02, ratio),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            xytext=(0, 4),
            fontsize="small",
        )
        left.set(
            xscale="log",
            yscale="log",
            ylim=(0.9, 200),
            xlim=(0.01, 400),
            xlabel="link, Gbit/s",
            ylabel="least ratio that pays, k_min",
            title="FFT sparsification, equation (4)",
        )
        for axis in (left.xaxis, left.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:g}")
        left.legend(fontsize="small", loc="upper left", title="estimate of S")
        pays.bars(right, methods_rows)
        settings = analysis.settings
        right.set(
            title=f"exchanges among {settings['workers']} workers",
            xlabel="pays below, Gbit/s",
        )
        how = "given" if settings["throughput"] else "measured"
        figure.suptitle(
            f"Where compression stops paying ({how} throughputs, "
            f"{settings['elements']:,} elements)",
            fontsize="medium",
        )
        figures.save(figure, path)


if __name__ == "__main__":
    main()
