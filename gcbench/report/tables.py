"""Rows of a comparison as a terminal table, Markdown, CSV, JSON or LaTeX."""

from __future__ import annotations

import math
import shutil
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gcbench.core.errors import UsageError, unknown
from gcbench.core.values import canonical, text
from gcbench.report import compare, glossary
from gcbench.report.compare import Asked, ComparisonRow
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
"""The definition of the front, in footnotes and in the report."""
PAYLOAD = "payload\nMB/step"
LOSSES = {"test": "test loss", "validation": "validation loss", "test or validation": "loss"}
METRICS = ("accuracy %", *LOSSES.values(), "accuracy %\nor loss")
ALWAYS = (*METRICS, "vs none", PAYLOAD)
"""Columns that a table always has, even where all rows are equal."""


def quality(row: ComparisonRow, mixed: bool) -> str:
    """Return a row's metric as mean ± sd; `mixed` marks losses among accuracies."""
    if row.mean is None:
        return "failed"
    prefix = "loss " if mixed and row.metric == "test_loss" else ""
    if row.metric == "accuracy":
        spread = "" if row.sd is None else f" ± {100 * row.sd:.2f}"
        return f"{prefix}{100 * row.mean:.2f}{spread}"
    how = _digits(row.mean)
    return f"{prefix}{row.mean:{how}}" + ("" if row.sd is None else f" ± {row.sd:{how}}")


def _digits(loss: float) -> str:
    """Return the format that shows a loss, and its row, with four significant digits."""
    if not (math.isfinite(loss) and loss):
        return ".3f"
    if not 1e-4 <= abs(loss) < 1e7:
        return ".3e"
    return f".{max(0, 3 - math.floor(math.log10(abs(loss))))}f"


def versus(row: ComparisonRow) -> str:
    """Return a row's difference from the uncompressed one, its interval and marks; else "-"."""
    if row.difference is None or row.mean is None:
        return "-"
    how = _digits(row.mean)

    def shown(value: float) -> str:
        return f"{100 * value:+.2f}" if row.metric == "accuracy" else f"{value:+{how}}"

    interval = f" [{', '.join(map(shown, row.interval))}]" if row.interval else ""
    marks = ("" if row.pairs else " †") + (" ‡" if row.tuned else "")
    return shown(row.difference) + interval + marks


def _target(rows: Sequence[ComparisonRow]) -> list[Column]:
    """Return the columns about reaching the target; none without a target."""
    target = rows[0].target
    if target is None:
        return []
    metrics = {row.metric for row in rows}
    name = f"loss {target:g}" if metrics == {"test_loss"} else f"{100 * target:g} %"
    if len(metrics) > 1:
        name = f"{target:g}"

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
        if field == "seconds" and (row.not_quoted or not measured):
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
    """Return the published numbers beside ours; none for rows outside of suites."""
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


def _as_published(rows: Sequence[ComparisonRow], *, asked: bool) -> list[Column]:
    """Return the results with the settings of each method's source, if trials chose others.

    `asked`: the column is also returned where they chose the same for all rows, as in one tier.
    """
    if not (asked and any(row.rate for row in rows)) and not any(row.as_published for row in rows):
        return []
    mixed = len({row.metric for row in rows}) > 1

    def shown(row: ComparisonRow) -> str:
        if row.as_published is None:
            return "-" if row.differs_from_source else "same"
        return quality(row.as_published, mixed)

    return [Column("as\npublished", [shown(row) for row in rows])]


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
    """Return a sentence about the test set's noise, which the intervals include."""
    sizes = sorted({int(row.examples) for row in rows if row.examples})
    if not sizes:
        return (
            "The metric is a loss, or the test set's size is unknown: intervals include only the "
            "noise between seeds."
        )
    examples = sizes[0]
    shares = (changed / examples for changed in range(1, examples + 1))
    least = next((one for one in shares if intervals.resolution(one, float(examples)) < one), None)
    below = "All differences" if least is None else f"Differences below {100 * least:.2g} points"
    return (
        f"Test set: {ends(sizes)} examples, shared by all seeds. {below} are below its resolution "
        "and get no verdict."
    )


