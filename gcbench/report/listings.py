"""Tables of what there is: compressors, tasks, suites, backends, this machine, finished runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gcbench import ops
from gcbench.core import output, registry
from gcbench.core.errors import GcbenchError
from gcbench.report import glossary
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
    import sys

    text = sys.modules[cls.__module__].__doc__ or cls.__doc__ or ""
    return text.strip().splitlines()[0] if text.strip() else ""


def _source(cls: type[Any]) -> str | None:
    """Return what the card of a method cites first, to the year and the paper's number."""
    import re
    import sys

    text = " ".join((sys.modules[cls.__module__].__doc__ or "").split())
    cited = re.search(r"Source: (.*?\b\d{4}\b(?:, (?:arXiv|doi):[\w./]*\w)?)", text)
    return cited[1] if cited and len(cited[1]) < 100 else None


def _broken(entry: registry.Entry, error: GcbenchError) -> Row:
    return {"name": entry.name, "source": entry.source, "what": f"does not load: {error}"}


def compressors() -> list[Row]:
    """Return one row a registered compressor; `measured_bits` is what four workers really send."""
    from gcbench.report import wire_bits

    rows = []
    for entry in registry.compressors().values():
        try:
            cls = registry.compressor_class(entry.name)
            method = cls()
        except GcbenchError as error:
            rows.append(_broken(entry, error))
            continue
        nominal = method.claims.nominal_bits
        try:
            up, down = wire_bits.bits(method)
            sent: Any = {"up": round(up, 3), "down": round(down, 3)}
        except Exception as error:  # the row of a method that fails says so
            sent = f"failed: {type(error).__name__}: {error}"
        rows.append(
            {
                "name": entry.name,
                "source": entry.source,
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
        )
    return rows


def tasks() -> list[Row]:
    """Return one row a registered task."""
    rows = []
    for entry in registry.tasks().values():
        try:
            cls = registry.task_class(entry.name)
            task = cls()
        except GcbenchError as error:
            rows.append(_broken(entry, error))
            continue
        defaults = dict(task.defaults())
        rows.append(
            {
                "name": entry.name,
                "source": entry.source,
                "what": _card(cls),
                "fields": {n: getattr(task, n) for n in registry.fields(cls)},
                "steps": defaults.get("steps"),
                "paper_steps": cls.paper_steps or None,
                "defaults": defaults,
            }
        )
    return rows


def suites() -> list[Row]:
    """Return one row a suite: what it is, how many runs, how long, and how it differs."""
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
    """Return one row a backend."""
    return [{"name": b.name, "available": b.available, "detail": b.detail} for b in ops.backends()]


ROWS: Mapping[str, Callable[[], list[Row]]] = {
    "compressors": compressors,
    "tasks": tasks,
    "suites": suites,
    "backends": backends,
    "words": glossary.rows,
}


def info() -> Row:
    """Return versions, machine and backends."""
    import torch
    import torch.distributed as dist

    gloo = "available" if dist.is_gloo_available() else "missing: torch has none"
    nccl = "available"
    if not dist.is_nccl_available():
        nccl = "missing: torch has none"
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
    import shutil
    import textwrap

    width = shutil.get_terminal_size((100, 24)).columns
    for row in rows:
        rest = {k: v for k, v in row.items() if k not in ("name", "what", "defaults")}
        told = f"{row['name']}: {row.get('what', '')}".removesuffix(": ")
        output.emit(textwrap.fill(told, width, break_long_words=False, break_on_hyphens=False))
        for key, value in rest.items():
            line = f"{key.replace('_', ' ')}: {_cell(value)}"
            indent = "    "
            output.emit(
                textwrap.fill(
                    line,
                    width,
                    initial_indent=indent,
                    subsequent_indent=indent * 2,
                    break_long_words=False,
                    break_on_hyphens=False,
                )
            )


def show_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows of short cells as a table on stdout, or as blocks where that is too wide."""
    import shutil

    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in rows[0]:
        table.add_column(column, no_wrap=True)
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row.values()))
    width = shutil.get_terminal_size((100, 24)).columns
    if Console(width=1000).measure(table).maximum <= width:
        Console(file=output.stream(), width=width).print(table)
    else:
        show(rows)


def show_runs(done: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of finished runs, given their summaries."""
    show_table(summaries(done))


def show_verdicts(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the checks of one configuration, as `gcbench verify` found them, on stdout."""
    import shutil

    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    styles = {"holds": "green", "fails": "bold red", "not declared": "dim"}
    title = Text(rows[0]["configuration"], "bold")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    for column in ("check", "measured", "bound", "verdict", "note"):
        table.add_column(column)
    for row in rows:
        cells = [Text(row[column]) for column in ("check", "measured", "bound")]
        verdict = Text(row["verdict"], styles[row["verdict"]])
        table.add_row(*cells, verdict, Text(row["note"]))
    width = shutil.get_terminal_size((100, 24)).columns
    Console(file=output.stream(), width=width).print(table)


def _columns(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows of the same keys as aligned columns on stdout; numbers to the right."""
    if not rows:
        return
    texts = [[*rows[0]]]
    texts += [[f"{v:,}" if isinstance(v, int) else str(v) for v in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    right = [isinstance(value, int | float) for value in rows[0].values()]
    for line in texts:
        cells = zip(line, widths, right, strict=True)
        output.emit("  ".join(f"{t:>{w}}" if r else f"{t:<{w}}" for t, w, r in cells).rstrip())
    output.emit("")


def show_verified(results: Sequence[Any], covered: Sequence[Mapping[str, Any]]) -> None:
    """Print one line per configuration, every check that fails, and what the search covered.

    `results`: the `Verified` of each configuration; `covered`: one row per function of the
    contract. On stdout.
    """
    _columns(
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
    for result in results:
        for row in result.rows:
            if row["verdict"] == "fails":
                why = "; ".join(part for part in (row["measured"], row["note"]) if part)
                output.emit(f"FAILS {result.configuration}, {row['check']}: {why}")
    _columns([*covered])


def show_info(found: Row) -> None:
    """Print what `info` found on stdout."""
    for title in ("versions", "machine", "engines"):
        output.emit(title)
        for key, value in found[title].items():
            output.emit(f"  {key:<14}{_cell(value)}")
    output.emit("backends")
    for backend in found["backends"]:
        state = "available" if backend["available"] else "missing"
        output.emit(f"  {backend['name']:<14}{state}: {backend['detail']}")
