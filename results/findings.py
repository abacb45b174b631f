"""Print the findings, or a text for another page, from claims.yaml and the rows.

python results/findings.py [--readme | NAME]

--readme: the five sentences that README quotes; NAME: the text of that name.

A value of claims.yaml is either a row of a suite (`suite`, `where`), with its difference from fp32;
from another row with `minus`; from another row's difference from fp32, at another budget, with
`beyond`; or a cell of an analysis' table (`file`, `table`, `columns`).
Square brackets are 95 % intervals, by the rules of `gcbench compare`. A measurement without an
interval decides no claim; what is counted or computed, such as bytes, is `exact`.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from gcbench.core.errors import UsageError
from gcbench.core.values import text
from gcbench.report import compare, suite_match
from gcbench.results import reader
from gcbench.results.suites import per_suite
from gcbench.stats.intervals import half_interval
from gcbench.training import suites

RESULTS = Path(__file__).parent
WIDTH = 100
HOLDS, OPEN, FAILS = VERDICTS = ("holds", "cannot tell", "does not hold")
"""From the best to the worst."""


class Measured(NamedTuple):
    """A value with its 95 % limits, NaN where it has none, over n seeds or cases."""

    value: float
    low: float = math.nan
    high: float = math.nan
    n: int = 1
    digits: int | None = None
    """Decimals to print; None: three significant digits."""
    exact: bool = False
    """Whether the value is counted or computed, and so has no interval."""
    diverged: int = 0
    """Number of further seeds, whose runs diverged."""

    def __str__(self) -> str:
        """Return the value, and its limits where it has any: -1.48 [-2.00, -0.96]."""
        if math.isnan(self.low) or self.low == self.high:
            return self._text(self.value)
        return f"{self._text(self.value)} [{self._text(self.low)}, {self._text(self.high)}]"

    def _text(self, value: float) -> str:
        return f"{value:.3g}" if self.digits is None else f"{value:.{self.digits}f}"


def verdict(measured: Measured, at_least: float = -math.inf, at_most: float = math.inf) -> str:
    """Return the verdict on a claim that is true from `at_least` to `at_most`, both included.

    A measurement without limits, of a single seed, decides nothing. One with seeds that diverged
    fails.
    """
    if measured.diverged:
        return FAILS
    low, high = measured.low, measured.high
    if measured.exact:
        low = high = measured.value
    if low >= at_least and high <= at_most:
        return HOLDS
    return FAILS if high < at_least or low > at_most else OPEN


# ---- values --------------------------------------------------------------------------------------


@cache
def _runs() -> dict[str, list[reader.Run]]:
    """Return the committed runs by suite, of the versions that this gcbench has."""
    faults: reader.Faults = []
    runs = reader.load(sorted((RESULTS / "reference").glob("*.parquet")), None, faults)
    if faults:
        raise UsageError(f"results/reference: {faults[0]}")
    return per_suite(runs, {})


@cache
def _rows(suite: str) -> list[compare.ComparisonRow]:
    """Return the rows of a suite, from all committed files, as `gcbench compare` makes them."""
    mine = _runs().get(suite, [])
    if not mine:
        return []
    labelled = [run for name, runs in _runs().items() if name for run in runs]
    beside = suite_match.beside(suites.load(suite), labelled)
    rows = compare.rows(beside.runs, None, beside.suite.choices, (), beside.best)
    return beside.rows(rows, every=True)


def select(
    rows: Sequence[compare.ComparisonRow], where: Mapping[str, Any]
) -> list[compare.ComparisonRow]:
    """Return the rows whose settings are those of `where`.

    Raises:
        UsageError: there is none.
    """
    result = list(rows)
    for key, wanted in where.items():
        if key != "seed":
            result = [row for row in result if _setting(row, key) == text(wanted)]
    if not result:
        raise UsageError(f"no row has all of {text(dict(where))}")
    return result


def _setting(row: compare.ComparisonRow, key: str) -> str:
    return text(compare.settings_of(row.runs[0]).get(key))


def _from_baseline(row: compare.ComparisonRow, scale: float, digits: int) -> Measured:
    """Return the mean paired difference from the row's baseline."""
    limits = [row.difference, row.difference_low, row.difference_high]
    value, low, high = (math.nan if one is None else scale * one for one in limits)
    return Measured(value, low, high, row.pairs, digits, diverged=len(row.failed))


