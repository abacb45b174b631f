"""Make a command from an analysis: its flags are the fields of the module's `Settings`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Annotated, Any, get_args, get_origin

import typer

from gcbench.commands import (
    ANALYSES,
    DataDir,
    Details,
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
from gcbench.core.errors import GcbenchError

PLAIN = (str, int, float, bool)
COMMON: dict[str, tuple[Any, Any]] = {
    "results": (Results, ANALYSES),
    "plot": (Plot, None),
    "force": (Force, False),
    "progress": (Shown, Progress.auto),
    "details": (Details, False),
    "format_": (Formatted, Format.table),
    "json": (Json, False),
}
"""Parameters of every analysis' command besides its settings: annotation and default."""
DATA = "data_dir"
"""If a module's `run` has this parameter, its command has the flag `--data-dir`."""


def _flag(name: str, field: Any) -> inspect.Parameter:
    """Return the command-line parameter of one settings field; lists are comma-separated.

    Raises:
        GcbenchError: no flag can represent the field's type or name.
    """
    kind = field.annotation
    is_list = get_origin(kind) is list
    if is_list:
        (kind,) = get_args(kind)
        kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    if kind not in PLAIN or name in (*COMMON, DATA):
        raise GcbenchError(
            f"field {name!r} of its settings is {field.annotation}; a flag needs str, int, float, "
            f"bool or a list of one of them, and a name other than {', '.join(COMMON)}"
        )
    default: Any = ... if field.is_required() else field.get_default(call_default_factory=True)
    if is_list and default is not ...:
        default = ",".join(map(str, default))
    option = typer.Option(help=(field.description or "") + is_list * " Comma-separated.")
    type_: Any = str if is_list else kind
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if default is ... else default,
        annotation=Annotated[type_, option],
    )


def command(study: ModuleType) -> Callable[..., None]:
    """Return the command of an analysis.

    `study` has `KIND`; a pydantic class `Settings`; `run(settings, command, observer, ledger)`,
    with an additional `data_dir` if it trains; `draw(analysis, path)`; and, if its progress has
    several steps, `steps(settings)`. The module's docstring is the help text.

    Raises:
        GcbenchError: no flag can represent a field of `Settings`.
    """
    fields = study.Settings.model_fields
    flags = [_flag(name, field) for name, field in fields.items()]
    lists = {name for name, field in fields.items() if get_origin(field.annotation) is list}
    common: dict[str, tuple[Any, Any]] = dict(COMMON)
    if trains := DATA in inspect.signature(study.run).parameters:
        common[DATA] = (DataDir, None)

    def call(**values: Any) -> None:
        from gcbench.report import analysis as measuring

        options = {name: values.pop(name) for name in common}
        for name in lists:
            values[name] = [item for item in values[name].split(",") if item]
        settings = make(study.Settings, **values)
        result = long_work(
            study.KIND,
            settings,
            options["results"],
            options["progress"],
            getattr(study, "steps", lambda settings: 1)(settings),
            partial(study.run, data_dir=options[DATA]) if trains else study.run,
            force=options["force"],
            code=measuring.code(study),
        )
        deliver(
            result,
            options["results"],
            options["plot"],
            options["format_"],
            as_json=options["json"],
            details=options["details"],
            draw=study.draw,
        )
        if result.failed:
            raise typer.Exit(1)

    keyword = inspect.Parameter.KEYWORD_ONLY
    flags.sort(key=lambda flag: flag.default is not inspect.Parameter.empty)
    flags += [
        inspect.Parameter(name, keyword, default=default, annotation=annotation)
        for name, (annotation, default) in common.items()
    ]
    call.__doc__ = inspect.getdoc(study)
    call.__signature__ = inspect.Signature(flags)  # type: ignore[attr-defined]
    call.__annotations__ = {flag.name: flag.annotation for flag in flags}
    return call
