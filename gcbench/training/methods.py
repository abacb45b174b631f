"""Lists of methods as a command line has them: `topk,topk:ratio=0.001,./mine.py:levels=4`.

Each has the name of a compressor, or a file with one, and its fields after colons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gcbench.core import registry
from gcbench.core.compressor import Compressor
from gcbench.core.errors import UsageError
from gcbench.core.values import items_of
from gcbench.training import grid


def parse(spec: str) -> Compressor:
    """Return the compressor for a word such as topk:ratio=0.001 or ./mine.py:levels=4.

    Raises:
        UsageError: an unknown name, field or value, or several values for a field.
    """
    name, options = grid.method(spec)
    for field, value in options.items():
        if isinstance(value, list | dict | tuple):
            raise UsageError(f"{spec}: {field} takes one value here; name the method twice instead")
    return registry.compressor(name, **options)


def short(word: str) -> str:
    """Return a word with the name of a file's compressor in place of the file: mine:levels=4."""
    start, *fields = word.split(":")
    return ":".join([registry.add_file(start.strip()), *fields])


def sources(chosen: Mapping[str, Compressor]) -> dict[str, str]:
    """Return the digest of each method's source (`registry.source_digest`), by the method's word.

    They are part of an analysis' settings, so a result is not reused after a method was edited.
    """
    return {word: registry.source_digest(method.name) for word, method in chosen.items()}


def all_of(specs: str | None, default: Sequence[str] | None = None) -> dict[str, Compressor]:
    """Return the methods of a comma-separated list, by their words.

    Without a list: those of `default`, or else all that are registered.

    Raises:
        UsageError: see `parse`, or a word is empty or comes twice.
    """
    names = default or registry.compressors()
    words = list(names) if specs is None else items_of("--compressor", specs)
    if len(set(words)) < len(words):
        raise UsageError(f"{specs!r}: different methods with commas expected, e.g. none,topk")
    return {word: parse(word) for word in words}
