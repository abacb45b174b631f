"""The measurements of `gcbench bandwidth` as rows, tables and sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gcbench import ops
from gcbench.report import analysis
from gcbench.report.analysis import Analysis, Row, Shown, Table
from gcbench.studies.bandwidth.settings import KIND, Settings, combinations, command, size_text
from gcbench.studies.bandwidth.transfers import PARTS, YARDSTICK, Item
from gcbench.studies.scale import codec

LINKS = (1, 10, 100)
"""Links that the conclusions name, in Gbit/s."""
CHANCE = 0.01
"""Significance level of the sign test."""
LEAST = math.ceil(-math.log2(CHANCE))
"""The least number of iterations with which the sign test can be significant."""
SURE = 0.95
"""Confidence of the intervals."""
WIDE = 0.25
"""A warning is given if half of the interquartile range is above this share of the median."""
OUTLYING = 10.0
"""A time is an outlier if it is so many robust standard deviations from the median (as hyperfine,
roughly)."""

# ---- statistics ----------------------------------------------------------------------------------


def percentile(values: Sequence[float], share: float) -> float:
    """Return the quantile `share` of the values, with linear interpolation."""
    return float(np.quantile(values, share))


def luck(own: Sequence[float], plain: Sequence[float]) -> float:
    """Return the p-value of the one-sided sign test of `own` < `plain`; a tie counts against it."""
    n = len(own)
    wins = sum(a < b for a, b in zip(own, plain, strict=True))
    return float(sum(math.comb(n, k) for k in range(wins, n + 1)) / 2**n)


def interval(own: Sequence[float], plain: Sequence[float]) -> tuple[float, float, float]:
    """Return an interval of the median of plain / own over pairs: limits and confidence.

    The limits are two of the sorted ratios, by the binomial distribution, with a confidence of at
    least `SURE`; with few pairs they are the least and the largest ratio, and the confidence may be
    lower.
    """
    ratios = sorted(b / a for a, b in zip(own, plain, strict=True))
    n, place = len(ratios), 0
    outside = 1 / 2**n
    while 2 * (outside + math.comb(n, place + 1) / 2**n) <= 1 - SURE:
        place += 1
        outside += math.comb(n, place) / 2**n
    return ratios[place], ratios[n - 1 - place], max(0.0, 1 - 2 * outside)


def noise(seconds: Sequence[float]) -> list[str]:
    """Return warnings about repeated times: a wide spread, outliers; none with few times.

    An outlier is more than `OUTLYING` robust standard deviations (1.4826 times the median absolute
    deviation) from the median.
    """
    if len(seconds) < LEAST:
        return []
    low, middle, high = (percentile(seconds, share) for share in (0.25, 0.5, 0.75))
    said = []
    if (spread := (high - low) / 2 / middle) > WIDE:
        said.append(f"spread {spread:.0%}")
    scale = 1.4826 * percentile([abs(value - middle) for value in seconds], 0.5)
    if outliers := sum(abs(value - middle) > OUTLYING * scale for value in seconds):
        said.append(f"{outliers} outlier{'s' * (outliers > 1)} of {len(seconds)}")
    return said


def pays_from(sizes: Sequence[int], pays: Mapping[int, bool]) -> int | None:
    """Return the smallest size such that the exchange pays at it and at all larger sizes."""
    found = None
    for size in sorted(sizes, reverse=True):
        if not pays.get(size, False):
            break
        found = size
    return found


# ---- tables --------------------------------------------------------------------------------------

Records = Mapping[tuple[int, Item], Mapping[str, Any]]

TRANSFERS = [
    Shown(field="method", heading="method"),
    Shown(field="collective", heading="collective"),
    Shown(field="p50", heading="time\nµs", scale=1e6),
    Shown(field="p95", heading="p95\nµs", scale=1e6),
    Shown(field="p99", heading="p99\nµs", scale=1e6),
    Shown(field="algbw", heading="algbw\nGB/s", scale=1e-9),
    Shown(field="busbw", heading="busbw\nGB/s", scale=1e-9),
    Shown(field="wrong", heading="#wrong"),
    Shown(field="checked", heading="checked by"),
    Shown(field="speed", heading="speed\nvs plain"),
]
NOISY = ("speed_low", "speed_high", "luck", "noise", "warnings")
"""Fields of a row of an exchange that are about its uncertainty."""
PHASES_SHOWN = [
    Shown(field="method", heading="method"),
    Shown(field="collective", heading="collective"),
    Shown(field="statistic", heading="statistic\nµs", scale=1e6),
    Shown(field="encode", heading="encode\nµs", scale=1e6),
    Shown(field="communicate", heading="communicate\nµs", scale=1e6),
    Shown(field="decode", heading="decode\nµs", scale=1e6),
    Shown(field="messages", heading="messages"),
    Shown(field="wire_bytes", heading="wire\nkB", scale=1e-3),
    Shown(field="links", heading="~ pays\nover fp32"),
    Shown(field="links_better", heading="~ and\nover bf16"),
]
CROSSOVERS = [
    Shown(field="method", heading="method"),
    Shown(field="collective", heading="collective"),
    Shown(field="ratio_up", heading="ratio\nup"),
    Shown(field="ratio_wire", heading="ratio\nwire"),
    Shown(field="speed", heading="speed,\nlargest"),
    Shown(field="speed_low", heading="from"),
    Shown(field="speed_high", heading="to"),
    Shown(field="luck", heading="p by\nchance"),
    Shown(field="best_speed", heading="speed,\nbest"),
    Shown(field="best_size", heading="at\nsize"),
    Shown(field="pays_from", heading="pays\nfrom"),
    Shown(field="links", heading="~ pays\nover fp32"),
    Shown(field="links_better", heading="~ and\nover bf16"),
    Shown(field="warnings", heading="noise"),
]


def summarize(settings: Settings, records: Records) -> Analysis:
    """Return the analysis of the records, by size and item, which `worker.measure` has made."""
    rows = [_row(size, item, record) for (size, item), record in records.items()]
    done = [key for key, record in records.items() if "phases" in record]
    copies = {
        size: percentile(record["seconds"], 0.5) / (size / codec.FLOAT)
        for (size, item), record in records.items()
        if item.method == "memcpy" and "seconds" in record
    }
    phases = [
        _phases(settings, size, item, records[size, item], copies[size]) for size, item in done
    ]
    pairs = dict.fromkeys(item for _, item in records if item.kind == "exchange")
    crossings = [_crossing(settings, item, rows, phases) for item in pairs]
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
            title="Where the time of an exchange goes",
            shown=PHASES_SHOWN,
            which=2,
            by="message",
            notes=_predicted(settings),
            rows=phases,
        ),
        Table(
            name="crossovers",
            title=f"Against {settings.library}'s {YARDSTICK} of the same float32 gradient",
            shown=CROSSOVERS,
            which=2,
            notes=[
                "speed is the median time of the plain all-reduce divided by that of the exchange, "
                "whose iterations took turns; from and to are the limits of a "
                f"{_sure(settings.iterations):.0%} interval for the median of the pairs' ratios, "
                "at the largest size. ratio up is the size of the float32 gradient divided by that "
                "of the payload, ratio wire the bytes on the wire of the plain all-reduce divided "
                "by the exchange's, both at the largest size, as is what ~ predicts.",
                "pays from: the smallest size from which the exchange is faster at this and every "
                "larger size, in its median and in so many of the pairs that chance alone would do "
                f"it with a probability below {CHANCE:.0%} (sign test, from {LEAST} pairs on).",
                "noise counts warnings, which are spelled out below: a quartile deviation above "
                f"{WIDE:.0%} of the median, or times more than {OUTLYING:g} robust standard "
                "deviations from the median.",
            ],
            rows=crossings,
        ),
        Table(name="iterations", title="Seconds of every iteration", rows=_iterations(records)),
    ]
    return Analysis(
        kind=KIND,
        settings=settings.model_dump(mode="json"),
        command=command(settings),
        provenance={**analysis.provenance(), "kernels": _kernels(settings)},
        conclusions=_conclusions(settings, rows, crossings),
        tables=tables,
        failed=any(row["failed"] or row["wrong"] for row in rows),
    )


def _place(size: int, item: Item) -> Row:
    message = f"{size_text(size)} ({size:,} bytes, {size // 4:,} floats)"
    return {"size": size, "message": message, **item._asdict()}


def _row(size: int, item: Item, record: Mapping[str, Any]) -> Row:
    """Return the row of one item at one size; one that failed has no times."""
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
        row["speed"] = percentile(record["plain"], 0.5) / middle
        row["luck"] = luck(seconds, record["plain"])
        row["speed_low"], row["speed_high"], _ = interval(seconds, record["plain"])
        row["pays"] = None
        if len(seconds) >= LEAST:
            row["pays"] = bool(row["luck"] < CHANCE and row["speed"] > 1 and not row["wrong"])
        told = noise(seconds)
        told += [f"plain: {said}" for said in noise(record["plain"])]
        if len(seconds) >= LEAST and row["luck"] < CHANCE and row["speed"] <= 1:
            told.append("its median is slower, yet it wins most pairs")
        row["noise"], row["warnings"] = "; ".join(told) or None, len(told) or None
    return row


def _phases(
    settings: Settings, size: int, item: Item, record: Mapping[str, Any], copy: float
) -> Row:
    """Return the row of an exchange's phases, its bytes, and the links on which it would pay.

    `copy`: seconds that a copy took for each float32.
    """
    row = _place(size, item)
    medians = {name: percentile(record["phases"][name], 0.5) for name in PARTS}
    row.update(medians)
    work = sum(seconds for name, seconds in medians.items() if name != "communicate")
    row["payload_bytes_up"] = record["payload_up"]
    row["payload_bytes_down"] = record["payload_down"]
    row["wire_bytes"], row["messages"] = record["wire"], record["rounds"]
    row["plain_wire_bytes"] = record["plain_wire"]
    own = codec.Cost(work, record["wire"], record["rounds"])
    latency = settings.link_latency_us * 1e-6
    return row | codec.pays_fields(own, float(size), settings.workers, copy, latency)


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

    def own(table: Sequence[Row]) -> dict[int, dict[str, Any]]:
        wanted = item._asdict().items()
        return {int(row["size"] or 0): row for row in table if wanted <= row.items()}

    found, largest = own(rows), settings.sizes[-1]
    made: Row = {"method": item.method, "collective": item.collective}
    made["failed"] = next((row["failed"] for row in found.values() if row["failed"]), None)
    measured = {size: row for size, row in found.items() if not row["failed"]}
    if largest not in measured:
        return {**made, "pays_from": "failed"}
    last = own(phases)[largest]
    best = max(measured, key=lambda size: measured[size]["speed"])
    made["ratio_up"] = largest / last["payload_bytes_up"] if last["payload_bytes_up"] else None
    made["ratio_wire"] = (
        last["plain_wire_bytes"] / last["wire_bytes"] if last["wire_bytes"] else None
    )
    made["speed"], made["best_speed"] = measured[largest]["speed"], measured[best]["speed"]
    made["best_size"] = size_text(best)
    made |= {name: measured[largest][name] for name in NOISY}
    made["pays_from_bytes"] = pays_from(
        settings.sizes, {size: bool(row["pays"]) for size, row in measured.items()}
    )
    made["wrong"] = sum(row["wrong"] for row in measured.values())
    if made["wrong"]:
        made["pays_from"] = "wrong"
    elif settings.iterations < LEAST:
        made["pays_from"] = "no verdict"
    elif made["pays_from_bytes"] is None:
        made["pays_from"] = f"never up to {size_text(largest)}"
    else:
        made["pays_from"] = size_text(int(made["pays_from_bytes"]))
    fields = ("pays_on_from", "pays_on_to", "links")
    return made | {
        f"{name}{end}": last[f"{name}{end}"] for name in fields for end in ("", "_better")
    }


def _sure(n: int) -> float:
    """Return the confidence of the intervals of n pairs."""
    return interval([1.0] * n, [1.0] * n)[2]


def _notes(settings: Settings) -> list[str]:
    turns = settings.iterations
    notes = [
        f"{settings.workers} workers ({settings.engine}, {settings.library}), "
        f"{settings.threads} thread(s) each, n = {turns} iterations after {settings.warmup} that "
        "are not counted. time is the median of the time from a barrier until the slowest worker "
        "is done. algbw is the size divided by the time, busbw the bytes that leave a worker "
        "divided by the time. memcpy copies on all workers at once; loopback is a single TCP "
        "connection through 127.0.0.1.",
        "#wrong counts wrong elements on all workers. Checked by exact: they differ from the exact "
        "sum, or copy, of small integers. Checked by bits: their bits differ from the simulation's "
        "in the first steps, or from worker 0's after the last.",
    ]
    refused = [f"{word} by {name}" for word, name, legal in combinations(settings) if not legal]
    if refused:
        notes.append(f"Not measured, their mean would be wrong: {', '.join(refused)}.")
    return notes


def _predicted(settings: Settings) -> list[str]:
    return [
        "The phases are medians of the slowest worker; communicate includes its wait for the "
        "others. messages counts those that are sent one after the other, wire the bytes that "
        "leave a worker.",
        f"~ marks a prediction for other links, of B bit/s and {settings.link_latency_us:g} µs a "
        "message. The exchange then takes statistic, encode and decode as measured here, the "
        "latency of its messages, and 8 wire / B. The plain all-reduce of fp32 takes "
        f"{2 * (settings.workers - 1)} messages and 8 wire / B, its additions cost nothing; that "
        "of bf16 has half the bytes, and two casts at the speed of memcpy. Nothing overlaps with "
        "a backward pass: for a model on a cluster, see `gcbench advise`.",
    ]


def _gigabytes(row: Row, field: str) -> str:
    return f"{float(row[field] or 0) * 1e-9:.3g} GB/s"


def _conclusions(
    settings: Settings, rows: Sequence[Row], crossings: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Return the conclusions, as sentences."""
    largest = size_text(settings.sizes[-1])
    at = {
        (row["method"], row["collective"]): row for row in rows if row["size"] == settings.sizes[-1]
    }
    plain = at[settings.library, YARDSTICK]
    said = [
        f"At {largest} and {settings.workers} workers the plain all-reduce of "
        f"{settings.library} has a busbw of {_gigabytes(plain, 'busbw')}, "
        f"a copy {_gigabytes(at['memcpy', '-'], 'algbw')}, a TCP connection through loopback "
        f"{_gigabytes(at['loopback', '-'], 'algbw')}."
    ]
    done = [row for row in crossings if row.get("wrong") == 0]
    if done:
        said += _measured(settings, largest, done)
        for suffix, than in (("", "fp32"), ("_better", "the better of fp32 and bf16")):
            counts = [
                f"{sum(codec.covers(row, 1e9 * link, suffix) for row in done)} at {link} Gbit/s"
                for link in LINKS
            ]
            said.append(
                f"Predicted at {largest}, faster than an all-reduce of {than}, of {len(done)} "
                f"exchanges: {', '.join(counts)}."
            )
    noisy = [row for row in done if row["noise"]]
    if noisy:
        told = "; ".join(f"{row['method']}: {row['noise']}" for row in noisy)
        said.append(
            f"Noise at {largest} in {len(noisy)} of {len(done)} exchanges ({told}): close other "
            "programs, and take more iterations (-n)."
        )
    bad = [row for row in rows if row["failed"] or row["wrong"]]
    if bad:
        names = dict.fromkeys(
            f"{row['method']} by {row['collective']} ({row['failed'] or 'wrong'})" for row in bad
        )
        said.append(f"{len(bad)} of {len(rows)} results are WRONG or failed: {', '.join(names)}.")
    else:
        said.append(f"All {len(rows)} results were checked, and none is wrong.")
    return said


