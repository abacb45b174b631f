"""Tables and a picture of what `measure.py` measured over shaped links.

    python results/netlab/tables.py methods     # step time of ten methods, and the model's error
    python results/netlab/tables.py accuracy    # time until a target accuracy
    python results/netlab/tables.py readme      # what README says of it
    python results/netlab/tables.py picture     # accuracy against time: accuracy.png

Accuracy against time on a network: Wang et al. 2020 (FFT), figure 14, with a cluster's network.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from gcbench.core import registry
from gcbench.netlab import HEADERS, SEGMENT
from gcbench.predict import traffic, validation
from gcbench.report import figures
from gcbench.training import methods

HERE = Path(__file__).parent
SHARE = 0.99
"""The target of a task, as a share of the last accuracy of fp32 on the fastest link."""
SHOWN = {"mnist": 12, "cifar10": 24}
"""Percentage points below a task's target that the picture shows."""
NAMES = {"fp32": "fp32 (DDP)", "none": "fp32, exact mean", "local": "fp32 every 8 steps"}

Record = Mapping[str, Any]
Records = Mapping[str, Record]


def read(kind: str) -> Records:
    """Return the records of a measurement by key."""
    records: Records = json.loads((HERE / f"{kind}.json").read_text())["records"]
    return records


def name(method: str) -> str:
    """Return a method's name in tables and pictures."""
    return NAMES.get(method, method)


def rate(link: str) -> str:
    """Return a link's rate with its unit: "50mbit" is "50 Mbit/s"."""
    return f"{link.rstrip('mgbit')} {'G' if 'g' in link else 'M'}bit/s"


