"""Rows of a comparison as a terminal table, Markdown, CSV, JSON or LaTeX."""

from __future__ import annotations

import math
import shutil
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gcbench.core.errors import UsageError, unknown
from gcbench.core.values import canonical, text
from gcbench.report import compare, glossary
from gcbench.report.compare import ComparisonRow
from gcbench.report.rendering import (
    MB,
    Column,
    csv_text,
    ends,
    json_text,
    latex,
    latex_text,
    markdown,
    number,
    terminal,
)
from gcbench.stats import intervals

FORMATS = ("table", "markdown", "csv", "json", "latex")
FRONT = (
    "front: no row of equal budget is better for as few payload bytes, by the paired 95 % "
    "interval, or by its value where there is one seed."
)
"""What the front is, in the notes of tables and in the report."""
PAYLOAD = "payload\nMB/step"
METRICS = ("accuracy %", "test loss", "accuracy %\nor loss")
ALWAYS = (*METRICS, "vs none", PAYLOAD)
"""Columns that are shown even where all rows are equal: they are what a table is asked for."""


def quality(row: ComparisonRow, mixed: bool) -> str:
    """Return a row's metric, mean ± sd; `mixed` marks losses among accuracies."""
    if row.mean is None:
        return "failed"
    prefix = "loss " if mixed and row.metric == "test_loss" else ""
    if row.metric == "accuracy":
        spread = "" if row.sd is None else f" ± {100 * row.sd:.2f}"
        return f"{prefix}{100 * row.mean:.2f}{spread}"
    digits = _decimals(row.mean)
    return f"{prefix}{row.mean:.{digits}f}" + ("" if row.sd is None else f" ± {row.sd:.{digits}f}")


def _decimals(loss: float) -> int:
    """Return with how many decimals a loss has four significant digits; its row has as many."""
    return max(0, 3 - math.floor(math.log10(abs(loss)))) if math.isfinite(loss) and loss else 3


def versus(row: ComparisonRow) -> str:
    """Return a row's distance to the uncompressed one with its interval and marks, "-" without."""
    if row.difference is None or row.mean is None:
        return "-"
    digits = _decimals(row.mean)

    def shown(value: float) -> str:
        return f"{100 * value:+.2f}" if row.metric == "accuracy" else f"{value:+.{digits}f}"

    interval = f" [{', '.join(map(shown, row.interval))}]" if row.interval else ""
    marks = ("" if row.pairs else " †") + (" ‡" if row.tuned else "")
    return shown(row.difference) + interval + marks


def _target(rows: Sequence[ComparisonRow]) -> list[Column]:
    """Return columns of what it took to meet the target; none where there is no target."""
    target = rows[0].target
    if target is None:
        return []
    name = f"{100 * target:g} %" if rows[0].metric == "accuracy" else f"loss {target:g}"

    def met(row: ComparisonRow) -> str:
        return f"{row.target_reached} of {row.target_runs}" if row.target_runs else "no curve"

    fields = [
        ("step", "steps", 1.0),
        ("payload_bytes", "payload\nMB", 1 / MB),
        ("wire_bytes", "wire\nMB", 1 / MB),
        ("seconds", "wall\ns", 1.0),
        ("link_seconds", "link\n~s", 1.0),
    ]

    measured = not _withheld(rows)

    def spent(row: ComparisonRow, field: str, scale: float) -> str:
        if field == "seconds" and (row.disowned or not measured):
            return "-"
        value = getattr(row, f"target_{field}")
        return "never" if value == math.inf else number(value, scale)

    return [
        Column(f"to {name}:\nseeds", list(map(met, rows))),
        *(
            Column(heading, [spent(row, field, scale) for row in rows])
            for field, heading, scale in fields
        ),
    ]


