"""Lists of compressors, memories, tasks, suites and backends; this machine; finished runs."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gcbench import ops
from gcbench.core import output, registry
from gcbench.core.errors import GcbenchError
from gcbench.report import glossary
from gcbench.report.rendering import LINES, Column, counted, fitted, sentence, terminal
from gcbench.results.settings import DEFAULTS
from gcbench.training import configuration

Row = dict[str, Any]
AXES = (
    *("task", "task_options", "options", "memory", "memory_options", "start_step", "delay"),
    *("rebroadcast_every", "local_steps", "outer_lr", "outer_momentum", "workers", "engine"),
    *("gradients", "batch", "lr"),
)
"""Settings that the table at the end of `gcbench run` shows if its runs differ in them."""


def _card(cls: type[Any]) -> str:
    """Return the first sentence of the class's module docstring."""
    text = sys.modules[cls.__module__].__doc__ or cls.__doc__ or ""
    return text.strip().splitlines()[0] if text.strip() else ""


def _source(cls: type[Any]) -> str | None:
    """Return what the card of a method cites first, to the year and the paper's number."""
    text = " ".join((sys.modules[cls.__module__].__doc__ or "").split())
    cited = re.search(r"Source: (.*?\b\d{4}\b(?:, (?:arXiv|doi):[\w./]*\w)?)", text)
    return cited[1] if cited and len(cited[1]) < 100 else None


def _each(entries: Mapping[str, registry.Entry], row: Callable[[str], Row]) -> list[Row]:
    """Return the name, the source and the `row` of each entry, or why it does not load."""
    rows = []
    for name, entry in entries.items():
        try:
            rows.append({"name": name, "source": entry.source, **row(name)})
        except Exception as error:  # one faulty plug-in does not hide the others
            reason = str(error) if isinstance(error, GcbenchError) else repr(error)
            what = f"does not load: {reason}"
            rows.append({"name": name, "source": entry.source, "what": what})
    return rows


def compressors() -> list[Row]:
    """Return one row per compressor; `measured_bits` is what four workers really send."""
    from gcbench.report import wire_bits

    def row(name: str) -> Row:
        cls = registry.compressor_class(name)
        method = registry.compressor(name)
        nominal = method.claims.nominal_bits
        try:
            up, down = wire_bits.bits(method)
            sent: Any = {"up": round(up, 3), "down": round(down, 3)}
        except Exception as error:  # the row of a method that fails says so
            sent = f"failed: {type(error).__name__}: {error}"
        return {
            "what": _card(cls),
            "paper": _source(cls),
            "nominal_bits": None if nominal is None else round(nominal, 3),
            "measured_bits": sent,
            "collectives": list(method.legal_collectives()),
            "memory": method.memory,
            "two_way": method.legal_collectives()[0] != "allgather",
            "unbiased": method.claims.unbiased,
            "contractive": method.claims.contractive,
            "fields": {n: getattr(method, n) for n in registry.fields(cls)},
        }

    return _each(registry.compressors(), row)


def tasks() -> list[Row]:
    """Return one row per registered task."""

    def row(name: str) -> Row:
        cls = registry.task_class(name)
        task = registry.task(name)
        defaults = dict(task.defaults())
        return {
            "what": _card(cls),
            "fields": {n: getattr(task, n) for n in registry.fields(cls)},
            "steps": defaults.get("steps"),
            "paper_steps": cls.paper_steps or None,
            "defaults": defaults,
        }

    return _each(registry.tasks(), row)


def memories() -> list[Row]:
    """Return one row per registered memory."""

    def row(name: str) -> Row:
        cls = registry.memories()[name].load()
        what = (cls.__doc__ or "").strip().partition("\n")[0]
        carried = registry.make(f"memory {name!r}", cls, {})
        return {"what": what, "fields": {n: getattr(carried, n) for n in registry.fields(cls)}}

    return _each(registry.memories(), row)


