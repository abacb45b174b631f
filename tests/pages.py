"""The pages of the project: their code blocks, and the tables that commands generate.

A fence opens a block: ```sh, ```python, or a language that is not run (`NOT_CODE`). A Python block
whose first line is `# NAME.py` is saved under that name; another one is run. The comment
`<!-- not run: REASON -->` above a fence leaves a block out. A ```text block right
below another block repeats its output. A generated table stands between
`<!-- generated: COMMAND -->` and `<!-- end -->`; `python -m pages` (`make docs`) writes it again.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from preloaded import ROOT, Programs, home

NOT_CODE = ("text", "toml", "json", "yaml", "bibtex")
OPENING = re.compile(r"^ *```(.*)$")
LEFT_OUT = re.compile(r"^<!-- not run: (.+) -->$")
FILE = re.compile(r"# ([\w.-]+\.py)\n")
GENERATED = re.compile(
    r"(?P<head><!-- generated: (?P<command>.+?) -->\n)(?P<body>.*?)(?P<tail><!-- end -->)", re.S
)


class PageError(Exception):
    """A page whose blocks cannot be read."""


@dataclass(frozen=True)
class Block:
    """A code block: its first line, language, text, and why it is not run, if it is not."""

    line: int
    language: str
    text: str
    left_out: str = ""

    @property
    def script(self) -> str:
        """The block as a script of bash."""
        if self.language == "sh":
            return self.text
        name = FILE.match(self.text)
        path = name[1] if name else f"block_{self.line}.py"
        save = f"cat > {path} <<'END_OF_FILE'\n{self.text}END_OF_FILE\n"
        return save if name else f"{save}python {path}\n"


def pages() -> list[Path]:
    """Return the pages whose blocks and tables are tested."""
    names = ("README.md", "CONTRIBUTING.md", "results/README.md")
    return [*(ROOT / name for name in names), *sorted((ROOT / "gcbench/docs").glob("*.md"))]


def blocks(text: str) -> Iterator[Block]:
    """Yield the code blocks of a page.

    Raises:
        PageError: a fence without a known language, or without an end.
    """
    lines = text.splitlines()
    start, last = None, -9
    for number, line in enumerate(lines):
        fence = OPENING.match(line)
        if not fence:
            continue
        if start is None:
            language = fence[1].strip()
            if language not in ("sh", "python", *NOT_CODE):
                choices = ", ".join(("sh", "python", *NOT_CODE))
                raise PageError(f"line {number + 1}: a block of {language!r}; known: {choices}")
            start = number
            continue
        language = lines[start].strip("` ")
        marker = LEFT_OUT.match(lines[start - 1]) if start else None
        repeats = language == "text" and start - last <= 2
        if language not in NOT_CODE or repeats:
            text = "".join(f"{each}\n" for each in lines[start + 1 : number])
            yield Block(start + 1, language, text, marker[1] if marker else "")
        start, last = None, number
    if start is not None:
        raise PageError(f"line {start + 1}: a block without an end")


def generated(text: str, run: Callable[[str], str]) -> str:
    """Return the page with its tables as `run`, which takes a command, prints them now."""

    def again(match: re.Match[str]) -> str:
        return f"{match['head']}\n{run(match['command']).strip()}\n\n{match['tail']}"

    return GENERATED.sub(again, text)


def main() -> None:
    """Write the generated tables of all pages again."""
    with home(), tempfile.TemporaryDirectory() as folder:
        programs = Programs(Path(folder))

        def run(command: str) -> str:
            done = programs.shell(command, ROOT, 300)
            if done.returncode:
                sys.exit(f"{command}\n{done.stderr}")
            return done.stdout

        for path in pages():
            text = path.read_text()
            new = generated(text, run)
            if new != text:
                path.write_text(new)
                print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    try:
        main()
    except subprocess.TimeoutExpired as error:
        sys.exit(str(error))