def _published(rows: Sequence[ComparisonRow]) -> list[Column]:
    """Return columns of what a paper says of these runs; none where they are of no suite."""
    every = [row.published for row in rows]
    if not any(every):
        return []
    accuracy = rows[0].metric == "accuracy"

    def beyond(row: ComparisonRow) -> str:
        value = row.beyond_published
        if value is None:
            return "-"
        shown = f"{100 * value:+.2f}" if accuracy else f"{value:+.3f}"
        return shown + " §" * row.other_budget

    def percent(values: Iterable[float | None]) -> list[str]:
        return ["-" if value is None else f"{100 * value:.2f}" for value in values]

    numbers = Column("published\nloss", [number(one and one.loss) for one in every])
    if accuracy:
        numbers = Column("published\n%", percent(one and one.accuracy for one in every))
    top5 = []
    if any(one is not None and one.top5 is not None for one in every):
        top5 = [
            Column("top-5\n%", percent(row.test_top5 for row in rows)),
            Column("published\ntop-5 %", percent(one and one.top5 for one in every)),
        ]
    steps = [
        f"{row.first.steps:,} / {one.steps:,}" if one else "-"
        for row, one in zip(rows, every, strict=True)
    ]
    return [
        numbers,
        Column("ours -\npublished", [beyond(row) for row in rows]),
        *top5,
        Column("steps: ours\n/ published", steps),
    ]


def _as_published(rows: Sequence[ComparisonRow]) -> list[Column]:
    """Return the results with the settings of each method's source, if trials chose others."""
    if all(row.as_published is None for row in rows):
        return []
    mixed = len({row.metric for row in rows}) > 1
    cells = [
        "same" if row.as_published is None else quality(row.as_published, mixed) for row in rows
    ]
    return [Column("as\npublished", cells)]


def _tiers(rows: Sequence[ComparisonRow]) -> list[Column]:
    """Return the columns of a suite with tiers; none for other rows."""
    columns = []
    if any(row.rank is not None for row in rows):
        columns.append(Column("rank", [row.rank or "" for row in rows], "low"))
    if any(row.rate is not None for row in rows):
        columns.append(Column("rate", [row.rate or "" for row in rows]))
    if any(row.tier is not None for row in rows):
        columns.append(Column("bits\nup", [number(row.bits_up) for row in rows], "low"))
    return columns


def _resolution_note(rows: Sequence[ComparisonRow]) -> str:
    """Return a sentence on the noise of the test set that the intervals include."""
    sizes = sorted({int(row.examples) for row in rows if row.examples})
    if not sizes:
        return (
            "The size of the test set is not known, or the metric is a loss: intervals include the "
            "noise between seeds alone."
        )
    least = min(intervals.resolution(0.0, float(size)) for size in sizes[:1])
    count = ends(sizes)
    return (
        f"Test set: {count} examples, shared by all seeds. Differences below "
        f"{100 * least:.2g} points are below its resolution and get no verdict."
    )


def _tier_notes(rows: Sequence[ComparisonRow]) -> list[str]:
    made = []
    if any(row.rank is not None for row in rows):
        made.append(
            "rank: the places within the tier that a method may have, by paired intervals over at "
            "least 5 seeds, at 95 % for all pairs together, rows that are not shown among them; "
            "those of two indistinguishable methods overlap; - too few seeds."
        )
    if any(row.rate in ("edge", "untuned", "open") for row in rows):
        made.append(
            "rate: edge: the best rate is the lowest or highest that was tried; untuned: not the "
            "one that the suite's rule chooses; open: trials of this rule are still to be made."
        )
    if above := [row.method for row in rows if row.above_baseline]:
        made.append(
            f"Better than uncompressed, interval included: {', '.join(above)}. Look for the reason "
            "before believing it: a rate that suits it better, or noise that regularizes."
        )
    return made


