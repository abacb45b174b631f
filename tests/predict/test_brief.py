"""The default output answers in 25 lines of 80 columns, answer first; --details prints the rest."""

from __future__ import annotations

import pytest
from commands import invoke

from gcbench.report import analysis

LINES, COLUMNS = 25, 80
BERT = ("--model", "bert-large", "--cluster", "a100x1-10g")
CHEAP = "bf16,efsignsgd,onebit,powersgd,randomk,signsgd,sparseloco,terngrad,topk"
"""Methods that are predicted quickly for large models."""


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (("predict",), "8 workers: "),
        (("predict", "--links", "--workers", "2,8,64"), "2 workers: "),
        (("advise", *BERT, "--compressor", CHEAP, "--workers", "32"), "Try "),
    ],
)
def test_the_answer_comes_first_and_is_short(tmp_path, monkeypatch, words, answer):
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    lines = invoke(*words, "--results", tmp_path, "--progress", "none").out.splitlines()
    assert answer in lines[0]
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= COLUMNS
    (folder,) = tmp_path.iterdir()
    detailed = analysis.render(analysis.load(folder), width=COLUMNS).splitlines()
    assert detailed[0] == lines[0]
    assert len(detailed) > 2 * LINES
