"""Commands that are generated from the modules of analyses: flags from the fields of `Settings`."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer

from gcbench import studies
from gcbench.commands import (
    ANALYSES,
    DataDir,
    Force,
    Format,
    Formatted,
    Json,
    Plot,
    Progress,
    Results,
    Shown,
    deliver,
    long_work,
    make,
)
from gcbench.commands.helptext import PlainCommand, PlainGroup
from gcbench.core.errors import GcbenchError

PLAIN = (str, int, float, bool)
COMMON: dict[str, tuple[Any, Any]] = {
    "results": (Results, ANALYSES),
    "plot": (Plot, None),
    "force": (Force, False),
    "progress": (Shown, Progress.auto),
    "format_": (Formatted, Format.table),
    "json": (Json, False),
}
"""Parameters of every analysis' command besides its settings: annotation and default."""
DATA = "data_dir"
"""If a module's `run` has this parameter, its command has the flag `--data-dir`."""


def _flag(name: str, field: Any) -> inspect.Parameter:
    """Return a field of the settings as a command's parameter; a list is given with commas.

    Raises:
        GcbenchError: no flag can be made of the field's type or name.
    """
    kind = field.annotation
    lists = get_origin(kind) is list
    if lists:
        (kind,) = get_args(kind)
        kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    if kind not in PLAIN or name in (*COMMON, DATA):
        raise GcbenchError(
            f"field {name!r} of its settings is {field.annotation}; str, int, float, bool or a "
            f"list of one of them, under another name than {', '.join(COMMON)}, makes a flag"
        )
    default: Any = ... if field.is_required() else field.get_default(call_default_factory=True)
    if lists and default is not ...:
        default = ",".join(map(str, default))
    shown = typer.Option(help=(field.description or "") + lists * " With commas.")
    typed: Any = str if lists else kind
    annotation = Annotated[typed, shown]
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if default is ... else default,
        annotation=annotation,
    )


def command(kind: str, module: str) -> Callable[..., None]:
    """Return the command of an analysis, whose flags are the fields of its settings.

    If the module cannot be used, the command that is returned raises an error with the reason, so
    that one faulty package does not break the other commands.
    """
    try:
        study = importlib.import_module(module)
        fields = study.Settings.model_fields
        flags = [_flag(name, field) for name, field in fields.items()]
        lists = {name for name, field in fields.items() if get_origin(field.annotation) is list}
        told = inspect.getdoc(study) or ""
        common: dict[str, tuple[Any, Any]] = dict(COMMON)
        if trains := DATA in inspect.signature(study.run).parameters:
            common[DATA] = (DataDir, None)
    except (Exception, SystemExit) as error:
        said = f"the analysis {kind!r} of {module}: {type(error).__name__}: {error}"

        def broken() -> None:
            raise GcbenchError(said)

        broken.__doc__ = f"Cannot be used: {said}"
        return broken

    def call(**given: Any) -> None:
        from gcbench.reporting import analysis as measuring

        chosen = {name: given.pop(name) for name in common}
        for name in lists:
            given[name] = [word for word in given[name].split(",") if word]
        settings = make(study.Settings, **given)
        made = long_work(
            kind,
            settings,
            chosen["results"],
            chosen["progress"],
            getattr(study, "steps", lambda settings: 1)(settings),
            partial(study.run, data_dir=chosen[DATA]) if trains else study.run,
            force=chosen["force"],
            code=measuring.code(study),
        )
        deliver(made, chosen["results"], chosen["plot"], chosen["format_"], as_json=chosen["json"])
        if made.failed:
            raise typer.Exit(1)

    keyword = inspect.Parameter.KEYWORD_ONLY
    flags.sort(key=lambda flag: flag.default is not inspect.Parameter.empty)
    flags += [
        inspect.Parameter(name, keyword, default=default, annotation=annotation)
        for name, (annotation, default) in common.items()
    ]
    call.__doc__ = told
    call.__signature__ = inspect.Signature(flags)  # type: ignore[attr-defined]
    call.__annotations__ = {flag.name: flag.annotation for flag in flags}
    return call


def _docstring(module: str) -> str:
    """Return the docstring of a module, without importing it."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return ""
    return ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""


class Commands(PlainGroup):
    """The commands that are written out, and those generated for `studies.DERIVED`.

    The module of a generated command is imported when the command is called, so that `--help` and
    the other commands do not wait for it.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        for name in studies.DERIVED:  # names are listed, completed and suggested
            self.commands[name] = PlainCommand(name=name)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; for an analysis one that has its name and help but cannot run.

        It serves the list of commands in `--help`; `resolve_command` returns the real one.
        """
        if cmd_name in studies.DERIVED:
            return PlainCommand(name=cmd_name, help=_docstring(studies.DERIVED[cmd_name]))
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return name, command and arguments of a call; imports the module of an analysis."""
        name = args[0] if args else ""
        if name not in studies.DERIVED:
            return super().resolve_command(ctx, args)
        app = typer.Typer(
            add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
        )
        app.command(name=name, cls=PlainCommand)(command(name, studies.DERIVED[name]))
        return name, typer.main.get_command(app), args[1:]