def _published_notes(rows: Sequence[ComparisonRow]) -> list[str]:
    """Return sentences on the published numbers, those on other budgets first."""
    known = [(row, row.published) for row in rows if row.published is not None]
    made = []
    shares = [row.first.steps / one.steps for row, one in known if row.other_budget]
    if shares:
        ends = dict.fromkeys(f"{100 * share:.2g}" for share in (min(shares), max(shares)))
        made.append(
            f"§: trained for {' to '.join(ends)} % of the paper's steps. That difference is of the "
            "budget and no verdict on a method; vs none is at equal budget."
        )
    if any(row.as_published is not None for row in rows):
        made.append(
            "as published: the result with the settings of the method's source, each at its best "
            "rate, where trials chose others; same: they chose these."
        )
    return [*made, *dict.fromkeys(f"published: {one.paper}. {one.differs}" for _, one in known)]


def _times(rows: Sequence[ComparisonRow]) -> list[Column]:
    """Return the columns of the phases and of the step, in ms; "-" where they are disowned."""

    def shown(row: ComparisonRow, phase: str) -> str:
        modelled = row.communicate_modelled_seconds
        if phase == "communicate" and modelled is not None:
            return f"~{number(modelled, 1e3)}"
        return number(row.phases.get(phase), 1e3)

    phases = dict.fromkeys(phase for row in rows for phase in row.phases)
    made = [
        Column(
            f"{'fwd+bwd' if phase == 'forward_backward' else phase}\nms",
            ["-" if row.disowned else shown(row, phase) for row in rows],
            "low",
        )
        for phase in phases
    ]
    steps = ["-" if row.disowned else number(row.step_seconds, 1e3) for row in rows]
    return [*made, Column("step\nms", steps, "low")]


def _columns(rows: Sequence[ComparisonRow]) -> dict[str, list[Column]]:
    """Return the groups of columns: which row it is, quality, traffic and times."""
    metrics = {row.metric for row in rows}
    heading = METRICS[2 if len(metrics) > 1 else rows[0].metric == "test_loss"]
    better = "" if len(metrics) > 1 else "high" if rows[0].metric == "accuracy" else "low"
    counts = [
        str(len(row.values)) + (f" ({len(row.failed)} failed)" if row.failed else "")
        for row in rows
    ]
    groups = {
        "which": [
            *(Column(key, [text(row.context[key]) for row in rows]) for key in rows[0].context),
            Column("method", [row.method for row in rows]),
            *(Column(key, [text(row.own[key]) for row in rows]) for key in rows[0].own),
        ],
        "quality": [
            Column(heading, [quality(row, len(metrics) > 1) for row in rows], better),
            *_as_published(rows),
            Column("n", counts, "high"),
            *_published(rows),
            Column("vs none", [versus(row) for row in rows], better),
            Column("in band", [row.in_band for row in rows]),
            Column("front", ["yes" if row.on_front else "" for row in rows]),
            *_tiers(rows),
        ],
        "target": _target(rows),
        "traffic": [
            Column("collective", [row.first.collective for row in rows]),
            *(
                Column(f"ratio\n{name}", [number(getattr(row, field)) for row in rows], "high")
                for name, field in [
                    ("nominal", "nominal_ratio"),
                    ("up", "payload_ratio_up"),
                    ("down", "payload_ratio_down"),
                ]
            ),
            Column(PAYLOAD, [number(row.payload_bytes_step, 1 / MB) for row in rows], "low"),
            Column("wire\nMB/step", [number(row.wire_bytes_step, 1 / MB) for row in rows], "low"),
        ],
        "times": [] if _withheld(rows) else _times(rows),
    }
    if any(row.other_rule for row in rows):
        groups["quality"].append(Column("update", [row.other_rule for row in rows]))
    if any(row.skipped_steps for row in rows):
        groups["quality"].append(Column("skipped\nsteps", [str(row.skipped_steps) for row in rows]))
    return groups


