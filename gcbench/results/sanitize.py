"""Rows and tables of other people: whatever they hold is shown as text, and nothing of it is run.

A file that somebody sends may hold control sequences for a terminal, formulas for a spreadsheet,
tags for a browser, or nesting that exhausts a reader. Characters that are not printable are shown
as their escapes; what is too deep or too long is refused with its place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gcbench.core.errors import GcbenchError

LONGEST = 20_000
"""Characters of a string in a row."""
DEEPEST = 12
CELL = 200
"""Characters of a cell in a table that is shown."""
LABEL = 60
"""Characters of a label in a picture."""
FORMULAS = ("=", "+", "-", "@", "\t", "\r")
"""What a cell begins with that a spreadsheet takes for a formula."""


def printable(text: str, keep: str = "\n") -> str:
    """Return text without control sequences, lone surrogates and marks of direction.

    These are replaced by their escapes, as Python writes them, and other white space by a space.
    `keep`: characters that stay as they are.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        c
        if c.isprintable() or c in keep
        else " "
        if c.isspace() and c not in "\x1c\x1d\x1e\x1f\x85"
        else c.encode("unicode_escape").decode()
        for c in text
    )


def plain(value: Any, where: str, keep: str = "", depth: int = 0) -> Any:
    """Return a JSON value with all its text printable.

    Raises:
        GcbenchError: it is nested too deep, or a string in it is too long; `where` is its place.
    """
    if depth > DEEPEST:
        raise GcbenchError(f"{where} is nested more than {DEEPEST} deep, which rows never are")
    if isinstance(value, str):
        if len(value) > LONGEST:
            raise GcbenchError(
                f"{where} is a text of {len(value)} characters; {LONGEST} at most are allowed"
            )
        return printable(value, keep)
    if isinstance(value, Mapping):
        return {
            plain(key, f"{where}, a key", keep): plain(
                inner, f"{where}, `{cut(printable(str(key)), LABEL)}`", keep, depth + 1
            )
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [plain(inner, where, keep, depth + 1) for inner in value]
    return value


def is_plain(row: Mapping[str, Any]) -> bool:
    """Return whether `plain` surely changes nothing in a row and raises nothing: a quick test.

    The row consists of JSON values. False says nothing.
    """
    for key, value in row.items():
        if isinstance(value, (dict, list)):
            value = _encode(value)
        if isinstance(value, str) and not is_plain_text(value):
            return False
        if not (key.isprintable() and key.isascii()):
            return False
    return True


_encode = json.JSONEncoder(default=str).encode


def is_plain_text(text: str) -> bool:
    """Return whether `plain` surely changes nothing in a text, or in the JSON value it encodes."""
    if len(text) > LONGEST or not (text.isprintable() and text.isascii()):
        return False
    if text.count("{") + text.count("[") >= DEEPEST:
        return False
    return "\\" not in text or "\\" not in text.replace('\\"', "")  # of other characters


def cut(text: str, length: int) -> str:
    """Return a text of at most `length` characters; an ellipsis is where more were."""
    return text if len(text) <= length else text[: length - 1] + "…"


def label(text: str) -> str:
    """Return a text for a picture: of one length, and no mathematics of matplotlib's."""
    return cut(text, LABEL).replace("$", r"\$")


def csv_cell(value: Any) -> Any:
    """Return a cell that no spreadsheet takes for a formula."""
    formula = isinstance(value, str) and value.startswith(FORMULAS) and value != "-"
    return f"'{value}" if formula else value


SCALARS = (str, int, float, bool, type(None))
CONFIG = {name: dict for name in ("options", "task_options", "memory_options")}
PROVENANCE: Mapping[str, type] = {
    **dict.fromkeys(
        (
            "started",
            "finished",
            "command",
            "commit",
            "backend",
            "python",
            "times",
            "source",
            "data",
        ),
        str,
    ),
    **dict.fromkeys(("versions", "machine", "objects", "plugins"), dict),
}


_PLAIN_TYPES = frozenset((*SCALARS, dict))


def wrong_type(kind: str, values: Mapping[str, Any], types: Mapping[str, type]) -> str:
    """Return what is wrong with the types in a row's config or provenance, or nothing."""
    unusual = [key for key, value in values.items() if type(value) not in _PLAIN_TYPES]
    for key in (*(key for key in types if key in values), *unusual):
        value, expected = values[key], types.get(key)
        if expected is None:
            many = value if isinstance(value, list) else [value]
            right = all(isinstance(each, (*SCALARS, dict)) for each in many)
        else:
            right = value is None or isinstance(value, expected)
        if not right:
            expectation = "" if expected is None else f", a {expected.__name__} expected"
            return f"`{kind}.{cut(key, LABEL)}` is a {type(value).__name__}{expectation}"
    for key in ("versions", "machine"):
        for name, value in (values.get(key) or {}).items() if key in types else ():
            if not isinstance(value, SCALARS):
                return f"`{kind}.{key}.{cut(name, LABEL)}` is a {type(value).__name__}"
    return ""