def _measured(settings: Settings, largest: str, done: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return sentences on which exchanges were faster here, or why nothing can be said."""
    paying = [row for row in done if row["pays_from_bytes"] is not None]
    best = max(paying or done, key=lambda row: row["speed"])
    speed = (
        f"{best['speed']:.3g} times as fast as the plain all-reduce "
        f"[{best['speed_low']:.3g}, {best['speed_high']:.3g}]"
    )
    name = f"{best['method']} by {best['collective']}"
    n = settings.iterations
    if n < LEAST:
        return [
            f"No verdict: nothing follows from n = {n}; the sign test needs {LEAST} iterations (-n "
            f"{LEAST}) to show at {CHANCE:.0%} that anything is faster. The largest median at "
            f"{largest} is that of {name}, {speed}."
        ]
    if paying:
        return [
            f"Measured here: {len(paying)} of {len(done)} exchanges pay at {largest}; the fastest "
            f"of them is {name}, {speed}."
        ]
    told = f"Measured here: none of {len(done)} exchanges is shown to pay at {largest}."
    if best["speed"] > 1:
        told += (
            f" The median of {name} is {speed}, but chance alone wins as many of {n} pairs with a "
            f"probability of {best['luck']:.2g}."
        )
    else:
        told += f" The nearest is {name}, {speed}."
    return [told]


def _kernels(settings: Settings) -> str:
    """Return the backend that the methods' operations use."""
    return ops.choose(settings.backend, settings.device.partition(":")[0])
