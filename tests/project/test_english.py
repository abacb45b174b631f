"""The project's text is plain English, without markers of its former private dialect.

A marker is a phrase that a native speaker would not write, such as a verb of speech for data. What
stands in quotation marks or backticks inside a sentence is exempt.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("compressors", "cuda", "gcbench", "results", "tasks", "tests")
UNITS = (
    r"(?:bits?|bytes?|seconds?|threads?|scales?|segments?|messages?|draws?|calls?|parts?|terms?)"
)
PER = r"an? (?:element|worker|step|second|value|segment|tensor|rank|process|payload|bucket|shard)"
PHRASES = {
    name: re.compile(pattern, re.IGNORECASE)
    for name, pattern in {
        "is no + noun (write: is not a)": (
            r"(?<!there )\b(?:is|are|was|were) no\b"
            r"(?! (?:longer|more|fewer|less|larger|smaller|wider|better|worse|faster|slower)\b)"
        ),
        "so many (write: n)": r"\bso many\b",
        "whoever (write: the author)": r"\bwhoever\b",
        "as then (write: as in the original run)": r"\bas then\b",
        "of before, of now": r"\bof (?:before|now)\b(?! the)",
        "told apart (write: distinguished)": r"\btold (?:apart|from)\b",
        "a verb of speech for data": (
            r"\b(?:is|are|was|were|be|been) (?:told|heard)\b|\btells? (?:of|apart)\b"
        ),
        "of which none": r"\bof which (?:none|no)\b",
        "an amount for each (write: per element)": rf"\b{UNITS} {PER}\b",
    }.items()
}
PARTICIPLES = {"found", "told", "said", "kept", "own", "made", "known", "heard", "given", "got"}
QUOTED = re.compile(r"`[^`]*`|\"[^\"]*\"|“[^”]*”")
COMMENT = re.compile(r"/\*.*?\*/|(?://[^\n]*(?:\n\s*)?)+", re.DOTALL)


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield the strings and blocks of comments of a Python file, with their first lines."""
    block: list[str] = []
    start = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            start = start if block else token.start[0]
            block.append(token.string.lstrip("# "))
        elif token.type not in (tokenize.NL, tokenize.NEWLINE):
            if block:
                yield start, " ".join(block)
            block = []
            if token.type == tokenize.STRING:
                yield token.start[0], token.string.strip("rbfu").strip("\"'")
            elif token.type == getattr(tokenize, "FSTRING_MIDDLE", None):
                yield token.start[0], token.string
    if block:
        yield start, " ".join(block)


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the comments of a C++ or CUDA file, with their first lines."""
    for match in COMMENT.finditer(source):
        yield source.count("\n", 0, match.start()) + 1, re.sub(r"^\s*//", "", match[0], flags=re.M)


def bound(source: str) -> Iterator[tuple[int, str]]:
    """Yield the names that a Python file binds: variables, parameters, functions and attributes."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name


def faults(source: str, suffix: str = ".py") -> list[str]:
    """Return the markers in a file's text, one line each."""
    python = suffix == ".py"
    result = []
    for line, text in texts(source) if python else comments(source):
        prose = " ".join(QUOTED.sub("`quoted`", text).split())
        result += [
            f"line {line}: {match[0]!r}: {name}"
            for name, pattern in PHRASES.items()
            for match in pattern.finditer(prose)
        ]
    if python:
        result += [
            f"line {line}: the name {name!r}: use a noun, such as result, rows or buffer"
            for line, name in bound(source)
            if name.strip("_") in PARTICIPLES
        ]
    return result


def files(room: str) -> list[Path]:
    """Return the sources of a room but this file, which quotes the markers."""
    suffixes = (".py", ".cpp", ".hpp", ".cu", ".cuh")
    paths = [path for path in sorted((ROOT / room).rglob("*")) if path.suffix in suffixes]
    return [path for path in paths if path != Path(__file__)]


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_in_plain_english(room):
    paths = files(room)
    assert paths, room
    broken = [
        f"{path.relative_to(ROOT)} {fault}"
        for path in paths
        for fault in faults(path.read_text(), path.suffix)
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    "sentence",
    [
        '"""Return the rows; it is no picture."""',
        "# Seeds that are told apart by so many bits.",
        'raise ValueError(f"{name}: whoever made it")',
        '"""The code\n    of before."""',
        "x = 1  # goes on\n# as then",
        '"""Four bits an element."""',
        '"""What a memory is told of the values."""',
        "found = [1]",
        "def run(self, told): pass",
        "for own in rows: pass",
        "self.kept = 1",
    ],
)
def test_the_dialect_is_noticed(sentence):
    assert faults(sentence)


@pytest.mark.parametrize(
    "sentence",
    [
        '"""There is no such constant, and it is no longer than 4 bits per element."""',
        '"""Refuse a message such as `it is no integer` or "so many"."""',
        "result, rows, buffer, own_memory = 1, 2, 3, 4",
        "print(found)",
        '"""As before the change, n workers send n payloads."""',
    ],
)
def test_plain_sentences_pass(sentence):
    assert not faults(sentence)


def test_comments_of_native_sources_are_read():
    assert faults("int x;  // the code\n        // of before", ".cpp")
    assert faults("/* it is no\n picture */", ".cu")
    assert not faults("int found = 0;  // the first index", ".cpp")
