"""Options, output and progress that commands share; each command has a file.

Imports nothing slow.
"""

from __future__ import annotations

import inspect
import json
import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_type_hints

import typer

from gcbench.core import output
from gcbench.core.errors import GcbenchError, UsageError
from gcbench.core.values import items_of
from gcbench.report import kinds

if TYPE_CHECKING:
    from gcbench.core import progress
    from gcbench.report.analysis import Analysis

    Draw = Callable[[Analysis, Path], None]

RUNS = Path("results/runs")
ANALYSES = Path("results/analyses")


class Progress(StrEnum):
    """Ways to show progress."""

    auto = "auto"
    bar = "bar"
    plain = "plain"
    none = "none"


class Format(StrEnum):
    """Formats of printed tables."""

    table = "table"
    markdown = "markdown"
    csv = "csv"
    json = "json"
    latex = "latex"


DataDir = Annotated[
    Path | None,
    typer.Option(
        envvar="GCBENCH_DATA",
        help="Folder with cifar-10-batches-bin/, mnist/ or text/; default the download cache.",
    ),
]


def _one_format(context: typer.Context, value: bool | Format) -> bool | Format:
    """Return the value of --json or --format; refuse both where they disagree."""
    both = {**context.params, "json" if isinstance(value, bool) else "format_": value}
    format_ = both.get("format_", Format.table)
    if both.get("json") and format_ not in (Format.table, Format.json):
        raise UsageError(f"--json and --format {format_.value}: give one of them")
    return value


Json = Annotated[
    bool,
    typer.Option("--json", callback=_one_format, help="Print one JSON document on stdout."),
]
Formatted = Annotated[
    Format,
    typer.Option(
        "--format",
        metavar="FORMAT",
        callback=_one_format,
        help="table, markdown, csv, json or latex.",
    ),
]
Shown = Annotated[
    Progress,
    typer.Option(
        "--progress", metavar="HOW", help="How to show progress: auto, bar, plain or none."
    ),
]
Results = Annotated[Path, typer.Option("--results", help="Parent folder of the analysis.")]


def _drawable(path: Path | None) -> Path | None:
    """Return the path of a picture, or refuse it before any long work."""
    from gcbench.report import figures

    return None if path is None else figures.check(path)


Plot = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        callback=_drawable,
        help="Also write the picture to this file (.png, .svg, .pdf).",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Repeat finished work.")]
Details = Annotated[
    bool, typer.Option("--details", help="Print all tables, assumptions and footnotes.")
]


def option(help: str, panel: str | None = None, *flags: str, **more: Any) -> Any:
    """Return an option: its help, its group in the help of the command, and its flags."""
    return typer.Option(*flags, help=help, rich_help_panel=panel, **more)


SUITE = "A suite from `gcbench list suites`, or a YAML file."


def _names(kind: str) -> list[str]:
    """Return the names of compressors, tasks or suites, for completion in a shell."""
    from gcbench.core import registry

    if kind == "suites":
        from gcbench.results import suites

        return suites.names()
    return list(registry.tasks() if kind == "tasks" else registry.compressors())


def completed(kind: str) -> Callable[[str], list[str]]:
    """Return a function that completes the last name of a comma-separated list."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in _names(kind) if name.startswith(last)]

    return complete


def say(text: str) -> None:
    """Print a line on stderr."""
    print(text, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Print a value on stdout as JSON; fields of plug-ins that JSON lacks are text."""
    output.emit(json.dumps(value, indent=2, default=str))


def watched(shown: Progress, name: str, steps: int) -> progress.Observer:
    """Return an observer of short work, which shows nothing in the first second."""
    from gcbench.core import progress

    return progress.Delayed(lambda: progress.observer(shown.value, name, steps))


class Output(NamedTuple):
    """Where an analysis is stored and how it is printed: flags of the commands of analyses."""

    results: Results = ANALYSES
    plot: Plot = None
    force: Force = False
    progress: Shown = Progress.auto
    details: Details = False
    format_: Formatted = Format.table
    json: Json = False

    def deliver(self, analysis: Analysis, draw: Draw | None = None) -> None:
        """Save an analysis, print it, and draw it into its folder and to `plot`."""
        from gcbench.report import analysis as measuring

        folder = measuring.save(analysis, self.results)
        shown = "json" if self.json else self.format_.value
        output.emit(measuring.render(analysis, shown, details=self.details))
        for path in filter(None, (folder / f"{analysis.kind}.png", self.plot)):
            (draw or kinds.draw)(analysis, path)
            say(f"wrote {path}")

    def run(self, study: Any, settings: Any, steps: int, code: str = "", **more: Any) -> Analysis:
        """Run an analysis that stores its finished parts in a ledger, and show its progress.

        `study` has `KIND` and `run`, which also gets `more`. `steps`: of the progress; with `force`
        the ledger starts empty. An analysis whose result follows from its settings alone passes the
        digest of its `code`: a finished one is then read instead of repeated. Others depend on
        files that change, such as rows of runs, and are always repeated.
        """
        from gcbench.core import progress
        from gcbench.report import analysis as measuring

        name = f"{study.KIND}-{measuring.digest(settings.model_dump(mode='json'))}"
        folder = self.results / name
        if code and not self.force and measuring.finished(folder):
            done = measuring.load(folder)
            other = done.provenance.get("code") != code
            say(f"{folder} is finished{other * OTHER}{done.elsewhere}; --force repeats it")
            return done
        observer = progress.observer(self.progress.value, name, steps)
        try:
            with measuring.Ledger(folder, code).open(afresh=self.force) as ledger:
                if ledger.code != code:
                    say(f"{folder} continues stored work{OTHER}; --force starts over")
                result: Analysis = study.run(settings, command_line(), observer, ledger, **more)
                result.provenance["started"] = ledger.started
                if code:
                    result.provenance["code"] = ledger.code
                return result
        finally:
            observer.close()
            with suppress(OSError):  # an analysis that was refused leaves no empty folder behind
                path = folder / measuring.LEDGER
                if not path.stat().st_size:
                    path.unlink()
                    path.parent.rmdir()