def open_note(rows: Sequence[ComparisonRow]) -> str:
    """Return a sentence about the methods whose settings are open; "" without any."""
    names = sorted({row.first.compressor_name for row in rows if row.settings_open})
    if not names:
        return ""
    return (
        f"No ranks in tiers with open settings. Trials or chosen runs are missing: {listed(names)}."
    )


def _tier_notes(rows: Sequence[ComparisonRow]) -> list[str]:
    sentences = []
    if any(row.rank is not None for row in rows):
        sentences.append(
            "rank: the possible places within the tier, by paired intervals over at least 5 seeds "
            "(95 % for all pairs together, including rows that are not shown). Indistinguishable "
            "methods have overlapping places; -: a method of the tier has too few seeds, or open "
            "settings."
        )
    if note := open_note(rows):
        sentences.append(note)
    if any(row.rate in ("edge", "untuned", "open") for row in rows):
        sentences.append(
            "rate: edge: the best rate is the lowest or highest one tried; untuned: not the rate "
            "that the suite's rule chooses; open: trials are missing."
        )
    if above := [row.method for row in rows if row.above_baseline]:
        sentences.append(
            f"Better than uncompressed, interval included: {listed(above)}. Look for the cause "
            "first: a better tuned rate, or noise that regularizes."
        )
    return sentences


def _published_notes(rows: Sequence[ComparisonRow]) -> list[str]:
    """Return sentences about the published numbers, first about other budgets."""
    published = [(row, row.published) for row in rows if row.published is not None]
    sentences = []
    shares = [row.first.steps / one.steps for row, one in published if row.other_budget]
    if shares:
        ends = dict.fromkeys(f"{100 * share:.2g}" for share in (min(shares), max(shares)))
        sentences.append(
            f"§: trained for {' to '.join(ends)} % of the paper's steps. That difference reflects "
            "the budget, not the method; vs none is at equal budget."
        )
    if any(row.as_published is not None for row in rows):
        sentences.append(
            "as published: the result with the settings of the method's source at their best rate, "
            "where trials chose other settings; same: they chose these; -: not run."
        )
    return [
        *sentences,
        *dict.fromkeys(f"published: {one.paper}. {one.differs}" for _, one in published),
    ]


def _times(rows: Sequence[ComparisonRow]) -> list[Column]:
    """Return the columns of the phases and of the step, in ms; "-" where they may not be quoted."""

    def shown(row: ComparisonRow, phase: str) -> str:
        modelled = row.communicate_modelled_seconds
        if phase == "communicate" and modelled is not None:
            return f"~{number(modelled, 1e3)}"
        return number(row.phases.get(phase), 1e3)

    phases = dict.fromkeys(phase for row in rows for phase in row.phases)
    columns = [
        Column(
            f"{'fwd+bwd' if phase == 'forward_backward' else phase}\nms",
            ["-" if row.not_quoted else shown(row, phase) for row in rows],
            "low",
        )
        for phase in phases
    ]
    steps = ["-" if row.not_quoted else number(row.step_seconds, 1e3) for row in rows]
    return [*columns, Column("step\nms", steps, "low")]


def split(rows: Sequence[ComparisonRow]) -> str:
    """Return the split, or splits, of the rows' results."""
    return " or ".join(sorted({run.result_split for row in rows for run in row.runs}))


