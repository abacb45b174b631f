"""Run a script of this folder as a command: flags from its `Settings`, tables on the terminal."""

from __future__ import annotations

import sys
from types import ModuleType

import typer

from gcbench import cli
from gcbench.commands.derived import command
from gcbench.commands.helptext import PlainCommand


def main(study: ModuleType | None = None) -> None:
    """Run an analysis, by default that of the `__main__` module, with the flags in `sys.argv`."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(cls=PlainCommand)(command(study or sys.modules["__main__"]))
    cli.main(run=app)