def _withheld(rows: Sequence[ComparisonRow]) -> str:
    """Return why no times are shown: they are of several machines or versions; "" if they are not.

    Versions are distinguished by their commit, or by the release where the commit is not known.
    """
    for field, what in (("machine", "machines"), ("commit", "commits")):
        known = (run.summary.provenance for row in rows if not row.disowned for run in row.runs)
        values = [found.get(field) or found.get("versions") for found in known]
        places = set(map(canonical, {id(value): value for value in values}.values()))
        if len(places) > 1:
            return f"Times are left out: the runs come from {len(places)} {what}."
    return ""


def differing(columns: Sequence[Column]) -> tuple[list[Column], list[str]]:
    """Return the columns in which rows differ, and words for the others.

    Columns of nothing but "-" are left out without words; those of `ALWAYS` are kept.
    """
    kept, told = [], []
    for column in columns:
        several = len(column.cells) < 2 or len(set(column.cells)) > 1
        if several or column.heading in ALWAYS:
            kept.append(column)
        elif column.cells[0] not in ("-", ""):
            told.append(" ".join([*column.heading.split(), column.cells[0]]))
    return kept, told


def alike(rows: Sequence[ComparisonRow]) -> str:
    """Return a sentence on the columns that are left out because all rows are equal in them."""
    found = _columns(rows)
    columns = [*found["quality"], *found["target"], *found["traffic"]]
    told = differing(columns)[1]
    return f"Equal in all {len(rows)} rows: {'; '.join(told)}." if told else ""


def notes(rows: Sequence[ComparisonRow]) -> list[str]:
    """Return the sentences that a reader needs beside the numbers."""
    made = [alike(rows)] if alike(rows) else []
    made += [
        "Results are the mean ± the sample standard deviation over n seeds. vs none: the "
        "difference from the uncompressed runs of equal budget (accuracy in points), paired by "
        "seed, with its 95 % confidence interval (Student's t over seeds, and the test set's "
        "noise) where there are two pairs or more. "
        "in band: whether the mean lies between the lowest and the highest of the uncompressed "
        f"seeds. {FRONT}",
        "Bytes are those of a worker and step, MB = 10^6 bytes. payload: encoded, up and down "
        "together; wire: what a worker sends over the network, by this collective.",
    ]
    made.append(_resolution_note(rows))
    made += _published_notes(rows) + _tier_notes(rows)
    if any(row.difference is not None and not row.pairs for row in rows):
        made.append("†: no common seeds; the difference is of the two means.")
    keys = sorted({key for row in rows for key in row.tuned})
    if keys:
        made.append(
            f"‡: the uncompressed runs differ in {', '.join(keys)}; of several the best was taken."
        )
    if rows[0].target is not None:
        made.append(
            "Target: what a worker had spent at the first evaluation that met it, median over "
            "seeds, a miss being infinite (never: half or more of them missed it); evaluations are "
            "--eval-every steps apart, on validation examples where some were held out. link: "
            "communication alone, as modelled."
        )
    if faster := [row.method for row in rows if row.faster]:
        made.append(
            f"Meets the target in fewer steps than uncompressed, interval included: "
            f"{', '.join(faster)}. Look for the reason before believing it."
        )
    if any(row.other_rule for row in rows):
        made.append(
            "update: with what a row applies its update, and what its method's source has: such a "
            "row says little of the method as published."
        )
    if any(row.failed for row in rows):
        made.append("failed: the run diverged; such seeds are in no mean.")
    if withheld := _withheld(rows):
        made.append(withheld)
    elif any(
        not row.disowned and (row.step_seconds is not None or any(row.phases.values()))
        for row in rows
    ):
        made.append(
            "Times: of one worker, median over steps and then over seeds; step: wall clock of all "
            "of it (in the engine simulate, of all workers in one process)."
        )
    links = sorted({(m.link_gbit, m.link_latency_us) for row in rows if (m := row.link)})
    told = rows[0].target is not None or not all(row.disowned for row in rows)
    if links and told and not withheld:
        link = " or ".join(f"{gbit:g} Gbit/s and {latency:g} µs" for gbit, latency in links)
        made.append(f"~: modelled from a link of {link}, not measured and not part of step.")
    reasons = {row.disowned: None for row in rows if row.disowned}
    if reasons:
        count = sum(bool(row.disowned) for row in rows)
        which = "all" if count == len(rows) else f"{count} of {len(rows)}"
        made.append(
            f"Times of {which} rows are left out, as whoever made them says: {'; '.join(reasons)}."
        )
    return made