def markdown(heading: list[str], rows: Iterator[list[str]]) -> str:
    """Return a table in Markdown."""
    lines = [heading, ["-"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


# ---- methods -------------------------------------------------------------------------------------


@cache
def shapes() -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the measured model."""
    return tuple(tuple(one.shape) for one in registry.task("mnist").model().parameters())


def predicted(method: str, record: Record) -> float:
    """Return the seconds of a step: its measured computation, and predicted communication."""
    workers, gbit = record["workers"], record["bits_per_second"] / 1e9
    kind, sizes = "ddp", [str(size) for size in traffic.buckets(shapes()[::-1])]
    if method != "fp32":
        kind = f"{method} step"
        sizes = [f"{collective}={size}" for collective, size in messages(method, record)]
    row = validation.Measured(
        **dict.fromkeys(("source", "licence", "note"), ""),
        **dict.fromkeys(("broadcast_bytes", "seconds", "n", "fitted"), 0),
        **{"transport": "gloo", "kind": kind, "gbit": gbit, "workers": workers},
        **{"message_bytes": " ".join(sizes), "compute_ms": 1e3 * compute(record)},
    )
    return row.predict()


def compute(record: Record) -> float:
    """Return the measured seconds of a step without communication."""
    spent = ("forward_backward", "statistic", "encode", "decode", "update")
    return sum(float(record["phase_seconds"].get(phase) or 0.0) for phase in spent)


def messages(method: str, record: Record) -> Iterator[tuple[str, float]]:
    """Yield the collective and the bytes per worker of each message of a method's step.

    An all-reduce of floats on the CPU is an all-to-all and an all-gather (`gcbench.core.world`).
    """
    workers, collective = record["workers"], record["collective"]
    for sent in traffic.exchange(methods.parse(method), collective, (shapes(), ()), workers):
        if sent.kind == "allreduce":
            yield "alltoall", sent.nbytes
            yield "allgather", sent.nbytes / workers
        else:
            yield sent.kind, sent.nbytes


def excess(record: Record) -> float:
    """Return by how many percent the interfaces sent more than the counted bytes and headers."""
    counted = record["wire_bytes"]["total"] * (1 + HEADERS / SEGMENT)
    return 100 * (sum(record["sent"]) / counted - 1)


def of_methods() -> str:
    """Return the table of methods: a row per method and number of workers, a column per link."""
    records = read("methods")
    links = list(dict.fromkeys(key.split()[1] for key in records))
    heading = ["method", "workers", *map(rate, links), "excess, %"]

    def rows() -> Iterator[list[str]]:
        for workers in dict.fromkeys(key.split()[2] for key in records):
            for method in dict.fromkeys(["fp32", *(key.split()[0] for key in records)]):
                chosen = [records[f"{method} {link} {workers}"] for link in links]
                cells = []
                for link, record in zip(links, chosen, strict=True):
                    step = record["step_seconds"]
                    speed = records[f"fp32 {link} {workers}"]["step_seconds"] / step
                    error = 100 * (predicted(method, record) / step - 1)
                    cells.append(f"{1e3 * step:.0f} ms, {speed:.1f}x ({error:+.0f} %)")
                most = f"{max(map(excess, chosen)):.1f}"
                yield [name(method), workers, *cells, most]

    return markdown(heading, rows())


# ---- accuracy and time ---------------------------------------------------------------------------


def target(records: Records, task: str) -> float:
    """Return the accuracy whose time is measured."""
    plain = [one for key, one in records.items() if key.startswith(f"{task} fp32 ")]
    fastest = max(plain, key=lambda one: float(one["bits_per_second"]))
    return SHARE * float(fastest["evaluations"][-1]["test_accuracy"])


def seconds_to(record: Record, accuracy: float) -> float | None:
    """Return the training time in seconds at the first evaluation with at least an accuracy."""
    for one in record["evaluations"]:
        if one["test_accuracy"] >= accuracy:
            return float(one["seconds"])
    return None


def of_accuracy() -> str:
    """Return the table of times: a row per task and method, two columns per link."""
    records = read("accuracy")
    links = list(dict.fromkeys(key.split()[2] for key in records))[::-1]
    heading = ["task, target", "method", "last accuracy, %", *map(rate, links)]

    def rows() -> Iterator[list[str]]:
        for task in dict.fromkeys(key.split()[0] for key in records):
            goal = target(records, task)
            for method in dict.fromkeys(key.split()[1] for key in records):
                chosen = [records.get(f"{task} {method} {link}") for link in links]
                cells, last = [], "-"
                for record in chosen:
                    took = record and seconds_to(record, goal)
                    if record:
                        last = f"{100 * record['evaluations'][-1]['test_accuracy']:.2f}"
                    missing = "not reached" if record else "-"
                    cells.append(f"{took:,.0f} s" if took else missing)
                yield [f"{task}, {100 * goal:.1f} %", name(method), last, *cells]

    return markdown(heading, rows())


def readme() -> str:
    """Return README's sentences: the times on CIFAR-10, on the slowest and on the fastest link."""
    records = {key: one for key, one in read("accuracy").items() if key.startswith("cifar10 ")}
    goal = target(records, "cifar10")
    sentences = []
    for link in ("50mbit", "1gbit"):
        took = {
            name(key.split()[1]): seconds_to(one, goal)
            for key, one in records.items()
            if key.endswith(f" {link}")
        }
        ordered = sorted((seconds, method) for method, seconds in took.items() if seconds)
        times = ", ".join(f"{method} {seconds:,.0f}" for seconds, method in ordered)
        never = ", ".join(method for method, seconds in took.items() if not seconds)
        missed = f"; not within the steps: {never}" if never else ""
        sentences.append(f"* {rate(link)}: {times}{missed}.")
    head = f"Seconds of training until {100 * goal:.1f} %, 99 % of fp32's accuracy, on CIFAR-10:"
    return "\n".join([head, "", *sentences])


def picture() -> str:
    """Draw accuracy against seconds, a row of panels per task and a column per link."""
    from matplotlib.ticker import LogLocator, NullFormatter

    records = read("accuracy")
    tasks = list(dict.fromkeys(key.split()[0] for key in records))
    links = list(dict.fromkeys(key.split()[2] for key in records))[::-1]
    looks = figures.styles(dict.fromkeys(name(key.split()[1]) for key in records))
    with figures.canvas(4.6 * len(links), 3.6 * len(tasks) + 0.6) as figure:
        grid = figure.subplots(len(tasks), len(links), sharey="row", squeeze=False)
        for key, record in records.items():
            task, method, link = key.split()
            axes = grid[tasks.index(task)][links.index(link)]
            curve = record["evaluations"]
            axes.plot(
                [one["seconds"] for one in curve],
                [100 * one["test_accuracy"] for one in curve],
                **{**looks[name(method)], "lw": 1.4, "ms": 4},
                label=name(method),
            )
        for row, task in zip(grid, tasks, strict=True):
            goal = 100 * target(records, task)
            for axes, link in zip(row, links, strict=True):
                axes.axhline(goal, color="0.6", lw=0.9, ls=":")
                axes.set_xscale("log")
                axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
                axes.xaxis.set_major_formatter("{x:g}")
                axes.xaxis.set_minor_formatter(NullFormatter())
                axes.set_title(f"{task}, {rate(link)}", fontsize="medium")
                axes.set_ylim(goal - SHOWN[task], goal + SHOWN[task] / 6)
                if not axes.get_legend_handles_labels()[0]:
                    axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes)
                    axes.set_xticks([])
            row[0].set_ylabel("test accuracy (%)")
        for axes in grid[-1]:
            axes.set_xlabel("training time (s)")
        handles, labels = grid[0][0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncols=7, frameon=False, fontsize="small"
        )
        path = HERE / "accuracy.png"
        figures.save(figure, path)
    return str(path)


def main() -> None:
    """Print what one of the commands of the docstring makes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = {"methods": of_methods, "accuracy": of_accuracy, "readme": readme}
    commands |= {"picture": picture}
    parser.add_argument("command", choices=commands)
    print(commands[parser.parse_args().command]())


if __name__ == "__main__":
    main()
