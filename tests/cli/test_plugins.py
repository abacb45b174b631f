"""What a plug-in prints, raises or ends: no success without a result, no stray text in JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from commands import invoke

from gcbench.checks import properties
from gcbench.core import registry
from gcbench.core.errors import UsageError

METHOD = '''
import os, sys
from dataclasses import dataclass
import torch, typer
import gcbench
{top}

@dataclass(frozen=True)
class Mine(gcbench.Compressor):
    """Halves."""

    def encode(self, x, ctx):
        {encode}
        return x.half()

    def decode(self, payload, ctx):
        return payload.parts[0].float()
'''
RUN = ("run", "--task", "quadratic", "--steps", "2", "--workers", "2", "--batch", "4")


def method(folder: Path, top: str = "", encode: str = "pass") -> Path:
    path = folder / "mine.py"
    path.write_text(METHOD.format(top=top, encode=encode))
    return path


def test_an_exception_of_a_plug_in_does_not_stop_the_other_runs_of_a_grid(tmp_path: Path) -> None:
    path = method(tmp_path, encode="raise RuntimeError('boom')")
    methods = f"none,{path},fp16"
    done = invoke(*RUN, "--compressor", methods, "--results", tmp_path / "runs", "--json")
    assert done.code == 1
    assert [one["compressor_name"] for one in json.loads(done.out)] == ["none", "fp16"]
    (line,) = (line for line in done.err.splitlines() if "failed" in line)
    assert all(word in line for word in ("mine", "RuntimeError", "boom"))


ENDS = ("sys.exit(0)", "sys.exit()", "sys.exit(3)", "raise typer.Exit(0)", "exit(0)")


@pytest.mark.parametrize("where", ["top", "encode"])
@pytest.mark.parametrize(
    ("command", "code"), [*(("run", code) for code in ENDS), ("verify", ENDS[0])]
)
def test_a_plug_in_that_exits_is_no_success(
    tmp_path: Path, where: str, command: str, code: str
) -> None:
    path = method(tmp_path, **{where: code})
    words = [*RUN, "--compressor", path, "--results", tmp_path / "runs", "--json"]
    words = words if command == "run" else ["verify", path, "--no-processes"]
    done = invoke(*words)
    assert done.code == 1, done
    if command == "run":
        assert done.out == ""
        assert not list((tmp_path / "runs").glob("*/summary.json"))


def test_a_claim_that_raises_ends_a_run_before_its_training(tmp_path: Path) -> None:
    """Its summary asked for the nominal bits, after the last step."""
    path = method(tmp_path, encode="raise AssertionError('trained')")
    claims = """

class Claims(gcbench.Claims, of=Mine):
    @property
    def nominal_bits(self):
        raise AssertionError("no bits")
