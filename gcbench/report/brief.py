"""The default answer of `gcbench compare`: the rows of a table, in at most 25 lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice

from gcbench.report import compare, tables
from gcbench.report.compare import Asked, ComparisonRow
from gcbench.report.rendering import Column, Fitted, cell_width, counted, ends, fitted, sentence

Words = tuple[str, ...]
"""The name and the fields of a label."""
LONGEST = 30
"""Columns of a terminal beyond which a method's label is shortened to its first fields."""
MOST = 1000
"""Rows whose cells are made to see which columns a table needs."""
MARKS = {
    "†": "no common seeds: the difference of the means",
    "‡": "the uncompressed runs have other hyper-parameters",
    "§": "another number of steps than published",
    "no curve": "rows without evaluations; name the runs' folders or a .parquet file",
}
"""What the marks in cells mean."""
FIRST = ("to ", "published", "ours -", "rank", "bits up", "payload", "ratio up", "n")
"""Beginnings of the headings that follow the result and its difference, by importance."""


def render(rows: Sequence[ComparisonRow], asked: Asked, title: str, width: int) -> str:
    """Return the rows as a table of at most `asked.lines` lines and `width` columns.

    Rows are grouped by `asked.by`, or else by tier, which has the best row of each compressor.
    Where not all of them fit, those with the best results of each group are shown, the uncompressed
    ones among them, and the last line counts what is not shown.

    Raises:
        UsageError: an unknown setting, column or order.
    """
    rows = tables.in_order(rows, asked.sort)
    key = asked.by or ("tier" if any(row.tier is not None for row in rows) else None)
    groups = {"": rows} if key is None else compare.by(rows, key)
    if key is not None:
        groups = {name: _without(key, group) for name, group in groups.items()}
    shared, rows = tables.constants([row for group in groups.values() for row in group])
    left = iter(rows)
    groups = {name: list(islice(left, len(group))) for name, group in groups.items()}
    above = "\n".join(sentence(text, "table", width) for text in (title, shared) if text)
    lines = asked.lines - (len(above.splitlines()) + 1 if above else 0)
    head = _head(groups, key, asked, width)
    lines -= len(_below(rows, len(rows) - 1, head, width).splitlines()) + 1 + head.height
    if key == "tier" and not asked.sort:
        groups = {name: _one_per_method(group) for name, group in groups.items()}
    lines = max(lines, 1 + (key is not None))
    chosen = _chosen(groups, lines, key is not None, listed=bool(asked.sort))
    titles: dict[int, str] = {}
    shown: list[ComparisonRow] = []
    for name, group in chosen.items():
        if key is not None:
            titles[len(shown)] = name if key == "tier" else f"{key}={name}"
        shown += group
    table = _fit(shown, asked, width, lines + head.height, titles)
    below = _below(rows, len(shown), table, width)
    return "\n\n".join(filter(None, [above, table.text, below]))


def _below(rows: Sequence[ComparisonRow], shown: int, table: Fitted, width: int) -> str:
    """Return the footnotes of a table with `shown` of the rows, and what it leaves out."""
    hidden = [f"{len(rows) - shown} of {len(rows)} rows"] if shown < len(rows) else []
    columns = [*table.left_out, "other columns", "times and notes"]
    more = f"Not shown: {', '.join([*hidden, *columns])}. Add --details."
    notes = [*_notes(rows, table.text), more]
    return "\n".join(sentence(note, "table", width) for note in notes)


