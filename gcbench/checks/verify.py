"""`gcbench verify`: the list of declared properties, and the search for inputs that break one.

Each configuration of a method gets the checks of `gcbench.studies.conformance`, which depend on
what it declares, and a search (`gcbench.checks.adversary`) on every function of the contract.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gcbench.checks import adversary, against, memories
from gcbench.checks.adversary import Effort, Search
from gcbench.checks.calls import FUNCTIONS, Covered
from gcbench.core import memory
from gcbench.core.compressor import Compressor
from gcbench.studies import conformance


class Verified(NamedTuple):
    """The result for one configuration."""

    configuration: str
    rows: list[dict[str, Any]]
    """One row per check, and one per function that the search called."""
    covered: dict[str, Covered]
    """The largest inputs that each function received in the search."""
    inputs: int
    seconds: float

    def count(self, verdict: str) -> int:
        """Return how many rows have this verdict."""
        return sum(row["verdict"] == verdict for row in self.rows)


def verify(
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    processes: bool = False,
    carried: str = "",
    reference: Path | None = None,
) -> Iterator[Verified]:
    """Yield the result for one configuration, or for each declared variant.

    With `processes` three processes are started first, and their exchanges compared with simulated
    ones. `carried`: the memory to check beside the method; empty: the method's own. `reference`: a
    file to compare the first configuration with, see `gcbench.checks.against`.

    Raises:
        UsageError: the memory or the reference does not exist, or does not fit the method.
    """
    known = against.load(reference) if reference else None
    tables = conformance.verify(name, options, processes=processes)
    for number, (text, method) in enumerate(conformance.chosen(name, options)):
        start = time.perf_counter()
        rows = list(next(tables))
        search = searched(method, adversary.effort_for(method, first=not number))
        found = list(search_rows(search))
        if not number:
            found += [row._asdict() for row in _memory_rows(method, carried)]
            found += [row._asdict() for row in against.compare(method, known)] if known else []
        rows += [{"configuration": text or "default", **row} for row in found]
        seconds = time.perf_counter() - start
        yield Verified(text or "default", rows, search.covered, search.inputs, seconds)


def _memory_rows(method: Compressor, carried: str) -> Sequence[conformance.Outcome]:
    """Return the rows of the memory beside a method: the one given, or the method's own."""
    name = carried or method.memory
    options = method.memory_options if name == method.memory else {}
    memory.check_legal(name, method)
    return memories.verify(memory.make(name, options), method)


def searched(method: Compressor, effort: Effort) -> Search:
    """Return a finished search on one configuration."""
    search = Search(method, effort)
    search.run()
    return search


def search_rows(search: Search) -> Iterator[dict[str, Any]]:
    """Yield one row per function that was called, and one per function that failed."""
    failed = {finding.function: finding for finding in search.findings}
    for function in FUNCTIONS:
        covered = search.covered.get(function)
        if covered is not None and function not in failed:
            yield _row(function, reach(covered), "holds", "")
    for finding in search.findings:
        yield _row(finding.function, finding.fault, "fails", finding.case)


def _row(function: str, measured: str, verdict: str, note: str) -> dict[str, Any]:
    outcome = conformance.Outcome(f"search: {function}", measured, "its definition", verdict, note)
    return outcome._asdict()


def reach(covered: Covered) -> str:
    """Return the largest inputs of a function as text."""
    return (
        f"{covered.elements:,} elements, {covered.segments:,} segments, {covered.workers:,} "
        f"workers, step {covered.step:,}, scales 2^{covered.low} to 2^{covered.high}"
    )


def together(results: list[Verified]) -> list[dict[str, Any]]:
    """Return one row per function: what was covered in all configurations together."""
    total: dict[str, Covered] = {}
    for result in results:
        for function, covered in result.covered.items():
            total.setdefault(function, Covered()).add(covered)
    return [total[function].as_row(function) for function in FUNCTIONS if function in total]
