"""Write what `gcbench verify` covers of each built-in method, how long it takes, and its limits.

    python -m gcbench.checks.coverage [--output results/COVERAGE.md] [NAME ...]

Each method is verified in a separate process. The page names the largest inputs per function;
larger ones, and what no row names, are not checked.
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import os
import platform
import resource
import time
from pathlib import Path
from typing import Any

from gcbench.checks import cases, verify
from gcbench.checks.calls import FUNCTIONS
from gcbench.core import registry

MOST_SECONDS, MOST_MIB = 60, 1024
"""Limits of CPU time and memory for `gcbench verify` of a built-in method."""


def measured(name: str) -> dict[str, Any]:
    """Verify one method; return its verdicts, time, memory and coverage."""
    start, used = time.perf_counter(), time.process_time()
    results = list(verify.verify(name))
    return {
        "name": name,
        "configurations": len(results),
        "fail": sum(result.count("fails") for result in results),
        "inputs": sum(result.inputs for result in results),
        "seconds": time.perf_counter() - start,
        "cpu": time.process_time() - used,
        "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "covered": verify.covered_by(results),
    }


def page(rows: list[dict[str, Any]]) -> str:
    """Return the page in Markdown."""
    threads = os.environ.get("OMP_NUM_THREADS", "all cores")
    lines = [
        "# What `gcbench verify` covers",
        "",
        "`python -m gcbench.checks.coverage` wrote this page on "
        f"{datetime.date.today().isoformat()} ({platform.machine()}, {os.cpu_count()} cores, "
        f"threads: {threads}). Every declared configuration of each method; no real processes. "
        "Other programs ran at the same time: CPU seconds, those of all threads, are the "
        f"measure. The limit is {MOST_SECONDS} of them and {MOST_MIB:,} MiB per method.",
        "",
        "| method | configurations | fail | inputs of the search | seconds | CPU seconds | MiB |",
        "|-|-|-|-|-|-|-|",
    ]
    lines += [
        f"| {r['name']} | {r['configurations']} | {r['fail']} | {r['inputs']:,} | "
        f"{r['seconds']:.0f} | {r['cpu']:.0f} | {r['mib']:.0f} |"
        for r in rows
    ]
    lines += [
        "",
        "The least and the largest of the methods' limits, per function of the contract:",
        "",
        "| function | methods | elements | segments | workers | step | scales |",
        "|-|-|-|-|-|-|-|",
    ]
    for function in FUNCTIONS:
        limits = [
            row["covered"][function]
            for row in rows
            # A method in rounds is encoded only to find out whether it is random.
            if function in row["covered"]
            and (function == "in_rounds" or "in_rounds" not in row["covered"])
        ]
        if limits:
            cells = [
                _range([getattr(each, field) for each in limits])
                for field in ("elements", "segments", "workers", "step")
            ]
            low, high = max(each.low for each in limits), min(each.high for each in limits)
            lines.append(
                f"| `{function}` | {len(limits)} | {' | '.join(cells)} | 2^{low} to 2^{high} |"
            )
    lines += [
        "",
        "Not covered:",
        "",
        "* larger inputs than the table's;",
        "* faults at single steps, or with a period that is neither below "
        f"{cases.FULL.steps:,} nor round; on inputs of more than 3,000 elements, with a period "
        f"above {cases.FULL.steps // 16} (below {cases.LIBRARY.steps} and above "
        f"{cases.LIBRARY.steps // 16} for methods whose last bits a library decides; less for "
        "configurations other than the default);",
        f"* more than {cases.CROWD} workers on inputs of more than 10,000 elements;",
        "* faults in single elements of long tensors, which the noise of a random code hides;",
        "* faults that need special values of three dimensions at once (all pairs are tried for "
        "the default configuration, a part of them for the others);",
        "* behind element 2^24, everything but whether gradients arrive;",
        "* memories and update rules that depend on the step by intent, at other steps;",
        "* properties that a method does not claim; devices other than the CPU.",
        "",
    ]
    return "\n".join(lines)


def _range(values: list[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def main() -> None:
    """Verify all built-in methods, or those named, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--output", type=Path, default=Path("results/COVERAGE.md"))
    options = parser.parse_args()
    names = options.names or [
        name for name, entry in registry.compressors().items() if entry.source == "built-in"
    ]
    rows = []
    context = multiprocessing.get_context("spawn")
    for name in names:
        with context.Pool(1) as pool:
            rows.append(pool.apply(measured, (name,)))
        print(name, f"{rows[-1]['cpu']:.0f} CPU s, {rows[-1]['mib']:.0f} MiB", flush=True)
        options.output.write_text(page(rows))
    beyond = [row["name"] for row in rows if row["cpu"] > MOST_SECONDS or row["mib"] > MOST_MIB]
    if beyond or any(row["fail"] for row in rows):
        failing = [row["name"] for row in rows if row["fail"]]
        raise SystemExit(f"beyond the limits: {beyond}; failing: {failing}")


if __name__ == "__main__":
    main()