"""
    path.write_text(path.read_text() + claims)
    done = invoke(*RUN, "--compressor", path, "--results", tmp_path / "runs")
    assert done.code == 1
    assert "no bits" in done.err


def test_two_files_of_one_name_are_two_methods_in_one_process(tmp_path: Path, forget) -> None:
    """Also where the file was edited: nothing of the first one may be used again."""

    def dtype(folder: Path, out: str) -> str:
        path = method(folder)
        path.write_text(path.read_text().replace("return x.half()", f"return x.{out}()"))
        ((_, only),) = properties.configurations(registry.add_file(str(path)))
        return str(only.compress(torch.ones(4)).payload.parts[0].dtype)

    other = tmp_path / "other"
    other.mkdir()
    assert dtype(tmp_path, "half") == "torch.float16"
    assert dtype(tmp_path, "double") == "torch.float64"
    forget()
    assert dtype(other, "bfloat16") == "torch.bfloat16"


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (
            "from gcbench.core.compressor import Compressor\n\nclass Mine(Compressor): pass",
            "decode",
        ),
        ("from gcbench.compressors.topk import TopK", "class Mine(Compressor)"),
        (
            "from gcbench.compressors.topk import *\nclass A(TopK): pass\nclass B(TopK): pass",
            "A, B",
        ),
    ],
    ids=["incomplete", "imported", "two"],
)
def test_a_file_without_one_whole_method_is_refused_with_what_it_has(
    tmp_path: Path, forget, source: str, named: str
) -> None:
    """A method that lacks `decode` counted as none at all."""
    path = tmp_path / "mine.py"
    path.write_text(source)
    done = invoke("verify", path)
    assert (done.code, named in done.err, " 0 " in done.err) == (1, True, False), done.err


def test_two_names_of_a_class_in_a_file_are_one_method(tmp_path: Path, forget) -> None:
    path = method(tmp_path)
    path.write_text(path.read_text() + "\n\nHalves = Mine\n")
    assert type(registry.compressor(registry.add_file(str(path)))).__name__ == "Mine"


def test_two_paths_of_a_file_are_one_method(tmp_path: Path, forget) -> None:
    path = method(tmp_path)
    (tmp_path / "linked").symlink_to(tmp_path)
    (tmp_path / "other").mkdir()
    for other in (path, tmp_path / "other/../mine.py", tmp_path / "linked/mine.py"):
        assert registry.add_file(str(other)) == "mine"
    assert registry.compressors()["mine"].source == f"file {path}"
    (tmp_path / "other/mine.py").write_text(path.read_text())
    with pytest.raises(UsageError, match="rename the file"):
        registry.add_file(str(tmp_path / "other/mine.py"))


@pytest.mark.parametrize("code", ["sys.exit(0)", "os._exit(0)"])
def test_a_worker_process_that_exits_is_no_success(gcbench, tmp_path: Path, code: str) -> None:
    path = method(tmp_path, encode=code)
    words = [*RUN, "--compressor", path, "--results", tmp_path / "runs", "--engine", "spawn"]
    done = gcbench(*words, "--json")
    assert done.code == 1
    assert done.out == ""
    assert "worker " in done.err
    assert not list((tmp_path / "runs").glob("*/summary.json"))


def test_workers_refuse_a_file_that_was_edited_since_the_command_started(tmp_path: Path) -> None:
    """The first run of a grid edits the file, as its author may; the second run records the old."""
    edit = (
        "if os.environ['RANK'] == '0':\n"
        "            text = open(__file__).read()\n"
        "            open(__file__, 'w').write(text.replace('x.half()', 'x.bfloat16()'))"
    )
    path = method(tmp_path, encode=edit)
    words = [*RUN, "--compressor", path, "--results", tmp_path / "runs", "--engine", "spawn"]
    done = invoke(*words, "--seed", "0,1")
    assert done.code == 2
    assert "edited" in done.err
    (summary,) = (tmp_path / "runs").glob("*/summary.json")
    assert json.loads(summary.read_text())["seed"] == 0
    assert [*(tmp_path / "runs").iterdir()] == [summary.parent]


@pytest.mark.parametrize("engine", ["simulate", "spawn"])
def test_prints_of_a_plug_in_do_not_reach_the_json(gcbench, tmp_path: Path, engine: str) -> None:
    prints = 'print("from Python"); os.write(1, b"from C\\n"); os.system("echo from a child")'
    path = method(tmp_path, top=prints, encode=prints)
    words = [*RUN, "--compressor", path, "--results", tmp_path / "runs", "--engine", engine]
    done = gcbench(*words, "--json")
    assert json.loads(done.out)["compressor_name"] == "mine", done.err
    for text in ("from Python", "from C", "from a child"):
        assert text in done.err


def test_results_still_reach_a_pipe_and_a_string(gcbench) -> None:
    for one in (invoke("list", "tasks", "--json"), gcbench("list", "tasks", "--json")):
        assert any(row["name"] == "digits" for row in one.json)
    assert "digits" in gcbench("list", "tasks").out


def test_a_long_message_is_cut(tmp_path: Path) -> None:
    path = method(tmp_path, encode='raise ValueError("begin" + "x" * 10**6 + "end")')
    done = invoke(*RUN, "--compressor", path, "--results", tmp_path / "runs")
    assert done.code == 1
    assert "begin" in done.err
    assert max(map(len, done.err.splitlines())) < 5000
