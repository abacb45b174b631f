"""The summary of a report: what was run, the front, what pays, and what was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gcbench.report import tables
from gcbench.report.analysis import Analysis
from gcbench.report.compare import ComparisonRow
from gcbench.report.rendering import Column, ends, number
from gcbench.report.sections import Compared, Section, Sheet, distinct, few
from gcbench.stats.ranks import LEAST_SEEDS

PAYS = ("advice", "bandwidth", "fft-breakeven", "prediction")
"""Kinds of analyses whose conclusions say where compression pays."""
SENTENCES = 2
"""How many conclusions of an analysis the summary shows: the first ones."""


def sections(
    chosen: Sequence[Compared],
    short: Sequence[Compared],
    page: Sequence[Section],
    analyses: Mapping[str, Analysis],
    labels: Mapping[str, str],
) -> list[Section]:
    """Return the sections of the summary.

    `made` are the sections of the page in its order: first one for each of `chosen`, then one for
    each of `analyses`, sorted by name.
    """
    accuracy = dict(zip(map(id, chosen), page, strict=False))
    result = []
    if chosen or short:
        result.append(_what(chosen, short, accuracy))
    if front := _front(chosen, accuracy):
        result.append(front)
    ordered = sorted(analyses.items())
    parts = page[len(chosen) : len(chosen) + len(analyses)]
    pays: list[tuple[str, Section | None]] = []
    others: list[tuple[str, Section | None]] = []
    for (name, analysis), section in zip(ordered, parts, strict=True):
        mine = pays if analysis.kind in PAYS else others
        sentences = [*analysis.answer, *analysis.conclusions][:SENTENCES]
        mine += [(f"{labels[name]}: {sentence}", section) for sentence in sentences]
    if pays:
        result.append(Section("What pays", "summary", items=pays))
    sentences_of = [(sentence, accuracy[id(one)]) for one in chosen for sentence in findings(one)]
    if sentences_of or others:
        result.append(Section("Findings", "summary", items=[*sentences_of, *others]))
    return result


def _what(
    chosen: Sequence[Compared], short: Sequence[Compared], accuracy: Mapping[int, Section]
) -> Section:
    """Return what was run: a row for each section of runs."""

    def values(one: Compared, key: str) -> str:
        return few(distinct(one, key))

    def methods(one: Compared) -> str:
        return str(len({row.first.compressor_name for row in one.rows}))

    def seeds(one: Compared) -> str:
        return ends(len(row.runs) for row in one.rows)

    columns = [
        Column("what", [one.title for one in chosen]),
        Column("methods", [methods(one) for one in chosen]),
        Column("seeds\na row", [seeds(one) for one in chosen]),
        Column("workers", [values(one, "workers") for one in chosen]),
        Column("steps", [values(one, "steps") for one in chosen]),
        Column("runs", [str(len(one.runs)) for one in chosen]),
    ]
    links = [accuracy[id(one)] for one in chosen]
    tasks = [one.task for one in chosen]
    sheets = [Sheet("Compared", columns, 1, links=links, tasks=tasks)] if chosen else []
    lead = []
    if short:
        count = sum(len(one.runs) for one in short)
        lead = [f"{count} short runs are shown for their times alone, at the end."]
    return Section("What was run", "summary", lead, sheets=sheets)


def front(rows: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    """Return the front of the budget that has most rows, then most steps; most bytes first.

    Of rows with equal results, such as those of two engines, the first stands for all.
    """
    largest = tables.largest_budget(rows)
    distinct: dict[tuple[object, ...], ComparisonRow] = {}
    for row in largest if len(largest) > 1 else ():
        if row.on_front:
            result = (row.first.compressor_name, row.mean, row.payload)
            distinct.setdefault(result, row)
    return sorted(distinct.values(), key=lambda row: -row.payload)


def _front(chosen: Sequence[Compared], accuracy: Mapping[int, Section]) -> Section | None:
    """Return the section of the fronts, a front for each of `chosen`; None without any row."""
    fronts = [(one, front(one.rows)) for one in chosen]
    shown = [(one, row) for one, rows in fronts for row in tables.best(rows, tables.MOST_ROWS)]
    if not shown:
        return None
    rows = [row for _, row in shown]

    def fewer(row: ComparisonRow) -> str:
        bits = row.payload_ratio_up, row.payload_ratio_down
        both = [32 / ratio for ratio in bits if ratio]
        return f"{64 / sum(both):.3g}x" if len(both) == 2 else "-"

    settings = [row.place for row in rows]
    columns = [
        Column("method", [row.method for row in rows]),
        Column("accuracy %\nor loss", [tables.quality(row, mixed=True) for row in rows]),
        Column("vs none", [tables.versus(row) for row in rows]),
        Column("fewer\nbytes", list(map(fewer, rows)), "high"),
        Column("n", [str(len(row.values)) for row in rows], "high"),
        Column("of", [f"{one.title}" for one, _ in shown]),
        Column("settings", settings),
    ]
    if not any(settings):
        del columns[-1]
    sheet = Sheet(
        "Nothing is better for fewer bytes",
        columns,
        1,
        notes=[
            f"{tables.FRONT} Payload bytes are up and down together. Of several budgets this is "
            "the one with most rows; the others are marked in the tables below. vs none: "
            "difference from the uncompressed runs with its 95 % interval.",
            *(
                f"{one.title}: {tables.MOST_ROWS} of {len(rows):,} rows of the front are shown."
                for one, rows in fronts
                if len(rows) > tables.MOST_ROWS
            ),
        ],
        methods=[row.first.compressor_name for row in rows],
        tiers=[row.tier or "" for row in rows],
        tasks=[one.task for one, _ in shown],
        places=[f"{one.task} {place}" for (one, _), place in zip(shown, settings, strict=True)],
        links=[accuracy[id(one)] for one, _ in shown],
        folds=False,
    )
    return Section("The front", "summary", sheets=[sheet])


def findings(one: Compared) -> list[str]:
    """Return in sentences what the rows of a task or suite show.

    Nothing is called worse without an interval of paired differences.
    """
    sentences = []
    rivals = [row for row in one.rows if not row.is_baseline]
    failed = [row.method for row in one.rows if row.failed]
    if failed:
        sentences.append(
            f"{one.title}: runs diverged of {tables.listed(list(dict.fromkeys(failed)))}."
        )
    paired = [row for row in rivals if row.interval is not None]
    if not paired:
        if rivals:
            sentences.append(
                f"{one.title}: no method has two seeds in common with `none`, so that no "
                "difference has an interval; what is seen is what breaks."
            )
        return sentences
    least = min(row.pairs for row in paired)
    few = f" ({least} seeds: wide intervals)" if least < LEAST_SEEDS else ""
    worse = [row for row in paired if row.below_baseline]
    sentences.append(
        f"{one.title}: rows with an interval: {len(paired)}; worse than `none` by it: "
        f"{len(worse)}; better: {sum(row.above_baseline for row in paired)}{few}."
    )
    alike = [row for row in paired if not row.below_baseline and not row.failed]
    if alike:
        fewest = min(alike, key=lambda row: row.payload)
        size = number(fewest.payload)
        sentences.append(
            f"{one.title}: fewest bytes among the rows that are not worse by their interval: "
            f"{fewest.method}{f' ({fewest.place})' if fewest.place else ''}, {size} MB a step, "
            f"{tables.versus(fewest)}. Not shown to be worse is not shown to be equal."
        )
    return sentences
