"""Ctrl-C in the first seconds: one line, exit code 130, and no process that waits for another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from commands import end, gcbench, invoke, members, start, wait_for

from gcbench.core.errors import Interrupted
from gcbench.training import launch


def test_ctrl_c_is_one_line(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("gcbench.report.listings.info", interrupted)
    assert invoke("info") == (130, "", "gcbench: interrupted\n")


@pytest.mark.parametrize(
    ("before", "after"), [("default_int_handler", "_end"), ("SIG_IGN", "SIG_IGN")]
)
def test_the_handler_is_set_before_anything_is_imported(before, after):
    """`gcbench.__main__` sets it when it is imported, except where Ctrl-C is ignored."""
    script = (
        "import _signal, sys; _signal.signal(2, _signal.{}); loaded = {{*sys.modules}}; "
        "from gcbench.__main__ import main; set_to = _signal.getsignal(2); "
        "print(getattr(set_to, '__name__', set_to == _signal.SIG_IGN), "
        "*({{*sys.modules}} - loaded))"
    )
    command = [sys.executable, "-c", script.format(before)]
    handler, *modules = subprocess.check_output(command, text=True).split()
    assert handler == (after if after == "_end" else "True")
    assert {*modules} == {"__future__", "gcbench", "gcbench._version", "gcbench.__main__"}


def test_an_interrupted_verification_is_one_line(monkeypatch):
    def interrupted(*words):
        raise Interrupted("stopped by the user")

    monkeypatch.setattr(launch, "in_processes", interrupted)
    done = invoke("verify", "none", "--progress", "none")
    assert done == (130, "", "gcbench: stopped by the user\n")


def test_ctrl_c_while_processes_still_import(tmp_path):
    """The terminal signals all of them; a peer of one that dies then would wait for 30 seconds."""
    words = ("bandwidth", "--compressor", "none", "--sizes", "4K", "--results", tmp_path)
    process = start(*words)
    wait_for(lambda: len(members(process.pid)) >= 3, process)
    asked = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    done = end(process)
    message = "\nmeasurements are saved; repeat the command to continue\n"
    assert done == (130, "", message + "gcbench: stopped by the user\n")
    assert time.monotonic() - asked < 25
    wait_for(lambda: not members(process.pid))


INTERRUPTING = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy._core.numeric" and "torch" in sys.modules:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
"""
"""A `sitecustomize` that interrupts its process when torch imports numpy."""


def test_ctrl_c_while_torch_imports_numpy_ends_the_command(tmp_path):
    """An exception raised there would be lost: torch goes on without numpy."""
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTING)
    done = gcbench("info", path=str(tmp_path))
    assert done == (130, "", "gcbench: interrupted\n")
