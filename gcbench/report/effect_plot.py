"""The picture of a setting: the result of each method at every value of it."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from gcbench.core.errors import UsageError
from gcbench.core.values import canonical
from gcbench.report import compare, figures
from gcbench.report.compare import ComparisonRow
from gcbench.results import sanitize

OF_TRIALS = frozenset({"lr", "test", "eval_every"})
"""Settings of a trial that are not its method's."""
MOST = 60
"""Lines of a picture."""


class Line(NamedTuple):
    """A method with all its settings but one."""

    label: str
    rows: Mapping[str, ComparisonRow]
    """The row of each value of the setting; of trials the best."""

    @property
    def is_baseline(self) -> bool:
        """Whether its runs are uncompressed."""
        return next(iter(self.rows.values())).is_baseline


def draw(rows: Sequence[ComparisonRow], key: str, title: str, path: Path) -> None:
    """Write the picture to `path`: PNG, SVG or PDF by its ending.

    Each line is a method, with a mark for each value of the setting `key`; the x axis has the
    accuracy or loss. If there are trials, a mark is the best of their rates, on validation examples
    and by the first seed; else the mean over seeds on the test split, with its 95 % interval. A
    method with one value is drawn if others of its compressor have several. Rates that a suite's
    trials chose do not divide a method. Of many lines the first `MOST` are drawn.

    Raises:
        UsageError: another ending, no such setting, rows of several tasks, or no method with two
            values.
        GcbenchError: `path` cannot be written.
    """
    path = figures.check(path)
    trials = any(row.runs[0].is_trial for row in rows)
    judged = [row for row in rows if row.values and row.runs[0].is_trial == trials]
    if len({(row.first.task, row.metric) for row in judged}) > 1:
        raise UsageError("rows of several tasks cannot share a picture; choose with --where")
    lines = _lines(judged, key, trials)
    count = f"{MOST} of {len(lines):,} lines, " if len(lines) > MOST else ""
    lines = lines[:MOST]
    if not lines:
        raise UsageError(f"--by {key} --plot: expected a method with results at two values of it")
    accuracy = judged[0].metric == "accuracy"
    scale = 100 if accuracy else 1
    values = sorted({value for line in lines for value in line.rows}, key=_size)
    styles = figures.styles(f"{key}={value}" for value in values)
    with figures.canvas(11, 1.8 + 0.33 * len(lines)) as figure:
        axes = figure.subplots()
        for place, line in enumerate(lines):
            middles = [scale * _result(row, trials) for row in line.rows.values()]
            axes.plot(middles, [place] * len(middles), color="0.75", lw=2, zorder=1)
            if line.is_baseline:
                axes.axvline((max if accuracy else min)(middles), color="0.5", ls=":", zorder=0)
            for (value, row), middle in zip(line.rows.items(), middles, strict=True):
                look = {**styles[f"{key}={value}"], "linestyle": "", "ms": 8, "mec": "white"}
                spread = 0.0 if trials else scale * row.half_interval
                axes.errorbar(middle, place, xerr=spread or None, capsize=3, **look)
        for label, style in styles.items():
            axes.plot([], [], **{**style, "linestyle": ""}, label=sanitize.label(label))
        axes.set_yticks(range(len(lines)), [sanitize.label(line.label) for line in lines])
        axes.set_ylim(len(lines) - 0.4, -0.6)
        split = "validation" if trials else "test"
        axes.set_xlabel(f"{split} accuracy (%)" if accuracy else f"{split} loss")
        seed = min(judged[0].values)
        what = f"best rate of the trials, seed {seed}" if trials else "mean and 95 % interval"
        dotted = "; dotted: fp32" if lines[0].is_baseline else ""
        figure.suptitle(f"{sanitize.label(title) or key}\n{count}{what}{dotted}", x=0.01, ha="left")
        figure.legend(frameon=False, fontsize="small", loc="outside lower center", ncols=4)
        figures.save(figure, path)


def _size(value: str) -> tuple[float, str]:
    """Return a sort key for values as text: numbers by size, then words."""
    try:
        return float(value), ""
    except ValueError:
        return math.inf, value


def _result(row: ComparisonRow, trials: bool) -> float:
    """Return the mean over seeds; of a trial the first seed, because few have a second one."""
    assert row.mean is not None, "a row with values has a mean"
    return row.values[min(row.values)] if trials else row.mean


def _lines(rows: Sequence[ComparisonRow], key: str, trials: bool) -> list[Line]:
    """Return the lines of the picture: fp32 first, then compressors by their best result."""

    def behind(row: ComparisonRow) -> float:
        return (-1 if row.metric == "accuracy" else 1) * _result(row, trials)

    def rank(line: Line) -> float:
        return min(map(behind, line.rows.values()))

    left_out = {"seed", key} | (OF_TRIALS if trials else set())
    if all(row.rate in ("tuned", "edge") for row in rows):
        left_out.add("lr")  # the trials of each value chose it
    methods: dict[str, dict[str, dict[str, ComparisonRow]]] = {}
    """Compressor -> its other settings -> value -> row."""
    for value, group in compare.by(rows, key).items():
        for row in sorted(group, key=behind):
            settings = compare.settings_of(row.runs[0])
            rest = canonical({k: v for k, v in settings.items() if k not in left_out})
            of_compressor = methods.setdefault(row.first.compressor_name, {})
            of_compressor.setdefault(rest, {}).setdefault(value, row)
    compressors = []
    for of_compressor in methods.values():
        alternatives = [*of_compressor.values()]
        if any(len(one) > 1 for one in alternatives):
            labels = _labels(alternatives, left_out)
            compressors.append(sorted(map(Line, labels, alternatives), key=rank))
    compressors.sort(key=lambda lines: (not lines[0].is_baseline, rank(lines[0])))
    return [line for lines in compressors for line in lines]


def _labels(
    alternatives: Sequence[Mapping[str, ComparisonRow]], left_out: Container[str]
) -> list[str]:
    """Return the name of each alternative of a compressor, with the first words that tell all."""
    firsts = [next(iter(rows.values())) for rows in alternatives]
    labels = [f"{row.method} {row.place}".split() for row in firsts]
    shown: list[str] = []

    def named(shown: Sequence[str]) -> list[str]:
        return [
            " ".join([words[0], *(word for word in words[1:] if _name(word) in shown)])
            for words in labels
        ]

    for name in dict.fromkeys(_name(word) for words in labels for word in words[1:]):
        if name not in left_out and len({*named([*shown, name])}) > len({*named(shown)}):
            shown.append(name)
    return named(shown)


def _name(word: str) -> str:
    """Return the setting of a word of a label."""
    return word.strip("[]").partition("=")[0]