def _without(key: str, rows: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    """Return the rows without a setting in their context: the group's title has it."""
    return [
        replace(row, context={name: value for name, value in row.context.items() if name != key})
        for row in rows
    ]


def _head(
    groups: Mapping[str, Sequence[ComparisonRow]], key: str | None, asked: Asked, width: int
) -> Fitted:
    """Return a table of the rows that may be shown: its headings and the marks in its cells."""
    if sum(map(len, groups.values())) > MOST:
        best = _chosen(groups, MOST, key is not None, listed=bool(asked.sort))
        groups = {name: best.get(name, []) for name in groups}
    rows = [row for group in groups.values() for row in group]
    return _fit(rows, asked, width, asked.lines + len(rows))


def _fit(
    rows: Sequence[ComparisonRow],
    asked: Asked,
    width: int,
    lines: int,
    titles: Mapping[int, str] | None = None,
) -> Fitted:
    groups = tables.laid_out(rows, asked)
    which = groups["which"]
    place = len(rows[0].context)
    labels = short_labels(rows)
    which[place] = which[place]._replace(cells=labels)
    names = list(zip(*(column.cells for column in which[: place + 1]), strict=True))
    choices: list[Column] = []
    if len(set(names)) == len(names):
        choices = tables.differing(which[place + 1 :])[0]
        del which[place + 1 :]
    rest = [column for name, columns in groups.items() if name != "which" for column in columns]
    if not asked.columns:
        rest = _by_importance(rest, choices)
    return fitted(which, rest, width, lines, titles)


def _by_importance(columns: Sequence[Column], choices: Sequence[Column]) -> list[Column]:
    """Return the result, its difference from the uncompressed runs, and what `FIRST` names.

    `choices`: the methods' settings. The rate, which every method tunes, comes last.
    """
    names = {" ".join(column.heading.split()): column for column in columns}
    result = [column for column in columns if column.heading in (*tables.METRICS, "vs none")]
    first = [column for word in FIRST for name, column in names.items() if name.startswith(word)]
    rates = [column for column in choices if column.heading == "lr"]
    settings = [column for column in choices if column.heading != "lr"]
    return [*result, *settings, *first, *rates]


def short_labels(rows: Sequence[ComparisonRow]) -> list[str]:
    """Return the methods' labels, those of a method with fewer fields where one is long.

    These are the first distinct field of each, or the fields that differ from most rows of the
    method, whichever identifies the rows.
    """
    labels = [row.method for row in rows]
    if max(map(cell_width, labels)) <= LONGEST:
        return labels
    parts = [row.words for row in rows]
    for shorter in (fewest_fields(parts), _unusual(parts)):
        places = [(label, row.place) for label, row in zip(shorter, rows, strict=True)]
        if len(set(places)) == len(places):
            return shorter
    return labels


def _unusual(labels: Sequence[Words]) -> list[str]:
    """Return the methods' names with the fields that at most half of the labels of a name have."""
    namesakes = Counter(name for name, *_ in labels)
    having = _having(labels)
    shorter = []
    for name, *fields in labels:
        rare = [word for word in fields if 2 * having[name, word] <= namesakes[name]]
        shorter.append(" ".join([name, *rare]))
    return shorter


def fewest_fields(labels: Sequence[Words]) -> list[str]:
    """Return the methods' names, each with the first field that no other label of its name has.

    A name alone where all labels of that name are equal; a whole label without such a field.
    `labels`: each is a name, which may have spaces, and its fields.
    """
    namesakes = Counter(name for name, *_ in labels)
    copies = Counter(labels)
    having = _having(labels)
    shorter = []
    for label in labels:
        name, *fields = label
        distinct = (word for word in fields if having[name, word] == copies[label])
        if namesakes[name] == copies[label]:
            shorter.append(name)
        else:
            field = next(distinct, None)
            shorter.append(f"{name} {field}" if field else " ".join(label))
    return shorter


def _having(labels: Sequence[Words]) -> Counter[tuple[str, str]]:
    """Return how many labels of a name have a word."""
    return Counter((words[0], word) for words in labels for word in {*words})


def _chosen(
    groups: Mapping[str, Sequence[ComparisonRow]], lines: int, titled: bool, listed: bool
) -> dict[str, list[ComparisonRow]]:
    """Return the rows of each group that `lines` lines hold: in turn the best of each group.

    The best are those with the best mean, after the uncompressed ones; with `listed` the first.
    """
    ordered = {
        name: list(group) if listed else _best_first(group) for name, group in groups.items()
    }
    taken = dict.fromkeys(groups, 0)
    for place in range(max(map(len, groups.values()))):
        if lines < 1:
            break
        for name, group in ordered.items():
            cost = 1 + (titled and place == 0)
            if taken[name] == place < len(group) and cost <= lines:
                lines -= cost
                taken[name] += 1
    chosen: dict[str, list[ComparisonRow]] = {}
    for name, members in groups.items():
        best = list(ordered[name][: taken[name]])
        # A table without tiers keeps its order, so that settings stay beside each other.
        if titled and not listed:
            best.sort(key=lambda row: row.behind)
        else:
            taken_rows = set(map(id, best))
            best = [row for row in members if id(row) in taken_rows]
        if best:
            chosen[name] = best
    return chosen


def _one_per_method(rows: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    """Return the best row of each compressor."""
    best: dict[str, ComparisonRow] = {}
    for row in _best_first(rows):
        best.setdefault(row.first.compressor_name, row)
    return list(best.values())


def _best_first(rows: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    return sorted(rows, key=lambda row: (not row.is_baseline, row.behind))


def _notes(rows: Sequence[ComparisonRow], table: str) -> list[str]:
    """Return what a reader must know of the numbers in the text of a table, a line each."""
    counts = [len(row.values) for row in rows]
    spread = "mean ± sd of " if max(counts) > 1 else ""
    column = "vs none" in table
    compared = column and any(row.difference is not None for row in rows)
    versus = "; vs none: paired difference [95 % interval]" if compared else ""
    notes = [f"{spread}n = {ends(counts)} seed{'s' * (max(counts) != 1)}{versus}."]
    alone = sum(not row.is_baseline and row.difference is None for row in rows if row.values)
    if alone and column:
        notes.append(f"{counted(alone, 'row')} without uncompressed runs of equal budget.")
    notes += [f"{mark}: {text}." for mark, text in MARKS.items() if mark in table]
    if failed := sum(len(row.failed) for row in rows):
        notes.append(f"{counted(failed, 'run')} diverged; means leave them out.")
    if untuned := sum(row.rate in ("untuned", "open") for row in rows):
        notes.append(f"{counted(untuned, 'row')} without the learning rate that trials choose.")
    if note := tables.open_note(rows):
        notes.append(note)
    if changed := sum(bool(row.other_rule) for row in rows):
        notes.append(
            f"{counted(changed, 'row')} applied the update in another way than the source."
        )
    return notes