def _columns(rows: Sequence[ComparisonRow], *, asked: bool = False) -> dict[str, list[Column]]:
    """Return the groups of columns: names, quality, traffic and times; all that can be `asked`."""
    metrics = {row.metric for row in rows}
    heading = METRICS[-1] if len(metrics) > 1 else METRICS[0]
    if metrics == {"test_loss"}:
        heading = LOSSES[split(rows)]
    better = "" if len(metrics) > 1 else "high" if rows[0].metric == "accuracy" else "low"
    counts = [
        str(len(row.values)) + (f" ({len(row.failed)} failed)" if row.failed else "")
        for row in rows
    ]
    groups = {
        "which": [
            *(Column(key, [text(row.context[key]) for row in rows]) for key in rows[0].context),
            Column("method", [row.method for row in rows]),
            *(Column(key, [text(row.choices[key]) for row in rows]) for key in rows[0].choices),
        ],
        "quality": [
            Column(heading, [quality(row, len(metrics) > 1) for row in rows], better),
            *_as_published(rows, asked=asked),
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
    """Return why times are left out: several machines or versions; "" if they are shown.

    Versions are distinguished by their commit, or by the release where the commit is not known.
    """
    provenances = {
        id(run.summary.provenance): run.summary.provenance
        for row in rows
        if not row.not_quoted
        for run in row.runs
    }
    for field, what in (("machine", "machines"), ("commit", "commits")):
        values = [one.get(field) or one.get("versions") for one in provenances.values()]
        places = set(map(canonical, {id(value): value for value in values}.values()))
        if len(places) > 1:
            return f"Times are left out: the runs come from {len(places)} {what}."
    return ""


def differing(columns: Sequence[Column]) -> tuple[list[Column], list[str]]:
    """Return the columns in which rows differ, and the others as "heading value".

    Columns of "-" alone are dropped; those of `ALWAYS`, and how many seeds met a target, are always
    among the first.
    """
    shown, equal = [], []
    for column in columns:
        several = len(column.cells) < 2 or len(set(column.cells)) > 1
        if several or column.heading in ALWAYS or column.heading.startswith("to "):
            shown.append(column)
        elif column.cells[0] not in ("-", ""):
            equal.append(" ".join([*column.heading.split(), column.cells[0]]))
    return shown, equal


def alike(rows: Sequence[ComparisonRow]) -> str:
    """Return a sentence about the columns in which all rows are equal."""
    by_name = _columns(rows)
    columns = [*by_name["quality"], *by_name["target"], *by_name["traffic"]]
    equal = differing(columns)[1]
    return f"Equal in all {len(rows)} rows: {'; '.join(equal)}." if equal else ""


def notes(rows: Sequence[ComparisonRow]) -> list[str]:
    """Return the footnotes of a table."""
    sentences = [equal] if (equal := alike(rows)) else []
    sentences += [
        "Results are the mean ± the sample standard deviation over n seeds. vs none: the "
        "difference from the uncompressed runs of equal budget (accuracy in points), paired by "
        "seed, with its 95 % confidence interval (Student's t over seeds, and the test set's "
        "noise) where there are two pairs or more. "
        "in band: whether the mean lies between the lowest and the highest of the uncompressed "
        f"seeds. {FRONT}",
        "Bytes are per worker and step, MB = 10^6 bytes. payload: encoded, up and down together; "
        "wire: sent over the network by this collective.",
    ]
    sentences.append(_resolution_note(rows))
    sentences += _published_notes(rows) + _tier_notes(rows)
    if any(row.difference is not None and not row.pairs for row in rows):
        sentences.append("†: no common seeds; the difference of the two means.")
    keys = sorted({key for row in rows for key in row.tuned})
    if keys:
        sentences.append(
            f"‡: the uncompressed runs differ in {', '.join(keys)}; the best of them was taken."
        )
    if rows[0].target is not None:
        sentences.append(
            "Target: the cost per worker up to the first evaluation that met it, median over seeds "
            "(never: half or more of them missed it); evaluations are --eval-every steps apart, on "
            "validation examples where some were held out. link: modelled communication alone."
        )
    if faster := [row.method for row in rows if row.faster]:
        sentences.append(
            f"Meets the target in fewer steps than uncompressed, interval included: "
            f"{listed(faster)}. Look for the cause first."
        )
    if any(row.other_rule for row in rows):
        sentences.append(
            "update: differs from the method's source (ours / source); the row says little about "
            "the published method."
        )
    if any(row.failed for row in rows):
        sentences.append("failed: the run diverged; means leave such seeds out.")
    if withheld := _withheld(rows):
        sentences.append(withheld)
    elif any(
        not row.not_quoted and (row.step_seconds is not None or any(row.phases.values()))
        for row in rows
    ):
        sentences.append(
            "Times: one worker, median over steps, then over seeds; step: wall clock of the whole "
            "step (engine simulate: of all workers in one process)."
        )
    links = sorted({(m.link_gbit, m.link_latency_us) for row in rows if (m := row.link)})
    has_times = rows[0].target is not None or not all(row.not_quoted for row in rows)
    if links and has_times and not withheld:
        link = " or ".join(f"{gbit:g} Gbit/s and {latency:g} µs" for gbit, latency in links)
        sentences.append(f"~: modelled from a link of {link}; neither measured nor part of step.")
    reasons = {row.not_quoted: None for row in rows if row.not_quoted}
    if reasons:
        count = sum(bool(row.not_quoted) for row in rows)
        which = "all" if count == len(rows) else f"{count} of {len(rows)}"
        sentences.append(
            f"Times of {which} rows are left out for their author's reason: {'; '.join(reasons)}."
        )
    return sentences


def groups(rows: Sequence[ComparisonRow]) -> dict[str, list[Column]]:
    """Return the groups of columns without those in which all rows are equal; see `alike`."""
    shown = _columns(rows)
    for name in ("quality", "target", "traffic"):
        shown[name] = differing(shown[name])[0]
    shown["times"] = [
        column for column in shown["times"] if any(cell != "-" for cell in column.cells)
    ]
    return shown


def _table(rows: Sequence[ComparisonRow], width: int, asked: Asked) -> str:
    """Return as few tables as fit into `width` columns."""
    shown = laid_out(rows, asked)
    which = shown.pop("which")
    chosen = which[len(rows[0].context) + 1 :]
    if chosen and len({(row.place, row.method) for row in rows}) == len(rows):
        # Rows are distinct without these columns: they need not be in every table.
        which = which[: -len(chosen)]
        shown = {"quality": shown.pop("quality", []), "choices": chosen, **shown}
    return terminal(which, list(filter(None, shown.values())), width)


def _markdown(rows: Sequence[ComparisonRow], asked: Asked) -> str:
    names = len(rows[0].context) + 1 + len(rows[0].choices)
    return "\n\n".join(markdown(columns, names) for columns in _sheets(rows, asked))


def _footnotes(sentences: Sequence[str], format: str, width: int) -> list[str]:
    """Return footnotes as the blocks that follow a table."""
    if format != "table":
        return list(sentences)
    filled = [textwrap.fill(note, width, break_long_words=False) for note in sentences]
    return ["\n".join(filled)] if filled else []


def best_rows(rows: Sequence[ComparisonRow]) -> list[int]:
    """Return the indices of the best compressed rows of each budget.

    These are the row with the best mean and those whose mean lies in its 95 % interval (Student's
    t), for which there must be two seeds.
    """
    best: list[int] = []
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
                best.append(i)
    return sorted(best)


def _caption(rows: Sequence[ComparisonRow], shared: str) -> str:
    """Return the caption of a table in a paper."""
    first = rows[0].first
    tasks = " and ".join(dict.fromkeys(row.first.task for row in rows))
    counts = [len(row.values) for row in rows]
    what = f"{split(rows)} {'accuracy (%)' if rows[0].metric == 'accuracy' else 'loss'}"
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


def _latex(rows: Sequence[ComparisonRow], asked: Asked, shared: str) -> str:
    """Return a floating table (package booktabs), one of times, and the footnotes."""
    names = len(rows[0].context) + 1 + len(rows[0].choices)
    environment = "table*" if asked.width == "double" else "table"
    footnotes = " ".join(map(latex_text, notes(rows)))
    blocks = []
    for place, columns in enumerate(_sheets(rows, asked)):
        quality = [i for i, column in enumerate(columns) if column.heading in METRICS]
        bold = {i: best_rows(rows) for i in quality}
        caption = "Times by phase, in ms." if place else _caption(rows, shared)
        blocks.append(latex(columns, names, caption, bold, environment))
    return "\n\n".join([*blocks, rf"\par\smallskip{{\footnotesize {footnotes}\par}}"])


# ---- what is shown, in which order ---------------------------------------------------------------


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
    "step": ("low", lambda row: None if row.not_quoted else row.step_seconds),
    "method": ("low", lambda row: row.method),
    "target": ("low", lambda row: row.target_step),
}
"""Argument of `compare --sort` -> which end is the best, and the value of a row."""


def in_order(rows: Sequence[ComparisonRow], sort: str) -> list[ComparisonRow]:
    """Return the rows sorted, those without a value last; `sort` as in `Asked`.

    Raises:
        UsageError: an unknown `sort`, or "target" without a target.
    """
    if not sort:
        return list(rows)
    name = sort.removeprefix("-")
    if name not in SORTS:
        raise unknown("--sort", name, SORTS)
    if name == "target" and rows and rows[0].target is None:
        raise UsageError("--sort target: add --target, e.g. --target 0.9")
    end, value = SORTS[name]
    with_value = [row for row in rows if value(row) is not None]
    falling = (end == "high") != sort.startswith("-")
    rest = [row for row in rows if value(row) is None]
    return sorted(with_value, key=value, reverse=falling) + rest


def _matches(column: Column, word: str) -> bool:
    """Whether a heading begins with the word; case and line breaks do not count."""
    return " ".join(column.heading.lower().split()).startswith(" ".join(word.lower().split()))


def _chosen(groups: Mapping[str, list[Column]], words: Sequence[str]) -> dict[str, list[Column]]:
    """Return the columns that name a row, then the requested ones in their order."""
    every = [column for columns in groups.values() for column in columns]
    for word in words:
        if not any(_matches(column, word) for column in every):
            raise unknown("--columns", word, [" ".join(c.heading.split()) for c in every])
    picked = [column for word in words for column in every if _matches(column, word)]
    names = [id(column) for column in groups["which"]]
    unique = {id(column): column for column in picked if id(column) not in names}
    return {"which": groups["which"], "chosen": list(unique.values())}


def laid_out(rows: Sequence[ComparisonRow], asked: Asked) -> dict[str, list[Column]]:
    """Return the groups of columns to show."""
    return _chosen(_columns(rows, asked=True), asked.columns) if asked.columns else groups(rows)


def _sheets(rows: Sequence[ComparisonRow], asked: Asked) -> list[list[Column]]:
    """Return the columns of the table of results and, with times, those of the table of times."""
    shown = laid_out(rows, asked)
    times = shown.pop("times", [])
    tables = [[column for columns in shown.values() for column in columns]]
    return [*tables, shown["which"] + times] if times else tables


def render(
    rows: Sequence[ComparisonRow],
    format: str = "table",
    width: int | None = None,
    by: str | None = None,
    asked: Asked | None = None,
) -> str:
    """Return the rows as text in one of `FORMATS`, without a final line break.

    `width`, in columns, limits the format "table", which is split into several where it is wider;
    None takes the width of the terminal, or 200 if the output is not a terminal. `by`: a setting
    with a table for each of its values, by which CSV and JSON are sorted.

    Raises:
        UsageError: an unknown format, setting, column or order, columns of CSV or JSON, or no rows.
    """
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)
    if not rows:
        raise UsageError("no rows to show; load at least one finished run")
    asked = asked or Asked()
    rows = in_order(rows, asked.sort)
    tabled = {"": list(rows)} if by is None else compare.by(rows, by)
    if format in ("csv", "json"):
        if asked.columns:
            raise UsageError(f"--columns: {format} has every field of a row; leave --columns out")
        records = [row.record() for group in tabled.values() for row in group]
        return csv_text(records) if format == "csv" else json_text(records)
    width = width or columns()
    titles = {"table": "{}", "markdown": "**{}**", "latex": "% {}"}
    shown = {value: constants(group) for value, group in tabled.items()}
    footnotes = [notes(members) for _, members in shown.values()]
    every = [note for note in footnotes[0] if all(note in others for others in footnotes)]
    blocks = []
    for (value, (title, members)), own_notes in zip(shown.items(), footnotes, strict=True):
        if by is not None:
            title = ", ".join(filter(None, [f"{by}={value}", title]))
        if title:
            blocks.append(titles[format].format(title))
        if format == "latex":
            blocks.append(_latex(members, asked, title))
            continue
        blocks.append(
            _table(members, width, asked) if format == "table" else _markdown(members, asked)
        )
        blocks += _footnotes([note for note in own_notes if note not in every], format, width)
    if format == "latex":
        return "\n\n".join(blocks)
    if format == "table" and any(len(members) > glossary.LONG for _, members in shown.values()):
        every.append(glossary.POINTER)
    return "\n\n".join([*blocks, *_footnotes(every, format, width)])


