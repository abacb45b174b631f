"""The measurements of `gcbench bandwidth` as rows, tables and sentences."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gcbench import ops
from gcbench.profile.bandwidth.settings import KIND, Settings, combinations, command, size_text
from gcbench.profile.bandwidth.transfers import PARTS, YARDSTICK, Item
from gcbench.profile.breakeven import FLOAT, Cost, covers, pays_fields
from gcbench.report import rendering
from gcbench.report.analysis import Analysis, Row, Table, shown

LINKS = (1, 10, 100)
"""Links in the answer, in Gbit/s."""
LEVEL = 0.01
"""Significance level of the sign test."""
LEAST = math.ceil(-math.log2(LEVEL))
"""Least number of iterations with which the sign test can be significant."""
CONFIDENCE = 0.95
"""Confidence of the intervals."""
WIDE = 0.25
"""Warn if half of the interquartile range exceeds this share of the median."""
OUTLYING = 10.0
"""A time is an outlier if it is this many robust standard deviations from the median."""
BRIEF = 8
"""Number of exchanges in the short table."""

# ---- statistics ----------------------------------------------------------------------------------


def percentile(values: Sequence[float], share: float) -> float:
    """Return the quantile `share` of the values, with linear interpolation."""
    return float(np.quantile(values, share))


def p_value(times: Sequence[float], plain: Sequence[float]) -> float:
    """Return the p-value of the one-sided sign test of `times` < `plain`; ties count against it."""
    n = len(times)
    wins = sum(a < b for a, b in zip(times, plain, strict=True))
    return float(sum(math.comb(n, k) for k in range(wins, n + 1)) / 2**n)


def interval(times: Sequence[float], plain: Sequence[float]) -> tuple[float, float, float, float]:
    """Return the median of plain / times over pairs with an interval: its limits and confidence.

    The limits are two of the sorted ratios, by the binomial distribution, with a confidence of at
    least `CONFIDENCE`. With few pairs they are the smallest and the largest ratio, and the
    confidence may be lower.
    """
    ratios = sorted(b / a for a, b in zip(times, plain, strict=True))
    n, position = len(ratios), 0
    outside = 1 / 2**n
    while 2 * (outside + math.comb(n, position + 1) / 2**n) <= 1 - CONFIDENCE:
        position += 1
        outside += math.comb(n, position) / 2**n
    low, high = ratios[position], ratios[n - 1 - position]
    return percentile(ratios, 0.5), low, high, max(0.0, 1 - 2 * outside)


def noise(seconds: Sequence[float]) -> list[str]:
    """Return warnings about repeated times: a wide spread, outliers; none with few times.

    An outlier is more than `OUTLYING` robust standard deviations (1.4826 times the median absolute
    deviation) from the median.
    """
    if len(seconds) < LEAST:
        return []
    low, middle, high = (percentile(seconds, share) for share in (0.25, 0.5, 0.75))
    warnings = []
    if (spread := (high - low) / 2 / middle) > WIDE:
        warnings.append(f"spread {spread:.0%}")
    scale = 1.4826 * percentile([abs(value - middle) for value in seconds], 0.5)
    if outliers := sum(abs(value - middle) > OUTLYING * scale for value in seconds):
        warnings.append(f"{outliers} outlier{'s' * (outliers > 1)} of {len(seconds)}")
    return warnings


def pays_from(sizes: Sequence[int], pays: Mapping[int, bool]) -> int | None:
    """Return the smallest size such that the exchange pays at it and at all larger sizes."""
    paying = itertools.takewhile(pays.get, sorted(sizes, reverse=True))
    return min(paying, default=None)


# ---- tables --------------------------------------------------------------------------------------

Records = Mapping[tuple[int, Item], Mapping[str, Any]]

TRANSFERS = shown(
    {
        "method": "method",
        "collective": "collective",
        "p50": ("time\nµs", 1e6),
        "p95": ("p95\nµs", 1e6),
        "p99": ("p99\nµs", 1e6),
        "algbw": ("algbw\nGB/s", 1e-9),
        "busbw": ("busbw\nGB/s", 1e-9),
        "wrong": "#wrong",
        "checked": "checked by",
        "speed": "speed\nvs plain",
    }
)
NOISY = ("speed_low", "speed_high", "luck", "noise", "warnings")
"""Fields of an exchange's row about its uncertainty."""
PHASES_SHOWN = shown(
    {
        "method": "method",
        "collective": "collective",
        **{part: (f"{part}\nµs", 1e6) for part in PARTS},
        "messages": "messages",
        "wire_bytes": ("wire\nkB", 1e-3),
        "links": "~ pays\nover fp32",
        "links_better": "~ and\nover bf16",
    }
)
CROSSOVERS = shown(
    {
        "method": "method",
        "collective": "collective",
        "ratio_up": "ratio\nup",
        "ratio_wire": "ratio\nwire",
        "speed": "speed,\nlargest",
        "speed_low": "from",
        "speed_high": "to",
        "luck": "p",
        "best_speed": "speed,\nbest",
        "best_size": "at\nsize",
        "pays_from": "pays\nfrom",
        "links": "~ pays\nover fp32",
        "links_better": "~ and\nover bf16",
        "warnings": "noise",
    }
)
_BRIEF = ("method", "collective", "speed", "speed_low", "speed_high", "pays_from", "links_better")