def _paired(
    row: compare.ComparisonRow, others: Sequence[Mapping[int, float]], scale: float, digits: int
) -> Measured:
    """Return the mean over common seeds of a row's value less the sum of the others' values."""
    failed = len(row.failed)
    seeds = [seed for seed in row.values if all(seed in other for other in others)]
    pairs = [row.values[seed] - sum(other[seed] for other in others) for seed in seeds]
    if failed and len(pairs) < 2:
        return Measured(math.nan, n=len(pairs), diverged=failed)
    if len(pairs) < 2:
        raise UsageError(f"{row.method}: fewer than two seeds in common with what it is paired to")
    mean, sd = statistics.fmean(pairs), statistics.stdev(pairs)
    examples = math.nan if row.examples is None else row.examples
    half = float(half_interval(sd, len(pairs), mean, examples))
    return _around(mean, half, scale, len(pairs), digits)._replace(diverged=failed)


def _baseline(
    row: compare.ComparisonRow, rows: Sequence[compare.ComparisonRow]
) -> dict[int, float]:
    """Return the values, by seed, of fp32 at the budget of a row.

    Raises:
        UsageError: not one row is fp32's.
    """
    values = [one.values for one in rows if one.is_baseline and one.context == row.context]
    if len(values) != 1:
        raise UsageError(f"{row.method} {row.place}: {len(values)} rows of fp32, not 1")
    return dict(values[0])


def _around(mean: float, half: float, scale: float, n: int, digits: int) -> Measured:
    return Measured(scale * mean, scale * (mean - half), scale * (mean + half), n, digits)


def of_rows(spec: Mapping[str, Any]) -> list[Measured]:
    """Return the values of rows of a suite: points of accuracy, nats of loss, or ratios.

    It is one value, or with `several` one for each compressed row; none if no row of the suite's
    version is stored.

    Raises:
        UsageError: no row is what `where` selects, or several are.
    """
    rows = _rows(spec["suite"])
    if not rows:
        return []
    result = select(rows, spec["where"])
    scale, digits = (100.0, 2) if result[0].metric == "accuracy" else (1.0, 3)
    if spec.get("several"):
        return [_from_baseline(row, scale, digits) for row in result if not row.is_baseline]
    if len(result) > 1:
        names = "; ".join(row.method for row in result)
        raise UsageError(f"{text(dict(spec['where']))} selects {len(result)} rows: {names}")
    others = _others(spec, result[0], rows)
    return [_of_row(spec, result[0], others, scale, digits)]


def _others(
    spec: Mapping[str, Any], row: compare.ComparisonRow, rows: Sequence[compare.ComparisonRow]
) -> list[Mapping[int, float]]:
    """Return what to subtract from a row's values, by seed; nothing: its baseline."""
    if "minus" in spec:
        (other,) = select(rows, spec["minus"])
        return [other.values]
    if "beyond" in spec:
        (other,) = select(rows, spec["beyond"])
        before = _baseline(other, rows)
        change = {
            seed: other.values[seed] - before[seed] for seed in other.values if seed in before
        }
        return [_baseline(row, rows), change]
    return []


def _of_row(
    spec: Mapping[str, Any],
    row: compare.ComparisonRow,
    others: Sequence[Mapping[int, float]],
    scale: float,
    digits: int,
) -> Measured:
    """Return the quantity of a row that a value of claims.yaml stands for."""
    match spec.get("quantity", "difference"):
        case "difference":
            if others:
                return _paired(row, others, scale, digits)
            return _from_baseline(row, scale, digits)
        case "ratio_up":
            return Measured(row.payload_ratio_up or math.nan, n=row.n, exact=True)
        case "ratio_down":
            return Measured(row.payload_ratio_down or math.nan, n=row.n, exact=True)
        case "mean":
            wanted = spec["where"].get("seed")
            values = [v for seed, v in row.values.items() if wanted in (None, seed)]
            mean = statistics.fmean(values)
            if len(values) < 2:
                return Measured(scale * mean, digits=digits)
            half = float(half_interval(statistics.stdev(values), len(values), mean, math.nan))
            failed = len(row.failed)
            return _around(mean, half, scale, row.n, digits)._replace(diverged=failed)
        case other_quantity:
            raise UsageError(f"quantity {other_quantity!r}: difference, ratio_up, ratio_down, mean")


