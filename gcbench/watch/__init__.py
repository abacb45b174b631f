"""`gcbench watch`: what a user's own training job really sends, and whether its ranks agree.

The job runs as given, with a `sitecustomize` on PYTHONPATH that records the collectives of each
rank (site/gcbench_recorder.py). Numbers are those between the first and the last optimizer step. A
checked collective waits for its result; the others run as before, so their time may overlap with
computation. On CUDA every collective is waited for, which removes that overlap.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from gcbench.core.errors import GcbenchError
from gcbench.report.analysis import Analysis, Row, Table, shown
from gcbench.report.rendering import counted

KIND = "watch"
SITE = Path(__file__).parent / "site"
MOST = 0.95
"""Share of the bytes that must have the expected dtype: losses and counters are sent in others."""
ROOM = 1.1
"""Factor on expected bytes, for agreements, losses and headers."""
SMALL = 4096
"""Bytes per step beyond the expected ones that are not reported."""
PATTERN = re.compile(r"([a-z][a-z0-9_]*)?(?:/([0-9]*\.?[0-9]+(?:e[0-9]+)?))?")
PARAMETERS = "parameters"
"""Prefix of the names of digests of parameters in a record; the others are of collectives."""
END = " at the end"
"""Suffix of the names of digests of parameters when the process left."""
UNCOUNTED = "bytes of "
"""Prefix of failures by which the numbers of bytes are too low."""
SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class Settings(BaseModel):
    """What to run, and what to expect of it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    command: list[str] = Field(min_length=1)
    expect: str = ""
    every: int = Field(default=10, ge=1)
    sharded: bool = False

    @field_validator("expect")
    @classmethod
    def _is_an_expectation(cls, value: str) -> str:
        if not PATTERN.fullmatch(value):
            raise ValueError("expected DTYPE, DTYPE/BYTES or /BYTES, e.g. bfloat16/1e6")
        return value

    @property
    def expected(self) -> tuple[str, float | None]:
        """The expected dtype, or "", and the most bytes that a rank sends per step, or None."""
        match = PATTERN.fullmatch(self.expect)
        dtype, nbytes = match.groups() if match else ("", None)
        return SHORT.get(dtype or "", dtype or ""), float(nbytes) if nbytes else None


