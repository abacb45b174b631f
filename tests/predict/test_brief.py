"""The default output answers in 25 lines of 80 columns, answer first; --details prints the rest."""

from __future__ import annotations

import pytest
from commands import invoke

LINES, COLUMNS = 25, 80
BERT = ("--model", "bert-large", "--cluster", "a100x1-10g")
CHEAP = "bf16,efsignsgd,onebit,powersgd,randomk,signsgd,sparseloco,terngrad,topk"
"""Methods that are predicted quickly for large models."""


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (("predict",), "8 workers: "),
        (("predict", *BERT, "--compressor", CHEAP), "try "),
        (("predict", "--links", "--workers", "2,8,64"), "2 workers: "),
        (("advise",), "Do not compress"),
        (("advise", *BERT, "--compressor", CHEAP, "--workers", "32"), "try "),
        (("advise", *BERT, "--compressor", "dlion,randomk"), "Do not compress yet"),
    ],
)
def test_the_answer_comes_first_and_is_short(tmp_path, monkeypatch, words, answer):
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    where = ("--results", tmp_path, "--progress", "none")
    lines = invoke(*words, *where).out.splitlines()
    assert answer in lines[0]
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= COLUMNS
    detailed = invoke(*words, *where, "--details").out.splitlines()
    assert detailed[0] == lines[0]
    assert len(detailed) > 2 * LINES
