"""A compressor in a user's file: its current content runs, and results record its hash."""

from __future__ import annotations

import hashlib
import json
import os

import pytest
import torch

import gcbench
from gcbench.core import registry
from gcbench.core.errors import GcbenchError
from gcbench.integrations import check
from gcbench.integrations.scheme import Scheme

TIMES = """
import torch
from gcbench.core.compressor import Compressor

class Times(Compressor):
    def encode(self, x, ctx):
        return x * 1

    def decode(self, payload, ctx):
        return payload.parts[0]

    def layout(self, segments, count=1):
        return ((torch.float32, segments.numel),)
"""


@pytest.fixture
def times(tmp_path, forget):
    path = tmp_path / "times.py"
    path.write_text(TIMES)
    os.utime(path, (1e9, 1e9))
    return path


def edit(path, factor: int) -> None:
    """Write code with the same size and mtime, the key of cached byte code."""
    path.write_text(TIMES.replace("x * 1", f"x * {factor}"))
    os.utime(path, (1e9, 1e9))


def factor(method) -> float:
    return float(method.decompress(method.compress(torch.ones(3)))[0])


def sha256(path) -> str:
    """Return the digest that is published of a file: of its name and its bytes."""
    local = hashlib.sha256(path.read_bytes()).digest()
    return hashlib.sha256(f"{path.name}\0".encode() + local).hexdigest()


@pytest.mark.parametrize("word", ["file", "name"])
def test_an_edited_file_is_imported_again_where_it_is_named(times, word):
    """By its path and by its name. What was made of it before keeps its code."""
    first = gcbench.get_compressor(str(times))
    summary = Scheme.of(first, None, None, None).summary()
    assert factor(first) == 1
    assert type(gcbench.get_compressor(str(times))) is type(first)
    edit(times, 2)
    second = gcbench.get_compressor(str(times) if word == "file" else "times")
    assert factor(second) == 2
    assert factor(first) == 1
    after = Scheme.of(second, None, None, None).summary()
    assert summary.pop("code of compressor") != after.pop("code of compressor")
    assert summary == after


def test_digests_are_those_of_the_code_that_runs(times):
    gcbench.get_compressor(str(times))
    entry, before = registry.compressors()["times"], sha256(times)
    edit(times, 3)
    assert registry.origin(entry)["sha256"] == before
    assert registry.source_digest("times") == before[:10]
    assert factor(registry.compressor("times")) == 1, "as at a later stage of a run"
    assert factor(gcbench.get_compressor(str(times))) == 3
    assert registry.origin(entry)["sha256"] == sha256(times) != before
    assert registry.source_digest("times") == sha256(times)[:10]


def test_a_file_of_the_same_name_elsewhere_is_another(times, tmp_path, monkeypatch):
    gcbench.get_compressor(str(times))
    other = tmp_path / "other" / "times.py"
    other.parent.mkdir()
    edit(other, 4)
    monkeypatch.setenv(registry.FILES, json.dumps([str(other)]))
    registry.compressors.cache_clear()
    assert factor(registry.compressor("times")) == 4
    assert registry.source_digest("times") == sha256(other)[:10]
    other.unlink()
    assert factor(gcbench.get_compressor("times")) == 4, "it is imported already"


def test_a_folder_may_have_a_colon_in_its_name(times, tmp_path):
    inner = tmp_path / "12:30" / "inner.py"
    inner.parent.mkdir()
    edit(inner, 6)
    assert factor(gcbench.get_compressor(str(times))) == 1
    assert factor(gcbench.get_compressor(str(inner))) == 6
    assert factor(gcbench.get_compressor("times")) == 1


def test_an_edit_that_does_not_load_is_said(times):
    gcbench.get_compressor(str(times))
    times.write_text("1 / 0")
    for _ in range(2):
        with pytest.raises(GcbenchError, match=r"times\.py cannot be loaded: ZeroDivisionError"):
            gcbench.get_compressor(str(times))
    times.unlink()
    with pytest.raises(GcbenchError, match=r"times\.py cannot be read"):
        gcbench.get_compressor("times")
    edit(times, 5)
    assert factor(gcbench.get_compressor(str(times))) == 5


@pytest.mark.parametrize("line", ["import torch; torch.rand(1)", "import random; random.random()"])
def test_a_file_that_uses_a_global_generator_is_refused(times, line):
    with times.open("a") as file:
        file.write(f"\n{line}\n")
    for _ in range(2):
        with pytest.raises(GcbenchError, match="random generator when it is loaded"):
            gcbench.get_compressor(str(times))


def test_a_warning_names_the_file_to_verify(times, monkeypatch):
    method = gcbench.get_compressor(str(times))
    monkeypatch.chdir(times.parent)
    result = check.compare(0, "weight", torch.ones(300), -torch.ones(300), 32.0)
    for created, word in ((method, "./times.py"), (gcbench.get_compressor("topk"), "topk")):
        with pytest.warns(UserWarning, match=f"gcbench verify {word}$"):
            check.warn(created, check.Bounds(1.0), [result])