MOST_ROWS = 100
"""Rows of a table on a page: a reader finds no more of them useful, and a browser slows down."""
MOST_POINTS, FEW_POINTS = 60, 24
"""A picture has all of up to 60 rows; of more, whose names would cover each other, the best 24."""


def best(rows: Sequence[ComparisonRow], most: int) -> list[ComparisonRow]:
    """Return at most `most` rows in their order: in turn the best of each tier and budget.

    The uncompressed rows of a tier and budget come first, then those with the best mean.
    """
    if len(rows) <= most:
        return list(rows)
    groups: dict[tuple[str | None, str], list[int]] = {}
    for place, row in enumerate(rows):
        budget = canonical(row.context) if row.context else ""
        groups.setdefault((row.tier, budget), []).append(place)

    def behind(place: int) -> tuple[bool, float]:
        return not rows[place].is_baseline, rows[place].behind

    ordered = [
        (turn, behind(place), place)
        for group in groups.values()
        for turn, place in enumerate(sorted(group, key=behind))
    ]
    return [rows[place] for place in sorted(place for *_, place in sorted(ordered)[:most])]


def largest_budget(rows: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    """Return the rows of the budget that has most rows, then most steps."""
    budgets: dict[str, list[ComparisonRow]] = {}
    for row in rows:
        budgets.setdefault(canonical(row.context), []).append(row)
    return max(budgets.values(), key=lambda alike: (len(alike), alike[0].first.steps))


def drawn(rows: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    """Return the rows that a picture has: all, or of very many the best."""
    return list(rows) if len(rows) <= MOST_POINTS else best(rows, FEW_POINTS)


def listed(names: Sequence[str], most: int = 40) -> str:
    """Return the first `most` names as one text, with a count of the others."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def columns() -> int:
    """Return the width of the terminal, or 200 if the output is not a terminal."""
    return shutil.get_terminal_size((200, 24)).columns


def constants(rows: Sequence[ComparisonRow]) -> tuple[str, list[ComparisonRow]]:
    """Return the context that all rows share as text, and the rows without it.

    Selected or grouped rows may share settings that differ among all rows of the table.
    """
    shared = [key for key in rows[0].context if len({canonical(r.context[key]) for r in rows}) == 1]
    if not shared:
        return "", list(rows)
    words = ", ".join(f"{key}={text(rows[0].context[key])}" for key in shared)
    rest = [key for key in rows[0].context if key not in shared]
    return words, [replace(row, context={key: row.context[key] for key in rest}) for row in rows]
