"""Ctrl-C in the first seconds: one line, exit code 130, and no process that waits for another."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest
from commands import end, invoke, members, start, wait_for

from gcbench import engines


def test_ctrl_c_is_one_line(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("gcbench.listing.info", interrupted)
    assert invoke("info") == (130, "", "gcbench: interrupted\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("verify", "none"), "gcbench: stopped by the user\n"),
        (
            ("bandwidth", "--compressor", "none", "--sizes", "4K"),
            "\nwhat was measured is kept; the same command goes on\ngcbench: stopped by the user\n",
        ),
    ],
)
def test_ctrl_c_while_processes_still_import(tmp_path, words, said):
    """The terminal tells all of them; a peer of one that dies then would wait for 30 seconds."""
    results = () if words[0] == "verify" else ("--results", tmp_path)
    process = start(*words, *results)
    wait_for(lambda: len(members(process.pid)) >= 4, process)  # with torch's resource tracker
    asked = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    done = end(process)
    assert (done.code, done.out, done.err) == (130, "", said)
    assert time.monotonic() - asked < 25
    wait_for(lambda: not members(process.pid))


def _mask() -> list[int]:
    return sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def _tell_mask_and_stay(pipe) -> None:
    pipe.send(_mask())
    time.sleep(60)


def test_processes_are_deaf_workers_and_end_with_the_block():
    kind = multiprocessing.get_context("spawn")
    here, there = kind.Pipe()
    process = kind.Process(target=_tell_mask_and_stay, args=(there,))
    before = _mask()
    with engines.signals_restored():
        with engines._deaf_workers():
            process.start()
            assert signal.getsignal(signal.SIGINT) is engines._end_workers
            assert _mask() == before == []
            assert here.poll(30)
            assert here.recv() == [signal.SIGINT]
        assert process.exitcode == -signal.SIGKILL
