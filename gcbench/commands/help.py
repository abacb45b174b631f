"""`gcbench help`: lists the guides of gcbench/docs, or prints one."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from gcbench.core import output
from gcbench.core.errors import unknown

DOCS = Path(__file__).parents[1] / "docs"
COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
"""Instructions to the tests and to `make docs`, which are not for readers."""


def guides() -> dict[str, str]:
    """Return the title of each guide, by topic."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}
    return {topic: text.partition("\n")[0].removeprefix("# ") for topic, text in texts.items()}


def _topics(incomplete: str) -> list[str]:
    return [topic for topic in guides() if topic.startswith(incomplete)]


def _page(text: str) -> None:
    """Show Markdown in the terminal's pager."""
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console(width=min(Console().width, 100))
    with console.pager(styles=True):
        console.print(Markdown(text))


def help_(
    topic: Annotated[
        str | None, typer.Argument(help="A guide.", autocompletion=_topics, show_default=False)
    ] = None,
) -> None:
    """List the guides, or show one."""
    titles = guides()
    if topic is None:
        width = max(map(len, titles))
        lines = [f"  {name:<{width}}  {title}" for name, title in titles.items()]
        output.emit("\n".join(["Guides (gcbench help TOPIC):", "", *lines]))
        return
    if topic not in titles:
        raise unknown("topic", topic, titles, "For a command: gcbench COMMAND --help.")
    text = COMMENT.sub("", (DOCS / f"{topic}.md").read_text(encoding="utf-8"))
    if sys.stdout.isatty():
        _page(text)
    else:
        output.emit(text, end="")
