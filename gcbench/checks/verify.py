"""`gcbench verify`: the list of declared properties, and the search for inputs that break one.

Each configuration of a method gets the checks of `gcbench.checks.properties`, which depend on what
it declares, and a search (`gcbench.checks.adversary`) on every function of the contract.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gcbench.checks import adversary, against, memories, properties
from gcbench.checks.adversary import Search, process_state
from gcbench.checks.calls import FUNCTIONS, Covered
from gcbench.checks.cases import Effort, effort_for
from gcbench.checks.outcome import Outcome
from gcbench.checks.processes import carried_by, compared, digests, in_processes
from gcbench.core import memory, rule
from gcbench.core.compressor import Compressor


class Verified(NamedTuple):
    """The result for one configuration."""

    configuration: str
    rows: list[dict[str, Any]]
    """One row per check, and one per function that the search called."""
    covered: dict[str, Covered]
    """The largest inputs that each function received in the search."""
    inputs: int
    seconds: float
    left_out: int
    """Inputs of the search that were left out, because one like them took long."""

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
    configurations = properties.chosen(name, options)
    if carried:
        method = configurations[0][1]
        memory.check_legal(carried, method)
        # Any number of fp32 steps but 0: a run sets it, and it is not checked here.
        rule.check_legal(method.rule, carried_by(method, carried), 1, method)
    expected = against.load(reference) if reference else None
    there: list[dict[str, str]] = []
    if processes:
        variants = [options] if options else properties.variants(name)
        there = in_processes([(name, dict(each)) for each in variants], carried)
    for number, (text, method) in enumerate(configurations):
        start, before = time.perf_counter(), process_state()
        rows = listed(method)
        if there:
            with threads_kept():
                rows.append(compared(digests(method, carried=carried), there[number]))
        search = searched(method, effort_for(method, first=not number), before)
        rows += search_rows(search)
        if not number:
            rows += _memory_rows(method, carried)
            rows += against.compare(method, expected) if expected else []
        table = [{"configuration": text or "default", **row._asdict()} for row in rows]
        seconds = time.perf_counter() - start
        counts = search.inputs, seconds, search.left_out
        yield Verified(text or "default", table, search.covered, *counts)


def listed(method: Compressor) -> list[Outcome]:
    """Return one row per property of the list."""
    with threads_kept():
        return [properties.run(method, check) for check in properties.CHECKS]


@contextmanager
def threads_kept() -> Iterator[None]:
    """Restore the number of threads at the end: a simulated world sets it."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _memory_rows(method: Compressor, carried: str) -> Sequence[Outcome]:
    """Return the rows of the memory beside a method: the one given, or the method's own."""
    before = adversary.process_state()
    with threads_kept():
        rows = memories.verify(carried_by(method, carried), method)
    fault = ", ".join(adversary.changed_since(before))
    measured, verdict = (f"changes {fault}", "fails") if fault else ("0 faults", "holds")
    return [*rows, Outcome("memory: process", measured, "0 faults", verdict)]


def searched(method: Compressor, effort: Effort, before: Mapping[str, Any]) -> Search:
    """Return a finished search on one configuration; `before`: see `Search`."""
    search = Search(method, effort, before=before)
    search.run()
    return search


def search_rows(search: Search) -> Iterator[Outcome]:
    """Yield one row per function that was called, and one per function that failed."""
    failed = {finding.function: finding for finding in search.findings}
    for function in FUNCTIONS:
        covered = search.covered.get(function)
        if covered is not None and function not in failed:
            yield Outcome(f"search: {function}", reach(covered), "its definition", "holds")
    for finding in search.findings:
        name, fault, case = f"search: {finding.function}", finding.fault, finding.case
        yield Outcome(name, fault, "its definition", "fails", case)


def reach(covered: Covered) -> str:
    """Return the largest inputs of a function as text."""
    return (
        f"{covered.elements:,} elements, {covered.segments:,} segments, {covered.workers:,} "
        f"workers, step {covered.step:,}, scales 2^{covered.low} to 2^{covered.high}"
    )


def covered_by(results: Sequence[Verified]) -> dict[str, Covered]:
    """Return what was covered of each function in all configurations together."""
    total: dict[str, Covered] = {}
    for result in results:
        for function, covered in result.covered.items():
            total.setdefault(function, Covered()).add(covered)
    return total


def together(results: Sequence[Verified]) -> list[dict[str, Any]]:
    """Return `covered_by` as one row per function."""
    total = covered_by(results)
    return [total[function].as_row(function) for function in FUNCTIONS if function in total]
