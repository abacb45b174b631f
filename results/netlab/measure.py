"""Measures over shaped links between network namespaces, and writes what was measured as JSON.

    python results/netlab/measure.py transport   # collectives and DDP: transport.json, 20 minutes
    python results/netlab/measure.py rows        # its rows for gcbench/predict/data/measured.csv
    python results/netlab/measure.py methods     # ten methods: methods.json, an hour
    python results/netlab/measure.py accuracy    # accuracy and time: accuracy.json, 5 hours

Rates behind the command limit it to these links: `accuracy 50mbit`. Two processes may measure
different rates at once.

Measuring needs Linux, root or unprivileged user namespaces, and an idle machine: the nodes share
its cores. A measurement that the file already holds is not repeated; remove its key to repeat it.
`tables.py` prints tables of methods.json and accuracy.json, and draws a picture.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import datetime
import fcntl
import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tables import compute, messages, shapes

from gcbench import cli
from gcbench.core.errors import GcbenchError
from gcbench.core.writing import write_atomically
from gcbench.netlab import launcher
from gcbench.netlab.links import parse_rate
from gcbench.predict import traffic, transport, validation
from gcbench.results import reader
from gcbench.training import configuration

HERE = Path(__file__).parent
WORKERS = (2, 4)
RATES = ("50mbit", "100mbit", "200mbit", "1gbit")
SMALL = "64K,512K,4M"
SIZES = dict.fromkeys(RATES, SMALL) | {"1gbit": f"{SMALL},16M"}
METHODS = (
    *("none", "bf16", "int8", "qsgd", "terngrad", "signsgd", "natural"),
    *("topk", "powersgd", "onebit"),
)
COMPRESSED = METHODS[2:]
"""Without fp32 and bf16, which `advise` counts as uncompressed."""
TRAININGS = {
    "fp32": ("--compressor", "none", "--engine", "ddp", "--hook", "torch"),
    "bf16": ("--compressor", "bf16"),
    "int8": ("--compressor", "int8"),
    "terngrad": ("--compressor", "terngrad"),
    "topk": ("--compressor", "topk"),
    "powersgd": ("--compressor", "powersgd"),
    "local": ("--compressor", "none", "--local-steps", "8"),
}
"""Methods whose accuracy is measured against time. fp32 is what users have without gcbench: torch's
DDP, whose all-reduce overlaps the backward pass."""
TASKS = {
    "mnist": ("--batch", "64", "--steps", "500", "--eval-every", "50"),
    "cifar10": (
        *("--batch", "128", "--steps", "2000", "--eval-every", "200", "--optimizer", "sgd"),
        *("--schedule", "poly", "--schedule-power", "1", "--ema", "0"),
    ),
}
OPTIMIZER = ("--lr", "0.03", "--momentum", "0.9")
"""On CIFAR-10 the rate that suite main chose for all of them at this momentum, but for `local`,
which it lacks; on MNIST not tuned."""
OPTIMIZERS = {("cifar10", "topk"): ("--lr", "0.3", "--momentum", "0")}
"""What single trials of suite main prefer: top-k ends 9 points higher than at momentum .9."""
TASK = ("--task", "mnist", "--batch", "64", "--eval-every", "0", "--steps")


def jobs(kind: str) -> Iterator[tuple[str, int, str, list[str]]]:
    """Yield key, workers, rate and gcbench command of each measurement."""
    if kind == "accuracy":
        for task, training in TASKS.items():
            for rate in ("1gbit", "200mbit", "50mbit"):
                for name, method in TRAININGS.items():
                    optimizer = OPTIMIZERS.get((task, name), OPTIMIZER)
                    command = ["run", "--task", task, *training, *method, *optimizer]
                    command += ["--threads", "1"]
                    yield f"{task} {name} {rate}", 4, rate, command
        return
    for rate in RATES:
        for workers in WORKERS:
            if kind == "transport":
                command = ["bandwidth", "--compressor", "none", "--sizes", SIZES[rate]]
                command += ["--plain", "all_reduce,all_gather,alltoall", "-n", "9", "-w", "2"]
                yield f"collectives {rate} {workers}", workers, rate, command
                ddp = ["run", *TRAININGS["fp32"], *TASK, "15"]
                yield f"ddp {rate} {workers}", workers, rate, ddp
            else:
                plain = ["run", *TRAININGS["fp32"], *TASK, "30"]
                yield f"fp32 {rate} {workers}", workers, rate, plain
                for spec in METHODS:
                    command = ["run", "--compressor", spec, *TASK, "30"]
                    yield f"{spec} {rate} {workers}", workers, rate, command


def measure(workers: int, rate: str, command: list[str]) -> dict[str, Any]:
    """Run a gcbench command in a lab; return its rows, or its summary."""
    folder = tempfile.mkdtemp(prefix="gcbench-netlab-")
    more = ["--workers", str(workers)] if command[0] == "run" else []
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    load = os.getloadavg()[0]
    try:
        record = launcher.measure(
            {
                "nodes": workers,
                "workers_per_node": 1,
                "bits_per_second": parse_rate(rate),
                "delay": 0.0,
                "loss": 0.0,
                "arguments": [
                    *(*command, *more, "--results", folder, "--json", "--progress", "none")
                ],
            }
        )
        curve = reader.load([Path(folder)])[0].evaluations() if command[0] == "run" else []
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result: dict[str, Any] = {
        "command": shlex.join(["gcbench", *command, *more]),
        "started": started,
        "load": load,
        "workers": workers,
        "bits_per_second": parse_rate(rate),
        "link": record["link"],
        "sent": record["sent"],
    }
    summary = record["summary"]
    if command[0] == "run":
        fields = ("steps", "step_seconds", "phase_seconds", "wire_bytes", "payload_bytes_up")
        result |= {name: summary.get(name) for name in (*fields, "params", "collective")}
        names = ("step", "seconds", "test_accuracy")
        return result | {"evaluations": [{name: one[name] for name in names} for one in curve]}
    names = ("method", "collective", "size", "n", "p50", "min", "max")
    tables = {table["name"]: table["rows"] for table in summary["tables"]}
    return result | {
        "rows": [
            {name: row.get(name) for name in names}
            for row in tables["transfers"]
            if row["method"] not in ("memcpy", "loopback")
        ]
    }


def collect(kind: str, rates: Sequence[str] = RATES) -> None:
    """Measure what the file of this kind lacks, of links of these rates.

    Raises:
        GcbenchError: the file is of another machine, or cannot be written.
    """
    path, machine = HERE / f"{kind}.json", configuration.machine()

    def stored() -> dict[str, Any]:
        empty = {"machine": machine, "records": {}}
        return json.loads(path.read_text()) if path.exists() else empty

    for key, workers, rate, command in jobs(kind):
        if rate not in rates or key in stored()["records"]:
            continue
        if (other := stored()["machine"]) != machine:
            raise GcbenchError(
                f"{path} was measured on {other}, this machine is {machine}: move the file away, "
                "or measure there"
            )
        record = measure(workers, rate, command)
        with locked():  # read anew: another process may measure other rates
            data = stored()
            records = data["records"] | {key: record}
            data["records"] = {job[0]: records[job[0]] for job in jobs(kind) if job[0] in records}
            write_atomically(path, (json.dumps(data, indent=1) + "\n").encode())
        print(key, flush=True)


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Wait for other processes that write files of this folder, and keep them out."""
    folder = os.open(HERE, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


# ---- transport -----------------------------------------------------------------------------------

FITTED = 100e6
"""Bits per second of the links from which the shares of gloo are fitted; others are tests."""
LEAST_CHECK = 0.9
"""Least share of a link's rate that one TCP stream must reach: else the machine is the limit."""
FASTEST = 200e6
"""Bits per second of the fastest links that all nodes fill at once; at 1 Gbit/s cores limit."""
KINDS = {"all_reduce": "allreduce", "all_gather": "allgather", "alltoall": "alltoall"}
KINDS_FITTED = ("allreduce", "allgather", "exchange")


def met(record: dict[str, Any]) -> bool:
    """Return whether the links of a lab had their rate, and not the machine was the limit."""
    rate, checked = record["bits_per_second"], record["link"]["bits_per_second"]
    return bool(checked >= LEAST_CHECK * rate and rate <= FASTEST)


def measured(
    records: dict[str, Any],
) -> Iterator[tuple[str, float, dict[str, Any], dict[str, Any]]]:
    """Yield kind, contributed bytes, row and record of what gcbench uses, on links that were met.

    Left out are torch's all-to-all and, between two workers, its all-gather: there gcbench passes
    messages between pairs of workers (`gcbench.core.world`), which "exchange" measures.
    """
    for record in records.values():
        if "rows" not in record or not met(record):
            continue
        for row in record["rows"]:
            if row["p50"] is None or row["size"] < 2**19:  # a shaper's burst passes unlimited
                continue
            kind = KINDS.get(row["collective"], "exchange")
            if kind == "alltoall" or (kind == "allgather" and record["workers"] == 2):
                continue
            size = row["size"] / record["workers"] if kind == "allgather" else row["size"]
            yield kind, size, row, record


def fit(records: dict[str, Any]) -> tuple[dict[str, float], float]:
    """Return the shares of gloo, by collective and for pairs of workers, and its time per call.

    An exchange is an all-to-all and an all-gather. Between two workers both take half its time; of
    more workers the all-gather is torch's, which was measured alone.
    """
    samples: list[transport.Sample] = []
    fitted = [each for each in measured(records) if each[3]["bits_per_second"] == FITTED]
    gathers = {
        (record["workers"], size): row["p50"]
        for kind, size, row, record in fitted
        if kind == "allgather"
    }

    def add(kind: str, size: float, workers: int, seconds: float) -> None:
        sent = traffic.Message(kind, size).wire(workers)
        name = f"{kind} 2" if workers == 2 else kind
        samples.append(transport.Sample(name, sent, FITTED / 8, seconds))

    for kind, size, row, record in fitted:
        workers, seconds = record["workers"], row["p50"]
        if kind != "exchange":
            add(kind, size, workers, seconds)
            continue
        gather = seconds / 2 if workers == 2 else gathers[workers, size / workers]
        add("alltoall", size, workers, seconds - gather)
        if workers == 2:
            add("allgather", size / workers, workers, gather)
    return transport.fit(samples)


def rows() -> None:
    """Print the rows for measured.csv, and the fitted shares."""
    records = json.loads((HERE / "transport.json").read_text())["records"]
    names = next(csv.reader(validation.MEASURED.open()))
    out = csv.writer(sys.stdout, lineterminator="\n")

    def write(
        kind: str, record: dict[str, Any], nbytes: str, *rest: object, note: str = ""
    ) -> None:
        fitted = record["bits_per_second"] == FITTED and kind in KINDS_FITTED
        fitted = fitted and float(nbytes) >= 2**20
        where = f"results/netlab/{'methods' if note else 'transport'}.json"
        values = [where, "as gcbench", "gloo", kind, record["bits_per_second"] / 1e9]
        values += [record["workers"], nbytes, 0, *rest, "yes" if fitted else "no"]
        note = note or f"namespaces of one machine under load {record['load']:.0f}"
        assert len(names) == len([*values, note])
        out.writerow([*values, note])

    for kind, size, row, record in measured(records):
        write(kind, record, f"{size:.0f}", 0, round(row["p50"], 5), row["n"])
    sizes = " ".join(f"{size:.0f}" for size in traffic.buckets(shapes()[::-1]))
    for key, record in records.items():
        if key.startswith("ddp") and met(record):
            step = round(record["step_seconds"], 5)
            write("ddp", record, sizes, round(1e3 * compute(record), 2), step, record["steps"])
    for key, record in json.loads((HERE / "methods.json").read_text())["records"].items():
        method = key.split()[0]
        if method in COMPRESSED and met(record):
            sent = " ".join(f"{kind}={size:.0f}" for kind, size in messages(method, record))
            step = round(record["step_seconds"], 5)
            write(
                *(f"{method} step", record, sent, round(1e3 * compute(record), 2), step),
                record["steps"],
                note=f"namespaces of one machine that others used, {record['started'][:10]}",
            )
    print(fit(records), file=sys.stderr)


def main() -> None:
    """Run one of the commands of the docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("transport", "rows", "methods", "accuracy"))
    parser.add_argument("rates", nargs="*", metavar="rate", help=f"of {', '.join(RATES)}")
    arguments = parser.parse_args()
    if unknown := sorted({*arguments.rates} - {*RATES}):
        parser.error(f"unknown rates: {', '.join(unknown)}; expected {', '.join(RATES)}")
    if arguments.command == "rows":
        rows()
    else:
        collect(arguments.command, arguments.rates or RATES)


if __name__ == "__main__":
    cli.main(run=main)