def suites() -> list[Row]:
    """Return one row per suite: title, runs, duration, and how it differs from its source."""
    from gcbench.training import suites as known

    rows = []
    for name in known.names():
        suite = known.load(name)
        points = suite.points()
        budgets = {
            (point.config.steps, point.published.steps if point.published else None): None
            for point in points
        }
        rows.append(
            {
                "name": name,
                "what": suite.title,
                "source": suite.paper,
                "runs": len(points),
                "steps": [ours for ours, _ in budgets],
                "paper_steps": [theirs for _, theirs in budgets if theirs is not None],
                "takes": suite.takes,
                "shares": suite.shares,
                "differs": suite.differs,
                "file": str(suite.file),
            }
        )
    return rows


def backends() -> list[Row]:
    """Return one row per backend."""
    return [{"name": b.name, "available": b.available, "detail": b.detail} for b in ops.backends()]


ROWS: Mapping[str, Callable[[], list[Row]]] = {
    "compressors": compressors,
    "memories": memories,
    "tasks": tasks,
    "suites": suites,
    "backends": backends,
    "words": glossary.rows,
}


def titles(kind: str) -> list[Row]:
    """Return the `name` and one line about each entry of a kind in `ROWS`, which is quick."""
    from gcbench.results import suites as stored

    if kind == "compressors":
        return _each(
            registry.compressors(), lambda n: {"what": _card(registry.compressor_class(n))}
        )
    if kind == "tasks":
        return _each(registry.tasks(), lambda n: {"what": _card(registry.task_class(n))})
    if kind == "suites":
        return [{"name": n, "what": stored.head(n)["title"]} for n in stored.names()]
    if kind == "backends":
        state = ("missing", "available")
        return [
            {"name": b["name"], "what": f"{state[b['available']]}: {b['detail']}"}
            for b in backends()
        ]
    return [{"name": row["name"], "what": row["what"]} for row in ROWS[kind]()]


def info() -> Row:
    """Return versions, machine and backends."""
    import torch
    import torch.distributed as dist

    gloo = "available" if dist.is_gloo_available() else "missing: torch was built without it"
    nccl = "available"
    if not dist.is_nccl_available():
        nccl = "missing: torch was built without it"
    elif not torch.cuda.is_available():
        nccl = "missing: torch finds no usable NVIDIA GPU"
    engines = {"simulate": "available", "spawn (gloo)": gloo, "spawn (nccl)": nccl}
    return {
        "versions": configuration.versions(),
        "machine": configuration.machine(),
        "engines": engines,
        "backends": backends(),
    }