def sheets(rows: Sequence[ComparisonRow]) -> list[list[Column]]:
    """Return the columns of the results table and, where times are known, of the times table."""
    found = groups(rows)
    tables = [found["which"] + found["quality"] + found["target"] + found["traffic"]]
    if found["times"]:
        tables.append(found["which"] + found["times"])
    return tables


def groups(rows: Sequence[ComparisonRow]) -> dict[str, list[Column]]:
    """Return the groups of columns without those in which all rows are equal; see `alike`."""
    found = _columns(rows)
    for name in ("quality", "target", "traffic"):
        found[name] = differing(found[name])[0]
    found["times"] = [
        column for column in found["times"] if any(cell != "-" for cell in column.cells)
    ]
    return found


def _table(rows: Sequence[ComparisonRow], width: int, asked: Layout) -> str:
    """Return as few tables as fit into `width` columns."""
    found = laid_out(rows, asked)
    which = found.pop("which")
    own = which[len(rows[0].context) + 1 :]
    if own and len({(row.place, row.method) for row in rows}) == len(rows):
        # Without them a row is known, too: they need not stand in every table.
        which = which[: -len(own)]
        found = {"quality": found.pop("quality", []), "own": own, **found}
    return terminal(which, list(filter(None, found.values())), width)


def _markdown(rows: Sequence[ComparisonRow], asked: Layout) -> str:
    names = len(rows[0].context) + 1 + len(rows[0].own)
    return "\n\n".join(markdown(columns, names) for columns in _chosen_sheets(rows, asked))


def _told(said: Sequence[str], format: str, width: int) -> list[str]:
    """Return sentences as the blocks that follow a table; none for no sentences."""
    if format != "table":
        return list(said)
    filled = [textwrap.fill(note, width, break_long_words=False) for note in said]
    return ["\n".join(filled)] if filled else []


def best_rows(rows: Sequence[ComparisonRow]) -> list[int]:
    """Return the places of the compressed rows with the best mean, and of those as good.

    As good are rows whose mean lies in the 95 % interval of the best mean (Student's t). With a
    single seed there is no interval, and none is as good. Each budget has its own best.
    """
    found: list[int] = []
    budgets = dict.fromkeys((canonical(row.context), row.metric) for row in rows)
    for budget in budgets:
        alike = [
            (i, row)
            for i, row in enumerate(rows)
            if (canonical(row.context), row.metric) == budget and row.mean is not None
            if not row.is_baseline and not row.failed
        ]
        if not alike:
            continue
        sign = 1 if budget[1] == "accuracy" else -1
        _, top = max(alike, key=lambda one: sign * (one[1].mean or 0.0))
        for i, row in alike:
            behind = sign * ((top.mean or 0.0) - (row.mean or 0.0))
            noise = intervals.resolution(behind, top.examples or math.nan)
            if behind <= math.hypot(top.half_interval, noise) + 1e-12:
                found.append(i)
    return sorted(found)