def summarize(settings: Settings, records: Records) -> Analysis:
    """Return the analysis of the records that `worker.measure` made, by size and item."""
    rows = [_row(size, item, record) for (size, item), record in records.items()]
    copies = {
        size: percentile(record["seconds"], 0.5) / (size / FLOAT)
        for (size, item), record in records.items()
        if item.method == "memcpy" and "seconds" in record
    }
    phases = [
        _phases(settings, size, item, record, copies[size])
        for (size, item), record in records.items()
        if "phases" in record
    ]
    exchanges = dict.fromkeys(item for _, item in records if item.kind == "exchange")
    crossings = [_crossing(settings, item, rows, phases) for item in exchanges]
    *_, confidence = interval([1.0] * settings.iterations, [1.0] * settings.iterations)
    backend = ops.choose(settings.backend, settings.device.partition(":")[0])
    title = f"Against {settings.library}'s {YARDSTICK} of the same float32 gradient"
    fastest = sorted(crossings, key=lambda row: -float(row.get("speed") or 0))[:BRIEF]
    tables = [
        Table(
            name="transfers",
            title="Time, bandwidth and check of one call",
            shown=TRANSFERS,
            which=2,
            by="message",
            notes=_notes(settings),
            rows=rows,
        ),
        Table(
            name="phases",
            title="Time by phase of an exchange",
            shown=PHASES_SHOWN,
            which=2,
            by="message",
            notes=_phase_notes(settings),
            rows=phases,
        ),
        Table(
            name="crossovers",
            title=title,
            shown=CROSSOVERS,
            which=2,
            notes=[
                "speed: time of the plain all-reduce divided by that of the exchange, the median "
                "over pairs of alternating iterations, at the largest size; from, to: limits of "
                f"its {confidence:.0%} interval. ratio up, ratio wire: bytes of fp32 divided by "
                "those of the payload, and on the wire.",
                "pays from: the smallest size from which the exchange is faster at this and every "
                f"larger size by a sign test at {LEVEL:.0%} (at least {LEAST} pairs).",
                f"noise: number of warnings; a quartile deviation above {WIDE:.0%} of the median, "
                f"or times over {OUTLYING:g} robust standard deviations from it.",
            ],
            rows=crossings,
        ),
        Table(name="iterations", title="Seconds of every iteration", rows=_iterations(records)),
        Table(
            name="brief",
            brief=True,
            title=title,
            shown=[column for column in CROSSOVERS if column.field in _BRIEF],
            which=2,
            notes=["~ predicted for other links, where an exchange alone pays over fp32 and bf16."],
            rows=fastest,
        ),
    ]
    result = Analysis.of(
        KIND,
        settings,
        command(settings),
        answer=_answers(settings, rows, crossings),
        conclusions=_conclusions(settings, rows, crossings),
        tables=tables,
        failed=any(row["failed"] or row["wrong"] for row in rows),
    )
    result.provenance["kernels"] = backend
    return result


def _place(size: int, item: Item) -> Row:
    message = f"{size_text(size)} ({size:,} bytes, {size // 4:,} floats)"
    return {"size": size, "message": message, **item._asdict()}