def of_table(spec: Mapping[str, Any]) -> Measured:
    """Return a cell of an analysis: the columns of the value, its limits and its n.

    Raises:
        UsageError: not one row is selected.
    """
    document = json.loads((RESULTS / spec["file"]).read_text(encoding="utf-8"))
    (rows,) = [one["rows"] for one in document["tables"] if one["name"] == spec["table"]]
    for key, words in spec["where"].items():
        exact = [row for row in rows if str(row[key]) == words]
        rows = exact or [row for row in rows if words in str(row[key])]
    if len(rows) != 1:
        raise UsageError(f"{spec['file']}: {spec['where']} selects {len(rows)} rows, not 1")
    cells = (rows[0][column] for column in spec["columns"])
    return Measured(*cells)._replace(exact=spec.get("exact", False), digits=spec.get("digits"))


def values(spec: Mapping[str, Any]) -> list[Measured]:
    """Return what a value of claims.yaml stands for."""
    return of_rows(spec) if "suite" in spec else [of_table(spec)]


# ---- sentences -----------------------------------------------------------------------------------


def _filled(text: str, entry: Mapping[str, Any]) -> str:
    """Return a text with the values of its entry."""
    numbers = {}
    for name, spec in entry.get("values", {}).items():
        (one,) = values(spec)
        numbers[name] = str(one)
    return " ".join(text.format(**numbers).split())


def judged(entry: Mapping[str, Any]) -> str:
    """Return the table row of a claim, with its verdict."""
    region = entry["holds_if"]

    def badness(one: Measured) -> tuple[int, int, float]:
        beyond = -one.low if "at_least" in region else one.high
        return VERDICTS.index(verdict(one, **region)), one.diverged, beyond

    measured = max(values(entry["value"]), key=badness, default=None)
    if measured is None:
        here, says = f"no rows of {suites.load(entry['value']['suite']).label()}", f"**{OPEN}**"
    else:
        count = f", n = {measured.n}" if measured.n > 1 else ""
        here = f"{measured} {entry['unit']}{count}"
        if measured.diverged:
            here = f"{measured.diverged} of {measured.n + measured.diverged} seeds diverged"
        says = f"**{verdict(measured, **region)}** {_filled(entry['at'], entry)}"
    return f"| {entry['source']} | {entry['claim']} | {here} | {says} |"


def _wrapped(sentence: str, mark: str) -> str:
    indent = " " * len(mark)
    return textwrap.fill(
        sentence, WIDTH, initial_indent=mark, subsequent_indent=indent, break_long_words=False
    )


def page(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the findings and the table of claims."""
    yield from (_wrapped(_filled(entry["text"], entry), "* ") for entry in document["findings"])
    yield "\n| source | claim, in our words | here | verdict |\n| :- | :- | :- | :- |"
    yield from map(judged, document["claims"])


def main() -> None:
    """Print what the command line asks for."""
    document = yaml.safe_load((RESULTS / "claims.yaml").read_text(encoding="utf-8"))
    if sys.argv[1:] == ["--readme"]:
        quoted = (entry for entry in document["findings"] if entry.get("readme"))
        print("\n".join(_wrapped(_filled(e["text"], e), f"{i}. ") for i, e in enumerate(quoted, 1)))
    elif not sys.argv[1:]:
        print("\n".join(page(document)))
    elif len(sys.argv) == 2 and (entry := document["texts"].get(sys.argv[1])):
        print(_wrapped(_filled(entry["text"], entry), ""))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