def _caption(rows: Sequence[ComparisonRow], shared: str) -> str:
    """Return what a reader of a paper must know of the table, in a caption's sentences."""
    first = rows[0].first
    tasks = " and ".join(dict.fromkeys(row.first.task for row in rows))
    counts = [len(row.values) for row in rows]
    what = "test accuracy (%)" if rows[0].metric == "accuracy" else "test loss"
    sizes = {(row.first.workers, row.first.steps, row.first.batch) for row in rows}
    same = []
    if len(sizes) == 1:
        same = [f"{first.workers} workers", f"{first.steps} steps of batch {first.batch}"]
    for key in ("optimizer", "lr"):
        values = {text(row.runs[0].config.get(key)) for row in rows}
        if len(values) == 1 and first.config.get(key) is not None:
            same.append(f"{key} {values.pop()}")
    of = (
        f"mean ± standard deviation over n = {ends(counts)} seeds"
        if max(counts) > 1
        else "one seed"
    )
    under = f" ({', '.join(same)})" if same else ""
    more = f" {shared}." if shared else ""
    return (
        f"{tasks}: {what}, {of}{under}.{more} Bold: the best compressed row of its budget, "
        "and those whose mean lies in its 95 % interval. vs none: paired difference with its "
        "95 % interval. MB = 10^6 bytes of a worker and step."
    )


def _latex(rows: Sequence[ComparisonRow], asked: Layout, shared: str) -> str:
    """Return a floating table (needs the package booktabs), one for the times, and the notes."""
    names = len(rows[0].context) + 1 + len(rows[0].own)
    environment = "table*" if asked.width == "double" else "table"
    told = " ".join(map(latex_text, notes(rows)))
    made = []
    for place, columns in enumerate(_chosen_sheets(rows, asked)):
        quality = [i for i, column in enumerate(columns) if column.heading in METRICS]
        bold = {i: best_rows(rows) for i in quality}
        caption = "Times by phase, in ms." if place else _caption(rows, shared)
        made.append(latex(columns, names, caption, bold, environment))
    return "\n\n".join([*made, rf"\par\smallskip{{\footnotesize {told}\par}}"])


# ---- what is shown, in which order ---------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """How a table is laid out."""

    sort: str = ""
    """What rows are sorted by, one of `SORTS`, the best first; "-" before it: the worst first."""
    columns: Sequence[str] = ()
    """Beginnings of headings; none: all in which rows differ."""
    width: str = ""
    """"single" or "double": the column of a paper."""


SORTS: dict[str, tuple[str, Callable[[ComparisonRow], Any]]] = {
    "accuracy": ("high", lambda row: row.mean if row.metric == "accuracy" else None),
    "loss": ("low", lambda row: row.mean if row.metric == "test_loss" else None),
    "difference": (
        "high",
        lambda row: (
            row.difference
            if row.difference is None or row.metric == "accuracy"
            else -row.difference
        ),
    ),
    "payload": ("low", lambda row: row.payload_bytes_step),
    "wire": ("low", lambda row: row.wire_bytes_step),
    "bits": ("low", lambda row: row.bits_up),
    "ratio": ("high", lambda row: row.payload_ratio_up),
    "step": ("low", lambda row: None if row.disowned else row.step_seconds),
    "method": ("low", lambda row: row.method),
    "target": ("low", lambda row: row.target_step),
}
"""What `compare --sort` takes -> which end is the best, and the value of a row."""


def in_order(rows: Sequence[ComparisonRow], sort: str) -> list[ComparisonRow]:
    """Return the rows sorted, those without a value last; `sort` as in `Layout`.

    Raises:
        UsageError: nothing to sort by has that name.
    """
    if not sort:
        return list(rows)
    name = sort.removeprefix("-")
    if name not in SORTS:
        raise unknown("--sort", name, SORTS)
    end, value = SORTS[name]
    known = [row for row in rows if value(row) is not None]
    falling = (end == "high") != sort.startswith("-")
    rest = [row for row in rows if value(row) is None]
    return sorted(known, key=value, reverse=falling) + rest


def _matches(column: Column, word: str) -> bool:
    """Whether a heading begins with the word, however either is cased and broken."""
    return " ".join(column.heading.lower().split()).startswith(" ".join(word.lower().split()))