def _row(size: int, item: Item, record: Mapping[str, Any]) -> Row:
    """Return the row of one item at one size; a failed one has no times."""
    row = {**_place(size, item), "count": record["bytes"] // 4}
    row["failed"], row["wrong"] = record.get("failed"), record.get("wrong")
    row["checked"] = record.get("checked", "failed")
    if row["failed"]:
        return row
    seconds: list[float] = record["seconds"]
    row["n"] = len(seconds)
    row["mean"], row["min"] = sum(seconds) / len(seconds), min(seconds)
    for percent in (50, 95, 99):
        row[f"p{percent}"] = percentile(seconds, percent / 100)
    middle = percentile(seconds, 0.5)
    row["algbw"], row["busbw"] = record["bytes"] / middle, record["wire"] / middle
    if "plain" in record:
        row["plain_p50"] = percentile(record["plain"], 0.5)
        row["luck"] = p_value(seconds, record["plain"])
        row["speed"], row["speed_low"], row["speed_high"], _ = interval(seconds, record["plain"])
        row["pays"] = None
        if len(seconds) >= LEAST:
            row["pays"] = bool(row["luck"] < LEVEL and not row["wrong"])
        warnings = noise(seconds)
        warnings += [f"plain: {text}" for text in noise(record["plain"])]
        row["noise"], row["warnings"] = "; ".join(warnings) or None, len(warnings) or None
    return row


def _phases(
    settings: Settings, size: int, item: Item, record: Mapping[str, Any], copy: float
) -> Row:
    """Return the row of an exchange's phases, its bytes, and the links on which it would pay.

    `copy`: seconds of a copy per float32.
    """
    row = _place(size, item)
    medians = {name: percentile(record["phases"][name], 0.5) for name in PARTS}
    row.update(medians)
    work = sum(seconds for name, seconds in medians.items() if name != "communicate")
    row["payload_bytes_up"] = record["payload_up"]
    row["payload_bytes_down"] = record["payload_down"]
    row["wire_bytes"], row["messages"] = record["wire"], record["rounds"]
    row["plain_wire_bytes"] = record["plain_wire"]
    cost = Cost(work, record["wire"], record["rounds"])
    latency = settings.link_latency_us * 1e-6
    return row | pays_fields(cost, float(size), settings.workers, copy, latency)


def _iterations(records: Records) -> list[Row]:
    rows: list[Row] = []
    for (size, item), record in records.items():
        columns = {"seconds": record.get("seconds", []), **record.get("phases", {})}
        if "plain" in record:
            columns["plain"] = record["plain"]
        place: Row = {"size": size, **item._asdict()}
        for number in range(len(columns["seconds"])):
            values = {name: column[number] for name, column in columns.items()}
            rows.append({**place, "iteration": number, **values})
    return rows


def _crossing(settings: Settings, item: Item, rows: Sequence[Row], phases: Sequence[Row]) -> Row:
    """Return the row of one exchange over all sizes."""

    def rows_of(table: Sequence[Row]) -> dict[int, dict[str, Any]]:
        wanted = item._asdict().items()
        return {int(row["size"] or 0): row for row in table if wanted <= row.items()}

    by_size, largest = rows_of(rows), settings.sizes[-1]
    row: Row = {"method": item.method, "collective": item.collective}
    row["failed"] = next((row["failed"] for row in by_size.values() if row["failed"]), None)
    measured = {size: row for size, row in by_size.items() if not row["failed"]}
    if largest not in measured:
        return {**row, "pays_from": "failed"}
    last = rows_of(phases)[largest]
    best = max(measured, key=lambda size: measured[size]["speed"])
    row["ratio_up"] = largest / last["payload_bytes_up"] if last["payload_bytes_up"] else None
    row["ratio_wire"] = (
        last["plain_wire_bytes"] / last["wire_bytes"] if last["wire_bytes"] else None
    )
    row["speed"], row["best_speed"] = measured[largest]["speed"], measured[best]["speed"]
    row["best_size"] = size_text(best)
    row |= {name: measured[largest][name] for name in NOISY}
    row["pays_from_bytes"] = pays_from(
        settings.sizes, {size: bool(row["pays"]) for size, row in measured.items()}
    )
    row["wrong"] = sum(row["wrong"] for row in measured.values())
    if row["wrong"]:
        row["pays_from"] = "wrong"
    elif settings.iterations < LEAST:
        row["pays_from"] = "no verdict"
    elif row["pays_from_bytes"] is None:
        row["pays_from"] = f"never up to {size_text(largest)}"
    else:
        row["pays_from"] = size_text(int(row["pays_from_bytes"]))
    fields = ("pays_on_from", "pays_on_to", "links")
    return row | {
        f"{name}{end}": last[f"{name}{end}"] for name in fields for end in ("", "_better")
    }


def _notes(settings: Settings) -> list[str]:
    notes = [
        f"{settings.workers} workers ({settings.engine}, {settings.library}), "
        f"{rendering.counted(settings.threads, 'thread')} each, n = {settings.iterations} after "
        f"{settings.warmup} to warm up. time: median from a barrier until the slowest worker is "
        "done. algbw: size / time; busbw: bytes that leave a worker / time. memcpy copies on all "
        "workers at once; loopback is one TCP connection through 127.0.0.1.",
        "#wrong: wrong elements on all workers. exact: compared with the exact sum, or copy, of "
        "small integers. bits: the first steps compared with the simulation, the last with worker "
        "0.",
    ]
    refused = [f"{spec} by {name}" for spec, name, legal in combinations(settings) if not legal]
    if refused:
        notes.append(f"Not measured, because their mean would be wrong: {', '.join(refused)}.")
    return notes


def _phase_notes(settings: Settings) -> list[str]:
    return [
        "Phases: medians of the slowest worker; communicate includes waiting for the others. "
        "messages: number sent one after another; wire: bytes that leave a worker.",
        f"~ predicted for links of B bit/s with {settings.link_latency_us:g} µs per message: "
        "statistic, encode and decode as measured here, plus messages and 8 wire / B, against "
        f"all-reduces of {2 * (settings.workers - 1)} messages (bf16: half the bytes, two casts at "
        "the speed of memcpy). No overlap with a backward pass: for a training step use "
        "`gcbench advise`.",
    ]


def _answers(
    settings: Settings, rows: Sequence[Row], crossings: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Return whether compression pays here, and whether all results are correct, as sentences."""
    done = [row for row in crossings if row.get("wrong") == 0]
    sentences = [_verdict(settings, done)] if done else []
    if bad := [row for row in rows if row["failed"] or row["wrong"]]:
        names = dict.fromkeys(
            f"{row['method']} by {row['collective']} ({row['failed'] or 'wrong'})" for row in bad
        )
        sentences.append(f"{len(bad)} of {len(rows)} results are WRONG: {', '.join(names)}.")
    else:
        sentences.append(f"All {len(rows)} results are correct.")
    return sentences


def _verdict(settings: Settings, done: Sequence[Mapping[str, Any]]) -> str:
    """Return which exchanges were faster here, or why nothing can be concluded."""
    largest, n = size_text(settings.sizes[-1]), settings.iterations
    paying = [row for row in done if row["pays_from_bytes"] is not None]
    best = max(paying or done, key=lambda row: row["speed"])
    speed = (
        f"{best['method']} by {best['collective']}, {best['speed']:.3g}x the speed of all-reduce "
        f"[{best['speed_low']:.3g}, {best['speed_high']:.3g}]"
    )
    if n < LEAST:
        return (
            f"No verdict from n = {n}: the sign test needs {LEAST} iterations (-n {LEAST}). "
            f"Largest median at {largest}: {speed}."
        )
    if paying:
        return f"{len(paying)} of {len(done)} exchanges pay here at {largest}; fastest: {speed}."
    text = f"None of {len(done)} exchanges is shown to pay here at {largest}. Nearest: {speed}"
    if best["speed"] > 1:
        text += f", which chance alone reaches with p = {best['luck']:.2g} in {n} pairs"
    return f"{text}."


def _conclusions(
    settings: Settings, rows: Sequence[Row], crossings: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Return sentences on bandwidths, other links and noise."""
    largest = size_text(settings.sizes[-1])
    at = {
        (row["method"], row["collective"]): row for row in rows if row["size"] == settings.sizes[-1]
    }

    def rate(key: tuple[str, str], field: str) -> str:
        return f"{float(at[key][field] or 0) * 1e-9:.3g} GB/s"

    sentences = [
        f"At {largest} and {settings.workers} workers: busbw of {settings.library}'s all-reduce "
        f"{rate((settings.library, YARDSTICK), 'busbw')}, a copy {rate(('memcpy', '-'), 'algbw')}, "
        f"TCP through loopback {rate(('loopback', '-'), 'algbw')}."
    ]
    done = [row for row in crossings if row.get("wrong") == 0]
    for suffix, than in (("", "fp32"), ("_better", "fp32 and bf16")):
        counts = [
            f"{sum(covers(row, 1e9 * link, suffix) for row in done)} at {link} Gbit/s"
            for link in LINKS
        ]
        if done:
            sentences.append(
                f"Predicted at {largest}: of {len(done)} exchanges, faster than all-reduce of "
                f"{than}: {', '.join(counts)}."
            )
    if noisy := [row for row in done if row["noise"]]:
        warnings = "; ".join(f"{row['method']}: {row['noise']}" for row in noisy)
        sentences.append(
            f"Noise at {largest} in {len(noisy)} of {len(done)} exchanges ({warnings}): close "
            "other programs and take more iterations (-n)."
        )
    return sentences