def run(settings: Settings, command: str) -> Analysis:
    """Run the job and return what its ranks sent; `failed` if a check found something.

    The job's standard output goes to standard error.

    Raises:
        GcbenchError: the job cannot start, failed, or used no process group.
    """
    with tempfile.TemporaryDirectory(prefix="gcbench-watch-") as folder:
        paths = [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
        watched = {"GCBENCH_WATCH": folder, "GCBENCH_WATCH_EVERY": str(settings.every)}
        environment = {**os.environ, **watched, "PYTHONPATH": os.pathsep.join(paths)}
        code = _job(settings.command, environment)
        records = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    if code:
        raise GcbenchError(f"{shlex.join(settings.command)!r:.200} ended with exit code {code}")
    if not records:
        raise GcbenchError(
            "no rank wrote a record: the job did not call torch.distributed.init_process_group, or "
            "its processes do not inherit PYTHONPATH"
        )
    return analysis(settings, command, records)


def _job(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command to its end, also after Ctrl-C, which the terminal sends to it, too."""
    try:
        job = subprocess.Popen([*command], env={**environment}, stdout=2)
    except OSError as error:
        raise GcbenchError(
            f"{command[0]}: {error.strerror}; give the job's command after --"
        ) from None
    try:
        return job.wait()
    except BaseException:
        job.terminate()
        job.wait()
        raise


Record = Mapping[str, Any]


def analysis(settings: Settings, command: str, records: Sequence[Record]) -> Analysis:
    """Return the analysis of the ranks' records."""
    rows, seconds = table_rows(records)
    steps = min(record["steps"] for record in records)
    problems = [
        *missing(records),
        *uneven(records),
        *disagreements(records, sharded=settings.sharded),
        *unexpected(settings, rows, records),
        *unused_hooks(records),
    ]
    if steps > 1:
        share = sum(float(row["share"] or 0) for row in rows)
        untimed = sorted({str(row["collective"]) for row in rows if row["seconds"] is None})
        besides = f", besides `{', '.join(untimed)}` of unknown time" if untimed else ""
        took = f"collectives took {100 * share:.3g} % of it{besides}"
        what = f"{steps} steps of {1e3 * seconds:.3g} ms; {took}"
    else:
        what = f"{counted(steps, 'optimizer step')}, so the numbers are those of the whole job"
    checks = compared(records, sharded=settings.sharded)
    answer = [
        f"{counted(len(records), 'rank')}, {what}.",
        *(problems or [agreement(checks)]),
        *unrecorded(records),
    ]
    if others := elsewhere(records):
        answer.append(
            f"Ranks {sorted(others)} run on other machines: they are not in this result, and were "
            "not compared."
        )
    per = "per step" if steps > 1 else "in all"
    columns: dict[str, str | tuple[str, float]] = {
        "collective": "collective",
        "dtype": "dtype",
        "ranks": "ranks",
        "calls": f"calls\n{per}",
        "bytes": f"bytes\n{per}",
        "sent": f"bytes sent\n{per}",
        "seconds": (f"ms\n{per}", 1e3),
        "share": ("share\n%", 100.0),
    }
    notes = [
        "bytes: handed to the collective by a rank; sent: to other ranks, by a ring. Means over "
        "ranks. Collectives may overlap with computation and with each other. -: time unknown."
    ]
    table = Table(
        name="collectives", title="Collectives of the job", shown=shown(columns), rows=rows,
        which=2, notes=notes,
    )  # fmt: skip
    return Analysis.of(
        KIND, settings, command, answer=answer, tables=[table], failed=bool(problems)
    )


def table_rows(records: Sequence[Record]) -> tuple[list[Row], float]:
    """Return a row per collective, dtype and number of ranks, and the seconds of a step.

    Between the first and the last optimizer step; with fewer than two steps, of the whole job.
    """
    steps = min(record["steps"] for record in records)
    sums: dict[tuple[str, str, int], list[float]] = {}
    for record in records:
        if steps > 1:
            before = {tuple(row[:3]): row[3:] for row in record["start"]["totals"]}
            after, count = record["end"]["totals"], record["steps"] - 1
        else:
            before, after, count = {}, record["whole"]["totals"], 1
        for entry in after:
            key, values = tuple(entry[:3]), entry[3:]
            past = before.get(key, [0.0] * len(values))
            row = sums.setdefault(key, [0.0] * len(values))
            for i, (new, old) in enumerate(zip(values, past, strict=True)):
                row[i] += (new - old) / count / len(records)
    seconds = fmean(
        (record["end"]["time"] - record["start"]["time"]) / (record["steps"] - 1)
        if steps > 1
        else 0.0
        for record in records
    )
    rows: list[Row] = []
    for (name, dtype, ranks), (calls, nbytes, sent, spent, timed) in sums.items():
        if calls:
            one: Row = {"collective": name, "dtype": dtype, "ranks": ranks, "calls": calls}
            one |= {"bytes": nbytes, "sent": sent, "seconds": spent if timed else None}
            rows.append({**one, "share": spent / seconds if seconds and timed else None})
    return sorted(rows, key=lambda row: -float(row["sent"] or 0)), seconds


# ---- checks --------------------------------------------------------------------------------------


def elsewhere(records: Sequence[Record]) -> set[int]:
    """Return the ranks of other machines, whose records stay there."""
    here: set[int] = set()
    for record in records:
        first, count = record.get("here") or (0, record["world_size"])
        here |= {*range(first, first + count)}
    return {*range(records[0]["world_size"])} - here


def missing(records: Sequence[Record]) -> list[str]:
    """Return a sentence if ranks of the job on this machine are missing."""
    present = {record["rank"] for record in records} | elsewhere(records)
    lost = {*range(records[0]["world_size"])} - present
    return [f"Ranks {sorted(lost)} wrote no record."] if lost else []


def digests(records: Sequence[Record], *, sharded: bool) -> dict[str, dict[int, list[Any]]]:
    """Return the digests of all records, or None, by name and by the number of the call or step.

    Those of the end are compared whatever the number of steps, so they have the number 0.
    """
    names = sorted({name for each in records for name in each["digests"]})
    collected: dict[str, dict[int, list[Any]]] = {}
    for name in sorted(names, key=lambda name: name.endswith(END)):
        if sharded and name.startswith(PARAMETERS):
            continue
        columns: list[dict[int, Any]] = [
            {0 if name.endswith(END) else int(count): value for count, value in column.items()}
            for column in (each["digests"].get(name, {}) for each in records)
        ]
        counts = sorted({count for column in columns for count in column})
        collected[name] = {count: [column.get(count) for column in columns] for count in counts}
    return collected


def compared(records: Sequence[Record], *, sharded: bool) -> int:
    """Return the number of results that more than one rank has recorded."""
    return sum(
        len(values) - values.count(None) > 1
        for by_count in digests(records, sharded=sharded).values()
        for values in by_count.values()
    )


def agreement(checks: int) -> str:
    """Return a sentence on `checks` compared results without a difference."""
    if not checks:
        return (
            "No fault, but nothing was compared between ranks: no collective of this job gives "
            "several recorded ranks the same result."
        )
    return f"No fault: {counted(checks, 'result')} equal on all recorded ranks, bit for bit."


def uneven(records: Sequence[Record]) -> list[str]:
    """Return a sentence on the first optimizer whose number of steps differs between ranks.

    A rank that was ended before its last record has an unknown number.
    """
    ended = [each for each in records if each.get("finished")]
    for i in range(max((len(each["optimizers"]) for each in ended), default=0)):
        ranks: dict[int, list[int]] = {}
        for each in ended:
            ranks.setdefault(sum(each["optimizers"][i : i + 1]), []).append(each["rank"])
        if len(ranks) > 1:
            counts = ", ".join(f"{count} on ranks {which}" for count, which in ranks.items())
            return [f"RANKS DIFFER: steps of optimizer {i + 1}: {counts}."]
    return []


def disagreements(records: Sequence[Record], *, sharded: bool) -> list[str]:
    """Return a sentence for each kind of result that differs between ranks."""
    sentences: list[str] = []
    differ: set[str] = set()
    for name, by_count in digests(records, sharded=sharded).items():
        at_end = name.endswith(END)
        if at_end and name.removesuffix(END) in differ:
            continue
        for count, values in by_count.items():
            first = next(i for i, value in enumerate(values) if value is not None)
            odd = [
                record["rank"]
                for record, value in zip(records, values, strict=True)
                if value not in (values[first], None)
            ]
            if odd:
                differ.add(name)
                at = f" after step {count}" if name.startswith(PARAMETERS) else f" at call {count}"
                text = (
                    f"RANKS DIFFER: {name}{at * (not at_end)}: ranks {odd} have other bits than "
                    f"rank {records[first]['rank']}."
                )
                last = {step for each in records for step in each["digests"].get(name, {})}
                if at_end and len(last) == 1:
                    text += (
                        f" The job may have changed them after its last step ({last.pop()}), e.g. "
                        "by loading a checkpoint on one rank. To compare them after every step: "
                        "--check-every 1."
                    )
                sentences.append(text)
                break
    return sentences


def unrecorded(records: Sequence[Record]) -> list[str]:
    """Return a sentence on what the recorder could not record."""
    failures = {what: why for record in records for what, why in record["failures"].items()}
    text = "; ".join(f"{what} ({why})" for what, why in failures.items())
    return [f"Not recorded in full, or not compared: {text}."] if failures else []


def sent_per_step(record: Record) -> float:
    """Return the bytes that a rank sends per step, between its first and its last step."""
    first, last = (sum(row[5] for row in record[at]["totals"]) for at in ("start", "end"))
    sent: float = (last - first) / (record["steps"] - 1)
    return sent


def unexpected(settings: Settings, rows: Sequence[Row], records: Sequence[Record]) -> list[str]:
    """Return a sentence for each way in which the traffic of the ranks is not the expected one."""
    dtype, most = settings.expected
    steps = min(record["steps"] for record in records)
    failures = {what for record in records for what in record["failures"]}
    uncounted = sorted(what for what in failures if what.startswith(UNCOUNTED))
    sent: dict[str, float] = {}
    for row in rows:
        sent[str(row["dtype"])] = sent.get(str(row["dtype"]), 0.0) + float(row["sent"] or 0)
    total, sentences = sum(sent.values()), []
    if dtype and sent.get(dtype, 0.0) < MOST * total:
        shares = [f"{100 * n / total:.0f} % {name}" for name, n in sent.items() if n > total / 100]
        sentences.append(f"UNEXPECTED DTYPE: expected {dtype}, sent {', '.join(shares)}.")
    if dtype and not total:
        sentences.append(f"UNEXPECTED DTYPE: expected {dtype}, sent nothing.")
    if most is not None and steps < 2:
        sentences.append(
            f"CANNOT CHECK BYTES: expected {most:,.0f} per step, but the job has "
            f"{counted(steps, 'step')} of a torch.optim optimizer, and 2 are needed. Leave the "
            "number out of --expect, or let the job take more steps."
        )
    elif most is not None:
        each = {record["rank"]: sent_per_step(record) for record in records}
        rank = max(each, key=each.__getitem__)
        if each[rank] > ROOM * most:
            sentences.append(
                f"TOO MANY BYTES: rank {rank} sends {each[rank]:,.0f} bytes per step, expected "
                f"{most:,.0f}."
            )
        elif uncounted:
            sentences.append(f"CANNOT CHECK BYTES: not recorded in full: {', '.join(uncounted)}.")
    return sentences


def unused_hooks(records: Sequence[Record]) -> list[str]:
    """Return a sentence if a gcbench hook sent nothing, and the job sent more than its hooks."""
    record = records[0]
    if record["steps"] < 2 or not record["end"]["hooks"]:
        return []
    before = {each["id"]: each["wire"] for each in record["start"]["hooks"]}
    grown = [
        (each["hook"], each["wire"] - before.get(each["id"], 0.0))
        for each in record["end"]["hooks"]
    ]
    unused = [name for name, nbytes in grown if not nbytes]
    sent = sent_per_step(record)
    hooks = sum(nbytes for _, nbytes in grown) / (record["steps"] - 1)
    if not unused or sent <= ROOM * hooks + SMALL:
        return []
    return [
        f"HOOK NOT USED: {', '.join(unused):.100} sends nothing, the job {sent:,.0f} bytes per "
        "step and rank. Is it registered with the model that trains?"
    ]
