"""Make a command from an analysis: its flags are the fields of the module's `Settings`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

import typer

from gcbench.commands import KEYWORD, DataDir, Output, flags_of, make, with_flags
from gcbench.core import files, registry
from gcbench.core.errors import GcbenchError
from gcbench.core.values import items_of

if TYPE_CHECKING:
    from pydantic import BaseModel

PLAIN = (str, int, float, bool)
DATA = "data_dir"
"""If a module's `run` has this parameter, its command has the flag `--data-dir`."""
SOURCES = "sources"
"""A field of settings without a flag, which the command fills: see `_sources`."""


def _flag(name: str, field: Any) -> inspect.Parameter:
    """Return the command-line parameter of one settings field; lists are comma-separated."""
    kind = field.annotation
    is_list = get_origin(kind) is list
    if is_list:
        (kind,) = get_args(kind)
        kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    if kind not in PLAIN or name in (*Output._fields, DATA):
        raise GcbenchError(
            f"field {name!r} of its settings is {field.annotation}; a flag needs str, int, float, "
            f"bool or a list of one of them, and a name other than {', '.join(Output._fields)}"
        )
    default: Any = ... if field.is_required() else field.get_default(call_default_factory=True)
    if is_list and default is not ...:
        default = ",".join(map(str, default))
    option = typer.Option(help=(field.description or "") + is_list * " Comma-separated.")
    type_: Any = str if is_list else kind
    return inspect.Parameter(
        name,
        KEYWORD,
        default=inspect.Parameter.empty if default is ... else default,
        annotation=Annotated[type_, option],
    )


def _sources(settings: BaseModel) -> dict[str, str]:
    """Return the SHA-256 of the files that the settings name, and of plug-ins, by word.

    They are part of the settings, so a result is not reused after one of them was edited.
    """
    digests = {}
    values = settings.model_dump(exclude={SOURCES}).values()
    words = [word for value in values for word in (value if isinstance(value, list) else [value])]
    for word in (word for word in words if isinstance(word, str)):
        name = word.partition(":")[0]
        plugins = (registry.compressors().get(name), registry.tasks().get(name))
        if entry := next(filter(None, plugins), None):
            if origin := registry.origin(entry):
                digests[word] = origin["sha256"]
        elif Path(name).is_file():
            digests[word] = files.hash_file(Path(name))
    return digests


def command(study: ModuleType) -> Callable[..., None]:
    """Return the command of an analysis.

    `study` has `KIND`; a pydantic class `Settings` with the field `sources`; `run(settings,
    command, observer, ledger)`, with an additional `data_dir` if it trains; `draw(analysis, path)`;
    and, if its progress has several steps, `steps(settings)`. The module's docstring is the help
    text.

    Raises:
        GcbenchError: no flag can represent a field of `Settings`.
    """
    fields = {k: v for k, v in study.Settings.model_fields.items() if k != SOURCES}
    flags = [_flag(name, field) for name, field in fields.items()]
    lists = {name for name, field in fields.items() if get_origin(field.annotation) is list}
    if trains := DATA in inspect.signature(study.run).parameters:
        flags.append(inspect.Parameter(DATA, KEYWORD, default=None, annotation=DataDir))

    def call(**values: Any) -> None:
        from gcbench.report import analysis as measuring

        out = Output(**{name: values.pop(name) for name in Output._fields})
        data_dir = values.pop(DATA, None)
        for name in lists:
            text = values[name]
            values[name] = items_of(f"--{name.replace('_', '-')}", text) if text else []
        settings = make(study.Settings, **values)
        settings = settings.model_copy(update={SOURCES: _sources(settings)})
        steps = getattr(study, "steps", lambda settings: 1)(settings)
        more = {DATA: data_dir} if trains else {}
        result = out.run(study, settings, steps, measuring.code(study), **more)
        out.deliver(result, draw=study.draw)
        if result.failed:
            raise typer.Exit(1)

    flags.sort(key=lambda flag: flag.default is not inspect.Parameter.empty)
    return with_flags(call, [*flags, *flags_of(Output)], study)