def _chosen(groups: Mapping[str, list[Column]], words: Sequence[str]) -> dict[str, list[Column]]:
    """Return the columns that name a row, and those that were asked for, in that order.

    Raises:
        UsageError: no heading begins with a word.
    """
    every = [column for columns in groups.values() for column in columns]
    for word in words:
        if not any(_matches(column, word) for column in every):
            raise unknown("--columns", word, [" ".join(c.heading.split()) for c in every])
    picked = [column for word in words for column in every if _matches(column, word)]
    names = [id(column) for column in groups["which"]]
    unique = {id(column): column for column in picked if id(column) not in names}
    return {"which": groups["which"], "chosen": list(unique.values())}


def laid_out(rows: Sequence[ComparisonRow], asked: Layout) -> dict[str, list[Column]]:
    """Return the groups of columns that are shown."""
    return _chosen(_columns(rows), asked.columns) if asked.columns else groups(rows)


def _chosen_sheets(rows: Sequence[ComparisonRow], asked: Layout) -> list[list[Column]]:
    if not asked.columns:
        return sheets(rows)
    found = _chosen(_columns(rows), asked.columns)
    return [[column for columns in found.values() for column in columns]]


def render(
    rows: Sequence[ComparisonRow],
    format: str = "table",
    width: int | None = None,
    by: str | None = None,
    layout: Layout | None = None,
) -> str:
    """Return the rows as text in one of `FORMATS`, without a final line break.

    `width` is in columns and bounds the format "table" alone: wider content is split over more
    tables. None takes the terminal's, or 200 where the output is no terminal. `by`: a setting whose
    values have a table each; CSV and JSON, which have one row a row, sort by it.

    Raises:
        UsageError: an unknown format, setting, column or order, columns of CSV or JSON, or no rows.
    """
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)
    if not rows:
        raise UsageError("no rows to show; load at least one finished run")
    asked = layout or Layout()
    rows = in_order(rows, asked.sort)
    tabled = {"": list(rows)} if by is None else compare.by(rows, by)
    if format in ("csv", "json"):
        if asked.columns:
            raise UsageError(f"--columns: {format} has every field of a row; choose among them")
        records = [row.record() for group in tabled.values() for row in group]
        return csv_text(records) if format == "csv" else json_text(records)
    width = width or columns()
    titles = {"table": "{}", "markdown": "**{}**", "latex": "% {}"}
    shown = {value: constants(group) for value, group in tabled.items()}
    said = [notes(told) for _, told in shown.values()]
    every = [note for note in said[0] if all(note in others for others in said)]
    blocks = []
    for (value, (title, told)), own in zip(shown.items(), said, strict=True):
        if by is not None:
            title = ", ".join(filter(None, [f"{by}={value}", title]))
        if title:
            blocks.append(titles[format].format(title))
        if format == "latex":
            blocks.append(_latex(told, asked, title))
            continue
        blocks.append(_table(told, width, asked) if format == "table" else _markdown(told, asked))
        blocks += _told([note for note in own if note not in every], format, width)
    if format == "latex":
        return "\n\n".join(blocks)
    if format == "table" and any(len(told) > glossary.LONG for _, told in shown.values()):
        every.append(glossary.POINTER)
    return "\n\n".join([*blocks, *_told(every, format, width)])


def columns() -> int:
    """Return how many columns the terminal has, or 200 where the output is no terminal."""
    return shutil.get_terminal_size((200, 24)).columns


def constants(rows: Sequence[ComparisonRow]) -> tuple[str, list[ComparisonRow]]:
    """Return in words the context that all rows share, and the rows without it.

    Rows that were selected or grouped may share settings in which all rows of the table differ.
    """
    shared = [key for key in rows[0].context if len({canonical(r.context[key]) for r in rows}) == 1]
    words = ", ".join(f"{key}={text(rows[0].context[key])}" for key in shared)
    rest = [key for key in rows[0].context if key not in shared]
    return words, [replace(row, context={key: row.context[key] for key in rest}) for row in rows]