OTHER = ", made by another version of the code"
"""Part of a message; the result is still used, because any edit changes the digest."""
KEYWORD = inspect.Parameter.KEYWORD_ONLY


def with_flags(
    call: Callable[..., None], flags: Sequence[inspect.Parameter], source: Any
) -> Callable[..., None]:
    """Return `call` with these parameters, and the docstring and name of `source`."""
    call.__doc__ = inspect.getdoc(source)
    call.__name__ = source.__name__
    call.__signature__ = inspect.Signature(flags)  # type: ignore[attr-defined]
    call.__annotations__ = {flag.name: flag.annotation for flag in flags}
    return call


def flags_of(group: Any) -> list[inspect.Parameter]:
    """Return a parameter of a command for each field of a named tuple."""
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(name, KEYWORD, default=default, annotation=hints[name])
        for name, default in group._field_defaults.items()
    ]


def with_groups(function: Callable[..., None]) -> Callable[..., None]:
    """Return a command in which each parameter of `function` that is a named tuple is its flags."""
    groups: dict[str, Any] = {}
    flags: list[inspect.Parameter] = []
    for name, flag in inspect.signature(function, eval_str=True).parameters.items():
        if hasattr(flag.annotation, "_field_defaults"):
            groups[name] = flag.annotation
            flags += flags_of(flag.annotation)
        else:
            flags.append(flag.replace(kind=KEYWORD))

    def call(**values: Any) -> None:
        instances = {
            name: group(**{field: values.pop(field) for field in group._fields})
            for name, group in groups.items()
        }
        function(**values, **instances)

    return with_flags(call, flags, function)


def refuse_unused(ctx: typer.Context, used: set[str], mode: str) -> None:
    """Raise UsageError for an option on the command line that a mode does not use."""
    for parameter in ctx.command.params:
        name = str(parameter.name)
        source = ctx.get_parameter_source(name)
        explicit = source is not None and source.name == "COMMANDLINE"
        if explicit and name not in (*used, *Output._fields):
            raise UsageError(f"{parameter.opts[0]} has no effect with {mode}; omit it")


def command_line() -> str:
    """Return the command line of gcbench or of a script."""
    script = Path(sys.argv[0])
    is_script = script.suffix == ".py" and script.name != "__main__.py"
    program = ["python", str(script)] if is_script else ["gcbench"]
    return shlex.join([*program, *sys.argv[1:]])


def numbers(flag: str, text: str) -> list[int]:
    """Return the whole numbers of a comma-separated list, each once; 1e3 is 1000.

    Raises:
        UsageError: an item is not a whole number above 0.
    """
    values = []
    for word in items_of(flag, text):
        value = -1.0
        with suppress(ValueError):
            value = float(word)
        if not 0 < value < math.inf or not value.is_integer():
            raise UsageError(
                f"{flag} {text!r}: whole numbers above 0 with commas expected ({word!r} came), "
                "e.g. 8,64"
            )
        values.append(int(value))
    return list(dict.fromkeys(values))


def make(kind: type[Any], flags: Mapping[str, str] | None = None, /, **fields: Any) -> Any:
    """Return settings of class `kind`.

    `flags`: field -> flag, where the flag is not the field's name with hyphens.

    Raises:
        UsageError: a value is out of range; the message names its flag.
    """
    from pydantic import ValidationError

    try:
        return kind(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0])
        flag = (flags or {}).get(field, f"--{field.replace('_', '-')}")
        what = first["msg"].removeprefix("Value error, ")
        raise UsageError(f"{flag}: {what} (came: {first['input']!r})") from None


LONGEST_MESSAGE = 4000
"""Longest printed error message in characters: a plug-in's errors may have any length."""


def message(text: str) -> str:
    """Return an error message without control sequences, with its middle cut if it is long.

    The beginning names what was received, the end what to do.
    """
    from gcbench.results import sanitize

    text = sanitize.printable(text)
    if len(text) <= LONGEST_MESSAGE:
        return text
    half = LONGEST_MESSAGE // 2
    left = len(text) - 2 * half
    return f"{text[:half]} [... {left} characters left out ...] {text[-half:]}"


MOST_FAULTS = 20
"""Number of printed errors of rows."""


def end_with(faults: Sequence[GcbenchError]) -> None:
    """Print the errors of rows that were left out and exit with code 1, if there are any."""
    for fault in faults[:MOST_FAULTS]:
        say(f"gcbench: left out: {message(str(fault))}")
    if len(faults) > MOST_FAULTS:
        say(f"gcbench: left out: {len(faults) - MOST_FAULTS} more, with errors like these")
    if faults:
        raise typer.Exit(1)
