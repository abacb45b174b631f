"""Ctrl-C in the first seconds: one line, exit code 130, and no process that waits for another."""

from __future__ import annotations

import os
import signal
import time

import pytest
from commands import end, invoke, members, start, wait_for


def test_ctrl_c_is_one_line(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("gcbench.report.listings.info", interrupted)
    assert invoke("info") == (130, "", "gcbench: interrupted\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("verify", "none", "--progress", "none"), "gcbench: stopped by the user\n"),
        (
            ("bandwidth", "--compressor", "none", "--sizes", "4K"),
            "\nmeasurements are saved; repeat the command to continue\n"
            "gcbench: stopped by the user\n",
        ),
    ],
)
def test_ctrl_c_while_processes_still_import(tmp_path, words, message):
    """The terminal tells all of them; a peer of one that dies then would wait for 30 seconds."""
    results = () if words[0] == "verify" else ("--results", tmp_path)
    process = start(*words, *results)
    wait_for(lambda: len(members(process.pid)) >= 3, process)
    asked = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    done = end(process)
    assert (done.code, done.out, done.err) == (130, "", message)
    assert time.monotonic() - asked < 25
    wait_for(lambda: not members(process.pid))