def summaries(done: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return the short table that a run ends with; what differs between runs has a column."""
    rows = []
    configs = [DEFAULTS | summary["config"] for summary in done]
    axes = [key for key in AXES if len({str(config[key]) for config in configs}) > 1]
    for summary, config in zip(done, configs, strict=True):
        accuracy, loss = summary.get("test_accuracy"), summary.get("test_loss")
        if not config["test"]:
            accuracy, loss = summary.get("validation_accuracy"), summary["validation_loss"]
        seconds = summary.get("step_seconds")
        if (summary.get("provenance") or {}).get("times"):  # not to be quoted
            seconds = None
        rows.append(
            {
                "name": summary["compressor_name"],
                **{key.replace("_", " "): config[key] for key in axes},
                "seed": summary["seed"],
                "steps": summary["steps"],
                "accuracy": "-" if accuracy is None else f"{100 * accuracy:.2f} %",
                "loss": "not finite" if loss is None else f"{loss:.4g}",
                "ratio up": _ratio(summary["payload_ratio_up"]),
                "ratio down": _ratio(summary["payload_ratio_down"]),
                "step": "-" if seconds is None else f"{1e3 * seconds:.0f} ms",
            }
        )
    return rows


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return " ".join(f"{key}={item}" for key, item in value.items()) or "-"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(str, value))
    return str(value)


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows as blocks on stdout: the name and what it is, then the rest, indented."""
    indent = " " * 4
    whole: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    for row in rows:
        heading = f"{row['name']}: {row.get('what', '')}".removesuffix(": ")
        output.emit(textwrap.fill(heading, _width(), **whole))
        for key, value in row.items():
            if key not in ("name", "what", "defaults"):
                line = f"{indent}{key.replace('_', ' ')}: {_cell(value)}"
                output.emit(textwrap.fill(line, _width(), subsequent_indent=indent * 2, **whole))


def show_titles(kind: str, rows: Sequence[Row]) -> None:
    """Print `titles` on stdout, a line each, or the names alone where they are many."""
    width = _width()
    more = f"For all fields: gcbench list {kind} --details"
    if len(rows) <= LINES:
        longest = max((len(row["name"]) for row in rows), default=0)
        for row in rows:
            line = f"{row['name']:<{longest}}  {row['what']}"
            output.emit(line if len(line) <= width else f"{line[: width - 1].rstrip()}…")
    else:
        output.emit(sentence(", ".join(row["name"] for row in rows), "table", width))
    output.emit("\n" + sentence(more, "table", width))


def _width() -> int:
    return shutil.get_terminal_size((100, 24)).columns


def _table(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    return [Column(key, [_cell(row[key]) for row in rows]) for key in rows[0]]


def show_runs(done: Sequence[Mapping[str, Any]]) -> None:
    """Print a short table of finished runs, given their summaries, on stdout."""
    columns = _table(summaries(done))
    table = fitted(columns[:1], columns[1:], _width(), LINES - 2)
    output.emit(table.text)
    if left := len(done) - table.rows:
        output.emit(f"... and {counted(left, 'run')} more")


def show_verdicts(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the checks of one configuration, as `gcbench verify` found them, on stdout."""
    names = ("check", "verdict", "measured", "bound", "note")
    columns = _table([{name: row[name] for name in names} for row in rows])
    output.emit(f"{rows[0]['configuration']}\n")
    output.emit(terminal(columns[:1], [columns[1:4], columns[4:]], _width()) + "\n")


def _aligned(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows of the same keys as a table with thousands separators."""
    texts = [{k: f"{v:,}" if isinstance(v, int) else v for k, v in row.items()} for row in rows]
    columns = _table(texts)
    return terminal(columns[:1], [columns[1:]], _width())


def show_verified(results: Sequence[Any], covered: Sequence[Mapping[str, Any]]) -> None:
    """Print one line per configuration, the checks that fail, and what the search covered.

    `results`: the `Verified` of each configuration; `covered`: one row per function of the
    contract. On stdout, in at most `LINES` lines: first failed checks, then coverage are left out.
    """
    width = _width()
    blocks = [
        _aligned(
            [
                {
                    "configuration": result.configuration,
                    "hold": result.count("holds"),
                    "fail": result.count("fails"),
                    "not declared": result.count("not declared"),
                    "inputs": result.inputs,
                    "seconds": round(result.seconds, 1),
                }
                for result in results
            ]
        )
    ]
    faults = []
    for result in results:
        for row in result.rows:
            if row["verdict"] == "fails":
                why = "; ".join(part for part in (row["measured"], row["note"]) if part)
                text = f"FAILS {result.configuration}, {row['check']}: {why}"
                faults.append(sentence(text, "table", width))
    room = LINES - 2 - len(blocks[0].splitlines())
    shown: list[str] = []
    for fault in faults:
        if len("\n".join([*shown, fault]).splitlines()) < room:
            shown.append(fault)
    if left := len(faults) - len(shown):
        shown.append(f"... and {counted(left, 'more check')} that fail: add --details")
    blocks += ["\n".join(shown)] if shown else []
    coverage = _aligned(covered) if covered else ""
    if len("\n\n".join([*blocks, coverage]).splitlines()) <= LINES + 2:
        blocks.append(coverage)
    output.emit("\n\n".join(filter(None, blocks)))


def show_info(facts: Row) -> None:
    """Print what `info` found on stdout."""
    for title in ("versions", "machine", "engines"):
        output.emit(title)
        for key, value in facts[title].items():
            output.emit(f"  {key:<14}{_cell(value)}")
    output.emit("backends")
    for backend in facts["backends"]:
        state = "available" if backend["available"] else "missing"
        output.emit(f"  {backend['name']:<14}{state}: {backend['detail']}")
