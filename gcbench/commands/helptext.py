"""Help in plain text: options by group, and no word broken or cut at any width.

Typer's own help, in rich's panels, shortens names to an ellipsis and breaks words in a narrow
terminal.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from gcbench.core import output
from gcbench.core.errors import GcbenchError

NARROW = 72
"""In terminals of fewer columns descriptions stand under their options, not beside them."""
BESIDE = 28
"""How many columns the options take where descriptions stand beside them."""


def wrapped(text: str, width: int, indent: str = "", hanging: str = "") -> str:
    """Return text in lines of at most `width` columns, broken only between words."""
    return textwrap.fill(
        re.sub(r"\s*\n\s*", " ", text.strip()),
        width,
        initial_indent=indent,
        subsequent_indent=indent + hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _paragraph(text: str, width: int) -> str:
    """Return a paragraph of a docstring; the entries of a list, by their indents, stay apart."""
    if "\n " not in f"\n{text}":
        return wrapped(text, width, "  ")
    least = min(len(line) - len(line.lstrip()) for line in text.split("\n"))
    entries = re.split(rf"\n(?= {{{least}}}\S)", text)
    return "\n".join(wrapped(entry, width, "  " + " " * least, "    ") for entry in entries)


def _rows(records: list[tuple[str, str]], width: int) -> str:
    lines = []
    for name, help in ((name, " ".join(help.split())) for name, help in records):
        if width < NARROW or len(name) > BESIDE - 2:
            lines.append(f"  {name}")
            if help:
                lines.append(wrapped(help, width, " " * (6 if width < NARROW else BESIDE + 2)))
        else:
            text = wrapped(help, width, " " * (BESIDE + 2))
            lines.append(f"  {name:<{BESIDE}}{text[BESIDE + 2 :]}".rstrip())
    return "\n".join(lines)


def _sections(command: Any, ctx: Any) -> dict[str, list[tuple[str, str]]]:
    """Return the records of a command's parameters by their group, arguments first."""
    panels: dict[str, list[tuple[str, str]]] = {"Arguments": []}
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is None:
            continue
        usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
        panel = getattr(parameter, "rich_help_panel", None) or usual
        panels.setdefault(panel, []).append(record)
    last = panels.pop("Options", [])  # options that every command has come after its own
    return {title: records for title, records in {**panels, "Options": last}.items() if records}


class _Plain:
    """Writes the help of a command, or of a group of commands, as plain text."""

    def format_help(self: Any, ctx: Any, formatter: Any) -> None:
        """Write usage, the docstring, options by group, and commands."""
        self.format_usage(ctx, formatter)
        width = formatter.width
        for paragraph in (self.help or "").split("\n\n"):
            formatter.write("\n" + _paragraph(paragraph, width) + "\n")
        for title, records in _sections(self, ctx).items():
            formatter.write(f"\n{title}:\n{_rows(records, width)}\n")
        names = self.list_commands(ctx) if hasattr(self, "list_commands") else []
        panels: dict[str, list[tuple[str, str]]] = {}
        for name in names:
            command = self.get_command(ctx, name)
            help = re.split(r"[:;.](?:\s|$)", command.help or "")[0]
            panel = getattr(command, "rich_help_panel", None) or "Commands"
            panels.setdefault(str(panel), []).append((name, " ".join(help.split())))
        for title, records in panels.items():
            formatter.write(f"\n{title}:\n{_rows(records, width)}\n")


class PlainCommand(_Plain, TyperCommand):
    """A command with plain help, whose result alone reaches stdout and decides the exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command.

        Raises:
            GcbenchError: something that it called ended the process as if all went well; commands
                return, and exit only with another code.
        """
        try:
            with output.reserved():
                return super().invoke(ctx)
        except (SystemExit, typer.Exit) as ended:
            code = ended.code if isinstance(ended, SystemExit) else ended.exit_code
            if isinstance(ended, typer.Exit) and code:
                raise
            raise GcbenchError(
                f"{self.name} was ended before it had a result: a plug-in called "
                f"sys.exit({code!r}) or raised {type(ended).__name__}. Raise an error instead; "
                "`gcbench --debug ...` shows where"
            ) from ended


class PlainGroup(_Plain, TyperGroup):
    """A group of commands with plain help."""


def make_plain(app: typer.Typer) -> None:
    """Give an app, its commands and its groups plain help."""
    app.info.cls = PlainGroup
    for command in app.registered_commands:
        command.cls = PlainCommand
    for group in app.registered_groups:
        group.cls = PlainGroup
        if group.typer_instance is not None:
            make_plain(group.typer_instance)
